"""One clock over machines: how far a worker's monotonic clock is from ours, and how far off that may be.

Each exchange is one small datagram each way, stamped at both ends, outside Ray's own RPC. A worker's clock
ahead of ours by θ satisfies `t2 - θ >= t1` on the way out and `t3 - θ <= t4` on the way back, whatever each
way took, so every exchange confines θ to [t3 - t4, t2 - t1]. The intersection over many exchanges holds θ
with certainty, also where one direction is slower than the other (K. Marzullo, S. Owicki, "Maintaining the
time in a distributed system", 1983); its width is at most the least round trip.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_PING: Final = struct.Struct("<4sQ")
_PONG: Final = struct.Struct("<4sQqq")
_MAGIC: Final = b"BLK1"
N_EXCHANGES: Final = 64
TIMEOUT_S: Final = 0.25
GIVE_UP_AFTER: Final = 8
"""Datagrams lost in a row before a volley ends; before the first answer, before TCP is tried instead."""

MAX_DRIFT: Final = 200e-6
"""Between two clocks; Linux disciplines its own to 500 ppm at most, crystals differ by tens."""

now = time.monotonic_ns


class ClockError(RuntimeError):
    """A worker's clock did not answer, or its answers contradict each other."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer, ns: sent (ours), received and answered (theirs), received (ours)."""

    t1_ns: int
    t2_ns: int
    t3_ns: int
    t4_ns: int

    @property
    def low_ns(self) -> int:
        return self.t3_ns - self.t4_ns

    @property
    def high_ns(self) -> int:
        return self.t2_ns - self.t1_ns


@dataclass(frozen=True, slots=True)
class Offset:
    """A worker's clock minus ours, ns, at our time `at_ns`: between `low_ns` and `high_ns`.

    `rtt_ns` is the least round trip of the `n` exchanges behind it.
    """

    at_ns: int
    low_ns: int
    high_ns: int
    rtt_ns: int
    n: int

    @property
    def ns(self) -> int:
        return (self.low_ns + self.high_ns) // 2

    @property
    def bound_ns(self) -> int:
        """The true offset is within so much of `ns`."""
        return (self.high_ns - self.low_ns + 1) // 2

    def describe(self) -> str:
        return f"{self.ns / 1e9:+.6f} s from ours, known to {self.bound_ns / 1e3:.0f} us"

    @classmethod
    def of(cls, exchanges: Sequence[Exchange]) -> Offset:
        """Intersect the exchanges of one volley, short enough for drift not to matter."""
        if not exchanges:
            raise ClockError("no exchange was answered")
        # A clock drifts while the volley lasts; the bound must hold for its middle.
        drift = math.ceil((exchanges[-1].t4_ns - exchanges[0].t1_ns) * MAX_DRIFT)
        low = max(exchange.low_ns for exchange in exchanges) - drift
        high = min(exchange.high_ns for exchange in exchanges) + drift
        if low > high:
            raise ClockError(
                f"the clock moved by {(low - high) / 1e3:.1f} us during {len(exchanges)} exchanges; "
                "was it set, or did the machine sleep?"
            )
        rtt = min(e.t4_ns - e.t1_ns - (e.t3_ns - e.t2_ns) for e in exchanges)
        middle = (exchanges[0].t1_ns + exchanges[-1].t4_ns) // 2
        return cls(middle, low, high, rtt, len(exchanges))


@dataclass(frozen=True, slots=True)
class ClockMap:
    """A worker's clock over a run: its offset before and after, and a line between them.

    `residual_ns` is how far offsets measured during the run lay outside the line's bound: 0 for clocks that
    drift evenly.
    """

    before: Offset
    after: Offset
    residual_ns: int = 0

    @classmethod
    def of(cls, before: Offset, after: Offset, during: Iterable[Offset] = ()) -> ClockMap:
        line = cls(before, after)
        outside = [
            max(line._offset_ns(o.at_ns) - o.high_ns, o.low_ns - line._offset_ns(o.at_ns), 0) for o in during
        ]
        return cls(before, after, round(max(outside, default=0)))

    @property
    def bound_ns(self) -> int:
        """Times of this worker, mapped to our clock, are off by at most this."""
        return max(self.before.bound_ns, self.after.bound_ns) + self.residual_ns

    @property
    def _slope(self) -> float:
        span = self.after.at_ns - self.before.at_ns
        return (self.after.ns - self.before.ns) / span if span > 0 else 0.0

    def theirs(self, ours_ns: int) -> int:
        """Our time `ours_ns` as the worker's clock shows it."""
        return ours_ns + round(self._offset_ns(ours_ns))

    def since_start(self, t0_ours_ns: int, t0_theirs_ns: int) -> tuple[float, float]:
        """(shift ns, factor): shift + factor * (ns since the worker's start) is ns since ours."""
        slope = self._slope
        at_start = self.before.ns + slope * (t0_theirs_ns - self.before.ns - self.before.at_ns) / (1 + slope)
        return t0_theirs_ns - at_start - t0_ours_ns, 1 / (1 + slope)

    def _offset_ns(self, ours_ns: int) -> float:
        return self.before.ns + self._slope * (ours_ns - self.before.at_ns)


