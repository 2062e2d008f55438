"""What the kernel says of the way to a server: transmit stamps and TCP's round trips."""

import socket
import sys
import time
from contextlib import suppress

import pytest

from burstline.loadgen.wire import clock
from burstline.loadgen.wire.clock import Offsets
from burstline.loadgen.wire.exchange import READ, Exchange
from burstline.loadgen.wire.network import Network, is_remote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="transmit stamps are Linux's")


def test_only_a_server_beyond_the_loopback_is_remote():
    at = lambda host: [(socket.AF_INET, (host, 80))]  # noqa: E731
    assert is_remote(at("10.0.0.7"))
    assert is_remote([*at("127.0.0.1"), *at("192.168.1.2")])
    assert not is_remote([*at("127.0.0.1"), (socket.AF_INET6, ("::1", 80, 0, 0))])
    assert not is_remote([])


def test_the_kernel_stamps_when_a_requests_last_byte_left():
    offsets = Offsets()
    offsets.observe(time.monotonic_ns())
    network, exchange = Network(), Exchange()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        with client, peer:
            client.setblocking(False)
            network.watch(client)
            before_ns = time.monotonic_ns()
            client.send(b"x" * 3000)
            limit_s = time.monotonic() + 10
            while exchange.left is None and time.monotonic() < limit_s:
                time.sleep(0.001)
                network.read_stamps(client, exchange)
            peer.recv(4096)
            time.sleep(0.05)  # until the acknowledgement is there: TCP's round trip rests on it
            network.leave(client)
    assert before_ns - 100_000 < offsets.moment(exchange.left) < time.monotonic_ns()
    report = network.report()
    assert (report.n, report.retransmits) == (1, 0)
    assert 0 < report.least_rtt_p50_ns <= report.rtt_p99_ns < 1_000_000_000


def test_the_send_of_a_long_request_is_when_its_last_byte_left():
    offsets, exchange = Offsets(), Exchange()
    offsets.observe(0)
    for left_ns, sent_ns in ((40_000, 40_000), (900, 1_000), (None, 1_000)):
        exchange.sent_ns = 1_000
        exchange.left = None if left_ns is None else (left_ns + offsets.offset_ns[0], 50_000)
        assert exchange.capture(0, offsets).sent_ns == sent_ns


def test_no_request_is_sent_after_its_reply_began():
    """Who loses the CPU between the send and its stamp would print a TTFT below 0."""
    offsets, exchange = Offsets(), Exchange()
    offsets.observe(0)
    exchange.sent_ns = 574_000
    exchange.reads += READ.pack(300_000, bytes(16), 0, 0) + READ.pack(900_000, bytes(16), 0, 0)
    for writing_ns, sent_ns in ((0, 300_000), (100_000, 100_000), (299_000, 299_000), (400_000, 300_000)):
        exchange.writing_ns = writing_ns
        assert exchange.capture(0, offsets).sent_ns == sent_ns, "nor at the moment of its reply"
    exchange.sent_ns, exchange.writing_ns = 200_000, 100_000
    assert exchange.capture(0, offsets).sent_ns == 200_000


def test_a_step_of_the_wall_clock_moves_no_send(monkeypatch):
    """The wall clock steps by 1 s between two observations, at 70 ms; bytes leave 2 ms after each send."""
    ms, step_ns = 1_000_000, 1_000_000_000
    for sign in (-1, 1):
        offsets = clock.Offsets()
        start_ns = 1_700_000_000_000_000_000

        def offset_at(at_ns, sign=sign, start_ns=start_ns):
            return start_ns + (sign * step_ns if at_ns >= 70 * ms else 0)

        for at_ns in (0, 50 * ms, 100 * ms, 150 * ms):
            monkeypatch.setattr(clock, "realtime_offset_ns", lambda at_ns=at_ns: offset_at(at_ns))
            offsets.observe(at_ns)
        for sent_ns, stamped in ((20 * ms, True), (60 * ms, False), (69 * ms, False), (120 * ms, True)):
            exchange = Exchange()
            exchange.sent_ns, left_ns = sent_ns, sent_ns + 2 * ms
            exchange.left = left_ns + offset_at(left_ns), left_ns + 50_000
            assert exchange.capture(0, offsets).sent_ns == (left_ns if stamped else sent_ns)


@pytest.mark.parametrize(("backlog", "is_full"), [(0, True), (1, True), (64, False)])
def test_a_full_listen_queue_on_the_loopback_is_seen_in_what_tcp_sends_again(backlog: int, is_full: bool):
    """The kernel drops what does not fit, and TCP sends it again after 0.2 s or later."""
    network = Network(is_remote=False)
    with socket.create_server(("127.0.0.1", 0), backlog=backlog) as server:
        clients = [socket.socket() for _ in range(6)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        time.sleep(0.1)
        for client in clients:
            with suppress(OSError):  # not yet connected
                client.send(b"x")
        time.sleep(1.2)
        for client in clients:
            network.leave(client)
            client.close()
    report = network.report()
    assert (report is not None) == is_full, report
    assert not is_full or report.retransmits > 0
