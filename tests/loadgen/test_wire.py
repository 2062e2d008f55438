"""The wire over real sockets: barrier, schedule, reuse, and every way in which an exchange can fail."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import select
import socket
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from burstline.loadgen.capture import http1
from burstline.loadgen.capture.capture import Capture
from burstline.loadgen.wire.dispatcher import Dispatcher
from burstline.loadgen.wire.exchange import Exchange
from burstline.loadgen.wire.network import Network
from burstline.loadgen.wire.pool import Connection, Pool
from burstline.loadgen.wire.reader import Reader
from burstline.loadgen.wire.wire import Wire
from tests.loadgen.scripted import STREAM_HEAD, Asked, Script, Scripted, chunk, reset, serving, stream
from tests.loadgen.wire_client import Client

MS = 1_000_000
Shot = tuple[list[Capture], Client, Scripted]


@pytest.fixture(autouse=True)
def _connections_are_opened_just_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("burstline.loadgen.wire.dispatcher._OPEN_AHEAD_NS", 50 * MS)


def shoot(
    script: Script,
    due_ms: list[float],
    *,
    body: bytes | None = None,
    meanwhile: Callable[[Client, Scripted], Awaitable[None]] | None = None,
    **options: Any,
) -> Shot:
    """Fire one request per due time at a scripted server; the captures, in order of the plan."""

    async def fire() -> Shot:
        async with serving(script) as server:
            client = Client(server.url, **options)
            return await fire_at(client, due_ms, body, meanwhile, server), client, server

    return asyncio.run(fire())


async def fire_at(
    client: Client,
    due_ms: list[float],
    body: bytes | None = None,
    meanwhile: Callable[[Client, Scripted], Awaitable[None]] | None = None,
    server: Scripted | None = None,
) -> list[Capture]:
    exchanges = [Exchange(i, int(due * MS)) for i, due in enumerate(due_ms)]
    with client:
        client.park(*exchanges, body=body)
        await client.opened()
        if server is not None:
            assert server.first_byte_ns is None, "something left before the start"
        t0_ns = time.monotonic_ns() + 10 * MS
        client.wire.release(t0_ns)
        if meanwhile is not None and server is not None:
            await meanwhile(client, server)
        await client.until_ended(*exchanges)
    if server is not None and server.first_byte_ns is not None:
        assert server.first_byte_ns >= t0_ns
    assert client.wire.error is None
    traffic = client.wire.traffic
    assert traffic.n_done + traffic.n_failed + traffic.n_unsent == len(exchanges)
    return [e.capture(t0_ns, client.wire.offsets) for e in exchanges]


def body_of(capture: Capture) -> bytes:
    parsed = http1.parse(capture.reads)
    assert parsed is not None
    assert parsed[0].complete
    return parsed[0].body


def shoot_in_turn(script: Script, n: int) -> tuple[list[Exchange], Client, Scripted]:
    """Each request is due 60 ms after the one before it has ended, however long that took."""

    async def fire() -> tuple[list[Exchange], Client, Scripted]:
        exchanges = [Exchange(index) for index in range(n)]
        async with serving(script) as server:
            client = Client(server.url)
            with client:
                for exchange in exchanges:
                    await client.asked(exchange, after_ns=60 * MS)
            return exchanges, client, server

    return asyncio.run(fire())


STREAMED = b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_a_burst_has_all_its_connections_before_the_start_and_sends_nothing() -> None:
    async def scenario() -> None:
        exchanges = [Exchange(i) for i in range(50)]
        async with serving(stream) as server:
            with Client(server.url) as client:
                client.park(*exchanges)
                await client.opened()
                while server.n_connections < 50:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.05)
                assert server.first_byte_ns is None
                t0_ns = time.monotonic_ns() + 20 * MS
                client.wire.release(t0_ns)
                await client.until_ended(*exchanges)
            assert server.first_byte_ns is not None
            assert server.first_byte_ns >= t0_ns
        assert [exchange.failure for exchange in exchanges] == [None] * 50

    asyncio.run(scenario())


def test_every_read_is_stamped_by_us_and_by_the_kernel_in_order() -> None:
    captures, client, _ = shoot(stream, [0.0] * 20)
    for capture in captures:
        assert capture.failure is None
        assert body_of(capture) == STREAMED
        assert capture.sent_ns is not None
        last = capture.reads[-1]
        assert capture.closed_ns == (last.at_ns if last.kernel_ns is None else last.kernel_ns)
        assert capture.connected_ns is not None
        assert capture.connected_ns < 0 <= (capture.dispatched_ns or -1) <= capture.sent_ns
        stamps = [read.at_ns for read in capture.reads]
        assert stamps == sorted(stamps)
        for read in capture.reads:
            assert read.kernel_ns is not None
            # The kernel had the bytes no later than we did, and not before the run began.
            assert 0 < read.kernel_ns <= read.at_ns
    assert client.wire.reader.n_reads == sum(len(c.reads) for c in captures)


def test_no_request_leaves_before_it_is_due_and_each_leaves_in_its_turn() -> None:
    due_ms = [0.0, 5.0, 5.0, 12.0, 30.0, 31.0, 110.0]
    captures, _, server = shoot(stream, due_ms)
    for capture in captures:
        assert capture.dispatched_ns is not None
        assert capture.dispatched_ns >= capture.due_ns
    assert len(server.asked) == len(due_ms)


def test_a_request_due_later_uses_a_connection_again() -> None:
    exchanges, client, server = shoot_in_turn(stream, 3)
    captures = [exchange.capture(0, client.wire.offsets) for exchange in exchanges]
    assert server.n_connections == 1
    assert [a.nth for a in server.asked] == [0, 1, 2]
    assert captures[0].connected_ns is not None
    assert [c.connected_ns for c in captures[1:]] == [None, None]


def test_a_connection_closed_while_idle_is_replaced_and_nothing_fails() -> None:
    async def closes_soon(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await stream(writer, asked)
        await writer.drain()
        writer.close()

    exchanges, _, server = shoot_in_turn(closes_soon, 3)
    assert [each.failure for each in exchanges] == [None] * 3
    assert server.n_connections == 3


async def closes_on_second(writer: asyncio.StreamWriter, asked: Asked) -> None:
    if asked.nth == 0:
        await stream(writer, asked)
    else:
        writer.close()


def test_a_request_that_crosses_the_close_of_an_idle_connection_goes_out_once_more() -> None:
    exchanges, client, server = shoot_in_turn(closes_on_second, 2)
    assert [each.failure for each in exchanges] == [None, None]
    assert client.wire.traffic.n_resent == 1
    assert client.wire.traffic.n_sent == 2
    assert len(server.asked) == 3


@pytest.mark.parametrize(("soon_s", "n_resent"), [(100.0, 8), (0.0, 11)])
def test_a_server_that_closes_after_each_reply_is_soon_given_fresh_connections_alone(
    soon_s: float, n_resent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp announces keep-alive and closes: each request was written twice, 0.5 to 9 ms late. A server
    whose idle timeout has passed (the second case) does not close each."""
    monkeypatch.setattr("burstline.loadgen.wire.dispatcher._SOON_NS", round(soon_s * 1e9))

    exchanges, client, server = shoot_in_turn(closes_on_second, 12)
    assert [each.failure for each in exchanges] == [None] * 12
    assert client.wire.traffic.n_resent == n_resent
    assert len(server.asked) == 12 + n_resent
    assert server.n_connections in (12, 13)  # one stands ready for the next


