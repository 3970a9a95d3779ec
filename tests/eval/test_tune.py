"""Tuning: the dynamic programme against brute force, acceptance by rank against a count by hand, the choice, and the command's file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.cli import app
from draftsmith.decode.engine import Engine
from draftsmith.decode.sampling import SamplingParams
from draftsmith.decode.trees import likeliest_paths
from draftsmith.eval import tune as tuning
from draftsmith.eval.drafting import decode_settings, make_proposer
from draftsmith.eval.stats import Interval
from draftsmith.eval.trace import TracedRound
from draftsmith.eval.tune import Candidate, TuneSettings, best_tree, choose, count_ranks, expected_tokens, explored_paths, shares
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
    tree = TracedRound(tokens=[9, 1, 2, 3, 4, 5], parents=[0, 0, 0, 0, 2, 2], path=[0, 2, 4], emitted=[2, 4, 7])
    missed = TracedRound(tokens=[9, 1, 2, 3, 4, 5], parents=[0, 0, 0, 0, 2, 2], path=[0, 3], emitted=[3, 8])  # node 3 has no children to judge
    cut = TracedRound(tokens=[9, 1, 2, 3, 4, 5], parents=[0, 0, 0, 0, 2, 2], path=[0, 2], emitted=[2])  # the text ended there
    seen: list[list[int]] = []
    hits: list[list[int]] = []
    count_ranks([tree, missed, cut], seen, hits)
    assert seen == [[3, 3, 3], [1, 1]] and hits == [[0, 2, 1], [1, 0]]
    assert shares(seen, hits) == [[0.125, 0.625, 0.375], [0.75, 0.25]]


def test_explored_paths_favour_the_likeliest() -> None:
    paths = explored_paths(3, most=20)
    assert len(paths) <= 20 and [0, 0, 0] in paths and [1, 0, 0] in paths and [1, 1] in paths and [1, 2] not in paths
    known = {tuple(path) for path in paths}
    assert all(tuple(path[:-1]) in known or len(path) == 1 for path in paths)
    assert max(map(len, explored_paths(8, most=3))) == 8  # at least the chain


def test_the_default_stays_unless_another_is_faster_beyond_the_noise() -> None:
    def candidate(kind: str, value: float, lo: float) -> Candidate:
        return Candidate(kind, Decode(), 2.0, 1.0, Interval(1, 1, 1), Interval(value, lo, value + 0.1))

    default = candidate("default", 1.0, 1.0)
    assert choose([default, candidate("chain", 1.2, 0.98)]) is default
    better, best = candidate("chain", 1.2, 1.05), candidate("static", 1.3, 1.1)
    assert choose([default, better, best]) is best


def test_a_tuned_drafter_decodes_losslessly_by_what_was_found() -> None:
    """The target as its own draft."""
    target = tiny()
    twin = Standalone(tiny()).bind(target)
    settings = TuneSettings(temperatures=(0.0, 1.0), max_new_tokens=16, most_nodes=15, timed_prompts=2)
    found, raced, chosen = tuning.tune(target, twin, suite(4), settings)
    assert {c.kind for c in raced} >= {"default", "static"} and chosen in raced
    assert all(row[0][0] > 0.9 for row in found.acceptance.values())  # the best candidate is nearly always right
    assert set(found.confidence["temperatures"]) == {tuning.TEMPERATURES[0]}  # greedily it is always right: no probability is too high
    static = next(c for c in raced if c.kind == "static")
    prompts, params = [[5, 9, 33], [7]], [SamplingParams(temperature=1.0, seed=i) for i in range(2)]
    out = Engine(target, make_proposer(twin, static.decode, target, [5])).generate(prompts, params, 16)
    assert out.tokens == Engine(target).generate(prompts, params, 16).tokens
    assert json.loads(json.dumps(dataclasses.asdict(found)))["measured"]["chosen"] == chosen.kind


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
    bad = CliRunner().invoke(app, ["tune", "prompt_lookup", *few])
    assert isinstance(bad.exception, UserError) and "wanted a drafter's folder" in str(bad.exception)


def test_every_candidate_shape_is_told() -> None:
    shapes = [Candidate("x", decode, 1.0, 1.0).shape for decode in (Decode(depth=3), Decode(tree="static", paths=[[0], [1], [1, 0]]))]
    assert shapes == [(3, 3), (2, 3)] and list(itertools.chain(*shapes)) == [3, 3, 2, 3]
