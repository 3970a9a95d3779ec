"""Heads that start from a target's own MTP layer: tiny checkpoints in each family's layout, against that layout's forward pass written out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.proposer import Accepted
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.own_mtp import OwnMtp, OwnMtpProposer, own_mtp, refuse_settings
from draftsmith.heads.registry import load_drafter, save_drafter
from draftsmith.train.objectives.mtp import MtpObjective
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen2Config, Qwen3Config

from ..decode.sizes import SIZES
from .recurrent import CHAIN, PROMPTS, TREE
from .tiny import features, ragged, random_ids, whole

EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
SMALL = SIZES | {"num_hidden_layers": 2}
CONFIGS = {"deepseek": Glm4MoeConfig(**SMALL, **EXPERTS, n_group=1, topk_group=1), "qwen": Qwen3Config(**SMALL), "mimo": Qwen2Config(**SMALL)}
HIDDEN = SIZES["hidden_size"]


def checkpoint(layout: str, folder: Path) -> tuple[Target, dict[str, torch.Tensor]]:
    """(the target, the tensors of its checkpoint): a random model, and an MTP layer in the names of the family."""
    torch.manual_seed(3)
    longer = copy.deepcopy(CONFIGS[layout])
    longer.num_hidden_layers = 3  # its last layer becomes the MTP layer
    if getattr(longer, "layer_types", None):
        longer.layer_types = ["full_attention"] * 3
    model = AutoModelForCausalLM.from_config(longer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder / "longer")
    tensors = load_file(folder / "longer" / "model.safetensors")
    generator = torch.Generator().manual_seed(5)

    def norm() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(HIDDEN, generator=generator)

    projection = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / HIDDEN**0.5
    if layout == "deepseek":
        p = "model.layers.2."
        extra = {"enorm.weight": norm(), "hnorm.weight": norm(), "eh_proj.weight": projection, "shared_head.norm.weight": norm()}
        extra |= {"embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(), "shared_head.head.weight": tensors["lm_head.weight"].clone()}
        tensors |= {p + name: tensor for name, tensor in extra.items()}
    else:
        p = {"qwen": "mtp.layers.0.", "mimo": "model.mtp_layers.0."}[layout]
        tensors = {name.replace("model.layers.2.", p): tensor for name, tensor in tensors.items()}
        names: tuple[str, ...]
        if layout == "qwen":
            names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.fc")
        else:
            names = tuple(p + part for part in ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj"))
        tensors |= {f"{name}.weight": norm() for name in names[:3]} | {f"{names[3]}.weight": projection}
    config = CONFIGS[layout]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Target(loaded, None, "tiny"), tensors


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def written_out(
    layout: str, target: Target, t: dict[str, torch.Tensor], embedded: torch.Tensor, fed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the next step is fed, logits) [n, ...] of pairs [n, H]: the family's own order and norms; the layer is the third of a transformers model
    that is given its input in place of embeddings."""
    eps = float(target.config.rms_norm_eps)
    if layout == "deepseek":
        p, names = "model.layers.2.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    elif layout == "qwen":
        p, names = "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    else:
        p, names = "model.mtp_layers.0.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    enorm, hnorm, projection, final = (t[f"{p}{name}.weight"] for name in names)
    parts = [rms(embedded, enorm, eps), rms(fed, hnorm, eps)]
    x = torch.cat(parts[::-1] if layout == "mimo" else parts, dim=-1) @ projection.t()
    kept: list[torch.Tensor] = []
    model = _layer_alone(layout, t)
    hook = model.model.layers[0].register_forward_hook(lambda m, a, out: kept.append(out[0] if isinstance(out, tuple) else out))
    model.model(inputs_embeds=x[None], use_cache=False)  # transformers makes masks and positions itself
    hook.remove()
    raw = kept[0][0]
    normed = rms(raw, final, eps)
    return raw if layout == "deepseek" else normed, normed @ t["lm_head.weight"].t()


def _layer_alone(layout: str, t: dict[str, torch.Tensor]) -> Any:
    p = {"deepseek": "model.layers.2.", "qwen": "mtp.layers.0.", "mimo": "model.mtp_layers.0."}[layout]
    other = {"enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"}
    config = copy.deepcopy(CONFIGS[layout])
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"]
    if layout == "deepseek":
        config.first_k_dense_replace = 0
    weights = {"model.layers.0." + k.removeprefix(p): v for k, v in t.items() if k.startswith(p) and k.removeprefix(p).split(".")[0] not in other}
    weights |= {
        "model.embed_tokens.weight": t["model.embed_tokens.weight"],
        "lm_head.weight": t["lm_head.weight"],
        "model.norm.weight": torch.ones(HIDDEN),
    }
    return type(AutoModelForCausalLM.from_config(config)).from_pretrained(None, config=config, state_dict=weights)


