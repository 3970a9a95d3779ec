"""YAML as recipes are written in it.

PyYAML follows YAML 1.1, where `no` is false, `1e-3` is text and a repeated key wins silently: three traps for a recipe. Here scalars are those of
YAML 1.2's core schema, a repeated key is an error, and what is written reads the same under both versions.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from .. import UserError


class _Loader(yaml.SafeLoader):
    """The scalars of YAML 1.2's core schema; a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"the key {repeated!r} twice", node.start_mark)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would read as something else than text; lists on one line."""


def _on_one_line(dumper: _Dumper, items: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    # PyYAML folds the rarer line breaks (U+0085, U+2028) away unless they are escaped, which only double quotes allow.
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_FLOAT = re.compile(r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf|\.Inf|\.INF)$|\.(?:nan|NaN|NAN)$")
_Loader.yaml_implicit_resolvers = {}  # none of those of YAML 1.1
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_representer(list, _on_one_line)
_Dumper.add_representer(str, _text)


def parse_yaml(text: str, where: str) -> Any:
    """The value that a YAML text holds. Raises UserError naming `where` and the line if it is not YAML."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{where}: wanted YAML, got {' '.join(str(problem or error).split())}{line}; mend it there") from error


def dump_yaml(values: dict[str, Any]) -> str:
    """Block style, keys in their order, lists on one line; `parse_yaml` reads it back to equal values."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)
    return text
