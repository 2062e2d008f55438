"""SLOs as bounds on the latency of single requests: what a search for the highest load goes by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

from burstline.measure.metrics.definitions import METRICS
from burstline.measure.metrics.slo import Goal
from burstline.measure.record.columns import Columns, Floats
from burstline.measure.stats.limit_search import Evidence, LatencyBound
from burstline.workloads.request import WorkloadError

ATTAINMENT: Final = "attainment"


def bounds_of(goals: Sequence[Goal]) -> tuple[LatencyBound, ...]:
    """The bound of each goal; WorkloadError for one that is not about the latency of single requests."""
    found = []
    for goal in goals:
        if goal.metric == ATTAINMENT and any(other.per_request for other in goals):
            found.append(LatencyBound(goal.text, goal.bound, 1.0))
        elif (goal.statistic or "").startswith("p") and METRICS[goal.metric].of is not None:
            found.append(LatencyBound(goal.text, float(str(goal.statistic)[1:]) / 100, goal.bound))
        elif not goal.per_request:
            raise WorkloadError(
                f"--slo {goal.text!r}: a limit is searched for percentiles of requests' latencies, such as "
                "'ttft.p90<=500ms', and for attainment, such as 'ttft<=500ms' with 'attainment>=95%'"
            )
    if not found:
        also = " beside them, e.g. --slo 'attainment>=95%'" if goals else ", e.g. --slo 'ttft.p90<=500ms'"
        raise WorkloadError(f"--slo: a limit needs one that is about all requests{also}")
    for bound in found:
        if not bound.p < 1:
            raise WorkloadError(f"--slo {bound.text!r}: expected below 100%: no run can show that all do")
    return tuple(found)


def evidence_of(goals: Sequence[Goal], c: Columns, *, open_loop: bool) -> Evidence:
    """The evidence of these requests, which stand in the order they were due; see `Evidence`."""
    in_flight = None
    if open_loop:
        ended_s = np.sort(np.where(np.isnan(c.closed_s), np.inf, c.closed_s))
        in_flight = np.arange(len(c), dtype=np.float64) - np.searchsorted(ended_s, c.due_s)
    return Evidence(latencies_of(goals, partial(_latency, c=c)), in_flight)


def latencies_of(goals: Sequence[Goal], latency: Callable[[Goal], Floats]) -> tuple[Floats, ...]:
    """What each of `bounds_of(goals)` bounds, for each request; `latency` is of a goal's metric."""
    criteria = [goal for goal in goals if goal.per_request]
    return tuple(
        _relative(criteria, latency) if goal.metric == ATTAINMENT else latency(goal)
        for goal in goals
        if goal not in criteria
    )


def _latency(goal: Goal, c: Columns) -> Floats:
    of = METRICS[goal.metric].of
    assert of is not None
    return np.where(c.failed, np.inf, of(c))


def _relative(criteria: Sequence[Goal], latency: Callable[[Goal], Floats]) -> Floats:
    """By how much each request misses the criterion that it misses most: above 1 it misses one."""
    return np.asarray(np.fmax.reduce([latency(goal) / goal.bound for goal in criteria]))
