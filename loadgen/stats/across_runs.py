"""Repeats of one run taken together: how far independent runs differ is part of every number's uncertainty.

Servers are restarted between repeats. What differs between restarts is mostly more than what differs between
the requests of one run, so that an interval over requests alone is far too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy import stats as sps

from loadgen.metrics.definitions import Samples
from loadgen.record.columns import Floats, Ints
from loadgen.stats.clustered_bootstrap import weighted_quantile
from loadgen.stats.estimates import LEVEL, Absent, Estimate, Figure, early_stopping_floor, label, replicates
from loadgen.stats.significance import LEAST_RUNS

MOST_DRAWS: Final = 500
"""Only their spread is used, which so many tell to 3 %."""


def percentile_over(runs: Sequence[Samples], p: float, unit: str, rng: np.random.Generator) -> Figure:
    """The quantile `p` over the samples of all repeats, by resampling runs, then requests within each.

    No average of percentiles; +inf is a failed request. Of k runs a resample shows but (k - 1)/k of the
    variance between them and draws tell nothing of its tails, so that the error is widened to Student's t
    with k - 1 degrees of freedom, on the scale of logarithms. Davison & Hinkley, Bootstrap Methods and their
    Application (1997), 3.8.
    """
    k, n = len(runs), sum(int(run.weight.sum()) for run in runs)
    if k < LEAST_RUNS:
        return Absent(f"an interval over repeats needs {LEAST_RUNS}, there are {k}")
    if any(len(run.value) == 0 for run in runs):
        return Absent("a repeat has no value at all")
    if n < early_stopping_floor(p):
        return Absent(f"{label(p)} needs {early_stopping_floor(p):,} samples, there are {n:,}")
    value, weight, request, sizes = _joined(runs)
    point = weighted_quantile(value, np.cumsum(weight), n, p)
    if not math.isfinite(point):
        return Absent("so many requests failed, which count as infinitely late, that it lies among them")
    if point <= 0:
        return Absent("an interval on the scale of logarithms needs values above 0")
    draws = np.empty(min(MOST_DRAWS, replicates(len(value))))
    for i in range(len(draws)):
        cumulated = np.cumsum(weight * _times_drawn(sizes, rng)[request])
        draws[i] = weighted_quantile(value, cumulated, float(cumulated[-1]), p)
    if not np.isfinite(draws).all() or draws.min() <= 0:
        return Estimate(point, None, None, LEVEL, n, unit, "in some resamples it lies among failed requests")
    error = float(np.log(draws).std(ddof=1)) * math.sqrt(k / (k - 1))
    reach = math.exp(_student(k) * error)
    return Estimate(point, point / reach, point * reach, LEVEL, n, unit, f"two-level bootstrap, {k} repeats")


def over_runs(values: Floats, unit: str) -> Figure:
    """One number a repeat: their geometric mean, with Student's interval over the repeats."""
    k = len(values)
    if k < LEAST_RUNS:
        return Absent(f"an interval over repeats needs {LEAST_RUNS}, there are {k}")
    if not np.isfinite(values).all() or values.min() <= 0:
        return Absent("an interval over repeats needs finite values above 0")
    logs = np.log(values)
    middle = float(logs.mean())
    half = _student(k) * float(logs.std(ddof=1)) / math.sqrt(k)
    low, point, high = (math.exp(middle + sign * half) for sign in (-1, 0, 1))
    note = f"geometric mean and Student's t over {k} repeats"
    return Estimate(point, low, high, LEVEL, k, unit, note)


def _joined(runs: Sequence[Samples]) -> tuple[Floats, Floats, Ints, list[int]]:
    """All samples ascending: value, weight, the request's number over all runs; requests of each run."""
    owners = [np.unique(run.owner, return_inverse=True)[1] for run in runs]
    sizes = [int(own.max()) + 1 for own in owners]
    starts = np.concatenate([[0], np.cumsum(sizes[:-1])])
    value = np.concatenate([run.value for run in runs])
    weight = np.concatenate([run.weight for run in runs]).astype(np.float64)
    request = np.concatenate([own + start for own, start in zip(owners, starts, strict=True)])
    order = np.argsort(value, kind="stable")
    return value[order], weight[order], request[order], sizes


def _times_drawn(sizes: Sequence[int], rng: np.random.Generator) -> Floats:
    """How often each request comes when as many runs are drawn, and as many requests of each."""
    drawn = [np.zeros(size) for size in sizes]
    for i in rng.integers(0, len(sizes), len(sizes)):
        drawn[i] += np.bincount(rng.integers(0, sizes[i], sizes[i]), minlength=sizes[i])
    return np.concatenate(drawn)


def _student(k: int) -> float:
    return float(sps.t.ppf((1 + LEVEL) / 2, k - 1))
