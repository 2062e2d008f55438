"""The client's lateness and cost, from its records, its drivers and the watcher."""

from collections.abc import Callable, Sequence

import numpy as np

from burstline.loadgen.capture.drive_report import CANARY_PERIOD_S, DriveReport, MachineUse
from burstline.measure.record.columns import Columns, Floats, seconds_or_nan
from burstline.measure.record.summary import Instrument, ScheduleFigures
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import FLOOR_S
from burstline.measure.stats.estimates import Absent, Figure, measured
from burstline.measure.stats.quantiles import order_for, quantile

NOT_SENT = "no request was sent"
NO_STAMP = "the kernel stamped no read (only Linux does)"
NO_REPORT = "no driver reported on itself"
NO_CPU_WAIT = "the kernel does not say how long the client waited for a CPU"
LEAST_CANARY_EVENTS = 10
LEAST_CANARY_SHARE = 0.5
"""Of the events that the canary sends during the load; with fewer it was lost."""
POWER_CAP = 0x4
HELD_DOWN = 0x8 | 0x20 | 0x40 | 0x80
"""NVML's reasons for slow clocks: the power cap; HW slowdown, SW and HW thermal slowdown, power brake."""
TICK_S, LEAST_PER_EVENT_S = 0.01, 2e-6
"""The kernel counts CPU time in such ticks; to send an event, a server needs more."""


def instrument(
    c: Columns,
    reports: Sequence[DriveReport],
    watched: Telemetry,
    *,
    closed_loop: bool,
    n_cores: int,
    started: bool = True,
) -> Instrument:
    """The client's own lateness and cost.

    `send_lag_*` is from due (closed loop: from a free place) to fully written: in a burst the k-th request
    leaves about 10 us times k late, for the kernel takes that long for each. `read_lag_*` is at most how long
    after its arrival our code had an event: one that others follow in its read may have come right after the
    read before. `read_error_*` bounds what of that is in its time, event by event; the rest is taken out.
    """
    sent_s = c.sent_s[~np.isnan(c.sent_s)]
    late_s = seconds_or_nan(c.event_lag_ns) + np.maximum(c.event_error_ns, 0) / 1e9
    n_events, n_stamped = len(c.event_s), int(np.count_nonzero(c.event_lag_ns >= 0))
    max_pass_s = max((report.max_pass_ns for report in reports), default=0) / 1e9 if reports else None
    n = len(sent_s)
    # Times of different machines are off by at most this.
    bounds_s = [report.clock.bound_ns / 1e9 for report in reports if report.clock is not None]
    waits = [r.cpu_wait_s / r.wall_s for r in reports if r.cpu_wait_s is not None and r.wall_s > 0]
    peak = _most_in_a_second(c.event_s) if n_events else None
    return Instrument(
        send_spread_s=measured(float(np.ptp(sent_s)) if n else None, "s", NOT_SENT, n),
        **_quantiles("send_lag", c.sent_s - c.due_s, NOT_SENT),
        **_quantiles("read_lag", late_s, NO_STAMP),
        **_quantiles("read_error", seconds_or_nan(c.event_error_ns), "no token arrived"),
        kernel_stamps=measured(n_stamped / n_events if n_events else None, "1", "no token arrived", n_events),
        unread_fraction=_unread(c) if closed_loop else None,
        max_pass_s=measured(max_pass_s, "s", NO_REPORT),
        peak_events_per_s=measured(peak, "events/s", "no token arrived", n_events),
        client_cpu_s=_sum(reports, lambda report: report.cpu_s, "s"),
        client_peak_bytes=_sum(reports, lambda report: report.peak_rss_bytes, "bytes"),
        involuntary_switches=_sum(reports, lambda report: report.n_involuntary_switches, "switches"),
        resent=_sum(reports, lambda report: report.n_resent, "requests"),
        clock_drift_s=measured(
            max((abs(report.clock_drift_ns) / 1e9 for report in reports), default=None), "s", NO_REPORT
        ),
        clock_error_s=measured(max(bounds_s), "s", "", len(bounds_s)) if bounds_s else None,
        server_cpu_s=_server_cpu(watched, n_events, started=started),
        others_cpu_fraction=_worst(reports, lambda machine: machine.others_fraction)
        or watched.cpu_fraction("others_cpu_s"),
        steal_fraction=_worst(reports, lambda machine: machine.steal_fraction)
        or watched.cpu_fraction("steal_s"),
        cpu_waiting_fraction=watched.fraction("pressure", "cpu_waiting_s", 1.0),
        throttled_fraction=watched.throttled_fraction(),
        client_cpu_wait_fraction=measured(max(waits, default=None), "1", NO_CPU_WAIT, len(waits)),
        gpu_slowed_fraction=watched.slowed_fraction(HELD_DOWN),
        gpu_power_capped_fraction=watched.slowed_fraction(POWER_CAP),
        **_canary(reports, float(max(sent_s.max(initial=0.0), c.event_s.max(initial=0.0))), n_cores),
        **_network(reports),
    )


