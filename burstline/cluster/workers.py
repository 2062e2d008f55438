"""Load drivers on the nodes of a Ray cluster, seen from here as if they were local ones.

An actor on each node starts an ordinary driver as a child process and passes its messages on; nothing of Ray
runs in the process that sends and stamps. On this side each actor looks like a process and a connection, so
that `burstline.bench.fire` fires a load over a cluster as over local processes.

    fire <-> pipe <-> relay thread here <-> Ray <-> actor <-> socket <-> driver process

Ray is imported by `burstline.cluster.session.ray_session` alone.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from burstline import __version__
from burstline.cluster.session import CALL_TIMEOUT_S, NodeFolder, RayOptions, fetch, first_line
from burstline.driver_processes import Driver, local_drivers
from burstline.loadgen.driver.canary import canary
from burstline.loadgen.driver.clock_offset import ClockClient, ClockServer, ClockWatch
from burstline.loadgen.driver.job import NAMES, Counters, Done, Go, Job
from burstline.loadgen.record.capture_store import CaptureWriter, read_captures
from burstline.loadgen.record.drive_report import ClockError, ClockMap, DriveReport, Offset
from burstline.servers.host.child import ChildLostError, Failed
from burstline.servers.messages import EngineError
from burstline.workloads.request import WorkloadError

PLACE_TIMEOUT_S: Final = 30.0
START_TIMEOUT_S: Final = 60.0
MAP_TIMEOUT_S: Final = 600.0
POLL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself before it gets work."""

    host: str
    address: str
    node_id: str
    version: str
    python: str
    n_cpus: int
    clock_port: int


class WorkerActor(NodeFolder):
    """The far side: one driver process, its messages, its counters, its captures and its clock."""

    def __init__(self, has_canary: bool = True) -> None:
        super().__init__("burstline-worker-")
        self._has_canary, self._open = has_canary, contextlib.ExitStack()
        self._clock = ClockServer()
        self._driver: Driver | None = None
        self._counters: Counters | None = None

    def facts(self) -> WorkerFacts:
        import ray

        context = ray.get_runtime_context()
        return WorkerFacts(
            host=socket.gethostname(),
            address=str(ray.util.get_node_ip_address()),
            node_id=context.get_node_id(),
            version=__version__,
            python=platform.python_version(),
            n_cpus=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
            clock_port=self._clock.port,
        )

    def reach(self, url: str) -> str | None:
        """Why this node cannot open a connection to the server, None where it can."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            socket.create_connection((parts.hostname or "", port), timeout=5.0).close()
        except OSError as error:
            return str(error)
        return None

    def start(self, job: Job) -> None:
        """Start the driver; its captures and counters stay on this node until they are asked for."""
        row = job.worker
        port = self._open.enter_context(canary()).port if self._has_canary else None
        captures, counters = self._folder / "captures", self._folder / "counters"
        job = replace(job, captures=captures, counters=counters, canary_port=port)
        self._counters = Counters.create(job.counters, row + 1)
        self._cells = self._counters.row(row)
        (self._driver,) = self._open.enter_context(local_drivers([job], self._counters))

    def receive(self, timeout_s: float) -> tuple[Any, tuple[int, ...]]:
        """The driver's next message, None where none came in time, and its progress counters."""
        assert self._driver is not None
        message = None
        if self._driver.connection.poll(timeout_s):
            try:
                message = self._driver.receive()
            except Exception as error:
                message = Failed(error)
        return message, tuple(self._cells)

    def send(self, message: object) -> None:
        if self._driver is not None:
            self._driver.send(message)

    def map_clock(self, worker: int, shift_ns: float, factor: float) -> None:
        """Write the captures once more, in the clock of the machine that asked, and drop the originals."""
        spool = CaptureWriter(self._folder / "mapped", worker)
        for k, capture in enumerate(read_captures(self._folder / "captures")):
            spool.put(partial(capture.in_clock, shift_ns, factor))
            if k % 256 == 0:
                spool.drain()  # what waits to be written is held in memory
        spool.close()
        shutil.rmtree(self._folder / "captures")

    def close(self) -> None:
        """End the driver and leave nothing on this node."""
        self._open.close()
        self._clock.close()
        self.remove()


@dataclass(slots=True)
class RemoteDriver:
    """One worker as `fire` sees it. `lost` says why it is gone, None while it lives."""

    name: str
    facts: WorkerFacts
    actor: Any
    clock: ClockClient
    before: Offset
    lost: str | None = None
    pid: None = None
    t0_ns: int = 0
    connection: Connection = field(init=False)

    def send(self, message: object) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(message)

    def receive(self) -> Any:
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise ChildLostError(self.lost or f"{self.name} ended without its report") from None
        if isinstance(message, Failed):
            raise message.error
        return message


