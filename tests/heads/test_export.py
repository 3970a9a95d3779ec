"""Every format of every method: what is written passes its rules, a planted fault does not, and what is read back drafts the same."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.export import ENGINES, llamacpp
from draftsmith.heads.export.common import Source, TargetFacts, Tuning, widened
from draftsmith.heads.export.importing import import_drafter
from draftsmith.heads.export.table import TABLE
from draftsmith.heads.export.write import check_export, export, problems, read_tuning, source_of
from draftsmith.heads.head import Head
from draftsmith.heads.pard import Pard
from draftsmith.heads.registry import new_head, open_drafter
from draftsmith.heads.standalone import Standalone, early_exit
from draftsmith.heads.tuning import Tuning as Tuned
from draftsmith.heads.tuning import write_tuning
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from ..decode.sizes import SIZES

VOCAB = SIZES["vocab_size"]
CUT = 60
SETTINGS: dict[str, dict[str, Any]] = {"mlp_speculator": {"tie_weights": True}, "p_eagle": {"num_layers": 2}}
ALL = [(name, method) for name, engine in ENGINES.items() for method in engine.loaders]
REFUSED = [("speculators", "mtp"), ("tensorrt-llm", "mtp")]
WHOLE = [("sglang", "dspark")]  # takes no draft vocabulary
WIDENED = [("vllm", "eagle1"), ("vllm", "mtp"), ("sglang", "dflash"), ("llamacpp", "dflash"), ("transformers", "dflash"), ("transformers", "mtp")]
IMPORTED = [(name, method) for name, method in ALL if method in TABLE and (name, method) not in [*REFUSED, ("transformers", "mtp")]]


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**(SIZES | {"num_hidden_layers": 10})))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return Target(model.double(), None, "tiny")


def head_for(target: Target, method: str, format_name: str, seed: int = 0, **settings: Any) -> Head:
    """Random weights large enough that every tensor matters, and norms that are not one."""
    torch.manual_seed(seed)
    settings = {"draft_vocab_size": None if (format_name, method) in WHOLE else CUT} | SETTINGS.get(method, {}) | settings
    if method == "mtp" and format_name == "vllm":
        settings = {"raw_feature": True} | settings
    head = new_head(method, target, settings).to(torch.float64)
    ids = torch.randperm(VOCAB)[: head.sizes.draft_vocab_size]
    head.set_draft_vocabulary(ids, target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
    return head.eval()


def source_for(target: Target, method: str, format_name: str) -> Source:
    if method in TABLE:
        return source_of(head_for(target, method, format_name), {"license": "mit"}, target)
    draft = early_exit(target, [0, 3])
    if method == "pard":
        draft = Pard(draft.draft, 0, 4).bind(target)
    return source_of(draft, {"license": "mit"}, target)


def written(target: Target, format_name: str, method: str, folder: Path) -> Path:
    out = folder / "out"
    export(source_for(target, method, format_name), format_name, out)
    return out


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder whose path does not hold the name of a method: pytest's own does."""
    return Path(shutil.copytree(tmp_path, tmp_path.parent / f"t{abs(hash(tmp_path)) % 10**8}"))


@pytest.mark.parametrize(("format_name", "method"), [pair for pair in ALL if pair not in REFUSED])
def test_a_written_folder_passes_its_rules(target: Target, format_name: str, method: str, place: Path) -> None:
    source = dataclasses.replace(source_for(target, method, format_name), tuning=Tuning(3, ("tau 2.5",)))
    export(source, format_name, place / "out")
    assert problems(place / "out") == [] and not (place / "out.partial").exists()
    card = (place / "out" / "README.md").read_text()
    assert str(place / "out") in card and "tau 2.5" in card and card.startswith("---\nlicense: mit\nbase_model: tiny\n")
    assert ENGINES[format_name].loaders[method].rules
    contract = json.loads((place / "out" / "contract.json").read_text())
    assert contract["license"] == "mit" and contract["export"]["launch"] in card


def rounds(target: Target, head: Head | Standalone, depth: int = 3) -> list[Any]:
    prompts = [[5, 9, 33, 2, 71, 8], [7, 12]]
    return Engine(target, head.proposer(depth=depth)).generate(prompts, SamplingParams(), 12).rounds


