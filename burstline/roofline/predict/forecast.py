"""What a load is expected to measure, predicted before its first request: a few figures with 80% intervals.

A point is the simulator's with the predicted lengths of steps. Its interval is the point over and times one
factor, which `roofline/device/constants.toml` has for each figure and each way that a device is known; in an
open loop it reaches as far as simulations with faster and slower steps do.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from burstline.roofline.device.calibration import Calibration, interval_factors
from burstline.roofline.model.ops import Step
from burstline.roofline.predict.predict import Clock, Deployment
from burstline.roofline.predict.simulate import Asked, Limits, Simulation, simulate
from burstline.waves import FILLED, whole_waves

CONFIDENCE: Final = 0.8
TURNAROUND_S: Final = 1e-4
"""In a closed loop a client that sends again so soon misses the step that begins meanwhile."""
LEAST_IN_PLATEAU: Final = 11
"""As many requests as a median needs."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A load before it runs: requests that arrive when due, or a closed loop of `concurrency` streams.

    A closed loop sends no more from `until_s` on. `one_rate`: arrivals over time are not meant to vary.
    """

    requests: Sequence[Asked]
    limits: Limits
    concurrency: int | None = None
    until_s: float = math.inf
    one_rate: bool = True

    @property
    def over_time(self) -> bool:
        """Whether arrivals, not the ends of requests, decide when each is sent."""
        return self.concurrency is None and any(request.due_s > 0 for request in self.requests)

    def simulate(self, clock: Callable[[Step], float]) -> tuple[Simulation, ...]:
        """The load; a closed loop twice, as a request races with the step that begins when another ends."""
        waits_s = (0.0,) if self.concurrency in (None, 1) else (0.0, TURNAROUND_S)
        return tuple(
            simulate(
                self.requests, self.limits, clock,
                concurrency=self.concurrency, turnaround_s=wait_s, until_s=self.until_s,
            )
            for wait_s in waits_s
        )  # fmt: skip

    def makespan_s(self, clock: Callable[[Step], float]) -> float:
        """From the first request sent to the last token."""
        return float(np.mean([each.makespan_s for each in self.simulate(clock)]))

    def requests_per_s(self, of: Simulation) -> float:
        """Requests that end per second of the steady window, in a closed loop by Little's law.

        Where there is no such window, of the whole run.
        """
        window = steady_window(of, self.concurrency) if self.one_rate else None
        if window is None:
            return len(of.e2e_s) / of.makespan_s
        if self.concurrency is not None:
            return self.concurrency / float(of.e2e_s.mean())
        (start_s, end_s), ended_s = window, of.due_s + of.e2e_s
        return float(((ended_s > start_s) & (ended_s <= end_s)).sum()) / (end_s - start_s)


def steady_window(of: Simulation, concurrency: int | None) -> tuple[float, float] | None:
    """From when until when a run's rate is measured, by the rule of `measure/metrics/steady_state.py`.

    An open loop counts once it has filled, for which half of it is the limit; a closed loop from its C-th
    end over whole waves of C ends, if enough requests follow. None: as in a burst, the whole run counts.
    """
    end_s = float(of.due_s.max())
    if concurrency is None:
        first_s = float(of.due_s.min())
        start_s = first_s + min(float(np.quantile(of.e2e_s, FILLED)), (end_s - first_s) / 2)
    else:
        waves = whole_waves(of.due_s, of.due_s + of.e2e_s, concurrency)
        if waves is None or (of.due_s >= waves[0]).sum() < LEAST_IN_PLATEAU:
            return None
        start_s, end_s = waves
    return (start_s, end_s) if end_s > start_s else None


@dataclass(frozen=True, slots=True)
class Range:
    """A predicted figure and its 80% interval; latencies are seconds, rates are per second."""

    point: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Forecast:
    """The prediction for a run, made before its first request.

    `figures` go by their path in summary.json. `made_of` is the hash of the hardware facts that it is made
    of; `assumed` says what was guessed. `makespan_s` is None where only the first `n_simulated` requests of a
    longer load were simulated. `intervals` says where their width comes from.
    """

    figures: Mapping[str, Range]
    makespan_s: float | None
    n_simulated: int
    device: str
    made_of: str
    limits: Limits
    assumed: tuple[str, ...]
    intervals: str


@dataclass(frozen=True, slots=True)
class NoForecast:
    """Why there was nothing to score."""

    absent: str


@dataclass(frozen=True, slots=True)
class Score:
    """A forecast of a run and what was measured, by figure; figures that were not measured are left out."""

    device: str
    predicted: Mapping[str, Range]
    measured: Mapping[str, float]
    intervals: str

    def ratio(self, name: str) -> float:
        """Measured over predicted."""
        return self.measured[name] / self.predicted[name].point

    def inside(self, name: str) -> bool:
        return self.predicted[name].holds(self.measured[name])


def predicted_figures(
    load: PlannedLoad, clock: Callable[[Step], float], on: Deployment, calibration: Calibration | None
) -> tuple[dict[str, Range], float, str]:
    """The figures with their intervals, the makespan in seconds, and where the intervals come from.

    A queue multiplies an error of its steps, so a load that arrives over time is also simulated with all
    steps as much faster and slower as TPOT may be.
    """
    factors, source = interval_factors(
        on.device, calibration, dense=on.model.params() == on.model.active_params()
    )
    simulations = load.simulate(clock)
    points, pace = _points(load, simulations), factors["tpot"]
    paces = (1 / pace, pace) if load.over_time else ()
    ends = [points, *(_points(load, load.simulate(paced(clock, each))) for each in paces)]
    first_tok = load.requests[0].prompt_tok
    steps = Step.prefill(1, first_tok), Step.decode(1, first_tok + 1)
    if differs := dict.fromkeys(of for step in steps for of in on.predict(step, calibration).differs):
        ends += [_points(load, load.simulate(Clock(on, calibration, end))) for end in (0, 1)]
        source += f"; engines' kernels differ here: {', '.join(differs)}"
    figures = {
        name: Range(
            point,
            min(point / factors[name.split(".")[1]], *(each[name] for each in ends)),
            max(point * factors[name.split(".")[1]], *(each[name] for each in ends)),
        )
        for name, point in points.items()
        if 0 < point < math.inf  # nothing to score where no request ends in the window
    }
    return figures, float(np.mean([each.makespan_s for each in simulations])), source


def paced(clock: Callable[[Step], float], pace: float) -> Callable[[Step], float]:
    """The clock with all steps so many times as long."""
    return lambda step: clock(step) * pace


def _points(load: PlannedLoad, simulations: Sequence[Simulation]) -> dict[str, float]:
    one_token = all(request.output_tok == 1 for request in load.requests)
    values: dict[str, list[float]] = {
        "metrics.ttft.p50": [float(np.median(each.ttft_s)) for each in simulations],
        "metrics.tpot.p50": [
            math.nan if one_token else float(np.nanmedian(each.tpot_s)) for each in simulations
        ],
        "metrics.e2e.p50": [float(np.median(each.e2e_s)) for each in simulations],
        "throughput.requests_per_s": [load.requests_per_s(each) for each in simulations],
    }
    return {name: float(np.mean(each)) for name, each in values.items()}
