"""An hour of load in virtual time: the wire's own loop over sockets and a clock that are made up."""

from __future__ import annotations

import errno
import gc
import heapq
import sys
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from burstline.loadgen.wire.exchange import Exchange
from burstline.loadgen.wire.pool import IN, OUT
from burstline.loadgen.wire.wire import Wire
from tests.faults.lab import noted

RATE = 50
HOUR_S = 3600
EVENT = b"5\r\nx: 1\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
PARTS = (HEAD + b"9\r\ndata: 1\n\n\r\n", b"9\r\ndata: 2\n\n\r\n", b"9\r\ndata: 3\n\n\r\n0\r\n\r\n")
PER_CONNECTION = 97
"""So many replies, and the made-up server closes the connection in order."""


class World:
    """The clock, and what arrives when. Time moves only while the wire waits."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.sockets: dict[int, Socket] = {}
        self.masks: dict[int, int] = {}
        self.readable: set[int] = set()
        self.events: list[tuple[int, int, int, bytes | None]] = []
        self.n = 0

    def later(self, delay_ns: int, fd: int, data: bytes | None) -> None:
        self.n += 1
        heapq.heappush(self.events, (self.now_ns + delay_ns, self.n, fd, data))


class Socket:
    def __init__(self, world: World) -> None:
        # Like the kernel: the lowest free number.
        fd = next(k for k in range(1000, 1 << 20) if k not in world.sockets)
        self.world, self.fd, self.inbox, self.n_replies = world, fd, deque[bytes](), 0
        self.has_ended = False
        world.sockets[fd] = self

    def fileno(self) -> int:
        return self.fd

    def setblocking(self, flag: bool) -> None: ...
    def setsockopt(self, *args: object) -> None: ...
    def connect_ex(self, address: object) -> int:
        return errno.EINPROGRESS

    def getsockopt(self, level: int, option: int, n_bytes: int = 0) -> int | bytes:
        """No error, and nothing that TCP knows of the connection."""
        return bytes(n_bytes) if n_bytes else 0

    def send(self, data: bytes) -> int:
        for k, part in enumerate(PARTS):
            self.world.later(2_000_000 * (k + 1), self.fd, part)
        self.n_replies += 1
        if self.n_replies == PER_CONNECTION:
            self.world.later(9_000_000, self.fd, None)
        return len(data)

    def recvmsg_into(self, buffers: list[memoryview], size: int) -> tuple[int, list[object], int, None]:
        if not self.inbox:
            if self.has_ended:
                return 0, [], 0, None
            raise BlockingIOError
        data = self.inbox.popleft()
        if not self.inbox and not self.has_ended:
            self.world.readable.discard(self.fd)
        buffers[0][: len(data)] = data
        return len(data), [], 0, None

    def recv(self, n: int) -> bytes:
        return b""

    def close(self) -> None:
        del self.world.sockets[self.fd]
        self.world.readable.discard(self.fd)


class Poller:
    """Level-triggered, as epoll: a socket is reported until it has been read empty."""

    def __init__(self, world: World) -> None:
        self.world = world

    def register(self, fd: int, mask: int) -> None:
        self.world.masks[fd] = mask

    def modify(self, fd: int, mask: int) -> None:
        self.world.masks[fd] = mask

    def unregister(self, fd: int) -> None:
        del self.world.masks[fd]

    def fileno(self) -> int:
        return 1 << 30

    def close(self) -> None: ...

    def poll(self, timeout_s: float, n: int) -> list[tuple[int, int]]:
        world = self.world
        until_ns = world.now_ns + max(int(timeout_s * 1e9), 20_000)
        ready = [(fd, OUT) for fd, mask in world.masks.items() if mask & OUT and fd in world.sockets]
        if not ready and not world.readable:
            until_ns = min(until_ns, world.events[0][0]) if world.events else until_ns
            world.now_ns = max(world.now_ns, until_ns)
        while world.events and world.events[0][0] <= world.now_ns:
            _, _, fd, data = heapq.heappop(world.events)
            if fd not in world.masks or fd not in world.sockets:
                continue
            if data is None:
                world.sockets[fd].has_ended = True
            else:
                world.sockets[fd].inbox.append(data)
            world.readable.add(fd)
        ready += [(fd, IN) for fd in world.readable if world.masks.get(fd, 0) & IN]
        return ready


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_an_hour_of_load_leaks_neither_memory_nor_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for module in ("wire", "dispatcher", "pool", "reader"):
        monkeypatch.setattr(f"burstline.loadgen.wire.{module}.now", lambda: world.now_ns)
    monkeypatch.setattr("burstline.loadgen.wire.wire.epoll", lambda: Poller(world))
    fakes = SimpleNamespace(
        **{
            name: getattr(__import__("socket"), name)
            for name in ("SOCK_STREAM", "IPPROTO_TCP", "TCP_NODELAY", "SOL_SOCKET", "SO_ERROR")
        }
    )
    fakes.socket = lambda family, kind: Socket(world)
    monkeypatch.setattr("burstline.loadgen.wire.pool.socket", fakes)
    failures: list[Exchange] = []
    n_ended = 0

    def ended(exchanges: list[Exchange]) -> None:
        nonlocal n_ended
        n_ended += len(exchanges)
        failures.extend(each for each in exchanges if each.failure is not None)

    wire = Wire([(2, ("10.0.0.1", 1))], ended)
    samples: list[tuple[float, int, int]] = []
    total, parked, interval_ns = RATE * HOUR_S, 0, 1_000_000_000 // RATE
    tick = wire._tick

    def feed(at_ns: int) -> None:
        """In place of a driver: always five virtual seconds ahead."""
        nonlocal parked
        tick(at_ns)
        while parked < total and parked * interval_ns < at_ns + 5_000_000_000:
            exchange = Exchange(parked, parked * interval_ns)
            exchange.payload = b"POST / HTTP/1.1\r\n\r\n"
            wire.traffic.park(exchange)
            parked += 1
        if n_ended // 20_000 >= len(samples):
            gc.collect()
            samples.append((world.now_ns / 1e9, sys.getallocatedblocks(), len(world.sockets)))
        if n_ended == total:
            wire._close()

    monkeypatch.setattr(wire, "_tick", feed)
    began_s = time.monotonic()
    wire.traffic.release(0)
    wire._run()
    time_s = time.monotonic() - began_s
    assert wire.error is None
    at_s, blocks, sockets = np.array(samples[len(samples) // 4 :], dtype=float).T
    grown = np.polyfit(at_s, blocks, 1)[0] * HOUR_S
    seen = f"{n_ended:,} replies, {len(failures)} failed, {grown:+,.0f} blocks/h, at most {sockets.max():.0f} sockets"
    noted(f"an hour at {RATE}/s in virtual time", "all whole, no growth", seen, time_s)
    assert n_ended == total
    assert len(failures) <= wire.traffic.n_resent
    assert not wire.traffic._in_flight
    assert sockets.max() < 3 * RATE
    assert not world.sockets
    assert grown < total / 10, "what each reply leaves is at least a block"
