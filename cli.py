"""The `draftsmith` command: parse, call, print. Exit codes: 0 done, 1 the gate failed, 2 the user's input is wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from . import UserError, __version__
from .recipes.schema import DrafterRecipe, list_recipes, load_recipe, read_recipe_text

if TYPE_CHECKING:
    from .decode.target import Target

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help=f"draftsmith {__version__}: train drafters for speculative decoding, and measure them."
)
recipes_app = typer.Typer(no_args_is_help=True, help="The recipes that come with draftsmith.")
app.add_typer(recipes_app, name="recipes")
data_app = typer.Typer(no_args_is_help=True, help="Data that drafters are made of.")
app.add_typer(data_app, name="data")
console = Console()
DRAFTER_HELP = (
    "a drafter's folder, such as runs/quickstart/drafter; a causal LM (folder or hub name) with the target's tokenizer; "
    "prompt_lookup, suffix_automaton, lookahead or token_recycling; retrieval:FOLDER with a datastore's folder; "
    "hybrid:A+B with two of these, whose trees are merged; "
    "cascade:INNER+DRAFT with prompt_lookup, suffix_automaton or token_recycling, which drafts for a causal LM, which drafts for the target; "
    "early_exit:LAYERS, such as early_exit:0-3, with some of the target's own layers"
)
SUITE_HELP = (
    '"stdlib", a .jsonl of prompts, or one of mt_bench, humaneval, gsm8k, alpaca, cnn_dm, spec_bench, speed_bench, from the hub or, '
    "as NAME:FILE.jsonl, from a local copy"
)
TREE_HELP = (
    "chain, dynamic, or cost_aware: as large as it pays by latencies measured at the start; as tuned (tuning.json) if nothing is given, or chain"
)
Tree = Annotated[str | None, typer.Option(help=TREE_HELP)]
Depth = Annotated[int | None, typer.Option(help="draft tokens in a row; 5 if not given, or as many as the drafter can")]
Topk = Annotated[int | None, typer.Option(help="children a node of a tree; 4 if not given")]
Nodes = Annotated[int | None, typer.Option(help="draft nodes of a tree; 16 if not given")]
Length = Annotated[
    str | None, typer.Option(help="additive, acceptance, confidence, entropy, expected or predicted: decides a chain's depth round by round")
]
Threshold = Annotated[float | None, typer.Option(help="of acceptance, below which confidence, entropy and predicted stop; 0.3 if not given")]
CrossTokenizer = Annotated[bool, typer.Option(help="let a causal LM draft that has another tokenizer, with the tokens that both have")]
Template = Annotated[
    list[str] | None,
    typer.Option(help="key=value for the target's chat template, such as enable_thinking=false; as the drafter was trained, if not given"),
]
SampleTokens = Annotated[int | None, typer.Option(min=1, help="what a sequence has on average, for the plan; data.sequence_length if not given")]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile for the target's layers; the first requests wait for the compiler")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, such as train.steps=100")]


@app.command()
def train(recipe: str, overrides: Overrides = None) -> None:
    """Run a recipe: data, training, evaluation, report."""
    from .train.run import run

    raise typer.Exit(run(load_recipe(recipe, overrides or [])))


@app.command()
def quickstart(overrides: Overrides = None) -> None:
    """From nothing to a report, offline, on whatever machine this is: on its GPU, or with one process a core."""
    from .train.run import run_on_all_cores

    recipe = load_recipe("quickstart/eagle3", overrides or [])
    assert isinstance(recipe, DrafterRecipe)
    raise typer.Exit(run_on_all_cores(recipe))


@app.command("eval")
def eval_command(
    drafter: Annotated[str, typer.Argument(help=DRAFTER_HELP)],
    out: Annotated[Path, typer.Option(help="folder for report.json, report.md and report.html")],
    target: Annotated[str, typer.Option(help="folder, hub name or builtin:NAME")] = "builtin:quickstart",
    suite: Annotated[str, typer.Option(help=SUITE_HELP)] = "stdlib",
    num_prompts: int = 64,
    max_new_tokens: int = 128,
    temperature: Annotated[
        list[str] | None, typer.Option(help='several: --temperature 0 1, or 0,1; "default": as the model\'s own settings; 0 and 1 if not given')
    ] = None,
    batch: Annotated[list[str] | None, typer.Option(help="sizes that get rows beside batch 1, several: --batch 4 8, or 4,8")] = None,
    rule: Annotated[str, typer.Option(help="how drafts are judged; shared_noise is token-identical to plain decoding")] = "shared_noise",
    tree: Tree = None,
    depth: Depth = None,
    topk: Topk = None,
    nodes: Nodes = None,
    length: Length = None,
    threshold: Threshold = None,
    timed_prompts: Annotated[
        int | None, typer.Option(help="time so many prompts, and put the others through the gate in batches; all if not given")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; measured if not given")] = None,
    eager: Annotated[bool, typer.Option(help="time transformers' own generate too")] = True,
    assisted: Annotated[bool, typer.Option(help="time transformers' assisted generation too, if the drafter is a causal LM")] = True,
    floor: Annotated[bool, typer.Option(help="measure prompt lookup beside it: what costs nothing")] = True,
    costs: Annotated[bool, typer.Option(help="fit the cost model: what limits the speed-up")] = True,
    other: Annotated[
        list[str] | None, typer.Option(help="another drafter, on the timed prompts, or free: all that need no training and no data; may be repeated")
    ] = None,
    seed: int = 0,
    cross_tokenizer: CrossTokenizer = False,
    template: Template = None,
    compile: Compile = False,
) -> None:
    """Measure a drafter: the losslessness gate, tau, and the speed against all baselines. Exits with 1 if the gate fails."""
    import time

    from .decode.target import Target
    from .eval.drafting import decode_settings
    from .eval.evaluation import evaluate_drafter
    from .eval.machine import device_name
    from .eval.report import terminal_table, write_report
    from .heads.tuning import read_tuning
    from .recipes.schema import Eval, TargetRef

    counts = {"num-prompts": num_prompts, "max-new-tokens": max_new_tokens, "timed-prompts": timed_prompts, "threads": threads}
    _check_counts(counts)
    settings = _decode_options(tree, depth, topk, nodes, length, threshold)
    temperatures, default = _temperatures(temperature)
    _make_folder(out)
    part = Eval(
        suite=suite,
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        temperatures=temperatures,
        default_sampling=default,
        batch=_sizes("batch", batch),
        rule=rule,
        timed_prompts=timed_prompts,
        threads=threads,
        eager=eager,
        assisted=assisted,
        floor=floor,
        costs=costs,
        others=other or [],
        seed=seed,
    )
    tuning = read_tuning(drafter)
    asked = any(value is not None for value in settings.values())
    began = time.perf_counter()
    loaded = Target.load(TargetRef(path=target).location)
    seconds = time.perf_counter() - began
    if compile:
        loaded.compile()
    with console.status("evaluation") as status:
        report, _, _ = evaluate_drafter(
            loaded,
            drafter,
            lambda head: decode_settings(head, tuning, **settings, device=device_name(loaded.device)),
            part,
            cross_tokenizer=cross_tokenizer,
            opened=lambda contract: _use_template(loaded, contract, template),
            target_seconds=seconds,
            tuned=None if tuning is None or asked else tuning,
            progress=lambda label, done, every: status.update(f"evaluation {label}: {done} of {every} prompts"),
        )
    files = write_report(report, out)
    console.print(terminal_table(report))
    console.print(f"report: {files['report.html'].resolve()}", soft_wrap=True)
    raise typer.Exit(1 if report.failed else 0)


def _make_folder(out: Path) -> None:
    """Found out before anything is measured."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: wanted a folder, or a name for a new one, got {out} ({error.strerror}); give another") from error


