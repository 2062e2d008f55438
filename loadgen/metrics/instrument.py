"""How late and how costly the client was, by its records, its drivers and the watcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from burstline.loadgen.record.columns import Columns, Floats
from burstline.loadgen.record.drive_report import DriveReport, MachineUse
from burstline.loadgen.record.manifest import ArrivalFacts
from burstline.loadgen.record.summary import Instrument, ScheduleFigures
from burstline.loadgen.record.telemetry import Telemetry
from burstline.loadgen.stats.estimates import Absent, Figure, measured
from burstline.loadgen.stats.quantiles import order_for, quantile
from burstline.workloads import achieved

NOT_SENT = "no request was sent"
NO_STAMP = "the kernel stamped no read (only Linux does)"
NO_REPORT = "no driver reported on itself"
LEAST_CANARY_EVENTS = 10
PEAK_S = 1.0
"""Over how long the peak event rate is taken: an engine's steps, many a second, come in lumps."""


def instrument(
    c: Columns, reports: Sequence[DriveReport], watched: Telemetry, *, closed_loop: bool
) -> Instrument:
    """The client's own lateness and cost.

    `send_lag_*` is from due (closed loop: from dispatched) to fully written: in a burst the k-th request
    leaves about 10 us times k late, for the kernel takes that long for each. `read_lag_*` is how long after
    the kernel our code had an event; it is already taken out of every time. `read_error_*` bounds what cannot
    be taken out, event by event.
    """
    sent_s = c.sent_s[~np.isnan(c.sent_s)]
    lag_s = c.sent_s - (c.dispatched_s if closed_loop else c.due_s)
    n_events, n_stamped = len(c.event_s), int(np.count_nonzero(c.event_lag_ns >= 0))
    max_pass_s = max((report.max_pass_ns for report in reports), default=0) / 1e9 if reports else None
    n = len(sent_s)
    peak = _most_in(PEAK_S, c.event_s) / PEAK_S if n_events else None
    return Instrument(
        send_spread_s=measured(float(np.ptp(sent_s)) if n else None, "s", NOT_SENT, n),
        **_quantiles("send_lag", lag_s, NOT_SENT),
        **_quantiles("read_lag", c.event_lag_s, NO_STAMP),
        **_quantiles("read_error", c.event_error_s, "no token arrived"),
        kernel_stamps=measured(n_stamped / n_events if n_events else None, "1", "no token arrived", n_events),
        max_pass_s=measured(max_pass_s, "s", NO_REPORT),
        peak_events_per_s=measured(peak, "1/s", "no token arrived", n_events),
        client_cpu_s=_sum(reports, lambda report: report.cpu_s, "s"),
        client_peak_bytes=_sum(reports, lambda report: report.peak_rss_bytes, "bytes"),
        involuntary_switches=_sum(reports, lambda report: report.n_involuntary_switches, "switches"),
        resent=_sum(reports, lambda report: report.n_resent, "requests"),
        clock_drift_s=measured(
            max((abs(report.clock_drift_ns) / 1e9 for report in reports), default=None), "s", NO_REPORT
        ),
        clock_error_s=_clock_error(reports),
        others_cpu_fraction=_worst(reports, lambda machine: machine.others_fraction)
        or watched.cpu_fraction("others_cpu_s"),
        steal_fraction=_worst(reports, lambda machine: machine.steal_fraction)
        or watched.cpu_fraction("steal_s"),
        cpu_waiting_fraction=watched.time_fraction("pressure", "cpu_waiting_s"),
        throttled_fraction=watched.throttled_fraction(),
        client_cpu_wait_fraction=_cpu_wait(reports),
        **_canary(reports),
        **_network(reports),
    )


def _worst(reports: Sequence[DriveReport], share: Callable[[MachineUse], float]) -> Figure | None:
    """The largest share on a machine of the load; None where all of it ran here, beside the watcher."""
    shares = [share(report.machine) for report in reports if report.machine is not None]
    return measured(max(shares), "1", "") if shares else None


