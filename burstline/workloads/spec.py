"""The options of a load as they are written, and what they contradict. No heavy imports.

Flags, a suite's tables and the manifest are made from the rows of `LoadSpec`. `burstline.workloads.load`
parses and checks them.
"""

import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from burstline.workloads.arrivals import MAX_REQUESTS, Arrival, parse_arrival
from burstline.workloads.options import (
    as_text,
    flag_of,
    given,
    number_or_auto,
    option,
    options_of,
    per_second,
    seconds,
    share,
    with_parts,
)
from burstline.workloads.request import RequestKind, WorkloadError

_HELP: Final[Mapping[str, str]] = tomllib.loads(Path(__file__).with_name("spec.toml").read_text("utf-8"))
"""The help of each option below."""
MOST: Final = {"concurrency": 1_000_000, "workers": 1024}
MOST_SEED: Final = 2**62
"""So that it fits 64 bits, also where a search adds the number of its probe."""
LEAST: Final = {"vocab_size": 16}
MOST_DEADLINE_S: Final = 604_800.0
MAX_FAILURES: Final = 0.01
"""The share of requests that may fail where the user states no other."""


@dataclass(frozen=True, slots=True)
class DataSource:
    """Rows of a file or of a named data set; `columns` are NAME=COLUMN, `split` one of several."""

    name: str
    columns: tuple[str, ...] = ()
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        name, parts = with_parts(text)
        split = parts.pop("split", None)
        return cls(name, tuple(f"{key}={column}" for key, column in parts.items()), split)

    @property
    def text(self) -> str:
        return ",".join((self.name, *([f"split={self.split}"] if self.split else []), *self.columns))


@dataclass(frozen=True, slots=True)
class TraceSource:
    """A recorded load, played `speed` times as fast, from `begin_s` to `end_s` of it."""

    file: str
    speed: float = 1.0
    begin_s: float = 0.0
    end_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Self:
        file, parts = with_parts(text)
        try:
            speed = float(parts.pop("speed", "1"))
            begin, dots, end = parts.pop("window", "0..inf").partition("..")
            begin_s, end_s = float(begin), float(end)
        except ValueError:
            dots = ""
        if not dots or parts or not 0 < speed < math.inf or not 0 <= begin_s < end_s:
            raise WorkloadError(
                f"{text!r}: expected FILE,speed=X,window=A..B, e.g. t.csv,speed=2,window=0..60"
            )
        return cls(file, speed, begin_s, end_s)

    @property
    def text(self) -> str:
        parts = [f"speed={as_text(self.speed)}"] if self.speed != 1 else []
        if self.begin_s or self.end_s < math.inf:
            parts.append(f"window={as_text(self.begin_s)}..{as_text(self.end_s)}")
        return ",".join((self.file, *parts))


@dataclass(frozen=True, slots=True)
class Sharing:
    """How prompts begin alike: in `groups`, each with a prefix of its own.

    With `shared_tok` every prompt begins with that many tokens of its group's prefix. With `hit` (0..1) each
    begins with as many whole cache blocks as it takes for that share of all prompt tokens to be served by a
    cache that holds the prefixes.
    """

    groups: int = 1
    shared_tok: int | None = None
    hit: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        size, parts = with_parts(text)
        hit, shared_tok = None, None
        try:
            groups = int(parts.pop("groups", "1"))
            if size.endswith("%"):
                hit = share(size)
            else:
                shared_tok = int(size)
        except ValueError:
            groups = 0
        sizes = [groups] if shared_tok is None else [groups, shared_tok]
        if parts or not all(1 <= n <= MAX_REQUESTS for n in sizes) or not 0 <= (hit or 0.0) <= 1:
            raise WorkloadError(
                f"{text!r}: expected tokens or a share from 0% to 100%, e.g. 256, 60%, or 256,groups=4"
            )
        return cls(groups, shared_tok, hit)

    @property
    def text(self) -> str:
        size = str(self.shared_tok) if self.hit is None else f"{self.hit * 100:.10g}%"
        return f"{size},groups={self.groups}" if self.groups > 1 else size

    def __str__(self) -> str:
        what = f"{self.shared_tok} shared tokens" if self.hit is None else f"{self.hit:.0%} of tokens cached"
        return f"{what}, {self.groups} groups" if self.groups > 1 else what


