"""Firing a plan: drivers are started, let go at one moment, watched, and asked to stop when a person does."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from burstline.bench.progress import Snapshot
from loadgen.driver.counters import Counters
from loadgen.driver.drive import run
from loadgen.driver.job import DriveReport, Job

LEAD_S = 0.05
"""From the last driver's "ready" to the run's start: time for every driver to hear of it."""
TICK_S = 0.25

OnTick = Callable[[Snapshot], None]
OnPids = Callable[[list[int]], None]


class DriverDiedError(RuntimeError):
    """A driver ended without a word: our bug, or somebody killed it. What it captured stays readable."""


def fire(job: Job, n_workers: int, on_pids: OnPids, on_tick: OnTick) -> tuple[list[DriveReport], bool]:
    """Drive the whole job; the drivers' reports, and whether a person interrupted.

    An interrupt asks the drivers to stop, so that every planned request still gets its capture; a second one
    is raised.
    """
    with Counters.create(job.counters, n_workers) as counters:
        parts = job.split(n_workers) if n_workers > 1 else [job]
        with _drivers(parts) as drivers:
            on_pids([process.pid for process, _ in drivers if process.pid])
            desk = _Desk(drivers, lambda: _snapshot(counters, len(job.requests), desk.began_s), on_tick)
            return desk.attend()


class _Desk:
    """Hears the drivers until each has said "done"."""

    def __init__(
        self,
        drivers: list[tuple[BaseProcess, Connection]],
        snapshot: Callable[[], Snapshot],
        on_tick: OnTick,
    ) -> None:
        self._pending = {conn: process for process, conn in drivers}
        self._snapshot, self._on_tick = snapshot, on_tick
        self._n_unready = len(drivers)
        self._reports: list[DriveReport] = []
        self.began_s: float | None = None
        self.interrupted = False

    def attend(self) -> tuple[list[DriveReport], bool]:
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
        return sorted(self._reports, key=lambda report: report.worker), self.interrupted

    def _hear(self) -> None:
        heard = wait(list(self._pending), timeout=TICK_S)
        for conn in [conn for conn in self._pending if conn in heard]:
            try:
                self._take(conn, conn.recv())
            except (EOFError, ConnectionResetError):
                process = self._pending[conn]
                process.join(timeout=1.0)
                raise DriverDiedError(
                    f"{process.name} ended without its report (exit code {process.exitcode})"
                ) from None

    def _take(self, conn: Connection, message: tuple[Any, ...]) -> None:
        match message:
            case ("ready",):
                self._n_unready -= 1
                if self._n_unready == 0 and not self.interrupted:
                    t0_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
                    self.began_s = t0_ns / 1e9
                    self._tell(("go", t0_ns))
            case ("done", report):
                self._reports.append(report)
                del self._pending[conn]
            case ("failed", error):
                raise error

    def _tell(self, message: tuple[Any, ...]) -> None:
        for conn in self._pending:
            with contextlib.suppress(OSError):
                conn.send(message)


@contextmanager
def _drivers(jobs: list[Job]) -> Iterator[list[tuple[BaseProcess, Connection]]]:
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
        yield started
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
