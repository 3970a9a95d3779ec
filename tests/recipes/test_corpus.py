"""The embedded corpus: its splits, and the windows that prompts are cut from."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from draftsmith.recipes.corpus import EXCLUDED_FOLDERS, MIN_FILE_CHARS, SourceFile, Split, source_files, split_of, windows
from hypothesis import given
from hypothesis import strategies as st

SPLITS: tuple[Split, ...] = get_args(Split)


@pytest.fixture(scope="module")
def corpus() -> dict[Split, list[SourceFile]]:
    return {split: source_files(split) for split in SPLITS}


def test_splits_are_disjoint_and_none_is_small(corpus: dict[Split, list[SourceFile]]) -> None:
    names = {split: {file.name for file in files} for split, files in corpus.items()}
    assert not names["train"] & names["dev"] and not names["train"] & names["test"] and not names["dev"] & names["test"]
    total = sum(map(len, names.values()))
    assert total == sum(map(len, corpus.values())) > 300
    for split, share in (("dev", 0.05), ("test", 0.07)):
        assert 0.4 * share < len(corpus[split]) / total < 2 * share  # type: ignore[index]  # the hash scatters; no split is starved


def test_no_text_is_in_two_splits(corpus: dict[Split, list[SourceFile]]) -> None:
    """A file that the library holds twice, under two names, would leak from training into the suite."""
    texts = {split: {file.text for file in files} for split, files in corpus.items()}
    assert not texts["train"] & (texts["dev"] | texts["test"])


def test_splits_are_the_same_for_ever() -> None:
    """Weights that come with the package were trained on these splits: a change here would put training files into the suite."""
    expected: dict[Split, list[str]] = {
        "train": ["abc.py", "asyncio/base_events.py", "json/decoder.py", "tarfile.py", "typing.py"],
        "dev": ["doctest.py", "email/charset.py", "hmac.py"],
        "test": ["fnmatch.py", "getpass.py", "http/server.py"],
    }
    assert expected == {split: [name for name in names if split_of(name) == split] for split, names in expected.items()}


def test_left_out(corpus: dict[Split, list[SourceFile]]) -> None:
    assert {"test", "tests", "encodings", "pydoc_data", "site-packages"} <= EXCLUDED_FOLDERS
    for file in (file for files in corpus.values() for file in files):
        assert not EXCLUDED_FOLDERS.intersection(file.name.split("/")), file.name
        assert len(file.text) >= MIN_FILE_CHARS


def test_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    text = "x = 1\n" * MIN_FILE_CHARS
    for name in ("typing.py", "json/decoder.py", "json/tests/abc.py", "json/tarfile.txt", "tarfile.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text if name != "tarfile.py" else "x = 1\n", encoding="utf-8")
    (tmp_path / "abc.py").write_bytes(b"# \xe9\n" * MIN_FILE_CHARS)
    found = source_files("train", tmp_path)
    assert [file.name for file in found] == ["json/decoder.py", "typing.py"]  # all are of this split; tarfile.py is too short, abc.py not UTF-8
    assert all(file.text == text for file in found)


def test_an_empty_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no train source files below"):
        source_files("train", tmp_path)


lines = st.lists(st.just("") | st.text(alphabet="ab =()#\t", max_size=30), min_size=1, max_size=60)


@given(lines=lines, prompt_chars=st.integers(1, 200), more_chars=st.integers(1, 400), overlap=st.booleans())
def test_a_window_is_a_stretch_of_its_file(lines: list[str], prompt_chars: int, more_chars: int, overlap: bool) -> None:
    numbered = [f"{number}:{line}" if line else "" for number, line in enumerate(lines)]  # no stretch stands twice
    file = SourceFile(name="a.py", text="\n".join(numbered) + "\n")
    total = prompt_chars + more_chars
    last_start = -1
    for window in windows(file, prompt_chars=prompt_chars, total_chars=total, stride_chars=total // 2 if overlap else total):
        stretch = window.prompt + window.continuation
        start = file.text.find(stretch, last_start + 1)
        assert start > last_start, "not a stretch of the file, or not after the one before it"
        assert start == 0 or file.text[start - 1] == "\n"
        assert window.name == file.name
        assert window.prompt.strip() and not window.prompt.endswith("\n") and window.continuation.startswith("\n")
        assert window.ends_file == (start + len(stretch) == len(file.text))
        last_start = start


def test_windows_put_together_are_the_file() -> None:
    text = "".join(f"line_{index} = {index * 37}\n" for index in range(400))
    file = SourceFile(name="a.py", text=text)
    found = list(windows(file, prompt_chars=100, total_chars=500, stride_chars=500))
    assert len(found) > 5
    assert "".join(window.prompt + window.continuation for window in found) == text
    assert [window.ends_file for window in found] == [False] * (len(found) - 1) + [True]
    for window in found:
        assert 100 - 1 <= len(window.prompt) < 130
        assert 500 <= len(window.prompt + window.continuation) < 530 or window.ends_file


def test_blank_lines_at_the_cut_go_to_the_continuation() -> None:
    """They once went nowhere: the prompt lost all its last newlines, and the continuation got one back."""
    (window,) = windows(SourceFile(name="a.py", text="a = 1\n\n\n" + "b = 2\n" * 9), prompt_chars=8, total_chars=60, stride_chars=60)
    assert (window.prompt, window.continuation) == ("a = 1", "\n\n\n" + "b = 2\n" * 9)
