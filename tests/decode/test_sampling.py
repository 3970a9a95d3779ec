"""The noise generator against published vectors, and the sampler's distribution against softmax."""

from __future__ import annotations

import torch
from draftsmith.decode.sampling import NoiseWindow, Sampler, SamplingParams, gumbel_noise, philox


def test_philox_gives_the_published_vectors() -> None:
    """Known answers of Random123's kat_vectors for philox4x32-10: all zeros, all ones, digits of pi. Counter first, then key."""
    for counter, key, answer in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ):
        c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in (*counter, *key))
        assert tuple(int(word) for word in philox(c0, c1, k0, k1, c2, c3)) == answer


def test_a_window_of_noise_is_the_noise() -> None:
    """However rows advance, alike or each at its own pace, past the window's end or back for another request."""
    params = [SamplingParams(temperature=1.0, seed=3), SamplingParams(), SamplingParams(temperature=0.5, seed=9)]
    sampler = Sampler(params, "cpu")
    window = NoiseWindow(sampler, 10, positions=8)
    for first in ([4, 4, 4], [5, 5, 5], [6, 5, 9], [9, 9, 9], [10, 9, 9], [10, 12, 30], [2, 2, 2]):
        want, got = sampler.noise(torch.tensor(first), 3, 10), window.at(first, 3)
        assert want is not None and got is not None and torch.equal(want, got), first
    assert NoiseWindow(Sampler([SamplingParams()], "cpu"), 10).at([4], 3) is None
    small = NoiseWindow(sampler, 10, positions=8, limit=0).at([4, 4, 4], 3)  # no room: one step's noise at a time
    assert small is not None and small.shape == (3, 3, 10)


def test_noise_depends_on_seed_position_and_token_only() -> None:
    seeds, positions = torch.tensor([3, 2**40 + 3]), torch.tensor([[5, 6, 7], [6, 7, 8]])
    noise = gumbel_noise(seeds, positions, 10)
    assert torch.equal(noise[0, 1], gumbel_noise(seeds[:1], torch.tensor([[6]]), 10)[0, 0])
    assert torch.equal(noise[..., :7], gumbel_noise(seeds, positions, 7))
    assert not torch.equal(noise[0, 1], noise[1, 0])  # the seed's high word counts
    assert not torch.equal(noise[0, 0], noise[0, 1])


def test_the_sampler_draws_from_the_warped_distribution() -> None:
    """Chi-square over 20,000 positions at a fixed seed; 25 is beyond the 99.9th percentile of 6 degrees of freedom (22.5)."""
    draws = 20_000
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -9.0])
    sampler = Sampler([SamplingParams(temperature=0.7, top_k=7, seed=11)], "cpu")
    noise = sampler.noise(torch.tensor([0]), draws, 8)
    choice = sampler.scores(logits.expand(1, draws, 8), noise).argmax(-1)[0]
    expected = torch.cat([(logits[:7] / 0.7).softmax(-1), torch.zeros(1)]) * draws
    counts = torch.bincount(choice, minlength=8).float()
    assert counts[7] == 0
    assert float(((counts[:7] - expected[:7]) ** 2 / expected[:7]).sum()) < 25


def test_filters_keep_what_they_should() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(1, 1, 4)
    for settings, kept in (({"top_k": 2}, 2), ({"top_p": 0.79}, 2), ({"top_p": 0.81}, 3), ({"min_p": 0.29}, 3), ({"min_p": 0.31}, 2), ({}, 4)):
        warped = Sampler([SamplingParams(temperature=1.0, **settings)], "cpu").warp(logits)
        assert int(warped.isfinite().sum()) == kept, settings


def test_a_greedy_row_beside_a_random_one_has_no_noise() -> None:
    sampler = Sampler([SamplingParams(), SamplingParams(temperature=1.0)], "cpu")
    noise = sampler.noise(torch.tensor([4, 4]), 2, 16)
    assert noise is not None and not noise[0].any() and noise[1].all()
