"""Firing a plan: drivers are started, let go at one moment, watched, and asked to stop when a person does."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from burstline.bench.progress import Snapshot
from loadgen.driver.counters import Counters
from loadgen.driver.drive import run
from loadgen.driver.job import DriveReport, Job
from loadgen.record.capture import Capture
from loadgen.record.capture_store import Spool, read_captures
from loadgen.record.record import Outcome

LEAD_S = 0.05
"""From the last driver's "ready" to the run's start: time for every driver to hear of it."""
TICK_S = 0.25

OnTick = Callable[[Snapshot], None]
OnPids = Callable[[list[int]], None]


class DriverDiedError(RuntimeError):
    """A driver ended before the load began: our bug, or somebody killed it."""


class Process(Protocol):
    """A driver's process, here or on another machine. `lost` says why it is gone, None while it lives."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def lost(self) -> str | None: ...


Pairs = Sequence[tuple[Process, Connection]]
Drivers = Callable[[Sequence[Job], Counters], AbstractContextManager[Pairs]]
"""Starts one driver for each job; yields each with the connection over which it is talked to."""


@dataclass(frozen=True, slots=True)
class Load:
    """How a load went: the drivers' own reports, the start (ns, monotonic), and why drivers are missing.

    `lost` names each driver that ended during the load, with the reason.
    """

    reports: list[DriveReport]
    interrupted: bool
    t0_ns: int | None = None
    lost: Mapping[int, str] = field(default_factory=dict)


def fire(job: Job, n_workers: int, on_pids: OnPids, on_tick: OnTick, drivers: Drivers | None = None) -> Load:
    """Drive the whole job, by processes of this machine unless `drivers` starts others.

    An interrupt asks the drivers to stop, so that every planned request still gets its capture; a second one
    is raised. Requests of a driver that is lost during the load are captured as `driver_lost`.
    """
    with Counters.create(job.counters, n_workers) as counters:
        parts = job.split(n_workers) if n_workers > 1 else [job]
        with (drivers or local_drivers)(parts, counters) as started:
            on_pids([process.pid for process, _ in started if process.pid])
            desk = _Desk(started, lambda: _snapshot(counters, len(job.requests), desk.began_s), on_tick)
            load = desk.attend()
    for worker, why in load.lost.items():
        _account_for_lost(parts[worker], n_workers + worker, why)
    return load


def _account_for_lost(part: Job, file_number: int, why: str) -> None:
    """A capture, `driver_lost`, of every request of which the lost driver left none."""
    captured = {capture.index for capture in read_captures(part.captures)}
    spool = Spool(part.captures, file_number)
    for request, due_ns in zip(part.requests, part.due_ns, strict=True):
        if request.index not in captured:
            spool.put(partial(_lost, request.index, due_ns, why))
    spool.close()


def _lost(index: int, due_ns: int, why: str) -> Capture:
    return Capture(index, due_ns, None, None, None, None, (), Outcome.DRIVER_LOST, why)


class _Desk:
    """Hears the drivers until each has said "done"."""

    def __init__(
        self,
        drivers: Pairs,
        snapshot: Callable[[], Snapshot],
        on_tick: OnTick,
    ) -> None:
        self._pending = {conn: (k, process) for k, (process, conn) in enumerate(drivers)}
        self._snapshot, self._on_tick = snapshot, on_tick
        self._n_unready = len(drivers)
        self._reports: list[DriveReport] = []
        self._t0_ns: int | None = None
        self._lost: dict[int, str] = {}
        self.began_s: float | None = None
        self.interrupted = False

    def attend(self) -> Load:
        while self._pending:
            try:
                self._hear()
                if self.began_s is not None:
                    self._on_tick(self._snapshot())
            except KeyboardInterrupt:
                if self.interrupted:
                    raise
                self.interrupted = True
                self._tell(("stop",))
        reports = sorted(self._reports, key=lambda report: report.worker)
        return Load(reports, self.interrupted, self._t0_ns, self._lost)

    def _hear(self) -> None:
        heard = wait(list(self._pending), timeout=TICK_S)
        for conn in [conn for conn in self._pending if conn in heard]:
            try:
                self._take(conn, conn.recv())
            except (EOFError, OSError):
                self._lose(conn)

    def _lose(self, conn: Connection) -> None:
        k, process = self._pending.pop(conn)
        why = process.lost or f"{process.name} ended without its report"
        if self._t0_ns is None and not self.interrupted:
            raise DriverDiedError(f"{why}; nothing was sent")
        self._lost[k] = why

    def _take(self, conn: Connection, message: tuple[Any, ...]) -> None:
        match message:
            case ("ready",):
                self._n_unready -= 1
                if self._n_unready == 0 and not self.interrupted:
                    self._t0_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
                    self.began_s = self._t0_ns / 1e9
                    self._tell(("go", self._t0_ns))
            case ("done", report):
                self._reports.append(report)
                del self._pending[conn]
            case ("failed", error):
                raise error

    def _tell(self, message: tuple[Any, ...]) -> None:
        for conn in self._pending:
            with contextlib.suppress(OSError):
                conn.send(message)


@dataclass(frozen=True, slots=True)
class _LocalProcess:
    process: BaseProcess

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def lost(self) -> str | None:
        """The pipe has ended, so the process is ending: its exit code says how."""
        self.process.join(timeout=1.0)
        return f"{self.name} ended without its report (exit code {self.process.exitcode})"


@contextmanager
def local_drivers(jobs: Sequence[Job], counters: Counters) -> Iterator[Pairs]:  # noqa: ARG001
    """One process for each job; they write their counters themselves."""
    context = multiprocessing.get_context("spawn")
    started: list[tuple[BaseProcess, Connection]] = []
    try:
        for job in jobs:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=run, args=(job, theirs), name=f"driver-{job.worker}", daemon=True
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        yield [(_LocalProcess(process), conn) for process, conn in started]
    finally:
        for process, conn in started:
            conn.close()
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()


def _snapshot(counters: Counters, n_planned: int, began_s: float | None) -> Snapshot:
    totals = counters.totals()
    return Snapshot(
        planned=n_planned,
        sent=totals["sent"],
        first_tokens=totals["begun"],
        done=totals["done"],
        failed=totals["failed"],
        elapsed_s=max(0.0, time.monotonic() - began_s) if began_s else 0.0,
    )