def drafts(target: Target, head: Head) -> Tensor:
    """[P, 3] what it drafts after each place of a text: tokens of the whole chain, as rounds tell only the accepted ones."""
    text, found = torch.randint(3, VOCAB, (24,), generator=torch.Generator().manual_seed(1)).tolist(), []
    proposer = head.proposer(depth=1 if head.method == "mtp" else 3)
    propose = proposer.propose

    def recorded(*arguments: Any) -> Any:
        tree = propose(*arguments)
        found.append(tree.tokens_BN[:, 1:])
        return tree

    proposer.propose = recorded  # type: ignore[method-assign, assignment]
    for end in (2, 9, 17, 24):
        Engine(target, proposer).generate([text[:end]], SamplingParams(), 8)
    return torch.cat(found)


@pytest.mark.parametrize(("format_name", "method"), IMPORTED)
def test_a_round_trip_gives_the_same_drafts(target: Target, format_name: str, method: str, place: Path) -> None:
    head = head_for(target, method, format_name)
    export(source_of(head, {}, target), format_name, place / "out")
    back, contract = import_drafter(place / "out", target)
    assert type(back) is type(head) and back.taps == head.taps and contract["target"]["fingerprint"] == target.fingerprint()
    wanted = widened(head) if (format_name, method) in [*WIDENED, ("sglang", "eagle1")] else head
    assert torch.equal(drafts(target, back.double()), drafts(target, wanted))


def test_a_head_of_a_draft_vocabulary_keeps_its_best_token_when_filled_up(target: Target) -> None:
    source = source_of(head_for(target, "medusa", "vllm"), {}, target)
    assert source.head is not None
    rows, hidden = torch.randn(CUT, 8, dtype=torch.float64), torch.randn(500, 8, dtype=torch.float64)
    best = (hidden @ source.uncut(rows).T).argmax(-1)
    assert torch.equal(best, source.head.draft_ids[(hidden @ rows.T).argmax(-1)])


# Planted faults


