"""Load drivers on the nodes of a Ray cluster, seen from here as if they were local ones.

    fire <-> RemoteDriver <-> TCP, dialled by the agent <-> agent <-> driver process

Ray only places the agents (`placement.py`). Captures come home during the load, in the node's own clock; they
are mapped to ours when the driver has ended or is lost.
"""

import os
import secrets
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, deliver_challenge
from pathlib import Path
from typing import Any, BinaryIO, Final

from burstline.cluster.agent import Tail, WorkerFacts
from burstline.cluster.placement import RayOptions, placed
from burstline.loadgen.capture.capture import CaptureWriter, read_captures
from burstline.loadgen.capture.drive_report import ClockError, ClockMap, Offset
from burstline.loadgen.driver.clock_offset import SILENCE_S, ClockClient
from burstline.loadgen.driver.job import Counters, Done, Go, Job
from burstline.servers.host.child import Child, ChildLostError, Failed, limit_waits
from burstline.servers.host.kernel import send_at_once
from burstline.servers.messages import EngineError
from burstline.servers.redact import known_secrets, redacted

HOME_S: Final = 60.0
"""How long placed agents may take to dial home: on a busy cluster they wait for a CPU."""
ANSWER_S: Final = 10.0
RETURN_S: Final = 10.0
"""So long after it was lost, a node may come back with what its driver had captured."""
PER_DRAIN: Final = 256


@dataclass(slots=True, eq=False)
class RemoteDriver:
    """One worker as `fire` sees it. `lost` says why it is gone, None while it lives."""

    name: str
    facts: WorkerFacts
    connection: Connection
    clock: ClockClient
    before: Offset
    during: list[Offset] = field(default_factory=list)
    lost: str | None = None
    lost_s: float = 0.0
    mapped: ClockMap | None = None
    pid: None = None
    _job: Job | None = None
    _row: memoryview | None = None
    _go: tuple[int, int] | None = None
    """When the load begins by our clock and by the node's, ns."""
    _arriving: BinaryIO | None = field(default=None, repr=False)
    ended: threading.Event = field(default_factory=threading.Event)

    def start(self, job: Job, row: memoryview) -> None:
        self._job, self._row = job, row
        folder = _folder_of(job)
        folder.mkdir(parents=True)
        self._arriving = (folder / "driver.zst.partial").open("wb", buffering=0)
        self.send((known_secrets(), job))
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Read its clock once a second; a driver that has been silent for SILENCE_S is lost."""
        heard_s = time.monotonic()
        while not self.ended.wait(1.0):
            try:
                self.during.append(self.clock.offset(8))
                heard_s = time.monotonic()
            except ClockError:
                if time.monotonic() - heard_s > SILENCE_S:
                    gone = f"did not answer for {SILENCE_S:g} s: the node, or the network to it, is gone"
                    self.lost, self.lost_s = f"{self.name} {gone}", time.monotonic()
                    # `fire` sees the connection end.
                    with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as peer:
                        peer.shutdown(socket.SHUT_RDWR)
                    return

    def send(self, message: object) -> None:
        if isinstance(message, Go):
            # By the latest offset, so that drift since the workers were placed does not matter.
            offset = self.during[-1] if self.during else self.before
            self._go = message.t0_ns, message.t0_ns + offset.ns
            message = Go(self._go[1])
        with suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        """The next message. Raises what the driver raised, ChildLostError where it or its node is lost."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise ChildLostError(self.lost or f"{self.name} is lost: its connection ended") from None
        match message:
            case Tail():
                self._take(message)
            case Done(report):
                self.mapped = self._map()
                t0_ns = self._go[0] if self._go else None
                return Done(replace(report, t0_ns=t0_ns, host=self.facts.host, clock=self.mapped))
            case Failed(error):
                if isinstance(error, ChildLostError):
                    error = ChildLostError(f"{self.name} is lost: {error}")
                raise error
        return message

    def _take(self, tail: Tail) -> None:
        assert self._row is not None
        assert self._arriving is not None
        self._row[:] = memoryview(struct.pack(f"<{len(tail.counters)}q", *tail.counters)).cast("q")
        self._arriving.write(tail.captures)

    def take_back(self, home: Connection) -> None:
        """What the node had captured when it lost us; it begins where our copy ends."""
        assert self._arriving is not None
        with suppress(EOFError, OSError):
            home.send(self._arriving.tell())
            while True:
                self._take(home.recv())

    def _map(self) -> ClockMap | None:
        """How the node's clock was mapped to ours; None where the load never began."""
        if self._go is None:
            return None
        after = self.during[-1] if self.during else self.before
        if self.lost is None:
            with suppress(ClockError):
                after = self.clock.offset()
        return ClockMap.of(self.before, after, self.during)

    def keep(self) -> None:
        """Write what came home once more, in our clock. After the load: it takes 0.7 us an event."""
        assert self._job is not None
        assert self._arriving is not None
        self._arriving.close()
        mapped = self.mapped or self._map()
        shift, factor = mapped.since_start(*self._go) if mapped and self._go else (0.0, 1.0)
        folder = _folder_of(self._job)
        spool = CaptureWriter(self._job.captures, self._job.worker)
        for k, capture in enumerate(read_captures(folder)):
            if self.lost and capture.failure in ("cancelled", "not_sent"):
                continue  # the node stopped itself: not by the user, and not by the server
            spool.put(partial(capture.in_clock, shift, factor))
            if k % PER_DRAIN == 0:
                spool.drain()  # what waits to be written is held in memory
        spool.close()
        shutil.rmtree(folder)