class ClockServer:
    """Answers exchanges with this process's monotonic clock, by UDP and by TCP on one port, until closed."""

    def __init__(self, host: str = "") -> None:
        self._tcp = socket.create_server((host, 0))
        self.port: int = self._tcp.getsockname()[1]
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._udp.bind((host, self.port))
        except OSError:
            self._tcp.close()
            self._udp.close()
            raise
        for serve in (self._serve_udp, self._serve_tcp):
            threading.Thread(target=serve, name="clock", daemon=True).start()

    def close(self) -> None:
        for sock in (self._udp, self._tcp):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _serve_udp(self) -> None:
        while True:
            try:
                data, address = self._udp.recvfrom(64)
                t2 = now()
                if pong := _answer(data, t2):
                    self._udp.sendto(pong, address)
            except OSError:
                if self._udp.fileno() < 0:
                    return

    def _serve_tcp(self) -> None:
        while True:
            try:
                conn, _ = self._tcp.accept()
            except OSError:
                return
            threading.Thread(target=_serve_stream, args=(conn,), name="clock-tcp", daemon=True).start()


def _serve_stream(conn: socket.socket) -> None:
    with conn, contextlib.suppress(OSError):
        conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := conn.recv(_PING.size, socket.MSG_WAITALL):
            if not (pong := _answer(data, now())):
                return
            conn.sendall(pong)


def _answer(data: bytes, t2_ns: int) -> bytes | None:
    if len(data) != _PING.size:
        return None
    magic, number = _PING.unpack(data)
    return _PONG.pack(magic, number, t2_ns, now()) if magic == _MAGIC else None


class ClockClient:
    """Asks one worker's clock: by datagrams, or over TCP where none comes through."""

    def __init__(self, address: tuple[str, int], timeout_s: float = TIMEOUT_S) -> None:
        self._address, self._number = address, 0
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.settimeout(timeout_s)
        self._sock.connect(address)
        self._timeout_s = timeout_s
        self.transport = "udp"

    def offset(self, n: int = N_EXCHANGES) -> Offset:
        """The offset by `n` exchanges, one after another. ClockError where none is answered."""
        return Offset.of(list(self._volley(n)))

    def close(self) -> None:
        self._sock.close()

    def _volley(self, n: int) -> Iterable[Exchange]:
        n_lost = 0
        for _ in range(n):
            exchange = self._once()
            if exchange is not None:
                n_lost = 0
                yield exchange
            elif (n_lost := n_lost + 1) >= GIVE_UP_AFTER:
                if self._number == n_lost and self.transport == "udp":
                    self._use_tcp()
                    n_lost = 0
                else:
                    return

    def _once(self) -> Exchange | None:
        self._number += 1
        try:
            t1 = now()
            self._sock.send(_PING.pack(_MAGIC, self._number))
            while True:
                data = self._sock.recv(_PONG.size, *self._whole())
                t4 = now()
                if len(data) != _PONG.size:
                    return None
                magic, number, t2, t3 = _PONG.unpack(data)
                if magic == _MAGIC and number == self._number:  # else a late answer to an earlier question
                    return Exchange(t1, t2, t3, t4)
        except OSError:
            return None

    def _whole(self) -> tuple[int, ...]:
        return (socket.MSG_WAITALL,) if self.transport == "tcp" else ()

    def _use_tcp(self) -> None:
        self._sock.close()
        try:
            self._sock = socket.create_connection(self._address, timeout=4 * self._timeout_s)
        except OSError as error:
            raise ClockError(
                f"{self._address[0]}:{self._address[1]} answers neither UDP nor TCP: {error}"
            ) from None
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.transport = "tcp"


class ClockWatch:
    """Asks several workers' clocks again and again during a run; tells who has not answered lately.

    `offsets[k]` grows by one small volley of worker k each `period_s`; `on_silent(k)` is called once, when
    worker k has not answered for `patience_s`.
    """

    def __init__(
        self,
        clients: Sequence[ClockClient],
        on_silent: Callable[[int], None],
        period_s: float = 1.0,
        patience_s: float = 5.0,
    ) -> None:
        self.offsets: list[list[Offset]] = [[] for _ in clients]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._watch, args=(k, client, on_silent, period_s, patience_s), daemon=True
            )
            for k, client in enumerate(clients)
        ]

    def __enter__(self) -> ClockWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _watch(
        self,
        k: int,
        client: ClockClient,
        on_silent: Callable[[int], None],
        period_s: float,
        patience_s: float,
    ) -> None:
        heard_ns, silent = now(), False
        while not self._stop.wait(period_s):
            try:
                self.offsets[k].append(client.offset(8))
                heard_ns, silent = now(), False
            except ClockError:
                if not silent and now() - heard_ns > patience_s * 1e9:
                    silent = True
                    on_silent(k)
