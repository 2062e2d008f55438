"""Dispatch every request when it is due and follow it to its end, over a pool of connections."""

import heapq
import time
from collections import deque
from select import epoll

import zstandard

from burstline.loadgen.wire.exchange import NEVER, Exchange
from burstline.loadgen.wire.pool import IN, OUT, Connection, Pool
from burstline.loadgen.wire.reader import Reader
from burstline.servers.messages import EngineError


class Schedule:
    """Parked requests in order of due time, first parked first where that is equal.

    `soon` holds those due within `ahead_ns`, for whom a connection has to be ready: (due, order, exchange).
    """

    def __init__(self, ahead_ns: int) -> None:
        self.soon: deque[tuple[int, int, Exchange]] = deque()
        self._later: list[tuple[int, int, Exchange]] = []
        self._ahead_ns = ahead_ns
        self._n_added = 0

    def add(self, exchange: Exchange) -> None:
        self._n_added += 1
        heapq.heappush(self._later, (exchange.due_ns, self._n_added, exchange))

    def look_ahead(self, since_start_ns: int) -> None:
        """Move to `soon` what has come within reach."""
        later, soon = self._later, self.soon
        horizon_ns = max(since_start_ns, 0) + self._ahead_ns
        while later and later[0][0] <= horizon_ns:
            entry = heapq.heappop(later)
            soon.append(entry)
            if len(soon) > 1 and entry < soon[-2]:  # parked late, due early
                in_order = sorted(soon)
                soon.clear()  # in place: the wire may be in the middle of it
                soon.extend(in_order)

    def next_ns(self, may_send: bool) -> int | None:
        """When there is next something to do, None for never: a connection to open or a request to send."""
        due_ns = [self._later[0][0] - self._ahead_ns] if self._later else []
        if may_send and self.soon:
            due_ns.append(self.soon[0][0])
        return min(due_ns, default=None)

    def clear(self) -> list[Exchange]:
        """Everything parked, in order, which is then parked no more."""
        parked = [entry[2] for entry in sorted([*self.soon, *self._later])]
        self.soon.clear()
        self._later.clear()
        return parked


_OPEN_AHEAD_NS = 1_000_000_000
_STALE_NS = 2_000_000_000
_WAITING_BYTES = 1 << 27
"""Bytes held by all replies in flight above which parts are compressed; a thousand short ones never are."""
_LEAST_PART_BYTES = 1 << 12
_CLOSES_EACH, _SOON_NS = 8, 1_000_000_000
"""So many second uses in a row of a connection that the server had closed within a second of its reply show
that it closes each."""

now = time.monotonic_ns


def _was_stale(connection: Connection, exchange: Exchange) -> bool:
    """Whether a server may have ended the connection for being idle just as the request was written.

    One that was used, or that stood for seconds before its first request: llama.cpp gives that one 5 s.
    """
    stood_ns, sent_ns = connection.connected_ns, exchange.sent_ns
    return connection.used or (
        stood_ns is not None and sent_ns is not None and sent_ns - stood_ns > _STALE_NS
    )