def _check_counts(counts: dict[str, int | None], least: int = 1) -> None:
    for name, number in counts.items():
        if number is not None and number < least:
            raise UserError(f"--{name}: wanted an integer >= {least}, got {number}")


def _decode_options(
    tree: str | None, depth: int | None, topk: int | None, nodes: int | None, length: str | None, threshold: float | None
) -> dict[str, Any]:
    """What `decode_settings` takes. Raises UserError for what is wrong with it by itself, before anything is loaded."""
    from .recipes.schema import Decode

    _check_counts({"depth": depth, "topk": topk, "nodes": nodes})
    if tree == "static":
        raise UserError("--tree: wanted chain, dynamic or cost_aware, got static; static trees come from draftsmith tune, or a recipe's decode.paths")
    Decode(tree=tree or "chain", length=length, threshold=threshold)  # type: ignore[arg-type]
    return {"tree": tree, "depth": depth, "topk": topk, "nodes": nodes, "length": length, "threshold": threshold}


def _use_template(target: Target, contract: dict[str, Any], options: list[str] | None) -> None:
    """Render prompts as in the drafter's training, or as the options say, which is told if it is not the same."""
    from .decode.prompts import set_template
    from .recipes.dialect import parse_yaml

    trained, given = contract.get("template", {}), {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals:
            raise UserError(f"--template: wanted key=value, got {option}; for example enable_thinking=false")
        given[name] = parse_yaml(value, f"--template {name}")
    assert target.tokenizer is not None
    set_template(target.tokenizer, trained | given)
    if differing := [name for name in given if "template" in contract and given[name] != trained.get(name)]:
        print(f"note: the drafter was trained with the template's variables {trained}, not with this {', '.join(differing)}", file=sys.stderr)


def _temperatures(given: list[str] | None) -> tuple[list[float], bool]:
    """(temperatures, whether the model's own settings are asked for too)."""
    words = [word for text in given or ["0,1"] for word in text.split(",") if word]
    found: list[float] = []
    for word in words:
        try:
            value = 0.0 if word == "default" else float(word)
        except ValueError as error:
            raise UserError(f"--temperature: wanted numbers >= 0 or default, got {word!r}") from error
        if not (value >= 0 and value < float("inf")):
            raise UserError(f"temperature: wanted a finite number >= 0, got {word}")
        if word != "default" and value not in found:
            found.append(value)
    if not found:
        raise UserError("--temperature: wanted a number beside default, got none; add 0, to which the other rows are compared")
    return found, "default" in words


def _sizes(name: str, given: list[str] | None) -> list[int]:
    words = [word for text in given or ["1"] for word in text.split(",") if word]
    if not words or not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise UserError(f"--{name}: wanted integers >= 1, got {' '.join(words) or 'nothing'}")
    return list(dict.fromkeys(int(word) for word in words))


@app.command()
def tune(
    drafter: Annotated[str, typer.Argument(help="a drafter's folder, such as runs/quickstart/drafter")],
    target: Annotated[str, typer.Option(help="folder, hub name or builtin:NAME")] = "builtin:quickstart",
    suite: Annotated[str, typer.Option(help=SUITE_HELP + "; its development prompts, never those that are reported")] = "stdlib",
    num_prompts: int = 16,
    max_new_tokens: int = 64,
    temperature: Annotated[list[str] | None, typer.Option(help="those to tune for, several: --temperature 0 1; 0 and 1 if not given")] = None,
    most_nodes: Annotated[int, typer.Option(help="draft nodes of the largest tree that is looked at")] = 63,
    threads: Annotated[int | None, typer.Option(help="CPU threads; measured if not given")] = None,
    cpu_time: Annotated[bool, typer.Option(help="measure CPU time: for a machine with other work, with --threads 1")] = False,
    template: Template = None,
    seed: int = 0,
) -> None:
    """Find the best draft for this machine: chain, dynamic or static tree. eval, generate and export use its tuning.json from then on."""
    import time

    from .decode.prompts import render_prompt
    from .decode.target import Target
    from .eval.machine import choose_threads
    from .eval.suites import load_suite
    from .eval.tune import TuneSettings
    from .eval.tune import tune as find
    from .heads.registry import open_drafter
    from .heads.tuning import write_tuning
    from .recipes.schema import TargetRef

    folder = Path(drafter)
    if not (folder / "contract.json").is_file():
        raise UserError(f"drafter {drafter}: wanted a drafter's folder, in which tuning.json can be kept, got none; give a run's drafter/ folder")
    _check_counts({"num-prompts": num_prompts, "threads": threads})
    _check_counts({"max-new-tokens": max_new_tokens, "most-nodes": most_nodes}, least=2)
    if cpu_time and threads != 1:
        raise UserError("--cpu-time: wanted --threads 1, as CPU time adds up over threads, got more; add it")
    temperatures, _ = _temperatures(temperature)
    prompts = load_suite(suite, num_prompts, split="dev", seed=seed)
    loaded = Target.load(TargetRef(path=target).location)
    head, contract = open_drafter(folder, loaded)
    _use_template(loaded, contract, template)
    choose_threads(loaded, render_prompt(loaded.tokenizer, prompts.prompts[0]), threads)
    settings = TuneSettings(
        temperatures=temperatures,
        max_new_tokens=max_new_tokens,
        most_nodes=most_nodes,
        seed=seed,
        clock=time.process_time if cpu_time else time.perf_counter,
    )
    with console.status("tuning") as status:
        tuning, raced, chosen = find(loaded, head, prompts, settings, lambda what: status.update(f"tuning: {what}"))
    table = Table("draft", "depth", "nodes", "tau", "predicted", "speed-up (95 %)", "over default (95 %)", "", box=None)
    for candidate in raced:
        spans = [f"{x.value:.2f}x ({x.lo:.2f}-{x.hi:.2f})" if x else "" for x in (candidate.measured, candidate.over_default)]
        shape = (str(n) for n in candidate.shape)
        taus = ", ".join(f"{gain.tau:.2f}" for gain in candidate.gains.values())
        table.add_row(candidate.kind, *shape, taus, f"{candidate.predicted:.2f}x", *spans, "chosen" if candidate is chosen else "")
    console.print(table)
    for line in tuning.measured["words"]:
        console.print(line, soft_wrap=True, highlight=False)
    console.print(f"best chain for engines that draft chains: {tuning.num_speculative_tokens} tokens", highlight=False)
    console.print(f"tuned: {write_tuning(folder, tuning).resolve()}", soft_wrap=True, highlight=False)


@app.command()
def check(
    drafter: Annotated[Path, typer.Argument(help="a drafter's folder")],
    target: Annotated[str, typer.Option(help="folder, hub name or builtin:NAME")] = "builtin:quickstart",
    measure: Annotated[bool, typer.Option("--measure", help="compare acceptance with that recorded at training")] = False,
    threshold: Annotated[float, typer.Option(help="share of the recorded acceptance that must be left")] = 0.9,
    record: Annotated[bool, typer.Option("--record", help="record the acceptance on this target, which must be the drafter's own")] = False,
    suite: Annotated[str, typer.Option(help="prompts to record: " + SUITE_HELP)] = "stdlib",
    num_prompts: Annotated[int, typer.Option(help="prompts to record")] = 32,
    max_new_tokens: Annotated[int, typer.Option(help="new tokens of each that is recorded")] = 64,
    template: Template = None,
) -> None:
    """Does this drafter still belong to this target? Exits with 1 if not: by fingerprint, or with --measure by what is left of its acceptance."""
    from .decode.prompts import render_prompt
    from .decode.target import Target
    from .eval.check import check as compare_with
    from .eval.check import measure_acceptance, write_acceptance
    from .eval.drafting import decode_settings
    from .eval.suites import load_suite
    from .heads.registry import open_drafter
    from .heads.tuning import read_tuning
    from .recipes.schema import TargetRef

    if not 0 < threshold <= 1:
        raise UserError(f"--threshold: wanted a share in (0, 1], got {threshold:g}")
    if not record:
        result = compare_with(drafter, Target.load(TargetRef(path=target).location), measure=measure, threshold=threshold)
        for line in result.lines():
            console.print(line, soft_wrap=True, highlight=False)
        raise typer.Exit(1 if result.failed else 0)
    if num_prompts < 1 or max_new_tokens < 2:
        raise UserError(f"--record: wanted at least one prompt and two new tokens, got {num_prompts} and {max_new_tokens}")
    prompts = load_suite(suite, num_prompts, split="dev")
    loaded = Target.load(TargetRef(path=target).location)
    head, contract = open_drafter(drafter, loaded)
    _use_template(loaded, contract, template)
    assert loaded.tokenizer is not None
    ids = [render_prompt(loaded.tokenizer, messages) for messages in prompts.prompts]
    found = measure_acceptance(loaded, head, decode_settings(head, read_tuning(drafter)), ids, (0.0, 1.0), max_new_tokens)
    console.print(f"tau {found.tau:.3f}, recorded: {write_acceptance(drafter, found).resolve()}", soft_wrap=True, highlight=False)


@app.command()
def monitor(
    source: Annotated[str, typer.Argument(help="a .jsonl of acceptance events, - for standard input, or a server's metrics: a URL or a file")],
    costs: Annotated[Path, typer.Option(help="measured latencies: a drafter's folder (tuning.json), a run or evaluation folder (report.json)")],
    window: Annotated[int, typer.Option(help="rounds that are judged together, of events")] = 1000,
    every: Annotated[float | None, typer.Option(help="read a URL again every so many seconds, and judge what happened between")] = None,
    depth: Annotated[int, typer.Option(help="draft tokens a round, where the metrics do not tell")] = 5,
) -> None:
    """Does speculation still pay? By the cost model and the acceptance in service. Exits with 1 if it has stopped paying."""
    import time

    from .eval.monitor import difference, event_of_metrics, events_of, fetch, judge, judge_gauge, read_costs, read_source, windows

    if window < 1 or depth < 1 or (every is not None and not every > 0):
        raise UserError(f"monitor: wanted --window and --depth of at least 1 and --every above 0, got {window}, {depth} and {every}")
    model = read_costs(costs)
    text = read_source(source)
    last = None
    if not isinstance(text, str):
        for group in windows(events_of(text, source), window):
            last = judge(group, model)
            console.print(str(last), soft_wrap=True, highlight=False)
        if last is None:
            raise UserError(f"monitor {source}: wanted at least one event, got none")
        raise typer.Exit(1 if last.stopped else 0)
    counted, gauge = event_of_metrics(text)
    last = judge([counted], model) if counted is not None else judge_gauge(gauge or 0.0, depth, model)
    console.print(str(last), soft_wrap=True, highlight=False)
    while every is not None and source.startswith("http"):
        time.sleep(every)
        before = counted
        try:
            counted, gauge = event_of_metrics(fetch(source))
        except UserError as error:  # a server that restarts is no reason to stop watching it
            print(f"note: {error}", file=sys.stderr)
            continue
        happened = difference(counted, before) if counted is not None and before is not None else None
        if happened is not None or gauge is not None:
            last = judge([happened], model) if happened is not None else judge_gauge(gauge or 0.0, depth, model)
            console.print(str(last), soft_wrap=True, highlight=False)
    raise typer.Exit(1 if last.stopped else 0)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="run folders, evaluation folders or report.json files")],
    out: Annotated[Path | None, typer.Option(help="folder for compare.md and compare.png")] = None,
) -> None:
    """One table over several reports, and which drafter is faster, with its certainty. Exits with 1 if any of them failed its gate."""
    from .eval.compare import comparison_markdown, comparison_plot, comparison_table, differences, gather, verdicts

    if out is not None:
        _make_folder(out)
    entries = gather(runs)
    console.print(comparison_table(entries), soft_wrap=True)
    for line in [*differences(entries), *map(str, verdicts(entries))]:
        console.print(line, soft_wrap=True, highlight=False)
    if out is not None:
        (out / "compare.md").write_text(comparison_markdown(entries), encoding="utf-8")
        comparison_plot(entries, out / "compare.png")
        console.print(f"comparison: {(out / 'compare.md').resolve()}", soft_wrap=True)
    raise typer.Exit(1 if any(not row.passed for entry in entries for row in entry.rows) else 0)


