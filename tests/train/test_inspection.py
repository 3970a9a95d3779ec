"""`draftsmith data inspect`: the tokens that are learned are the ones that are shown so, and every lint finds what it is for, and nothing else."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith import UserError
from draftsmith.cli import _use_template, app
from draftsmith.decode.prompts import render_prompt
from draftsmith.recipes.schema import Data, DrafterRecipe, Eval, TargetRef, to_yaml
from draftsmith.train.inspection import inspect, print_inspection, write_html
from rich.console import Console
from transformers import AutoConfig
from typer.testing import CliRunner

from .families import DEEPSEEK_R1, LLAMA3, PHI3, QWEN3, Family

TALK = [("user", "Hi <b>"), ("assistant", "Hello é🙂!"), ("user", "2+2?"), ("assistant", "It is 4.")]


def recipe(folder: Path, family: Family, talks: list[list[tuple[str, str]]], template: dict[str, Any] | None = None, **data: Any) -> DrafterRecipe:
    """A recipe for given answers and a target of this family, of which there is a tokenizer only."""
    target, source, suite = folder / "target", folder / "talks.jsonl", folder / "suite.jsonl"
    tokenizer, stops = family.tokenizer()
    tokenizer.save_pretrained(target)
    config = AutoConfig.from_pretrained(TargetRef().location)
    config.eos_token_id = sorted(stops)
    config.save_pretrained(target)
    source.write_text("".join(json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}) + "\n" for talk in talks))
    suite.write_text('{"prompt": "something else"}\n')
    settings = {"source": str(source), "num_prompts": len(talks), "responses": "given", "deduplicate": "none", "sequence_length": 400, **data}
    return DrafterRecipe(
        name="r",
        out=str(folder / "run"),
        target=TargetRef(path=str(target), template=template or {}),
        data=Data(**settings),
        eval=Eval(suite=str(suite), num_prompts=1, dev_prompts=1),
    )


class Marks(HTMLParser):
    """The texts of the page's boxes, learned ones in brackets."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes: list[str] = []
        self._inside = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._inside |= tag == "pre"
        if tag == "pre":
            self.boxes.append("")
        elif tag == "mark" and self._inside:
            self.boxes[-1] += "⟦"

    def handle_endtag(self, tag: str) -> None:
        if tag == "mark" and self._inside:
            self.boxes[-1] += "⟧"
        self._inside &= tag != "pre"

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.boxes[-1] += data


def test_terminal_and_page_show_what_is_learned(tmp_path: Path) -> None:
    inspection = inspect(recipe(tmp_path, PHI3, [TALK]))
    assert inspection.lints == [] and inspection.figures["sequences"] == "1 of 1"
    write_html(inspection, tmp_path / "page.html", 5)
    page = (tmp_path / "page.html").read_text()
    marks = Marks()
    marks.feed(page)
    (box,) = marks.boxes
    wanted = "<|user|>\nHi <b><|end|>\n<|assistant|>\n⟦Hello é🙂!<|end|>⟧\n<|user|>\n2+2?<|end|>\n<|assistant|>\n⟦It is 4.<|end|>⟧\n<|endoftext|>"
    assert box.replace("⟧⟦", "") == wanted and box.count("⟦") > 6  # a mark a token
    assert "http" not in page.replace("http-equiv", "")
    shown = io.StringIO()
    print_inspection(inspection, Console(file=shown, force_terminal=True, width=200, color_system="standard"), 1)
    green = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", shown.getvalue()))
    assert green == "Hello é🙂!<|end|>It is 4.<|end|>" and "no lint found anything" in shown.getvalue()


WITHOUT_END = dataclasses.replace(PHI3, template=PHI3.template.replace("+ '<|end|>\n'", "+ '\n'").replace("{{ eos_token }}", ""))
TWICE = dataclasses.replace(LLAMA3, template="{{ bos_token }}" + LLAMA3.template)