def _server_cpu(watched: Telemetry, n_events: int, *, started: bool) -> Figure:
    """CPU time of the server's processes; what was not started here and used none passes events on."""
    per_s = watched.fraction("server", "cpu_s", 1.0)
    used_s = 0.0 if isinstance(per_s, Absent) else per_s.point * watched.length_s
    if isinstance(per_s, Absent) or started or used_s >= TICK_S + LEAST_PER_EVENT_S * n_events:
        return per_s if isinstance(per_s, Absent) else measured(used_s, "s", "", per_s.n)
    text = f"what listens there used {used_s:.2g} s of CPU for {n_events:,} events: it passes them on"
    return Absent(f"the server is not watched: {text}", "unwatched")


def _unread(c: Columns) -> Figure:
    """Of the time that requests were in flight, the share in which the client had not read their last token.

    A closed loop sends no other request meanwhile. The first millisecond is any client's.
    """
    ended = c.ok & (c.n_events > 0) & (c.closed_s > c.sent_s)
    late_s = np.nan_to_num(seconds_or_nan(c.event_lag_ns[c.starts[1:][ended] - 1])) - FLOOR_S
    stays_s = (c.closed_s - c.sent_s)[ended]
    share = float(late_s.clip(0).sum() / stays_s.sum()) if len(stays_s) else None
    return measured(share, "1", "no request succeeded", len(stays_s))


def _worst(reports: Sequence[DriveReport], share: Callable[[MachineUse], float]) -> Figure | None:
    """The largest share on a machine of the load; None if all of it ran on the watcher's machine."""
    shares = [share(report.machine) for report in reports if report.machine is not None]
    return measured(max(shares), "1", "") if shares else None


def _network(reports: Sequence[DriveReport]) -> dict[str, Figure]:
    """The way to a remote server, of the driver furthest from it; nothing where it was on the loopback."""
    remote = [report.network for report in reports if report.network is not None]
    if not remote:
        return {}
    tcp = max(remote, key=lambda each: each.least_rtt_p50_ns)
    sent_again = sum(each.retransmits for each in remote)
    return {
        "network_rtt_s": measured(tcp.least_rtt_p50_ns / 1e9, "s", "", tcp.n),
        "network_rtt_p99_s": measured(tcp.rtt_p99_ns / 1e9, "s", "", tcp.n),
        "network_retransmits": measured(float(sent_again), "segments", "", tcp.n),
    }


