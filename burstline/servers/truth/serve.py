"""The known-truth server's only loop, its state of each request, and the true times of a run as JSON rows.

One thread, raw sockets, an absolute schedule.

Prebuilt bytes, one heap of due times, one `send` per event: its own cost has to stay below what it is there
to measure. It sleeps in select(2) on the epoll descriptor: epoll_wait's own timeout counts in milliseconds.
"""

import gc
import resource
import select
import socket
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count
from zlib import crc32

import orjson

from burstline.servers.host.kernel import SO_TIMESTAMPNS, prctl, send_at_once, stamp_reads
from burstline.servers.messages import EngineError
from burstline.servers.truth.replies import STAMP, TimedReply, Write, plain_reply
from burstline.servers.truth.router import HttpRequest, RoutedAnswer, Router, take_call

_PR_SET_TIMERSLACK = 29
_SENDS_PER_POLL = 64
_SPIN_S = 50e-6
"""Going to sleep and waking takes about as long: for a shorter wait the loop goes round instead."""
_READ_BYTES = 1 << 16
_SLACK_NS = 20_000
"""How far two readings of the two clocks may miss each other."""


@dataclass(slots=True, eq=False)
class ClientSocket:
    """One socket: bytes of requests not yet answered, and of replies that the kernel had no room for."""

    sock: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    exchange: "Serving | None" = None
    closing: bool = False
    number: int = 0
    kernel_stamps: bool = False
    first_byte_ns: int = 0
    stamp_ns: int = 0
    read_ns: int = 0


class Serving:
    """One request and the reply in progress."""

    def __init__(
        self, connection: ClientSocket, answer: RoutedAnswer, number: int, call: HttpRequest
    ) -> None:
        self.connection: ClientSocket | None = connection
        self.connection_number = connection.number
        self.answer = answer
        self.number = number
        index = call.headers.get(b"x-burstline-index", b"")
        self.index = int(index) if index.isdigit() else None
        self.path, self.keep_alive = call.path, call.keep_alive
        self.is_probe = b"x-burstline-probe" in call.headers
        self.body_hash = crc32(call.body)
        self.first_byte_ns = connection.first_byte_ns
        self.arrival_ns = call.arrival_ns
        self.read_ns = connection.read_ns
        self.kernel_stamps = connection.kernel_stamps
        self.stamps_ns = array("q")
        self.token_ns = self.first_token_ns = 0  # when the latest and the first token were sent
        self.n_prompt_tok = answer.wanted.n_prompt_tok if answer.wanted else 0
        self.n_tok = 0
        self.ended: str | None = None
        self.ended_ns: int | None = None

    def due_ns(self) -> int | None:
        """When the next write is due, None after the last."""
        offsets_ns, step = self.answer.reply.offsets_ns, len(self.stamps_ns)
        return self.arrival_ns + offsets_ns[step] if step < len(offsets_ns) else None


@dataclass(frozen=True, slots=True)
class Served:
    """The truth of one request. Instants are ns on the monotonic clock, None where it did not come to that.

    `number` counts arrivals since the start; `index` is the client's own (`x-burstline-index`), None where it
    sent none. `first_byte_ns` and `arrival_ns` (the whole request) are the kernel's receive stamps where
    `kernel_stamps` says so, else our own; `read_ns` is when the server had the request in hand. Event i is
    `event_kind[i]` (headers, role, token, usage, done, plain), carries `event_tok[i]` tokens,
    was due at `event_due_ns[i]` and its last byte was handed to the kernel right after `event_ns[i]`; events
    that were not sent are not listed. `ended` is done, close or client_closed; None: still open.
    Requests of one `connection` came over the same socket, those of one `body_hash` said the same; `text` is
    the prompt's, None where it came as token ids; `n_output_tok` is how many tokens it asked for.
    """

    number: int
    index: int | None
    path: str
    status: int
    first_byte_ns: int
    arrival_ns: int
    read_ns: int
    kernel_stamps: bool
    ended_ns: int | None
    ended: str | None
    n_prompt_tok: int | None
    event_kind: Sequence[str]
    event_tok: Sequence[int]
    event_due_ns: Sequence[int]
    event_ns: Sequence[int]
    connection: int = 0
    body_hash: int = 0
    text: str | None = None
    n_output_tok: int | None = None

    @property
    def token_ns(self) -> list[int]:
        """When each event with tokens was sent."""
        return [ns for ns, n_tok in zip(self.event_ns, self.event_tok, strict=True) if n_tok]

    @property
    def lateness_ns(self) -> list[int]:
        """By how much each event was sent after it was due: the server's own error."""
        return [sent - due for sent, due in zip(self.event_ns, self.event_due_ns, strict=True)]


