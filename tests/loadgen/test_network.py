"""What the kernel says of the way to a server: transmit stamps and TCP's round trips."""

import socket
import sys
import time

import pytest

from loadgen.wire.clock import Offsets
from loadgen.wire.exchange import Exchange
from loadgen.wire.network import Network, is_remote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="transmit stamps are Linux's")


def test_only_a_server_beyond_the_loopback_is_remote():
    at = lambda host: [(socket.AF_INET, (host, 80))]  # noqa: E731
    assert is_remote(at("10.0.0.7"))
    assert is_remote([*at("127.0.0.1"), *at("192.168.1.2")])
    assert not is_remote([*at("127.0.0.1"), (socket.AF_INET6, ("::1", 80, 0, 0))])
    assert not is_remote([])


def test_the_kernel_stamps_when_a_requests_last_byte_left_and_when_it_was_acknowledged():
    offsets = Offsets()
    offsets.observe(time.monotonic_ns())
    network, exchange = Network(offsets), Exchange()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        with client, peer:
            client.setblocking(False)
            network.watch(client)
            before_ns = time.monotonic_ns()
            client.send(b"x" * 3000)
            limit_s = time.monotonic() + 10
            while exchange.acked_ns is None and time.monotonic() < limit_s:
                peer.recv(4096) if exchange.left_ns is None else time.sleep(0.001)
                network.read_stamps(client, exchange)
            network.leave(client)
    assert before_ns - 100_000 < exchange.left_ns <= exchange.acked_ns < time.monotonic_ns()
    report = network.report()
    assert (report.n, report.retransmits) == (1, 0)
    assert 0 < report.least_rtt_p50_ns <= report.rtt_p99_ns < 1_000_000_000


def test_the_send_of_a_long_request_is_when_its_last_byte_left():
    offsets, exchange = Offsets(), Exchange()
    offsets.observe(0)
    exchange.sent_ns, exchange.left_ns = 1_000, 40_000
    assert exchange.capture(0, offsets).sent_ns == 40_000
    exchange.left_ns = 900
    assert exchange.capture(0, offsets).sent_ns == 1_000
    exchange.left_ns = None
    assert exchange.capture(0, offsets).sent_ns == 1_000