def tensors_of(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    path = next(path for path in sorted(folder.glob("*.safetensors"), reverse=True))
    return path, load_file(path)


def edit(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        path, tensors = tensors_of(folder)
        change(tensors)
        save_file(tensors, path)

    return fault


def drop(name: str) -> Callable[[Path], None]:
    return edit(lambda tensors: tensors.pop(name))


def put(name: str, make: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[Path], None]:
    return edit(lambda tensors: tensors.update({name: make(tensors)}))


def configure(**keys: Any) -> Callable[[Path], None]:
    """None deletes the key; a dict is merged into what is there."""

    def fault(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        for key, value in keys.items():
            if value is None:
                del values[key]
            elif isinstance(value, dict) and isinstance(values[key], dict):
                values[key] = values[key] | value
            else:
                values[key] = value
        path.write_text(json.dumps(values))

    return fault


def renamed(folder: Path) -> None:
    (folder / "medusa_lm_head.safetensors").rename(folder / "model.safetensors")


def absolute(tensors: dict[str, Tensor]) -> Tensor:
    return tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def swapped(tensors: dict[str, Tensor]) -> Tensor:
    ids = absolute(tensors)
    ids[[0, 1]] = ids[[1, 0]]
    return ids - torch.arange(len(ids))


# (format, method, what is broken, what the check says), pitfall by pitfall
FAULTS: list[tuple[str, str, Callable[[Path], None], str]] = [
    # missing, unknown, misshapen, of another dtype, not finite
    ("vllm", "eagle3", drop("midlayer.hidden_norm.weight"), "hidden_norm.weight is missing"),
    ("vllm", "eagle3", drop("lm_head.weight"), "lm_head.weight is missing"),
    ("vllm", "eagle3", drop("d2t"), "d2t is missing"),
    ("vllm", "eagle3", put("layers.0.q.weight", lambda t: torch.zeros(1)), "not one that the engine knows"),
    ("vllm", "eagle1", put("layers.0.input_layernorm.weight", lambda t: torch.ones(32)), "not one that the engine knows"),
    ("vllm", "dflash", put("mask_hidden", lambda t: torch.zeros(1, 1, 160)), "not one that the engine knows"),
    ("vllm", "p_eagle", drop("mask_hidden"), "mask_hidden is missing"),
    ("vllm", "dflash", drop("layers.1.self_attn.k_norm.weight"), "k_norm.weight is missing"),
    ("vllm", "dspark", put("confidence_head.proj.weight", lambda t: torch.zeros(1, 32)), "wanted float"),
    ("vllm", "eagle3", put("fc.weight", lambda t: t["fc.weight"][:, :64].clone()), r"wanted float \[32, 96\], got float \[32, 64\]"),
    ("vllm", "eagle3", put("norm.weight", lambda t: t["norm.weight"] * torch.nan), "not finite"),
    ("speculators", "eagle3", drop("embed_tokens.weight"), "embed_tokens.weight is missing"),
    ("tgi", "medusa", drop("0.0.linear.bias"), "0.0.linear.bias is missing"),
    ("openvino", "eagle3", edit(lambda t: t.update({"layers.0.mlp.up_proj.weight": t.pop("midlayer.mlp.up_proj.weight")})), "midlayer.*is missing"),
    ("vllm", "mtp", drop("model.mtp_layers.0.hidden_layernorm.weight"), "hidden_layernorm.weight is missing"),
    # a path that tells vLLM another method
    ("vllm", "medusa", lambda folder: None, "path: wanted one without 'eagle3'"),
    ("vllm", "draft_model", lambda folder: None, "path: wanted one without 'eagle3'"),
    # layer indices, one engine's counting in another's place, before and after the final norm
    ("vllm", "eagle3", configure(eagle_aux_hidden_state_layer_ids=[1, 4, 6]), "eagle_aux_hidden_state_layer_ids: wanted"),
    ("vllm", "eagle3", configure(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5]}), "eagle_config.eagle_aux"),
    ("sglang", "eagle3", configure(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}), "wanted .1, 4, 6."),
    ("speculators", "dflash", configure(aux_hidden_state_layer_ids=[1, 2, 4, 6, 7]), "aux_hidden_state_layer_ids: wanted"),
    ("vllm", "dflash", configure(dflash_config={"target_layer_ids": [2, 4, 5, 6, 8]}), "target_layer_ids: wanted"),
    ("vllm", "dspark", configure(target_layer_ids=[2, 4, 5, 6, 8]), "target_layer_ids: wanted"),
    ("transformers", "dflash", configure(target_layer_ids=[2, 4, 5, 6, 8]), "target_layer_ids: wanted"),
    # d2t: absolute ids, order, dtype, there or not
    ("vllm", "eagle3", put("d2t", absolute), "absolute ids"),
    ("vllm", "eagle3", put("d2t", swapped), "ascending"),
    ("vllm", "eagle3", put("d2t", lambda t: t["d2t"].int()), "wanted int64"),
    ("vllm", "eagle3", put("t2d", lambda t: ~t["t2d"]), "marks"),
    ("openvino", "eagle3", drop("d2t"), "d2t is missing"),
    # biases
    ("vllm", "eagle1", configure(bias=True), "bias: wanted false"),
    ("vllm", "eagle1", configure(bias=None), "bias: wanted false, written out"),
    ("vllm", "eagle1", put("fc.bias", lambda t: torch.ones(32)), "not one that the engine knows"),
    ("sglang", "eagle1", drop("fc.bias"), "fc.bias is missing"),
    ("vllm", "medusa", configure(medusa_fc_bias=None), "medusa_fc_bias"),
    ("vllm", "eagle3", configure(attention_bias=True), "attention_bias: wanted false"),
    # norm_before_residual, whose default differs
    ("speculators", "eagle3", configure(norm_before_residual=None), "norm_before_residual: wanted it written out"),
    ("sglang", "eagle3", configure(norm_before_residual=True), "norm_before_residual: wanted False"),
    # rotary positions by old and new keys
    ("vllm", "eagle3", configure(rope_theta=None), "rope_theta: wanted it written out"),
    ("vllm", "eagle3", configure(rope_theta=5e5), "rope_theta: wanted 10000.0"),
    ("llamacpp", "eagle3", configure(rope_parameters={"rope_type": "llama3"}), "rope_type default"),
    ("vllm", "eagle3", configure(torch_dtype=None), "torch_dtype"),
    # positions, tied tables, vocabulary with padding rows, head_dim
    ("sglang", "eagle3", configure(max_position_embeddings=64), "max_position_embeddings: wanted at least"),
    ("sglang", "eagle3", configure(tie_word_embeddings=True), "tie_word_embeddings"),
    ("vllm", "eagle3", configure(vocab_size=90), "vocab_size: wanted the target's 97"),
    ("vllm", "draft_model", configure(vocab_size=90), "vocab_size: wanted the target's 97"),
    ("vllm", "eagle3", configure(head_dim=None), "head_dim: wanted it written out"),
    ("speculators", "eagle3", configure(draft_vocab_size=None), "draft_vocab_size"),
    # architectures and kinds
    ("sglang", "eagle3", configure(architectures=["LlamaForCausalLM"]), "architectures: wanted"),
    ("openvino", "eagle3", configure(model_type="qwen3"), "model_type: wanted llama"),
    ("tgi", "medusa", configure(architectures=["MedusaModel"]), "architectures: wanted no such key"),
    ("tgi", "medusa", renamed, "medusa_lm_head.safetensors is missing"),
    ("tgi", "mlp_speculator", configure(tie_weights=False), "tie_weights: wanted True"),
    ("tgi", "mlp_speculator", configure(top_k_tokens_per_head=[1]), "top_k_tokens_per_head"),
    ("speculators", "dflash", configure(sliding_window_non_causal=False), "sliding_window_non_causal: wanted True"),
    ("speculators", "dspark", configure(sample_from_anchor=False), "sample_from_anchor: wanted True"),
    ("speculators", "eagle3", configure(speculators_config={"verifier": {}}), "verifier.name_or_path"),
    ("speculators", "eagle3", configure(speculators_config={"proposal_methods": []}), "speculative_tokens"),
    ("vllm", "p_eagle", configure(mask_token_id=97), "mask_token_id: wanted"),
    ("vllm", "mtp", configure(tie_word_embeddings=True), "tie_word_embeddings: wanted False"),
    ("transformers", "mtp", configure(num_mtp_layers=2), "num_mtp_layers: wanted 1"),
    ("vllm", "mtp", lambda folder: (folder / "model.safetensors.index.json").unlink(), "wanted it in model.safetensors.index.json"),
]


