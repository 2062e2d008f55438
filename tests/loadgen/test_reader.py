"""The reader: whatever comes in whatever pieces makes the same exchange."""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from select import epoll

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from burstline.loadgen.wire.clock import Offsets
from burstline.loadgen.wire.exchange import MID_STREAM, Exchange
from burstline.loadgen.wire.exchange import READ as ROW
from burstline.loadgen.wire.pool import IN, Connection
from burstline.loadgen.wire.reader import ENDED, READ, Reader, Report, in_milliseconds
from burstline.loadgen.wire.wire import Wire
from tests.loadgen.scripted import STREAM_HEAD, chunk

LATER = 2**62
GOES_ON = b"data: 1\n\n\r\n"


class Bench:
    """A reader, and pairs of sockets of which it follows one end each."""

    def __init__(self) -> None:
        self.poller = epoll()
        self.reader = Reader(self.poller)
        self._socks: list[socket.socket] = []

    def follow(self, ours: socket.socket) -> Connection:
        self._socks.append(ours)
        ours.setblocking(False)
        connection = Connection(ours, 0)
        connection.exchange = Exchange()
        connection.exchange.mid_stream = MID_STREAM
        self.poller.register(connection.fd, IN)
        self.reader.follow(connection)
        return connection

    def pair(self, fd: int | None = None) -> tuple[Connection, socket.socket]:
        """A connection, of this number if given, and the peer's end of it."""
        ours, theirs = socket.socketpair()
        self._socks.append(theirs)
        if fd is not None:
            ours = socket.socket(fileno=os.dup2(ours.detach(), fd))
        return self.follow(ours), theirs

    def reports(self, due_ns: int = LATER) -> list[Report]:
        """What the reader says within seconds."""
        return self.reader.wait(due_ns, time.monotonic_ns() + 5_000_000_000)

    def collected(self, connection: Connection) -> tuple[bytes, list[int]]:
        """The exchange's bytes, and how many each read brought."""
        assert connection.exchange is not None
        rows = ROW.iter_unpack(connection.exchange.reads)
        return bytes(connection.exchange.data), [n for _, _, n, _ in rows]

    def close(self) -> None:
        self.poller.close()
        for sock in self._socks:
            sock.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_a_stream_that_goes_on_troubles_nobody(bench: Bench) -> None:
    reader, (connection, peer) = bench.reader, bench.pair()
    for event in (GOES_ON, b"data: 22\n\n\r\n"):
        peer.send(event)
        assert reader.wait(LATER, 0) == []
    peer.send(b"0\r\n\r\n")
    assert bench.reports() == [(connection.fd, READ)]
    assert bench.collected(connection) == (b"data: 1\n\n\r\ndata: 22\n\n\r\n0\r\n\r\n", [11, 12, 5])
    assert (reader.n_reads, reader.n_bytes) == (3, 28)
    peer.send(b"more")
    assert bench.reports() == [(connection.fd, READ)]
    assert bench.collected(connection)[1] == [11, 12, 5, 4]


def test_what_a_read_brought_came_after_the_poll_that_is_kept_with_it(bench: Bench) -> None:
    reader, (connection, peer) = bench.reader, bench.pair()
    sent_ns = []
    for _ in range(4):
        reader.wait(LATER, 0)  # a poll that finds nothing
        sent_ns.append(time.monotonic_ns())
        peer.send(GOES_ON)
        reader.wait(LATER, 0)
    assert connection.exchange is not None
    rows = list(ROW.iter_unpack(connection.exchange.reads))
    assert [polled <= sent <= at for (at, _, _, polled), sent in zip(rows, sent_ns, strict=True)] == [
        True
    ] * 4
    assert all(polled > before for (*_, polled), (before, *_) in zip(rows[1:], rows, strict=False))


class Stopped:
    """A poller whose process is stopped after each wait: the list is old when it is read."""

    def __init__(self, poller: epoll, meanwhile: Callable[[], object]) -> None:
        self._poller, self._meanwhile = poller, meanwhile

    def poll(self, timeout_s: float, max_events: int) -> list[tuple[int, int]]:
        ready = self._poller.poll(timeout_s, max_events)
        if timeout_s:
            time.sleep(0.001)
            self._meanwhile()
            time.sleep(0.001)
        return ready

    def fileno(self) -> int:
        return 1 << 30


