"""What is shipped, and the walls between the rooms.

An editable installation sees every folder of the checkout, so a package or a data file that pyproject.toml forgets is missed only by those who
install the wheel: here the lists are compared with the folders.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import draftsmith
import pytest

ROOT = Path(draftsmith.__file__).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
ROOMS = ("train", "heads", "decode", "recipes", "eval")
MEBIBYTE = 2**20

# What each room may import of the others; the files of the root (the command) may import them all.
BELOW: dict[str, set[str]] = {
    "train": {"eval", "heads", "decode", "recipes"},
    "eval": {"heads", "decode", "recipes"},
    "heads": {"decode"},
    "decode": set(),
    "recipes": set(),
}
# Rooms that must stay light or general, and what they may import besides the standard library.
LIBRARIES: dict[str, set[str]] = {"recipes": {"yaml"}, "decode": {"torch", "transformers", "numpy"}}
# Not on every machine that runs draftsmith: to be imported where it is needed, never when a module is loaded.
OPTIONAL = {"datasets", "deepspeed", "openai", "peft", "pydantic", "tensorboard", "vllm", "wandb"}


def modules(room: str = "") -> list[Path]:
    """The Python files of a room, or the root's own."""
    return sorted((ROOT / room).rglob("*.py") if room else ROOT.glob("*.py"))


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names that a module imports, relative ones resolved; `from x import y` gives x.y, as y may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            yield from (".".join((*module, alias.name)) for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imports(ast.parse(path.read_text(encoding="utf-8")), ("draftsmith", *path.relative_to(ROOT).parts[:-1])))


def rooms_of(names: set[str]) -> set[str]:
    """The rooms, or modules of the root, that dotted names reach into; names that the root itself defines are no room."""
    parts = {name.split(".")[1] for name in names if name.startswith("draftsmith.")}
    return {part for part in parts if part in ROOMS or (ROOT / f"{part}.py").exists()}


def loaded_at_once(tree: ast.Module) -> ast.Module:
    """The module without what runs later or never: function bodies, and blocks for type checkers."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST:
            checking = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            node.body = [ast.Pass()] if checking else node.body
            return self.generic_visit(node)

    stripped = Strip().visit(tree)
    assert isinstance(stripped, ast.Module)
    return stripped


# The lists of pyproject.toml


def test_the_package_list_is_the_folders() -> None:
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in modules(room)}
    assert sorted(SETUPTOOLS["packages"]) == sorted(["draftsmith", *(".".join(("draftsmith", *folder.parts)) for folder in folders)])


def test_every_package_folder_and_no_test_folder_has_an_init() -> None:
    missing = [name for name in SETUPTOOLS["packages"] if not (ROOT / Path(*name.split(".")[1:]) / "__init__.py").is_file()]
    assert not missing
    assert not list((ROOT / "tests").rglob("__init__.py"))  # importlib mode; an __init__ would make a package named `tests`


def test_the_root_holds_the_command_and_nothing_else() -> None:
    """Every .py file of the root is shipped, a conftest.py or setup.py too."""
    assert {path.name for path in modules()} <= {"__init__.py", "__main__.py", "cli.py"}


def test_every_data_file_is_shipped_and_every_pattern_matches() -> None:
    def matches(package: str, pattern: str) -> set[Path]:
        return {path for path in (ROOT / Path(*package.split(".")[1:])).glob(pattern) if path.is_file()}

    found = {(package, pattern): matches(package, pattern) for package, patterns in SETUPTOOLS["package-data"].items() for pattern in patterns}
    assert not [key for key, paths in found.items() if not paths], "patterns of package-data that match no file"
    data = {
        path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".py"
    }
    shipped = set[Path]().union(*found.values())
    results = {path for path in data if ROOT / "eval" / "results" in path.parents}  # for the repository's readers, as documents are
    assert not results & shipped and {path.suffix for path in results} <= {".json", ".md", ".png"}
    left_out = {path.relative_to(ROOT).as_posix() for path in data - shipped - results if path.suffix != ".md"}
    assert not left_out, "data files that no pattern of package-data matches"


def test_the_builtin_target_is_whole_and_small() -> None:
    folder = ROOT / "recipes" / "quickstart" / "target"
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert names | {"README.md", "training.json"} <= {path.name for path in folder.iterdir()}
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 12 * MEBIBYTE


def test_the_pins_are_within_the_ranges() -> None:
    """pip would refuse otherwise, on the user's machine."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", "\n".join(lines), flags=re.MULTILINE)}
    assert len(pins) == len([line for line in lines if line and not line.startswith("#")]), "a line that is not name==version"
    assert pins[canonicalize_name("torch")] == "2.13.0"
    project = PYPROJECT["project"]
    for requirement in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]]):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), f"{requirement} against constraints.txt"


def test_the_version_of_the_metadata_is_the_package_s() -> None:
    assert SETUPTOOLS["dynamic"]["version"] == {"attr": "draftsmith.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", draftsmith.__version__)


# The walls


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_downward(room: str) -> None:
    climbing = {path.relative_to(ROOT).as_posix(): rooms_of(imports_of(path)) - BELOW[room] - {room} for path in modules(room)}
    assert not {path: rooms for path, rooms in climbing.items() if rooms}


def test_the_root_module_imports_no_room() -> None:
    """Every room imports it, for UserError."""
    assert not rooms_of(imports_of(ROOT / "__init__.py"))


@pytest.mark.parametrize("room", LIBRARIES)
def test_some_rooms_stay_light(room: str) -> None:
    allowed = LIBRARIES[room] | set(sys.stdlib_module_names) | {"draftsmith"}
    foreign = {path.relative_to(ROOT).as_posix(): {name.split(".")[0] for name in imports_of(path)} - allowed for path in modules(room)}
    assert not {path: names for path, names in foreign.items() if names}


def test_optional_libraries_are_not_imported_at_load() -> None:
    early = {}
    for path in (path for room in ("", *ROOMS) for path in modules(room)):
        tree = loaded_at_once(ast.parse(path.read_text(encoding="utf-8")))
        package = ("draftsmith", *path.relative_to(ROOT).parts[:-1])  # `from . import vllm` is a module of ours
        early[path.relative_to(ROOT).as_posix()] = {name.split(".")[0] for name in imports(tree, package)} & OPTIONAL
    assert not {path: names for path, names in early.items() if names}


def test_the_reader_of_imports_sees_every_form() -> None:
    """The tests above are only as good as this."""
    later = "def f():\n    from . import tree\n    from ..recipes.schema import x"
    code = f"import draftsmith.eval.report\nfrom .. import UserError, heads\nfrom ..train import loop\n{later}"
    names = set(imports(ast.parse(code), ("draftsmith", "decode")))
    assert names == {
        "draftsmith.eval.report",
        "draftsmith.UserError",
        "draftsmith.heads",
        "draftsmith.train.loop",
        "draftsmith.decode.tree",
        "draftsmith.recipes.schema.x",
    }
    assert rooms_of(names) == {"eval", "heads", "train", "decode", "recipes"}
    code = "if TYPE_CHECKING:\n    import wandb\nelse:\n    import torch\nclass A:\n    def f(self):\n        import datasets"
    assert set(imports(loaded_at_once(ast.parse(code)), ())) == {"torch"}


def test_extras_that_messages_name_exist() -> None:
    extras = set(PYPROJECT["project"]["optional-dependencies"])
    named = {
        name
        for path in [*modules(), *(p for room in ROOMS for p in modules(room))]
        for name in re.findall(r"draftsmith\[([\w-]+)\]", path.read_text())
    }
    assert named and named <= extras, named - extras