@app.command()
def generate(
    drafter: Annotated[str, typer.Argument(help=DRAFTER_HELP)],
    prompt: Annotated[str, typer.Option(help="what to continue")],
    target: Annotated[str, typer.Option(help="folder, hub name or builtin:NAME")] = "builtin:quickstart",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    tree: Tree = None,
    depth: Depth = None,
    topk: Topk = None,
    nodes: Nodes = None,
    length: Length = None,
    threshold: Threshold = None,
    cross_tokenizer: CrossTokenizer = False,
    template: Template = None,
    compile: Compile = False,
) -> None:
    """Stream text; tokens that were drafted are coloured, the target's own are plain."""
    from .decode.engine import Engine
    from .decode.prompts import eos_ids, render_prompt
    from .decode.sampling import SamplingParams
    from .decode.target import Target
    from .eval.drafting import decode_settings, make_proposer
    from .eval.machine import device_name
    from .heads.registry import open_drafter
    from .heads.tuning import read_tuning
    from .recipes.schema import TargetRef

    params = SamplingParams(temperature=temperature, seed=seed)
    settings = _decode_options(tree, depth, topk, nodes, length, threshold)
    loaded = Target.load(TargetRef(path=target).location)
    if compile:
        loaded.compile()
    head, contract = open_drafter(drafter, loaded, cross_tokenizer=cross_tokenizer)
    _use_template(loaded, contract, template)
    tokenizer = loaded.tokenizer
    assert tokenizer is not None

    def show(row: int, new: list[int], drafted: int) -> None:
        console.print(tokenizer.decode(new[:drafted]), style="green", end="", markup=False, highlight=False)
        console.print(tokenizer.decode(new[drafted:], skip_special_tokens=True), end="", markup=False, highlight=False)

    ids = render_prompt(tokenizer, [{"role": "user", "content": prompt}])
    decode = decode_settings(head, read_tuning(drafter), **settings, device=device_name(loaded.device))
    out = Engine(loaded, make_proposer(head, decode, loaded, ids)).generate(
        [ids], params, max_new_tokens, eos_ids=eos_ids(loaded.model), on_tokens=show
    )
    new, rounds = len(out.tokens[0]) - 1, len(out.rounds[0])
    if rounds:
        console.print(f"\n\n{new + 1} tokens, tau {new / rounds:.2f}, {new / out.times.decode:.1f} tokens/s", highlight=False)


