"""Recipes: what is read, what is refused and in which words, and that writing and reading are inverse."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from draftsmith import UserError
from draftsmith.recipes import schema, sections
from draftsmith.recipes.dialect import parse_yaml
from draftsmith.recipes.schema import (
    Data,
    Decode,
    DrafterRecipe,
    Eval,
    RecipeInfo,
    TargetRecipe,
    TargetRef,
    Train,
    list_recipes,
    load_recipe,
    parse_recipe,
    read_recipe_text,
    to_yaml,
)
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(schema.__file__).parent
EAGLE, TARGET = "quickstart/eagle3", "quickstart/target"


def refusal(*overrides: str, recipe: str = EAGLE) -> str:
    """The message with which `overrides` are refused; one line, as the command prints it."""
    with pytest.raises(UserError) as caught:
        load_recipe(recipe, overrides)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def section_classes(recipe: type[sections.Section]) -> Iterator[type[sections.Section]]:
    yield recipe
    for hint in sections.annotations_of(recipe).values():
        if sections.is_section(hint):
            yield from section_classes(hint)


# What comes with the package


def test_every_yaml_of_the_package_is_listed_and_loads() -> None:
    names = [path.relative_to(ROOT).with_suffix("").as_posix() for path in sorted(ROOT.rglob("*.yaml")) if path.parent.name != "accelerate"]
    assert names == [info.name for info in list_recipes()]
    assert {EAGLE, TARGET} <= set(names)
    for name in names:
        assert load_recipe(name) == parse_recipe(yaml.safe_load(to_yaml(load_recipe(name))))


def test_every_yaml_begins_with_the_commands_that_run_it() -> None:
    for info in list_recipes():
        comments = re.match(r"(#.*\n)+", read_recipe_text(info.name))
        assert comments and f"draftsmith train {info.name}" in comments[0], info.name


def test_listing_tells_kind_and_method() -> None:
    by_name = {info.name: info for info in list_recipes()}
    eagle, target = by_name[EAGLE], by_name[TARGET]
    assert eagle == RecipeInfo(name=EAGLE, kind="drafter", description=eagle.description, method="eagle3", target="builtin:quickstart", memory=None)
    assert eagle.description
    assert (target.kind, target.method) == ("target", None)


def test_the_target_has_the_published_shape() -> None:
    recipe = load_recipe(TARGET)
    assert isinstance(recipe, TargetRecipe)
    assert dataclasses.astuple(recipe.model) == (2048, 192, 512, 12, 6, 2, 32, 512)
    shipped = json.loads((Path(TargetRef().location) / "config.json").read_text())
    assert all(shipped[name] == value for name, value in dataclasses.asdict(recipe.model).items())
    train = recipe.train
    assert (train.steps, train.batch_size, train.micro_batch_size, train.sequence_length) == (400, 12, 2, 384)
    assert (train.lr, train.weight_decay, train.warmup_steps, train.decay_share, train.mixed_precision) == (3e-3, 0.05, 60, 0.0, "no")


def test_the_readme_lists_every_key_with_its_default() -> None:
    """The two tables are written by hand: this is what keeps them true."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    parts = [part for part in text.split("\n## ") if part.startswith("Keys of a")]
    for cls, part in zip((DrafterRecipe, TargetRecipe), parts, strict=True):
        rows = dict(re.findall(r"^\| `([a-z_.]+)` \| `?(.*?)`? \|", part, flags=re.MULTILINE))
        expected = {}
        for section in section_classes(cls):
            hints = sections.annotations_of(section)
            for entry in dataclasses.fields(section):
                if not sections.is_section(hints[entry.name]):
                    expected[section.key_of(entry.name)] = default_in_yaml(entry)
        assert rows == expected


def default_in_yaml(entry: dataclasses.Field[Any]) -> str:
    if entry.default_factory is not dataclasses.MISSING:
        default = entry.default_factory()
    elif entry.default is not dataclasses.MISSING:
        default = entry.default
    else:
        return "required"
    return "no" if default == "no" else yaml.safe_dump(default, default_flow_style=True).removesuffix("...\n").strip()


