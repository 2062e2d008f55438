"""The watcher process: samples server, clients, machine, GPUs and the engine's gauges during a run.

A `Child`: its task comes first, more clients later, and it stops when the connection
ends. It runs at a low priority, so that it does not disturb what it measures.
"""

import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, fields, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from burstline.servers.engine import Engine
from burstline.servers.gauges import Gauges
from burstline.servers.host.child import Child
from burstline.servers.host.gpus import gpus
from burstline.servers.host.ready import PAGE_TIMEOUT_S, getter
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
from burstline.servers.messages import EngineError, Get, HttpReply, Target
from burstline.servers.redact import words_of_server
from burstline.servers.registry import ENGINES

PERIOD_S = 0.2
DISCOVER_PERIOD_S = 1.0
NICENESS = 10
SCRAPE_PERIOD_S = 1.0
"""On average. Rarely: an engine renders its metrics on the very thread that serves requests."""
SETTLE_S = 15.0
"""How long counters may move after the load; then they are taken as they are."""
SETTLE_PERIOD_S = 0.25
COUNTERS = frozenset({"prompt_tokens", "generation_tokens", "ttft_count", "e2e_count", "running"})
"""Counters that must stop changing after the load; `running`, because disconnects may be noticed late."""
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


def scrape(
    engine: Engine, target: Target, write: Callable[[Iterable[Row]], None], stopped: threading.Event
) -> None:
    """Ask the engine for its gauges until `stopped`, then until its counters stand still: they must cover
    the load, and some engines count late.

    They stand still when they have not moved for `engine.counters_settle_s`; SETTLE_S bounds the wait.
    `scrape_s` is how long the answer took.
    """
    if engine.metrics_path is None:
        write([missing("engine", f"Burstline reads no metrics of: {engine.title}{_unread(target)}")])
        return
    gets = [
        getter(replace(target, url=url), timeout_s=PAGE_TIMEOUT_S) for url in (target.url, *target.replicas)
    ]
    complaints: set[str] = set()
    is_last, quiet_since_s, until_s = False, 0.0, 0.0
    latest: dict[str, float] = {}
    while True:
        began_ns = time.monotonic_ns()
        rows = _gauge_rows(engine, gets)
        fresh = [row for row in rows if row.value is not None or row.name + str(row.note) not in complaints]
        complaints |= {row.name + str(row.note) for row in rows if row.value is None}
        write(fresh)
        counters = {row.name: row.value for row in rows if row.value is not None and row.name in COUNTERS}
        now_s = time.monotonic()
        if counters != latest:
            latest, quiet_since_s = counters, now_s
        if is_last:
            if now_s - quiet_since_s >= engine.counters_settle_s or now_s >= until_s:
                return
            time.sleep(min(SETTLE_PERIOD_S, engine.counters_settle_s))
        else:
            # At a steady beat, evenly spaced requests would each be met at the same moment of their lives.
            period_s = SCRAPE_PERIOD_S * (0.5 + secrets.randbelow(1000) / 1000)
            is_last = stopped.wait(max(0.0, period_s - (time.monotonic_ns() - began_ns) / 1e9))
            if is_last:
                until_s, quiet_since_s, latest = time.monotonic() + SETTLE_S, time.monotonic(), {}


def _unread(target: Target) -> str:
    """What a page of metrics has that Burstline knows no names of, by the first word of their names."""
    with suppress(EngineError):
        page = getter(target, timeout_s=PAGE_TIMEOUT_S)("/metrics")
        words = re.findall(r"^# TYPE ([a-zA-Z]+)", page.body.decode(errors="replace"), re.MULTILINE)
        if page.ok and words:
            return f", whose /metrics has {', '.join(f'{word}*' for word in dict.fromkeys(words))}"
    return ""


def _gauge_rows(engine: Engine, gets: Sequence[Get]) -> list[Row]:
    """The gauges of all replicas together: sums, and the mean share of their KV caches."""
    path = engine.metrics_path or ""
    began_ns = time.monotonic_ns()
    try:
        gauges = [_gauges(engine, get(path), path) for get in gets]
    except EngineError as error:
        return [missing("engine", str(error))]
    at_ns = time.monotonic_ns()
    rows = [Row(at_ns, "engine", "scrape_s", (at_ns - began_ns) / 1e9)]
    for name in (each.name for each in fields(Gauges) if each.name != "latencies"):
        values = [value for each in gauges if (value := getattr(each, name)) is not None]
        whole = len(values) == len(gauges)
        mean = len(values) if name == "kv_used_fraction" else 1
        value = sum(values) / mean if whole else None
        rows.append(Row(at_ns, "engine", name, value, None if whole else "it has no such metric"))
    latencies: Counter[str] = Counter()
    for each in gauges:
        latencies.update(each.latencies or {})
    return rows + rows_of("engine", latencies, at_ns)


def _gauges(engine: Engine, reply: HttpReply, path: str) -> Gauges:
    if not reply.ok:
        raise EngineError(f"{path} answers {reply.status}")
    try:
        return engine.gauges(reply.body.decode(errors="replace"))
    except Exception as error:  # whatever a server's bytes can make a parser do
        raise EngineError(words_of_server(f"{path} cannot be read: {error}")) from error


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
