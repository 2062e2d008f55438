"""One clock over machines: how far a worker's monotonic clock is from ours, and how far off that may be.

Each exchange is one small datagram each way, stamped at both ends, outside Ray's own RPC. A worker's clock
ahead of ours by θ satisfies `t2 - θ >= t1` on the way out and `t3 - θ <= t4` on the way back, whatever each
way took, so every exchange confines θ to [t3 - t4, t2 - t1]. The intersection over many exchanges holds θ
with certainty, also where one direction is slower than the other (K. Marzullo, S. Owicki, "Maintaining the
time in a distributed system", 1983); its width is at most the least round trip.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from burstline.loadgen.record.drive_report import ClockError, ClockExchange, Offset

_PING: Final = struct.Struct("<4sQQ")
_PONG: Final = struct.Struct("<4sQqq")
_MAGIC: Final = b"BLK2"
N_EXCHANGES: Final = 64
TIMEOUT_S: Final = 0.25
GIVE_UP_AFTER: Final = 8
"""Datagrams lost in a row before a volley ends; before the first answer, before TCP is tried instead."""
SILENCE_S: Final = 3.0
"""After so long without a word the other side is given up, by both sides."""


now = time.monotonic_ns


class ClockServer:
    """Answers exchanges with this process's monotonic clock, by UDP and by TCP on one port, until closed.

    Each question says which answer came last, so that silence is known here even where only the way back to
    the client is cut.
    """

    def __init__(self, host: str = "") -> None:
        self._tcp = socket.create_server((host, 0))
        self.port: int = self._tcp.getsockname()[1]
        self._confirmed, self._heard_ns = 0, now()
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._udp.bind((host, self.port))
        except OSError:
            self._tcp.close()
            self._udp.close()
            raise
        for serve in (self._serve_udp, self._serve_tcp):
            threading.Thread(target=serve, name="clock", daemon=True).start()

    def silent_s(self) -> float:
        """Seconds since the last sign that the client hears us."""
        return (now() - self._heard_ns) / 1e9

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
                if pong := self._answer(data, t2):
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
            threading.Thread(target=self._serve_stream, args=(conn,), name="clock-tcp", daemon=True).start()

    def _serve_stream(self, conn: socket.socket) -> None:
        with conn, contextlib.suppress(OSError):
            conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := conn.recv(_PING.size, socket.MSG_WAITALL):
                if not (pong := self._answer(data, now())):
                    return
                conn.sendall(pong)

    def _answer(self, data: bytes, t2_ns: int) -> bytes | None:
        if len(data) != _PING.size:
            return None
        magic, number, confirmed = _PING.unpack(data)
        if magic != _MAGIC:
            return None
        if confirmed > self._confirmed:
            self._confirmed, self._heard_ns = confirmed, t2_ns
        return _PONG.pack(magic, number, t2_ns, now())


class ClockClient:
    """Asks one worker's clock: by datagrams, or over TCP where none comes through."""

    def __init__(self, address: tuple[str, int], timeout_s: float = TIMEOUT_S) -> None:
        self._address, self._number, self._answered = address, 0, 0
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.settimeout(timeout_s)
        self._sock.connect(address)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self.transport = "udp"

    def offset(self, n: int = N_EXCHANGES) -> Offset:
        """The offset by `n` exchanges, one after another. ClockError where none is answered."""
        with self._lock:
            return Offset.of(list(self._volley(n)))

    def close(self) -> None:
        self._sock.close()

    def _volley(self, n: int) -> Iterable[ClockExchange]:
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

    def _once(self) -> ClockExchange | None:
        self._number += 1
        try:
            t1 = now()
            self._sock.send(_PING.pack(_MAGIC, self._number, self._answered))
            while True:
                data = self._sock.recv(_PONG.size, *self._whole())
                t4 = now()
                if len(data) != _PONG.size:
                    return None
                magic, number, t2, t3 = _PONG.unpack(data)
                if magic == _MAGIC and number == self._number:  # else a late answer to an earlier question
                    self._answered = number
                    return ClockExchange(t1, t2, t3, t4)
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
    """Measures several workers' clocks repeatedly during a run, and reports a worker that stops answering.

    `offsets[k]` grows by one small volley of worker k each `period_s`; `on_silent(k)` is called once, when
    worker k has not answered for `patience_s`.
    """

    def __init__(
        self,
        clients: Sequence[ClockClient],
        on_silent: Callable[[int], None],
        period_s: float = 1.0,
        patience_s: float = SILENCE_S,
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
