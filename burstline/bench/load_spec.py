"""What a person asks for, as typed, and its checks. Imports nothing heavy: a usage error is told at once.

`burstline.bench.load_options` makes a load of a checked spec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from workloads import arrivals
from workloads.lengths import parse_lengths
from workloads.request import RequestKind, WorkloadError

if TYPE_CHECKING:
    from loadgen.driver.job import Workers


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The load's flags as they were typed; None where a flag was not given."""

    requests: int | None = None
    prompt_tokens: str = "512"
    output_tokens: str = "64"
    arrival: str | None = None
    rate: float | None = None
    burstiness: float | None = None
    ramp_to: float | None = None
    steps: str | None = None
    arrival_times: Path | None = None
    duration_s: float | None = None
    concurrency: int | None = None
    max_rate: float | None = None
    workers: Workers = 1
    seed: int = 0
    salt: str = "0"
    deadline_s: float = 600.0
    temperature: float | None = None
    top_p: float | None = None
    request_kind: str = "generate"
    shared_prefix: int | None = None
    prefix_hit: float | None = None
    groups: int | None = None
    data: str | None = None
    data_column: tuple[str, ...] = ()
    data_split: str | None = None
    trace: str | None = None
    trace_speed: float | None = None
    trace_window: str | None = None
    sessions: int | None = None
    turns: str | None = None
    turn_tokens: str | None = None
    think_s: str | None = None
    warmup: str | None = None
    cancel_share: float | None = None
    cancel_after: str | None = None


def check_flags(spec: LoadSpec) -> None:
    """Refuse flags that are wrong by themselves or with each other; WorkloadError names the flag."""
    _check_numbers(spec)
    _check_combination(spec)
    if spec.trace is None:
        for text, flag in ((spec.output_tokens, "--output-tokens"), (spec.prompt_tokens, "--prompt-tokens")):
            if ":" not in text:  # laws and files need their libraries
                parse_lengths(text, flag)
    if spec.arrival is not None and spec.arrival not in arrivals.ARRIVALS:
        raise WorkloadError(arrivals.unknown(spec.arrival))


def check_limits(
    max_failures: float, vocab_size: int | None, tokenizer: Path | None, usd_per_hour: float | None
) -> None:
    """Refuse what no run can mean, as `check_flags` does for the load."""
    if not 0 <= max_failures <= 1:
        raise WorkloadError(f"--max-failures {max_failures:g}: expected a share, e.g. 0.01 or 1%")
    if vocab_size is not None and vocab_size < 1:
        raise WorkloadError(f"--vocab-size {vocab_size}: expected how many token ids there are")
    if tokenizer is not None and not tokenizer.is_dir():
        raise WorkloadError(f"--tokenizer {tokenizer} is no folder, so it has no tokenizer.json")
    if usd_per_hour is not None and not 0 < usd_per_hour < math.inf:
        raise WorkloadError(f"--usd-per-hour {usd_per_hour:g}: expected US dollars above 0")


def of_sessions(spec: LoadSpec) -> bool:
    """Whether the load consists of conversations."""
    return spec.sessions is not None or spec.turns is not None


