"""A driver's job, its counters during the load and its report; drivers as processes of this machine."""

from __future__ import annotations

import mmap
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np

from burstline.loadgen.capture.drive_report import DriveReport
from burstline.servers.destination import dressed
from burstline.servers.engine import Engine
from burstline.servers.host.child import END_S, Child
from burstline.servers.host.interrupt import uninterrupted
from burstline.servers.host.kernel import usable_cores
from burstline.servers.messages import Call, Target
from burstline.workloads.prompts import DrawnRequests, Vocabulary, salted
from burstline.workloads.request import Request

Workers = int | Literal["auto"]

PER_DRIVER: Final = 2_000
"""Requests in flight for one driver: at 50 tokens a second each they make 100,000 events a second, about what
one follows on a core (`tests/bench/wire.py`)."""
STOP_S: Final = 8.0
"""How long a driver may take from a stop to its report: it ends its requests and writes their captures."""


@dataclass(frozen=True, slots=True)
class Job:
    """One driver's job: `requests[i]` is due at `due_ns[i]`, ns from the run's start, ascending.

    With `concurrency` the loop is closed: that many at a time, and after `until_s` seconds none starts
    any more. `hang_ups` says, by a request's index, after how many tokens of its reply the client hangs
    up. `salt` needs `vocabulary` (see `burstline.workloads.prompts.salted`), None sends the plan's own
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
    until_s: float | None = None
    worker: int = 0
    canary_port: int | None = None
    hang_ups: Mapping[int, int] = field(default_factory=dict, repr=False)

    def call(self, request: Request, engine: Engine) -> Call:
        if self.salt is not None and self.vocabulary is not None:
            request = salted(request, self.salt, self.vocabulary)
        return dressed(engine.encode(request, self.target), self.target, request.index, engine.lora_path)

    def split(self, n_workers: int) -> list[Job]:
        """The same work for several drivers: every n-th request each, and their share of the limits.

        Sessions stay whole, for their turns follow each other. In a closed loop each slot gets as many as any
        other, so that no driver ends before the rest.
        """
        requests, urls = self.requests, (self.target.url, *self.target.replicas)
        of_sessions = any(request.turn for request in requests[:1])
        groups = [r.turn.session for r in requests if r.turn] if of_sessions else range(len(requests))
        worker = np.array(groups, dtype=np.int64) % (self.concurrency or max(1, len(requests))) % n_workers
        jobs = []
        for k in range(n_workers):
            rows = np.flatnonzero(worker == k)
            drawn = requests[rows] if isinstance(requests, DrawnRequests) else None
            job = replace(
                self,
                requests=drawn or tuple(requests[i] for i in rows.tolist()),
                due_ns=array("q", np.array(self.due_ns)[rows].tobytes()),
                concurrency=self.concurrency and len(range(k, self.concurrency, n_workers)),
                worker=k,
                canary_port=self.canary_port if k == 0 else None,
                target=replace(self.target, url=urls[k % len(urls)]),
            )
            jobs.append(job)
        return jobs


def n_drivers(wanted: Workers, n_open: int) -> int:
    """As many as wanted; with "auto" one for every 2,000 of `n_open` in flight, on at most half of the cores.

    The other half is the server's, or the watcher's.
    """
    return wanted if wanted != "auto" else max(1, min(-(-n_open // PER_DRIVER), usable_cores() // 2))


@dataclass(frozen=True, slots=True)
class Ready:
    """From a driver: everything that can be prepared is; connections stand."""


@dataclass(frozen=True, slots=True)
class Go:
    """To a driver: the run's start, absolute monotonic, shortly in the future."""

    t0_ns: int


@dataclass(frozen=True, slots=True)
class End:
    """To a driver, during the load: send nothing more; what is in flight ends by itself."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To a driver, at any time: what is in flight ends "cancelled", the rest "not_sent"."""


@dataclass(frozen=True, slots=True)
class Done:
    """From a driver, its last message: the capture of all that was sent is on disk."""

    report: DriveReport


NAMES: Final = (
    "prepared", "connected", "sent", "begun", "done", "failed", "unsent", "reads", "bytes", "beats",
)  # fmt: skip
"""Requests built, connections open, requests written, replies whose body has begun, replies whole and
failed, requests given up before, reads, bytes read, and signs of life: at least one a second."""

_ROW_BYTES = 8 * len(NAMES)


class Counters(AbstractContextManager["Counters"]):
    """One row of int64 per driver, in the order of NAMES. Close it, or use it in a `with`."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path, n_workers: int) -> Counters:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(_ROW_BYTES * n_workers))
        return cls(path)

    def row(self, worker: int) -> memoryview:
        """The cells of one driver, to be written by it alone."""
        return self._cells[worker * len(NAMES) : (worker + 1) * len(NAMES)]

    def totals(self) -> Mapping[str, int]:
        return {name: sum(self._cells[i :: len(NAMES)]) for i, name in enumerate(NAMES)}

    def close(self) -> None:
        self._cells.release()
        with suppress(BufferError):  # a row is still referenced: the map is freed with it
            self._map.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Driver(Protocol):
    """A driver: a `Child`, or on another machine, and then without a `pid`."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def connection(self) -> Connection: ...
    def send(self, message: object) -> None: ...
    def receive(self) -> Any:
        """The next message; raises what the driver raised, and ChildLostError where it has ended."""


@contextmanager
def local_drivers(jobs: Sequence[Job], _: Counters) -> Iterator[Sequence[Driver]]:
    """One process for each job, ended with the context; they write their counters themselves."""
    started: list[Child] = []
    try:
        for job in jobs:
            with uninterrupted():  # else one could be running that is not in the list
                name = f"driver {job.worker}"
                started.append(Child("burstline.loadgen.driver.drive", name, orphan_grace_s=STOP_S))
        for driver, job in zip(started, jobs, strict=True):
            driver.send(job)
        yield started
    finally:
        for driver in started:
            driver.ask_to_end()  # all at once
        until_s = time.monotonic() + END_S
        for driver in started:
            driver.end(max(0.0, until_s - time.monotonic()))