class Fleet:
    """The workers of one run, between `ray_session` and the end of its load."""

    def __init__(self, ray: Any, drivers: list[RemoteDriver]) -> None:
        self._ray, self.drivers = ray, drivers

    @contextmanager
    def connected(self, jobs: Sequence[Job], counters: Counters) -> Iterator[Sequence[RemoteDriver]]:
        """Start one driver for each job."""
        relays: list[_Relay] = []
        starts = [d.actor.start.remote(job) for d, job in zip(self.drivers, jobs, strict=True)]
        for driver, start in zip(self.drivers, starts, strict=True):
            self._get(start, driver, START_TIMEOUT_S)
        for driver, job in zip(self.drivers, jobs, strict=True):
            driver.connection, theirs = Pipe()
            relays.append(_Relay(self._ray, driver, theirs, counters.row(job.worker), job.captures))
        silent = "did not answer for 5 s: the node, or the network to it, is gone"
        with ClockWatch([driver.clock for driver in self.drivers], lambda k: relays[k].lose(silent)) as watch:
            for relay, offsets in zip(relays, watch.offsets, strict=True):
                relay.start(offsets)
            try:
                yield self.drivers
            finally:
                for driver in self.drivers:
                    driver.connection.close()
                for relay in relays:
                    relay.join()

    def _get(self, ref: Any, driver: RemoteDriver, timeout_s: float) -> Any:
        try:
            return self._ray.get(ref, timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"{driver.name} failed: {first_line(error)}") from None


class _Relay:
    """Passes messages between `fire` and one actor, from two threads, until the driver is done or lost."""

    def __init__(
        self, ray: Any, driver: RemoteDriver, conn: Connection, row: memoryview, captures: Path
    ) -> None:
        self._ray, self._driver, self._conn, self._row = ray, driver, conn, row
        self._captures, self._offsets = captures, list[Offset]()
        self._over = threading.Event()
        self._up = threading.Thread(target=self._upwards, name=f"from {driver.name}", daemon=True)
        self._down = threading.Thread(target=self._downwards, name=f"to {driver.name}", daemon=True)

    def start(self, offsets: list[Offset]) -> None:
        self._offsets = offsets
        self._up.start()
        self._down.start()

    def join(self) -> None:
        self._over.set()
        self._up.join(timeout=CALL_TIMEOUT_S)
        self._down.join(timeout=1.0)
        self._row.release()

    def lose(self, why: str) -> None:
        """The worker is gone: `fire` sees its connection end."""
        if not self._over.is_set():
            self._driver.lost = f"{self._driver.name} {why}"
            self._over.set()
            self._conn.close()

    def _downwards(self) -> None:
        while not self._over.is_set():
            try:
                if not self._conn.poll(0.1):
                    continue
                message = self._conn.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, Go):
                self._driver.t0_ns = message.t0_ns
                # The latest offset, so that drift since the workers were made does not matter.
                offset = self._offsets[-1] if self._offsets else self._driver.before
                message = Go(message.t0_ns + offset.ns)
            self._driver.actor.send.remote(message)

    def _upwards(self) -> None:
        try:
            while not self._over.is_set():
                # In small waits: a dead node must not hold this thread longer than its silence is tolerated.
                ref = self._driver.actor.receive.remote(POLL_S)
                while not self._over.is_set() and not self._ray.wait([ref], timeout=POLL_S)[0]:
                    pass
                if self._over.is_set():
                    return
                message, counters = self._ray.get(ref)
                self._row[:] = memoryview(_cells(counters)).cast("q")
                if message is None:
                    continue
                if isinstance(message, Failed) and isinstance(message.error, ChildLostError):
                    self.lose(f"is lost: {message.error}")
                elif isinstance(message, Done):
                    self._conn.send(Done(self._brought_home(message.report)))
                    self._over.set()
                else:
                    self._conn.send(message)
        except self._ray.exceptions.RayError as error:
            self.lose(f"is lost: {first_line(error)}")
        except (OSError, ValueError):
            self._over.set()  # the other side has closed

    def _brought_home(self, report: DriveReport) -> DriveReport:
        """Fetch the captures, note the clock, and give the report in our clock's terms."""
        driver = self._driver
        if report.t0_ns is None:
            fetch(self._ray, driver.actor, "captures", self._captures)
            return replace(report, host=driver.facts.host)
        try:
            after = driver.clock.offset()
        except ClockError:
            after = self._offsets[-1] if self._offsets else driver.before
        clock = ClockMap.of(driver.before, after, self._offsets)
        shift, factor = clock.since_start(driver.t0_ns, report.t0_ns)
        mapped = driver.actor.map_clock.remote(report.worker, shift, factor)
        self._ray.get(mapped, timeout=MAP_TIMEOUT_S)
        fetch(self._ray, driver.actor, "mapped", self._captures)
        return replace(report, t0_ns=driver.t0_ns, host=driver.facts.host, clock=clock)


