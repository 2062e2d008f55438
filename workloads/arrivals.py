"""When requests are due: every pattern of arrivals, as absolute times from the run's start.

Each pattern is a unit-rate process whose clock is then stretched: if S_k are the arrivals of a process of
rate 1 and L(t) is how many requests the asked rate wants by time t, then L^-1(S_k) are arrivals at that rate
(the time-rescaling theorem; Cox & Lewis 1966, ch. 2). No gap is ever rescaled to hit a total, so a Poisson
plan is a Poisson process: its achieved rate varies by 1/sqrt(n), as it should.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from workloads.request import WorkloadError

if TYPE_CHECKING:  # flags are checked by this module before numpy is imported
    import numpy as np
    from numpy.typing import NDArray

    Times = NDArray[np.float64]

MOST_S: Final = 1e9
"""Thirty years: nanoseconds of it are far from the end of an int64."""
MAX_REQUESTS: Final = 10_000_000
"""What no load of one client can mean: beyond it the plan alone would not fit into memory."""


def burst(rate_per_s: float | None, n: int, rng: np.random.Generator) -> Times:
    """Everything at once; MLPerf calls it Offline."""
    del rate_per_s, rng
    import numpy as np

    return np.zeros(n)


def constant(rate_per_s: float, n: int, rng: np.random.Generator) -> Times:
    """One request every 1/rate, the first at 0."""
    del rng
    import numpy as np

    return np.arange(n) / rate_per_s


def poisson(rate_per_s: float, n: int, rng: np.random.Generator) -> Times:
    """A Poisson process: independent exponential gaps, the first before the first request."""
    import numpy as np

    return np.cumsum(rng.exponential(1 / rate_per_s, n))


def gamma(rate_per_s: float, n: int, rng: np.random.Generator, *, burstiness: float) -> Times:
    """Independent gamma gaps of shape `burstiness`: 1 is Poisson, less comes in clumps, more is evener.

    The gaps' coefficient of variation is 1/sqrt(burstiness); the same parameter as in `vllm bench serve`.
    """
    import numpy as np

    return np.cumsum(rng.gamma(burstiness, 1 / (rate_per_s * burstiness), n))


def ramp(rate_per_s: float, n: int, rng: np.random.Generator, *, ramp_to_per_s: float) -> Times:
    """A Poisson process whose rate goes linearly from one rate to another over n requests, then stays."""
    import numpy as np

    span_s = 2 * n / (rate_per_s + ramp_to_per_s)
    unit = np.cumsum(rng.standard_exponential(n))
    slope = (ramp_to_per_s - rate_per_s) / span_s
    inside = np.minimum(unit, float(n))
    # L(t) = r t + slope t^2 / 2, solved for t in the form that neither a flat nor a zero start breaks.
    root = np.sqrt(np.maximum(rate_per_s**2 + 2 * slope * inside, 0.0))
    return 2 * inside / (rate_per_s + root) + (unit - inside) / ramp_to_per_s


def steps(
    rate_per_s: float | None, n: int, rng: np.random.Generator, *, steps: Sequence[tuple[float, float]]
) -> Times:
    """A Poisson process whose rate is constant within each step (rate, seconds); the last goes on."""
    import numpy as np

    del rate_per_s
    rates, spans_s = np.array(steps, dtype=float).T
    begins_s = np.concatenate(([0.0], np.cumsum(spans_s)))
    wanted = np.concatenate(([0.0], np.cumsum(rates * spans_s)))
    unit = np.cumsum(rng.standard_exponential(n))
    beyond = np.maximum(unit - wanted[-1], 0.0)
    return np.asarray(np.interp(unit, wanted, begins_s) + beyond / rates[-1])


def replay(rate_per_s: float | None, n: int, rng: np.random.Generator, *, times_s: Sequence[float]) -> Times:
    """The first n of recorded times, from their first; stretched to a mean rate where one is given."""
    import numpy as np

    del rng
    recorded_s = np.sort(np.asarray(times_s, dtype=np.float64))[:n]
    due_s: Times = recorded_s - recorded_s[0]
    if rate_per_s is None:
        return due_s
    if due_s[-1] == 0:
        raise WorkloadError(
            "replay: all recorded times are equal, so no rate can be given to them; drop --rate"
        )
    return due_s * float((n - 1) / due_s[-1] / rate_per_s)


@dataclass(frozen=True, slots=True)
class Pattern:
    """One pattern: how its times are made, the parameters it cannot do without and those it also takes."""

    due_s: Callable[..., Times]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()


ARRIVALS: dict[str, Pattern] = {
    "burst": Pattern(burst),
    "constant": Pattern(constant, needs=("rate_per_s",)),
    "poisson": Pattern(poisson, needs=("rate_per_s",)),
    "gamma": Pattern(gamma, needs=("rate_per_s", "burstiness")),
    "ramp": Pattern(ramp, needs=("rate_per_s", "ramp_to_per_s")),
    "steps": Pattern(steps, needs=("steps",)),
    "replay": Pattern(replay, needs=("times_s",), takes=("rate_per_s",)),
}

FLAGS: dict[str, tuple[str, str]] = {
    "rate_per_s": ("--rate", "requests per second, e.g. --rate 10"),
    "burstiness": ("--burstiness", "the gaps' gamma shape, e.g. --burstiness 0.5"),
    "ramp_to_per_s": ("--ramp-to", "the last rate in requests per second, e.g. --ramp-to 50"),
    "steps": ("--steps", "rate x seconds pairs, e.g. --steps 5x30,10x30,20x30"),
    "times_s": ("--arrival-times", "a file with one time in seconds per line"),
}
"""Each parameter's flag on the command line and what it wants, for messages."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A checked wish: the pattern, how many requests, and the parameters that the pattern takes."""

    pattern: str
    n: int
    rate_per_s: float | None = None
    burstiness: float | None = None
    ramp_to_per_s: float | None = None
    steps: Sequence[tuple[float, float]] | None = None
    times_s: Sequence[float] | None = None

    def due_s(self, rng: np.random.Generator) -> Times:
        """When each request is due: n seconds from the run's start, ascending, none negative."""
        row = ARRIVALS[self.pattern]
        own = {name: getattr(self, name) for name in row.needs + row.takes if name != "rate_per_s"}
        return row.due_s(self.rate_per_s, self.n, rng, **own)


