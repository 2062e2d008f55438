"""An agent on a cluster node: connects to the run and relays between it and one load driver.

    agent -> WorkerFacts       once, and once on a second connection, for the clock
    agent <- the server's URL  answered by why not, None where this node can connect
    agent <- secrets, Job      the driver starts, and writes none of the secrets
    agent <- Go, Stop          passed on
    agent -> Tail              counters and new captures, several times a second
    agent -> Ready, Done       the driver's own; its whole spool has gone before
    agent -> Failed            what the driver failed of, or how it ended

A dead man's switch: an agent whose home is silent for SILENCE_S, or ends the connection during the load,
stops the load, dials once more, and hands over what home lacks:

    agent -> WorkerFacts       as before
    agent <- how many bytes of the spool home has
    agent -> Tail              the rest

Where home cannot be reached, the spool stays until the next agent on the node finds it.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, wait
from pathlib import Path
from typing import BinaryIO, Final
from urllib.parse import urlsplit

import psutil

from burstline.loadgen.capture.drive_report import DriveReport, MachineUse
from burstline.loadgen.driver.canary import canary
from burstline.loadgen.driver.clock_offset import SILENCE_S, ClockAnswers
from burstline.loadgen.driver.job import STOP_S, Counters, Done, Driver, Go, Job, Stop, local_drivers
from burstline.servers.host.child import ChildLostError, Failed
from burstline.servers.host.kernel import send_at_once
from burstline.servers.host.sources import HostCpu
from burstline.servers.redact import learn

TAIL_S: Final = 0.25
PIECE_BYTES: Final = 8 << 20
REACH_S: Final = 5.0
"""How long a node may take to connect, to home or to the server."""
DIAL_S: Final = 60.0
"""How long one that was cut off dials; a home that is gone refuses at once."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A worker's facts, sent before it gets work; the `token` identifies both of its connections."""

    host: str
    token: bytes
    is_clock: bool = False


@dataclass(frozen=True, slots=True)
class Tail:
    """A driver's counters now, and what its spool has grown by."""

    counters: tuple[int, ...]
    captures: bytes


def main() -> None:
    host, port, has_canary = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
    key = sys.stdin.buffer.read()
    if os.fork():  # a worker of Ray that ends takes its children along, and this is to be none
        os._exit(0)
    os.setsid()
    facts = WorkerFacts(socket.gethostname(), secrets.token_bytes(16))
    dialled = partial(_dialled, host, port, key)
    home, line = dialled(facts), dialled(replace(facts, is_clock=True))
    clock = ClockAnswers(socket.socket(fileno=os.dup(line.fileno())))
    with (
        contextlib.suppress(EOFError, OSError),
        _Agent(home, clock, has_canary, partial(dialled, facts)) as agent,
    ):
        agent.serve()


def _dialled(host: str, port: int, key: bytes, facts: WorkerFacts) -> Connection:
    peer = socket.create_connection((host, port), timeout=REACH_S)
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a home without power never says goodbye
    send_at_once(peer)
    home = Connection(peer.detach())
    answer_challenge(home, key)
    home.send(facts)
    return home


