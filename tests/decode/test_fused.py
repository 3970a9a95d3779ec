"""Fused layers against the families' own, in values; what they share, and what they leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.engine import Engine
from draftsmith.decode.free.lookup import PromptLookup
from draftsmith.decode.fused import fuse
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.target import Target
from draftsmith.heads.standalone import early_exit
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama with biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=7),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
}


def model(name: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(CONFIGS[name]()).to(dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # biases and norms too
    return made.eval()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_layers_give_what_the_familys_own_give(name: str, dtype: torch.dtype) -> None:
    """A whole pass of 9 and of 100 tokens (few and many take different ways); norms are float32 in the families themselves, whatever the dtype."""
    own = model(name, dtype)
    target = Target(model(name, dtype), None, name)
    assert target._fused is not None
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 0.15}[dtype]
    for length in (9, 100):
        ids = torch.randint(97, (2, length), generator=torch.Generator().manual_seed(length))
        position = torch.arange(length).expand(2, -1)
        with torch.no_grad():
            want = own.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        got = target.features(ids, position, torch.zeros_like(ids)).hidden_BNH
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=tolerance * float(want.abs().max()), rtol=0)


def test_weights_are_held_once_and_generate_keeps_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(model("qwen2", torch.float32), None, "qwen2")
    plain = model("qwen2", torch.float32)
    for (name, ours), (_, theirs) in zip(target.model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name  # laid out anew, with the same values
    layer = target.layers[1].get_submodule("self_attn")
    storages = {layer.get_submodule(f"{p}_proj").get_parameter("weight").untyped_storage().data_ptr() for p in "qkv"}
    assert len(storages) == 1
    ids = torch.tensor([[5, 9, 33, 2]])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    calls: list[int] = []
    assert target._fused is not None
    monkeypatch.setattr(target._fused, "tables", lambda *_: calls.append(1))
    assert torch.equal(target.model.generate(ids, **options), plain.generate(ids, **options)) and not calls


def test_other_models_are_left_alone() -> None:
    gemma = AutoModelForCausalLM.from_config(Gemma3TextConfig(**SIZES, layer_types=["full_attention"] * 3))
    assert Target(gemma, None, "gemma3")._fused is None
    assert fuse(list(model("llama", torch.float32).model.layers), "eager") is None
    adapted = model("llama", torch.float32)
    adapted.model.layers[1].mlp.up_proj = torch.nn.Sequential(adapted.model.layers[1].mlp.up_proj)
    assert fuse(list(adapted.model.layers[:1]), "sdpa") is not None and fuse(list(adapted.model.layers), "sdpa") is None


torchs_own_warnings = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's compiler still uses it itself


@torchs_own_warnings
def test_compiled_layers_generate_the_same_tokens() -> None:
    """Plain and speculative decoding, of one node and of many. The compiler takes about 20 CPU seconds on a machine's first run, 4 after that."""
    plain, compiled = (Target(model("qwen3", torch.float64), None, "qwen3") for _ in range(2))
    prompts = [[5, 9, 33, 2, 71, 8], [7, 4], [44, 3, 3, 3, 3, 18]]
    params = [SamplingParams(temperature=temperature, seed=row) for row, temperature in enumerate((0.0, 1.0, 0.7))]
    want = Engine(plain).generate(prompts, params, 10).tokens
    before = counters["stats"]["unique_graphs"]
    compiled.compile()
    assert Engine(compiled).generate(prompts, params, 10).tokens == want
    assert Engine(compiled, PromptLookup(3)).generate(prompts, params, 10).tokens == want
    assert Engine(compiled, early_exit(compiled, [0]).proposer(depth=2)).generate(prompts, params, 10).tokens == want
    # Two functions, first for the prefill's rows and then for any number, not for each layer or length; and the trial of compile() itself.
    assert 2 <= counters["stats"]["unique_graphs"] - before <= 5


@torchs_own_warnings
def test_what_cannot_be_compiled_is_one_clear_line() -> None:
    gemma = AutoModelForCausalLM.from_config(Gemma3TextConfig(**SIZES, layer_types=["full_attention"] * 3))
    with pytest.raises(UserError, match=r"target\.compile: wanted a model of the Llama, Mistral, Qwen2 or Qwen3 kind.*got gemma"):
        Target(gemma, None, "gemma").compile()
    torch.compiler.reset()  # what was compiled before in this process would be taken
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler"), "fx_graph_cache": False}), pytest.raises(UserError) as refused:
        Target(model("llama", torch.float32), None, "llama").compile()
    assert str(refused.value).startswith("target.compile: wanted a C++ compiler, such as gcc") and "\n" not in str(refused.value)
