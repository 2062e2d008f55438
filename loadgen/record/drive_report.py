"""What a driver says of itself and of its clock, its canary and its network, once it has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loadgen.record.clock_map import ClockMap


@dataclass(frozen=True, slots=True)
class DurationSpread:
    """Median, 99th percentile and largest of `n` durations, ns; the first two within 1.2% or 1 ns."""

    n: int
    p50_ns: int
    p99_ns: int
    max_ns: int


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """Reported minus true arrival of `n` events, ns: percentiles of the absolute error, within 1.2%.

    The truth is the time from just before the event's send until the kernel had taken it: a report from
    within has no error, for a sender that sleeps between events needs some 20 us for its send.
    `cpu_s` is what the truth process used.
    """

    n: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """What TCP said of `n` connections as they closed, ns: the least round trip of each, and the smoothed.

    `least_rtt_p50_ns` is a median over connections. `retransmits` counts segments sent again.
    """

    n: int
    least_rtt_p50_ns: int
    rtt_p50_ns: int
    rtt_p99_ns: int
    retransmits: int


@dataclass(frozen=True, slots=True)
class DriveReport:
    """What a driver knows about itself, for the verdict on its own run.

    `late` is how long after its due time (in a closed loop: after its dispatch) each request was fully
    written; `read_lag` how long after the kernel our code had each read, None without kernel stamps;
    `connect` the time to a standing connection. `max_pass_ns` is the longest that one pass over ready sockets
    took. `clock_offset_ns` is CLOCK_REALTIME minus CLOCK_MONOTONIC before the run, `clock_drift_ns` how far
    it had moved at the end. `failures` counts captures by failure; `n_resent` requests were written twice
    because the server closed an idle connection just then. CPU, wall time and context switches run from the
    start to the last capture written. `t0_ns` is None where the run never began. `reader` is "compiled"
    where an older version read the replies in C. `cpu_wait_s` is how long the reading thread was ready to run
    and had no CPU, None where the kernel does not say. `network` is TCP's view of a remote server, `left` how
    long after our send the last byte of each request left this host, `acked` how long after that the server's
    kernel had it, both by the kernel's transmit stamps. `host` and `clock` are a remote driver's:
    where it ran, and how its clock was mapped to ours (its captures are in our clock's terms already).
    """

    worker: int
    t0_ns: int | None
    n_planned: int
    n_sent: int
    n_resent: int
    failures: Mapping[str, int]
    late: DurationSpread | None
    read_lag: DurationSpread | None
    connect: DurationSpread | None
    max_pass_ns: int
    clock_offset_ns: int
    clock_drift_ns: int
    n_clock_steps: int
    n_reads: int
    n_bytes: int
    cpu_s: float
    wall_s: float
    peak_rss_bytes: int
    n_voluntary_switches: int
    n_involuntary_switches: int
    reader: str = "python"
    cpu_wait_s: float | None = None
    canary: CanaryReport | None = None
    network: NetworkReport | None = None
    left: DurationSpread | None = None
    acked: DurationSpread | None = None
    host: str | None = None
    clock: ClockMap | None = None
