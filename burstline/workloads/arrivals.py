"""Patterns of arrivals as they are asked for, and checked; `due_times.py` draws them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from burstline.workloads.request import WorkloadError

STEADY_PATTERNS: Final = ("constant", "poisson", "gamma")
"""Arrivals at one rate: only there is a drift the server's own."""
MOST_S: Final = 1e9
"""Thirty years: nanoseconds of it are far from the end of an int64."""
MAX_REQUESTS: Final = 10_000_000
"""What no load of one client can mean: beyond it the plan alone would not fit into memory."""


def _shape(text: str) -> float:
    (shape,) = _numbers(text)
    return shape


def _rates(text: str) -> tuple[float, float]:
    first, last = _numbers(*text.split(".."))
    return first, last


def _steps(text: str) -> tuple[tuple[float, float], ...]:
    pairs = [_numbers(*step.lower().split("x")) for step in text.split(",")]
    return tuple((rate, span_s) for rate, span_s in pairs)


def _numbers(*words: str) -> list[float]:
    numbers = [float(word) for word in words]
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(words)
    return numbers


@dataclass(frozen=True, slots=True)
class Pattern:
    """One pattern: its `title`, what `--arrival` says, and what `--rate` is to it.

    `parse` makes its parameter of that text and raises ValueError; `form` is an example.
    """

    title: str
    form: str
    parse: Callable[[str], Any] | None = None
    rate: Literal["needed", "taken", "ignored"] = "needed"


ARRIVALS: dict[str, Pattern] = {
    "burst": Pattern("all at once", "burst", rate="ignored"),
    "constant": Pattern("evenly spaced arrivals", "constant"),
    "poisson": Pattern("Poisson arrivals", "poisson"),
    "gamma": Pattern("gamma arrivals", "gamma:0.5", _shape),
    "ramp": Pattern("Poisson arrivals", "ramp:2..20", _rates, rate="ignored"),
    "steps": Pattern("Poisson arrivals in steps", "steps:5x30,10x30", _steps, rate="ignored"),
    "replay": Pattern("arrivals at recorded times", "file:times.txt", rate="taken"),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """When requests are due: a pattern and its parameter, as `text` says them.

    The parameter is the gamma law's shape, a ramp's first and last rate, steps of (rate, seconds), or the
    path of a file of times; a replay without a file takes the times of its data.
    """

    pattern: str
    parameter: Any = None
    text: str = field(default="", compare=False)

    @property
    def file(self) -> Path | None:
        """The file that a replay takes its times from."""
        return Path(self.parameter) if self.pattern == "replay" and self.parameter else None


def parse_arrival(text: str) -> Arrival:
    """`poisson`, `gamma:0.5`, `ramp:2..20`, `steps:5x30,10x30` or `file:times.txt`; else WorkloadError."""
    name, _, rest = text.partition(":")
    if name == "file" and rest:
        return Arrival("replay", rest, text)
    row = ARRIVALS.get(name)
    if row is None:
        raise WorkloadError(f"no arrival pattern {name!r}; there are {', '.join(ARRIVALS)} and file:FILE")
    try:
        if row.parse is not None:
            return Arrival(name, row.parse(rest), text)
    except ValueError:
        rest = rest or "nothing"
    if rest:
        raise WorkloadError(f"{text!r}: expected e.g. {row.form}; finite, and rates and spans above 0")
    return Arrival(name, None, text)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrivals of one load: how many in which pattern, and at which rate or recorded times."""

    arrival: Arrival
    n: int
    rate_per_s: float | None = None
    times_s: Sequence[float] | None = None

    @property
    def pattern(self) -> str:
        return self.arrival.pattern


def asked(
    arrival: Arrival,
    *,
    n: int | None = None,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    times_s: Sequence[float] | None = None,
) -> Arrivals:
    """What the user asked for, checked. Give n, or what it follows from: duration_s and a rate, steps, times.

    Raises WorkloadError with the flag to use where a parameter is missing, ignored by the pattern or out of
    range.
    """
    wish = Arrivals(arrival, 0, rate_per_s, times_s)
    check_rate(arrival.pattern, rate_per_s)
    if arrival.pattern == "replay" and not (times_s and all(map(math.isfinite, times_s))):
        raise WorkloadError(
            "replay arrivals need finite times in seconds: --arrival file:FILE, one on a line"
        )
    n_asked = _n_over(wish, duration_s) if n is None else n
    if n_asked > MAX_REQUESTS:
        raise WorkloadError(f"{wish.pattern}: {n_asked:g} requests; expected at most {MAX_REQUESTS:,}")
    n = round(n_asked)
    if n < 1:
        raise WorkloadError(
            f"{wish.pattern}: {n} requests; expected at least 1, raise --requests or --duration-s"
        )
    if times_s is not None and n > len(times_s):
        raise WorkloadError(f"replay: {n} requests asked, {len(times_s)} times recorded; lower --requests")
    return replace(wish, n=n)


def parse_times(lines: Iterable[tuple[int, str]]) -> tuple[float, ...]:
    """Times in seconds out of numbered lines, one each; blank lines and what follows a # are skipped."""
    times_s: list[float] = []
    for number, line in islice(lines, MAX_REQUESTS + 1):
        if word := line.partition("#")[0].strip():
            try:
                times_s.append(float(word))
            except ValueError:
                what = f"{word[:60]!r} is not a time in seconds"
                raise WorkloadError(f"--arrival file: line {number}: {what}") from None
    return tuple(times_s)


def check_rate(pattern: str, rate: float | None) -> None:
    """Refuse a rate that is missing, ignored by the pattern or out of range."""
    row = ARRIVALS[pattern]
    if rate is not None and not 0 < rate < math.inf:
        raise WorkloadError(f"--rate {rate:g}: expected requests per second, finite and above 0")
    if rate is None and row.rate == "needed":
        raise WorkloadError(f"{pattern} arrivals need --rate: requests per second, e.g. --rate 10")
    if rate is not None and row.rate == "ignored":
        fits = [name for name, other in ARRIVALS.items() if other.rate != "ignored"]
        raise WorkloadError(f"{pattern} arrivals would ignore --rate; it is for {', '.join(fits)}")


def _n_over(wish: Arrivals, duration_s: float | None) -> float:
    if wish.times_s is not None:
        return len(wish.times_s)
    if wish.pattern == "steps":
        return float(sum(rate * span_s for rate, span_s in wish.arrival.parameter))
    rates = wish.arrival.parameter if wish.pattern == "ramp" else (wish.rate_per_s,)
    if None in rates or duration_s is None:
        raise WorkloadError(f"{wish.pattern}: give --requests, or --duration-s with --rate or --concurrency")
    if not 0 < duration_s < math.inf:
        raise WorkloadError(f"--duration-s {duration_s}: expected seconds above 0")
    return float(sum(rates) / len(rates) * duration_s)