def test_what_came_while_we_were_stopped_did_not_come_after_the_poll(bench: Bench) -> None:
    (first, peer), (second, other) = bench.pair(), bench.pair()
    sent_ns: list[int] = []

    def meanwhile() -> None:
        sent_ns.append(time.monotonic_ns())
        other.send(GOES_ON)

    bench.reader._poller = Stopped(bench.poller, meanwhile)
    peer.send(GOES_ON)
    bench.reader.wait(LATER, time.monotonic_ns() + 200_000_000)  # it must not be over before it begins
    bench.reader.wait(LATER, 0)
    assert first.exchange is not None
    assert first.exchange.data.startswith(GOES_ON)
    assert second.exchange is not None
    at, _, n, polled = ROW.unpack_from(second.exchange.reads)
    assert n >= len(GOES_ON)
    assert polled <= sent_ns[0] <= at


def test_it_never_polls_beyond_what_is_due() -> None:
    """As epoll rounds: up to nanoseconds, then up to milliseconds."""
    waits_s = [in_milliseconds(k * 1_000_000) for k in range(1, 1000)]
    assert [math.ceil(math.ceil(s * 1e9) / 1e6) for s in waits_s] == list(range(1, 1000))


def test_stamps_are_taken_between_the_sending_and_the_return(bench: Bench) -> None:
    reader, (connection, peer) = bench.reader, bench.pair()
    bounds = []
    for _ in range(3):
        before = time.monotonic_ns()
        peer.send(GOES_ON)
        reader.wait(LATER, 0)
        bounds.append((before, time.monotonic_ns()))
    assert connection.exchange is not None
    stamps = [at for at, *_ in ROW.iter_unpack(connection.exchange.reads)]
    assert all(low <= at <= high for at, (low, high) in zip(stamps, bounds, strict=True))
    assert 0 < reader.max_pass_ns < time.monotonic_ns() - bounds[0][0]
    assert bounds[-1][0] < reader.woken_ns < bounds[-1][1]


