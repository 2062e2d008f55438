"""Where a search for the highest load begins by itself: at the rate that is forecast to hold the SLOs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from burstline.bench.load_options import checked
from burstline.loadgen.metrics.slo import Goal
from burstline.loadgen.metrics.slo_evidence import bounds_of, latencies_of
from burstline.loadgen.record.rundir import Run
from burstline.machine.forecast import read_forecast
from burstline.machine.roofline_input import setup_of
from burstline.roofline.predict.forecast import Forecast, paced
from burstline.roofline.predict.simulate import Asked, simulate
from burstline.workloads.lengths import draw_both
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LoadSpec

N_REQUESTS: Final = 200
RATES: Final = np.geomspace(1 / 64, 4096, 73)
"""Requests per second, each 19% above the one before."""


def forecast_rate(run: Run, goals: Sequence[Goal], spec: LoadSpec) -> float:
    """The highest rate of Poisson arrivals at which the SLOs hold even if steps are as slow as they may be.

    Steps are those of `run`, slower by as much as its forecast's E2E may be: probes below the limit are
    shorter than an overload and its end. WorkloadError where there is no forecast: then a person must say
    where to begin.
    """
    forecast = read_forecast(run)
    unknown = sorted({goal.metric for goal in goals} - {"ttft", "tpot", "e2e", "attainment"})
    if not isinstance(forecast, Forecast) or unknown:
        why = (
            f"{', '.join(unknown)} is not predicted"
            if unknown
            else getattr(forecast, "absent", "none was made")
        )
        raise WorkloadError(
            f"limit: no forecast to begin at ({why}); say where the search begins: --rate R (requests per "
            "second) or --concurrency N (users at a time)"
        )
    bounds, (setup, _) = bounds_of(goals), setup_of(run)
    e2e, shape = forecast.figures["metrics.e2e.p50"], checked(replace(spec, requests=N_REQUESTS)).shape
    clock = paced(setup.clock(), e2e.high / e2e.point)
    prompt_tok, output_tok = draw_both(shape.prompt_tok, shape.output_tok, N_REQUESTS, spec.seed)
    at = np.cumsum(np.random.default_rng(spec.seed).exponential(1.0, N_REQUESTS))

    def holds(rate: float) -> bool:
        rows = zip((at / rate).tolist(), prompt_tok.tolist(), output_tok.tolist(), strict=True)
        of = simulate([Asked(*row) for row in rows], forecast.limits, clock)
        latencies = {"ttft": of.ttft_s, "tpot": np.nan_to_num(of.tpot_s), "e2e": of.e2e_s}
        each = latencies_of(goals, lambda goal: latencies[goal.metric])
        return all((s <= bound.most).mean() >= bound.p for s, bound in zip(each, bounds, strict=True))

    low, high = 0, len(RATES)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(float(RATES[middle])) else (low, middle)
    return float(f"{RATES[low]:.2g}")
