"""When requests are due: every pattern of arrivals, as absolute times from the run's start.

Each pattern is a unit-rate process whose clock is then stretched: if S_k are the arrivals of a process of
rate 1 and L(t) is how many requests the asked rate wants by time t, then L^-1(S_k) are arrivals at that rate
(the time-rescaling theorem; Cox & Lewis 1966, ch. 2). No gap is ever rescaled to hit a total, so a Poisson
plan is a Poisson process: its achieved rate varies by 1/sqrt(n), as it should.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.workloads.arrivals import Arrivals
from burstline.workloads.request import WorkloadError

Times = NDArray[np.float64]
OPEN_S: Final = 10.0  # assumed time in flight of a request in an open loop: before the run it is unknown


def burst(_rate: float | None, n: int, _rng: np.random.Generator, _: object = None) -> Times:
    """Everything at once; MLPerf calls it Offline."""
    return np.zeros(n)


def constant(rate_per_s: float, n: int, _rng: np.random.Generator, _: object = None) -> Times:
    """One request every 1/rate, the first at 0."""
    return np.arange(n) / rate_per_s


def poisson(rate_per_s: float, n: int, rng: np.random.Generator, _: object = None) -> Times:
    """A Poisson process: independent exponential gaps, the first before the first request."""
    return np.cumsum(rng.exponential(1 / rate_per_s, n))


def gamma(rate_per_s: float, n: int, rng: np.random.Generator, burstiness: float) -> Times:
    """Independent gamma gaps of shape `burstiness`: 1 is Poisson, less comes in clumps, more is evener.

    The gaps' coefficient of variation is 1/sqrt(burstiness); the same parameter as in `vllm bench serve`.
    """
    return np.cumsum(rng.gamma(burstiness, 1 / (rate_per_s * burstiness), n))


def ramp(_: float | None, n: int, rng: np.random.Generator, rates_per_s: tuple[float, float]) -> Times:
    """A Poisson process whose rate goes linearly from one rate to another over n requests, then stays."""
    rate_per_s, ramp_to_per_s = rates_per_s
    span_s = 2 * n / (rate_per_s + ramp_to_per_s)
    unit = np.cumsum(rng.standard_exponential(n))
    slope = (ramp_to_per_s - rate_per_s) / span_s
    inside = np.minimum(unit, float(n))
    # L(t) = r t + slope t^2 / 2, solved for t in the form that neither a flat nor a zero start breaks.
    root = np.sqrt(np.maximum(rate_per_s**2 + 2 * slope * inside, 0.0))
    return 2 * inside / (rate_per_s + root) + (unit - inside) / ramp_to_per_s


def steps(_: float | None, n: int, rng: np.random.Generator, steps: Sequence[tuple[float, float]]) -> Times:
    """A Poisson process whose rate is constant within each step (rate, seconds); the last goes on."""
    rates, spans_s = np.array(steps, dtype=float).T
    begins_s = np.concatenate(([0.0], np.cumsum(spans_s)))
    wanted = np.concatenate(([0.0], np.cumsum(rates * spans_s)))
    unit = np.cumsum(rng.standard_exponential(n))
    beyond = np.maximum(unit - wanted[-1], 0.0)
    return np.asarray(np.interp(unit, wanted, begins_s) + beyond / rates[-1])


def replay(rate_per_s: float | None, n: int, rng: np.random.Generator, times_s: Sequence[float]) -> Times:
    """The first n of recorded times, from their first; stretched to a mean rate where one is given."""
    del rng
    recorded_s = np.sort(np.asarray(times_s, dtype=np.float64))[:n]
    due_s: Times = recorded_s - recorded_s[0]
    if rate_per_s is None:
        return due_s
    if due_s[-1] == 0:
        raise WorkloadError("replay: all recorded times are equal, so --rate cannot scale them; drop it")
    return due_s * float((n - 1) / due_s[-1] / rate_per_s)


_DRAWN: Final[Mapping[str, Callable[..., Times]]] = {
    "burst": burst, "constant": constant, "poisson": poisson, "gamma": gamma, "ramp": ramp, "steps": steps,
    "replay": replay,
}  # fmt: skip


def due_times(arrivals: Arrivals, rng: np.random.Generator) -> Times:
    """When each request is due: n seconds from the run's start, ascending, none negative."""
    parameter = arrivals.arrival.parameter if arrivals.times_s is None else arrivals.times_s
    return _DRAWN[arrivals.pattern](arrivals.rate_per_s, arrivals.n, rng, parameter)


def most_open(due_s: Times, concurrency: int | None, within_s: float = OPEN_S) -> int:
    """Requests in flight at once, as far as a plan can know: at most `concurrency`, else due within 10 s."""
    if concurrency is not None:
        return min(concurrency, len(due_s))
    within = np.searchsorted(due_s, due_s + within_s, side="right") - np.arange(len(due_s))
    return int(within.max(initial=0))