@pytest.mark.parametrize(("format_name", "method", "fault", "said"), FAULTS)
def test_a_planted_fault_is_found(target: Target, format_name: str, method: str, fault: Callable[[Path], None], said: str, place: Path) -> None:
    out = written(target, format_name, method, place)
    fault(out)
    if said.startswith("path"):
        out = out.rename(place / "my-eagle3-tests")
    found = problems(out)
    assert any(re.search(said, sentence) for sentence in found), found


def test_a_launch_command_without_its_layers_is_found(target: Target, place: Path) -> None:
    for format_name in ("tensorrt-llm", "openvino"):
        out = written(target, format_name, "eagle3", place)
        path = out / "contract.json"
        path.write_text(path.read_text().replace("[1, 4, 6]", "[2, 5, 7]"))
        assert any("launch" in sentence for sentence in problems(out))


# Refusals


@pytest.mark.parametrize(
    ("format_name", "method", "settings", "said"),
    [
        ("sglang", "medusa", {}, "cannot load medusa drafters .it was removed there.; formats for it: vllm, tgi"),
        ("vllm", "hydra", {}, "cannot load hydra drafters .*formats for it: none"),
        ("vllm", "mlp_speculator", {}, "formats for it: tgi"),
        ("tensorrt-llm", "mtp", {}, "formats for it as it is: transformers"),
        ("vllm", "mtp", {"raw_feature": False}, "train with drafter.raw_feature=true; formats for it as it is: transformers"),
        ("transformers", "mtp", {"raw_feature": True}, "train with drafter.raw_feature=false; formats for it as it is: vllm"),
        ("vllm", "eagle3", {"taps": [0, 2]}, "engines capture nothing else"),
        ("llamacpp", "eagle3", {"taps": [2, 5]}, "wanted three taps"),
        (
            "llamacpp",
            "dflash",
            {"taps": [2, 10]},
            "the last layer's output.*below 10; formats for it as it is: vllm, speculators, sglang, trans",
        ),
        ("openvino", "eagle3", {"num_layers": 2}, "one decoder layer, got 2"),
        ("tensorrt-llm", "eagle3", {"norm_features": True}, "does not compute EAGLE-3.1's norms"),
        ("sglang", "dspark", {"draft_vocab_size": CUT}, "has no draft vocabulary"),
        ("tgi", "medusa", {"num_layers": 2}, "one block a head"),
        ("tgi", "mlp_speculator", {"tie_weights": False}, "tied weights only"),
    ],
)
def test_what_an_engine_does_not_load_or_compute_is_refused(
    target: Target, format_name: str, method: str, settings: dict[str, Any], said: str, place: Path
) -> None:
    with pytest.raises(UserError, match=said):
        export(source_of(head_for(target, method, format_name, **settings), {}, target), format_name, place / "out")
    assert not list(place.iterdir())


