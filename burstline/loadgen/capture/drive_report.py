"""A driver's report on itself, its clock, its canary and its network, made when it ends."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

MAX_DRIFT: Final = 200e-6
"""Between two clocks; Linux disciplines its own to 500 ppm at most, crystals differ by tens."""


class ClockError(RuntimeError):
    """A worker's clock did not answer, or its answers contradict each other."""


@dataclass(frozen=True, slots=True)
class ClockExchange:
    """One question and its answer, ns: sent (ours), received and answered (theirs), received (ours)."""

    t1_ns: int
    t2_ns: int
    t3_ns: int
    t4_ns: int


@dataclass(frozen=True, slots=True)
class Offset:
    """A worker's clock minus ours, ns, at our time `at_ns`: between `low_ns` and `high_ns`.

    `rtt_ns` is the least round trip of the `n` exchanges behind it.
    """

    at_ns: int
    low_ns: int
    high_ns: int
    rtt_ns: int
    n: int

    @property
    def ns(self) -> int:
        return (self.low_ns + self.high_ns) // 2

    @property
    def bound_ns(self) -> int:
        """The true offset is within this distance of `ns`."""
        return (self.high_ns - self.low_ns + 1) // 2

    @classmethod
    def of(cls, exchanges: Sequence[ClockExchange]) -> Self:
        """Intersect the exchanges of one volley, short enough for drift not to matter."""
        if not exchanges:
            raise ClockError("no exchange was answered")
        # A clock drifts while the volley lasts; the bound must hold for its middle.
        drift = math.ceil((exchanges[-1].t4_ns - exchanges[0].t1_ns) * MAX_DRIFT)
        low = max(e.t3_ns - e.t4_ns for e in exchanges) - drift
        high = min(e.t2_ns - e.t1_ns for e in exchanges) + drift
        if low > high:
            raise ClockError(
                f"the clock moved by {(low - high) / 1e3:.1f} us during {len(exchanges)} exchanges; "
                "was it set, or did the machine sleep?"
            )
        rtt = min(e.t4_ns - e.t1_ns - (e.t3_ns - e.t2_ns) for e in exchanges)
        middle = (exchanges[0].t1_ns + exchanges[-1].t4_ns) // 2
        return cls(middle, low, high, rtt, len(exchanges))


@dataclass(frozen=True, slots=True)
class ClockMap:
    """A worker's clock over a run: its offset before and after, and a line between them.

    `residual_ns` is how far offsets measured during the run lay outside the line's bound: 0 for clocks that
    drift evenly.
    """

    before: Offset
    after: Offset
    residual_ns: int = 0

    @classmethod
    def of(cls, before: Offset, after: Offset, during: Iterable[Offset] = ()) -> Self:
        line = cls(before, after)
        outside = [
            max(line._offset_ns(o.at_ns) - o.high_ns, o.low_ns - line._offset_ns(o.at_ns), 0) for o in during
        ]
        return cls(before, after, round(max(outside, default=0)))

    @property
    def bound_ns(self) -> int:
        """Times of this worker, mapped to our clock, are off by at most this."""
        return max(self.before.bound_ns, self.after.bound_ns) + self.residual_ns

    @property
    def _slope(self) -> float:
        span = self.after.at_ns - self.before.at_ns
        return (self.after.ns - self.before.ns) / span if span > 0 else 0.0

    def since_start(self, t0_ours_ns: int, t0_theirs_ns: int) -> tuple[float, float]:
        """(shift ns, factor): shift + factor * (ns since the worker's start) is ns since ours."""
        slope = self._slope
        at_start = self.before.ns + slope * (t0_theirs_ns - self.before.ns - self.before.at_ns) / (1 + slope)
        return t0_theirs_ns - at_start - t0_ours_ns, 1 / (1 + slope)

    def _offset_ns(self, ours_ns: int) -> float:
        return self.before.ns + self._slope * (ours_ns - self.before.at_ns)


@dataclass(frozen=True, slots=True)
class DurationSpread:
    """Median, 99th percentile and largest of `n` durations, ns; the first two within 1.2% or 1 ns."""

    n: int
    p50_ns: int
    p99_ns: int
    max_ns: int


CANARY_PERIOD_S: Final = 0.02
"""50 events a second, as one stream of an engine. Sparser events would rarely share a read where the client
stalls, as a load's events do."""


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """Reported minus true arrival of `n` events, ns: percentiles of the absolute error, within 1.2%.

    The truth is the time from just before the event's send until the kernel had taken it: a report from
    within has no error, for a sender that sleeps between events needs some 20 us for its send.
    `cpu_s` is what the truth process used. `beyond_p99_ns` is the 99th percentile of how far the truth lay
    outside what the client's own bound for the event allows: the bounds of a run's other events rest on it.
    """

    n: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    cpu_s: float
    beyond_p99_ns: int


@dataclass(frozen=True, slots=True)
class NetworkReport:
    """TCP's own figures for `n` connections at their close, ns: the least and the smoothed round trip.

    `least_rtt_p50_ns` is a median over connections. `retransmits` counts segments sent again.
    """

    n: int
    least_rtt_p50_ns: int
    rtt_p99_ns: int
    retransmits: int


@dataclass(frozen=True, slots=True)
class LostDriver:
    """A driver that was lost `at_s` into the load: why, and which share of all requests was its part."""

    worker: int
    at_s: float
    why: str
    share: float


@dataclass(frozen=True, slots=True)
class MachineUse:
    """A remote driver's machine during its load: shares of the time of all its `n_cpus`.

    `others_fraction` is what neither driver nor canary used, `steal_fraction` what a hypervisor gave to other
    guests. `free_bytes` is the memory that was left at the end.
    """

    n_cpus: int
    busy_fraction: float
    others_fraction: float
    steal_fraction: float
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DriveReport:
    """A driver's facts about itself, for the verdict on its run.

    `late` is how long after its due time (in a closed loop: after its dispatch) each request was fully
    written; `read_lag` how long after the kernel our code had each read, None without kernel stamps;
    `connect` the time to a standing connection. `max_pass_ns` is the longest that one pass over ready sockets
    took. `clock_drift_ns` is how far CLOCK_REALTIME moved against CLOCK_MONOTONIC during the run. `failures`
    counts captures by failure; `n_resent` requests were written twice because the server closed an idle
    connection just then. CPU, wall time and context switches run from the start to the last capture written.
    `t0_ns` is None where the run never began. `cpu_wait_s` is how long the reading thread was ready to run
    and had no CPU, None where the kernel does not say. `network` is TCP's view of a remote server. `host`,
    `clock` and `machine` are a remote driver's: where it ran, how its clock was mapped to ours (its captures
    are in our clock's terms already), and what its machine did.
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
    clock_drift_ns: int
    n_clock_steps: int
    n_reads: int
    n_bytes: int
    cpu_s: float
    wall_s: float
    peak_rss_bytes: int
    n_involuntary_switches: int
    cpu_wait_s: float | None = None
    canary: CanaryReport | None = None
    network: NetworkReport | None = None
    host: str | None = None
    clock: ClockMap | None = None
    machine: MachineUse | None = None