@app.command("export")
def export_command(
    drafter: Annotated[str, typer.Argument(help="a drafter's folder, a causal LM (folder or hub name), or early_exit:LAYERS")],
    out: Annotated[Path, typer.Option(help="the new folder")],
    format: Annotated[str, typer.Option(help="vllm, speculators, sglang, tensorrt-llm, tgi, llamacpp, openvino or transformers")] = "vllm",
    target: Annotated[str | None, typer.Option(help="folder, hub name or builtin:NAME; that of the drafter's contract if not given")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; as saved if not given")] = None,
    license: Annotated[str | None, typer.Option(help="for the card; that of the drafter's contract or the target's card if not given")] = None,
    verify: Annotated[bool, typer.Option(help="run the engine, and compare its drafts with ours; see --engine-python")] = False,
    python: Annotated[
        str | None, typer.Option("--engine-python", help="the python of the engine's own environment; else DRAFTSMITH_<FORMAT>_PYTHON, else this one")
    ] = None,
    cross_tokenizer: CrossTokenizer = False,
) -> None:
    """Write a drafter in the format of a serving engine, checked; refuse what the engine would not load or not compute."""
    import torch

    from .decode.target import Target
    from .eval.in_engine import add_to_report, engine_python, verify_export
    from .heads.export.write import export, read_tuning, source_of, to_gguf
    from .heads.registry import contract_target, open_drafter
    from .recipes.schema import TargetRef

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in dtypes:
        raise UserError(f"--dtype: wanted one of {', '.join(dtypes)}, got {dtype}")
    if verify:
        engine_python(format, python)
    name = target or contract_target(drafter) or "builtin:quickstart"
    loaded = Target.load(TargetRef(path=name).location, dtype="float32" if verify else "auto")  # as the engine runs
    opened, contract = open_drafter(drafter, loaded, cross_tokenizer=cross_tokenizer)
    contract = contract | ({"license": license} if license is not None else {})
    source = source_of(opened, contract, loaded, tuning=read_tuning(Path(drafter)), dtype=dtypes.get(dtype or ""))
    notes = export(source, format, out, convert=not verify)
    console.print(f"{source.method} for {format}: {out.resolve()} (launch command: README.md)", soft_wrap=True, highlight=False)
    for note in notes:
        console.print(f"- {note}", soft_wrap=True, highlight=False, markup=False)
    if verify:
        result = verify_export(source, format, out, python)
        add_to_report(result, Path(drafter).parent / "eval")
        console.print(result.line, soft_wrap=True, highlight=False)
        for note in to_gguf(source, out, python) if format == "llamacpp" else []:
            console.print(f"- {note}", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(0 if result.passed else 1)


@app.command("import")
def import_command(
    folder: Annotated[Path, typer.Argument(help="a head of the EAGLE repository, SpecForge, speculators, vLLM, TGI or Medusa")],
    out: Annotated[Path, typer.Option(help="the drafter's new folder")],
    target: Annotated[str, typer.Option(help="folder, hub name or builtin:NAME")] = "builtin:quickstart",
    taps: Annotated[
        str | None, typer.Option(help="layers that it reads, such as 2,16,29 (outputs of layers, counted from 1), if its config lies")
    ] = None,
) -> None:
    """Read a head of others as a drafter of ours, to be evaluated and trained on."""
    from .decode.target import Target
    from .heads.export.importing import import_drafter
    from .heads.registry import save_drafter
    from .recipes.schema import TargetRef

    if taps is not None and not all(part.strip().isdigit() for part in taps.split(",")):
        raise UserError(f"--taps: wanted layers such as 2,16,29, got {taps}")
    layers = None if taps is None else [int(part) for part in taps.split(",")]
    if out.exists():
        raise UserError(f"--out: wanted a new folder, got {out}, which exists; give another name")
    loaded = Target.load(TargetRef(path=target).location)
    head, contract = import_drafter(folder, loaded, layers)
    contract["target"]["name"] = target
    save_drafter(head, out, contract)
    console.print(f"{head.method}, taps {list(head.taps)}: draftsmith eval {out} --target {target} --out ...", soft_wrap=True, highlight=False)


@data_app.command()
def datastore(
    out: Annotated[Path, typer.Option(help="the new folder")],
    target: Annotated[str, typer.Option(help="folder, hub name or builtin:NAME")] = "builtin:quickstart",
    source: Annotated[
        str, typer.Option(help='"stdlib", a .jsonl with {"text": ..} or {"messages": [..]} a line, a text file, or a folder of text files')
    ] = "stdlib",
    limit: Annotated[int | None, typer.Option(help="only the first so many documents")] = None,
) -> None:
    """Build the datastore that retrieval:FOLDER drafts from, with the target's tokenizer."""
    from .decode.target import Target
    from .recipes.schema import TargetRef
    from .train.datastore import make_datastore

    loaded = Target.load(TargetRef(path=target).location)
    with console.status("datastore") as status:
        store = make_datastore(
            loaded, source, out, limit=limit, progress=lambda documents, tokens: status.update(f"datastore: {documents} documents, {tokens} tokens")
        )
    tokens = len(store.tokens) - store.documents  # one separator a document
    console.print(f"{store.documents} documents, {tokens} tokens: use it with draftsmith eval retrieval:{out}", soft_wrap=True, highlight=False)


@data_app.command()
def regenerate(recipe: str, overrides: Overrides = None) -> None:
    """Make the target's own answers to a recipe's prompts, where training looks for them: by our engine, or by data.server=http://...

    What was interrupted goes on, with nothing lost or made twice.
    """
    from .train.preparing import run_regenerate
    from .train.storing import check_drafter

    run_regenerate(check_drafter(load_recipe(recipe, overrides or [])), console)


@data_app.command()
def inspect(
    recipe: str,
    overrides: Overrides = None,
    html: Annotated[Path | None, typer.Option(help="write a page too, which needs nothing else")] = None,
    samples: Annotated[int, typer.Option(min=0, help="sequences that are shown")] = 3,
) -> None:
    """Show what is learned of a recipe's data, token by token, and what is likely to be wrong with it. Exits with 1 if training makes no sense."""
    from .train.inspection import inspect, print_inspection, write_html
    from .train.storing import check_drafter

    inspection = inspect(check_drafter(load_recipe(recipe, overrides or [])))
    print_inspection(inspection, console, samples)
    if html is not None:
        write_html(inspection, html, samples)
        console.print(f"page: {html.resolve()}", soft_wrap=True, highlight=False)
    raise typer.Exit(1 if inspection.severe else 0)


@data_app.command()
def features(
    recipe: str,
    overrides: Overrides = None,
    verify: Annotated[bool, typer.Option("--verify", help="only compare every byte with what was written; exits with 1 if any differs")] = False,
    sample_tokens: SampleTokens = None,
) -> None:
    """Write the target's features of a recipe's data to files, from which features.source=store trains without the target's layers.

    What was interrupted goes on; the files are in features.folder.
    """
    from .train.storing import check_drafter, make_store, verify_store

    loaded = check_drafter(load_recipe(recipe, overrides or []))
    if verify:
        raise typer.Exit(0 if verify_store(loaded, console) else 1)
    make_store(loaded, console, sample_tokens)


@data_app.command()
def plan(
    recipe: str,
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(help="a config.json in place of the target's own: nothing else of it is needed")] = None,
    device: Annotated[str | None, typer.Option(help="a GPU to plan for, such as h100; this machine's if not given")] = None,
    processes: Annotated[int, typer.Option(min=1, help="each with a device of its own")] = 1,
    sample_tokens: SampleTokens = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Tokens, disk, memory by part and time that a recipe will take. Exits with 2 if it does not fit, and says what would."""
    import json

    from .train import plan as planning
    from .train.run import make_objective
    from .train.storing import check_drafter

    loaded = check_drafter(load_recipe(recipe, overrides or []))
    made = planning.make_plan(loaded, make_objective(loaded), config=config, device=device, processes=processes, sample_tokens=sample_tokens)
    print(json.dumps(planning.as_json(made)) if as_json else planning.as_text(made))
    for refusal in made.refusals:
        print(f"error: {refusal}", file=sys.stderr)
    raise typer.Exit(2 if made.refusals else 0)


@recipes_app.command("list")
def list_command() -> None:
    """Names, methods, targets, the memory of a device that they take (computed), and what they are for."""
    infos = list_recipes()
    rows = [("name", "method", "target", "memory")] + [(i.name, i.method or "-", i.target or "-", i.memory or "-") for i in infos]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row, purpose in zip(rows, ["purpose", *(info.description for info in infos)], strict=True):  # a name cut short would be of no use
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + "  " + purpose)


@recipes_app.command()
def show(name: str) -> None:
    """Print a recipe with its comments."""
    print(read_recipe_text(name), end="")


@recipes_app.command()
def copy(name: str, destination: Path) -> None:
    """Copy a recipe to a file of yours, to be changed."""
    text = read_recipe_text(name)
    if destination.exists():
        raise UserError(f"destination: wanted a new file, got {destination}, which exists; give another name")
    destination.write_text(text, encoding="utf-8")


def spread(arguments: Sequence[str], names: Sequence[str] = ("--temperature", "--batch")) -> list[str]:
    """`--batch 1 4` as `--batch 1 --batch 4`: options of several values, which click takes one at a time."""
    out: list[str] = []
    open_name = ""
    for word in arguments:
        if word.startswith("-"):
            open_name = word if word in names else ""
        elif open_name and out[-1] != open_name and re.fullmatch(r"[\d.,]+|default", word):
            out.append(open_name)
        out.append(word)
    return out


def main() -> None:
    """Entry point: a UserError is one line and exit code 2."""
    try:
        app(args=spread(sys.argv[1:]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
