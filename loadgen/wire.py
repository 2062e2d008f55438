"""The only timed sockets: one thread that sends each request when it is due and stamps every read.

Order of work on a read: the stamp, the bytes, the question whether the message has ended. Nothing is parsed,
nothing is logged, nothing is handed to another thread while bytes wait.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from typing import Any

from loadgen.clock import Offsets
from loadgen.exchange import Exchange
from loadgen.poller import IN, OUT, new_poller
from loadgen.pool import Connection, Pool
from loadgen.schedule import Schedule
from loadgen.tls import Channel
from servers.engine import EngineError

_ANCILLARY_BYTES = socket.CMSG_SPACE(16)
_NO_TIMESPEC = bytes(16)
_READ_BYTES = 1 << 17
_MAX_EVENTS = 512

_OPEN_AHEAD_NS = 1_000_000_000
_TICK_NS = 50_000_000
_TICK_S = 0.05
_FD_SETSIZE = 1024
_SPIN_NS = 120_000
_NEVER = 2**63 - 1

now = time.monotonic_ns


class Wire:
    """Sends parked exchanges at their due times over connections to one server, and reads the replies.

    Nothing leaves before `release(t0_ns)`. Without `concurrency` the load is open-loop: what is due goes out,
    over a connection opened up to a second ahead. With it, at most that many are in flight and the next goes
    out on the very connection that became free. `deadline_s` counts from due, in a closed loop from dispatch
    (there the queue is ours). Ended exchanges are handed to `on_ended`, in the wire's own thread.
    Its methods may be called from any thread, its plain integers read from any. `counters` gets them every
    50 ms: connected, sent, begun, done, failed, reads, bytes.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[int, Any]],
        on_ended: Callable[[list[Exchange]], None],
        *,
        tls: ssl.SSLContext | None = None,
        host: str = "",
        deadline_s: float | None = None,
        concurrency: int | None = None,
        counters: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        self.offsets = Offsets()
        self.max_pass_ns = 0
        self.n_parked = self.n_dispatched = self.n_sent = self.n_begun = 0
        self.n_done = self.n_failed = self.n_resent = self.n_reads = self.n_bytes = 0
        self.error: BaseException | None = None
        self._on_ended = on_ended
        self._deadline_ns = None if deadline_s is None else int(deadline_s * 1e9)
        self._limit = _NEVER if concurrency is None else concurrency
        self._counters = counters
        self._poller = new_poller()
        self.pool = Pool(self._poller, addresses, tls, host)
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._poller.register(self._wake_in, IN)
        self._commands: deque[Callable[[], None]] = deque()
        self._t0_ns: int | None = None
        self._next_due = _NEVER
        self._schedule = Schedule(_OPEN_AHEAD_NS)
        self._waiting: deque[Exchange] = deque()
        self._in_flight: dict[Exchange, Connection | None] = {}
        self._ended: list[Exchange] = []
        self._when_open: list[Callable[[], None]] = []
        self.stopped = self._closed = False
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    # What others ask of the wire.

    def start(self) -> None:
        self.offsets.observe(now())
        self._thread.start()

    def park(self, exchange: Exchange) -> None:
        """Hold a serialised request until it is due."""
        self._ask(lambda: self._park(exchange))

    def cancel(self, exchange: Exchange) -> None:
        """Give one exchange up: "cancelled" once dispatched, "not_sent" before."""
        self._ask(lambda: self._give_up(exchange))

    def when_open(self, callback: Callable[[], None]) -> None:
        """Call back, in the wire's thread, when all that is due in the first second has its connection."""
        self._ask(lambda: self._when_open.append(callback))

    def release(self, t0_ns: int) -> None:
        """Let the run begin at `t0_ns` (monotonic)."""
        self._ask(lambda: self._release(t0_ns))

    def stop(self) -> None:
        """Send nothing more: what is in flight ends "cancelled", what is parked "not_sent"."""
        self._ask(self._stop)

    def close(self) -> None:
        """Stop, close every connection and end the thread."""
        self._ask(self._stop)
        self._ask(self._close)
        if self._thread.is_alive():
            self._thread.join()

    def _ask(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        with suppress(OSError):  # full: the wire is about to wake anyway; closed: it is gone
            os.write(self._wake_out, b"!")

    # The loop.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # our bug: every exchange must still end, and the cause be told
            self.error = error
            self._stop()
            self._obey()
        finally:
            self._hand_over()
            self.pool.close()
            self._poller.close()
            os.close(self._wake_in)
            os.close(self._wake_out)

    def _serve(self) -> None:
        """Read and send until closed. Every line in the inner loop costs its share of each token."""
        poll, by_fd, wake = self._poller.poll, self.pool.by_fd, self._wake_in
        view = memoryview(bytearray(2 * _READ_BYTES))
        buffers = [view[:_READ_BYTES]]
        n_reads = n_bytes = max_pass_ns = next_tick = 0
        at = now()
        while not self._closed:
            events = poll(_TICK_S if self._next_due - at > 2 * _TICK_NS else self._wait_s(at), _MAX_EVENTS)
            woken = at = now()
            for fd, flags in events:
                connection = by_fd.get(fd)
                if connection is None:  # our own pipe, or dropped earlier in this pass
                    if fd == wake:
                        self._obey()
                    continue
                exchange = connection.exchange
                if flags != IN or exchange is None:
                    exchange = self._attend(connection, flags)
                    if exchange is None:
                        continue
                try:
                    n, ancillary, _, _ = connection.recvmsg_into(buffers, _ANCILLARY_BYTES)
                    at = now()
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._lose(connection, error)
                    continue
                if n == 0:
                    self._lose(connection, None)
                    continue
                if connection.tls is not None:
                    n = self._decrypt(connection, connection.tls, view, n)
                    if n == 0:
                        continue
                exchange.add_at(at)
                exchange.add_length(n)
                stamps, data = exchange.kernel, exchange.data
                stamps += ancillary[0][2] if ancillary else _NO_TIMESPEC
                data += view[:n]
                n_reads += 1
                n_bytes += n
                if not data.endswith(exchange.mid_stream):
                    self._check(connection, exchange, at)
                if at >= self._next_due:
                    self._fire(at)
            if at - woken > max_pass_ns:
                self.max_pass_ns = max_pass_ns = at - woken
            if at >= self._next_due:
                self._fire(at)
            if at >= next_tick:
                next_tick = at + _TICK_NS
                self.n_reads, self.n_bytes = n_reads, n_bytes
                self._tick(at)
            if self._ended:
                self._hand_over()
        self.n_reads, self.n_bytes = n_reads, n_bytes
        self._publish()

    def _wait_s(self, at: int) -> float:
        """How long to poll when something falls due soon: to a little before, and then spin."""
        due_ns = self._next_due - at
        if due_ns > 3_000_000:
            return (due_ns // 1_000_000 - 1) * 1e-3
        if due_ns > _SPIN_NS and self._poller.fileno() < _FD_SETSIZE:
            # epoll counts in milliseconds, select in microseconds: sleep over most of what is left.
            select.select([self._poller], [], [], (due_ns - _SPIN_NS) * 1e-9)
        return 0.0

    def _tick(self, at: int) -> None:
        self.offsets.observe(at)
        self.pool.tick(at)
        self._refuse_waiting()
        self._expire(at)
        if self._when_open and self.pool.is_settled:
            callbacks, self._when_open = self._when_open, []
            for callback in callbacks:
                callback()
        self._publish()

    def _publish(self) -> None:
        if self._counters is not None:
            cells = (len(self.pool.by_fd), self.n_sent, self.n_begun, self.n_done, self.n_failed)
            for i, cell in enumerate((*cells, self.n_reads, self.n_bytes)):
                self._counters[i] = cell

    def _hand_over(self) -> None:
        ended, self._ended = self._ended, []
        self.pool.sweep()
        if ended:
            self._on_ended(ended)

    # Commands.

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake_in, 1 << 16)
        commands = self._commands
        while commands:
            commands.popleft()()

    def _park(self, exchange: Exchange) -> None:
        self.n_parked += 1
        if self.stopped:
            self._fail(exchange, "not_sent", None)
            return
        self._schedule.add(exchange)
        self._plan_ahead()

    def _release(self, t0_ns: int) -> None:
        self._t0_ns = t0_ns
        self._plan_ahead()

    def _give_up(self, exchange: Exchange) -> None:
        if exchange.closed_ns is None and exchange.failure is None:
            self._fail(exchange, "cancelled" if exchange in self._in_flight else "not_sent", None)

    def _stop(self) -> None:
        self.stopped = True
        parked = self._schedule.clear()
        self._waiting.clear()
        for exchange in [*self._in_flight, *parked]:
            self._give_up(exchange)
        self._plan_ahead()
        self._publish()

    def _close(self) -> None:
        self._closed = True

    # When to send.

    def _plan_ahead(self) -> None:
        """Have a connection ready for all that is due within a second, and know what is due next."""
        schedule, t0_ns = self._schedule, self._t0_ns
        schedule.look_ahead(0 if t0_ns is None else now() - t0_ns)
        n_free = self._limit - len(self._in_flight)
        self.pool.want(len(self._waiting) + min(len(schedule.soon), n_free))
        next_ns = schedule.next_ns(n_free > 0)
        self._next_due = _NEVER if t0_ns is None or next_ns is None else t0_ns + next_ns

    def _fire(self, at: int) -> None:
        """Send all that is due."""
        soon, in_flight, limit, send = self._schedule.soon, self._in_flight, self._limit, self._send
        idle, waiting = self.pool.idle, self._waiting
        since_t0 = at - (self._t0_ns or 0)
        while soon and soon[0][0] <= since_t0 and len(in_flight) < limit:
            exchange = soon.popleft()[2]
            if exchange.failure is not None:
                continue
            exchange.dispatched_ns = now()
            self.n_dispatched += 1
            if idle:
                send(idle.popitem()[0], exchange)
            else:
                in_flight[exchange] = None
                waiting.append(exchange)
        self._plan_ahead()

    def _send(self, connection: Connection, exchange: Exchange) -> None:
        self._in_flight[exchange] = connection
        connection.exchange = exchange
        if not connection.used:
            exchange.connected_ns = connection.connected_ns
        payload = exchange.payload if connection.tls is None else connection.tls.encrypt(exchange.payload)
        self._write(connection, exchange, payload)

    def _write(self, connection: Connection, exchange: Exchange, data: bytes | memoryview) -> None:
        try:
            n = connection.sock.send(data)
        except BlockingIOError:
            n = 0
        except OSError as error:
            self._lose(connection, error)
            return
        if n == len(data):
            exchange.sent_ns = now()
            self.n_sent += 1
            if connection.unsent is not None:
                connection.unsent = None
                self._poller.modify(connection.fd, IN)
        else:
            if connection.unsent is None:
                self._poller.modify(connection.fd, IN | OUT)
            connection.unsent = memoryview(data)[n:]

    def _expire(self, at: int) -> None:
        """Give up what has passed its deadline. What was dispatched first stands first and expires first."""
        limit_ns, t0_ns = self._deadline_ns, self._t0_ns
        if limit_ns is None or t0_ns is None:
            return
        late = []
        for exchange in self._in_flight:
            start_ns = t0_ns + exchange.due_ns if self._limit == _NEVER else exchange.dispatched_ns or at
            if at < start_ns + limit_ns:
                break
            late.append(exchange)
        for exchange in late:
            self._fail(exchange, "timeout", f"no end of the reply within {limit_ns / 1e9:g} s")

    # What comes back.

    def _attend(self, connection: Connection, flags: int) -> Exchange | None:
        """All that is not the plain read of a reply; the exchange where there is one to read for besides."""
        exchange = connection.exchange
        if connection.connected_ns is None:
            if self.pool.advance(connection):
                self._serve_waiting()
            self._refuse_waiting()
        elif exchange is None:
            self._attend_idle(connection)
        elif flags & OUT and connection.unsent is not None:
            self._write(connection, exchange, connection.unsent)
        return connection.exchange if exchange is not None and flags != OUT else None

    def _attend_idle(self, connection: Connection) -> None:
        """The server has closed an idle connection, or speaks unasked: only TLS may (its session tickets)."""
        with suppress(OSError):
            received = connection.sock.recv(_READ_BYTES)
            if received and connection.tls is not None:
                connection.tls.feed(memoryview(received))
                if not connection.tls.decrypt():
                    return
        self._lose(connection, None)

    def _decrypt(self, connection: Connection, tls: Channel, view: memoryview, n: int) -> int:
        """Turn the `n` bytes in `view` into plain text, in place; its length, 0 where no record is whole."""
        try:
            tls.feed(view[:n])
            plain = tls.decrypt()
        except ssl.SSLError as error:
            self._lose(connection, error)
            return 0
        view[: len(plain)] = plain
        return len(plain)

    def _check(self, connection: Connection, exchange: Exchange, at: int) -> None:
        """Finish the exchange if its message has ended."""
        begun = exchange.begun
        try:
            whole = exchange.is_whole()
        except EngineError as error:
            self._fail(exchange, "truncated", str(error))
            return
        self.n_begun += exchange.begun and not begun
        if whole:
            self._finish(connection, exchange, at)

    def _finish(self, connection: Connection, exchange: Exchange, at: int) -> None:
        exchange.closed_ns = at
        connection.exchange = None
        del self._in_flight[exchange]
        self._ended.append(exchange)
        self.n_done += 1
        if connection.is_open and connection.unsent is None and exchange.is_exact():
            connection.used = True
            self.pool.idle[connection] = None
            self._serve_waiting()
        else:
            if connection.is_open:
                self.pool.drop(connection)
            self._plan_ahead()  # who waits needs another
        if self._schedule.soon:  # in a closed loop the next may go at once
            self._next_due = min(self._next_due, (self._t0_ns or 0) + self._schedule.soon[0][0])

    def _fail(self, exchange: Exchange, failure: str, detail: str | None) -> None:
        exchange.failure, exchange.detail = failure, detail
        if failure != "not_sent":
            exchange.closed_ns = now()
        connection = self._in_flight.pop(exchange, None)
        if connection is not None and connection.is_open:
            connection.exchange = None
            self.pool.drop(connection)
        self._ended.append(exchange)
        self.n_failed += 1
        self._plan_ahead()

    def _lose(self, connection: Connection, error: OSError | None) -> None:
        """The connection has ended: in order (`error` None) or not."""
        exchange = connection.exchange
        connection.exchange = None
        self.pool.drop(connection)
        if exchange is None:
            self._plan_ahead()  # closed while idle: replaced before anybody needs it
        elif connection.used and not exchange.data and not exchange.resent:
            self._resend(exchange)
        elif error is not None:
            self._fail(exchange, "reset", str(error))
        else:
            self._end(connection, exchange)

    def _end(self, connection: Connection, exchange: Exchange) -> None:
        try:
            if exchange.is_whole_at_eof():
                self._finish(connection, exchange, now())
                return
            detail = f"the server closed the connection {len(exchange.data)} bytes into an unfinished reply"
        except EngineError as error:
            detail = str(error)
        self._fail(exchange, "truncated", detail)

    def _resend(self, exchange: Exchange) -> None:
        """Once more over a fresh connection: the server closed an idle one just as we wrote to it.

        RFC 9112, 9.3.1 allows it where no byte of a reply came; every HTTP client with a pool does it.
        """
        exchange.resent = True
        exchange.sent_ns = None
        self.n_resent += 1
        self._in_flight[exchange] = None
        self._waiting.append(exchange)
        self.pool.open_another()

    def _serve_waiting(self) -> None:
        while self._waiting and self.pool.idle:
            exchange = self._waiting.popleft()
            connection = self.pool.take() if exchange.failure is None else None
            if connection is not None:
                self._send(connection, exchange)

    def _refuse_waiting(self) -> None:
        """What waits for a connection that cannot be had has failed."""
        if self._waiting and self.pool.failure is not None and self.pool.is_settled:
            waiting, self._waiting = self._waiting, deque()
            for exchange in waiting:
                if exchange.failure is None:
                    self._fail(exchange, "connect", self.pool.failure)