def _folder_of(job: Job) -> Path:
    return job.captures.with_name("arriving") / str(job.worker)


class Fleet:
    """The workers of one run, until its load ends."""

    def __init__(self, drivers: list[RemoteDriver], door: socket.socket, key: bytes) -> None:
        self.drivers, self._door, self._key = drivers, door, key

    def check_reach(self, url: str) -> None:
        """EngineError where a node cannot connect to the server."""
        for driver in self.drivers:
            driver.send(url)
        for driver in self.drivers:
            refusal = _answer(driver.connection, driver.name)
            if refusal is not None:
                raise EngineError(
                    f"{driver.name} cannot reach {url}: {refusal}; pass a --url that every node can reach"
                )

    @contextmanager
    def connected(self, jobs: Sequence[Job], counters: Counters) -> Iterator[Sequence[RemoteDriver]]:
        rows = [counters.row(job.worker) for job in jobs]
        for driver, job, row in zip(self.drivers, jobs, rows, strict=True):
            driver.start(job, row)
        try:
            yield self.drivers
        finally:
            for driver in self.drivers:
                driver.ended.set()
                driver.connection.close()
            try:
                self._take_back()
            finally:
                for driver in self.drivers:
                    driver.keep()
                for row in rows:
                    row.release()

    def _take_back(self) -> None:
        """Let each node that fell silent come back, RETURN_S after it was lost at the latest."""
        lost = {driver.facts.token: driver for driver in self.drivers if driver.lost}
        while lost:
            found = _at_door(self._door, self._key, max(driver.lost_s for driver in lost.values()) + RETURN_S)
            if found is None:
                return
            with found[0] as home, suppress(EngineError):
                if driver := lost.pop(_answer(home, found[1]).token, None):
                    driver.take_back(home)


@contextmanager
def fleet_of(options: RayOptions, most: int, log: Path) -> Iterator[Fleet]:
    """Agents spread over the nodes, at home and with known clocks; at most `most` where their number is open.

    What Ray printed is in the file `log` afterwards, where there was anything.
    EngineError where no cluster answers or a worker cannot start, WorkloadError where there is no room.
    """
    key = secrets.token_bytes(32)
    with ExitStack() as kept, socket.create_server(("", 0), backlog=1024) as door:
        child, n = kept.enter_context(placed(options, most, door.getsockname()[1], key))
        waiting: dict[bytes, tuple[WorkerFacts, Connection]] = {}
        drivers: list[RemoteDriver] = []
        for n_missing in range(2 * n, 0, -1):
            connection, host = _next_home(door, key, child, (n_missing + 1) // 2)
            kept.callback(connection.close)
            facts: WorkerFacts = _answer(connection, host)
            if facts.token not in waiting:
                waiting[facts.token] = facts, connection
                continue
            _, other = waiting.pop(facts.token)
            line, home = (connection, other) if facts.is_clock else (other, connection)
            name = f"worker {len(drivers)} on {facts.host} ({host})"
            clock = ClockClient(socket.socket(fileno=os.dup(line.fileno())))
            kept.callback(clock.close)
            try:
                drivers.append(RemoteDriver(name, facts, home, clock, clock.offset()))
            except ClockError as error:
                raise EngineError(f"{name}: its clock cannot be read: {error}") from None
        try:
            yield Fleet(drivers, door, key)
        finally:
            if words := child.last_words():
                log.write_text(redacted(words), "utf-8")


def _next_home(door: socket.socket, key: bytes, child: Child, n_missing: int) -> tuple[Connection, str]:
    """The next connection of an agent, and its address."""
    end_s = time.monotonic() + HOME_S
    while time.monotonic() < end_s:
        if child.connection.poll(0):
            child.receive()  # raises why an agent could not start
        if found := _at_door(door, key, time.monotonic() + 0.2):
            return found
    raise EngineError(
        f"{n_missing} workers did not start within {HOME_S:g} s: the cluster is busy, or its nodes cannot "
        "connect to this machine; `ray status` says what is in use"
    )


def _at_door(door: socket.socket, key: bytes, end_s: float) -> tuple[Connection, str] | None:
    """Who connects until then, and its address; who has not the key is refused."""
    while (left_s := end_s - time.monotonic()) > 0:
        door.settimeout(left_s)
        try:
            peer, (host, *_) = door.accept()
        except TimeoutError:
            return None
        # A peer that goes silent in the middle of a message must not hold us.
        limit_waits(peer, SILENCE_S, SILENCE_S)
        send_at_once(peer)
        connection = Connection(peer.detach())
        try:
            deliver_challenge(connection, key)
        except Exception:  # not one of ours
            connection.close()
        else:
            return connection, host
    return None


def _answer(connection: Connection, who: str) -> Any:
    try:
        if connection.poll(ANSWER_S):
            return connection.recv()
    except (EOFError, OSError):
        raise EngineError(f"{who} ended before it received work") from None
    raise EngineError(f"{who} did not answer within {ANSWER_S:g} s")
