"""Sections of a recipe: what a field takes is said in its annotation, and the checks follow from it.

    @dataclass(frozen=True, kw_only=True)
    class Train(Section):
        section = "train"
        lr: Annotated[float, Bound(">", 0)] = 1e-3

    Train(lr=-1)    # UserError: train.lr: wanted a number > 0, got -1

A section built in Python is checked as one read from a file is.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from .. import UserError
from .dialect import parse_yaml


class Bound(NamedTuple):
    """One end of the range of a number."""

    sign: Literal[">=", ">", "<=", "<"]
    value: float

    def __str__(self) -> str:
        return f"{self.sign} {self.value}"

    def holds(self, value: float) -> bool:
        compare = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}[self.sign]
        return math.isfinite(value) and bool(compare(value, self.value))


class Items(NamedTuple):
    """How many items a list holds, and whether they must differ."""

    least: int = 1
    most: int | None = None
    distinct: bool = False

    def __str__(self) -> str:
        count = f"{self.least} items" if self.least == self.most else f"at least {self.least} item{'s' * (self.least != 1)}"
        return f"with {count}{', all different' * self.distinct}"

    def holds(self, value: list[Any]) -> bool:
        many = self.most is not None and len(value) > self.most
        return len(value) >= self.least and not many and not (self.distinct and len(set(value)) < len(value))


class Pattern(NamedTuple):
    """What a text may look like, and how to say so."""

    regex: str
    words: str

    def __str__(self) -> str:
        return self.words

    def holds(self, value: str) -> bool:
        return re.fullmatch(self.regex, value) is not None


@dataclass(frozen=True, kw_only=True)
class Section:
    """Checks every field of a section against its annotation, then what no single field can tell."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in annotations_of(type(self)).items():
            checked = _checked(self.key_of(name), hint, getattr(self, name), describe(hint))
            object.__setattr__(self, name, checked)  # an integer given for a number is stored as a float
        self.check_together()

    def check_together(self) -> None:
        """Raises UserError if fields that are fine alone contradict each other."""

    @classmethod
    def key_of(cls, name: str) -> str:
        return f"{cls.section}.{name}" if cls.section else name


SectionT = TypeVar("SectionT", bound=Section)


def misfit(key: str, wanted: str, got: object, hint: str = "") -> UserError:
    """The error for a value that does not fit, values shown as YAML has them."""
    shown = "null" if got is None else str(got).lower() if isinstance(got, bool) else repr(got)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return UserError(f"{key}: wanted {wanted}, got {shown}" + (f"; {hint}" if hint else ""))


def annotations_of(cls: type[Section]) -> dict[str, Any]:
    """Annotations of the fields by name, bounds included."""
    hints = get_type_hints(cls, include_extras=True)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls)}


def is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Section)


def describe(hint: Any) -> str:
    """The words for what a field takes."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return f"{describe(args[0])} {' and '.join(map(str, args[1:]))}"
    if origin in (Union, types.UnionType):
        return f"null or {describe(args[0])}"
    if origin is Literal:
        return "one of " + ", ".join(args) if len(args) > 1 else str(args[0])
    if origin is list:
        return f"a list (each item {describe(args[0])})"
    if origin is dict:
        return "a mapping of names to text, numbers, true or false"
    if is_section(hint):
        return "a mapping of keys"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return words[hint]


def _checked(key: str, hint: Any, value: Any, wanted: str) -> Any:
    """`value` as the type that `hint` says. Raises UserError with `wanted` if it does not fit."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        checked = _checked(key, args[0], value, wanted)
        if all(rule.holds(checked) for rule in args[1:]):
            return checked
    elif origin in (Union, types.UnionType):
        assert args[1] is types.NoneType and len(args) == 2
        return None if value is None else _checked(key, args[0], value, wanted)
    elif origin is Literal:
        if isinstance(value, str) and value in args:
            return value
        nearest = difflib.get_close_matches(str(value), args, n=1) if len(args) > 1 else []
        raise misfit(key, wanted, value, f"did you mean {nearest[0]}?" if nearest else "")
    elif origin is list:
        if isinstance(value, list):
            if is_section(args[0]):
                return [item if isinstance(item, args[0]) else build(args[0], as_mapping(key, item)) for item in value]
            return [_checked(key, args[0], item, describe(args[0])) for item in value]
    elif origin is dict:
        if isinstance(value, dict) and all(isinstance(name, str) and isinstance(item, str | int | float | bool) for name, item in value.items()):
            return dict(value)
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value) if abs(value) < 1e300 else math.inf  # an integer may be too large for a float
    elif isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    text = hint is str or (origin is Annotated and args[0] is str)
    raise misfit(key, wanted, value, "quote it to make it text" if text and isinstance(value, int | float) else "")


def as_mapping(key: str, value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise misfit(key, "a mapping of keys", value)
    return dict(value)


def build(cls: type[SectionT], values: Any, root: type[Section] | None = None) -> SectionT:
    """A section from its mapping, the sections in it first. Raises UserError for an unknown key, a missing one, or a value that does not fit."""
    root = root or cls
    hints, section = annotations_of(cls), as_mapping(cls.section or "recipe", values)
    for name in section:
        if name not in hints:
            raise _unknown(cls.key_of(str(name)), root)
    built = {name: build(hints[name], value, root) if is_section(hints[name]) else value for name, value in section.items()}
    for entry in dataclasses.fields(cls):
        required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if required and entry.name not in section:
            wanted = describe(hints[entry.name])
            raise UserError(f"{cls.key_of(entry.name)}: wanted {wanted}, got nothing; add it, it has no default")
    return cls(**built)


def leaves_of(cls: type[Section]) -> list[str]:
    """The dotted keys of a recipe that hold a value."""
    keys: list[str] = []
    for name, hint in annotations_of(cls).items():
        keys += leaves_of(hint) if is_section(hint) else [cls.key_of(name)]
    return keys


def _unknown(key: str, root: type[Section]) -> UserError:
    """The error for an unknown dotted key: it names the nearest one, by the whole key or by its last part."""
    known = leaves_of(root) + [name for name, hint in annotations_of(root).items() if is_section(hint)]

    def likeness(candidate: str) -> tuple[float, float]:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        last = difflib.SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return max(whole, last), whole

    shown = key if key.isprintable() else repr(key)
    return UserError(f"{shown}: wanted a key of the recipe, got an unknown one; did you mean {max(known, key=likeness)}?")


def override(setting: str, cls: type[Section], values: dict[Any, Any]) -> None:
    """Set one "a.b=value" in the mapping `values`, before a recipe is built from it. Raises UserError unless `a.b` is a key that holds a value."""
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals:
        raise misfit("override", "key=value", setting, "for example train.steps=100")
    leaves = leaves_of(cls)
    if key not in leaves:
        inside = [leaf for leaf in leaves if leaf.startswith(key + ".")]
        if inside:
            raise misfit(key, "one key of this section at a time", setting, f"for example {inside[0]}=...")
        raise _unknown(key, cls)
    section, _, name = key.rpartition(".")
    if section:
        values[section] = as_mapping(section, values.get(section, {}))
    (values[section] if section else values)[name] = parse_yaml(text, key)