@pytest.fixture(scope="module", params=list(CONFIGS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Target, dict[str, torch.Tensor], OwnMtp, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    target, tensors = checkpoint(request.param, folder)
    return request.param, target, tensors, own_mtp(target, str(folder), draft_vocab_size=None).eval(), folder


Made = tuple[str, Target, dict[str, torch.Tensor], OwnMtp, Path]


@torch.no_grad()
def test_a_new_head_gives_what_the_target_s_layer_does(made: Made) -> None:
    """Its training pass, step by step, against the layout written out; a step is fed what the one before gave."""
    layout, target, tensors, head, _ = made
    batch = whole(random_ids(1, 14))
    ids, taps = batch.ids_BT, features(target, head, batch)
    hidden = target.model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    last: list[torch.Tensor] = []
    hook = target.layers[-1].register_forward_hook(lambda m, a, out: last.append(out[0] if isinstance(out, tuple) else out))
    target.model.model(input_ids=ids, use_cache=False)
    hook.remove()
    want_fed = last[0][0] if layout == "mimo" else hidden[-1][0]  # before the final norm, or after it
    torch.testing.assert_close(taps[0], want_fed)
    states = head.training_outputs(taps, ids, batch.position_BT, batch.document_BT, 3)
    for pairs in (1, 5, 11):
        fed = want_fed[:pairs]
        for k in range(3):
            embedded = target.model.get_input_embeddings()(ids[0, 1 : pairs + k + 1])
            state, logits = written_out(layout, target, tensors, embedded, fed)
            torch.testing.assert_close(states[k][0, pairs - 1], state[-1], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(head.logits(states[k])[0, pairs - 1], logits[-1], atol=1e-4, rtol=1e-4)
            fed = torch.cat([fed, state[-1:]])


@torch.no_grad()
def test_the_training_pass_equals_drafting_with_the_cache(made: Made) -> None:
    _, target, _, head, _ = made
    batch = whole(random_ids(1, 20))
    ids, taps = batch.ids_BT, features(target, head, batch)
    outputs = head.training_outputs(taps, ids, batch.position_BT, batch.document_BT, 3)
    for pairs in (1, 9):
        proposer = head.proposer(depth=3)
        assert isinstance(proposer, OwnMtpProposer)
        told = proposer.memory(1, 40)
        proposer.reset(1, 40)
        accepted = Accepted(ids[:, :pairs], ids[:, 1 : pairs + 1], taps[:, :pairs], torch.zeros(1, dtype=torch.int64), torch.tensor([pairs]))
        proposer.observe(accepted)
        assert proposer._cache is not None and told == sum(tensor.nbytes for tensor in proposer._cache.tensors()) and proposer.memory(1, 40) == 0
        state = proposer._hidden_BH.unsqueeze(1)
        for k in range(3):
            torch.testing.assert_close(state[:, 0], outputs[k][:, pairs - 1], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(proposer._logits(state)[:, 0], head.logits(outputs[k][:, pairs - 1]), atol=1e-4, rtol=1e-4)
            slot = torch.tensor([[pairs + k]])
            state = proposer._run(state, ids[:, pairs + k + 1 : pairs + k + 2], slot, slot, (torch.arange(pairs + k + 1) <= slot)[None])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_is_token_identical_and_the_head_can_be_trained_and_saved(made: Made, temperature: float, tmp_path: Path) -> None:
    _, target, _, head, _ = made
    params = [SamplingParams(temperature=temperature, seed=n) for n in range(len(PROMPTS))]
    plain = Engine(target).generate(PROMPTS, params, 12).tokens
    for how in (CHAIN, TREE):
        assert Engine(target, head.proposer(**how)).generate(PROMPTS, params, 12).tokens == plain
    batch = ragged()
    target.set_taps(head.taps)
    head.zero_grad()
    loss, _ = MtpObjective(chunk_tokens=9)(head, head, target, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    unused = {name for name, p in head.named_parameters() if p.grad is None or not bool(p.grad.abs().max())}
    assert not unused, unused
    save_drafter(head, tmp_path / "d", {"target": {"name": "tiny", "fingerprint": target.fingerprint()}})
    loaded, _ = load_drafter(tmp_path / "d", target)
    assert isinstance(loaded, OwnMtp) and loaded.config == head.config
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in head.state_dict().items())
    assert (
        Engine(target, loaded.proposer(**CHAIN)).generate(PROMPTS, params, 12).rounds
        == Engine(target, head.proposer(**CHAIN)).generate(PROMPTS, params, 12).rounds
    )


def test_what_cannot_be_taken_is_refused(made: Made, tmp_path: Path) -> None:
    layout, target, tensors, _, _ = made
    own = {name for name in tensors if name.startswith(("mtp.", "model.mtp_layers.", "model.layers.2."))}

    def says(kept: dict[str, torch.Tensor]) -> str:
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(UserError) as error:
            own_mtp(target, str(tmp_path))
        return str(error.value)

    assert says({n: t for n, t in tensors.items() if n not in own}).startswith(
        "drafter.init: wanted a target whose checkpoint has an MTP layer (model."
    )
    some = next(n for n in own if n.endswith("self_attn.q_proj.weight"))
    assert "got one with other tensors (model.layers.0.self_attn.q_proj.weight)" in says({n: t for n, t in tensors.items() if n != some})
    assert "got one with other tensors" in says(tensors | {some.replace("q_proj", "r_proj"): tensors[some].clone()})
    assert "got one in 8 bits" in says(tensors | {some + "_scale_inv": torch.ones(1)})
    if layout == "deepseek":
        changed = {"model.layers.2.embed_tokens.weight": tensors["model.embed_tokens.weight"] + 1}
        assert "got model.layers.2.embed_tokens.weight of its own" in says(tensors | changed)
    with pytest.raises(UserError, match=r"drafter\.num_heads: wanted null, as the target's own MTP layer has its sizes, got 4"):
        refuse_settings({"num_heads": 4, "draft_vocab_size": 9})