def served(exchange: Serving) -> Served:
    reply, wanted = exchange.answer.reply, exchange.answer.wanted
    sent = zip(reply.writes, reply.offsets_ns, exchange.stamps_ns, strict=False)
    events = [(mark, offset_ns, at_ns) for write, offset_ns, at_ns in sent for mark in write.marks]
    return Served(
        **{name: getattr(exchange, name) for name in _OF_THE_EXCHANGE},
        status=reply.status,
        n_prompt_tok=wanted.n_prompt_tok if wanted else None,
        event_kind=[mark.kind for mark, _, _ in events],
        event_tok=[mark.n_tok for mark, _, _ in events],
        event_due_ns=[exchange.arrival_ns + offset_ns for _, offset_ns, _ in events],
        event_ns=[at_ns for _, _, at_ns in events],
        connection=exchange.connection_number,
        text=exchange.answer.text,
        n_output_tok=wanted.n_output_tok if wanted else None,
    )


_OF_THE_EXCHANGE = (
    *("number", "index", "path", "first_byte_ns", "arrival_ns", "read_ns", "kernel_stamps"),
    *("ended_ns", "ended", "body_hash"),
)


def to_jsonl(rows: Iterable[Served]) -> bytes:
    return b"".join(orjson.dumps(asdict(row)) + b"\n" for row in rows)


def from_jsonl(lines: Iterable[str | bytes]) -> tuple[Served, ...]:
    return tuple(Served(**orjson.loads(line)) for line in lines)