# Names, files


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntrain: {steps: 3}\n", encoding="utf-8")
    recipe = load_recipe(str(file), ["train.lr=1e-4"])
    assert recipe == DrafterRecipe(name="mine", train=Train(steps=3, lr=1e-4))
    assert recipe.run_folder == Path("runs/mine")
    assert load_recipe(str(file), ["out=/tmp/here"]).run_folder == Path("/tmp/here")


@pytest.mark.parametrize("name", ["quickstart/eagl3", "quikstart/eagle3.yaml"])
def test_a_name_that_is_not_there_brings_the_nearest(name: str) -> None:
    for call in (lambda: load_recipe(name), lambda: read_recipe_text(name)):
        with pytest.raises(UserError, match=rf"^recipe: wanted .* got '{name}'; did you mean quickstart/eagle3\?"):
            call()


def test_reading_a_builtin_does_not_leave_the_package() -> None:
    with pytest.raises(UserError):
        read_recipe_text("../recipes/quickstart/eagle3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name: [", "wanted YAML, got .* at line 1"),
        (b"name: mine\ntrain:\n  steps: 1\n  steps: 2\n", "the key 'steps' twice at line 3"),
        (b"name: \xff", "wanted a text file in UTF-8, got byte 6"),
        (b"", "recipe: wanted a mapping of keys, got null"),
        (b"- name", "recipe: wanted a mapping of keys, got"),
        (b"name: mine\ntrain:\n", "train: wanted a mapping of keys, got null"),
        (b"steps: 1", "steps: wanted a key of the recipe"),
        (b"train: {}", "name: wanted text .*, got nothing; add it"),
        (b"kind: draftr\nname: mine", "kind: wanted one of drafter, target, got 'draftr'"),
        (b"name: !!python/object/apply:os.system [ls]", "wanted YAML, got could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load_recipe(str(file))
    assert len(str(caught.value).splitlines()) == 1


# Keys and values


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.stpes", "train.steps"),
        ("evl.every", "eval.every"),
        ("lr", "train.lr"),
        ("train.depth", "decode.depth"),
        ("decode.top_k", "decode.topk"),
        ("trian", "train"),
        ("descripton", "description"),
        ("train.lr.x", "train.lr"),
    ],
)
def test_an_unknown_key_brings_the_nearest(key: str, nearest: str) -> None:
    assert refusal(f"{key}=1") == f"{key}: wanted a key of the recipe, got an unknown one; did you mean {nearest}?"


