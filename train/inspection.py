"""`draftsmith data inspect RECIPE`: what is learned of a recipe's data, token by token, and what is likely to be wrong with it.

    draftsmith data inspect RECIPE --samples 3 --html samples.html

It reads what training would read: given answers, or those that `draftsmith data regenerate` made; without these, the source's own stand in, which it
says. Only the target's tokenizer is loaded. Every sequence of the selection is checked; a few are shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, PackageLoader
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .. import UserError
from ..decode.prompts import render_prompt
from ..recipes.schema import DrafterRecipe
from .data import limited, measured_prompts
from .preparing import open_tokenizer
from .regenerate import Answered, key_of, samples_of, stored, with_room
from .selection import Selection, select
from .sources import Document
from .templates import Encoded, encode

_EXAMPLES = 3  # places that a lint names


@dataclass
class Lint:
    """One thing that is likely to be wrong: how often, of how many, and where first. severe: training on it makes no sense."""

    name: str
    of: int
    severe: bool
    means: str
    where: list[str] = field(default_factory=list)
    count: int = 0

    def found(self, where: str) -> None:
        self.count += 1
        if len(self.where) < _EXAMPLES:
            self.where.append(where)

    def __str__(self) -> str:
        places = ", ".join(self.where) + (", .." if self.count > len(self.where) else "")
        return f"{self.name}: {self.count} of {self.of} ({places}); {self.means}"


@dataclass
class Inspected:
    """A document as it is learned. generated: its tokens are those that our engine was given and made, and need no comparing."""

    document: Document
    encoded: Encoded
    generated: bool = False


@dataclass
class Inspection:
    """What there is to show: documents, lints that found something, and figures."""

    recipe: DrafterRecipe
    tokenizer: PreTrainedTokenizerBase
    documents: list[Inspected]
    lints: list[Lint]
    figures: dict[str, str]
    note: str

    @property
    def severe(self) -> bool:
        return any(lint.severe for lint in self.lints)


def inspect(recipe: DrafterRecipe) -> Inspection:
    """Read and check a recipe's data. Raises UserError for sources that cannot be read."""
    tokenizer, stops, _ = open_tokenizer(recipe.target)
    selection = select(recipe.data, measured_prompts(recipe))
    found, note = _learned(recipe, selection, tokenizer, stops)
    return Inspection(recipe, tokenizer, found, lints(recipe, found, tokenizer, stops), _figures(recipe, selection, found), note)


