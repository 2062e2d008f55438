"""Schedule fidelity: what the client sent, compared with its plan."""

from __future__ import annotations

import numpy as np

from loadgen.record.columns import Columns, Floats
from loadgen.record.manifest import ArrivalFacts
from loadgen.record.summary import ScheduleFigures
from loadgen.stats.estimates import Absent, Figure, measured
from workloads import achieved


def pacing(c: Columns, arrivals: ArrivalFacts | None, *, closed_loop: bool) -> ScheduleFigures:
    """Rate, gaps, dispersion of requests as sent, beside the plan's; see `workloads.achieved`.

    `gap_ks` is the distance from the law that gaps were drawn from, larger than `gap_ks_critical` in 5% of
    schedules that do follow it; only for Poisson and gamma arrivals (`arrivals` is the manifest's).
    """
    if closed_loop:
        return ScheduleFigures.absent(Absent("in a closed loop a request is due when another ends"))
    due_s, sent_s = np.sort(c.due_s), np.sort(c.sent_s[~np.isnan(c.sent_s)])
    if not len(sent_s):
        return ScheduleFigures.absent(Absent("no request was sent"))
    if not np.ptp(due_s):
        return ScheduleFigures.absent(Absent("all requests were due at once"))
    n, few = len(sent_s), "too few requests to say"
    end_s = float(np.nan_to_num(c.closed_s, nan=0.0).max())
    over_s = np.where(np.isnan(c.closed_s), np.inf, c.closed_s)[~np.isnan(c.sent_s)]
    starts = c.sent_s[~np.isnan(c.sent_s)]
    spans = (starts.tolist(), over_s.tolist(), float(sent_s[0]), end_s)
    in_flight = achieved.mean_in_flight(*spans) if end_s > sent_s[0] else None
    gap_ks, gap_ks_critical = _distance_from_law(sent_s, arrivals)
    return ScheduleFigures(
        planned_per_s=measured(achieved.mean_rate_per_s(due_s), "1/s", few, len(due_s)),
        achieved_per_s=measured(achieved.mean_rate_per_s(sent_s), "1/s", few, n),
        rate_error=measured(achieved.rate_error(sent_s, due_s), "1", few, n),
        planned_gap_cv=measured(achieved.gap_cv(due_s), "1", few, len(due_s)),
        gap_cv=measured(achieved.gap_cv(sent_s), "1", few, n),
        dispersion_100ms=_dispersion(sent_s, 0.1),
        dispersion_1s=_dispersion(sent_s, 1.0),
        dispersion_10s=_dispersion(sent_s, 10.0),
        gap_ks=gap_ks,
        gap_ks_critical=gap_ks_critical,
        in_flight_mean=measured(in_flight, "requests", few, n),
    )


def _dispersion(sent_s: Floats, window_s: float) -> Figure:
    few = f"fewer than two windows of {window_s:g} s"
    return measured(achieved.dispersion(sent_s, window_s), "1", few, len(sent_s))


def _distance_from_law(sent_s: Floats, arrivals: ArrivalFacts | None) -> tuple[Figure, Figure]:
    if arrivals is None or arrivals.pattern not in ("poisson", "gamma") or not arrivals.rate_per_s:
        absent = Absent("gaps were not drawn from a law", "no-law")
        return absent, absent
    rate, burstiness = arrivals.rate_per_s, arrivals.burstiness or 1.0
    n = len(sent_s) - 1
    few = "too few requests to say"
    return (
        measured(achieved.gap_ks(sent_s, rate, burstiness), "1", few, n),
        measured(1.36 / np.sqrt(n) if n > 1 else None, "1", few, n),
    )
