"""Recipes: one YAML file describes one training, checked key by key before anything heavy starts.

    recipe = load_recipe("quickstart/eagle3", ["train.steps=50", "eval.temperatures=[0.0]"])
    print(to_yaml(recipe))

The schema is the dataclasses below: a field's annotation holds its type and its bounds, `__post_init__` checks both, and a section that was built
in Python is checked just as one that was read from a file. Every error is one line that names the dotted key.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from .. import UserError
from .dialect import dump_yaml, parse_yaml
from .sections import Bound, Items, Pattern, Section, as_mapping, build, describe, misfit, override

BUILTIN = "builtin:"  # the prefix of a target that comes with the package
LAUNCH = "accelerate/"  # the folder of configurations for `accelerate launch`, which are no recipes

Text = Annotated[str, Pattern(r"[^\x00]+", "that is not empty")]
RunName = Annotated[str, Pattern(r"[A-Za-z0-9][A-Za-z0-9._-]*", "of letters, digits, '.', '_' and '-' (it names the run's folder)")]
Size = Annotated[int, Bound(">=", 1)]
Count = Annotated[int, Bound(">=", 0)]
Seed = Annotated[int, Bound(">=", 0), Bound("<", 2**31)]
Positive = Annotated[float, Bound(">", 0)]
NonNegative = Annotated[float, Bound(">=", 0)]
Share = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
Beta = Annotated[float, Bound(">=", 0), Bound("<", 1)]


def _check_micro_batch(batch_size: int, micro_batch_size: int | None) -> None:
    if micro_batch_size is not None and batch_size % micro_batch_size:
        raise misfit("train.micro_batch_size", f"a divisor of train.batch_size ({batch_size})", micro_batch_size)


@dataclass(frozen=True, kw_only=True)
class TargetRef(Section):
    """The language model that the drafter is for."""

    section = "target"
    path: Text = BUILTIN + "quickstart"  # "builtin:NAME", a folder, or a name on the Hugging Face hub
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"  # auto: what suits the device
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attn_implementation: Text | None = None  # null: what transformers picks
    revision: Text | None = None  # a branch, tag or commit on the hub
    template: dict[str, Any] = field(default_factory=dict)  # what its chat template is given beside the messages, such as {enable_thinking: false}
    compile: bool = False  # torch.compile for the layers; the first requests wait for the compiler
    shard: bool = False  # while training, every process keeps a part of each layer, and all gather it while it runs

    @property
    def location(self) -> str:
        """What `from_pretrained` takes: a folder or a hub name, "builtin:NAME" resolved to its folder in the installed package.

        Raises UserError if no such target comes with the package.
        """
        if not self.path.startswith(BUILTIN):
            return self.path
        name = self.path.removeprefix(BUILTIN)
        known = {entry.name: entry / "target" for entry in _root().iterdir() if (entry / "target" / "config.json").is_file()}
        if name not in known:
            names = ", ".join(BUILTIN + found for found in sorted(known)) or "this installation has none; install draftsmith again"
            raise misfit("target.path", f"a target that comes with draftsmith ({names})", self.path)
        return str(known[name])


@dataclass(frozen=True, kw_only=True)
class Drafter(Section):
    """The drafter's method and size; null sizes follow the target."""

    section = "drafter"
    method: Text = "eagle3"
    init: Text | None = None  # a drafter to continue from; mtp, draft_model: or "target", its own MTP layer, or cut down; draft_model: or a causal LM
    taps: Annotated[list[Count], Items(distinct=True)] | None = None  # k indexes Hugging Face's hidden_states: 0 embeddings, k after layer k
    draft_vocab_size: Size | None = None  # null: the whole vocabulary
    num_layers: Size | None = None  # decoder layers
    hidden_size: Size | None = None  # draft_model
    norm_features: bool | None = None  # EAGLE-3.1: norms on the tapped features, and on what the next step is fed
    intermediate_size: Size | None = None
    num_heads: Size | None = None
    num_kv_heads: Size | None = None
    block_size: Size | None = None  # positions of a parallel pass: dflash, dspark, p_eagle
    mask_token_id: Count | None = None  # token that stands for what is to be drafted; null: a mask or padding token
    markov_rank: Size | None = None  # of the bias by the token before: dspark
    heads: Size | None = None  # tokens that can be drafted, each by layers of its own: medusa, hydra, mlp_speculator
    prefix_attention: bool | None = None  # Hydra++: a decoder layer before the heads
    tie_weights: bool | None = None  # mlp_speculator: one set of layers for all steps
    raw_feature: bool | None = None  # mtp: as MiMo's layers, which vLLM computes: the feature before the final norm
    prune_by: Literal["influence", "loss"] | None = None  # how the layers are chosen that a cut-down draft_model keeps; null: influence
    calibration_prompts: Size | None = None  # sequences that show what it can do without; null: 16
    lora_rank: Size | None = None  # draft_model: train adapters, which are merged when it is saved; null: its weights
    lora_alpha: Size | None = None  # their scale is alpha / rank; null: alpha is twice the rank
    predictor: bool | None = None  # draft_model: train a predictor of acceptance too, for decode.length=predicted; null: none

    @property
    def settings(self) -> dict[str, Any]:
        """What the method is asked for; None where the target decides. Which of them a method knows is the method's affair."""
        return {name: value for name, value in vars(self).items() if name not in ("method", "init")}

    def check_together(self) -> None:
        if self.num_heads is not None and self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise misfit("drafter.num_kv_heads", f"a divisor of drafter.num_heads ({self.num_heads})", self.num_kv_heads)