def _learned(recipe: DrafterRecipe, selection: Selection, tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> tuple[list[Inspected], str]:
    """(documents as training would have them, whether that is so)."""
    path = recipe.data_folder / "data" / "responses.jsonl"
    if recipe.data.responses == "target" and path.is_file():
        key, lines = stored(path)
        wanted = key_of(with_room(selection.documents, tokenizer, recipe.data), tokenizer, recipe.data, {})
        differing = [name for name in wanted if key.get(name) != wanted[name]]
        aside = f", which training will refuse: other {', '.join(differing)}" if differing else ""
        return [part for line in lines for part in _answered(line, tokenizer, stops, recipe)], f"the target's answers of {path}{aside}"
    shown = [Inspected(document, encode(tokenizer, document, stops)) for document in selection.documents]
    if recipe.data.responses == "given":
        return shown, "the answers that the source gives"
    return shown, f"the source's own answers, as there are none of the target's in {path} yet (draftsmith data regenerate)"


def _answered(line: Answered, tokenizer: PreTrainedTokenizerBase, stops: Collection[int], recipe: DrafterRecipe) -> Iterator[Inspected]:
    """The sequences of a stored conversation."""
    samples = samples_of([line], tokenizer, stops, recipe.data)
    for number, sample in enumerate(samples, 1):
        cut = number == len(samples) and line["finish"][-1] == "length"
        document = Document(where=f"answer {line['index']}", messages=line["messages"], tools=line.get("tools"), cut=cut)
        if "samples" in line:
            yield Inspected(document, Encoded(sample.ids, sample.spans, str(tokenizer.decode(sample.ids))), generated=True)
        else:
            yield Inspected(document, encode(tokenizer, document, stops))


def lints(recipe: DrafterRecipe, found: Sequence[Inspected], tokenizer: PreTrainedTokenizerBase, stops: Collection[int]) -> list[Lint]:
    """Those of the checks that found something."""
    data, ends = recipe.data, set(stops)
    talks = [one for one in found if one.document.messages]
    checks = {
        "empty": Lint("empty mask", len(found), False, "no token of it is learned: it is left out of training"),
        "bos": Lint("BOS twice", len(found), True, "the template writes one, and something else does too: take it out of the texts"),
        "mismatch": Lint(
            "template mismatch",
            len(talks),
            True,
            "evaluation's prompt is not what training has before the answer, so that the drafter learns to follow other contexts than it meets",
        ),
        "eos": Lint("EOS never trained", len(talks), False, "no answer in it ends with a token that ends a generation: drafts will not stop in time"),
        "cut": Lint("truncated answers", len(talks), False, f"cut off at data.response_tokens ({data.response_tokens}) or by the source"),
        "long": Lint("too long", len(found), False, f"longer than data.sequence_length ({data.sequence_length}): data.too_long is {data.too_long}"),
        "round": Lint("spans that do not round-trip", len(found), False, "some tokens of answers are not learned, or not as they would be generated"),
    }
    for one in found:
        document, encoded = one.document, one.encoded
        where, ids, spans = document.where, encoded.ids, encoded.spans
        if not spans and data.train_on == "responses":
            checks["empty"].found(where)
        if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id is not None:
            checks["bos"].found(where)
        if document.messages and spans:
            if document.cut:
                checks["cut"].found(where)
            elif ends and not any(ids[stop - 1] in ends for _, stop in spans):
                checks["eos"].found(where)
            if not one.generated and not _prompt_matches(one, tokenizer):
                checks["mismatch"].found(where)
        if len(ids) > data.sequence_length:
            checks["long"].found(where)
        problems = [problem.partition(": ")[2] for problem in encoded.problems]
        if not problems and encoded.text and not _round_trips(encoded, tokenizer):
            problems = ["its text is not that of its tokens"]
        if problems:
            checks["round"].found(f"{where} ({problems[0]})")
    return [lint for lint in checks.values() if lint.count]


def _prompt_matches(one: Inspected, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether what precedes the last answer is what evaluation and `generate` would give the target, but for history that the template rewrites."""
    messages = one.document.messages
    if messages[-1]["role"] != "assistant" or len(messages) == 1:
        return True
    prompt = render_prompt(tokenizer, messages[:-1], one.document.tools)
    start = one.encoded.spans[-1][0]
    return one.encoded.ids[:start] == prompt


def _round_trips(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> bool:
    return str(tokenizer.decode(encoded.ids, clean_up_tokenization_spaces=False)) == encoded.text


def _figures(recipe: DrafterRecipe, selection: Selection, found: Sequence[Inspected]) -> dict[str, str]:
    samples = [one.encoded.sample.whole if recipe.data.train_on == "all" else one.encoded.sample for one in found]
    try:
        kept = limited(samples, recipe.data)
    except UserError:
        kept = []
    tokens, learned = sum(len(sample.ids) for sample in kept), sum(sample.learned for sample in kept)
    lengths = sorted(len(sample.ids) for sample in samples) or [0]
    aside = Counter({"held out": len(selection.held_out)}) + selection.left_out
    figures = {
        "sequences": f"{len(kept)} of {len(samples)}",
        "tokens": f"{tokens:,}, {learned:,} of them learned ({learned / max(tokens, 1):.0%})",
        "length": f"median {lengths[len(lengths) // 2]}, 95 % up to {lengths[math.ceil(0.95 * len(lengths)) - 1]}, longest {lengths[-1]}",
        "left out": ", ".join(f"{count} {reason}" for reason, count in aside.items()) or "nothing",
    }
    return figures


# Showing


def pieces(one: Inspected, tokenizer: PreTrainedTokenizerBase, whole: bool) -> list[tuple[str, bool]]:
    """(text, whether it is learned) of tokens, those of one kind together where they end a character."""
    learned = [whole] * len(one.encoded.ids)
    for start, stop in one.encoded.spans:
        learned[start:stop] = [True] * (stop - start)
    found: list[tuple[str, bool]] = []
    held: list[int] = []
    for token, kind, following in zip(one.encoded.ids, learned, [*learned[1:], None], strict=True):
        held.append(token)
        text = str(tokenizer.decode(held, clean_up_tokenization_spaces=False))
        if kind == following and text.endswith("\ufffd"):  # a character of which more tokens follow
            continue
        found.append((text, kind))
        held = []
    return found


def print_inspection(inspection: Inspection, console: Console, samples: int) -> None:
    """Samples in colour (green: learned, dim: not), figures, and lints."""
    whole = inspection.recipe.data.train_on == "all"
    for one in inspection.documents[:samples]:
        console.rule(Text(f"{one.document.where}: {len(one.encoded.ids)} tokens"), align="left")
        text = Text()
        for piece, learned in pieces(one, inspection.tokenizer, whole):
            text.append(piece, style="bold green" if learned else "dim")
        console.print(text)
    console.rule("learned: bold green", align="left")
    console.print(f"these are {inspection.note}", highlight=False, soft_wrap=True)
    for name, figure in inspection.figures.items():
        console.print(f"{name}: {figure}", highlight=False, soft_wrap=True)
    for lint in inspection.lints:
        console.print(Text(f"{'error' if lint.severe else 'warning'}: {lint}", style="red" if lint.severe else "yellow"), soft_wrap=True)
    if not inspection.lints:
        console.print("no lint found anything", highlight=False)


def write_html(inspection: Inspection, path: Path, samples: int) -> None:
    """The same as one page that needs nothing else. Raises UserError if it cannot be written."""
    assert __package__
    environment = Environment(loader=PackageLoader(__package__, "pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    whole = inspection.recipe.data.train_on == "all"
    shown = [
        {"where": one.document.where, "tokens": len(one.encoded.ids), "pieces": pieces(one, inspection.tokenizer, whole)}
        for one in inspection.documents[:samples]
    ]
    page = environment.get_template("inspection.html.j2").render(inspection=inspection, shown=shown)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html: wanted a file that can be written, got {path} ({error.strerror}); give another name") from error
