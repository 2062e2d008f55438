"""Waits for the sockets and reads replies in mid-stream; reports only what the wire must act on.

This is the wire's inner loop, in Python alone: `docs/decisions/0006-one-reader-in-python.md` says why.
Order of work on a read: the bytes, the stamp, the question whether the stream just goes on.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from burstline.loadgen.wire.exchange import MID_STREAM, NEVER
from burstline.loadgen.wire.exchange import READ as ROW
from burstline.loadgen.wire.pool import IN, Connection, Poller

READ: Final = 1 << 16
"""Reported of a followed connection: bytes were read; they may be the last, or there is no room for more."""
LOST: Final = 1 << 17
"""Reported of a followed connection, with an errno in the lower bits: it has ended (0: in order)."""

READ_BYTES: Final = 1 << 17
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(16)
NO_TIMESPEC: Final = bytes(16)
_MAX_EVENTS = 512
_FD_SETSIZE = 1024
_SPIN_NS = 120_000
_SLEPT_NS = 50_000

_Stream = tuple[Callable[..., tuple[int, list[tuple[int, int, bytes]], int, Any]], bytearray, bytearray, int]
"""Of a followed connection how to read, its exchange's reads and data, and how long the data may grow."""

now = time.monotonic_ns


class Reader:
    """Waits for all sockets of a poller and reads the followed ones into their exchanges.

    `n_reads` and `n_bytes` count what it has read, `woken_ns` is when its latest pass over ready sockets
    began, `max_pass_ns` how long one ever took. `polled_ns` is when we
    last asked for every ready socket before this pass: its bytes came later.
    """

    def __init__(self, poller: Poller) -> None:
        self.n_reads = self.n_bytes = self.woken_ns = self.max_pass_ns = self.polled_ns = 0
        self._complete_ns = 0
        self._poller = poller
        self._followed: dict[int, _Stream] = {}
        self._view = memoryview(bytearray(READ_BYTES))

    def wait(self, due_ns: int, tick_ns: int) -> list[tuple[int, int]]:
        """Read until the wire is needed: (file descriptor, READ or LOST or the poller's own flags).

        Comes back empty as soon as `due_ns` (to a few microseconds) or `tick_ns` has come. What is reported
        by the poller's flags has not been read. Every line of the inner loop costs its share of each token.
        """
        poll, followed, view, pack = self._poller.poll, self._followed, self._view, ROW.pack
        buffers = [view]
        reports: list[tuple[int, int]] = []
        n_reads = n_bytes = 0
        at = now()
        # A due time cuts a pass short, unless it had come before: else a burst would stop all reading.
        stop_ns = due_ns if at < due_ns else NEVER
        while True:
            wait_s = self._wait_s(at, due_ns, tick_ns)
            asked = now()
            events = poll(wait_s, _MAX_EVENTS)
            woken = at = now()
            if woken - asked > _SLEPT_NS:
                # When the kernel made this list is unknown: we may have been stopped since. Have a new one.
                asked = woken
                events = poll(0.0, _MAX_EVENTS)
                woken = at = now()
            polled = self.polled_ns = self._complete_ns
            # A list shorter than the limit holds every socket that was ready when we asked for it: what a
            # later pass reads came after that.
            if len(events) < _MAX_EVENTS:
                self._complete_ns = asked
            for fd, flags in events:
                if at >= stop_ns:  # the events that are left are reported again: epoll is level-triggered
                    self._complete_ns = polled
                    break
                stream = followed.get(fd)
                if stream is None or flags != IN:
                    reports.append((fd, flags))
                    continue
                recvmsg_into, rows, data, most_bytes = stream
                try:
                    n, ancillary, _, _ = recvmsg_into(buffers, ANCILLARY_BYTES)
                    at = now()  # before anything else is done with the bytes: this is the stamp
                except BlockingIOError:  # another pass has read it: the poller's list is older than that
                    continue
                except OSError as error:
                    reports.append((fd, LOST | (error.errno or 0)))
                    continue
                if n == 0:
                    reports.append((fd, LOST))
                    continue
                # In place: both buffers belong to the exchange, which reads them when it has ended.
                rows += pack(at, ancillary[0][2] if ancillary else NO_TIMESPEC, n, polled)
                data += view[:n]
                n_reads += 1
                n_bytes += n
                if len(data) > most_bytes or not data.endswith(MID_STREAM):
                    reports.append((fd, READ))
            if at - woken > self.max_pass_ns:
                self.max_pass_ns = at - woken
            if reports or at >= due_ns or at >= tick_ns:
                break
        self.woken_ns = woken
        self.n_reads += n_reads
        self.n_bytes += n_bytes
        return reports

    def _wait_s(self, at_ns: int, due_ns: int, tick_ns: int) -> float:
        """How long to poll: until the tick, or to a little before what is due, and then spin."""
        left_ns = min(due_ns - _SPIN_NS, tick_ns) - at_ns
        if left_ns >= 1_000_000:
            # epoll counts in milliseconds and rounds up: the least more than 9 of them would be 10.
            return (left_ns // 1_000_000 - 0.5) / 1000
        if left_ns > 0 and self._poller.fileno() < _FD_SETSIZE:
            # select counts in microseconds.
            select.select([self._poller], [], [], left_ns * 1e-9)
        return 0.0

    def follow(self, connection: Connection) -> None:
        """From now on the reads of this connection's exchange, which is in mid-stream, are this reader's."""
        # A descriptor names one connection until `Pool.sweep` closes it, which comes after `leave`.
        exchange = connection.exchange
        assert exchange is not None
        self._followed[connection.fd] = (
            connection.recvmsg_into,
            exchange.reads,
            exchange.data,
            min(exchange.cut_at, exchange.max_bytes - exchange.n_cut),
        )

    def leave(self, connection: Connection) -> None:
        """Follow it no longer."""
        self._followed.pop(connection.fd, None)