class Dispatcher:
    """Requests that are parked, waiting for a connection, in flight, or ended since `take_ended`.

    Its plain integers and `over` may be read from any thread without a lock: one thread writes them, and a
    reader that is a moment late only waits a moment longer. All else belongs to the wire's thread.
    `next_due_ns` is when there is next something to do, absolute.

    Invariants: an exchange is in exactly one of the schedule, `_in_flight` and `_ended`. `_in_flight` keeps
    the order of dispatch (a dict does), so that the first entries expire first; its value is None while the
    exchange waits for a connection, and then it is in `_waiting` too.
    """

    def __init__(
        self,
        poller: epoll,
        reader: Reader,
        pool: Pool,
        deadline_s: float | None,
        concurrency: int | None,
        until_s: float | None = None,
    ) -> None:
        self.n_dispatched = self.n_sent = self.n_begun = 0
        self.n_done = self.n_failed = self.n_unsent = self.n_resent = 0
        self.over = False
        self.next_due_ns = NEVER
        self._poller, self._reader, self._pool = poller, reader, pool
        self._deadline_ns = None if deadline_s is None else int(deadline_s * 1e9)
        self._until_ns = NEVER if until_s is None else int(until_s * 1e9)
        self._limit = NEVER if concurrency is None else concurrency
        self._t0_ns: int | None = None
        self._schedule = Schedule(_OPEN_AHEAD_NS)
        self._waiting: deque[Exchange] = deque()
        self._in_flight: dict[Exchange, Connection | None] = {}
        self._limited: set[Exchange] = set()
        self._ended: list[Exchange] = []
        self._n_stale = 0
        self._compress = zstandard.ZstdCompressor(level=-1).compress

    def take_ended(self) -> list[Exchange]:
        ended, self._ended = self._ended, []
        return ended

    # Commands.

    def park(self, *exchanges: Exchange) -> None:
        for exchange in exchanges:
            if self.over:
                self.fail(exchange, "not_sent", None)
            else:
                self._schedule.add(exchange)
        self._plan_ahead()

    def release(self, t0_ns: int) -> None:
        self._t0_ns = t0_ns
        self._plan_ahead()

    def end(self) -> None:
        """Send nothing more; what is dispatched goes on."""
        self.over = True
        for exchange in self._schedule.clear():
            self.fail(exchange, "not_sent", None)

    def stop(self) -> None:
        """Send nothing more, and give everything up."""
        self.end()
        self._waiting.clear()
        for exchange in list(self._in_flight):
            self.fail(exchange, "cancelled", None)
        self._plan_ahead()

    # When to send.

    def _plan_ahead(self) -> None:
        """Have a connection ready for all that is due within a second, and know what is due next."""
        schedule, t0_ns = self._schedule, self._t0_ns
        schedule.look_ahead(0 if t0_ns is None else now() - t0_ns)
        n_free = self._limit - len(self._in_flight)
        spare = bool(schedule.soon) and self._n_stale >= _CLOSES_EACH  # for the next, when a reply ends
        self._pool.want(len(self._waiting) + min(len(schedule.soon), n_free) + spare)
        next_ns = schedule.next_ns(n_free > 0)
        self.next_due_ns = NEVER if t0_ns is None or next_ns is None else t0_ns + next_ns

    def fire(self, at_ns: int) -> None:
        soon, in_flight, limit, send = self._schedule.soon, self._in_flight, self._limit, self._send
        idle, waiting = self._pool.idle, self._waiting
        since_t0 = at_ns - (self._t0_ns or 0)
        if since_t0 >= self._until_ns:
            self.end()
        while soon and soon[0][0] <= since_t0 and len(in_flight) < limit:
            exchange = soon.popleft()[2]
            # Stamped for each: in a burst the last of a thousand leaves milliseconds after the first.
            exchange.dispatched_ns = now()
            self.n_dispatched += 1
            if idle:
                # The one used last: the server's idle timeout is furthest away for it.
                send(idle.popitem()[0], exchange)
            else:
                in_flight[exchange] = None
                waiting.append(exchange)
        self._plan_ahead()

    def _send(self, connection: Connection, exchange: Exchange) -> None:
        # Before the write: a write that fails must find the exchange in flight to end it.
        self._in_flight[exchange] = connection
        if exchange.hang_up_at is not None:
            self._limited.add(exchange)
        connection.exchange = exchange
        self._reader.follow(connection)
        if not connection.used:
            exchange.connected_ns = connection.connected_ns
        payload: bytes = exchange.payload
        if connection.tls is not None:
            try:
                payload = connection.tls.encrypt(payload)
            except OSError as error:  # SSLError is one: the server ended TLS while the connection was idle
                self.lose(connection, error)
                return
        self.write(connection, exchange, payload)

    def write(self, connection: Connection, exchange: Exchange, data: bytes | memoryview) -> None:
        """As much as the socket takes; the rest is sent when it takes more."""
        exchange.writing_ns = now()
        try:
            n = connection.sock.send(data)
        except BlockingIOError:
            n = 0
        except OSError as error:
            self.lose(connection, error)
            return
        if n == len(data):
            # The kernel has the last byte. Later than this the client can no longer delay the request.
            exchange.sent_ns = now()
            self.n_sent += 1
            if connection.unsent is not None:
                connection.unsent = None
                self._poller.modify(connection.fd, IN)
        else:
            if connection.unsent is None:  # OUT only while bytes wait: level-triggered, it would never rest
                self._poller.modify(connection.fd, IN | OUT)
            connection.unsent = memoryview(data)[n:]

    def serve_waiting(self) -> None:
        """Give connections that have become free to those who wait for one."""
        while self._waiting and self._pool.idle:
            if self._waiting[0].resent and next(reversed(self._pool.idle)).used and not self._pool.is_settled:
                return  # a fresh one comes: the used may be as stale as the one that was lost
            exchange = self._waiting.popleft()
            if exchange.failure is None:
                self._send(self._pool.idle.popitem()[0], exchange)

    def refuse_waiting(self) -> None:
        """Fail what waits for a connection that cannot be had: all where none is on its way any more.

        Else one for each try that began after its dispatch and failed for good, the longest waiting first.
        """
        pool, waiting, refused = self._pool, self._waiting, []
        refusals, pool.refusals = pool.refusals, []
        if pool.failure is not None and pool.is_settled:
            refusals = [(NEVER, pool.failure)] * len(waiting)
        for began_ns, why in refusals:
            while waiting and waiting[0].failure is not None:
                waiting.popleft()
            if waiting and (waiting[0].dispatched_ns or 0) <= began_ns:
                refused.append((waiting.popleft(), why))
        for exchange, why in refused:  # all out of the list first, for each end counts who still waits
            self.fail(exchange, "connect", why)

    # How exchanges end.

    def check(self, connection: Connection, exchange: Exchange) -> None:
        """Finish the exchange if its message has ended; have the reader follow it where it streams on."""
        begun, data = exchange.begun, exchange.data
        if exchange.may_cut and len(data) > exchange.cut_at and data.endswith(exchange.mid_stream):
            exchange.cut(self._compress)
            self._follow(connection, exchange)
            return
        try:
            whole = exchange.is_whole()
        except EngineError as error:
            self.fail(exchange, "truncated", str(error))
            return
        if exchange.begun and not begun:
            self.n_begun += exchange.index >= 0
            exchange.payload = b""  # is never sent again
        if whole:
            self._finish(connection, exchange, exchange.last_read_ns)
        else:
            self._follow(connection, exchange)

    def _follow(self, connection: Connection, exchange: Exchange) -> None:
        """Read on, until the reply ends or is to be cut: those of a burst are not all cut at once."""
        share = max(_WAITING_BYTES // max(1, len(self._in_flight)), _LEAST_PART_BYTES)
        share -= share * (exchange.index * 618 % 1000) // 2000
        exchange.cut_at = min(exchange.cut_at, share) if exchange.may_cut else exchange.max_bytes
        self._reader.follow(connection)

    def _finish(self, connection: Connection, exchange: Exchange, at_ns: int) -> None:
        exchange.closed_ns = at_ns
        self._part(connection)
        del self._in_flight[exchange]
        self._ended.append(exchange)
        self.n_done += 1
        if (
            connection.is_open
            and connection.unsent is None  # else the rest of this request would precede the next
            and exchange.failure is None
            and exchange.is_exact()  # bytes beyond the reply would be taken for the next one's
            and self._n_stale < _CLOSES_EACH
        ):
            if connection.used:
                self._n_stale = 0
            connection.used, connection.free_ns = True, at_ns
            self._pool.n_stillborn = 0
            self._pool.idle[connection] = None
            self.serve_waiting()
        else:
            if connection.is_open:
                self._pool.drop(connection)
            self._plan_ahead()  # a waiting exchange needs another connection
        if self._schedule.soon:  # in a closed loop the next may go at once
            self.next_due_ns = min(self.next_due_ns, (self._t0_ns or 0) + self._schedule.soon[0][0])

    def hang_up(self) -> None:
        """End each stream that has brought all that its client waits for, though the server would go on.

        Looked at once a tick, so that the inner loop that reads has nothing to count.
        """
        for exchange in list(self._limited):  # a copy: the loop removes from the set
            connection = self._in_flight.get(exchange)
            if connection is None:
                self._limited.discard(exchange)
                continue
            if exchange.has_said_enough():
                self._limited.discard(exchange)
                exchange.failure = exchange.hang_up_as
                self._finish(connection, exchange, now())

    def fail(self, exchange: Exchange, failure: str, detail: str | None) -> None:
        """End it with what came so far."""
        exchange.failure, exchange.detail = failure, detail
        if failure == "not_sent":
            self.n_unsent += 1
        else:
            self.n_failed += 1
            exchange.closed_ns = now()
        connection = self._in_flight.pop(exchange, None)
        if connection is not None and connection.is_open:
            self._part(connection)
            self._pool.drop(connection)
        self._ended.append(exchange)
        self._plan_ahead()

    def break_off(self, connection: Connection, error: Exception) -> None:
        """End what an unforeseen exception has interrupted, and nothing else."""
        exchange = connection.exchange
        if exchange is not None and exchange in self._in_flight:
            self.fail(exchange, "truncated", f"the client could not read on: {type(error).__name__}: {error}")
        elif connection.is_open:
            self._pool.drop(connection)

    def _part(self, connection: Connection) -> None:
        """The exchange gets all that was read for it, and the connection forgets it."""
        self._reader.leave(connection)
        connection.exchange = None

    def expire(self, at_ns: int) -> None:
        """Give up what has passed its deadline. What was dispatched first stands first and expires first."""
        limit_ns, t0_ns = self._deadline_ns, self._t0_ns
        if limit_ns is None or t0_ns is None:
            return
        late = []
        for exchange in self._in_flight:
            start_ns = t0_ns + exchange.due_ns if self._limit == NEVER else exchange.dispatched_ns or at_ns
            if at_ns < start_ns + limit_ns:
                break
            late.append(exchange)
        for exchange in late:
            self.fail(exchange, "timeout", f"no end of the reply within {limit_ns / 1e9:g} s")

    def lose(self, connection: Connection, error: OSError | None) -> None:
        """The connection has ended: in order (`error` None) or not."""
        exchange = connection.exchange
        self._part(connection)
        self._pool.drop(connection)
        if exchange is not None and exchange.index < 0:  # the canary's: it is no request of the plan
            return
        if exchange is None:
            self._pool.note_unused(connection)
            self._plan_ahead()  # closed while idle: replaced before it is needed
        elif not exchange.data and not exchange.resent and _was_stale(connection, exchange):
            self._resend(connection, exchange)
        elif error is not None:
            self.fail(exchange, "reset", str(error))
        else:
            self._end(connection, exchange)

    def _end(self, connection: Connection, exchange: Exchange) -> None:
        try:
            if exchange.is_whole_at_eof():
                self._finish(connection, exchange, now())
                return
            n, part = exchange.n_bytes, "head"
            if exchange.head is not None:
                n, part = n - exchange.head.body_start, "body"
            detail = f"the server closed the connection {n} bytes into the {part} of a reply"
        except EngineError as error:
            detail = str(error)
        self.fail(exchange, "truncated", detail)

    def _resend(self, connection: Connection, exchange: Exchange) -> None:
        """Once more over a fresh connection: the server closed an idle one just as we wrote to it.

        RFC 9112, 9.3.1 allows it where no byte of a reply came; every HTTP client with a pool does it. Where
        each second use ends so, and no idle timeout can be why, the server closes after each reply, though it
        does not say so: from then on no connection is used twice.
        """
        exchange.resent = True
        self._n_stale += connection.used and now() - connection.free_ns < _SOON_NS
        self.n_sent -= exchange.sent_ns is not None
        exchange.sent_ns = None
        self.n_resent += 1
        self._in_flight[exchange] = None
        self._waiting.appendleft(exchange)
        self._pool.open()  # however many are idle: those may be as stale as the one just lost