def _network(reports: Sequence[DriveReport]) -> dict[str, Figure]:
    """The way to a remote server, of the driver furthest from it; nothing where it was on the loopback."""
    remote = [(report, report.network) for report in reports if report.network is not None]
    if not remote:
        return {}
    report, tcp = max(remote, key=lambda each: each[1].least_rtt_p50_ns)
    left, acked = report.left, report.acked
    no_stamp = "the kernel stamped no byte sent"
    sent_again = sum(network.retransmits for _, network in remote)
    return {
        "network_rtt_s": measured(tcp.least_rtt_p50_ns / 1e9, "s", "", tcp.n),
        "network_rtt_p99_s": measured(tcp.rtt_p99_ns / 1e9, "s", "", tcp.n),
        "network_retransmits": measured(float(sent_again), "segments", "", tcp.n),
        "network_left_p99_s": measured(
            left.p99_ns / 1e9 if left else None, "s", no_stamp, left.n if left else 0
        ),
        "network_acked_p50_s": measured(
            acked.p50_ns / 1e9 if acked else None, "s", no_stamp, acked.n if acked else 0
        ),
    }


def _canary(reports: Sequence[DriveReport]) -> dict[str, Figure]:
    """The error of the instrument in this very run, of the driver with the largest."""
    names = ("canary_p50_s", "canary_p99_s", "canary_beyond_p99_s", "canary_cpu_fraction")
    ran = [(report, report.canary) for report in reports if report.canary is not None]
    if not ran:
        return dict.fromkeys(names, Absent("no canary ran", "no-canary"))
    enough = [(report, canary) for report, canary in ran if canary.n >= LEAST_CANARY_EVENTS]
    if not enough:
        return dict.fromkeys(names, Absent("not measured: the run was too short", "too-short"))
    report, canary = max(enough, key=lambda each: (each[1].beyond_p99_ns, each[1].p99_ns))
    share = canary.cpu_s / report.wall_s / (os.cpu_count() or 1) if report.wall_s else None
    return {
        "canary_p50_s": measured(canary.p50_ns / 1e9, "s", "", canary.n),
        "canary_p99_s": measured(canary.p99_ns / 1e9, "s", "", canary.n),
        "canary_beyond_p99_s": measured(canary.beyond_p99_ns / 1e9, "s", "", canary.n),
        "canary_cpu_fraction": measured(share, "1", "the run has no length"),
    }


def _cpu_wait(reports: Sequence[DriveReport]) -> Figure:
    """The share of the run in which the reading threads were ready to run and had no CPU."""
    known = [(r.cpu_wait_s, r.wall_s) for r in reports if r.cpu_wait_s is not None and r.wall_s > 0]
    share = max((waited / wall for waited, wall in known), default=None)
    return measured(share, "1", "the kernel does not say how long the client waited for a CPU", len(known))


def _most_in(window_s: float, at_s: Floats) -> int:
    """The most events within any window of this length."""
    at_s = np.sort(at_s)
    most, many = 0, 1 << 20
    for begin in range(0, len(at_s), many):
        ends = np.searchsorted(at_s, at_s[begin : begin + many] + window_s)
        most = max(most, int((ends - np.arange(begin, begin + len(ends))).max()))
    return most


def _quantiles(name: str, values: Floats, absent: str) -> dict[str, Figure]:
    known = values[np.isfinite(values)]
    if not len(known):
        return {f"{name}_{p}_s": Absent(absent) for p in ("p50", "p99", "max")}
    order_for(known, (0.5, 0.99))
    found = {"p50": quantile(known, 0.5), "p99": quantile(known, 0.99), "max": float(known[-1])}
    return {f"{name}_{p}_s": measured(value, "s", absent, len(known)) for p, value in found.items()}


def _clock_error(reports: Sequence[DriveReport]) -> Figure | None:
    """Times of different machines are off by at most this; None where one machine drove the load."""
    bounds = [report.clock.bound_ns / 1e9 for report in reports if report.clock is not None]
    return measured(max(bounds), "s", "", len(bounds)) if bounds else None


def _sum(reports: Sequence[DriveReport], of: Callable[[DriveReport], float], unit: str) -> Figure:
    return measured(sum(map(of, reports)) if reports else None, unit, NO_REPORT, len(reports))


def pacing(c: Columns, arrivals: ArrivalFacts | None, *, closed_loop: bool) -> ScheduleFigures:
    """Rate, gaps and dispersion of requests as sent and as planned; see `burstline.workloads.achieved`.

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
    end_s = c.end_s
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