class TruthServer:
    """Serves the replies of a router on `host`:`port` (0: any free one) until stopped, all of it in `run`."""

    def __init__(self, router: Router, host: str = "127.0.0.1", port: int = 0) -> None:
        self.router = router
        self.exchanges: list[Serving] = []
        self.refused = Counter[str]()
        self._numbers, self._connection_numbers = count(), count()
        self._heap: list[tuple[int, int, Serving]] = []
        self._connections: dict[int, ClientSocket] = {}
        self._epoll = select.epoll()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=4096, reuse_port=False)
        self._listener.setblocking(False)
        # Accepted sockets inherit both.
        send_at_once(self._listener)
        stamp_reads(self._listener)
        self._stop_receiver, self._stop_sender = socket.socketpair()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._epoll.register(self._stop_receiver, select.EPOLLIN)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        self._stopped = False

    def stop(self) -> None:
        """Ends `run`; may be called from any thread."""
        with suppress(OSError):  # it has ended by itself
            self._stop_sender.send(b"!")

    def stop_at_end_of(self, fd: int) -> None:
        """Stops when the pipe `fd` ends: with the process that holds its other end, however that dies."""
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLHUP)

    def log(self) -> bytes:
        """What `Served` rows say of every request so far, one JSON object a line."""
        return to_jsonl(map(served, self.exchanges))

    def run(self) -> None:
        """Serves until stopped, then closes everything."""
        # This thread's timer slack from 50 us to 1 ns; without it the schedule is that much coarser.
        prctl(_PR_SET_TIMERSLACK, 1)
        try:
            while not self._stopped:
                self._send_due()
                self._wait()
        finally:
            for connection in list(self._connections.values()):
                connection.sock.close()
            for thing in (self._epoll, self._listener, self._stop_receiver, self._stop_sender):
                thing.close()

    def _send_due(self) -> None:
        heap = self._heap
        for _ in range(_SENDS_PER_POLL):
            if not heap:
                return
            due_ns, number, exchange = heap[0]
            now_ns = time.monotonic_ns()
            if due_ns > now_ns:
                return
            if exchange.ended is None:
                self._send_next(exchange, now_ns)
            next_ns = exchange.due_ns() if exchange.ended is None else None
            if next_ns is None:
                heappop(heap)
                if exchange.ended is None and exchange.connection is not None:
                    self.finish(exchange, exchange.connection)
            else:
                heapreplace(heap, (next_ns, number, exchange))

    def _send_next(self, exchange: Serving, now_ns: int) -> None:
        write = exchange.answer.reply.writes[len(exchange.stamps_ns)]
        data = self.bytes_of(write, exchange, now_ns)
        exchange.stamps_ns.append(now_ns)
        counters = self.router.counters
        for mark in write.marks:
            if mark.n_tok:
                if not exchange.token_ns:
                    exchange.first_token_ns = now_ns
                exchange.token_ns = now_ns
                exchange.n_tok += mark.n_tok
                counters.output_tok += mark.n_tok
                if exchange.connection is not None:
                    counters.kv_tok += mark.n_tok
        if data and exchange.connection is not None:
            self._send(exchange.connection, data)

    def bytes_of(self, write: Write, exchange: Serving, now_ns: int) -> bytes:  # noqa: ARG002
        """The bytes of a write that is sent now."""
        pieces = write.pieces
        return pieces[0] if len(pieces) == 1 else (STAMP % now_ns).join(pieces)

    def _send(self, connection: ClientSocket, data: bytes) -> None:
        if connection.outbox:
            connection.outbox += data
            return
        try:
            n_sent = connection.sock.send(data)
        except BlockingIOError:
            n_sent = 0
        except OSError:
            self._lose(connection)
            return
        if n_sent < len(data):
            connection.outbox += data[n_sent:]
            self._epoll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def finish(self, exchange: Serving, connection: ClientSocket) -> None:
        """The reply is over; where it is whole, the next request on the connection may follow."""
        exchange.ended, exchange.ended_ns = exchange.answer.reply.end, time.monotonic_ns()
        self.part(connection)
        is_last = exchange.ended != "done" or not exchange.keep_alive
        (self.close_when_sent if is_last else self._ask)(connection)

    def part(self, connection: ClientSocket) -> None:
        """The connection's exchange is over."""
        if connection.exchange is not None:
            exchange, counters = connection.exchange, self.router.counters
            exchange.connection = connection.exchange = None
            counters.running -= 1
            counters.kv_tok -= exchange.n_tok + exchange.n_prompt_tok

    def _lose(self, connection: ClientSocket) -> None:
        exchange = connection.exchange
        if exchange is not None and exchange.ended is None:
            exchange.ended, exchange.ended_ns = "client_closed", time.monotonic_ns()
        self.part(connection)
        self.close(connection)

    def close_when_sent(self, connection: ClientSocket) -> None:
        connection.closing = True
        if not connection.outbox:
            self.close(connection)

    def close(self, connection: ClientSocket) -> None:
        if self._connections.pop(connection.sock.fileno(), None) is not None:
            self._epoll.unregister(connection.sock)
            connection.sock.close()

    def _wait(self) -> None:
        wait_s = (self._heap[0][0] - time.monotonic_ns()) / 1e9 if self._heap else 60.0
        if wait_s > _SPIN_S and not select.select([self._epoll], [], [], wait_s)[0]:
            return
        for fd, mask in self._epoll.poll(0):
            connection = self._connections.get(fd)
            if connection is None:
                self._wake(fd)
                continue
            if mask & select.EPOLLOUT:
                self._flush(connection)
            if mask & ~select.EPOLLOUT and fd in self._connections:
                self._read(connection)

    def _wake(self, fd: int) -> None:
        """What is no connection: a new client, a call of `stop`, or the end of the parent's pipe."""
        if fd != self._listener.fileno():
            self._stopped = True
            return
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                raise EngineError(
                    f"the known-truth server cannot accept: {error}; raise `ulimit -n`"
                ) from error
            sock.setblocking(False)
            self._connections[sock.fileno()] = ClientSocket(sock, number=next(self._connection_numbers))
            self._epoll.register(sock, select.EPOLLIN)

    def _flush(self, connection: ClientSocket) -> None:
        try:
            del connection.outbox[: connection.sock.send(connection.outbox)]
        except BlockingIOError:
            return
        except OSError:
            self._lose(connection)
            return
        if not connection.outbox:
            self._epoll.modify(connection.sock, select.EPOLLIN)
            if connection.closing:
                self.close(connection)

    def _read(self, connection: ClientSocket) -> None:
        try:
            data, ancillary, _, _ = connection.sock.recvmsg(_READ_BYTES, 64)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._lose(connection)
            return
        connection.read_ns = now_ns = time.monotonic_ns()
        kernel_ns = kernel_ns_of(ancillary, now_ns)
        connection.kernel_stamps = kernel_ns is not None
        connection.stamp_ns = now_ns if kernel_ns is None else kernel_ns
        if not connection.inbox:
            connection.first_byte_ns = connection.stamp_ns
        connection.inbox += data
        self._ask(connection)

    def _ask(self, connection: ClientSocket) -> None:
        """Starts the reply to the next whole request, unless one is still going on."""
        if connection.exchange is not None or not connection.inbox:
            return
        try:
            call = take_call(connection.inbox, connection.stamp_ns)
        except ValueError as error:
            self.refused["no request of HTTP/1.1"] += 1
            self._send(connection, _whole(plain_reply(400, str(error).encode(), "text/plain")))
            self.close_when_sent(connection)
            return
        if call is None:
            return
        if call.method == "POST" and call.path != "/reset":
            exchange = Serving(connection, self.router.answer(call), next(self._numbers), call)
            self.exchanges.append(exchange)
            connection.exchange = exchange
            self.router.counters.running += 1
            self.router.counters.kv_tok += exchange.n_prompt_tok
            heappush(self._heap, (exchange.due_ns() or 0, exchange.number, exchange))
            return
        page = self._page(call.path)
        if page.status == 404:
            self.refused[f"{call.method} {call.path}"] += 1
        self._send(connection, _whole(page))
        (self._ask if call.keep_alive else self.close_when_sent)(connection)

    def _page(self, path: str) -> TimedReply:
        if path == "/log":
            return plain_reply(200, self.log(), "application/x-ndjson")
        if path == "/refused":
            return plain_reply(200, orjson.dumps(self.refused))
        if path == "/reset":
            self.refused.clear()
            self.exchanges = [row for row in self.exchanges if row.ended is None]
            self.router.reset()
            return plain_reply(200, b"{}")
        return self.router.page(path)