@pytest.mark.parametrize("kind", ["closed", "reset"])
def test_the_end_of_a_connection_is_told_and_what_came_before_is_kept(bench: Bench, kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = bench.follow(socket.create_connection(listener.getsockname()))
        peer, _ = listener.accept()
    peer.send(GOES_ON)
    while bench.reader.n_reads == 0:
        bench.reader.wait(LATER, 0)
    if kind == "reset":
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    *_, (fd, what) = bench.reports()
    assert fd == connection.fd
    assert what == ENDED if kind == "closed" else isinstance(what, ConnectionResetError)
    assert bench.collected(connection)[0] == GOES_ON


def test_sockets_that_nobody_follows_are_left_alone_and_told(bench: Bench) -> None:
    connection, peer = bench.pair()
    bench.reader.leave(connection)
    peer.send(GOES_ON)
    assert bench.reports() == [(connection.fd, IN)]
    assert connection.sock.recv(100) == GOES_ON


@pytest.mark.parametrize(("due_ns", "tick_ns"), [(3_000_000, LATER), (LATER, 3_000_000), (50_000, LATER)])
def test_a_wait_ends_when_something_is_due_and_not_before(bench: Bench, due_ns: int, tick_ns: int) -> None:
    start = time.monotonic_ns()
    assert bench.reader.wait(start + due_ns, start + tick_ns) == []
    assert time.monotonic_ns() - start >= min(due_ns, tick_ns)


def test_where_something_is_always_due_everybody_is_still_read(bench: Bench) -> None:
    pairs = [bench.pair() for _ in range(20)]
    for _, peer in pairs:
        peer.send(b"x")
    assert sorted(bench.reports(0)) == sorted((c.fd, READ) for c, _ in pairs)


def test_a_descriptor_used_again_begins_with_nothing(bench: Bench) -> None:
    reader, (connection, peer) = bench.reader, bench.pair()
    peer.send(GOES_ON)
    reader.wait(LATER, 0)
    reader.leave(connection)
    assert connection.exchange is not None
    assert connection.exchange.data == GOES_ON
    connection.exchange = Exchange()
    connection.exchange.mid_stream = MID_STREAM
    reader.follow(connection)
    peer.send(b"new")
    bench.reports()
    assert bench.collected(connection) == (b"new", [3])


def test_descriptors_far_apart_are_told_apart(bench: Bench) -> None:
    near, far = bench.pair(), bench.pair(900)
    for connection, peer in (near, far):
        peer.send(b"%d" % connection.fd)
    assert sorted(bench.reports()) == [(near[0].fd, READ), (900, READ)]
    assert bench.collected(far[0]) == (b"900", [3])


# Pieces of a reply as no server would choose them.

PARTS = [b"data: 1\n\n", b"x", b"\n\n\r\n", b"0\r\n\r\n", b"data: \r\n\r\n", b"y" * 300]
TAILS = [b"0\r\n\r\n", b"0\r\nX: 1\r\n\r\n", b"0\r\n\r\nmore", b"5\r\nab", b"zz\r\n", b""]


@given(
    st.lists(st.sampled_from(PARTS), max_size=8),
    st.sampled_from(TAILS),
    st.lists(st.integers(1, 80), max_size=40),
    st.booleans(),
    st.sampled_from([0, 200, 600]),
)
def test_any_split_of_any_reply_makes_the_same_exchange(
    events: list[bytes], tail: bytes, sizes: list[int], closes: bool, cut_at: int
) -> None:
    reply = STREAM_HEAD + b"".join(map(chunk, events)) + tail
    cuts = [0, *accumulate(sizes), len(reply)]
    pieces = [reply[start:end] for start, end in pairwise(cuts) if reply[start:end]]
    found, whole = exchanged(pieces, closes), exchanged([reply], closes)
    assert found.data == whole.data[: len(found.data)]
    assert (found.failure, found.is_closed) == (whole.failure, whole.is_closed)
    assert reply.startswith(found.data)
    assert exchanged(pieces, closes, cut_at) == found, "cut and packed on the way"


def test_a_reply_too_long_to_wait_is_packed_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burstline.loadgen.wire.dispatcher._WAITING_BYTES", 50_000)
    event = chunk(b"data: %s\n\n" % (b"x" * 980))
    pieces = [STREAM_HEAD, *[event] * 200, b"0\r\n\r\n"]
    found = exchanged(pieces, closes=False)
    assert (found.data, found.failure) == (b"".join(pieces), None)
    assert found.lengths == [len(piece) for piece in pieces]
    assert found.n_held < 60_000
    small = exchanged(pieces, closes=False, max_bytes=150_000)
    assert (small.failure, len(small.data) > 150_000 >= len(small.data) - len(event)) == ("too_large", True)


@pytest.mark.parametrize("cut_at", [0, LATER])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CR LF"])
def test_events_that_were_packed_count_for_who_hangs_up(cut_at: int, end: bytes) -> None:
    events = [chunk(b"data: %d%s%s" % (k, end, end)) for k in range(20)]
    failures = [
        exchanged([STREAM_HEAD, *events], closes=False, cut_at=cut_at, hang_up_at=n).failure
        for n in (3, 20, 21)
    ]
    assert failures == ["hung_up", "hung_up", "cancelled"]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("n", "counts", "last"), [(6, True, 10), (1, True, 8), (40, True, 27), (3, False, 9)]
)
def test_who_hangs_up_counts_tokens_and_neither_roles_nor_comments(
    n: int, counts: bool, last: int, cut: bool
) -> None:
    """A role and comments, then two tokens an event; where only events count the role does, too."""
    comments = [chunk(b": keep-alive\n\n")] * 6
    events = [chunk(b"data: 0\n\n"), *comments, *[chunk(b"data: 2\n\n")] * 25]
    exchange, n_looks = Exchange(hang_up_at=n), 0

    def n_tokens(exchange: Exchange) -> int:
        nonlocal n_looks
        n_looks += 1
        return 2 * exchange.whole()[1].count(b"data: 2\n\n")

    exchange.n_tokens = n_tokens if counts else None
    for k, piece in enumerate([STREAM_HEAD, *events]):
        exchange.data += piece
        exchange.reads += ROW.pack(k, bytes(16), len(piece), 0)
        assert not exchange.is_whole()
        if cut and k in (3, 9):
            exchange.cut(zstandard.compress)
        if exchange.has_said_enough():
            break
    assert k == last
    assert n_looks <= 5


