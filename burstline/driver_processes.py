"""Driver processes of this machine, which may be started before there is anything to drive.

An interpreter and its imports take as long as all else before the first request: `burstline run` starts its
drivers first of all, and they import while it asks the server and draws the prompts. So this imports little.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from burstline.interrupt import uninterrupted
from servers.host import child

if TYPE_CHECKING:
    from loadgen.driver.counters import Counters
    from loadgen.driver.job import Job


class Process(Protocol):
    """A driver's process, here or on another machine. `lost` says why it is gone, None while it lives."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def lost(self) -> str | None: ...


Pairs = Sequence[tuple[Process, Connection]]


@dataclass(frozen=True, slots=True)
class _LocalProcess:
    worker: int
    process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return f"driver {self.worker}"

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def lost(self) -> str | None:
        """The connection has ended, so the process is ending: its exit code says how."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.poll()
        if code is None:
            return f"{self.name} closed its connection without its report"
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        cause = " (often: out of memory)" if code == -9 else ""
        return f"{self.name} {how}{cause} before its report"


class DriverProcesses:
    """Drivers on our leash. Leaving it as a context manager ends them, at once where they have no job."""

    def __init__(self, n_workers: int, engine: str | None = None) -> None:
        """Start them; `engine` is the one whose module they will need, where that is known already."""
        self._started: list[tuple[_LocalProcess, Connection]] = []
        self._have_jobs = False
        try:
            for worker in range(n_workers):
                with uninterrupted():  # else one could be running that is not in the list
                    self._started.append(_start(worker, engine))
        except BaseException:
            self.close()
            raise

    @contextmanager
    def with_jobs(self, jobs: Sequence[Job], counters: Counters) -> Iterator[Pairs]:  # noqa: ARG002
        """Each driver has its job; they write their counters themselves."""
        self._have_jobs = True
        for (_, conn), job in zip(self._started, jobs, strict=True):
            with contextlib.suppress(OSError):  # it has died, as the first look at it will tell
                conn.send(job)
        try:
            yield self._started
        finally:
            self.close()

    def close(self) -> None:
        """End them; a second time does nothing."""
        started, self._started = self._started, []
        for local, conn in started:
            conn.close()
            if not self._have_jobs:
                local.process.kill()
        for local, _ in started:
            child.end(local.process, 5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _start(worker: int, engine: str | None) -> tuple[_LocalProcess, Connection]:
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        fd = theirs.fileno()
        task = {"connection": fd, "engine": engine}
        process = child.spawn("loadgen.driver.drive", task, pass_fds=(fd,))
    return _LocalProcess(worker, process), ours