class _Agent(contextlib.AbstractContextManager["_Agent"]):
    """One driver and what home asks of it. Leaving it ends the driver and removes its folder."""

    def __init__(
        self, home: Connection, clock: ClockAnswers, has_canary: bool, dial: Callable[[], Connection]
    ) -> None:
        self._home, self._clock, self._has_canary, self._dial = home, clock, has_canary, dial
        self._open = contextlib.ExitStack()
        self._folder = own_folder("burstline-worker-")
        self._driver: Driver | None = None
        self._spool: BinaryIO | None = None
        self._last: object = None
        self._cpu: HostCpu | None = None
        self._begun_s = 0.0
        self._left_alone = False
        self._leaving = threading.Lock()
        """Of the two threads that may find home gone, one leaves."""

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._clock.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def serve(self) -> None:
        """Until home ends the connection; where it ends during the load, the load ends too."""
        try:
            self._relay()
        except (EOFError, OSError):
            if self._driver is not None and self._begun_s:
                self._leave(self._driver)

    def _relay(self) -> None:
        while True:
            listening = [self._home]
            if self._driver is not None and self._last is None:
                listening.append(self._driver.connection)
            heard = wait(listening, TAIL_S)
            if self._home in heard:
                self._obey(self._home.recv())
            if self._driver is None:
                continue
            if len(heard) > (self._home in heard):
                self._listen(self._driver)
            piece = self._tail()
            while self._last is not None and piece:  # its spool goes before its last word
                piece = self._tail()
            if self._last is not None:
                self._home.send(self._last)
                self._driver = None

    def _obey(self, message: object) -> None:
        match message:
            case str():
                self._home.send(_refusal(message))
            case (tuple() as secrets, Job() as job):
                learn(*secrets)
                self._start(job)
            case Go() | Stop() if self._driver is not None:
                if isinstance(message, Go):
                    self._cpu, self._begun_s = HostCpu(time.process_time), time.monotonic()
                    threading.Thread(target=self._mind_home, args=(self._driver,), daemon=True).start()
                self._driver.send(message)

    def _start(self, job: Job) -> None:
        port = self._open.enter_context(canary()).port if self._has_canary else None
        job = replace(
            job, captures=self._folder / "captures", counters=self._folder / "counters", canary_port=port
        )
        counters = self._open.enter_context(Counters.create(job.counters, job.worker + 1))
        self._cells = counters.row(job.worker)
        self._open.callback(self._cells.release)
        (self._driver,) = self._open.enter_context(local_drivers([job], counters))
        self._spool_path = job.captures / f"driver-{job.worker}.zst"

    def _listen(self, driver: Driver) -> None:
        try:
            message = driver.receive()
        except Exception as error:
            message = Failed(error)
        if isinstance(message, Done) and self._left_alone:
            self._last = Failed(ChildLostError(f"it stopped itself: nothing was heard for {SILENCE_S:g} s"))
        elif isinstance(message, Done):
            report = message.report
            self._last = Done(replace(report, machine=self._machine(report)))
        elif isinstance(message, Failed):
            self._last = message
        else:
            self._home.send(message)

    def _machine(self, report: DriveReport) -> MachineUse | None:
        if self._cpu is None:
            return None
        seen = self._cpu.read()
        whole_s = (time.monotonic() - self._begun_s) * seen["n_cpus"]
        ours_s = report.cpu_s + (report.canary.cpu_s if report.canary else 0.0)
        return MachineUse(
            n_cpus=int(seen["n_cpus"]),
            busy_fraction=seen["busy_s"] / whole_s,
            others_fraction=max(0.0, seen["others_cpu_s"] - ours_s) / whole_s,
            steal_fraction=seen["steal_s"] / whole_s,
            free_bytes=psutil.virtual_memory().available,
        )

    def _tail(self) -> bytes:
        """Send the counters and the next piece of the spool; that piece."""
        if self._spool is None:
            for path in (self._spool_path.with_name(self._spool_path.name + ".partial"), self._spool_path):
                with contextlib.suppress(FileNotFoundError):
                    self._spool = self._open.enter_context(path.open("rb", buffering=0))
                    break
        piece = self._spool.read(PIECE_BYTES) if self._spool else b""
        self._home.send(Tail(tuple(self._cells), piece))
        return piece

    def _mind_home(self, driver: Driver) -> None:
        """Leave once home has been silent for too long; "go" was its last word."""
        begun_s = time.monotonic()
        while min(self._clock.silent_s(), time.monotonic() - begun_s) < SILENCE_S:
            time.sleep(TAIL_S)
        try:
            self._leave(driver)
        finally:
            os._exit(1)  # the other thread may wait for home for ever

    def _leave(self, driver: Driver) -> None:
        """Stop the load, and hand over what it has brought where home lets us in again."""
        with self._leaving:
            self._left_alone = True
            driver.send(Stop())
            if (home := self._dialled_again()) is None:
                return
            end_s = time.monotonic() + STOP_S  # until the spool is whole: then it has its name
            while time.monotonic() < end_s and not self._spool_path.exists():
                time.sleep(TAIL_S)
            with home, next(self._spool_path.parent.glob("driver-*")).open("rb") as spool:
                spool.seek(home.recv())
                while piece := spool.read(PIECE_BYTES):
                    home.send(Tail(tuple(self._cells), piece))
            shutil.rmtree(self._folder, ignore_errors=True)

    def _dialled_again(self) -> Connection | None:
        end_s = time.monotonic() + DIAL_S
        while time.monotonic() < end_s:
            try:
                return self._dial()
            except (ConnectionRefusedError, EOFError, AuthenticationError):
                return None  # the run has ended without us
            except OSError:
                time.sleep(TAIL_S)
        return None


def _refusal(url: str) -> str | None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=REACH_S).close()
    except OSError as error:
        return str(error)
    return None


def own_folder(prefix: str) -> Path:
    """A folder on this node, locked while this process lives; what killed ones left goes, a minute old."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    for left in folder.parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            # It is made first and then locked.
            if left.stat().st_mtime > folder.stat().st_mtime - 60:
                continue
            lock = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
    return folder
