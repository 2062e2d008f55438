"""Read every reply, plain or over TLS, and timestamp its bytes; report only what the wire must act on.

This is the wire's inner loop, in Python alone: `docs/decisions/0006-one-reader-in-python.md` says why.
Order of work on a read: the bytes, the stamp, the question whether the stream just goes on.
"""

import select
import socket
import time
from collections.abc import Callable
from functools import cached_property
from select import epoll
from typing import Any, Final

from burstline.loadgen.wire.exchange import MID_STREAM, NEVER
from burstline.loadgen.wire.exchange import READ as ROW
from burstline.loadgen.wire.os_limits import CpuClock
from burstline.loadgen.wire.pool import IN, OUT, Channel, Connection

READ: Final = 1 << 16
"""Reported of a followed connection: bytes were read; they may be the last, or there is no room for more."""
ENDED: Final = 1 << 17
"""Reported of a followed connection: the peer has ended it, in order."""
WAKE_UP_NS: Final = 450_000
"""What a wake-up takes beyond the wait for a CPU: the interrupt, and under a hypervisor the way out of idle.

Measured in `tests/loadgen/test_bounds.py`: the bound fails for at most one event in a thousand.
"""

_READ_BYTES = 1 << 17
_ANCILLARY_BYTES = socket.CMSG_SPACE(16)
_NO_TIMESPEC = bytes(16)
_MAX_EVENTS = 512
_FD_SETSIZE = 1024
_SPIN_NS = 120_000

Report = tuple[int, int | OSError]
"""A file descriptor, and READ, ENDED, what broke the connection, or the poller's own flags."""
_Stream = tuple[
    Callable[..., tuple[int, list[tuple[int, int, bytes]], int, Any]],
    Channel | None,
    bytearray,
    bytearray,
    int,
]
"""Of a followed connection how to read and decrypt, its exchange's reads and data, and how long the data may
grow before every read is reported."""

now = time.monotonic_ns


class Reader:
    """Waits for all sockets of a poller and reads the followed ones into their exchanges.

    `n_reads` and `n_bytes` count what it has read, `woken_ns` is when its latest pass over ready sockets
    began, `max_pass_ns` how long one ever took. What a pass reads came after `_since_ns`.
    """

    def __init__(self, poller: epoll) -> None:
        self.n_reads = self.n_bytes = self.woken_ns = self.max_pass_ns = 0
        self._since_ns = 0
        self._poller = poller
        self._followed: dict[int, _Stream] = {}
        self._view = memoryview(bytearray(_READ_BYTES))

    @cached_property
    def cpu(self) -> CpuClock:
        """Of the thread that reads, which is the first to ask."""
        return CpuClock()

    def wait(self, due_ns: int, tick_ns: int) -> list[Report]:
        """Read until the wire is needed, or `due_ns` (to a few microseconds) or `tick_ns` has come.

        Every line of the inner loop costs its share of each token.
        """
        poll, followed, view, pack = self._poller.poll, self._followed, self._view, ROW.pack
        buffers = [view]
        reports: list[Report] = []
        n_reads = n_bytes = 0
        at = now()
        # A due time cuts a pass short, unless it had come before: else a burst would stop all reading.
        stop_ns = due_ns if at < due_ns else NEVER
        while True:
            asked = now()
            events = poll(0.0, _MAX_EVENTS)
            woken = at = now()
            since = self._since_ns
            # A list shorter than the limit holds every socket that was ready when we asked for it: what a
            # later pass reads came after that.
            if len(events) < _MAX_EVENTS:
                self._since_ns = asked
            for fd, flags in events:
                if at >= stop_ns:  # the events that are left are reported again: epoll is level-triggered
                    self._since_ns = since
                    break
                stream = followed.get(fd)
                if stream is None or flags != IN:
                    reports.append((fd, flags))
                    if stream is None or flags == OUT:
                        continue
                recvmsg_into, tls, rows, data, most_bytes = stream
                try:
                    n, ancillary, _, _ = recvmsg_into(buffers, _ANCILLARY_BYTES)
                    at = now()  # before anything else is done with the bytes: this is the stamp
                    piece: memoryview | bytes = view[:n]
                    if tls is not None and n:
                        piece = tls.decrypted(view[:n])
                        if tls.closed:
                            reports += ((fd, READ), (fd, ENDED))
                        n = len(piece)
                        if n == 0:  # of a record the rest is still to come, or it held no text
                            continue
                except BlockingIOError:  # another pass has read it: the poller's list is older than that
                    continue
                except OSError as error:
                    reports.append((fd, error))
                    continue
                if n == 0:
                    reports.append((fd, ENDED))
                    continue
                # In place: both buffers belong to the exchange, which reads them when it has ended.
                rows += pack(at, ancillary[0][2] if ancillary else _NO_TIMESPEC, n, since)
                data += piece
                n_reads += 1
                n_bytes += n
                if len(data) > most_bytes or not data.endswith(MID_STREAM):
                    reports.append((fd, READ))
            if at - woken > self.max_pass_ns:
                self.max_pass_ns = at - woken
            if reports or at >= due_ns or at >= tick_ns:
                break
            if not events:
                self._sleep(min(due_ns - _SPIN_NS, tick_ns) - at)
        self.woken_ns = woken
        self.n_reads += n_reads
        self.n_bytes += n_bytes
        return reports

    def _sleep(self, left_ns: int) -> None:
        """Wait for at most this long for a socket, where none was ready when we last asked.

        What came first woke us. So nothing came earlier than the wake-up, less the time that this thread
        then waited for a CPU, less WAKE_UP_NS. If it was given a CPU more than once it also slept elsewhere,
        for the interpreter's lock as a rule, and only the poll before is a bound.
        """
        if left_ns <= 0:
            return
        waited_ns, n_slices = self.cpu.read()
        if left_ns >= 1_000_000:
            self._poller.poll(in_milliseconds(left_ns), 1)
        elif self._poller.fileno() < _FD_SETSIZE:
            select.select([self._poller], [], [], left_ns * 1e-9)  # counts in microseconds
        else:
            return
        woken = now()
        if woken - self._since_ns <= WAKE_UP_NS:
            return  # the poll before is the better bound
        waited_later_ns, n_later = self.cpu.read()
        if n_later - n_slices == 1:
            self._since_ns = max(self._since_ns, woken - (waited_later_ns - waited_ns) - WAKE_UP_NS)

    def follow(self, connection: Connection) -> None:
        """From now on the reads of this connection's exchange are this reader's."""
        # A descriptor names one connection until `Pool.sweep` closes it, which comes after `leave`.
        exchange = connection.exchange
        assert exchange is not None
        self._followed[connection.fd] = (
            connection.recvmsg_into,
            connection.tls,
            exchange.reads,
            exchange.data,
            min(exchange.cut_at, exchange.max_bytes - exchange.n_cut) if exchange.mid_stream else -1,
        )

    def leave(self, connection: Connection) -> None:
        self._followed.pop(connection.fd, None)


def in_milliseconds(left_ns: int) -> float:
    """The longest wait, in seconds, that epoll does not make longer than this.

    It counts in milliseconds and rounds up: the least more than 9 of them would be 10.
    """
    return (left_ns // 1_000_000 - 0.5) / 1000