def asked(
    pattern: str,
    *,
    n: int | None = None,
    duration_s: float | None = None,
    rate_per_s: float | None = None,
    burstiness: float | None = None,
    ramp_to_per_s: float | None = None,
    steps: Sequence[tuple[float, float]] | None = None,
    times_s: Sequence[float] | None = None,
) -> Arrivals:
    """What the user asked for, checked. Give n, or what it follows from: duration_s and a rate, steps, times.

    Raises WorkloadError with the flag to use where a parameter is missing, ignored by the pattern or out of
    range.
    """
    if pattern not in ARRIVALS:
        raise WorkloadError(unknown(pattern))
    wish = Arrivals(pattern, 0, rate_per_s, burstiness, ramp_to_per_s, steps, times_s)
    _check_parameters(wish)
    n_asked = _n_over(wish, duration_s) if n is None else n
    if n_asked > MAX_REQUESTS:
        raise WorkloadError(f"{pattern}: {n_asked:g} requests; expected at most {MAX_REQUESTS:,}")
    n = round(n_asked)
    if n < 1:
        raise WorkloadError(f"{pattern}: {n} requests; expected at least 1, raise --requests or --duration")
    if times_s is not None and n > len(times_s):
        raise WorkloadError(f"replay: {n} requests asked, {len(times_s)} times recorded; lower --requests")
    return replace(wish, n=n)


def unknown(pattern: str) -> str:
    """What is wrong with a pattern that is none."""
    return f"no arrival pattern {pattern!r}; there are {', '.join(ARRIVALS)}"


def parse_steps(text: str) -> tuple[tuple[float, float], ...]:
    """`5x30,10x30` as ((5.0, 30.0), (10.0, 30.0)): rate per second, seconds."""
    try:
        pairs = [step.lower().split("x") for step in text.split(",")]
        return tuple((float(rate), float(span)) for rate, span in pairs)
    except ValueError:
        raise WorkloadError(f"--steps {text!r}: expected {FLAGS['steps'][1]}") from None


def parse_times(text: str) -> tuple[float, ...]:
    """Times in seconds, one per line; blank lines and what follows a # are skipped."""
    times_s: list[float] = []
    for number, line in enumerate(text.splitlines(), 1):
        if word := line.partition("#")[0].strip():
            try:
                times_s.append(float(word))
            except ValueError:
                raise WorkloadError(
                    f"--arrival-times line {number}: {word!r} is not a time in seconds"
                ) from None
    return tuple(times_s)


def _check_parameters(wish: Arrivals) -> None:
    row = ARRIVALS[wish.pattern]
    for name, (flag, wants) in FLAGS.items():
        value = getattr(wish, name)
        if value is None and name in row.needs:
            raise WorkloadError(f"{wish.pattern} arrivals need {flag}: {wants}")
        if value is None:
            continue
        if name not in row.needs + row.takes:
            fits = [pattern for pattern, other in ARRIVALS.items() if name in other.needs + other.takes]
            raise WorkloadError(f"{wish.pattern} arrivals would ignore {flag}; it is for {', '.join(fits)}")
        low = -math.inf if name == "times_s" else 0.0
        if not _are_above(low, value):
            raise WorkloadError(f"{flag} {value}: expected {wants}; finite, and rates and spans above 0")


def _are_above(low: float, value: float | Sequence[float] | Sequence[Sequence[float]]) -> bool:
    """Whether there is a number, and each is finite and above `low`."""
    if isinstance(value, int | float):
        return low < value < math.inf
    return len(value) > 0 and all(_are_above(low, each) for each in value)


def _n_over(wish: Arrivals, duration_s: float | None) -> float:
    if wish.times_s is not None:
        return len(wish.times_s)
    if wish.steps is not None:
        return sum(rate * span_s for rate, span_s in wish.steps)
    if wish.rate_per_s is None or duration_s is None:
        raise WorkloadError(f"{wish.pattern}: how many requests? give --requests, or a rate and --duration-s")
    if not 0 < duration_s < math.inf:
        raise WorkloadError(f"--duration-s {duration_s}: expected seconds above 0")
    last_per_s = wish.rate_per_s if wish.ramp_to_per_s is None else wish.ramp_to_per_s
    return (wish.rate_per_s + last_per_s) / 2 * duration_s