def test_a_whole_reply_was_over_when_the_kernel_had_its_end_and_a_broken_one_when_we_noticed() -> None:
    """A client that comes round 3 ms late adds nothing: not to the number in flight, nor to the next turn."""
    offsets, at_ns = Offsets(), time.monotonic_ns()
    offsets.observe(at_ns)
    stamp = struct.pack("qq", *divmod(at_ns + offsets.latest_ns - 3_000_000, 1_000_000_000))
    exchange = Exchange(closed_ns=at_ns)
    exchange.reads += ROW.pack(at_ns, stamp, 1, at_ns)
    assert exchange.capture(0, offsets).closed_ns == at_ns - 3_000_000
    exchange.closed_ns = at_ns + 5
    assert exchange.capture(0, offsets).closed_ns == at_ns + 5
    exchange.reads[:] = ROW.pack(at_ns, bytes(16), 1, at_ns)
    exchange.closed_ns = at_ns
    assert exchange.capture(0, offsets).closed_ns == at_ns


def test_a_place_that_only_looks_like_a_chunks_end_is_put_together_again() -> None:
    event = chunk(b"data: 1\n\n\r\ndata: 2\n\n")
    at = event.index(b"data: 2")
    pieces = [STREAM_HEAD, chunk(b"data: 0\n\n"), event[:at], event[at:] + b"0\r\n", b"X: 1\r\n\r\n"]
    cut, plain = exchanged(pieces, closes=False, cut_at=0), exchanged(pieces, closes=False)
    assert (cut, cut.failure, cut.data) == (plain, None, b"".join(pieces))
    for n, failure in ((3, "hung_up"), (4, "cancelled")):
        pieces[3:] = [event[at:] + b"5\r\n", b"da"]
        assert exchanged(pieces, closes=False, cut_at=0, hang_up_at=n).failure == failure


@dataclass(frozen=True)
class Exchanged:
    """All of an exchange but its stamps, and what the wire made of its connection."""

    data: bytes
    lengths: list[int]
    n_reads: int
    failure: str | None
    detail: str | None
    is_closed: bool
    is_reused: bool
    n_held: int = field(compare=False)


def exchanged(
    pieces: list[bytes],
    closes: bool,
    cut_at: int = LATER,
    max_bytes: int = LATER,
    hang_up_at: int | None = None,
) -> Exchanged:
    """What a wire makes of these pieces, each in a read of its own; its thread is ours."""
    ended: list[Exchange] = []
    wire = Wire([], ended.extend)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    connection = Connection(ours, 0)
    connection.connected_ns = 0
    wire.pool.by_fd[connection.fd] = connection
    wire._poller.register(connection.fd, IN)
    exchange = Exchange()
    exchange.cut_at, exchange.max_bytes, exchange.hang_up_at = cut_at, max_bytes, hang_up_at
    wire.traffic._send(connection, exchange)

    def one_pass() -> None:
        for _, what in wire.reader.wait(LATER, 0):
            wire._take(connection, what)

    for piece in pieces:
        if connection.exchange is exchange:
            theirs.send(piece)
            one_pass()
    wire.traffic.hang_up()
    if closes and connection.exchange is exchange:
        theirs.shutdown(socket.SHUT_WR)
        one_pass()
    wire._stop()
    wire._closed = True
    wire._run()
    theirs.close()
    assert ended == [exchange]
    rows, data = exchange.whole()
    return Exchanged(
        data,
        [n for _, _, n, _ in ROW.iter_unpack(rows)],
        wire.reader.n_reads,
        exchange.failure,
        exchange.detail,
        exchange.closed_ns is not None,
        connection.used,
        len(exchange.data) + sum(len(packed) for _, packed in exchange.parts),
    )
