"""Repeats of one run taken together: how far independent runs differ is part of every number's uncertainty.

Servers are restarted between repeats. What differs between restarts is mostly more than what differs between
the requests of one run, so that an interval over requests alone is far too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from scipy import stats as sps

from loadgen.columns import Columns, Floats
from loadgen.metrics import METRICS, latencies
from loadgen.stats import LEVEL, Absent, Estimate, Figure, early_stopping_floor, label
from loadgen.totals import whole_run

LEAST_RUNS: Final = 3
N_DRAWS: Final = 1000

Statistic = Callable[[Floats], float]


def percentile_over(runs: Sequence[Columns], metric: str, p: float, rng: np.random.Generator) -> Figure:
    """The quantile `p` of a metric over the requests of all repeats; no average of percentiles."""
    values = [latencies(METRICS[metric], c) for c in runs]
    known = [each[~np.isnan(each)] for each in values]
    n, floor = sum(map(len, known)), early_stopping_floor(p)
    if n < floor:
        return Absent(f"{label(p)} needs {floor:,} samples, there are {n:,}")
    return two_level(known, lambda pooled: _quantile(pooled, p), METRICS[metric].unit, rng)


def mean_over(runs: Sequence[Columns], metric: str, rng: np.random.Generator) -> Figure:
    """The mean of a metric over the requests of all repeats."""
    values = [latencies(METRICS[metric], c) for c in runs]
    known = [each[~np.isnan(each)] for each in values]
    return two_level(known, lambda pooled: float(pooled.mean()), METRICS[metric].unit, rng)


def output_rate_over(runs: Sequence[Columns]) -> Figure:
    """Output tokens per second, one number a repeat; their mean by Student's t."""
    rates = []
    for c in runs:
        window, tokens = whole_run(c), c.output_tok[c.ok]
        if window is None or window.length_s <= 0 or np.isnan(tokens).any():
            return Absent("a repeat has no output throughput")
        rates.append(float(tokens.sum()) / window.length_s)
    return over_runs(np.array(rates), "tok/s")


def over_runs(values: Floats, unit: str) -> Figure:
    """The mean of one number a repeat, with Student's interval over the repeats."""
    k = len(values)
    if k < LEAST_RUNS:
        return Absent(f"an interval over repeats needs {LEAST_RUNS}, there are {k}")
    half = float(sps.t.ppf((1 + LEVEL) / 2, k - 1) * values.std(ddof=1) / math.sqrt(k))
    mean = float(values.mean())
    return Estimate(mean, mean - half, mean + half, LEVEL, k, unit, f"Student's t over {k} repeats")


def two_level(
    runs: Sequence[Floats], statistic: Statistic, unit: str, rng: np.random.Generator
) -> Estimate | Absent:
    """A statistic over the pooled values of all runs; its interval by resampling runs, then values within.

    Of k runs a resample shows but (k - 1)/k of the variance between them and draws tell nothing of its tails,
    so that the error is widened to Student's t with k - 1 degrees of freedom, on the scale of logarithms.
    Davison & Hinkley, Bootstrap Methods and their Application (1997), 3.8.
    """
    k = len(runs)
    if k < LEAST_RUNS:
        return Absent(f"an interval over repeats needs {LEAST_RUNS}, there are {k}")
    if any(len(run) == 0 for run in runs):
        return Absent("a repeat has no value at all")
    point = statistic(np.concatenate(runs))
    if not math.isfinite(point):
        return Absent("so many requests failed, which count as infinitely late, that it lies among them")
    if point <= 0:
        return Absent("an interval on the scale of logarithms needs values above 0")
    draws = np.array([_draw(runs, statistic, rng) for _ in range(N_DRAWS)])
    finite = draws[np.isfinite(draws) & (draws > 0)]
    n = sum(map(len, runs))
    if len(finite) < N_DRAWS:
        return Estimate(point, None, None, LEVEL, n, unit, "in some resamples it lies among failed requests")
    error = float(np.log(finite).std(ddof=1)) * math.sqrt(k / (k - 1))
    reach = math.exp(float(sps.t.ppf((1 + LEVEL) / 2, k - 1)) * error)
    return Estimate(point, point / reach, point * reach, LEVEL, n, unit, f"two-level bootstrap, {k} repeats")


def _draw(runs: Sequence[Floats], statistic: Statistic, rng: np.random.Generator) -> float:
    chosen = [runs[i] for i in rng.integers(0, len(runs), len(runs))]
    return statistic(np.concatenate([run[rng.integers(0, len(run), len(run))] for run in chosen]))


def _quantile(values: Floats, p: float) -> float:
    reached = np.partition(values, math.ceil((len(values) - 1) * p))[math.ceil((len(values) - 1) * p)]
    return float(np.quantile(values, p)) if math.isfinite(reached) else math.inf


def noise_floor(values: Floats) -> Figure:
    """The relative difference that two runs of the very same system exceed but once in twenty (A/A noise).

    `values` holds one number a repeat. A difference between two systems below it, one run each, says nothing.
    """
    k = len(values)
    if k < LEAST_RUNS:
        return Absent(f"the noise between repeats needs {LEAST_RUNS}, there are {k}")
    if not np.isfinite(values).all() or values.min() <= 0:
        return Absent("relative noise needs finite values above 0 from every repeat")
    between = float(np.log(values).std(ddof=1)) * math.sqrt(2)
    floor = math.expm1(float(sps.t.ppf((1 + LEVEL) / 2, k - 1)) * between)
    return Estimate(floor, None, None, None, k, "1", f"from {k} repeats")