def test_small_targets_scaled_tables_and_other_layers(target: Target) -> None:
    facts, eagle3, mtp = TargetFacts.of(target), head_for(target, "eagle3", "vllm").sizes, head_for(target, "mtp", "vllm").sizes
    with pytest.raises(UserError, match="at least 10 layers, got 9"):
        check_export("eagle3", eagle3, dataclasses.replace(facts, num_layers=9), "openvino")
    with pytest.raises(UserError, match="more than 5 layers, got 5"):
        check_export("eagle3", dataclasses.replace(eagle3, taps=(1, 2, 3)), dataclasses.replace(facts, num_layers=5), "tensorrt-llm")
    with pytest.raises(UserError, match=r"scales its rows.*formats for it as it is: vllm, speculators"):
        check_export("eagle3", eagle3, dataclasses.replace(facts, scaled_embeddings=True), "sglang")
    for key, value in (("rms_norm_eps", 1e-3), ("intermediate_size", 64), ("rope_parameters", {"rope_type": "llama3"})):
        with pytest.raises(UserError, match="builds the head's layer by the target's"):
            check_export("mtp", mtp, dataclasses.replace(facts, layer=facts.layer | {key: value}), "vllm")
    with pytest.raises(UserError, match="targets like Llama and Qwen2 only, got gemma"):
        check_export("mtp", mtp, dataclasses.replace(facts, model_type="gemma"), "vllm")
    with pytest.raises(UserError, match=r"path does not hold 'dflash'"):
        check_export("medusa", head_for(target, "medusa", "vllm").sizes, facts, "vllm", Path("runs/dflash-or-not/medusa"))


def test_damaged_maps_are_refused(target: Target, place: Path) -> None:
    head = head_for(target, "eagle3", "vllm")
    head.d2t += torch.arange(CUT)  # absolute ids in place of offsets
    with pytest.raises(UserError, match="offsets"):
        export(source_of(head, {}, target), "vllm", place / "out")
    assert not (place / "out").exists()


def test_an_eagle1_head_with_a_bias_goes_where_it_is_computed(target: Target, place: Path) -> None:
    head = head_for(target, "eagle1", "sglang")
    made = type(head)(dataclasses.replace(head.sizes, fc_bias=True)).double().bind(target)  # type: ignore[call-arg]
    made.load_state_dict(head.state_dict() | {"fc.bias": torch.randn(32, dtype=torch.float64)})
    with pytest.raises(UserError, match="leaves out the bias of fc"):
        export(source_of(made, {}, target), "vllm", place / "out")
    export(source_of(made, {}, target), "sglang", place / "out")
    back, _ = import_drafter(place / "out", target)
    assert torch.equal(drafts(target, back.double()), drafts(target, widened(made)))


# Draft models


def test_a_draft_model_gets_the_targets_number_of_rows(target: Target, place: Path) -> None:
    torch.manual_seed(3)
    small = AutoModelForCausalLM.from_config(LlamaConfig(**(SIZES | {"vocab_size": 90, "num_hidden_layers": 2, "tie_word_embeddings": True})))
    draft = Target(small, None, "small")
    export(source_of(Standalone(draft).bind(target), {}, target), "vllm", place / "out")
    config = json.loads((place / "out" / "config.json").read_text())
    assert config["vocab_size"] == VOCAB and config["rope_theta"] == 10000.0 and draft.vocab_size == 90
    padded = AutoModelForCausalLM.from_pretrained(place / "out")
    ids = torch.randint(0, 90, (4, 16))
    with torch.no_grad():
        ours, theirs = small(ids).logits, padded(ids).logits
    assert torch.allclose(ours, theirs[..., :90], atol=1e-5) and int(theirs.argmax(-1).max()) < 90
    larger = Target(AutoModelForCausalLM.from_config(LlamaConfig(**(SIZES | {"vocab_size": 112, "num_hidden_layers": 2}))), None, "large")
    export(source_of(Standalone(larger).bind(target), {}, target), "vllm", place / "out")
    assert json.loads((place / "out" / "config.json").read_text())["vocab_size"] == VOCAB


