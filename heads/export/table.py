"""Every tensor of every method, once: its name here, its shape, its dtype. Engine layouts are renamings of these.

Exporters pick tensors by this table, the conformance check compares a written folder with it (with sizes that it reads from the engine's config.json,
not from ours), and `importing` reads folders of others by it.

Sizes: H hidden, F inner, A heads * head_dim, K kv heads * head_dim, W target's hidden, N taps, V draft vocabulary, T target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


class Spec(NamedTuple):
    """A tensor's shape, and its kind: float, int64 or bool."""

    shape: tuple[int, ...]
    kind: str = "float"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What shapes depend on; 0 where a method has no such thing. count: Medusa's or the MLP speculator's heads; rank: DSpark's."""

    hidden: int
    vocab: int
    target_vocab: int
    inner: int = 0
    query: int = 0
    key: int = 0
    head_dim: int = 0
    taps: int = 1
    layers: int = 1
    count: int = 0
    rank: int = 0
    fc_norm: bool = False
    fc_bias: bool = False
    tied: bool = False

    @classmethod
    def of_head(cls, config: Any) -> Sizes:
        """Those of one of our heads."""
        query, key = (getattr(config, name, 0) * getattr(config, "head_dim", 0) for name in ("num_heads", "num_kv_heads"))
        return cls(
            hidden=config.hidden_size,
            vocab=config.draft_vocab_size,
            target_vocab=config.target_vocab_size,
            inner=getattr(config, "intermediate_size", 0) or getattr(config, "inner_size", 0),
            query=query,
            key=key,
            head_dim=getattr(config, "head_dim", 0),
            taps=len(config.taps),
            layers=getattr(config, "num_layers", 1),
            count=getattr(config, "heads", 0),
            rank=getattr(config, "markov_rank", 0),
            fc_norm=getattr(config, "norm_features", False),
            fc_bias=getattr(config, "fc_bias", False),
            tied=getattr(config, "tie_weights", False),
        )


Rows = Iterator[tuple[str, Spec]]


def _layer(prefix: str, s: Sizes, reads: int, norms: tuple[str, ...] = ("input_layernorm",), head_norms: bool = False) -> Rows:
    """A Llama layer whose attention reads `reads` columns; head_norms: Qwen3's norms of queries and keys."""
    yield f"{prefix}.self_attn.q_proj.weight", Spec((s.query, reads))
    yield f"{prefix}.self_attn.k_proj.weight", Spec((s.key, reads))
    yield f"{prefix}.self_attn.v_proj.weight", Spec((s.key, reads))
    yield f"{prefix}.self_attn.o_proj.weight", Spec((s.hidden, s.query))
    if head_norms:
        yield f"{prefix}.self_attn.q_norm.weight", Spec((s.head_dim,))
        yield f"{prefix}.self_attn.k_norm.weight", Spec((s.head_dim,))
    yield f"{prefix}.mlp.gate_proj.weight", Spec((s.inner, s.hidden))
    yield f"{prefix}.mlp.up_proj.weight", Spec((s.inner, s.hidden))
    yield f"{prefix}.mlp.down_proj.weight", Spec((s.hidden, s.inner))
    for name in (*norms, "post_attention_layernorm"):
        yield f"{prefix}.{name}.weight", Spec((s.hidden,))


def _eagle1(s: Sizes) -> Rows:
    yield "fc.weight", Spec((s.hidden, 2 * s.hidden))
    if s.fc_bias:
        yield "fc.bias", Spec((s.hidden,))
    yield from _layer("layers.0", s, s.hidden, norms=())


def _eagle3(s: Sizes) -> Rows:
    yield "fc.weight", Spec((s.hidden, s.taps * s.hidden))
    if s.fc_norm:
        for index in range(s.taps):
            yield f"fc_norm.{index}.weight", Spec((s.hidden,))
    yield from _layer("midlayer", s, 2 * s.hidden, norms=("input_layernorm", "hidden_norm"))
    for index in range(1, s.layers):
        yield from _layer(f"layers.{index}", s, s.hidden)
    yield "norm.weight", Spec((s.hidden,))
    yield "lm_head.weight", Spec((s.vocab, s.hidden))


def _p_eagle(s: Sizes) -> Rows:
    yield from _eagle3(s)
    yield "mask_hidden", Spec((1, 1, s.taps * s.hidden))


def _dflash(s: Sizes) -> Rows:
    yield "fc.weight", Spec((s.hidden, s.taps * s.hidden))
    yield "hidden_norm.weight", Spec((s.hidden,))
    for index in range(s.layers):
        yield from _layer(f"layers.{index}", s, s.hidden, head_norms=True)
    yield "norm.weight", Spec((s.hidden,))