@dataclass(frozen=True, slots=True)
class HangUps:
    """The share of requests whose clients hang up, and after how many tokens."""

    share: float
    after: str = "8"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        first, parts = with_parts(text)
        found, after = share(first), parts.pop("after", "8")
        if parts or not 0 <= found <= 1:
            raise WorkloadError(f"{text!r}: expected a share from 0 to 1, e.g. 0.6, 20%, or 20%,after=4..12")
        return cls(found, after) if found else None

    @property
    def text(self) -> str:
        return as_text(self.share) if self.after == "8" else f"{as_text(self.share)},after={self.after}"


def _kind(text: str) -> RequestKind:
    if text not in list(RequestKind):
        raise WorkloadError(f"{text}: expected {', '.join(RequestKind)}")
    return RequestKind(text)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A load as the user asks for it; None where it is left open.

    Lengths are laws that `lengths.py` reads: they need libraries and files that no check waits for.
    """

    requests: int | None = option(_HELP["requests"], parse=int, metavar="N")
    prompt_tokens: str = option(_HELP["prompt_tokens"], "512", metavar="LENGTHS")
    output_tokens: str = option(_HELP["output_tokens"], "64", metavar="LENGTHS")
    request_kind: RequestKind = option(
        _HELP["request_kind"], RequestKind.GENERATE, parse=_kind, metavar="KIND"
    )
    seed: int = option(_HELP["seed"], 0, parse=int, metavar="SEED")
    salt: str = option(_HELP["salt"], "", metavar="HEX")
    tokenizer: Path | None = option(_HELP["tokenizer"], parse=Path, metavar="DIR")
    vocab_size: int | None = option(_HELP["vocab_size"], parse=int, metavar="N")
    ends: Literal["forced", "natural"] = option(_HELP["ends"], "forced", choices=("forced", "natural"))
    temperature: float | None = option(_HELP["temperature"], parse=float, metavar="T")
    top_p: float | None = option(_HELP["top_p"], parse=float, metavar="P")
    cancel_share: HangUps | None = option(_HELP["cancel_share"], parse=HangUps.parse, metavar="P")
    deadline_s: float = option(_HELP["deadline_s"], 600.0, parse=seconds, metavar="S")
    workers: int | Literal["auto"] = option(_HELP["workers"], 1, parse=number_or_auto, metavar="N|auto")
    data: DataSource | None = option(_HELP["data"], parse=DataSource.parse, metavar="FILE|NAME")
    trace: TraceSource | None = option(_HELP["trace"], parse=TraceSource.parse, metavar="FILE")
    shared_prefix: Sharing | None = option(_HELP["shared_prefix"], parse=Sharing.parse, metavar="N|P%")
    sessions: int | None = option(_HELP["sessions"], parse=int, metavar="N")
    turns: str | None = option(_HELP["turns"], metavar="LENGTHS")
    turn_tokens: str | None = option(_HELP["turn_tokens"], metavar="LENGTHS")
    think_s: str | None = option(_HELP["think_s"], metavar="SECONDS")
    warmup: int | Literal["auto"] | None = option(_HELP["warmup"], parse=number_or_auto, metavar="N|auto|0")
    audit: float | None = option(_HELP["audit"], parse=share, metavar="SHARE")
    arrival: Arrival | None = option(_HELP["arrival"], parse=parse_arrival, metavar="PATTERN")
    rate: float | None = option(_HELP["rate"], parse=per_second, metavar="R[,R...]", swept=True)
    duration_s: float | None = option(_HELP["duration_s"], parse=seconds, metavar="S")
    concurrency: int | None = option(_HELP["concurrency"], parse=int, metavar="N[,N...]", swept=True)

    @property
    def of_sessions(self) -> bool:
        return self.sessions is not None or self.turns is not None

    @property
    def pattern(self) -> str:
        """How requests arrive; a checked load says it."""
        return self.arrival.pattern if self.arrival else "burst"

    @property
    def kind(self) -> str:
        """Whether it is a closed loop, a burst or an open loop, in these words."""
        if self.concurrency is not None:
            return "closed loop"
        return "burst" if self.pattern == "burst" else "open loop"

    def salt_of_run(self, k: int) -> str:
        """The salt of the k-th run after this one, with as many digits: its zeros count."""
        return f"{int(self.salt, 16) + k:0{len(self.salt)}x}"

    def to_json(self) -> dict[str, str | int | float | None]:
        """Every option by name: a number, or the word that its flag takes."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            name: value if value is None or isinstance(value, int | float) else as_text(value)
            for name, value in values.items()
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """The same back; raises ValueError where a value is none that its flag takes."""
        options = options_of(cls)
        if unknown := [name for name in row if name not in options]:
            raise WorkloadError(f"{unknown[0]} is not an option of the load")
        parsed: dict[str, Any] = {
            name: None if value is None else options[name].parse(as_text(value))
            for name, value in row.items()
        }
        return cls(**parsed)