def test_an_unknown_key_in_a_file_is_named_with_its_section() -> None:
    with pytest.raises(UserError, match=r"^train\.stpes: .* did you mean train\.steps\?"):
        parse_recipe({"name": "mine", "train": {"stpes": 1}})
    with pytest.raises(UserError, match=r"^model\.layers: .* did you mean model\.num_hidden_layers\?"):
        parse_recipe({"kind": "target", "name": "mine", "model": {"layers": 2}})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=0", "train.steps: wanted an integer >= 1, got 0"),
        ("train.steps=10.0", "train.steps: wanted an integer >= 1, got 10.0"),
        ("train.steps=true", "train.steps: wanted an integer >= 1, got true"),
        ("train.steps=", "train.steps: wanted an integer >= 1, got null"),
        ("train.lr=0", "train.lr: wanted a number > 0, got 0"),
        ("train.lr=.nan", "train.lr: wanted a number > 0, got nan"),
        ("train.lr=.inf", "train.lr: wanted a number > 0, got inf"),
        ("train.lr=fast", "train.lr: wanted a number > 0, got 'fast'"),
        ("train.betas=[0.9]", "train.betas: wanted a list (each item a number >= 0 and < 1) with 2 items, got [0.9]"),
        ("train.betas=[0.9, 1]", "train.betas: wanted a number >= 0 and < 1, got 1"),
        ("train.warmup_ratio=1.1", "train.warmup_ratio: wanted a number >= 0 and <= 1, got 1.1"),
        ("train.mixed_precision=bf", "train.mixed_precision: wanted one of no, bf16, fp16, got 'bf'; did you mean bf16?"),
        ("train.mixed_precision=false", "train.mixed_precision: wanted one of no, bf16, fp16, got false"),
        (
            "train.trackers=[wandb, wandb]",
            "train.trackers: wanted a list (each item one of wandb, tensorboard) with at least 0 items, all different, got ",
        ),
        ("train.max_hours=0", "train.max_hours: wanted null or a number > 0, got 0"),
        ("objective.step_decay=0", "objective.step_decay: wanted null or a number > 0 and <= 1, got 0"),
        ("eval.temperatures=[-0.5]", "eval.temperatures: wanted a number >= 0, got -0.5"),
        ("eval.temperatures=0.5", "eval.temperatures: wanted a list (each item a number >= 0) with at least 1 item, all different, got 0.5"),
        ("eval.batch=[4, 4]", "eval.batch: wanted a list (each item an integer >= 1) with at least 1 item, all different, got [4, 4]"),
        ("eval.eager=yes", "eval.eager: wanted true or false, got 'yes'"),
        ("drafter.taps=[-1]", "drafter.taps: wanted an integer >= 0, got -1"),
        ("target.revision=1234567", "target.revision: wanted null or text that is not empty, got 1234567; quote it to make it text"),
        ("data.source=''", "data.source: wanted null or text that is not empty, got ''"),
        ("name=../x", "name: wanted text of letters, digits, '.', '_' and '-' (it names the run's folder), got '../x'"),
        ("kind=target", "kind: wanted drafter, got 'target'"),
        ("train", "override: wanted key=value, got 'train'; for example train.steps=100"),
        ("train={steps: 1}", "train: wanted one key of this section at a time, got 'train={steps: 1}'; for example train.steps=..."),
        ("train.steps=[", "train.steps: wanted YAML, got "),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(override: str, message: str) -> None:
    got = refusal(override)
    assert got == message or (message.endswith("got ") and got.startswith(message))


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        (EAGLE, ["train.batch_size=10", "train.micro_batch_size=4"], "train.micro_batch_size: wanted a divisor of train.batch_size (10), got 4"),
        (EAGLE, ["drafter.num_heads=4", "drafter.num_kv_heads=3"], "drafter.num_kv_heads: wanted a divisor of drafter.num_heads (4), got 3"),
        (EAGLE, ["data.response_tokens=256", "data.sequence_length=256"], "data.response_tokens: wanted fewer than data.sequence_length (256)"),
        (
            EAGLE,
            ["decode.tree=chain", "decode.depth=5", "decode.nodes=7"],
            "decode.nodes: wanted null, or decode.depth (5) as the tree is a chain, got 7",
        ),
        (EAGLE, ["decode.tree=dynamic", "decode.depth=5", "decode.nodes=4"], "decode.nodes: wanted at least decode.depth (5)"),
        (TARGET, ["model.num_key_value_heads=4"], "model.num_key_value_heads: wanted a divisor of model.num_attention_heads (6), got 4"),
        (TARGET, ["model.head_dim=31"], "model.head_dim: wanted an even number"),
        (TARGET, ["train.sequence_length=1024"], "train.sequence_length: wanted at most model.max_position_embeddings (512), got 1024"),
        (TARGET, ["train.micro_batch_size=5"], "train.micro_batch_size: wanted a divisor of train.batch_size (12), got 5"),
        (TARGET, ["model.vocab_size=260"], "model.vocab_size: wanted an integer >= 261, got 260"),
        (TARGET, ["train.mixed_precision=fp16"], "train.mixed_precision: wanted one of no, bf16, got 'fp16'"),
    ],
)
def test_values_that_contradict_each_other_are_refused(recipe: str, overrides: list[str], message: str) -> None:
    assert refusal(*overrides, recipe=recipe).startswith(message)


def test_overrides_are_yaml_and_the_last_wins() -> None:
    overrides = [
        "train.lr=1e-4",
        "train.mixed_precision=no",
        "eval.temperatures=[0, .7]",
        "drafter.taps=[0, 2]",
        "train.max_hours=null",
        "train.seed=1",
        "train.seed=2",
    ]
    recipe = load_recipe(EAGLE, overrides)
    assert isinstance(recipe, DrafterRecipe)
    assert (recipe.train.lr, recipe.train.mixed_precision, recipe.train.max_hours, recipe.train.seed) == (1e-4, "no", None, 2)
    assert recipe.eval.temperatures == [0.0, 0.7] and isinstance(recipe.eval.temperatures[0], float)
    assert recipe.drafter.taps == [0, 2]


