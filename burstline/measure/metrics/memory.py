"""Memory of a run by kind, and the cost and energy of its output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from burstline.loadgen.capture.drive_report import DriveReport
from burstline.measure.record.summary import Cost, Memory, Throughput
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.stats.estimates import Absent, Estimate, Figure, measured
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
    who, stated = identity or Identity(""), watched.peak("engine", "resident_bytes", "bytes")
    return Memory(
        server_peak_bytes=watched.peak("server", "rss_bytes", "bytes"),
        server_anon_peak_bytes=watched.peak("server", "anon_bytes", "bytes"),
        server_pss_bytes=watched.peak("server", "pss_bytes", "bytes"),
        server_said_bytes=None if isinstance(stated, Absent) else stated,
        client_peak_bytes=measured(sum(each.peak_rss_bytes for each in reports), "bytes", "", len(reports))
        if reports
        else watched.peak("client", "rss_bytes", "bytes"),
        device_peak_bytes=_device_peak(watched),
        weights_bytes=measured(who.weight_bytes, "bytes", unknown),
        kv_capacity_bytes=measured(who.kv_bytes, "bytes", unknown),
        kv_capacity_tok=measured(who.kv_tok, "tok", unknown),
        kv_peak_fraction=watched.peak("engine", "kv_used_fraction", "1"),
        preemptions=watched.grown("engine", "preemptions", "preemptions"),
        running_after=_left(watched, "running", "requests"),
        kv_after_fraction=_left(watched, "kv_used_fraction", "1"),
    )


def cost(
    rates: Throughput,
    watched: Telemetry,
    usd_per_hour: float | None,
    *,
    window: tuple[float, float] | None = None,
    server_here: bool = True,
) -> Cost:
    """Cost and energy of the tokens; Absent with the reason where nothing tells.

    Power is the mean over the `window` in which `rates` count (seconds from the run's start; None: the load),
    summed over GPUs; idle GPUs that were watched count. Idle power is that before the load.
    """
    start_s, end_s = window or (0.0, watched.length_s)

    def power(kind: str, start_s: float, end_s: float) -> Figure:
        if not server_here:
            return Absent("the server is on another machine", "elsewhere")
        sources = watched.devices() if kind == "gpu" else [kind]
        powers = [watched.power_w(source, start_s, end_s) for source in sources]
        total = None if None in powers or not powers else sum(filter(None, powers))
        names = [(source, name) for source in sources for name in ("energy_j", "power_w")]
        known = any(len(watched.series(*name)[1]) for name in names)
        why = watched.why_missing(kind, "energy_j")
        if known:
            lost = [watched.why_missing(each, "*") for each in sources if watched.names(each, "*")]
            why = "; ".join(lost) or "it was not read for long enough"
        return measured(total, "W", why, len(powers))

    gpu, cpu = (power(kind, start_s, end_s) for kind in ("gpu", "cpu"))
    idle, cpu_idle = (power(kind, -math.inf, 0.0) for kind in ("gpu", "cpu"))
    above = gpu
    if isinstance(gpu, Estimate):
        above = idle if isinstance(idle, Absent) else replace(gpu, point=max(0.0, gpu.point - idle.point))
    usd = None if usd_per_hour is None else measured(usd_per_hour / 3600 * 1e6, "USD", "")
    return Cost(
        usd_per_million_output_tok=usd and _per(usd, rates.output_tok_per_s, "USD"),
        usd_per_million_input_tok=usd and _per(usd, rates.input_tok_per_s, "USD"),
        device_power_w=gpu,
        device_idle_power_w=idle,
        joules_per_output_tok=_per(gpu, rates.output_tok_per_s, "J"),
        joules_above_idle_per_output_tok=_per(above, rates.output_tok_per_s, "J"),
        cpu_power_w=cpu,
        cpu_idle_power_w=cpu_idle,
        cpu_joules_per_output_tok=_per(cpu, rates.output_tok_per_s, "J"),
    )


def _per(amount: Figure, rate: Figure, unit: str) -> Figure:
    if isinstance(amount, Absent) or isinstance(rate, Absent):
        return amount if isinstance(amount, Absent) else rate
    if rate.point <= 0:
        return Absent("no such token was served", "not-positive")
    return measured(amount.point / rate.point, unit, "", amount.n)


def _left(watched: Telemetry, gauge: str, unit: str) -> Figure | None:
    """How much more a gauge shows after the load than before; None where the engine does not have it."""
    grown = watched.change("engine", gauge, unit)
    if isinstance(grown, Absent):
        return grown if len(watched.series("engine", gauge)[1]) else None
    return measured(max(0.0, grown.point), unit, "", grown.n)


def _device_peak(watched: Telemetry) -> Figure:
    peaks = [watched.peak(device, "memory_used_bytes", "bytes") for device in watched.devices()]
    points = [peak.point for peak in peaks if not isinstance(peak, Absent)]
    absent = watched.why_missing("gpu", "memory_used_bytes")
    return measured(sum(points) if points else None, "bytes", absent, len(points))