@dataclass(frozen=True, slots=True)
class Goals:
    """The SLOs of a run: exit code 3 if one is missed, 4 if one is inconclusive."""

    slo: tuple[str, ...] = option(_HELP["slo"], (), many=True, metavar="'METRIC.P<=VALUE'")
    max_failures: float = option(_HELP["max_failures"], MAX_FAILURES, parse=share, metavar="SHARE")


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """How the highest load within the SLOs is searched."""

    error: float = option(_HELP["error"], 0.05, parse=share, metavar="SHARE")
    budget_s: float = option(_HELP["budget_s"], 900.0, parse=seconds, metavar="S")


GATED: Final = (
    "ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "itl.p99", "e2e.p50", "e2e.p99",
    "output_tok_per_s", "input_tok_per_s", "requests_per_s", "usd_per_million_output_tok",
    "usd_per_million_input_tok", "joules_per_output_tok", "server_peak_bytes", "device_peak_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GateOptions:
    """What is judged, by which rule, and when to stop; flags of the command and arguments in Python."""

    history: Path | None = option(_HELP["history"], parse=Path, metavar="FOLDER")
    metric: tuple[str, ...] = option("number to compare (e2e.p50); repeatable", (), many=True, choices=GATED)
    margin: float = option("less is called the same (5)", 5.0, parse=float, metavar="PERCENT")
    max_runs: int = option("maximum runs of both contenders (20)", 20, parse=int, metavar="N")
    budget_s: float | None = option("start no pair that would end later", parse=seconds, metavar="S")
    anyway: bool = option("use disturbed runs and runs of different work", False, parse=bool)


def check_spec(spec: LoadSpec) -> None:
    """Refuse options that are wrong by themselves or with each other; WorkloadError names the flag."""
    _check_numbers(spec)
    for why in _contradictions(spec):
        raise WorkloadError(why)


def check_goals(goals: Goals) -> None:
    if not 0 <= goals.max_failures <= 1:
        raise WorkloadError(f"--max-failures {goals.max_failures:g}: expected a share, e.g. 0.01 or 1%")


SETS_ITSELF: Final = {
    "trace": ("data", "prompt_tokens", "output_tokens", "arrival", "rate", "duration_s", "shared_prefix"),
    "data": ("prompt_tokens", "shared_prefix"),
    "sessions": ("shared_prefix",),
}  # fmt: skip
"""What another option already decides: given too, it would be ignored."""


def _contradictions(spec: LoadSpec) -> Iterator[str]:
    """An option that another one would make meaningless is refused, not ignored."""
    own = {row.name: row.words(value) for row, value in given(spec)}
    closed = f"--concurrency {spec.concurrency} makes a closed loop: a request is due when another ends; "
    if spec.concurrency is not None and spec.arrival is not None and spec.arrival.pattern != "burst":
        yield f"{closed}{' '.join(own['arrival'])} would be ignored; give one or the other"
    if spec.concurrency is not None and spec.rate is not None:
        yield f"{closed}--rate {spec.rate:g} would be ignored; give one or the other"
    if spec.concurrency is not None and spec.trace is not None and spec.trace.speed != 1:
        yield f"{closed}speed={as_text(spec.trace.speed)} of --trace would be ignored; give one or the other"
    counts: list[str] = [name for name in ("requests", "sessions", "turns") if name in own]
    if spec.arrival is not None and (spec.arrival.pattern == "steps" or spec.arrival.file):
        counts.append("arrival")
    if spec.duration_s is not None and counts:
        yield f"{own[counts[0]][0]} sets the number of requests: --duration-s would be ignored; drop one"
    for source, names in SETS_ITSELF.items():
        there = spec.of_sessions if source == "sessions" else source in own
        for name in names:
            if there and name in own:
                yield f"{flag_of(source)} sets {flag_of(name)}; drop one of them"
    if spec.trace is not None and spec.of_sessions:
        yield "--trace keeps recorded times: it has no think times to make turns of; drop --sessions, --turns"
    if spec.cancel_share and spec.of_sessions:
        yield "--cancel-share is for single requests: turns after an abandoned one cannot follow"
    for name in ("turns", "turn_tokens", "think_s") if spec.data is None and spec.sessions is None else ():
        if name in own:
            yield f"{' '.join(own[name])} is for conversations: give --sessions N"
    if spec.sessions is not None and spec.requests is not None:
        yield "--sessions and --requests both set the number of requests; with --sessions, use --turns"
    if spec.cancel_share and spec.request_kind != RequestKind.GENERATE:
        yield f"--cancel-share: --request-kind {spec.request_kind} has no stream to abandon"
    if spec.audit is not None and spec.temperature:
        yield f"--audit: replies with --temperature {spec.temperature:g} differ by chance; drop one of them"
    if spec.audit is not None and spec.request_kind != RequestKind.GENERATE:
        yield f"--audit compares generated text: --request-kind {spec.request_kind} has none"
    if spec.request_kind != RequestKind.GENERATE and (spec.trace is not None or spec.of_sessions):
        source = "--trace" if spec.trace is not None else "--sessions"
        yield f"{source} sends generate requests: drop --request-kind {spec.request_kind}"
    if spec.request_kind == RequestKind.RERANK and spec.data is None:
        yield "--request-kind rerank needs --data FILE whose rows have a query and documents"


def _check_numbers(spec: LoadSpec) -> None:
    for name in ("requests", "concurrency", "workers", "sessions", "vocab_size"):
        number = getattr(spec, name)
        if number is None or number == "auto":
            continue
        most = MOST.get(name, MAX_REQUESTS)
        if number < (least := LEAST.get(name, 1)):
            raise WorkloadError(f"{flag_of(name)} {number}: expected at least {least}")
        if number > most:
            raise WorkloadError(f"{flag_of(name)} {number}: expected at most {most:,}")
    if abs(spec.seed) > MOST_SEED:
        raise WorkloadError(f"--seed {spec.seed}: expected at most {MOST_SEED:,}; use fewer digits")
    if isinstance(spec.warmup, int) and not 0 <= spec.warmup <= MAX_REQUESTS:
        raise WorkloadError(f"--warmup {spec.warmup}: expected 0 or more, up to {MAX_REQUESTS:,}, or auto")
    if spec.audit is not None and not 0 < spec.audit <= 1:
        raise WorkloadError(f"--audit {spec.audit:g}: expected a share above 0, e.g. 2% or 0.02, at most 1")
    if not 0 < spec.deadline_s <= MOST_DEADLINE_S:
        raise WorkloadError(f"--deadline-s {spec.deadline_s}: expected seconds above 0, at most a week")
    if any(c not in "0123456789abcdefABCDEF" for c in spec.salt):
        raise WorkloadError(f"--salt {spec.salt!r}: expected hexadecimal digits, e.g. --salt 5eed")
    if spec.shared_prefix is not None and spec.shared_prefix.hit == 1:
        raise WorkloadError(
            "--shared-prefix 100%: the last token of a prompt is always computed; expected less, e.g. 90%"
        )
    if spec.tokenizer is not None and not any(
        (spec.tokenizer / name).is_file() for name in ("tokenizer.json", "config.json")
    ):
        raise WorkloadError(f"--tokenizer {spec.tokenizer} is not a folder with a tokenizer.json")
