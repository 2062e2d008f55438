"""Watches a run from beside it: samples server, clients, machine, GPUs and the engine's own gauges.

Run as `python -m servers.host.watch` by `spawn_watcher`; its task comes on standard input, more clients
later. It stops when told, and when its parent is gone. Nice'd: it must not take from what it watches.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from servers.host import child
from servers.host.scrape import SETTLE_S, TIMEOUT_S, scrape
from servers.host.sources import (
    CpuPressure,
    HostCpu,
    MissingSourceError,
    ProcessTree,
    Source,
    Throttling,
    gpus,
)
from servers.host.telemetry import LineFile, Row, as_lines, missing, rows_of
from servers.messages import Target
from servers.redact import known_secrets, learn
from servers.registry import ENGINES

PERIOD_S = 0.2
DISCOVER_PERIOD_S = 1.0
NICENESS = 10
DISK_FULL = 3
"""How a watcher ends that could not write all it saw."""
BASELINE_S = 10.0
"""How long the first reading of the engine's counters may take; LightLLM's took 3 s."""


class Watcher:
    """The watching process. Leaving it as a context manager stops it."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path | None = None) -> None:
        self._process = process
        self._path = path

    def watch(
        self,
        path: Path,
        *,
        keeper_pid: int | None = None,
        client_pids: Iterable[int] = (),
        engine: str | None = None,
        target: Target | None = None,
        period_s: float = PERIOD_S,
    ) -> Self:
        """From now on append telemetry to `path`, for `telemetry.load_telemetry`.

        `keeper_pid` is `Server.keeper_pid`, None for a server that we did not start; `engine` a name of the
        registry, whose gauges are asked of `target`.
        """
        self._path = path
        task = {
            "path": str(path),
            "keeper_pid": keeper_pid,
            "clients": list(client_pids),
            "engine": engine,
            "target": asdict(target) if target else None,
            "period_s": period_s,
            "secrets": known_secrets(),
        }
        child.tell(self._process, task)
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def add_clients(self, pids: Iterable[int]) -> None:
        """Counts these processes as clients from now on."""
        child.tell(self._process, {"clients": list(pids)})

    def await_baseline(self, timeout_s: float = BASELINE_S) -> bool:
        """Wait until the engine's counters have been read once; False where they were not, in that time.

        What a load adds to them can only be told from a reading before its first request.
        """
        until_s = time.monotonic() + timeout_s
        while self._path and time.monotonic() < until_s and self._process.poll() is None:
            with suppress(FileNotFoundError):
                if b', "engine", ' in self._path.read_bytes():
                    return True
            time.sleep(0.02)
        return False

    def stop(self) -> None:
        """Takes the last samples and ends; a second time does nothing. A watcher that failed is recorded."""
        if self._process.returncode is not None:
            return
        if self._path is not None:  # else its task has not been told: the end of its input ends it
            child.tell(self._process, {"stop": True})
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            code = self._process.wait(TIMEOUT_S + SETTLE_S + 5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if code != 0 and self._path is not None:
            why = "the disk was full" if code == DISK_FULL else f"the watcher ended with exit code {code}"
            with suppress(OSError):  # the disk is full still: what keeps the run will say so
                LineFile(self._path).write(as_lines([missing("watcher", why)]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def spawn_watcher() -> Watcher:
    """A watcher that imports meanwhile; it watches once told what."""
    return Watcher(child.spawn("servers.host.watch"))


class Watch:
    """The watching itself, in the watching process."""

    def __init__(self, task: Mapping[str, Any], write: Callable[[Iterable[Row]], None]) -> None:
        self._write = write
        self._keeper_pid: int | None = task["keeper_pid"]
        self._period_s: float = task["period_s"]
        self._server, self._clients, self._own = ProcessTree(), ProcessTree(), ProcessTree()
        self._clients.adopt(task["clients"])
        self._own.adopt([os.getpid()])
        self._complained: set[tuple[str, str]] = set()
        self._discovered_s = 0.0
        self._discover()
        if self._keeper_pid is None:
            self._complain("server", "we did not start the server, so we do not know its processes")
        for tree in (self._server, self._clients, self._own):
            tree.read()  # so that what they have used so far counts as theirs
        self._sources = self._open_sources()

    def run(self, commands: int) -> None:
        """Samples until told to stop on the descriptor `commands`, or left alone by its parent."""
        parent = os.getppid()
        next_s = time.monotonic()
        while os.getppid() == parent:
            if select.select([commands], [], [], max(0.0, next_s - time.monotonic()))[0]:
                command = json.loads(child.next_line(commands) or b'{"stop": true}')
                if "stop" in command:
                    break
                self._clients.adopt(command["clients"])
            else:
                self.sample()
                next_s = max(next_s + self._period_s, time.monotonic())
        self.sample()
        if self._keeper_pid is not None and (pss_bytes := self._server.pss_bytes()):
            self._write(rows_of("server", {"pss_bytes": pss_bytes}))

    def sample(self) -> None:
        """Writes one row for every value of every source."""
        if time.monotonic() - self._discovered_s >= DISCOVER_PERIOD_S:
            self._discover()
        rows = rows_of("client", self._clients.read()) + rows_of("watcher", self._own.read())
        if self._keeper_pid is not None:
            rows += rows_of("server", self._server.read())
        for source in self._sources:
            try:
                rows += rows_of(source.name, source.read())
            except (MissingSourceError, OSError, ValueError) as error:
                self._complain(source.name, str(error))
        self._write(rows)

    def _open_sources(self) -> list[Source]:
        opened: list[Source] = [HostCpu(self._ours_cpu_s)]
        openers: dict[str, Callable[[], list[Source]]] = {
            "pressure": lambda: [CpuPressure()],
            "cgroup": lambda: [Throttling(self._our_pids)],
            "gpu": gpus,
        }
        for name, opener in openers.items():
            try:
                opened += opener()
            except MissingSourceError as error:
                self._complain(name, str(error))
        return opened

    def _ours_cpu_s(self) -> float:
        return sum(tree.cpu_s for tree in (self._server, self._clients, self._own))

    def _our_pids(self) -> set[int]:
        return self._clients.pids | self._own.pids | {os.getppid()}

    def _discover(self) -> None:
        self._discovered_s = time.monotonic()
        if self._keeper_pid is not None:
            self._server.adopt_descendants(self._keeper_pid)

    def _complain(self, source: str, why: str) -> None:
        """Says once that a source is missing."""
        if (source, why) not in self._complained:
            self._complained.add((source, why))
            self._write([missing(source, why)])


def main() -> None:
    task = json.loads(child.next_line(sys.stdin.fileno()) or b"{}")
    if not task:
        return
    learn(*task["secrets"])
    os.nice(NICENESS)
    file = LineFile(Path(task["path"]))

    def write(rows: Iterable[Row]) -> None:
        file.write(as_lines(rows))

    stopped = threading.Event()
    scraper: threading.Thread | None = None
    if task["engine"] and task["target"]:
        arguments = (ENGINES[task["engine"]], Target(**task["target"]), write, stopped)
        scraper = threading.Thread(target=scrape, args=arguments, daemon=True)
        scraper.start()
    Watch(task, write).run(sys.stdin.fileno())
    stopped.set()
    if scraper is not None:
        scraper.join(TIMEOUT_S + SETTLE_S)
    child.end_now(DISK_FULL if file.failure else 0)


if __name__ == "__main__":
    main()