def _whole(reply: TimedReply) -> bytes:
    return b"".join(piece for write in reply.writes for piece in write.pieces)


def prepare_process() -> None:
    """Make this process fit to serve and nothing else: all files that it may open, and no collection.

    What is alive now stays; what a run makes has no cycles worth a pause amid the schedule.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    gc.disable()


def kernel_ns_of(ancillary: list[tuple[int, int, bytes]], now_ns: int) -> int | None:
    """The kernel's receive stamp on the monotonic clock; None where there is none that can be believed."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) == 16:
            seconds, ns = int.from_bytes(data[:8], sys.byteorder), int.from_bytes(data[8:], sys.byteorder)
            offset_ns = _realtime_offset_ns()
            kernel_ns = seconds * 1_000_000_000 + ns - offset_ns
            # A lag out of this range is a step of the wall clock, not a delay.
            lag_ns = now_ns - kernel_ns
            return min(kernel_ns, now_ns) if -_SLACK_NS <= lag_ns < 60_000_000_000 else None
    return None


def _realtime_offset_ns() -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC now; read again where the scheduler came between the readings."""
    for _ in range(4):
        before_ns = time.monotonic_ns()
        real_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        after_ns = time.monotonic_ns()
        if after_ns - before_ns < _SLACK_NS:
            break
    return real_ns - (before_ns + after_ns) // 2
