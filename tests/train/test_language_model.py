"""The target that is trained from scratch: it goes on where it was stopped, ends in time, and its corpus holds nothing that it is measured with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.recipes.corpus import MIN_FILE_CHARS, CodeWindow, SourceFile, Split, installed_files
from draftsmith.recipes.schema import TargetRecipe, load_recipe
from draftsmith.train import gpu_bench, language_model
from draftsmith.train.language_model import corpus_files, encode_windows, train_language_model, train_tokenizer

TEXT = "".join(f"def function_{index}(x):\n    return x * {index * 37}\n\n" for index in range(120))


def recipe(*settings: str) -> TargetRecipe:
    small = [
        "model.vocab_size=300",
        "model.num_hidden_layers=2",
        "train.steps=6",
        "train.eval_every=2",
        "train.sequence_length=96",
        "train.corpus=stdlib",
    ]
    made = load_recipe("gpu-bench/target", [*gpu_bench.TOY_TARGET, "train.corpus_mib=null", "train.layer_drop=0.5", *small, *settings])
    assert isinstance(made, TargetRecipe)
    return made


def files(split: Split) -> list[SourceFile]:
    return [SourceFile(name=f"{split}.py", text=TEXT.replace("x", split))]


@pytest.fixture(autouse=True)
def few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "source_files", files)


def train(out: Path, *settings: str, stop: int | None = None) -> list[dict[str, Any]]:
    """The curve of losses; stop: as if killed after so many steps were logged."""
    curve = list[dict[str, Any]]()

    def log(entry: dict[str, Any]) -> None:
        if "held_out_loss" in entry:
            curve.append({key: entry[key] for key in ("step", "tokens", "held_out_loss")})
            if entry["step"] == stop:
                raise KeyboardInterrupt

    train_language_model(recipe(*settings), out, log)
    return curve


def test_a_killed_training_goes_on_along_the_same_curve(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", stop=4)  # after the checkpoint of step 2, before that of step 4
    assert [path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()] == ["step-00000002"]
    assert not (tmp_path / "killed" / "model").exists()
    assert train(tmp_path / "killed") == whole[1:]
    told = json.loads((tmp_path / "killed" / "model" / "training.json").read_text())
    assert told["step"] == 6 and told["tokens"] == 6 * 4 * 96


def test_a_training_ends_in_time_and_the_rate_falls_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[float] = iter(range(10**6))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    rates: list[float] = []
    schedule = language_model.schedule

    def noted(*given: Any) -> float:
        rates.append(schedule(*given))
        return rates[-1]

    monkeypatch.setattr(language_model, "schedule", noted)
    (last,) = train(
        tmp_path, "train.steps=100000", "train.eval_every=100000", f"train.max_hours={8 / 3600}", "train.warmup_steps=1", "train.decay_share=0.5"
    )
    assert 3 < last["step"] < 9 and rates[0] == 1.0 and rates[-1] < 0.5 and rates == sorted(rates, reverse=True)


def test_many_windows_are_encoded_as_each_alone() -> None:
    tokenizer = train_tokenizer([TEXT], 300, 512)
    found = [CodeWindow(name="a", prompt=f"def f{i}", continuation="(x):\n  pass" * i, ends_file=i % 2 == 0) for i in range(1, 5)]
    rows = encode_windows(tokenizer, found, 40)
    for window, row in zip(found, rows, strict=True):
        asked = tokenizer.apply_chat_template([{"role": "user", "content": window.prompt}], tokenize=False, add_generation_prompt=True)
        alone = tokenizer(asked, add_special_tokens=False)["input_ids"] + tokenizer(window.continuation, add_special_tokens=False)["input_ids"]
        assert row == (alone + [tokenizer.eos_token_id] * window.ends_file)[:41]
    assert encode_windows(tokenizer, [], 40) == []


def test_packages_are_taken_by_hash_and_copies_of_held_out_files_are_not(tmp_path: Path) -> None:
    held = SourceFile(name="fnmatch.py", text="".join(f"a line that is long enough to be told apart: {i}\n" for i in range(80)))
    own = "".join(f"another line, which is just as long as the others {i}\n" for i in range(80))
    for name, text in {"pack/a.py": own, "pack/b.py": own.replace("another", "one more"), "pack/c.py": own, "pack/tests/d.py": own}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pack" / "vendored.py").write_text(held.text + own[: len(own) // 2])
    (tmp_path / "pack" / "short.py").write_text("x = 1\n")
    (tmp_path / "pack" / "huge.py").write_text(own * 200)
    every = {file.name for file in installed_files(None, tmp_path, [held])}
    assert every and every <= {f"site-packages/pack/{name}.py" for name in "abc"}
    assert "site-packages/pack/vendored.py" in {file.name for file in installed_files(None, tmp_path, [])}
    limited = [file.name for file in installed_files(MIN_FILE_CHARS / 2**20, tmp_path, [held])]
    assert limited == [file.name for file in installed_files(None, tmp_path, [held])][:1]


def test_the_corpus_is_the_librarys_and_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SourceFile(name="site-packages/a.py", text=TEXT)
    monkeypatch.setattr(language_model, "installed_files", lambda mib: [package] if mib == 3 else [])
    assert corpus_files(recipe("train.corpus=installed", "train.corpus_mib=3")) == [*files("train"), package]
    assert corpus_files(recipe()) == files("train")
    with pytest.raises(UserError, match=r"train\.corpus_mib: wanted null, as train.corpus is stdlib, got 3"):
        recipe("train.corpus_mib=3")


def test_all_pieces_and_their_toys_are_recipes_with_one_set_of_answers() -> None:
    target = load_recipe("gpu-bench/target", gpu_bench.TOY_TARGET)
    assert isinstance(target, TargetRecipe)
    sections = set()
    for piece in gpu_bench.DRAFTERS:
        toy, whole = (load_recipe(f"gpu-bench/{piece}", changes) for changes in (gpu_bench.TOY_DRAFTER, ()))
        assert not isinstance(toy, TargetRecipe) and not isinstance(whole, TargetRecipe)
        assert whole.eval.batch == [1, 4, 16] and whole.eval.temperatures == [0.0, 1.0] and whole.target.path == "runs/gpu-bench/target/model"
        sections.add(str(vars(whole.data)))
    assert len(sections) == 1


def test_a_piece_needs_its_target_and_wrong_words_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_bench.main(["eagle3", "--out", str(tmp_path)]) == 2
    assert gpu_bench.main(["eagle", "--out", str(tmp_path)]) == 2
    assert gpu_bench.main(["--minutes", "0", "--out", str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "run the piece target first" in errors[0] and "piece: wanted target, eagle3" in errors[1] and "--minutes: wanted more than 0" in errors[2]