@dataclass(frozen=True, kw_only=True)
class Adapter(Section):
    """A LoRA adapter of the target that is trained together with the drafter (Medusa-2): the target changes. Without a rank it does not."""

    section = "adapter"
    rank: Size | None = None  # null: the target stays as it is
    alpha: Positive | None = None  # null: twice the rank
    modules: Annotated[list[Text], Items(distinct=True)] | None = None  # null: all linear layers but the output layer
    lr_share: Positive = 0.25  # of train.lr: the drafter learns at 4 times the adapter's rate
    quantise: Literal["no", "nf4"] = "no"  # the original's weights while training (QLoRA)


@dataclass(frozen=True, kw_only=True)
class Source(Section):
    """One of several sources of training data; see `train/sources.py` for what a path may be."""

    section = "data.sources"
    path: Text  # "stdlib"; a .jsonl, .parquet or text file; a folder of text or code; a name on the Hugging Face hub
    weight: Positive = 1.0  # its share of data.num_prompts is in proportion
    config: Text | None = None  # of a data set on the hub that has several
    split: Text = "train"  # of a data set on the hub
    streaming: bool = False  # read a data set on the hub as it is downloaded, and no more of it than needed


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """The prompts, and whose responses the drafter learns from."""

    section = "data"
    source: Text | None = None  # one source: what data.sources takes as a path; null: stdlib, or those of data.sources
    sources: Annotated[list[Source], Items(0)] = field(default_factory=list)  # several, mixed by their weights
    num_prompts: Size | None = 1024  # conversations or texts; null: all that there are
    prompt_chars: Size = 240  # characters of a stdlib prompt, or of one that a plain text is cut into
    deduplicate: Literal["none", "exact", "near"] = "exact"  # near: what shares most of its runs of five words, too
    near_similarity: Annotated[float, Bound(">=", 0.5), Bound("<=", 1)] = 0.8  # how much is most (Jaccard)
    held_out: Share = 0.0  # share of the prompts, by their hash, that is never trained on, but kept in data/held_out.jsonl of the run
    exclude: Annotated[list[Text], Items(0, distinct=True)] = field(default_factory=list)  # prompt sets not to be trained on, besides eval.suite
    exclude_words: Size = 13  # words in a row, shared with a prompt not to be trained on, that exclude a conversation
    responses: Literal["target", "given"] = "target"
    response_tokens: Size = 160  # the most that the target generates
    temperatures: Annotated[list[NonNegative], Items()] = field(default_factory=lambda: [0.0, 1.0])  # used in turn; a repeat weighs more
    truncated: Literal["keep", "drop"] = "keep"  # answers that response_tokens cut off
    generation_batch: Size = 32
    server: Text | None = None  # an OpenAI-compatible server of the target that answers in its place, such as http://localhost:8000/v1
    server_model: Text | None = None  # the target's name there; null: target.path
    server_concurrency: Size = 32  # requests at once
    server_retries: Count = 6  # of a request that failed, after 0.5, 1, 2, 4 .. seconds
    server_timeout: Positive = 600.0  # seconds that a request may take
    train_on: Literal["responses", "all"] = "responses"  # all: the prompts' tokens too, as the target would continue them
    sequence_length: Size = 512  # tokens of prompt and response together
    too_long: Literal["cut", "drop", "split"] = "cut"  # split: into pieces of sequence_length tokens
    min_tokens: Size = 1  # conversations and texts with fewer tokens to learn are left out
    batching: Literal["shuffled", "bucketed", "packed"] = "shuffled"  # bucketed: of like lengths; packed: several in a row of sequence_length
    seed: Seed = 0

    @property
    def parts(self) -> list[Source]:
        """The sources, with null resolved."""
        return list(self.sources) or [Source(path=self.source or "stdlib")]

    def check_together(self) -> None:
        if self.responses == "target" and self.response_tokens >= self.sequence_length:
            wanted = f"fewer than data.sequence_length ({self.sequence_length}), which has to hold the prompt too"
            raise misfit("data.response_tokens", wanted, self.response_tokens)
        if self.sources and self.source is not None:
            raise misfit("data.source", "null, as data.sources is given", self.source)
        if self.server is not None and self.responses == "given":
            raise misfit("data.server", "null, as data.responses is given", self.server)


