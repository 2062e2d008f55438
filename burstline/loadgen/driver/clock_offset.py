"""The offset of a worker's monotonic clock from ours, with its error bound.

Each exchange is one small message each way over a TCP connection of its own, stamped at both ends. A worker's
clock ahead of ours by θ satisfies `t2 - θ >= t1` on the way out and `t3 - θ <= t4` on the way back, whatever
each way took, so every exchange confines θ to [t3 - t4, t2 - t1]. The intersection over many exchanges holds
θ with certainty, also where one direction is slower than the other (K. Marzullo, S. Owicki, "Maintaining the
time in a distributed system", 1983); its width is at most the least round trip.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Final

from burstline.loadgen.capture.drive_report import ClockExchange, Offset
from burstline.servers.host.kernel import send_at_once

_PING: Final = struct.Struct("<QQ")
_PONG: Final = struct.Struct("<Qqq")
N_EXCHANGES: Final = 64
TIMEOUT_S: Final = 0.25
GIVE_UP_AFTER: Final = 8
"""Questions without an answer in a row before a volley ends."""
SILENCE_S: Final = 3.0
"""After so long without a word the other side is given up, by both sides."""


now = time.monotonic_ns


class ClockAnswers:
    """Answers exchanges on a socket with this process's monotonic clock, until it is closed.

    Each question says which answer came last, so that silence is known here even where only the way to the
    other side is cut.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._confirmed, self._heard_ns = 0, now()
        send_at_once(sock)
        threading.Thread(target=self._serve, name="clock", daemon=True).start()

    def silent_s(self) -> float:
        """Seconds since the last sign that the other side hears us."""
        return (now() - self._heard_ns) / 1e9

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError, struct.error):
            while data := self._sock.recv(_PING.size, socket.MSG_WAITALL):
                t2 = now()
                number, confirmed = _PING.unpack(data)
                if confirmed > self._confirmed:
                    self._confirmed, self._heard_ns = confirmed, t2
                self._sock.sendall(_PONG.pack(number, t2, now()))


class ClockClient:
    """Asks the clock at the other end of a socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._number, self._answered = sock, 0, 0
        self._lock = threading.Lock()
        send_at_once(sock)
        sock.settimeout(TIMEOUT_S)

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
                return

    def _once(self) -> ClockExchange | None:
        self._number += 1
        try:
            t1 = now()
            self._sock.sendall(_PING.pack(self._number, self._answered))
            while data := self._sock.recv(_PONG.size, socket.MSG_WAITALL):
                t4 = now()
                number, t2, t3 = _PONG.unpack(data)
                if number == self._number:  # else a late answer to an earlier question
                    self._answered = number
                    return ClockExchange(t1, t2, t3, t4)
        except (OSError, struct.error):
            pass
        return None
