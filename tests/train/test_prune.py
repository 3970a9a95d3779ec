"""Cut-down copies: the layers that matter least go, and so do the least active widths; what cannot matter changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draftsmith import UserError
from draftsmith.decode.target import Target
from draftsmith.train.prune import block_influence, choose_layers, pruned
from draftsmith.train.templates import Sample
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

from ..decode.sizes import SIZES
from ..heads.tiny import random_ids

TEXTS = [Sample(ids, [(0, 16)]) for ids in random_ids(3, 16, seed=4).tolist()]


def model(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def logits(made: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = made(torch.tensor([ids for ids, _ in TEXTS])).logits
    return out


@pytest.mark.parametrize("prune_by", ["influence", "loss"])
def test_layers_that_do_nothing_are_left_out(prune_by: Any) -> None:
    """Two of four layers are made to add nothing: without them the model is the same."""
    whole = model(LlamaConfig(**SIZES))
    with torch.no_grad():
        for index in (0, 2):
            for part in (whole.model.layers[index].self_attn.o_proj, whole.model.layers[index].mlp.down_proj):
                part.weight.zero_()
    want = logits(whole)
    source = Target(whole, None, "whole")
    assert choose_layers(source, 2, TEXTS, prune_by) == [1, 3]
    part = pruned(source, {"num_layers": 2}, TEXTS, prune_by)
    assert part.config.num_hidden_layers == 2 and len(part.model.layers) == 2
    torch.testing.assert_close(logits(part), want, atol=1e-4, rtol=1e-4)
    theirs = {p.data_ptr() for p in whole.parameters()}
    assert not any(p.data_ptr() in theirs for p in part.parameters())  # a copy: training it leaves the target alone
    part.model.layers[0].mlp.down_proj.weight.data.zero_()
    assert not torch.equal(logits(part), want) and torch.equal(logits(whole), want)


def test_influence_is_one_less_the_cosine() -> None:
    whole = model(LlamaConfig(**SIZES))
    with torch.no_grad():
        states = [whole(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids, _ in TEXTS]
    want = []
    for layer in range(3):  # the last entry is after the final norm
        want.append(float(torch.cat([1 - torch.cosine_similarity(s[layer], s[layer + 1], dim=-1) for s in states], 1).mean()))
    assert block_influence(Target(whole, None, "whole"), TEXTS)[:3] == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("config", [LlamaConfig(**SIZES), Qwen2Config(**SIZES)], ids=["llama", "qwen2"])
def test_units_and_heads_that_are_silent_are_left_out(config: Any) -> None:
    """Half of the MLPs' units and one of two key heads are made silent: without them the model is the same. Biases too."""
    whole = model(config)
    with torch.no_grad():
        for index, layer in enumerate(whole.model.layers):
            layer.mlp.up_proj.weight[index % 2 :: 2].zero_()
            layer.self_attn.v_proj.weight[:8].zero_()  # the first key head, and with it the first two query heads
            if layer.self_attn.v_proj.bias is not None:
                layer.self_attn.v_proj.bias[:8].zero_()
    want = logits(whole)
    part = pruned(Target(whole, None, "whole"), {"intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1}, TEXTS, "influence")
    assert part.model.layers[0].self_attn.q_proj.weight.shape == (16, 32) and part.model.layers[3].mlp.gate_proj.weight.shape == (24, 32)
    torch.testing.assert_close(logits(part), want, atol=1e-4, rtol=1e-4)


def test_the_most_active_channels_are_kept_everywhere() -> None:
    """Activity by hand, from transformers' own hidden states; then one matrix of each kind."""
    whole = model(LlamaConfig(**SIZES))
    source = Target(whole, None, "whole")
    seen = torch.zeros(32)

    def listen(_: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        seen.add_(out.abs().sum((0, 1)))

    hooks = [norm.register_forward_hook(listen) for norm in norms_of(whole)]
    logits(whole)
    for hook in hooks:
        hook.remove()
    channels = sorted(sorted(range(32), key=lambda channel: -float(seen[channel]))[:16])
    part = pruned(source, {"hidden_size": 16}, TEXTS, "influence")
    assert part.config.hidden_size == 16 and part.config.head_dim == 8 and torch.isfinite(logits(part)).all()
    ours, theirs = part.model, whole.model
    torch.testing.assert_close(ours.embed_tokens.weight, theirs.embed_tokens.weight[:, channels])
    torch.testing.assert_close(part.lm_head.weight, whole.lm_head.weight[:, channels])
    torch.testing.assert_close(ours.norm.weight, theirs.norm.weight[channels])
    torch.testing.assert_close(ours.layers[1].self_attn.q_proj.weight, theirs.layers[1].self_attn.q_proj.weight[:, channels])
    torch.testing.assert_close(ours.layers[1].mlp.down_proj.weight, theirs.layers[1].mlp.down_proj.weight[channels])


def norms_of(whole: Any) -> list[torch.nn.Module]:
    return [norm for layer in whole.model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]


def test_sizes_that_cannot_be_had_are_refused() -> None:
    source = Target(model(LlamaConfig(**SIZES)), None, "whole")
    with pytest.raises(UserError, match=r"drafter\.num_layers: wanted at most the 4 of the model to start from, got 5"):
        pruned(source, {"num_layers": 5}, TEXTS, "loss")
    with pytest.raises(UserError, match=r"drafter\.num_heads: wanted a multiple of the 2 key heads, got 3"):
        pruned(source, {"num_heads": 3}, TEXTS, "loss")
    gpt2 = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=2, eos_token_id=1)
    with pytest.raises(UserError, match=r"drafter\.hidden_size: wanted null, as only layers of kind Llama"):
        pruned(Target(model(gpt2), None, "gpt2"), {"hidden_size": 16}, TEXTS, "influence")