def _dspark(s: Sizes) -> Rows:
    yield from _dflash(s)
    yield "markov_head.markov_w1.weight", Spec((s.target_vocab, s.rank))
    yield "markov_head.markov_w2.weight", Spec((s.vocab, s.rank))
    yield "confidence_head.proj.weight", Spec((1, s.hidden + s.rank))
    yield "confidence_head.proj.bias", Spec((1,))


def _medusa(s: Sizes) -> Rows:
    for head in range(s.count):
        for layer in range(s.layers):
            yield f"blocks.{head}.layers.{layer}.linear.weight", Spec((s.hidden, s.hidden))
            yield f"blocks.{head}.layers.{layer}.linear.bias", Spec((s.hidden,))
        yield f"lm_heads.{head}.weight", Spec((s.vocab, s.hidden))


def _mlp_speculator(s: Sizes) -> Rows:
    own, projections = (1, min(2, s.count)) if s.tied else (s.count, s.count)
    for index in range(own):
        yield f"embeddings.{index}.weight", Spec((s.target_vocab, s.inner))
    for index in range(projections):
        yield f"proj.{index}.weight", Spec((s.inner, s.inner if index else s.hidden))
    for index in range(own):
        yield f"ln.{index}.weight", Spec((s.inner,))
        yield f"ln.{index}.bias", Spec((s.inner,))
        yield f"lm_heads.{index}.weight", Spec((s.vocab, s.inner))


def _mtp(s: Sizes) -> Rows:
    yield "enorm.weight", Spec((s.hidden,))
    yield "hnorm.weight", Spec((s.hidden,))
    yield "eh_proj.weight", Spec((s.hidden, 2 * s.hidden))
    yield from _layer("mtp_block", s, s.hidden)
    yield "norm.weight", Spec((s.hidden,))


TABLE: dict[str, Callable[[Sizes], Rows]] = {
    "dflash": _dflash,
    "dspark": _dspark,
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "mlp_speculator": _mlp_speculator,
    "mtp": _mtp,
    "p_eagle": _p_eagle,
}


def tensors(method: str, sizes: Sizes) -> dict[str, Spec]:
    """{our name: shape and kind} of a head's own tensors, without the draft vocabulary's maps."""
    return dict(TABLE[method](sizes))


def vocabulary_maps(sizes: Sizes) -> dict[str, Spec]:
    """d2t, offsets from draft to target ids, and t2d, which target ids have a draft id."""
    return {"d2t": Spec((sizes.vocab,), "int64"), "t2d": Spec((sizes.target_vocab,), "bool")}


Renaming = tuple[tuple[str, str], ...]  # (beginning of our name, what stands in its place), the first that fits


def renamed(name: str, renaming: Renaming) -> str:
    """Our name in an engine's layout."""
    return next((new + name[len(old) :] for old, new in renaming if name.startswith(old)), name)


SPECULATORS: Renaming = (("midlayer.", "layers.0."),)
MIMO: Renaming = (
    ("enorm.", "model.mtp_layers.0.token_layernorm."),
    ("hnorm.", "model.mtp_layers.0.hidden_layernorm."),
    ("eh_proj.", "model.mtp_layers.0.input_proj."),
    ("norm.", "model.mtp_layers.0.final_layernorm."),
    ("mtp_block.", "model.mtp_layers.0."),
)
MUSE: Renaming = (("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc."))
SPECULATOR: Renaming = (
    ("embeddings.", "speculator.emb."),
    ("lm_heads.", "speculator.head."),
    ("proj.", "speculator.proj."),
    ("ln.", "speculator.ln."),
)


def medusa_names(sizes: Sizes) -> dict[str, str]:
    """{our name: that of the first Medusa release}: a head is a list of blocks and, last, its output layer."""
    names = {}
    for head in range(sizes.count):
        for layer in range(sizes.layers):
            for part in ("weight", "bias"):
                names[f"blocks.{head}.layers.{layer}.linear.{part}"] = f"{head}.{layer}.linear.{part}"
        names[f"lm_heads.{head}.weight"] = f"{head}.{sizes.layers}.weight"
    return names


def hf_mtp(layer: int) -> Renaming:
    """Transformers' names: further decoder layers behind the target's."""
    prefix = f"model.layers.{layer}."
    return (
        ("enorm.", prefix + "enorm."),
        ("hnorm.", prefix + "hnorm."),
        ("eh_proj.", prefix + "eh_proj."),
        ("norm.", prefix + "post_norm."),
        ("mtp_block.", prefix),
    )