def test_a_layer_skipping_draft_is_exported_as_a_model(target: Target, place: Path) -> None:
    draft = early_exit(target, [0, 3])
    export(source_of(draft, {}, target), "transformers", place / "out")
    back = AutoModelForCausalLM.from_pretrained(place / "out", dtype=torch.float64)
    assert rounds(target, draft) == rounds(target, Standalone(Target(back, None, "back")).bind(target))


def test_a_target_that_was_trained_along_is_written_beside_the_drafter(target: Target, place: Path) -> None:
    source = dataclasses.replace(source_for(target, "medusa", "vllm"), contract={"adapter": "adapter"})
    export(source, "vllm", place / "out")
    assert problems(place / "out") == [] and str(place / "out" / "target") in (place / "out" / "README.md").read_text()
    back = AutoModelForCausalLM.from_pretrained(place / "out" / "target", dtype=torch.float64)
    ids = torch.arange(3, 20).unsqueeze(0)
    assert torch.equal(back(ids).logits, target.model(ids).logits)


def test_nothing_but_an_older_export_is_replaced(target: Target, place: Path) -> None:
    source, out = source_for(target, "eagle3", "vllm"), place / "out"
    out.mkdir()
    for _ in range(2):  # into an empty folder, and over an export
        export(source, "vllm", out)
    shutil.copytree(out, place / "out.old")  # a replacement that was cut off before its end
    export(source, "vllm", out)
    assert out.is_dir() and not (place / "out.old").exists()
    (place / "drafter").mkdir()
    (place / "drafter" / "contract.json").write_text("{}")
    (place / "file").write_text("mine")
    for kept in (place, place / "drafter", place / "file"):
        with pytest.raises(UserError, match="wanted a new folder, an empty one or an older export"):
            export(source, "vllm", kept)
    assert (place / "file").read_text() == "mine" and (place / "drafter" / "contract.json").is_file()


def test_an_engine_that_drafts_one_token_is_asked_for_one(target: Target, place: Path) -> None:
    for format_name, method, tokens in (("vllm", "mtp", 1), ("transformers", "mtp", 1), ("transformers", "dflash", 7), ("vllm", "dflash", 5)):
        out = written(target, format_name, method, place)
        assert json.loads((out / "contract.json").read_text())["export"]["tokens"] == tokens
        assert f"Recommended draft tokens a round: {tokens}." in (out / "README.md").read_text()


def test_an_export_is_no_drafters_folder(target: Target, place: Path) -> None:
    with pytest.raises(UserError, match="got one exported for vllm; read it back with draftsmith import"):
        open_drafter(written(target, "vllm", "eagle3", place), target)


def test_what_is_no_model_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match="got prompt_lookup"):
        source_of(open_drafter("prompt_lookup", target)[0], {}, target)


