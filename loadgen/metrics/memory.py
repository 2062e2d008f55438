"""Memory of a run by kind, and the cost and energy of its output."""

from __future__ import annotations

from collections.abc import Sequence

from burstline.loadgen.record.drive_report import DriveReport
from burstline.loadgen.record.summary import Cost, Memory
from burstline.loadgen.record.telemetry import Telemetry
from burstline.loadgen.stats.estimates import Absent, Figure, measured
from burstline.servers.identity import Identity


def memory(watched: Telemetry, reports: Sequence[DriveReport], identity: Identity | None) -> Memory:
    """Peaks while the load ran, and what the server says it has.

    `server_peak_bytes` is the largest sum of RSS over the server's processes (a page that n share counts n
    times; `server_anon_peak_bytes` leaves shared pages out, `server_pss_bytes` divides them, once, after the
    load). `device_peak_bytes` is what all GPUs held, reservations included; `kv_peak_fraction` is the share
    of the KV cache really in use. What a server still holds after the load counts beyond what it held before
    it; Absent where its gauges were not read both before and after.
    """
    unknown = "the server does not report it"
    who = identity or Identity("")
    return Memory(
        server_peak_bytes=watched.peak("server", "rss_bytes", "bytes"),
        server_anon_peak_bytes=watched.peak("server", "anon_bytes", "bytes"),
        server_pss_bytes=watched.peak("server", "pss_bytes", "bytes"),
        client_peak_bytes=_client_peak(watched, reports),
        device_peak_bytes=_device_peak(watched),
        weights_bytes=measured(who.weight_bytes, "bytes", unknown),
        kv_capacity_bytes=measured(who.kv_bytes, "bytes", unknown),
        kv_capacity_tok=measured(who.kv_tok, "tok", unknown),
        kv_peak_fraction=watched.peak("engine", "kv_used_fraction", "1"),
        preemptions=watched.grown("engine", "preemptions", "preemptions"),
        running_after=_left(watched, "running", "requests"),
        kv_after_fraction=_left(watched, "kv_used_fraction", "1"),
    )


def cost(output_tok_per_s: Figure, watched: Telemetry, usd_per_hour: float | None) -> Cost:
    """Cost and energy of the output tokens; what was not stated or not watched is left out.

    Power is the mean over the load, summed over GPUs; idle GPUs that were watched count.
    """
    if isinstance(output_tok_per_s, Absent) or output_tok_per_s.point <= 0:
        return Cost()
    rate = output_tok_per_s.point
    powers = [_mean_power(watched, device) for device in watched.devices()]
    known = [power for power in powers if power is not None]
    total = sum(known) if known and len(known) == len(powers) else None
    usd = None if usd_per_hour is None else usd_per_hour / 3600 / rate * 1e6
    return Cost(
        usd_per_million_output_tok=None if usd is None else measured(usd, "USD", ""),
        device_power_w=None if total is None else measured(total, "W", "", len(known)),
        joules_per_output_tok=None if total is None else measured(total / rate, "J", "", len(known)),
    )


def _mean_power(watched: Telemetry, device: str) -> float | None:
    at_s, values = watched.series(device, "power_w")
    inside = values[(at_s >= 0) & (at_s <= watched.length_s)] if len(values) else values
    return float(inside.mean()) if len(inside) else None


def _left(watched: Telemetry, gauge: str, unit: str) -> Figure | None:
    """How much more a gauge shows after the load than before; None where the engine does not have it."""
    grown = watched.grown("engine", gauge, unit)
    if isinstance(grown, Absent):
        return grown if len(watched.series("engine", gauge).values) else None
    return measured(max(0.0, grown.point), unit, "", grown.n)


def _client_peak(watched: Telemetry, reports: Sequence[DriveReport]) -> Figure:
    if reports:
        return measured(sum(report.peak_rss_bytes for report in reports), "bytes", "", len(reports))
    return watched.peak("client", "rss_bytes", "bytes")


def _device_peak(watched: Telemetry) -> Figure:
    peaks = [watched.peak(device, "memory_used_bytes", "bytes") for device in watched.devices()]
    points = [peak.point for peak in peaks if not isinstance(peak, Absent)]
    absent = watched.why_missing("gpu", "memory_used_bytes")
    return measured(sum(points) if points else None, "bytes", absent, len(points))
