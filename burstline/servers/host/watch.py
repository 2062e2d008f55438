"""The watcher process: samples server, clients, machine, GPUs and the engine's gauges during a run.

A `Child`: its task comes first, more clients later, and it stops when the connection
ends. It runs at a low priority, so that it does not disturb what it measures.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from burstline.servers.host.child import Child
from burstline.servers.host.gpus import gpus
from burstline.servers.host.ready import PAGE_TIMEOUT_S
from burstline.servers.host.scrape import SETTLE_S, scrape
from burstline.servers.host.serving import UNKNOWN, ServingProcesses
from burstline.servers.host.sources import (
    CpuPressure,
    HostCpu,
    MissingSourceError,
    ProcessTree,
    Rapl,
    Source,
    Throttling,
)
from burstline.servers.host.telemetry import LineFile, Row, as_lines, missing, rows_of
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES

PERIOD_S = 0.2
DISCOVER_PERIOD_S = 1.0
NICENESS = 10
DISK_FULL = 3
"""How a watcher ends that could not write all it saw."""
STOP_S = PAGE_TIMEOUT_S + SETTLE_S + 5.0
"""How long a watcher may take to end, then it does: a scrape, the wait for counters, the last samples."""
SILENT_S = PAGE_TIMEOUT_S + 2.0
"""The same for one that writes nothing: a scrape without an answer."""
BASELINE_S = 10.0
"""How long the first reading of the engine's counters may take; LightLLM's took 3 s."""


@dataclass(frozen=True, slots=True)
class WatchTask:
    """What to watch, and the file that telemetry is appended to, for `telemetry.load_telemetry`.

    `gpus` are names of `serving_gpus`, `no_gpu` says why there is none; `engine` is a name of the registry,
    whose gauges are asked of `target`.
    """

    path: Path
    server: ServingProcesses = UNKNOWN
    gpus: tuple[str, ...] = ()
    no_gpu: str = ""
    clients: tuple[int, ...] = ()
    engine: str | None = None
    target: Target | None = None
    period_s: float = PERIOD_S


class Watcher(AbstractContextManager["Watcher", None]):
    """The watching process: it imports until `watch` says what. Leaving it as a context manager stops it."""

    def __init__(self) -> None:
        self._child = Child("burstline.servers.host.watch", "the watcher", orphan_grace_s=STOP_S)
        self._path: Path | None = None

    def watch(self, task: WatchTask) -> Self:
        self._path = task.path
        self._child.send(task)
        return self

    @property
    def pid(self) -> int:
        return self._child.pid

    def add_clients(self, pids: Iterable[int]) -> None:
        self._child.send(tuple(pids))

    def await_baseline(self) -> bool:
        """Wait until the engine's counters have been read once; False where they were not in BASELINE_S.

        What a load adds to them can only be told from a reading before its first request.
        """
        until_s = time.monotonic() + BASELINE_S
        while self._path and time.monotonic() < until_s and self._child.exit_code is None:
            with suppress(FileNotFoundError):
                if b', "engine", ' in self._path.read_bytes():
                    return True
            time.sleep(0.02)
        return False

    def stop(self) -> None:
        """Takes the last samples and ends; a second time does nothing. A watcher that failed is recorded."""
        path, self._path = self._path, None
        self._child.ask_to_end()
        now_s = time.monotonic()
        n_bytes, grown_s = 0, now_s
        while path and self._child.exit_code is None and now_s < grown_s + SILENT_S:
            time.sleep(0.01)
            now_s = time.monotonic()
            with suppress(FileNotFoundError):
                if path.stat().st_size != n_bytes:
                    n_bytes, grown_s = path.stat().st_size, now_s
        code = self._child.end(0.0) if path else self._child.end()
        if code != 0 and path is not None:
            why = "the disk was full" if code == DISK_FULL else f"the watcher {self._child.how_it_ended()}"
            with suppress(OSError):  # the disk is full still: what keeps the run will say so
                LineFile(path).write(as_lines([missing("watcher", why)]))

    def __exit__(self, *_: object) -> None:
        self.stop()


class Watch:
    """The watching itself, in the watching process."""

    def __init__(self, task: WatchTask, write: Callable[[Iterable[Row]], None]) -> None:
        self._write = write
        self._task = task
        self._server, self._clients, self._own = ProcessTree(), ProcessTree(), ProcessTree()
        self._clients.adopt(task.clients)
        self._own.adopt([os.getpid()])
        self._complained: set[tuple[str, str]] = set()
        self._discovered_s, self._n_samples = 0.0, 0
        self._is_known = not task.server.unknown
        if not self._is_known:
            self._complain("server", task.server.unknown)
        self._discover()
        for tree in (self._server, self._clients, self._own):
            tree.read()  # so that what they have used so far counts as theirs
        self._sources = self._open_sources()

    def run(self, home: Connection) -> None:
        next_s = time.monotonic()
        while True:
            if home.poll(max(0.0, next_s - time.monotonic())):
                try:
                    more = home.recv()
                except (EOFError, OSError):
                    break
                self._clients.adopt(more)
            else:
                self.sample()
                next_s = max(next_s + self._task.period_s, time.monotonic())
        self.sample()
        if self._is_known and (pss_bytes := self._server.pss_bytes()):
            self._write(rows_of("server", {"pss_bytes": pss_bytes}))

    def sample(self) -> None:
        if time.monotonic() - self._discovered_s >= DISCOVER_PERIOD_S:
            self._discover()
        rows = rows_of("client", self._clients.read()) + rows_of("watcher", self._own.read())
        server = self._server.read()
        self._look_for_relay()
        if self._is_known and server["rss_bytes"]:  # one that has ended, or is a zombie, has none
            rows += rows_of("server", server)
        for source in self._sources:
            try:
                rows += rows_of(source.name, source.read())
            except (MissingSourceError, OSError, ValueError) as error:
                self._complain(source.name, str(error))
        self._write(rows)

    def _open_sources(self) -> list[Source]:
        trees = (self._server, self._clients, self._own)
        opened: list[Source] = [HostCpu(lambda: sum(tree.cpu_s for tree in trees))]
        openers: dict[str, Callable[[], Sequence[Source]]] = {
            "pressure": lambda: [CpuPressure()],
            "cgroup": lambda: [Throttling()],
            "cpu": lambda: [Rapl()],
            "gpu": self._open_gpus,
        }
        for name, opener in openers.items():
            try:
                opened += opener()
            except MissingSourceError as error:
                self._complain(name, str(error))
        return opened

    def _open_gpus(self) -> Sequence[Source]:
        if self._task.no_gpu:
            raise MissingSourceError(self._task.no_gpu)
        return [each for each in gpus() if each.name in self._task.gpus]

    def _discover(self) -> None:
        self._discovered_s = time.monotonic()
        if self._is_known:
            self._server.adopt(self._task.server.pids())

    def _look_for_relay(self) -> None:
        """In samples 1, 2, 4, 8, ...: the table of sockets is long under a load of many connections."""
        self._n_samples += 1
        is_due = self._n_samples & (self._n_samples - 1) == 0
        if self._is_known and self._task.server.listening and is_due and (peer := self._task.server.peer()):
            self._is_known = False
            self._complain("server", f"the server is not watched: what listens there talks to {peer}")

    def _complain(self, source: str, why: str) -> None:
        if (source, why) not in self._complained:
            self._complained.add((source, why))
            self._write([missing(source, why)])


def main(home: Connection, task: WatchTask) -> int:
    """Watch until the connection ends; the exit code says whether all was written."""
    with suppress(OSError):  # a sandbox may refuse
        os.nice(NICENESS)
    file = LineFile(task.path)

    def write(rows: Iterable[Row]) -> None:
        file.write(as_lines(rows))

    stopped = threading.Event()
    scraper: threading.Thread | None = None
    if task.engine and task.target:
        arguments = (ENGINES[task.engine], task.target, write, stopped)
        scraper = threading.Thread(target=scrape, args=arguments, daemon=True)
        scraper.start()
    Watch(task, write).run(home)
    stopped.set()
    if scraper is not None:
        scraper.join()
    return DISK_FULL if file.failure else 0