@dataclass(frozen=True, kw_only=True)
class Features(Section):
    """Where training gets the target's features from, and what a store of them holds."""

    section = "features"
    source: Literal["online", "ring", "store"] = "online"  # online: the target in the loop; ring, store: see train/ring.py, train/store.py
    folder: Text | None = None  # of the store, or of a ring on disk; null: features/ in the run's folder
    dtype: Literal["target", "float32", "bfloat16", "float16", "float8"] = "target"  # of what is kept; float8: e4m3, a scale a token and layer
    logits: Literal["hidden", "topk"] = "hidden"  # hidden: formed anew from the last hidden states; topk: the likeliest tokens' are kept
    topk: Size = 64
    shard_mib: Positive = 256.0
    ring_gib: Positive = 8.0  # the most that a ring holds
    ring_on: Literal["memory", "disk"] = "memory"
    measure: Literal["target", "loss"] = "target"  # of a training from a store or shards; target: is loaded to measure; loss: chooses instead


@dataclass(frozen=True, kw_only=True)
class Objective(Section):
    """The training objective; null is its own default."""

    section = "objective"
    name: Text | None = None  # null: the method's own
    steps: Size | None = None  # unrolled steps of the training-time test
    step_decay: Annotated[float, Bound(">", 0), Bound("<=", 1)] | None = None  # weight of step i: step_decay ** i
    normaliser: Literal["per_sequence", "per_token"] | None = None
    chunk_tokens: Size | None = None  # tokens whose logits are held at once
    loss: Literal["ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "mixed", "topk_mass", "match"] | None = None  # see train/losses.py
    feature_noise: NonNegative | None = None  # uniform noise on the features while training: eagle1, hass
    feature_weight: NonNegative | None = None  # of the regression of features: eagle1, hass
    token_weight: Positive | None = None  # of the cross-entropy beside it: eagle1, hass
    topk: Size | None = None  # likeliest tokens of the distillation term: hass
    topk_weight: NonNegative | None = None  # of that term: hass
    anchors: Size | None = None  # blocks a sequence and step: dflash, dspark, p_eagle
    labels: Literal["soft", "hard"] | None = None  # the target's distributions, or the text's tokens: medusa(2), hydra, mlp_speculator, draft models
    heads_weight: Positive | None = None  # of the heads' loss beside the target's own: medusa2
    text_weight: NonNegative | None = None  # of the target's own loss on the text: medusa2
    original_weight: NonNegative | None = None  # of the divergence of the tuned target from the original: medusa2
    beta: Annotated[float, Bound(">", 0), Bound("<", 1)] | None = None  # weight of the target in the loss jsd: draft models, and below
    loss_decay: NonNegative | None = None  # of the loss lk_lambda
    ce_weight: NonNegative | None = None  # of the loss mixed
    tv_weight: NonNegative | None = None  # of the loss mixed
    keep_ratio: Annotated[float, Bound(">", 0), Bound("<=", 1)] | None = None  # pard: places that each further mask keeps of those before
    keep_min: Share | None = None  # pard: but at least this share of all

    @property
    def settings(self) -> dict[str, Any]:
        """What the objective is asked for; None stands for its own default."""
        return {name: value for name, value in vars(self).items() if name != "name"}


@dataclass(frozen=True, kw_only=True)
class Train(Section):
    """The training loop of a drafter."""

    section = "train"
    steps: Size = 1000
    batch_size: Size = 8  # sequences a step, over all processes
    micro_batch_size: Size | None = None  # sequences a forward, per process; null: the process's whole share
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the layers' matrices; the rest by AdamW
    lr: Positive = 1e-3
    betas: Annotated[list[Beta], Items(2, 2)] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: NonNegative = 0.0
    warmup_ratio: Share = 0.05
    lr_schedule: Literal["cosine", "constant", "linear"] = "cosine"
    clip_norm: Positive = 0.5
    on_policy: Share = 0.0  # share of the steps whose responses the draft itself has written: draft models
    on_policy_refresh: Size = 50  # steps for which it writes at a time
    on_policy_temperature: NonNegative = 1.0
    keep_features_gib: NonNegative = 0.0  # memory per process for the target's features of sequences seen, which later epochs use again
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    seed: Seed = 0
    log_every: Size = 10
    save_every: Size | None = None  # steps between checkpoints to go on from; null: as eval.every
    keep_last: Size = 1  # checkpoints kept for resuming, the best one not counted
    compile: bool = False  # the drafter's forward pass by torch.compile
    activation_checkpointing: bool = False  # what layers computed is computed again in the backward pass: less memory, more time
    trackers: Annotated[list[Literal["wandb", "tensorboard"]], Items(0, distinct=True)] = field(default_factory=list)
    max_hours: Positive | None = None  # stop in good order after so long; the learning rate falls in time for it

    def check_together(self) -> None:
        _check_micro_batch(self.batch_size, self.micro_batch_size)


@dataclass(frozen=True, kw_only=True)
class Decode(Section):
    """The draft tree that is measured while training and in the final evaluation."""

    section = "decode"
    # cost_aware: dynamic, as large as it pays by latencies measured at the start. static: of one shape, `paths`.
    tree: Literal["dynamic", "chain", "cost_aware", "static"] = "chain"
    depth: Size = 5
    topk: Size = 4  # children a node of a dynamic tree
    nodes: Size | None = None  # draft nodes a round, root not counted; null: `depth` for a chain, 16 (or depth, if more) for a dynamic tree

    # decides a chain's depth round by round; null: always `depth`
    length: Literal["additive", "acceptance", "confidence", "entropy", "expected", "predicted"] | None = None
    threshold: Annotated[float, Bound(">", 0), Bound("<", 1)] | None = None  # of acceptance, below which confidence, entropy and predicted stop
    paths: list[Annotated[list[Count], Items()]] | None = None  # of a static tree: [0, 2] is the third-best child of the best; depth and nodes follow

    # by depth, what the draft's scores are divided by where they rank a tree's nodes or end a chain, at temperature 0 and above; null: 1
    greedy_temperatures: Annotated[list[Positive], Items()] | None = None
    sampled_temperatures: Annotated[list[Positive], Items()] | None = None

    @property
    def num_nodes(self) -> int:
        """Draft nodes a round, root not counted, with null resolved."""
        if self.paths is not None:
            return len(self.paths)
        if self.nodes is not None:
            return self.nodes
        return self.depth if self.tree == "chain" else max(16, self.depth)

    def check_together(self) -> None:
        if (self.tree == "static") != (self.paths is not None):
            raise misfit("decode.paths", "a list of paths with decode.tree static, else null", self.paths)
        if self.paths is not None:
            known = {tuple(path) for path in self.paths}
            if not known or len(known) < len(self.paths):
                raise misfit("decode.paths", "at least one path, all different", self.paths)
            for path in known:
                if len(path) > 1 and path[:-1] not in known:
                    raise misfit("decode.paths", "the parent of every path", list(path), f"add {list(path[:-1])}")
            if self.length is not None:
                raise misfit("decode.length", "null, as decode.tree is static", self.length)
            return
        if self.tree == "chain" and self.num_nodes != self.depth:
            raise misfit("decode.nodes", f"null, or decode.depth ({self.depth}) as the tree is a chain", self.nodes)
        if self.num_nodes < self.depth:
            raise misfit("decode.nodes", f"at least decode.depth ({self.depth}), which is else never reached", self.nodes)
        if self.length is not None and self.tree != "chain":
            raise misfit("decode.length", f"null, as decode.tree is {self.tree}", self.length)
        if self.threshold is not None and self.length not in ("confidence", "entropy", "predicted"):
            raise misfit("decode.threshold", "null, as decode.length is none of confidence, entropy, predicted", self.threshold)


@dataclass(frozen=True, kw_only=True)
class Eval(Section):
    """Measured decoding: on a few development prompts while training, on the suite at the end."""

    section = "eval"
    every: Size = 200  # train steps between measured decodings
    dev_prompts: Size = 16
    dev_tokens: Annotated[int, Bound(">=", 2)] = 64  # the first comes from the prompt's own forward pass, and tells nothing of drafts
    suite: Text = "stdlib"  # "stdlib", or a .jsonl of prompts
    num_prompts: Size = 64
    max_new_tokens: Size = 128
    prompt_chars: Size = 240
    temperatures: Annotated[list[NonNegative], Items(distinct=True)] = field(default_factory=lambda: [0.0, 1.0])
    default_sampling: bool = False  # a row more, sampled as the model's own generation_config says
    batch: Annotated[list[Size], Items(distinct=True)] = field(default_factory=lambda: [1])
    rule: Text = "shared_noise"  # how drafts are judged: one of decode/verify.py's, valid for the drafts that the drafter makes
    timed_prompts: Size | None = None  # prompts whose speed is measured, at batch 1; the others go through the gate in batches; null: all
    gate_batch: Size = 8  # prompts a batch of those that are not timed
    threads: Size | None = None  # of the CPU; null: measured, the fastest is taken
    eager: bool = True  # time transformers' own generate too
    assisted: bool = True  # time transformers' assisted generation too, if the drafter is a causal LM
    floor: bool = True  # measure prompt lookup beside it: what costs nothing
    others: Annotated[list[Text], Items(0, distinct=True)] = field(default_factory=list)  # drafters measured beside it: [free], say
    costs: bool = True  # fit the cost model: what limits the speed-up
    tune: bool = False  # choose the draft for this machine on the development prompts before the final evaluation, which then ignores decode
    bootstrap: Size = 2000  # resamples behind the intervals
    seed: Seed = 0

    def check_together(self) -> None:
        if self.tune and self.rule not in ("shared_noise", "greedy"):
            raise misfit("eval.tune", f"false, as drafts are chosen for the rule shared_noise, and eval.rule is {self.rule}", self.tune)


@dataclass(frozen=True, kw_only=True)
class Export(Section):
    """The engine formats that a finished training writes."""

    section = "export"
    formats: Annotated[list[Text], Items(0, distinct=True)] = field(default_factory=lambda: ["vllm"])


@dataclass(frozen=True, kw_only=True)
class TargetShape(Section):
    """A Llama-shaped causal language model with tied embeddings."""

    section = "model"
    vocab_size: Annotated[int, Bound(">=", 261)]  # 256 bytes and 5 special tokens
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Annotated[int, Bound(">=", 2)]
    max_position_embeddings: Size

    def check_together(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            wanted = f"a divisor of model.num_attention_heads ({self.num_attention_heads})"
            raise misfit("model.num_key_value_heads", wanted, self.num_key_value_heads)
        if self.head_dim % 2:
            raise misfit("model.head_dim", "an even number, as rotary positions turn pairs", self.head_dim)


@dataclass(frozen=True, kw_only=True)
class TargetTrain(Section):
    """The training loop of a small target."""

    section = "train"
    steps: Size
    batch_size: Size  # sequences a step, over all processes
    micro_batch_size: Size  # sequences a forward, per process
    sequence_length: Size
    lr: Positive
    weight_decay: NonNegative
    warmup_steps: Count
    decay_share: Share  # the share of the steps over which the learning rate falls
    eval_every: Size
    mtp_weight: NonNegative = 0.0  # weight of a multi-token prediction loss that trains the features; 0: none
    layer_drop: Share = 0.0  # stochastic depth: the last layer is left out with this probability, earlier ones less
    mixed_precision: Literal["no", "bf16"] = "no"
    corpus: Literal["stdlib", "installed"] = "stdlib"  # Python's own source files; installed: those of installed packages too
    corpus_mib: Positive | None = None  # the most of the packages' text, drawn by the files' hashes; null: all
    max_hours: Positive | None = None  # stop in good order after so long; the learning rate falls in time for it
    seed: Seed = 0

    def check_together(self) -> None:
        _check_micro_batch(self.batch_size, self.micro_batch_size)
        if self.corpus_mib is not None and self.corpus == "stdlib":
            raise misfit("train.corpus_mib", "null, as train.corpus is stdlib", self.corpus_mib)


@dataclass(frozen=True, kw_only=True)
class _Recipe(Section):
    """What every recipe has."""

    name: RunName
    description: str = ""
    out: Text | None = None  # the run's folder; null: runs/<name>

    @property
    def run_folder(self) -> Path:
        """Where the run writes, with null resolved."""
        return Path("runs", self.name) if self.out is None else Path(self.out)


@dataclass(frozen=True, kw_only=True)
class DrafterRecipe(_Recipe):
    """Train, measure and export a drafter."""

    kind: Literal["drafter"] = "drafter"
    target: TargetRef = field(default_factory=TargetRef)
    drafter: Drafter = field(default_factory=Drafter)
    adapter: Adapter = field(default_factory=Adapter)
    data: Data = field(default_factory=Data)
    features: Features = field(default_factory=Features)
    objective: Objective = field(default_factory=Objective)
    train: Train = field(default_factory=Train)
    decode: Decode = field(default_factory=Decode)
    eval: Eval = field(default_factory=Eval)
    export: Export = field(default_factory=Export)

    @property
    def features_folder(self) -> Path:
        """Where the store or the ring is, with null resolved."""
        return self.run_folder / "features" if self.features.folder is None else Path(self.features.folder)

    @property
    def data_folder(self) -> Path:
        """Where the target's responses are kept: beside the features that were made of them, so that a store is all that a training needs."""
        return self.features_folder if self.features.source == "store" else self.run_folder


@dataclass(frozen=True, kw_only=True)
class TargetRecipe(_Recipe):
    """Train a small target from scratch."""

    kind: Literal["target"] = "target"
    model: TargetShape
    train: TargetTrain

    def check_together(self) -> None:
        if self.train.sequence_length > self.model.max_position_embeddings:
            wanted = f"at most model.max_position_embeddings ({self.model.max_position_embeddings})"
            raise misfit("train.sequence_length", wanted, self.train.sequence_length)


KINDS: dict[str, type[DrafterRecipe] | type[TargetRecipe]] = {"drafter": DrafterRecipe, "target": TargetRecipe}


# Reading and writing


@dataclass(frozen=True, kw_only=True)
class RecipeInfo:
    """A recipe that comes with the package; `method` and `target` are None for a target's. memory: as its comments say, None if they do not."""

    name: str
    kind: str
    description: str
    method: str | None
    target: str | None
    memory: str | None


def load_recipe(path_or_name: str, overrides: Sequence[str] = ()) -> DrafterRecipe | TargetRecipe:
    """Read a recipe by the name of one that comes with the package ("quickstart/eagle3"), else by the path of a YAML file.

    `overrides` are "a.b=value", the value in YAML; a later one wins. Raises UserError if there is no such recipe, or if it does not fit the schema.
    """
    return parse_recipe(parse_yaml(_read(path_or_name), path_or_name), overrides)


def parse_recipe(mapping: Any, overrides: Sequence[str] = ()) -> DrafterRecipe | TargetRecipe:
    """A recipe from nested mappings; `mapping` is left as it is. Raises UserError as `load_recipe` does."""
    values = as_mapping("recipe", mapping)
    kind = values.get("kind", "drafter")
    if not isinstance(kind, str) or kind not in KINDS:
        raise misfit("kind", describe(Literal["drafter", "target"]), kind)
    for setting in overrides:
        override(setting, KINDS[kind], values)
    return build(KINDS[kind], values)


def to_yaml(recipe: DrafterRecipe | TargetRecipe) -> str:
    """The resolved recipe as YAML, every key written out; `load_recipe` reads it back to an equal recipe."""
    values = dataclasses.asdict(recipe)
    order = ["kind", *(name for name in values if name != "kind")]
    return dump_yaml({name: values[name] for name in order})


def list_recipes() -> list[RecipeInfo]:
    """The recipes that come with the package, in the order of their names."""
    infos = []
    for name, file in sorted(_builtin_files().items()):
        text = file.read_text(encoding="utf-8")
        recipe = parse_recipe(parse_yaml(text, name))
        method, target = (recipe.drafter.method, recipe.target.path) if isinstance(recipe, DrafterRecipe) else (None, None)
        memory = re.search(r"^# Memory: ([\d.]+ GiB)", text, re.MULTILINE)
        infos.append(
            RecipeInfo(name=name, kind=recipe.kind, description=recipe.description, method=method, target=target, memory=memory and memory.group(1))
        )
    return infos


def read_recipe_text(name: str) -> str:
    """The YAML of a recipe or launch configuration that comes with the package, comments and all. Raises UserError naming the nearest."""
    found = _builtin_files() | launch_files()
    if name not in found:
        raise _no_recipe("the name of a recipe that comes with draftsmith", name, found)
    return found[name].read_text(encoding="utf-8")


def _read(path_or_name: str) -> str:
    found = _builtin_files()
    if path_or_name in found:
        return found[path_or_name].read_text(encoding="utf-8")
    path = Path(path_or_name)
    if not path.is_file():
        raise _no_recipe("a YAML file, or the name of a recipe that comes with draftsmith", path_or_name, found)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path_or_name}: wanted a text file in UTF-8, got byte {error.start} that is not; save it as UTF-8") from error


def _no_recipe(wanted: str, got: str, known: Mapping[str, object]) -> UserError:
    nearest = difflib.get_close_matches(got, known, n=1, cutoff=0.0)
    assert nearest, "the package has no recipes: it was built without its data"
    return misfit("recipe", wanted, got, f"did you mean {nearest[0]}? (all: draftsmith recipes list)")


def _root() -> Traversable:
    assert __package__
    return files(__package__)


def _builtin_files() -> dict[str, Traversable]:
    """The package's YAML files by recipe name: the path below recipes/, without its suffix."""

    def walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
        for entry in folder.iterdir():
            if entry.is_dir():
                yield from walk(entry, f"{prefix}{entry.name}/")
            elif entry.name.endswith(".yaml"):
                yield prefix + entry.name.removesuffix(".yaml"), entry

    return {name: file for name, file in walk(_root(), "") if not name.startswith(LAUNCH)}


def launch_files() -> dict[str, Traversable]:
    """The configurations for `accelerate launch` by name, such as "accelerate/fsdp2"."""
    entries = (_root() / LAUNCH.rstrip("/")).iterdir()
    return {LAUNCH + entry.name.removesuffix(".yaml"): entry for entry in entries if entry.name.endswith(".yaml")}
