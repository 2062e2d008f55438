"""How late the client itself was: what its own records, its drivers and the watcher say about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from loadgen.driver.job import DriveReport
from loadgen.metrics.summary_types import Instrument
from loadgen.metrics.telemetry_query import Watched
from loadgen.record.columns import Columns, Floats
from loadgen.stats.estimates import Absent, Figure, measured

NOT_SENT = "no request was sent"
NO_STAMP = "the kernel stamped no read (TLS, or no Linux)"
NO_REPORT = "no driver reported on itself"
PEAK_S = 1.0
"""Over how long the peak event rate is taken: an engine's steps, many a second, come in lumps."""


def instrument(
    c: Columns, reports: Sequence[DriveReport], watched: Watched, *, closed_loop: bool
) -> Instrument:
    """The client's own lateness and cost.

    `send_lag_*` is from due (closed loop: from dispatched) to fully written: in a burst the k-th request
    leaves about 10 us times k late, for the kernel takes that long for each. `read_lag_*` is how long after
    the kernel our code had an event; it is already taken out of every time. `read_error_*` bounds what cannot
    be taken out. `compiled_reader` is the share of drivers that had it.
    """
    sent_s = c.sent_s[~np.isnan(c.sent_s)]
    lag_s = c.sent_s - (c.dispatched_s if closed_loop else c.due_s)
    read_lag_s = c.event_lag_s
    stamped = ~np.isnan(read_lag_s)
    max_pass_s = max((report.max_pass_ns for report in reports), default=0) / 1e9 if reports else None
    error_s = read_error_s(c, max_pass_s)
    n = len(sent_s)
    peak = _most_in(PEAK_S, c.event_s) / PEAK_S if len(c.event_s) else None
    return Instrument(
        send_spread_s=measured(float(np.ptp(sent_s)) if n else None, "s", NOT_SENT, n),
        **_quantiles("send_lag", lag_s, NOT_SENT),
        **_quantiles("read_lag", read_lag_s, NO_STAMP),
        **_quantiles("read_error", error_s, "no token arrived"),
        kernel_stamps=measured(
            float(stamped.mean()) if len(stamped) else None, "1", "no token arrived", len(stamped)
        ),
        max_pass_s=measured(max_pass_s, "s", NO_REPORT),
        peak_events_per_s=measured(peak, "1/s", "no token arrived", len(c.event_s)),
        compiled_reader=measured(
            float(np.mean([report.reader == "compiled" for report in reports])) if reports else None,
            "1",
            NO_REPORT,
            len(reports),
        ),
        client_cpu_s=_sum(reports, lambda report: report.cpu_s, "s"),
        client_peak_bytes=_sum(reports, lambda report: report.peak_rss_bytes, "bytes"),
        involuntary_switches=_sum(reports, lambda report: report.n_involuntary_switches, "switches"),
        resent=_sum(reports, lambda report: report.n_resent, "requests"),
        clock_drift_s=measured(
            max((abs(report.clock_drift_ns) / 1e9 for report in reports), default=None), "s", NO_REPORT
        ),
        others_cpu_fraction=watched.cpu_fraction("others_cpu_s"),
        steal_fraction=watched.cpu_fraction("steal_s"),
        cpu_waiting_fraction=watched.time_fraction("pressure", "cpu_waiting_s"),
        throttled_fraction=watched.time_fraction("cgroup", "throttled_s"),
    )


def read_error_s(c: Columns, max_pass_s: float | None) -> Floats:
    """The most by which each event's time can be wrong.

    An event alone in its read has the kernel's own time: 0. Events that came in one read share the stamp of
    its last segment; the earlier ones may have arrived at any time since the read before, but no longer ago
    than our code ever took to come round. Without kernel stamps that pass bounds all events; where not even
    it is known, NaN.
    """
    longest_s = np.nan if max_pass_s is None else max_pass_s
    lag_s, event_s = c.event_lag_s, c.event_s
    same = np.zeros(len(event_s), dtype=bool)
    same[1:] = (c.owner[1:] == c.owner[:-1]) & (event_s[1:] == event_s[:-1])
    shared = same.copy()
    shared[:-1] |= same[1:]
    shared_at, firsts = np.flatnonzero(shared), np.flatnonzero(shared & ~same)
    first = firsts[np.searchsorted(firsts, shared_at, side="right") - 1]
    before = np.maximum(first - 1, 0)
    is_start = (first == 0) | (c.owner[before] != c.owner[first])
    had_s = event_s[before] + np.nan_to_num(lag_s[before])
    since_s = np.where(is_start, np.inf, np.maximum(event_s[first] - had_s, 0))
    error_s = np.zeros(len(event_s))
    error_s[shared_at] = np.fmin(since_s, longest_s)
    error_s[np.isinf(error_s)] = np.nan
    error_s[np.isnan(lag_s)] = longest_s
    return error_s


def _most_in(window_s: float, at_s: Floats) -> int:
    """How many at most came within any window so long."""
    at_s = np.sort(at_s)
    return int((np.searchsorted(at_s, at_s + window_s) - np.arange(len(at_s))).max())


def _quantiles(name: str, values: Floats, absent: str) -> dict[str, Figure]:
    known = values[np.isfinite(values)]
    if not len(known):
        return {f"{name}_{p}_s": Absent(absent) for p in ("p50", "p99", "max")}
    p50, p99, largest = np.quantile(known, [0.5, 0.99, 1.0])
    found = {"p50": p50, "p99": p99, "max": largest}
    return {f"{name}_{p}_s": measured(float(value), "s", absent, len(known)) for p, value in found.items()}


def _sum(reports: Sequence[DriveReport], of: Callable[[DriveReport], float], unit: str) -> Figure:
    return measured(sum(map(of, reports)) if reports else None, unit, NO_REPORT, len(reports))
