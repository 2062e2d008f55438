"""The only timed sockets: one thread that sends each request when it is due and stamps every read.

Nothing is parsed, nothing is logged, nothing is handed to another thread while bytes wait. Whatever a server
sends can end its own exchange, never the thread: every exception on a connection fails that exchange alone.
"""

import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, MutableSequence, Sequence
from contextlib import suppress
from select import epoll
from typing import Any

from burstline.loadgen.wire.clock import Offsets
from burstline.loadgen.wire.dispatcher import Dispatcher
from burstline.loadgen.wire.exchange import NEVER, Exchange
from burstline.loadgen.wire.network import ERR, Network, is_remote
from burstline.loadgen.wire.pool import IN, OUT, Connection, Pool
from burstline.loadgen.wire.reader import ENDED, READ, Reader

_TICK_NS = 50_000_000
_CANARY_PART_BYTES = 1 << 16

now = time.monotonic_ns


class Wire:
    """Sends parked exchanges at their due times over connections to one server, and reads the replies.

    Nothing leaves before `release(t0_ns)`. Without `concurrency` the load is open-loop: what is due goes out,
    over a connection opened up to a second ahead. With it, at most that many are in flight and the next goes
    out on the very connection that became free; what is left after `until_s` is never sent. `deadline_s`
    counts from due, in a closed loop from dispatch (there the queue is ours). Ended exchanges are handed to
    `on_ended`, in the wire's own thread. Its methods may be called from any thread, its plain integers and
    those of `traffic` read from any. `counters` gets them every 50 ms: connected, sent, begun, done, failed,
    reads, bytes.
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
        until_s: float | None = None,
        counters: MutableSequence[int] | memoryview | None = None,
    ) -> None:
        self.offsets = Offsets()
        self.error: BaseException | None = None
        self.max_pass_ns = 0
        self.cpu_wait_s: float | None = None
        self._canary: Connection | None = None
        self._canary_said = Exchange()
        self._on_ended = on_ended
        self._counters = counters
        self._poller = epoll()
        self.reader = Reader(self._poller)
        self.network = Network(is_remote=is_remote(addresses))
        self.pool = Pool(self._poller, addresses, tls, host, self.network)
        self.traffic = Dispatcher(self._poller, self.reader, self.pool, deadline_s, concurrency, until_s)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._wake, IN)
        self._commands: deque[Callable[[], None]] = deque()
        self._when_open: list[Callable[[], None]] = []
        self._closed = self._ended = False
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    # Called from any thread.

    def start(self) -> None:
        self.offsets.observe(now())
        self._thread.start()

    def park(self, *exchanges: Exchange) -> None:
        """Hold serialised requests until they are due; "not_sent" at once where the thread has ended."""
        self._ask(lambda: self.traffic.park(*exchanges))
        # The thread sets `_ended` before it obeys for the last time: one that reads False here was heard.
        if self._ended:
            self._thread.join()  # it may be ending some of these
            unheard = [exchange for exchange in exchanges if exchange.failure is None]
            for exchange in unheard:
                exchange.failure = "not_sent"
            self._on_ended(unheard)

    def when_open(self, callback: Callable[[], None]) -> None:
        """Call back, in the wire's thread, when all that is due in the first second has its connection."""
        self._ask(lambda: self._when_open.append(callback))

    def watch_canary(self, exchange: Exchange, port: int, on_part: Callable[[Exchange], None]) -> None:
        """Read the canary's events into `exchange` over its own connection, on the loopback.

        What came goes to `on_part`, in the wire's thread, a part at a time; the last one when the wire ends.
        """
        exchange.on_part, exchange.cut_at = on_part, _CANARY_PART_BYTES
        exchange.max_bytes = NEVER  # it is not kept, so that it may last
        self._ask(lambda: self._open_canary(exchange, port))

    def release(self, t0_ns: int) -> None:
        self._ask(lambda: self.traffic.release(t0_ns))

    def end(self) -> None:
        """Send nothing more, and let what is in flight end by itself; what is parked ends "not_sent"."""
        self._ask(self.traffic.end)

    def stop(self) -> None:
        """Send nothing more: what is in flight ends "cancelled", what is parked "not_sent"."""
        self._ask(self._stop)

    def close(self) -> None:
        self._ask(self._stop)
        self._ask(self._close)
        if self._thread.is_alive():
            self._thread.join()

    def _ask(self, command: Callable[[], None]) -> None:
        # A deque's append and popleft are atomic: commands need no lock. The event only wakes the poller.
        self._commands.append(command)
        with suppress(OSError, ValueError):  # closed, or -1: the wire is gone
            os.eventfd_write(self._wake, 1)

    # The loop.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # our bug: every exchange must still end, and the cause be reported
            self.error = error
        finally:
            # Before the last `_obey`: a command that comes later sees the flag (`park`).
            self._ended = True
            with suppress(Exception):
                self.traffic.stop()
                self._obey()
                if self._canary is not None:
                    if self._canary.is_open:
                        self.reader.leave(self._canary)
                    if self._canary_said.on_part is not None:
                        self._canary_said.on_part(self._canary_said)
            self._hand_over()
            self.cpu_wait_s = self.reader.cpu.close()
            self.pool.close()
            self._poller.close()
            # The number first: another thread may still write to it, and a closed descriptor's number may by
            # then be another file's. A write to -1 fails, which `_ask` expects.
            wake, self._wake = self._wake, -1
            os.close(wake)

    def _serve(self) -> None:
        """Send, and take what the reader does not, until closed."""
        traffic, reader, by_fd = self.traffic, self.reader, self.pool.by_fd
        next_tick = 0
        while not self._closed:
            at = 0
            for fd, what in reader.wait(traffic.next_due_ns, next_tick):
                # Dropped sockets are closed at the end of the pass (`Pool.sweep`), so that within it no
                # new connection can have the number of an old one whose events are still in this list.
                connection = by_fd.get(fd)
                if connection is not None:
                    try:
                        self._take(connection, what)
                    except Exception as error:  # must end no other exchange
                        traffic.break_off(connection, error)
                elif fd == self._wake:
                    self._obey()
                # else dropped earlier in this pass
                # After each event, not after all of them: a due request must not wait for the rest.
                at = now()
                if at >= traffic.next_due_ns:
                    traffic.fire(at)
            self.max_pass_ns = max(self.max_pass_ns, reader.max_pass_ns, at - reader.woken_ns)
            at = now()
            if at >= traffic.next_due_ns:
                traffic.fire(at)
            if at >= next_tick:
                next_tick = at + _TICK_NS
                self._tick(at)
            if self._when_open and self.pool.is_settled:  # at once: a load waits to begin
                callbacks, self._when_open = self._when_open, []
                for callback in callbacks:
                    callback()
            self._hand_over()
        self._publish()

    def _tick(self, at: int) -> None:
        self.offsets.observe(at)
        self.pool.tick(at)
        self.traffic.refuse_waiting()
        self.traffic.expire(at)
        self.traffic.hang_up()
        self._publish()

    def _publish(self) -> None:
        # Every cell is an aligned int64 with one writer, so readers in other processes need no lock.
        traffic, reader = self.traffic, self.reader
        if self._counters is not None:
            cells = (len(self.pool.by_fd), traffic.n_sent, traffic.n_begun, traffic.n_done, traffic.n_failed)
            # The canary goes on where the server has fallen silent: its bytes are none of the load's.
            n_bytes = reader.n_bytes - self._canary_said.n_bytes
            for i, cell in enumerate((*cells, traffic.n_unsent, reader.n_reads, n_bytes)):
                self._counters[i] = cell

    def _hand_over(self) -> None:
        self.pool.sweep()
        if ended := self.traffic.take_ended():
            self._on_ended(ended)

    def _obey(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        # After the read: a command appended later writes again, so none is left behind.
        commands = self._commands
        while commands:
            commands.popleft()()

    def _stop(self) -> None:
        self.traffic.stop()
        self._publish()

    def _close(self) -> None:
        self._closed = True

    def _open_canary(self, exchange: Exchange, port: int) -> None:
        connection = self.pool.adopt(socket.create_connection(("127.0.0.1", port)))
        connection.exchange, self._canary = exchange, connection
        self._canary_said = exchange
        self.reader.follow(connection)
        connection.sock.send(exchange.payload)
        exchange.sent_ns = now()

    # What comes back.

    def _take(self, connection: Connection, what: int | OSError) -> None:
        """What the reader reports of a connection: it has read, has met the end, or leaves it to us."""
        if isinstance(what, OSError):
            self.traffic.lose(connection, what)
        elif what == ENDED:
            self.traffic.lose(connection, None)
        elif what != READ:
            self._attend(connection, what)
        elif connection.exchange is not None:
            self._look(connection, connection.exchange)

    def _attend(self, connection: Connection, flags: int) -> None:
        """A socket that is opening, idle, ready to take more, or that has stamps of what it sent."""
        exchange = connection.exchange
        if flags & ERR and self.network.is_remote and connection.connected_ns is not None:
            self.network.read_stamps(connection.sock, exchange)
            if flags == ERR:
                return
        if connection.connected_ns is None:
            if self.pool.advance(connection):
                self.traffic.serve_waiting()
            self.traffic.refuse_waiting()
        elif exchange is None:
            self._attend_idle(connection)
        elif flags & OUT and connection.unsent is not None:
            self.traffic.write(connection, exchange, connection.unsent)

    def _attend_idle(self, connection: Connection) -> None:
        """The server has closed an idle connection, or speaks unasked: only TLS may (its session tickets)."""
        with suppress(OSError):
            received = connection.sock.recv(1 << 16)
            tls = connection.tls
            if received and tls is not None and not tls.decrypted(received) and not tls.closed:
                return
        self.traffic.lose(connection, None)

    def _look(self, connection: Connection, exchange: Exchange) -> None:
        """Whether the exchange has ended or is to be cut, where its last bytes do not say that it goes on."""
        data = exchange.data
        if exchange.n_bytes > exchange.max_bytes:
            detail = f"the reply is larger than {exchange.max_bytes:,} bytes and has not ended"
            self.traffic.fail(exchange, "too_large", detail)
        elif len(data) > exchange.cut_at or not data.endswith(exchange.mid_stream):
            self.traffic.check(connection, exchange)
