"""From what decoding gave to a row of the report: totals over totals, intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import UserError
from ..decode.engine import Engine, Generation, Round
from .runs import Item, Runs, Sampling, Settings
from .schema import Cost, Lossless, Memory, OutputBucket, Row, Speedup, SpeedupEndToEnd, TimeSplit, TokensPerSecond
from .stats import mean_ratio_interval, paired_ratio_interval
from .suites import ALL

BUCKETS = (0, 256, 1024, 2048, None)


def only(runs: Runs, items: Sequence[Item], category: str) -> Runs:
    """The units of one category."""
    kept = [k for k, unit in enumerate(runs.units) if items[unit[0]].category == category]

    def pick(values: list[Any]) -> list[Any]:
        return [values[k] for k in kept] if values else []

    ours = {name: pick(generations) for name, generations in runs.ours.items()}
    return Runs(pick(runs.units), pick(runs.owners), ours, pick(runs.base), pick(runs.eager), pick(runs.assisted), runs.peaks)


def together(owners: Sequence[int], *columns: Sequence[float]) -> list[list[float]]:
    """The columns, summed by owner: what belongs together is drawn together."""
    places = {owner: place for place, owner in enumerate(dict.fromkeys(owners))}
    sums = [[0.0] * len(places) for _ in columns]
    for column, into in zip(columns, sums, strict=True):
        for owner, value in zip(owners, column, strict=True):
            into[places[owner]] += value
    return sums


def decoded(generation: Generation) -> int:
    """Tokens after the first of each row, which the prefill gives."""
    return sum(len(tokens) - 1 for tokens in generation.tokens)


def row_of(
    suite: str,
    sampling: Sampling,
    gate: Lossless,
    runs: Runs,
    rest: Runs | None,
    name: str,
    settings: Settings,
    engine: Engine,
    *,
    memory: Memory,
    load_seconds: dict[str, float],
    batch: int = 1,
    category: str = ALL,
) -> Row:
    """tau and acceptance over all prompts, speed over the timed units; a prompt that ends with its first token says nothing of either."""
    ours, base, options = runs.ours[name], runs.base, settings.options
    every = [*ours, *(rest.ours[name] if rest is not None else [])]
    owners = [*runs.owners, *(rest.owners if rest is not None else [])]
    told = [(who, tokens, rounds) for who, g in zip(owners, every, strict=True) for tokens, rounds in zip(g.tokens, g.rounds, strict=True)]
    told = [entry for entry in told if len(entry[1]) > 1]
    pairs = [(tokens, rounds) for _, tokens, rounds in told]
    if not pairs:
        raise UserError("prompts: wanted some that the target answers with more than one token, got none; raise max_new_tokens, or give others")
    entries = [r for _, rounds in pairs for r in rounds]
    whose = [who for who, _, _ in told] if batch == 1 else list(range(len(told)))
    emitted, taken = together(whose, [len(tokens) - 1 for tokens, _ in pairs], [len(rounds) for _, rounds in pairs])
    tau = mean_ratio_interval(emitted, taken, **options)
    clocked = [k for k in range(len(runs.units)) if decoded(ours[k]) > 0 and decoded(base[k]) > 0]
    if not clocked:
        raise UserError("prompts: wanted a timed one that the target answers with more than one token, got none; time more prompts")
    tokens, base_tokens = [decoded(ours[k]) for k in clocked], [decoded(base[k]) for k in clocked]
    seconds, base_seconds = [ours[k].times.decode for k in clocked], [base[k].times.decode for k in clocked]
    whole_tokens, base_whole_tokens = ([n + len(runs.units[k]) for n, k in zip(x, clocked, strict=True)] for x in (tokens, base_tokens))
    whole_seconds, base_whole_seconds = ([x[k].times.total for k in clocked] for x in (ours, base))
    timed = [runs.owners[k] for k in clocked]
    speed = paired_ratio_interval(*together(timed, tokens, seconds, base_tokens, base_seconds), **options)
    whole = paired_ratio_interval(*together(timed, whole_tokens, whole_seconds, base_whole_tokens, base_whole_seconds), **options)
    eagerly = [p for p, k in enumerate(clocked) if k < len(runs.eager) and runs.eager[k].tokens > 0]
    helped = [p for p, k in enumerate(clocked) if k < len(runs.assisted) and runs.assisted[k].tokens > 0]
    theirs, aided = [runs.eager[clocked[p]] for p in eagerly], [runs.assisted[clocked[p]] for p in helped]
    against = helping = None
    if theirs:
        mine = [tokens[p] for p in eagerly], [seconds[p] for p in eagerly]
        columns = *mine, [t.tokens for t in theirs], [t.seconds for t in theirs]
        against = paired_ratio_interval(*together([timed[p] for p in eagerly], *columns), **options)
    if aided:
        mine = [whole_tokens[p] for p in helped], [whole_seconds[p] for p in helped]
        columns = *mine, [t.tokens for t in aided], [t.seconds for t in aided]
        helping = paired_ratio_interval(*together([timed[p] for p in helped], *columns), **options)
    max_depth = max(engine.max_depth, max(r.accepted for r in entries))
    reached = [sum(r.accepted >= d for r in entries) for d in range(max_depth + 1)]
    draft, verify, total = (sum(getattr(ours[k].times, part) for k in clocked) for part in ("draft", "verify", "decode"))
    # A group's rounds are those of its longest row; steps of plain decoding likewise.
    timed_rounds = sum(max(len(rounds) for rounds in ours[k].rounds) for k in clocked)
    steps = sum(max(len(row) - 1 for row in base[k].tokens) for k in clocked)
    proposed = sum(r.proposed for r in entries)
    return Row(
        suite=suite,
        temperature=sampling.params.temperature,
        batch=batch,
        rule=engine.rule,
        category=category,
        lossless=gate,
        tau=tau.value,
        tau_ci=(tau.lo, tau.hi),
        acceptance_rate=sum(r.accepted for r in entries) / proposed if proposed else 0.0,
        conditional_acceptance=[reached[d] / reached[d - 1] if reached[d - 1] else 0.0 for d in range(1, max_depth + 1)],
        tokens=sum(len(row) - 1 for row, _ in pairs),
        tokens_per_second=TokensPerSecond(
            speculative=sum(tokens) / sum(seconds),
            engine=sum(base_tokens) / sum(base_seconds),
            eager=sum(t.tokens for t in theirs) / sum(t.seconds for t in theirs) if theirs else None,
            assisted=sum(t.tokens for t in aided) / sum(t.seconds for t in aided) if aided else None,
        ),
        speedup=Speedup(
            engine=speed.value,
            engine_ci=(speed.lo, speed.hi),
            eager=against.value if against else None,
            eager_ci=(against.lo, against.hi) if against else None,
            assisted=helping.value if helping else None,
            assisted_ci=(helping.lo, helping.hi) if helping else None,
        ),
        speedup_end_to_end=SpeedupEndToEnd(engine=whole.value, engine_ci=(whole.lo, whole.hi)),
        # The prefill's own observe() is part of the prefill, so draft and verify belong to the decode time entirely.
        time_split=TimeSplit(draft=draft / total, verify=verify / total, overhead=max(0.0, 1 - draft / total - verify / total)),
        accepted_length_histogram=[sum(r.accepted == d for r in entries) for d in range(max_depth + 1)],
        tau_by_output_position=_by_position([rounds for _, rounds in pairs]),
        prompts=len(every) if batch == 1 else sum(len(g.tokens) for g in every),
        rounds=len(entries),
        cost=Cost(
            t_ar_ms=1e3 * sum(base_seconds) / steps,
            t_verify_ms=1e3 * verify / timed_rounds,
            t_draft_ms=1e3 * draft / timed_rounds,
            overhead_ms=1e3 * max(0.0, total - draft - verify) / timed_rounds,
        ),
        sampling=sampling.settings,
        observations=len(set(timed)),
        memory=memory,
        load_seconds=load_seconds,
    )


def _by_position(texts: Sequence[Sequence[Round]]) -> list[OutputBucket]:
    emitted, rounds = [0] * (len(BUCKETS) - 1), [0] * (len(BUCKETS) - 1)
    for text in texts:
        at = 1
        for entry in text:
            bucket = sum(at >= edge for edge in BUCKETS[1:-1] if edge is not None)
            emitted[bucket] += entry.emitted
            rounds[bucket] += 1
            at += entry.emitted
    return [
        OutputBucket(start=BUCKETS[i] or 0, end=BUCKETS[i + 1], tau=emitted[i] / rounds[i], rounds=rounds[i]) for i in range(len(rounds)) if rounds[i]
    ]
