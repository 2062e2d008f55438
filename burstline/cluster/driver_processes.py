"""Driver processes of this machine, as `burstline.bench.fire` sees any driver."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol

from burstline.loadgen.driver.job import STOP_S, Counters, Job
from burstline.servers.host.child import END_S, Child
from burstline.servers.host.interrupt import uninterrupted


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