@pytest.mark.parametrize(("stood_s", "stale_s", "n_resent"), [(0.12, 0.1, 1), (0.0, 100.0, 0)])
def test_a_connection_that_stood_long_before_its_first_request_may_be_stale_too(
    stood_s: float, stale_s: float, n_resent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp closes a connection on which nothing came for 5 s, also one that was opened ahead."""
    monkeypatch.setattr("burstline.loadgen.wire.dispatcher._STALE_NS", round(stale_s * 1e9))
    asked_before: list[Asked] = []

    async def closes_on_first(writer: asyncio.StreamWriter, asked: Asked) -> None:
        asked_before.append(asked)
        if len(asked_before) == 1:
            writer.close()
        else:
            await stream(writer, asked)

    async def scenario() -> Client:
        exchange = Exchange()
        async with serving(closes_on_first) as server:
            with Client(server.url) as client:
                client.park(exchange)
                await client.opened()
                await asyncio.sleep(stood_s)
                client.wire.release(time.monotonic_ns())
                await client.until_ended(exchange)
            return client

    assert asyncio.run(scenario()).wire.traffic.n_resent == n_resent
    assert len(asked_before) == 1 + n_resent


def test_a_request_that_lost_an_idle_connection_gets_a_fresh_one_though_others_are_idle() -> None:
    async def only_first(writer: asyncio.StreamWriter, asked: Asked) -> None:
        if asked.nth == 0:
            await asyncio.sleep(0.5)  # so that all three of the burst need a connection of their own
            await stream(writer, asked)
        else:
            writer.close()

    async def scenario() -> None:
        *burst, last = [Exchange(index) for index in range(4)]
        async with serving(only_first) as server:
            with Client(server.url, deadline_s=20) as client:
                client.park(*burst)
                await client.opened()
                client.wire.release(time.monotonic_ns())
                await client.until_ended(*burst)
                await client.asked(last, after_ns=60 * MS)
            assert [each.failure for each in (*burst, last)] == [None] * 4
            assert client.wire.traffic.n_resent == 1
            assert server.n_connections == 4

    asyncio.run(scenario())


def test_what_lost_a_used_connection_never_gets_another_used_one() -> None:
    """A server whose connections serve one request each, unsaid: the second finds them closed."""

    async def only_first(writer: asyncio.StreamWriter, asked: Asked) -> None:
        if asked.nth == 0:
            await asyncio.sleep(0.001 * (asked.at_ns % 5))
            await stream(writer, asked)
        else:
            writer.close()

    captures, _, _ = shoot(only_first, [0.0] * 200, concurrency=8)
    assert [c.failure for c in captures] == [None] * 200


def test_a_closed_loop_never_exceeds_its_concurrency_and_keeps_it_full() -> None:
    in_flight = most = 0

    async def counted(writer: asyncio.StreamWriter, asked: Asked) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.05)
        in_flight -= 1
        await stream(writer, asked)

    captures, _, server = shoot(counted, [0.0] * 40, concurrency=8)
    assert [c.failure for c in captures] == [None] * 40
    assert most == 8
    assert server.n_connections == 8


# What a server can do to a reply, and what the capture must then say.


async def dribbles(writer: asyncio.StreamWriter, asked: Asked) -> None:
    for byte in STREAM_HEAD + chunk(b"data: 0\n\n") + b"0\r\n\r\n":
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)


async def answers_500(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops")


async def interim_first(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    await asyncio.sleep(0.005)
    await stream(writer, asked)


async def until_eof(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\nbody")
    writer.close()


async def with_trailers(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: 10\r\n\r\n"))
    await asyncio.sleep(0.005)
    writer.write(b"0\r\nX-Time: 1\r\n")
    await asyncio.sleep(0.005)
    writer.write(b"\r\n")


async def end_look_alike(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(STREAM_HEAD + b"13\r\ndata: 0\r\n\r\n")  # the start of a chunk that reads like its end
    await asyncio.sleep(0.01)
    writer.write(b"12345678\r\n" + b"0\r\n\r\n")


async def zero_byte_at_the_end(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\na\0\0")


async def tail_after_the_end(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more")


async def chunked_tail(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: 0\n\n") + b"0\r\n\r\nHTTP/1.1 200 OK\r\n")


WHOLE: list[tuple[Script, int, bytes]] = [
    (dribbles, 200, b"data: 0\n\n"),
    (answers_500, 500, b"oops"),
    (interim_first, 200, STREAMED),
    (until_eof, 200, b"body"),
    (with_trailers, 200, b"data: 10\r\n\r\n"),
    (end_look_alike, 200, b"data: 0\r\n\r\n12345678"),
    (zero_byte_at_the_end, 200, b"a\0\0"),
    (tail_after_the_end, 200, b"ok"),
    (chunked_tail, 200, b"data: 0\n\n"),
]


@pytest.mark.parametrize(("script", "status", "body"), WHOLE, ids=lambda x: getattr(x, "__name__", ""))
def test_a_whole_reply_is_no_failure_whatever_its_shape(script: Script, status: int, body: bytes) -> None:
    captures, _, _ = shoot(script, [0.0, 0.0], deadline_s=5)
    for capture in captures:
        assert capture.failure is None, capture.detail
        parsed = http1.parse(capture.reads)
        assert parsed is not None
        assert (parsed[0].status, parsed[0].body) == (status, body)


@pytest.mark.parametrize("script", [tail_after_the_end, chunked_tail])
def test_a_connection_with_bytes_behind_the_end_is_not_used_again(script: Script) -> None:
    _, _, server = shoot(script, [0.0, 120.0], deadline_s=5)
    assert server.n_connections == 2


async def hangs(writer: asyncio.StreamWriter, asked: Asked) -> None:
    await asyncio.sleep(600)


async def hangs_midway(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: 0\n\n"))
    await hangs(writer, asked)


async def resets(writer: asyncio.StreamWriter, asked: Asked) -> None:
    reset(writer)


async def resets_midway(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: 0\n\n"))
    await asyncio.sleep(0.5)  # a reset takes away what has not been read
    reset(writer)


async def closes(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.close()


async def half_closes_midway(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(STREAM_HEAD + chunk(b"data: 0\n\n") + b"9\r\ndata")
    writer.write_eof()
    await asyncio.sleep(0.05)
    writer.close()


async def talks_ssh(writer: asyncio.StreamWriter, asked: Asked) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")


def deadline_for(failure: str) -> float:
    """Long where the server ends the exchange; else long enough for all that it sends before."""
    return 1.0 if failure == "timeout" else 60.0


BROKEN: list[tuple[Script, str, int]] = [
    (hangs, "timeout", 0),
    (hangs_midway, "timeout", 1),
    (resets, "reset", 0),
    (resets_midway, "reset", 1),
    (closes, "truncated", 0),
    (half_closes_midway, "truncated", 1),
    (talks_ssh, "truncated", 1),
]


@pytest.mark.parametrize(("script", "failure", "n_reads"), BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_exchange_names_its_failure_and_keeps_what_came(
    script: Script, failure: str, n_reads: int
) -> None:
    captures, _, _ = shoot(script, [0.0, 0.0], deadline_s=deadline_for(failure))
    for capture in captures:
        assert capture.failure == failure
        assert capture.detail
        assert len(capture.reads) >= n_reads
        assert capture.closed_ns is not None


SOME = [b"data: %d\n\n" % i for i in range(5)]


async def some_events(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    for event in SOME:
        writer.write(chunk(event))
        await asyncio.sleep(0.005)


async def hangs_after_some(writer: asyncio.StreamWriter, asked: Asked) -> None:
    await some_events(writer)
    await asyncio.sleep(600)


async def resets_after_some(writer: asyncio.StreamWriter, asked: Asked) -> None:
    await some_events(writer)
    await asyncio.sleep(0.5)  # a reset takes away what has not been read
    reset(writer)


async def closes_after_some(writer: asyncio.StreamWriter, asked: Asked) -> None:
    await some_events(writer)
    writer.close()


async def sends_no_chunks_after_some(writer: asyncio.StreamWriter, asked: Asked) -> None:
    await some_events(writer)
    writer.write(b"no chunk\r\n")


CUT_SHORT = [
    (hangs_after_some, "timeout"),
    (resets_after_some, "reset"),
    (closes_after_some, "truncated"),
    (sends_no_chunks_after_some, "truncated"),
]


@pytest.mark.parametrize(("script", "failure"), CUT_SHORT, ids=lambda x: getattr(x, "__name__", ""))
def test_every_event_of_a_stream_that_is_cut_short_is_kept(script: Script, failure: str) -> None:
    captures, client, _ = shoot(script, [0.0] * 3, deadline_s=deadline_for(failure))
    assert client.wire.reader.n_reads > 0
    for capture in captures:
        assert capture.failure == failure
        data = b"".join(read.data for read in capture.reads)
        assert data.startswith(STREAM_HEAD + b"".join(map(chunk, SOME)))
    assert client.wire.reader.n_bytes == sum(len(r.data) for c in captures for r in c.reads)


def test_every_event_of_a_stream_that_is_stopped_is_kept() -> None:
    whole = STREAM_HEAD + b"".join(map(chunk, SOME))

    async def stop(client: Client, server: Scripted) -> None:
        while client.wire.reader.n_bytes < len(whole):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        client.wire.stop()

    [capture], _, _ = shoot(hangs_after_some, [0.0], meanwhile=stop)
    assert capture.failure == "cancelled"
    assert b"".join(read.data for read in capture.reads) == whole


def test_a_stream_of_megabytes_arrives_whole() -> None:
    events = [b"data: %s\n\n" % (b"%d" % i * 40_000) for i in range(30)]

    async def long(writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(STREAM_HEAD)
        for event in events:
            writer.write(chunk(event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    captures, _, _ = shoot(long, [0.0, 0.0], deadline_s=10)
    for capture in captures:
        assert capture.failure is None, capture.detail
        assert body_of(capture) == b"".join(events)
        assert max(len(read.data) for read in capture.reads) <= 1 << 17


def test_no_stream_gets_bytes_of_the_one_whose_descriptor_it_took_over() -> None:
    """Connections come and go in mid-stream, so that their numbers are used again at once."""

    async def says_who(writer: asyncio.StreamWriter, asked: Asked) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(6):
            writer.write(chunk(b"data: %s\n\n" % asked.body))
            await asyncio.sleep(0.001)
        if int(asked.body) % 2:
            reset(writer)
        else:
            writer.write(b"0\r\n\r\n")

    async def scenario() -> None:
        async with serving(says_who) as server:
            exchanges = [Exchange(i) for i in range(40)]
            with Client(server.url, concurrency=4, deadline_s=5) as client:
                await client.asked(*exchanges)
            for exchange in exchanges:
                assert exchange.failure == ("reset" if exchange.index % 2 else None)
                said = set(re.findall(rb"data: (\d+)", exchange.data))
                assert said <= {b"%d" % exchange.index}
                assert said or exchange.failure

    asyncio.run(scenario())


def test_a_refused_connection_is_a_failure_with_address_and_cause() -> None:
    async def scenario() -> list[Capture]:
        async with serving(stream) as server:
            url = server.url
        return await fire_at(Client(url), [0.0, 0.0, 1.0])

    for capture in asyncio.run(scenario()):
        assert capture.failure == "connect"
        assert "127.0.0.1" in (capture.detail or "")
        assert "refused" in (capture.detail or "")
        assert capture.sent_ns is None


def test_one_straggler_times_out_and_the_others_are_whole() -> None:
    async def one_hangs(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await (hangs if len(server_calls) == 7 else stream)(writer, asked)

    server_calls: list[int] = []

    async def counting(writer: asyncio.StreamWriter, asked: Asked) -> None:
        server_calls.append(1)
        await one_hangs(writer, asked)

    captures, _, _ = shoot(counting, [0.0] * 30, deadline_s=2)
    assert sorted(c.failure or "ok" for c in captures) == ["ok"] * 29 + ["timeout"]


def test_the_deadline_counts_from_due_not_from_the_start() -> None:
    captures, _, _ = shoot(hangs, [0.0, 150.0], deadline_s=0.2)
    for capture in captures:
        assert capture.failure == "timeout"
        assert capture.closed_ns is not None
        assert capture.closed_ns - capture.due_ns >= 200 * MS


def test_a_large_body_goes_out_in_parts_and_arrives_whole() -> None:
    body = bytes(range(256)) * 12_000
    captures, _, server = shoot(stream, [0.0, 0.0], body=body)
    assert [c.failure for c in captures] == [None, None]
    assert all(a.body == body for a in server.asked)
    assert all(c.sent_ns is not None for c in captures)


def test_stop_cancels_what_is_in_flight_and_sends_nothing_more() -> None:
    async def stop(client: Client, server: Scripted) -> None:
        while len(server.asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        client.wire.stop()

    captures, _, server = shoot(hangs, [0.0, 0.0, 5000.0, 60_000.0], meanwhile=stop)
    assert [c.failure for c in captures] == ["cancelled", "cancelled", "not_sent", "not_sent"]
    assert len(server.asked) == 2
    assert captures[2].closed_ns is None


@pytest.fixture(scope="module")
def server_context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    folder: Path = tmp_path_factory.mktemp("tls")
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=127.0.0.1"]
    try:
        subprocess.run(argv, cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def test_https_replies_are_whole_stamped_and_reuse_their_connection(server_context: ssl.SSLContext) -> None:
    async def scenario() -> None:
        async with serving(stream, server_context) as server:
            unchecked = ssl.create_default_context()
            unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
            client = Client(server.url, tls=unchecked)
            captures = await fire_at(client, [0.0, 0.0, 1000.0], b"x" * 300_000)
            for capture in captures:
                assert capture.failure is None, capture.detail
                assert body_of(capture) == STREAMED
                assert all(read.kernel_ns is not None for read in capture.reads)
            assert server.n_connections == 2
            assert all(len(a.body) == 300_000 for a in server.asked)

    asyncio.run(scenario())


def test_an_untrusted_certificate_is_a_connect_failure(server_context: ssl.SSLContext) -> None:
    async def scenario() -> None:
        async with serving(stream, server_context) as server:
            [capture] = await fire_at(Client(server.url, tls=ssl.create_default_context()), [0.0])
            assert capture.failure == "connect"
            assert "CERTIFICATE" in (capture.detail or "").upper()

    asyncio.run(scenario())


def test_who_asks_a_wire_that_has_ended_writes_into_nobodys_file(tmp_path: Path) -> None:
    wire = Wire([], lambda _: None)
    number = wire._wake
    wire.start()
    wire.close()
    with (tmp_path / "another").open("wb") as file:
        os.dup2(file.fileno(), number)
        wire.end()
        os.close(number)
    assert (tmp_path / "another").read_bytes() == b""


def test_requests_that_come_when_the_wire_has_ended_are_not_sent_each_once() -> None:
    ended: list[Exchange] = []
    wire = Wire([], ended.extend)
    wire.start()
    wire.close()
    exchanges = [Exchange(index) for index in range(3)]
    wire.park(*exchanges)
    assert ended == exchanges
    assert [exchange.failure for exchange in exchanges] == ["not_sent"] * 3


def test_a_bug_in_the_wire_ends_every_exchange_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: object, *_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("burstline.loadgen.wire.dispatcher.Dispatcher.expire", breaks)

    async def scenario() -> None:
        async with serving(hangs) as server:
            exchanges = [Exchange(0), Exchange(1)]
            with Client(server.url) as client:
                for exchange in exchanges:  # the second is parked when the thread has ended
                    await client.asked(exchange)
            assert {exchange.failure for exchange in exchanges} <= {"cancelled", "not_sent"}
            assert str(client.wire.error) == "a bug"

    asyncio.run(scenario())


def test_a_bug_on_one_reply_ends_that_exchange_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Dispatcher.check

    def breaks(self: Dispatcher, connection: Connection, exchange: Exchange) -> None:
        if exchange.index == 1:
            raise ValueError("a reply that nobody foresaw")
        check(self, connection, exchange)

    monkeypatch.setattr(Dispatcher, "check", breaks)

    async def scenario() -> list[Exchange]:
        exchanges = [Exchange(index) for index in range(3)]
        async with serving(stream) as server:
            with Client(server.url) as client:
                for exchange in exchanges:
                    await client.asked(exchange)
            assert client.wire.error is None
        return exchanges

    first, second, third = asyncio.run(scenario())
    assert (first.failure, second.failure, third.failure) == (None, "truncated", None)
    assert "ValueError: a reply that nobody foresaw" in str(second.detail)


def test_four_drivers_that_open_at_once_fit_into_the_backlog_of_a_server_that_does_not_accept_yet():
    with socket.create_server(("127.0.0.1", 0), backlog=HYPERCORNS_BACKLOG) as listener:
        pools = [
            Pool(
                select.epoll(),
                [(socket.AF_INET, listener.getsockname())],
                None,
                "127.0.0.1",
                Network(is_remote=False),
            )
            for _ in range(4)
        ]
        for pool in pools:
            pool.want(1000)
        opening = [connection.sock for pool in pools for connection in pool.by_fd.values()]
        _, connected, _ = select.select([], opening, [], 0.5)
        for pool in pools:
            pool.close()
    assert len(opening) > HYPERCORNS_BACKLOG / 2
    assert len(connected) == len(opening)


HYPERCORNS_BACKLOG = 100


class Outage(socket.socket):
    """While `is_on`, a connect fails at once, as where the route is gone or no local port is free."""

    code = 0

    def connect_ex(self, address: Any) -> int:
        return Outage.code or super().connect_ex(address)


@pytest.mark.parametrize("code", [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL])
def test_a_network_that_is_away_costs_only_requests_of_that_time(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request every 10 ms on a connection of its own, some of which stand; each that fails says why."""
    monkeypatch.setattr("burstline.loadgen.wire.pool.socket.socket", Outage)
    monkeypatch.setattr(Outage, "code", 0)

    async def long_reply(writer: asyncio.StreamWriter, asked: Asked) -> None:
        await asyncio.sleep(1.0)
        await stream(writer, asked)

    async def goes_away(client: Client, server: Scripted) -> None:
        while len(server.asked) < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        Outage.code = code
        while client.wire.traffic.n_failed < 10:  # noqa: ASYNC110 the server tells nobody
            await asyncio.sleep(0.005)
        Outage.code = 0

    captures, client, _ = shoot(long_reply, [10.0 * k for k in range(150)], meanwhile=goes_away)
    failed = [capture for capture in captures if capture.failure is not None]
    assert client.wire.error is None
    assert {capture.failure for capture in failed} == {"connect"}
    assert all(os.strerror(code) in (capture.detail or "") for capture in failed)
    assert 10 <= len(failed) < 100
    assert captures[0].failure is captures[-1].failure is None


@pytest.mark.parametrize(("stands", "left"), [(False, [1]), (True, [1, 1])])
def test_a_try_that_fails_for_good_ends_others_only_where_no_connection_stands(
    monkeypatch: pytest.MonkeyPatch, *, stands: bool, left: list[int]
) -> None:
    """The second of three is on its last try, and all of them fail at once."""
    monkeypatch.setattr("burstline.loadgen.wire.pool.socket.socket", Outage)
    monkeypatch.setattr(Outage, "code", errno.ENETUNREACH)
    addresses = [(socket.AF_INET, ("127.0.0.1", 9))]
    pool = Pool(select.epoll(), addresses, None, "127.0.0.1", Network(is_remote=False))
    if stands:
        sock = socket.socket()
        pool.by_fd[sock.fileno()] = Connection(sock, 0, connected_ns=1)
    pool._retries = [0, 3, 0]
    pool.tick(time.monotonic_ns())
    assert pool._retries == left
    assert [why for _, why in pool.refusals] == ["cannot connect to 127.0.0.1:9: Network is unreachable"]
    pool.close()


def test_a_request_is_not_refused_by_a_try_that_began_before_it() -> None:
    pool = Pool(
        select.epoll(), [(socket.AF_INET, ("127.0.0.1", 1))], None, "127.0.0.1", Network(is_remote=False)
    )
    traffic = Dispatcher(select.epoll(), Reader(select.epoll()), pool, None, None)
    early, late = Exchange(0), Exchange(1)
    traffic.park(early, late)
    traffic.release(time.monotonic_ns())
    traffic.fire(time.monotonic_ns())
    pool.failure = None
    pool.refusals = [((early.dispatched_ns or 0) - 1, "too early"), (early.dispatched_ns or 0, "its own")]
    traffic.refuse_waiting()
    assert (early.detail, late.failure) == ("its own", None)
    pool.close()


def test_an_address_that_is_silent_is_passed_over_and_the_one_that_answers_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("burstline.loadgen.wire.pool._CONNECT_TIMEOUT_NS", 600_000 * MS)

    async def scenario() -> tuple[list[Capture], Wire, int]:
        async with serving(stream) as server:
            with full_listener() as silent:
                port = int(server.url.rpartition(":")[2])
                both = [(socket.AF_INET, silent), (socket.AF_INET, ("127.0.0.1", port))]
                client = Client(server.url, deadline_s=5.0)
                client.wire.pool._addresses = both
                captures = await fire_at(client, [0.0] * 40)
                return captures, client.wire, server.n_connections

    captures, wire, n_connections = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert [capture.failure for capture in captures] == [None] * 40
    assert wire.pool._best == 1
    assert n_connections <= 40 + 24


def test_the_address_that_answered_comes_first_from_then_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        addresses = [(socket.AF_INET, listener.getsockname())] * 3
        pool = Pool(select.epoll(), addresses, None, "127.0.0.1", Network(is_remote=False))
        pool._best = 1
        assert all(pool.open(tries) for tries in range(3))
        assert [connection.place for connection in pool.by_fd.values()] == [1, 2, 0]
        pool.close()


@contextmanager
def full_listener() -> Iterator[tuple[str, int]]:
    """An address that answers no connect: its listener's backlog is full, so the kernel drops what comes."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as waiting:
        address = listener.getsockname()
        for _ in range(4):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(address)
        yield address