def _canary(reports: Sequence[DriveReport], load_s: float, n_cores: int) -> dict[str, Figure]:
    """The error of the instrument in this very run, of the driver with the largest."""
    names = ("canary_p50_s", "canary_p99_s", "canary_beyond_p99_s", "canary_cpu_fraction")
    ran = [(report, report.canary) for report in reports if report.canary is not None]
    if not ran:
        return dict.fromkeys(names, Absent("no canary ran", "no-canary"))
    least = max(LEAST_CANARY_EVENTS, LEAST_CANARY_SHARE * load_s / CANARY_PERIOD_S)
    enough = [(report, canary) for report, canary in ran if canary.n >= least]
    if not enough and least > LEAST_CANARY_EVENTS:
        return dict.fromkeys(names, Absent("not measured: the canary was lost", "canary-lost"))
    if not enough:
        return dict.fromkeys(names, Absent("not measured: the run was too short", "too-short"))
    report, canary = max(enough, key=lambda each: (each[1].beyond_p99_ns, each[1].p99_ns))
    share = canary.cpu_s / report.wall_s / n_cores if report.wall_s else None
    return {
        "canary_p50_s": measured(canary.p50_ns / 1e9, "s", "", canary.n),
        "canary_p99_s": measured(canary.p99_ns / 1e9, "s", "", canary.n),
        "canary_beyond_p99_s": measured(canary.beyond_p99_ns / 1e9, "s", "", canary.n),
        "canary_cpu_fraction": measured(share, "1", "the run has no length"),
    }


def _most_in_a_second(at_s: Floats) -> int:
    """Over a whole second: an engine's steps, many a second, come in lumps."""
    at_s = np.sort(at_s)
    most, many = 0, 1 << 20
    for begin in range(0, len(at_s), many):
        ends = np.searchsorted(at_s, at_s[begin : begin + many] + 1.0)
        most = max(most, int((ends - np.arange(begin, begin + len(ends))).max()))
    return most


def _quantiles(name: str, values: Floats, absent: str) -> dict[str, Figure]:
    known = values[np.isfinite(values)]
    if not len(known):
        return {f"{name}_{p}_s": Absent(absent) for p in ("p50", "p99", "max")}
    order_for(known, (0.5, 0.99))
    found = {"p50": quantile(known, 0.5), "p99": quantile(known, 0.99), "max": float(known[-1])}
    return {f"{name}_{p}_s": measured(value, "s", absent, len(known)) for p, value in found.items()}


def _sum(reports: Sequence[DriveReport], of: Callable[[DriveReport], float], unit: str) -> Figure:
    return measured(sum(map(of, reports)) if reports else None, unit, NO_REPORT, len(reports))


def pacing(c: Columns, *, closed_loop: bool) -> ScheduleFigures:
    """Rate and regularity of requests as sent and as planned."""
    if closed_loop:
        return ScheduleFigures.absent(Absent("in a closed loop a request is due when another ends"))
    due_s, sent_s = np.sort(c.due_s), np.sort(c.sent_s[~np.isnan(c.sent_s)])
    if not len(sent_s):
        return ScheduleFigures.absent(Absent("no request was sent"))
    if not np.ptp(due_s):
        return ScheduleFigures.absent(Absent("all requests were due at once"))
    n, few = len(sent_s), "too few requests to say"
    return ScheduleFigures(
        planned_per_s=measured(mean_rate_per_s(due_s), "1/s", few, len(due_s)),
        achieved_per_s=measured(mean_rate_per_s(sent_s), "1/s", few, n),
        rate_error=measured(rate_error(sent_s, due_s), "1", few, n),
        planned_gap_cv=measured(gap_cv(due_s), "1", few, len(due_s)),
        gap_cv=measured(gap_cv(sent_s), "1", few, n),
    )


def mean_rate_per_s(at_s: Floats) -> float | None:
    """Requests per second between the first and the last; None for a burst or fewer than two."""
    return None if len(at_s) < 2 or at_s[-1] == at_s[0] else float((len(at_s) - 1) / (at_s[-1] - at_s[0]))


def rate_error(at_s: Floats, due_s: Floats) -> float | None:
    """How far the achieved rate is from the planned one, as a fraction: -0.01 is one percent too slow."""
    achieved, planned = mean_rate_per_s(at_s), mean_rate_per_s(due_s)
    return None if achieved is None or planned is None else achieved / planned - 1


def gap_cv(at_s: Floats) -> float | None:
    """Standard deviation of the gaps over their mean: 0 for constant arrivals, 1 for Poisson."""
    gaps = np.diff(at_s)
    return float(gaps.std(ddof=1) / gaps.mean()) if len(gaps) > 1 and gaps.mean() else None