def test_a_converter_that_fails_says_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, kept = tmp_path / llamacpp.SCRIPT, tmp_path / "kept"
    (tmp_path / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    script.write_text("import sys; print('first', file=sys.stderr); sys.exit('no such pre-tokenizer')")
    monkeypatch.setenv(llamacpp.FOLDER, str(tmp_path))
    with pytest.raises(UserError, match=r"failed .no such pre-tokenizer."):
        llamacpp.convert(tmp_path, None)
    script.write_text(f"import sys; open({str(kept)!r}, 'w').write(' '.join(sys.argv[1:]))")
    assert llamacpp.convert(tmp_path, "t") == "GGUF: drafter.gguf"
    with pytest.raises(FileNotFoundError, match="no-python"):
        llamacpp.convert(tmp_path, None, str(tmp_path / "no-python"))
    assert kept.read_text() == f"{tmp_path} --target-model-dir t --outfile {tmp_path / 'drafter.gguf'} --outtype bf16"
    monkeypatch.setenv(llamacpp.FOLDER, str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"wanted llama.cpp's folder, with convert_hf_to_gguf.py"):
        llamacpp.convert(tmp_path, None)


# What was measured


def test_measured_figures_come_from_tuning_or_the_report_of_the_run(tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    assert read_tuning(drafter) is None
    (tmp_path / "eval").mkdir()
    row = {"category": "all", "suite": "stdlib", "temperature": 0.0, "tau": 2.25, "acceptance_rate": 0.4}
    report = {"drafter": {"depth": 4, "nodes": 10, "tree": "dynamic"}, "results": [row, row | {"category": "json"}]}
    (tmp_path / "eval" / "report.json").write_text(json.dumps(report))
    tuning = read_tuning(drafter)
    assert tuning is not None and tuning.tokens == 4 and len(tuning.lines) == 1 and "tau 2.25, accepted 40.0%" in tuning.lines[0]
    about: dict[str, Any] = {"dtype": "float32", "target": {}, "confidence": {}, "measured": {}, "costs": [], "prompts": {}, "created": "now"}
    decode = {"tree": "chain", "depth": 6}
    write_tuning(drafter, Tuned(device="a CPU", decode=decode, num_speculative_tokens=6, acceptance={"0": [[0.5]]}, **about))
    tuning = read_tuning(drafter)
    assert tuning is not None and tuning.tokens == 6 and len(tuning.lines) == 3 and "a CPU" in tuning.lines[0] and "0.5" in tuning.lines[1]
    (drafter / "tuning.json").write_text("{")
    with pytest.raises(UserError, match="output of draftsmith tune"):
        read_tuning(drafter)


# Reading what others wrote


def test_public_layouts_are_read(target: Target, place: Path) -> None:
    """EAGLE's own files: pickles, embeddings and rotary tables inside, no list of layers."""
    head = head_for(target, "eagle3", "vllm")
    out = place / "out"
    export(source_of(head, {}, target), "vllm", out)
    path, tensors = tensors_of(out)
    tensors["embed_tokens.weight"] = target.embeddings(torch.arange(VOCAB)).bfloat16()
    path.unlink()
    torch.save(tensors, out / "pytorch_model.bin")
    keep = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "vocab_size",
        "draft_vocab_size",
    )
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], **{key: config[key] for key in keep}}))
    back, _ = import_drafter(out, target)
    assert back.taps == head.taps  # the reference's, k = 2, L / 2, L - 3
    assert torch.equal(drafts(target, back.double()), drafts(target, head))
    assert import_drafter(out, target, [1, 5, 7])[0].taps == (1, 5, 7)
    tensors["embed_tokens.weight"] = torch.randn(VOCAB, 32)
    torch.save(tensors, out / "pytorch_model.bin")
    with pytest.raises(UserError, match="the target's embeddings, got others"):
        import_drafter(out, target)


def rewritten(folder: Path, config: dict[str, Any], tensors: dict[str, Any], weights: str = "pytorch_model.bin") -> Path:
    """The folder as others publish it: these files and no more."""
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / weights)
    return folder


