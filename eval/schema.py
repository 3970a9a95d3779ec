"""The typed form of an evaluation's report, and report.json, strictly both ways: an unknown, missing or ill-typed key is an error
that names its place.

SCHEMA.md beside this file documents every key.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import math
import types
import typing
from typing import Any, Literal

from .. import UserError

SCHEMA = "draftsmith.report/1"
SHARES_TOLERANCE = 1e-3  # shares may have been rounded to three decimals by whoever wrote them

Span = tuple[float, float]


def _key(name: str) -> Any:
    """A field whose JSON key is a Python keyword or would read badly as an attribute."""
    return dataclasses.field(metadata={"key": name})


def _check(holds: bool, field: str, wanted: str, got: object) -> None:
    if not holds:
        raise UserError(f"{field}: wanted {wanted}, got {got}")


def _check_span(field: str, span: Span | None) -> None:
    if span is not None:
        _check(span[0] <= span[1], field, "[lo, hi] with lo <= hi", list(span))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tie:
    """A prompt whose outputs part at a near-tie: the target's two best logits differ by `gap`, within the rounding `bound` of its forward."""

    prompt: int
    position: int
    gap: float
    bound: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionTest:
    """Chi-square test that tokens follow the target's distribution, for rules whose output is not token-identical to plain decoding's.

    `tv`: total variation between the binned figures and the uniform law that they must have; `detects_tv`: the smallest one that the test finds with
    probability `power` at this many tokens.
    """

    tokens: int
    bins: int
    statistic: float
    p_value: float
    level: float
    tv: float
    detects_tv: float
    power: float

    def __post_init__(self) -> None:
        _check(0 <= self.p_value <= 1 and 0 < self.level < 1, "p_value, level", "probabilities", (self.p_value, self.level))
        _check(0 <= self.tv <= 1 and 0 < self.detects_tv <= 1, "tv, detects_tv", "shares 0..1", (self.tv, self.detects_tv))

    @property
    def passed(self) -> bool:
        return self.p_value >= self.level


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lossless:
    lossless_class: str = _key("class")
    status: Literal["pass", "fail"]
    checked: int
    identical: int
    ties: list[Tie]
    tokens_checked: int
    test: DistributionTest | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        _check(0 <= self.identical <= self.checked, "identical", f"0..checked ({self.checked})", self.identical)
        _check(self.tokens_checked >= 0, "tokens_checked", "a count >= 0", self.tokens_checked)
        if self.passed:
            _check(self.test is None or self.test.passed, "test", "a p_value >= level under the status 'pass'", self.test and self.test.p_value)
            _check(self.checked > 0, "checked", "at least one prompt behind the status 'pass'", self.checked)
            for tie in self.ties:
                _check(tie.gap <= tie.bound, "ties", f"a gap <= bound ({tie.bound}) under the status 'pass'", f"{tie.gap} in prompt {tie.prompt}")

    @property
    def passed(self) -> bool:
        return self.status == "pass"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokensPerSecond:
    speculative: float
    engine: float
    eager: float | None
    assisted: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speedup:
    engine: float
    engine_ci: Span
    eager: float | None
    eager_ci: Span | None
    assisted: float | None = None
    assisted_ci: Span | None = None

    def __post_init__(self) -> None:
        _check_span("engine_ci", self.engine_ci)
        _check_span("eager_ci", self.eager_ci)
        _check_span("assisted_ci", self.assisted_ci)
        _check((self.eager is None) == (self.eager_ci is None), "eager_ci", "null exactly when eager is null", self.eager_ci)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeedupEndToEnd:
    engine: float
    engine_ci: Span

    def __post_init__(self) -> None:
        _check_span("engine_ci", self.engine_ci)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Shares of the speculative decode time."""

    draft: float
    verify: float
    overhead: float

    def __post_init__(self) -> None:
        shares = (self.draft, self.verify, self.overhead)
        _check(min(shares) >= 0 and abs(sum(shares) - 1) <= SHARES_TOLERANCE, "draft + verify + overhead", "shares >= 0 that add up to 1", shares)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputBucket:
    """tau of the rounds that began at output positions [start, end); end None: no end."""

    start: int = _key("from")
    end: int | None = _key("to")
    tau: float
    rounds: int

    def __post_init__(self) -> None:
        _check(self.start >= 0 and (self.end is None or self.end > self.start), "from, to", "0 <= from < to", (self.start, self.end))
        _check(self.rounds > 0, "rounds", "at least one round in a bucket (leave empty buckets out)", self.rounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Mean milliseconds: one plain decoding step, one verification forward, one draft."""

    t_ar_ms: float
    t_verify_ms: float
    t_draft_ms: float
    overhead_ms: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """MiB. The peaks are measured, `speculation` is counted: what decoding with this drafter needs beyond plain decoding."""

    speculative_peak: float | None
    engine_peak: float | None
    speculation: float
    drafter: float

    def __post_init__(self) -> None:
        _check(self.speculation >= 0 and self.drafter >= 0, "speculation, drafter", "sizes >= 0", (self.speculation, self.drafter))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the cost model says of this row's draft: the speed-up predicted from its tau, the most that a perfect drafter of this shape would gain,
    the tau and the acceptance (of one token of a chain) below which it does not pay, and the best length of a chain.

    `fitted`: whether rounds of this very shape were among those that the model was fitted to.
    """

    depth: int
    nodes: float
    predicted: float
    error: float
    ceiling: float
    break_even_tau: float
    break_even_acceptance: float | None
    best_length: int | None
    best_length_speedup: float | None
    fitted: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A round of one shape: predicted and measured ms. Those with `fitted` false were not used for the fit: their error is a test."""

    batch: int
    context: int
    depth: int
    nodes: int
    predicted_ms: float
    measured_ms: float
    fitted: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostReport:
    """The cost model: measured conditions as `CostModel.to_json` gives them, predictions beside measurements, and what follows in words."""

    conditions: list[dict[str, Any]]
    predictions: list[Prediction]
    words: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One (suite, temperature, batch, rule, category)."""

    suite: str
    temperature: float
    batch: int
    rule: str
    category: str
    lossless: Lossless
    tau: float
    tau_ci: Span
    acceptance_rate: float
    conditional_acceptance: list[float]
    tokens: int
    tokens_per_second: TokensPerSecond
    speedup: Speedup
    speedup_end_to_end: SpeedupEndToEnd
    time_split: TimeSplit
    accepted_length_histogram: list[int]
    tau_by_output_position: list[OutputBucket]
    prompts: int
    rounds: int
    cost: Cost
    sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
    observations: int | None = None
    memory: Memory | None = None
    load_seconds: dict[str, Any] = dataclasses.field(default_factory=dict)
    limits: Limits | None = None

    def __post_init__(self) -> None:
        _check(self.temperature >= 0, "temperature", "a number >= 0", self.temperature)
        _check(self.batch >= 1, "batch", "a size >= 1", self.batch)
        _check(self.prompts >= 1, "prompts", "at least one prompt", self.prompts)
        _check_span("tau_ci", self.tau_ci)
        _check(0 <= self.acceptance_rate <= 1, "acceptance_rate", "a share 0..1", self.acceptance_rate)
        _check(all(0 <= share <= 1 for share in self.conditional_acceptance), "conditional_acceptance", "shares 0..1", self.conditional_acceptance)
        histogram = self.accepted_length_histogram
        _check(min(histogram, default=0) >= 0, "accepted_length_histogram", "counts >= 0", histogram)
        _check(sum(histogram) == self.rounds, "accepted_length_histogram", f"counts that add up to rounds ({self.rounds})", sum(histogram))
        speeds, ratios = self.tokens_per_second, self.speedup
        _check((speeds.eager is None) == (ratios.eager is None), "speedup.eager", "null exactly when tokens_per_second.eager is null", ratios.eager)

    @property
    def passed(self) -> bool:
        return self.lossless.passed

    @property
    def observed(self) -> int:
        """Observations behind the intervals of speed: one alone has no spread to draw an interval from."""
        return self.prompts if self.observations is None else self.observations

    @property
    def defaults(self) -> bool:
        """Whether it was sampled as the model's own generation_config says."""
        return bool(self.sampling.get("model_default"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A stretch of generated text. Round 0 is the prefill, whose token is the target's."""

    text: str
    origin: Literal["drafted", "target"]
    round: int
    offered: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    prompt: str
    temperature: float
    pieces: list[Piece]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
    """Another drafter, measured on the same prompts in the same turns: those that need no training are what a trained one has to beat."""

    drafter: str
    results: list[Row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drift:
    """How far a target that was tuned with its drafter has moved from the original, on held-out prompts.

    Perplexities are of the original's responses at T=1, both models reading the same text. same_argmax: share of their positions where both would
    choose the same token. same_generations: share of prompts whose greedy responses are identical.
    """

    prompts: int
    tokens: int
    original_perplexity: float
    tuned_perplexity: float
    same_argmax: float
    same_generations: float

    def __post_init__(self) -> None:
        _check(min(self.original_perplexity, self.tuned_perplexity) >= 1, "perplexity", "numbers >= 1", self.original_perplexity)
        for name in ("same_argmax", "same_generations"):
            _check(0 <= getattr(self, name) <= 1, name, "a share 0..1", getattr(self, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """`created` is an ISO 8601 time. The four dicts hold JSON values; SCHEMA.md says which of their keys the renderers read."""

    schema: str = SCHEMA
    created: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    hardware: dict[str, Any]
    protocol: dict[str, Any]
    results: list[Row]
    samples: list[Sample]
    training: dict[str, Any] | None
    others: list[Other] = dataclasses.field(default_factory=list)
    drift: Drift | None = dataclasses.field(default_factory=lambda: None)  # None: the target is the original
    costs: CostReport | None = None
    in_engine: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # of each engine that ran the export: `in_engine.InEngine`

    def __post_init__(self) -> None:
        _check(self.schema == SCHEMA, "schema", f"{SCHEMA!r}", f"{self.schema!r}; read it with the version of draftsmith that wrote it")
        try:
            datetime.datetime.fromisoformat(self.created)
        except ValueError as error:
            raise UserError(f"created: wanted an ISO 8601 time, got {self.created!r}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, with the keys of SCHEMA.md."""
        encoded: dict[str, Any] = _encode(self)
        return encoded

    @classmethod
    def from_json(cls, data: object) -> Report:
        """The inverse of `to_json`, on what json.loads gives. Raises UserError naming the place of an unknown, missing or wrong key."""
        report: Report = _decode(cls, data, "report")
        return report

    @property
    def failed(self) -> list[Row]:
        """Rows whose losslessness gate failed. Not empty: the evaluation as a whole failed, and the command exits with 1."""
        return [row for row in [*self.results, *(row for other in self.others for row in other.results)] if not row.passed]

    @property
    def headline(self) -> Row | None:
        """The best row against our own plain decoding at the lowest temperature (0 in the default protocol), all categories together.

        None when a row failed the gate, whichever: a drafter and engine that change the output at any setting have no speed-up to put on top.
        None, too, when there is no result.
        """
        rows = [] if self.failed else self.overall
        coolest = min((row.temperature for row in rows), default=0.0)
        return max((row for row in rows if row.temperature == coolest), key=lambda row: row.speedup.engine, default=None)

    @property
    def overall(self) -> list[Row]:
        """Rows over all categories; where a suite has none, its rows by category."""
        whole = {row.suite for row in self.results if row.category == "all"}
        return [row for row in self.results if row.category == "all" or row.suite not in whole]


# ---------------------------------------------------------------------------------------------------------------------- JSON, strictly both ways


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.metadata.get("key", field.name): _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _decode(kind: Any, value: object, at: str) -> Any:
    """`value` as the annotation `kind`; `at` is its place, for messages. Covers the annotations that this file uses, and no others."""
    if dataclasses.is_dataclass(kind):
        return _decode_object(kind, value, at)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _decode(inner, value, at)
    if origin is Literal:
        _check(value in arguments, at, " or ".join(map(repr, arguments)), repr(value))
        return value
    if origin is dict:
        _check_json(value, at)
        _check(isinstance(value, dict), at, "an object", _type(value))
        return value
    if origin in (list, tuple):
        if not isinstance(value, list) or (origin is tuple and len(value) != len(arguments)):
            raise UserError(f"{at}: wanted a list{f' of {len(arguments)}' if origin is tuple else ''}, got {_type(value)}")
        return origin(_decode(arguments[0], item, f"{at}[{i}]") for i, item in enumerate(value))
    if kind is float:
        _check(type(value) in (int, float) and math.isfinite(value), at, "a finite number", _type(value))  # type: ignore[arg-type]
        return float(value)  # type: ignore[arg-type]
    _check(type(value) is kind, at, {int: "a whole number", str: "a string", bool: "true or false"}[kind], _type(value))
    return value


def _decode_object(kind: Any, value: object, at: str) -> Any:
    if not isinstance(value, dict):
        raise UserError(f"{at}: wanted an object, got {_type(value)}")
    keys = {field.metadata.get("key", field.name): field.name for field in dataclasses.fields(kind)}
    for key in value:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            raise UserError(f"{at}: unknown key {key!r}" + (f"; the nearest known key is {near[0]!r}" if near else f"; known are {', '.join(keys)}"))
    # What was added after the first reports were written may be missing: fields that are None, or empty, by default.
    later = (field for field in dataclasses.fields(kind) if field.default is None or field.default_factory is not dataclasses.MISSING)
    defaults = {field.name for field in later}
    missing = [key for key, name in keys.items() if key not in value and name not in defaults]
    if missing:
        raise UserError(f"{at}: missing {'keys' if len(missing) > 1 else 'key'} {', '.join(map(repr, missing))}")
    hints = typing.get_type_hints(kind)
    arguments = {name: _decode(hints[name], value[key], f"{at}.{key}") for key, name in keys.items() if key in value}
    try:
        return kind(**arguments)
    except UserError as error:
        raise UserError(f"{at}.{error}") from error


def _check_json(value: object, at: str) -> None:
    """The free-form objects may hold anything that JSON can: say where they do not, rather than fail in the middle of writing."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check(type(key) is str, at, "keys that are strings", repr(key))
            _check_json(item, f"{at}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_json(item, f"{at}[{i}]")
    elif type(value) is float:
        _check(math.isfinite(value), at, "a finite number", value)
    else:
        _check(value is None or type(value) in (bool, int, str), at, "a JSON value", _type(value))


def _type(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
