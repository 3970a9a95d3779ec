"""Tuning: the dynamic programme against brute force, acceptance by rank against a count by hand, the choice, and the command's file."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftsmith import UserError
from draftsmith.cli import app
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.trees import likeliest_paths
from draftsmith.eval import tune as tuning
from draftsmith.eval.drafting import decode_settings, make_proposer
from draftsmith.eval.stats import Interval
from draftsmith.eval.survey import Offer
from draftsmith.eval.tune import Candidate, Gain, TuneSettings, best_tree, choose, count_ranks, expected_tokens, explored_paths, lead, shares, words
from draftsmith.heads.registry import new_head, save_drafter
from draftsmith.heads.standalone import Standalone
from draftsmith.heads.tuning import Tuning, read_tuning, write_tuning
from draftsmith.recipes.schema import Decode
from typer.testing import CliRunner

from .tiny import suite, tiny


def every_tree(nodes: int, depths: int, ranks: int) -> set[frozenset[tuple[int, ...]]]:
    """All trees of so many draft nodes: grown from those of one fewer."""
    found = {frozenset[tuple[int, ...]]()}
    for _ in range(nodes):
        found = {
            tree | {(*parent, rank)}
            for tree in found
            for parent in [(), *tree]
            for rank in range(ranks)
            if len(parent) < depths and (*parent, rank) not in tree
        }
    return found


@pytest.mark.parametrize(("nodes", "depths", "ranks"), [(1, 1, 2), (3, 2, 3), (5, 3, 2), (6, 4, 2), (8, 8, 1), (8, 2, 3), (8, 3, 2)])
def test_the_dynamic_programme_is_as_good_as_the_best_of_all_trees(nodes: int, depths: int, ranks: int) -> None:
    generator = random.Random(nodes + 10 * depths + 100 * ranks)
    for _ in range(3):
        # Acceptances of one place exclude each other, and need not fall with the rank.
        acceptance = [[p / (1.1 * sum(row)) for p in row] for row in ([generator.random() for _ in range(ranks)] for _ in range(depths))]
        paths, tokens = best_tree(acceptance, nodes)
        brute = max(expected_tokens(acceptance, list(tree)) for count in range(1, nodes + 1) for tree in every_tree(count, depths, ranks))
        assert tokens == pytest.approx(brute) == pytest.approx(expected_tokens(acceptance, paths))
        assert len(paths) <= nodes and all(path[:-1] in {(), *paths} for path in paths)


def test_it_agrees_with_best_first_growth_on_larger_trees() -> None:
    generator = random.Random(1)
    acceptance = [[0.6 * 0.5**rank * (0.8 + 0.2 * generator.random()) for rank in range(6)] for _ in range(7)]
    for nodes in (16, 40, 63):
        assert best_tree(acceptance, nodes)[1] == pytest.approx(expected_tokens(acceptance, likeliest_paths(acceptance, nodes)))
    with pytest.raises(UserError, match="wanted nodes >= 1"):
        best_tree([[1.5]], 3)


def test_ranks_are_counted_where_they_are_judged() -> None:
    """A root with three children, the second of which has two; the token after the first level is its first child's, then another's."""
    paths = frozenset({(0,), (1,), (2,), (1, 0), (1, 1)})
    hit, missed = Offer(3, (1, 0)), Offer(5, (1,))
    leaf = Offer(4, (2,))  # the third child has no children to judge
    cut = Offer(1, (1,))  # the text ended there
    seen: list[list[int]] = []
    hits: list[list[int]] = []
    count_ranks([hit, missed, leaf, cut], paths, seen, hits)
    assert seen == [[4, 4, 4], [2, 2]] and hits == [[0, 3, 1], [1, 0]]
    assert shares(seen, hits) == [[0.1, 0.7, 0.3], [0.5, pytest.approx(1 / 6)]]


def test_explored_paths_favour_the_likeliest() -> None:
    paths = explored_paths(3, most=20)
    assert len(paths) <= 20 and [0, 0, 0] in paths and [1, 0, 0] in paths and [1, 1] in paths and [1, 2] not in paths
    known = {tuple(path) for path in paths}
    assert all(tuple(path[:-1]) in known or len(path) == 1 for path in paths)
    assert max(map(len, explored_paths(8, most=3))) == 8  # at least the chain


def candidate(kind: str, value: float, lo: float, measured: Interval | None = None) -> Candidate:
    gains = {0.0: Gain(3.0, 1.3, Interval(1.5, 1.4, 1.6)), 1.0: Gain(2.0, 1.0, measured or Interval(1.2, 1.1, 1.3))}
    return Candidate(kind, Decode(depth=3), [3], gains, 1.0, Interval(1.3, 1.2, 1.4), Interval(value, lo, value + 0.1))


def test_the_default_stays_unless_another_is_faster_beyond_the_noise() -> None:
    default = candidate("default", 1.0, 1.0)
    assert choose([default, candidate("chain", 1.2, 0.98)]) is default
    unsure = dataclasses.replace(candidate("chain", 1.2, 0.98), predicted=1.1)
    assert choose([default, unsure]) is default and choose([default, unsure], cautious=False) is unsure
    assert (
        choose([default, candidate("chain", 1.2, 0.98), dataclasses.replace(unsure, over_default=Interval(0.9, 0.8, 1.1))], cautious=False) is default
    )
    better, best = candidate("chain", 1.2, 1.05), candidate("static", 1.3, 1.1)
    assert choose([default, better, best]) is best


@pytest.mark.parametrize("ratio", [1.0, 1.2])
def test_the_rule_of_choice_errs_as_rarely_as_it_says(ratio: float) -> None:
    """Simulated: two drafts whose rounds differ from prompt to prompt, and times with a heavy tail, in which one has `ratio` times the speed."""
    generator, taken, repetitions = np.random.default_rng(0), 0, 400
    for repetition in range(repetitions):
        hardness = generator.uniform(0.7, 1.4, size=(16, 1))
        rounds = [np.maximum(1, np.round(20 * hardness * generator.normal(1, 0.1, size=(16, 2)) * share)) for share in (1.0, ratio)]
        disturbed = np.maximum(0, generator.standard_t(3, size=(2, 6)))  # what disturbs one disturbs the other, as they take turns
        times = [(10 + disturbed + np.abs(generator.normal(0, 0.3, size=(2, 6)))).tolist() for _ in range(2)]
        found = lead(rounds[0], rounds[1], times[0], times[1], resamples=400, seed=repetition)
        raced = [candidate("default", 1.0, 1.0), dataclasses.replace(candidate("other", 1.0, 1.0), over_default=found)]
        taken += choose(raced) is raced[1]
    assert taken / repetitions <= 0.04 if ratio == 1 else taken / repetitions >= 0.9


def test_a_lead_is_rounds_times_what_a_round_takes() -> None:
    rounds_a, rounds_b = np.array([[4.0, 6.0], [8.0, 2.0]]), np.array([[6.0, 6.0], [9.0, 9.0]])
    found = lead(rounds_a, rounds_b, [[2.0] * 3, [3.0] * 3], [[1.0] * 3, [4.0] * 3])
    assert found.value == pytest.approx((15 * 1 + 15 * 4) / (12 * 2 + 8 * 3)) and found.lo <= found.value <= found.hi
    one = lead(rounds_a, rounds_a, [[2.0, 9.0, 4.0]] * 2, [[2.0, 9.0, 4.0]] * 2)
    assert one == Interval(1.0, 1.0, 1.0)  # drawn together, so that what they have in common cancels


def test_it_is_said_where_speculation_does_not_pay() -> None:
    sure, lost, open_ = (candidate("default", 1.0, 1.0, m) for m in (Interval(1.2, 1.1, 1.3), Interval(0.9, 0.8, 0.98), Interval(1.0, 0.9, 1.1)))
    assert len(words([sure], sure, {t: sure for t in sure.gains}, 8)) == 1
    told = words([lost], lost, {t: lost for t in lost.gains}, 8)
    assert "a chain of 3, 1.50x (1.40-1.60) at T=0, 0.90x (0.80-0.98) at T=1" in told[0]
    assert told[1].startswith("at T=1 speculation does not pay on this machine: 0.90x (0.80-0.98)") and len(told) == 2
    assert "not certain that speculation pays" in words([open_], open_, {t: open_ for t in open_.gains}, 8)[1]
    other = candidate("chain", 1.2, 1.1)
    assert "1.20x (1.10-1.30) against a chain of 3, the default" in words([sure, other], other, {t: sure for t in sure.gains}, 8)[0]


def test_a_tuned_drafter_decodes_losslessly_by_what_was_found() -> None:
    """The target as its own draft."""
    target = tiny()
    twin = Standalone(tiny()).bind(target)
    settings = TuneSettings(temperatures=(0.0, 1.0), max_new_tokens=16, most_nodes=15, timed_prompts=2, deepest=4)
    found, raced, chosen = tuning.tune(target, twin, suite(4), settings)
    assert {c.kind for c in raced} >= {"default", "static"} and chosen in raced
    assert all(row[0][0] > 0.9 for row in found.acceptance.values())  # the best candidate is nearly always right
    assert found.confidence["greedy"][0] < 0.3  # greedily it is always right: no probability is too high
    assert found.num_speculative_tokens >= 1 and chosen.gains[0.0].tau == pytest.approx(15 / math.ceil(15 / (chosen.shape[0] + 1)), rel=0.2)
    prompts, params = [[5, 9, 33], [7]], [SamplingParams(temperature=1.0, seed=i) for i in range(2)]
    plain = Engine(target).generate(prompts, params, 16).tokens
    for c in raced:
        assert Engine(target, make_proposer(twin, c.decode, target, [5])).generate(prompts, params, 16).tokens == plain
    assert json.loads(json.dumps(dataclasses.asdict(found)))["measured"]["chosen"] == chosen.kind
    assert Decode(**found.decode) == chosen.decode


def test_the_folder_s_tuning_is_what_decoding_uses_unless_told_otherwise(tmp_path: Path) -> None:
    target = tiny()
    head = new_head("medusa", target, {})
    assert read_tuning(tmp_path) is None and read_tuning("prompt_lookup") is None
    paths = [[0], [1], [0, 0]]
    about: dict[str, Any] = {"device": "d", "dtype": "float64", "target": {}, "acceptance": {}, "confidence": {}, "measured": {}, "costs": []}
    made = Tuning(decode={"tree": "static", "depth": 2, "paths": paths}, num_speculative_tokens=3, prompts={}, created="now", **about)
    write_tuning(tmp_path, made)
    assert read_tuning(tmp_path) == made
    assert decode_settings(head, made) == Decode(tree="static", depth=2, paths=paths)
    assert decode_settings(head, made, depth=3) == Decode(tree="chain", depth=3)
    sharp = dataclasses.replace(made, confidence={"greedy": [0.4], "sampled": []})  # which no tree's shape depends on
    assert decode_settings(head, sharp, tree="dynamic", depth=2) == Decode(tree="dynamic", depth=2, greedy_temperatures=[0.4])
    with pytest.raises(UserError, match="wanted the keys of a recipe's section decode"):
        decode_settings(head, dataclasses.replace(made, decode={"bush": 1}))
    for text in ("{", '{"schema": "other"}', json.dumps({**dataclasses.asdict(made), "num_speculative_tokens": 0})):
        (tmp_path / "tuning.json").write_text(text)
        with pytest.raises(UserError, match="wanted the output of draftsmith tune"):
            read_tuning(tmp_path)


def test_the_command_writes_the_file_that_eval_uses(tmp_path: Path) -> None:
    from draftsmith.decode.target import Target
    from draftsmith.recipes.schema import TargetRef

    target = Target.load(TargetRef().location)
    contract = {"target": {"name": "builtin:quickstart", "fingerprint": target.fingerprint()}}
    save_drafter(new_head("medusa", target, {"heads": 2}), tmp_path / "d", contract)
    few = ["--num-prompts", "2", "--max-new-tokens", "6", "--most-nodes", "3", "--threads", "1"]
    done = CliRunner().invoke(app, ["tune", str(tmp_path / "d"), *few])
    assert done.exit_code == 0, done.output
    found = read_tuning(tmp_path / "d")
    assert found is not None and found.prompts["split"] == "dev" and "chosen" in done.output
    said = CliRunner().invoke(
        app, ["generate", str(tmp_path / "d"), "--prompt", "def f(", "--max-new-tokens", "6", "--tree", "dynamic", "--depth", "2"]
    )
    assert said.exit_code == 0 and "tau" in said.output
    for wrong, wanted in ((["--tree", "static"], "wanted chain, dynamic or cost_aware"), (["--nodes", "0"], "--nodes: wanted an integer >= 1")):
        refused = CliRunner().invoke(app, ["generate", str(tmp_path / "d"), "--prompt", "x", *wrong])
        assert isinstance(refused.exception, UserError) and wanted in str(refused.exception)
    bad = CliRunner().invoke(app, ["tune", "prompt_lookup", *few])
    assert isinstance(bad.exception, UserError) and "wanted a drafter's folder" in str(bad.exception)


def test_every_candidate_shape_is_told() -> None:
    shapes = [Candidate("x", decode, [], {}, 1.0).shape for decode in (Decode(depth=3), Decode(tree="static", paths=[[0], [1], [1, 0]]))]
    assert shapes == [(3, 3), (2, 3)]
