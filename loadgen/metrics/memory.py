"""Memory, each kind apart: an allocator's reservation is not what is used, and RSS is neither."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.driver.job import DriveReport
from loadgen.metrics.summary_types import Memory
from loadgen.metrics.telemetry_query import Watched
from loadgen.stats.estimates import Absent, Figure, measured
from servers.engine import Identity


def memory(watched: Watched, reports: Sequence[DriveReport], identity: Identity | None) -> Memory:
    """Peaks while the load ran, and what the server says it has.

    `server_peak_bytes` is the largest sum of RSS over the server's processes (a page that n share counts n
    times; `server_anon_peak_bytes` leaves shared pages out, `server_pss_bytes` divides them, once, after the
    load). `device_peak_bytes` is what all GPUs held, reservations included; `kv_peak_fraction` is the share
    of the KV cache really in use.
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
    )


def _client_peak(watched: Watched, reports: Sequence[DriveReport]) -> Figure:
    if reports:
        return measured(sum(report.peak_rss_bytes for report in reports), "bytes", "", len(reports))
    return watched.peak("client", "rss_bytes", "bytes")


def _device_peak(watched: Watched) -> Figure:
    peaks = [watched.peak(device, "memory_used_bytes", "bytes") for device in watched.devices()]
    points = [peak.point for peak in peaks if not isinstance(peak, Absent)]
    absent = watched.why_missing("gpu", "memory_used_bytes")
    return measured(sum(points) if points else None, "bytes", absent, len(points))