def _check_combination(spec: LoadSpec) -> None:
    """A flag that another one would make meaningless is refused, not ignored."""
    default = LoadSpec()
    closed = spec.concurrency is not None
    if closed and spec.arrival not in (None, "burst"):
        raise WorkloadError(
            f"--concurrency {spec.concurrency} makes a closed loop: a request is due when another ends; "
            f"--arrival {spec.arrival} would be ignored; give one or the other"
        )
    if closed and spec.rate is not None:
        raise WorkloadError(
            f"--concurrency {spec.concurrency} makes a closed loop: a request is due when another ends; "
            f"--rate {spec.rate:g} would be ignored; give one or the other, or limit the loop by --max-rate"
        )
    if spec.duration_s is not None:
        for name in ("requests", "steps", "arrival_times", "sessions", "turns"):
            if getattr(spec, name) is not None:
                raise WorkloadError(
                    f"{_flag(name)} says how much comes: --duration-s would be ignored; drop one"
                )
    groups = {
        "--trace": ("trace", ("trace_speed", "trace_window")),
        "--data": ("data", ("data_column", "data_split")),
    }
    for flag, (source, dependents) in groups.items():
        for name in dependents:
            if getattr(spec, source) is None and getattr(spec, name) != getattr(default, name):
                raise WorkloadError(f"{_flag(name)} needs {flag} FILE")
    taken = {
        "--trace": ("data", "prompt_tokens", "output_tokens", "arrival", "rate", "duration_s", "steps",
                    "ramp_to", "burstiness", "arrival_times", "shared_prefix", "prefix_hit", "groups",
                    "sessions", "turns"),
        "--data": ("prompt_tokens", "shared_prefix", "prefix_hit", "groups"),
        "--sessions": ("shared_prefix", "prefix_hit", "groups", "max_rate"),
    }  # fmt: skip
    given = {"--trace": spec.trace, "--data": spec.data, "--sessions": spec.sessions or spec.turns}
    for flag, names in taken.items():
        if given[flag] is None:
            continue
        for name in names:
            if getattr(spec, name) != getattr(default, name):
                raise WorkloadError(f"{flag} says that itself: {_flag(name)} would be ignored; drop one")
    if not of_sessions(spec) and spec.data is None:
        for name in ("turn_tokens", "think_s"):
            if getattr(spec, name) is not None:
                raise WorkloadError(f"{_flag(name)} is for conversations: give --sessions N")
    if spec.cancel_share and of_sessions(spec):
        raise WorkloadError(
            "--cancel-share is for single requests: the turns after an abandoned one could not follow"
        )
    if spec.turns is not None and spec.sessions is None and spec.data is None:
        raise WorkloadError(f"--turns {spec.turns} is for conversations: give --sessions N")
    if spec.sessions is not None and spec.requests is not None:
        raise WorkloadError("--sessions and --requests both say how many; in sessions, --turns says the rest")
    if spec.shared_prefix is not None and spec.prefix_hit is not None:
        raise WorkloadError("--shared-prefix and --prefix-hit both say how much is shared; give one")
    if spec.groups is not None and spec.shared_prefix is None and spec.prefix_hit is None:
        raise WorkloadError("--groups needs --shared-prefix N or --prefix-hit P")
    if spec.cancel_after is not None and not spec.cancel_share:
        raise WorkloadError("--cancel-after needs --cancel-share P: which share of the clients hang up")
    if spec.cancel_share and spec.request_kind != "generate":
        raise WorkloadError(f"--cancel-share: --request-kind {spec.request_kind} has no stream to abandon")
    if spec.request_kind == "rerank" and spec.data is None:
        raise WorkloadError("--request-kind rerank needs --data FILE whose rows have a query and documents")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


MOST: Final = {"--concurrency": 1_000_000, "--workers": 1024}
MOST_DEADLINE_S: Final = 604_800.0


def _check_numbers(spec: LoadSpec) -> None:
    at_least_one = (
        ("--requests", spec.requests),
        ("--concurrency", spec.concurrency),
        ("--workers", None if spec.workers == "auto" else spec.workers),
        ("--groups", spec.groups),
        ("--shared-prefix", spec.shared_prefix),
        ("--sessions", spec.sessions),
    )
    for flag, number in at_least_one:
        if number is not None and number < 1:
            raise WorkloadError(f"{flag} {number}: expected at least 1")
        if number is not None and number > MOST.get(flag, arrivals.MAX_REQUESTS):
            raise WorkloadError(
                f"{flag} {number}: expected at most {MOST.get(flag, arrivals.MAX_REQUESTS):,}"
            )
    shares = (
        ("--prefix-hit", spec.prefix_hit),
        ("--cancel-share", spec.cancel_share),
    )
    for flag, share in shares:
        if share is not None and not 0 <= share <= 1:
            raise WorkloadError(f"{flag} {share:g}: expected a share from 0 to 1, e.g. 0.6")
    if spec.trace_speed is not None and not 0 < spec.trace_speed < float("inf"):
        raise WorkloadError(f"--trace-speed {spec.trace_speed}: expected a factor above 0, e.g. 2")
    if spec.request_kind not in list(RequestKind):
        raise WorkloadError(f"--request-kind {spec.request_kind}: expected {', '.join(RequestKind)}")
    if not 0 < spec.deadline_s <= MOST_DEADLINE_S:
        raise WorkloadError(f"--deadline-s {spec.deadline_s}: expected seconds above 0, at most a week")
    if spec.max_rate is not None and spec.concurrency is None:
        raise WorkloadError("--max-rate is a ceiling for closed loops: give --concurrency too, or use --rate")
    if spec.max_rate is not None and not spec.max_rate > 0:
        raise WorkloadError(f"--max-rate {spec.max_rate}: expected requests per second above 0")
    if not spec.salt or any(c not in "0123456789abcdefABCDEF" for c in spec.salt):
        raise WorkloadError(f"--salt {spec.salt!r}: expected hexadecimal digits, e.g. --salt 5eed")