def test_an_override_value_may_hold_an_equals_sign() -> None:
    assert load_recipe(EAGLE, ["description=a=b"]).description == "a=b"


def test_overrides_leave_the_mapping_as_it_was() -> None:
    mapping = {"name": "mine", "train": {"steps": 3}}
    parse_recipe(mapping, ["train.steps=4", "eval.every=5"])
    assert mapping == {"name": "mine", "train": {"steps": 3}}


def test_a_section_built_in_python_is_checked_too() -> None:
    with pytest.raises(UserError, match=r"^eval\.temperatures: wanted a number >= 0, got -0\.5"):
        Eval(temperatures=[-0.5])
    with pytest.raises(UserError, match=r"^train: wanted a mapping of keys"):
        DrafterRecipe(name="mine", train={"steps": 1})  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Train().steps = 2  # type: ignore[misc]


def test_defaults_are_not_shared() -> None:
    Data().temperatures.append(0.5)
    assert Data().temperatures == [0.0, 1.0]


def test_the_nodes_of_a_tree() -> None:
    assert Decode(depth=7).num_nodes == 7
    assert Decode(tree="dynamic", depth=7).num_nodes == 16
    assert Decode(tree="dynamic", depth=20).num_nodes == 20
    assert Decode(tree="dynamic", depth=7, nodes=30).num_nodes == 30


def test_where_a_target_is() -> None:
    assert TargetRef(path="Qwen/Qwen3-8B").location == "Qwen/Qwen3-8B"
    assert TargetRef().location == str(ROOT / "quickstart" / "target")
    with pytest.raises(UserError, match=r"^target\.path: wanted a target that comes with draftsmith \(builtin:quickstart\), got 'builtin:quick'"):
        _ = TargetRef(path="builtin:quick").location


# Writing


# Texts that one version of YAML or the other reads as something else, besides any text at all.
texts = (
    st.sampled_from(
        [
            "no",
            "1e-3",
            "08",
            "017",
            "1_000",
            "null",
            "~",
            "0x1f",
            "12:30",
            "2024-01-01",
            "<<",
            "=",
            "a: b",
            "- a",
            "#",
            "a\nb",
            " a ",
            "\x85",
            "\u2028",
        ]
    )
    | st.text()
)


@given(
    description=texts,
    source=texts.filter(lambda text: text and "\x00" not in text),
    lr=st.floats(min_value=0, max_value=1e6, exclude_min=True),
    seed=st.integers(min_value=0, max_value=2**31 - 1),
    temperatures=st.lists(st.floats(min_value=0, max_value=100), min_size=1, max_size=4, unique=True),
    taps=st.none() | st.lists(st.integers(min_value=0, max_value=100), min_size=1, unique=True),
    eager=st.booleans(),
)
def test_what_is_written_reads_back_equal(
    description: str, source: str, lr: float, seed: int, temperatures: list[float], taps: list[int] | None, eager: bool
) -> None:
    recipe = DrafterRecipe(
        name="mine",
        description=description,
        drafter=schema.Drafter(taps=taps),
        data=Data(source=source, seed=seed),
        train=Train(lr=lr),
        eval=Eval(temperatures=temperatures, eager=eager),
    )
    text = to_yaml(recipe)
    assert parse_recipe(parse_yaml(text, "written")) == recipe
    assert yaml.safe_load(text) == dataclasses.asdict(recipe)  # other readers, of YAML 1.1, see the same


def test_what_is_written_holds_every_key() -> None:
    values = yaml.safe_load(to_yaml(DrafterRecipe(name="mine")))
    keys = {
        f"{key}.{inner}" if isinstance(value, dict) else key
        for key, value in values.items()
        for inner in (value if isinstance(value, dict) else [""])
    }
    assert keys == set(sections.leaves_of(DrafterRecipe))
    assert next(iter(values)) == "kind"