def test_eagle1_heads_of_the_first_repository_are_read(target: Target, place: Path) -> None:
    """A config without head_dim, rope_theta and bias; a pickle with embeddings, a bias that says nothing and rotary tables."""
    head = head_for(target, "eagle1", "sglang", draft_vocab_size=None)
    out = written_from(head, target, "sglang", place / "out")
    config, (_, tensors) = json.loads((out / "config.json").read_text()), tensors_of(out)
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "rms_norm_eps", "vocab_size")
    kept = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **{key: config[key] for key in keys}}
    more = {"embed_tokens.weight": target.embeddings(torch.arange(VOCAB)).half(), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    back, _ = import_drafter(rewritten(out, kept, tensors | more), target)
    assert torch.equal(drafts(target, back.double()), drafts(target, head))


def test_medusas_first_release_is_read(target: Target, place: Path) -> None:
    """Three keys of config, and one pickle with a prefix on each name."""
    head = head_for(target, "medusa", "tgi", draft_vocab_size=None)
    _, tensors = tensors_of(written_from(head, target, "tgi", place / "out"))
    config = {"medusa_num_heads": head.sizes.heads, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}  # type: ignore[attr-defined]
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    back, _ = import_drafter(rewritten(place / "out", config, prefixed, "medusa_lm_head.pt"), target)
    assert torch.equal(drafts(target, back.double()), drafts(target, head))


def written_from(head: Head, target: Target, format_name: str, folder: Path) -> Path:
    export(source_of(head, {}, target), format_name, folder)
    return folder


@pytest.mark.parametrize(
    ("format_name", "method", "fault", "said"),
    [
        ("sglang", "eagle1", configure(num_attention_heads=None), "wanted a config.json that tells num_attention_heads of the eagle1 head"),
        ("sglang", "eagle1", configure(intermediate_size="x"), "with the sizes of a eagle1 head, got one that cannot be used"),
        ("sglang", "eagle1", put("fc.bias", lambda t: torch.ones(3)), "fc.bias"),
        ("sglang", "eagle1", configure(num_hidden_layers=2), "of one layer, got 2"),
        ("sglang", "dflash", configure(dflash_config={"target_layer_ids": []}), "give --taps"),
        ("sglang", "dflash", configure(dflash_config={"mask_token_id": 97}), "drafter.mask_token_id: wanted 0 .. 96"),
        ("sglang", "dflash", configure(layer_types=["sliding_attention"] * 2), "full attention in all layers"),
        ("speculators", "eagle3", configure(norm_before_residual=None), "norm_before_residual written out"),
        ("speculators", "eagle3", configure(transformer_layer_config={"attention_bias": True}), "attention_bias false, got True"),
        ("speculators", "eagle3", configure(speculators_model_type="x", transformer_layer_config=7), "cannot be used"),
        ("speculators", "p_eagle", configure(mask_token_id=None), "wanted mask_token_id in config.json"),
        ("speculators", "dspark", configure(markov_head_type="gated"), "markov_head_type vanilla"),
        ("speculators", "dspark", drop("markov_head.markov_w2.weight"), "markov_w2.weight missing"),
        ("tgi", "medusa", drop("1.0.linear.weight"), "1.0.linear.weight missing"),
        ("tgi", "medusa", put("0.0.linear.weight", lambda t: torch.ones(16, 16)), r"0.0.linear.weight \[16, 16\], wanted \[32, 32\]"),
        ("tgi", "mlp_speculator", configure(scale_input=True), "without scale_input"),
    ],
)
def test_every_layout_is_read_whole_or_refused(
    target: Target, format_name: str, method: str, fault: Callable[[Path], None], said: str, place: Path
) -> None:
    out = written(target, format_name, method, place)
    fault(out)
    with pytest.raises(UserError, match=said):
        import_drafter(out, target)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda folder: (folder / "config.json").write_text("[1]") and None, "wanted a mapping in config.json, got a list"),
        (lambda folder: (rewritten(folder, {}, {"fc.weight": 3}, "medusa_lm_head.pt"), None)[1], "got fc.weight of type int"),
        (configure(norm_before_residual=True), "norm_before_residual false"),
        (configure(rope_parameters={"rope_type": "llama3"}), "plain rotary"),
        (configure(hidden_size=64), "hidden size 32"),
        (configure(vocab_size=128), "for another target"),
        (configure(attention_bias=True), "attention_bias"),
        (configure(fc_norm=True), "EAGLE-3.1"),
        (drop("midlayer.mlp.up_proj.weight"), "up_proj.weight missing"),
        (put("midlayer.self_attn.q_proj.bias", lambda t: torch.ones(32)), "q_proj.bias unknown"),
        (put("d2t", absolute), "d2t"),
        (lambda folder: (folder / "config.json").write_text("{") and None, "damaged"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"none") and None, "damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "got neither"),
        (lambda folder: (folder / "config.json").unlink(), "a folder without it"),
    ],
)
def test_what_our_heads_do_not_compute_is_not_read(target: Target, fault: Callable[[Path], None], said: str, place: Path) -> None:
    out = written(target, "vllm", "eagle3", place)
    fault(out)
    with pytest.raises(UserError, match=said):
        import_drafter(out, target)