def _cells(counters: Sequence[int]) -> bytes:
    return b"".join(int(n).to_bytes(8, "little", signed=True) for n in counters[: len(NAMES)])


@contextmanager
def fleet_of(ray: Any, options: RayOptions, url: str) -> Iterator[Fleet]:
    """Actors spread over the nodes, which can reach the server at `url` and have our version."""
    group = _placed(ray, options)
    actor_class = ray.remote(WorkerActor)
    wants: dict[str, Any] = {
        "num_cpus": options.bundle["CPU"],
        "resources": {k: v for k, v in options.bundle.items() if k not in ("CPU", "GPU")},
        "max_concurrency": 4,
        "max_restarts": 0,
    }
    actors, clocks, drivers = [], list[ClockClient](), list[RemoteDriver]()
    try:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        actors = [
            actor_class.options(
                **wants, scheduling_strategy=strategy(placement_group=group, placement_group_bundle_index=k)
            ).remote(options.canary)
            for k in range(options.n_workers)
        ]
        facts = _facts(ray, actors)
        _check(ray, actors, facts, url)
        for k, (actor, fact) in enumerate(zip(actors, facts, strict=True)):
            name = f"worker {k} on {fact.host} ({fact.address})"
            clock = ClockClient((fact.address, fact.clock_port))
            clocks.append(clock)
            try:
                drivers.append(RemoteDriver(name, fact, actor, clock, clock.offset()))
            except ClockError as error:
                raise EngineError(f"{name}: its clock cannot be read: {error}") from None
        yield Fleet(ray, drivers)
    finally:
        for clock in clocks:
            clock.close()
        lost = {k for k, driver in enumerate(drivers) if driver.lost}
        _dismiss(ray, actors, lost, group)


def _placed(ray: Any, options: RayOptions) -> Any:
    group = ray.util.placement_group([options.bundle] * options.n_workers, strategy="SPREAD")
    if not group.wait(PLACE_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        wanted = ", ".join(f"{name} {n:g}" for name, n in options.bundle.items())
        free = ray.available_resources()
        has = ", ".join(f"{name} {n:g}" for name, n in sorted(free.items()) if name in options.bundle)
        raise WorkloadError(
            f"the cluster has no room for {options.n_workers} workers of {wanted}; "
            f"free: {has or 'none of that'} on {_n_nodes(ray)} nodes; use fewer --workers or more nodes"
        )
    return group


def _n_nodes(ray: Any) -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


def _facts(ray: Any, actors: Sequence[Any]) -> list[WorkerFacts]:
    try:
        return list(ray.get([actor.facts.remote() for actor in actors], timeout=START_TIMEOUT_S))
    except ray.exceptions.GetTimeoutError:
        raise EngineError(f"the workers did not start within {START_TIMEOUT_S:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise EngineError(
            f"a worker could not start: {first_line(error)}; each node needs "
            f"pip install 'burstline[ray]=={__version__}'"
        ) from None


def _check(ray: Any, actors: Sequence[Any], facts: Sequence[WorkerFacts], url: str) -> None:
    for fact in facts:
        if fact.version != __version__:
            raise WorkloadError(
                f"{fact.host} has Burstline {fact.version}, this machine {__version__}; "
                "install the same version on every node"
            )
    refusals = ray.get([actor.reach.remote(url) for actor in actors], timeout=START_TIMEOUT_S)
    for fact, refusal in zip(facts, refusals, strict=True):
        if refusal:
            raise EngineError(
                f"{fact.host} ({fact.address}) cannot reach {url}: {refusal}; "
                "pass a --url that every node can reach"
            )


def _dismiss(ray: Any, actors: Sequence[Any], lost: Collection[int], group: Any) -> None:
    """End every actor; those that are lost cannot be waited for."""
    refs = [actor.close.remote() for k, actor in enumerate(actors) if k not in lost]
    with contextlib.suppress(Exception):
        ray.wait(refs, num_returns=len(refs), timeout=3.0)
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)
    with contextlib.suppress(Exception):
        ray.util.remove_placement_group(group)