@pytest.mark.parametrize(
    ("family", "talks", "more", "wanted"),
    [
        (QWEN3, [TALK], {"template": {"enable_thinking": False}}, {}),
        (LLAMA3, [TALK, TALK[:1]], {}, {"empty mask": False}),
        (TWICE, [TALK], {}, {"BOS twice": True}),
        (DEEPSEEK_R1, [TALK], {}, {"template mismatch": True}),
        (WITHOUT_END, [TALK], {}, {"EOS never trained": False}),
        (PHI3, [TALK], {"sequence_length": 20}, {"too long": False}),
        (
            dataclasses.replace(PHI3, template=PHI3.template.replace("message['content']", "message['content'] | upper")),
            [TALK],
            {},
            {"empty mask": False, "spans that do not round-trip": False},
        ),
    ],
)
def test_every_lint_finds_what_it_is_for(tmp_path: Path, family: Family, talks: Any, more: dict[str, Any], wanted: dict[str, bool]) -> None:
    """And nothing else. True: it is an error, and not a warning."""
    inspection = inspect(recipe(tmp_path, family, talks, **more))
    assert {lint.name: lint.severe for lint in inspection.lints} == wanted
    assert all(lint.count == 1 and "talks.jsonl:" in lint.where[0] for lint in inspection.lints)


def test_answers_of_the_target_are_shown_where_there_are_some(tmp_path: Path) -> None:
    settings = recipe(tmp_path, PHI3, [TALK], responses="target", response_tokens=8)
    inspection = inspect(settings)
    assert "the source's own answers" in inspection.note
    store = tmp_path / "run" / "data" / "responses.jsonl"
    store.parent.mkdir(parents=True)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    store.write_text('{"schema": 1}\n' + json.dumps({"index": 0, "messages": messages, "finish": ["length"]}) + "\n")
    inspection = inspect(settings)
    assert "which training will refuse: other template, data, documents" in inspection.note
    (one,) = inspection.documents
    assert one.encoded.text == "<|user|>\nHi<|end|>\n<|assistant|>\nWell" and [lint.name for lint in inspection.lints] == ["truncated answers"]


def test_the_commands_show_write_and_refuse(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(recipe(tmp_path, DEEPSEEK_R1, [TALK])))
    done = CliRunner().invoke(app, ["data", "inspect", str(path), "--html", str(tmp_path / "page.html")])
    assert done.exit_code == 1 and "template mismatch: 1 of 1" in done.output and (tmp_path / "page.html").is_file()
    done = CliRunner().invoke(app, ["data", "regenerate", str(path)])
    assert isinstance(done.exception, UserError) and str(done.exception).startswith("data.responses: wanted target, got given")
    for command in ("inspect", "regenerate"):
        done = CliRunner().invoke(app, ["data", command, "quickstart/target"])
        assert isinstance(done.exception, UserError) and str(done.exception).startswith("kind: wanted a drafter's recipe")


def test_a_drafter_s_prompts_are_rendered_as_in_its_training(capsys: pytest.CaptureFixture[str]) -> None:
    """By what its contract says; what the command line says instead goes first, and is told."""
    tokenizer, _ = QWEN3.tokenizer()
    target = SimpleNamespace(tokenizer=tokenizer)
    _use_template(target, {"template": {"enable_thinking": False}}, None)  # type: ignore[arg-type]
    ids = render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    assert str(tokenizer.decode(ids)).endswith("<think>\n\n</think>\n\n") and capsys.readouterr().err == ""
    _use_template(target, {"template": {"enable_thinking": False}}, ["enable_thinking=true"])  # type: ignore[arg-type]
    ids = render_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    assert str(tokenizer.decode(ids)).endswith("assistant\n") and "not with this enable_thinking" in capsys.readouterr().err
    with pytest.raises(UserError, match="--template: wanted key=value, got enable_thinking"):
        _use_template(target, {}, ["enable_thinking"])  # type: ignore[arg-type]


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--html: wanted a file that can be written"):
        write_html(inspect(recipe(tmp_path, PHI3, [TALK])), tmp_path / "none" / "page.html", 1)
