"""What one driver is asked to do, and what it says of itself afterwards."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.driver.canary import CanaryReport
from loadgen.driver.clock_offset import ClockMap
from loadgen.driver.duration_histogram import DurationSpread
from loadgen.wire.network import NetworkReport
from servers.engine import Target
from workloads.prompts import Vocabulary
from workloads.request import Request

Workers = int | Literal["auto"]

PER_DRIVER: Final = 2_000
"""Requests in flight for one driver: at 50 tokens a second each they make 100,000 events a second, about what
one follows on a core (`tests/bench/wire.py`)."""
OPEN_S: Final = 10.0
"""Assumed time in flight of a request in an open loop: before the run it is unknown."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one driver has to do: `requests[i]` is due at `due_ns[i]`, ns from the run's start, ascending.

    With `concurrency` the loop is closed: that many at a time; `max_rate_per_s` then also bounds how many
    start each second. `hang_ups` says, by a request's index, after how many events of its reply the client
    hangs up. `salt` needs `vocabulary` (see `workloads.prompts.salted`), None sends the plan's own
    bytes. `counters` is the file made by `Counters.create`; this driver writes row `worker`.
    """

    requests: Sequence[Request]
    due_ns: array[int]
    engine: str
    target: Target
    captures: Path
    counters: Path
    salt: str | None = None
    vocabulary: Vocabulary | None = None
    deadline_s: float | None = None
    concurrency: int | None = None
    max_rate_per_s: float | None = None
    worker: int = 0
    canary_port: int | None = None
    hang_ups: Mapping[int, int] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def split(self, n_workers: int) -> list[Job]:
        """The same work for several drivers: every n-th request each, and their share of the limits.

        Sessions stay whole, for their turns follow each other; so do families, where their URL goes by them.
        """
        if any(request.turn for request in self.requests[:1]):
            return self._split_by(
                n_workers, [request.turn.session for request in self.requests if request.turn]
            )
        if self.target.replicas and self.target.url_by == "session":
            number: dict[int | str, int] = {}
            keys = [f"alone {r.index}" if r.family is None else r.family for r in self.requests]
            return self._split_by(n_workers, [number.setdefault(key, len(number)) for key in keys])
        return self._shares(n_workers)

    def _shares(self, n_workers: int) -> list[Job]:
        shares = range(n_workers)
        urls = (self.target.url, *self.target.replicas)
        return [
            replace(
                self,
                requests=self.requests[k::n_workers],
                due_ns=self.due_ns[k::n_workers],
                concurrency=self.concurrency and max(1, len(range(k, self.concurrency, n_workers))),
                max_rate_per_s=self.max_rate_per_s and self.max_rate_per_s / n_workers,
                worker=k,
                canary_port=self.canary_port if k == 0 else None,
                target=replace(self.target, url=urls[k % len(urls)]),
            )
            for k in shares
        ]

    def _split_by(self, n_workers: int, groups: Sequence[int]) -> list[Job]:
        """The same with whole groups of requests; `groups` numbers that of each request."""
        jobs = []
        for k, job in enumerate(replace(self, requests=(), due_ns=array("q"))._shares(n_workers)):
            rows = [i for i, group in enumerate(groups) if group % n_workers == k]
            requests = tuple(self.requests[i] for i in rows)
            jobs.append(replace(job, requests=requests, due_ns=array("q", [self.due_ns[i] for i in rows])))
        return jobs


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


def n_drivers(wanted: Workers, due_s: NDArray[np.float64], concurrency: int | None) -> int:
    """As many as wanted; with "auto" one for every 2,000 requests in flight, on at most half of the cores.

    The other half is the server's, or the watcher's. In flight are `concurrency` requests, in an open loop as
    many as fall due (at `due_s`, ascending) within any ten seconds.
    """
    if wanted != "auto":
        return wanted
    return max(1, min(-(-most_open(due_s, concurrency) // PER_DRIVER), _n_cores() // 2))


def most_open(due_s: NDArray[np.float64], concurrency: int | None) -> int:
    """Requests in flight at once, as far as a plan can know: at most `concurrency`, else due within 10 s."""
    if concurrency is not None:
        return min(concurrency, len(due_s))
    within = np.searchsorted(due_s, due_s + OPEN_S, side="right") - np.arange(len(due_s))
    return int(within.max(initial=0))


def _n_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
