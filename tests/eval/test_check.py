"""The check of a drafter against its target, the same one, a changed one and a strange one; and its statistics."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from draftsmith import UserError
from draftsmith.cli import app
from draftsmith.decode.target import Target
from draftsmith.eval.check import Acceptance, Drifted, Probe, check, measure_acceptance, read_acceptance, swap_test, write_acceptance
from draftsmith.eval.stats import Interval
from draftsmith.heads.registry import new_head, save_drafter
from draftsmith.recipes.schema import Decode
from typer.testing import CliRunner

from .tiny import Letters, tiny

PROMPTS = [[5 + i, 9, 33, 2 + i, 71, 8] for i in range(12)]


def changed(target: Target, size: float) -> Target:
    """Fine-tuned, so to speak: every matrix moved at random."""
    model = tiny().model
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(size * parameter.std() * torch.randn_like(parameter))
    return Target(model, Letters(), "changed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Medusa head, whose output layers are the target's own: it accepts a little."""
    target = tiny()
    head = new_head("medusa", target, {}).double()
    head.set_draft_vocabulary(torch.arange(target.vocab_size), target)
    path = tmp_path_factory.mktemp("d") / "drafter"
    save_drafter(head, path, {"target": {"name": "tiny", "fingerprint": target.fingerprint()}})
    write_acceptance(path, measure_acceptance(target, head, Decode(tree="dynamic", depth=3, nodes=12), PROMPTS, (0.0, 1.0), 40))
    return path


def test_the_own_target_gives_the_recorded_acceptance_exactly(folder: Path) -> None:
    result = check(folder, tiny(), measure=True)
    assert not result.changed and result.now == result.then and result.ratio == Interval(1, 1, 1) and result.p_value == 1
    assert not result.failed and "still belongs" in result.lines()[-1]
    recorded = read_acceptance(folder)
    assert recorded.tau == result.then and [p.temperature for p in recorded.probes[:3]] == [0, 1, 0]


def test_a_changed_target_is_told_by_its_fingerprint_and_judged_by_its_acceptance(folder: Path) -> None:
    target = changed(tiny(), 0.6)
    assert check(folder, target, measure=False).failed
    result = check(folder, target, measure=True, threshold=1.0)
    assert [part for part, _, _ in result.changed] == ["weights"] and result.ratio is not None and result.ratio.value != 1
    assert target.fingerprint()["weights"] == result.changed[0][1]  # its own again
    assert result.failed == (result.ratio.value < 1 and result.p_value is not None and result.p_value < 0.05)


def test_a_loss_fails_only_if_it_is_large_and_certain() -> None:
    parts = [("weights", "a", "b")]
    assert Drifted(parts, 3.0, 2.4, Interval(0.8, 0.75, 0.85), 0.001).failed
    assert not Drifted(parts, 3.0, 2.4, Interval(0.8, 0.5, 1.1), 0.2).failed  # may be chance
    assert not Drifted(parts, 3.0, 2.85, Interval(0.95, 0.94, 0.96), 0.001).failed  # certain, but small
    assert "may be chance" in Drifted(parts, 3.0, 2.4, Interval(0.8, 0.5, 1.1), 0.2).lines()[-1]


def test_the_test_rejects_as_often_as_it_says_and_finds_a_real_loss() -> None:
    generator = random.Random(0)

    def drawn(accept: float) -> Acceptance:
        probes = []
        for i in range(20):
            rounds = 20
            tokens = sum(1 + next((d for d in range(4) if generator.random() > accept), 4) for _ in range(rounds))
            probes.append(Probe([i], 0.0, i, tokens, rounds))
        return Acceptance({}, {}, 1, probes)

    null = sum(swap_test(drawn(0.6), drawn(0.6), swaps=400, seed=i) < 0.05 for i in range(200)) / 200
    assert null < 0.05 + 3 * (0.05 * 0.95 / 200) ** 0.5
    found = sum(swap_test(drawn(0.5), drawn(0.6), swaps=400, seed=i) < 0.05 for i in range(50)) / 50
    assert found > 0.95


def test_what_cannot_be_checked_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="wanted a drafter's folder"):
        check(tmp_path, tiny(), measure=False)
    strange = tiny()
    strange.tokenizer = type("Other", (Letters,), {"get_vocab": lambda self: {"a": 1}})()
    with pytest.raises(UserError, match="wanted the target's tokenizer"):
        check(folder, strange, measure=True)
    other = json.dumps({**json.loads((folder / "acceptance.json").read_text()), "decode": {"depth": 3, "bush": 1}})
    for text, says in (("{", "damaged file"), ('{"schema": "x"}', "damaged file"), (other, "damaged file .*bush")):
        copy = tmp_path / "copy"
        copy.mkdir(exist_ok=True)
        (copy / "acceptance.json").write_text(text)
        with pytest.raises(UserError, match=says):
            read_acceptance(copy)
    (copy / "acceptance.json").unlink()
    with pytest.raises(UserError, match="draftsmith check --record"):
        read_acceptance(copy)
    assert dataclasses.is_dataclass(read_acceptance(folder))


def test_the_command_records_and_checks(tmp_path: Path) -> None:
    from draftsmith.recipes.schema import TargetRef

    target = Target.load(TargetRef().location)
    save_drafter(new_head("medusa", target, {"heads": 2}), tmp_path / "d", {"target": {"name": "t", "fingerprint": target.fingerprint()}})

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["check", str(tmp_path / "d"), *arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.output

    assert run("--record", "--num-prompts", "2", "--max-new-tokens", "6")[0] == 0
    code, said = run("--measure")
    assert code == 0 and "fingerprints are the same" in said and "1.000 of it" in said
    contract = tmp_path / "d" / "contract.json"
    contract.write_text(contract.read_text().replace(target.fingerprint()["weights"], "0" * 16))
    code, said = run()
    assert code == 1 and "fingerprints differ: weights" in said
    assert run("--measure")[0] == 0  # other weights by name, but nothing is lost
