"""The known-truth server for one's own clients: its scripts, how it closes, and what it states at its end."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import pytest

from burstline.servers.truth.__main__ import statement
from burstline.servers.truth.replies import Replies, Script, Wanted
from burstline.servers.truth.router import SCRIPTS, HttpRequest, Router, TruthSetup, take_call
from burstline.servers.truth.serve import TruthServer
from burstline.workloads.request import WorkloadError
from tests.measure.test_certify import MS, served

OWN = Script(ttft_s=0.2, gaps_s=(0.01,))
BODY = orjson.dumps(
    {"prompt": [1, 2], "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
)


def events(script: str, *, chat: bool = False) -> list[tuple[float, str, int]]:
    """What a script sends of 8 tokens: s after the arrival, kind and tokens."""
    reply = Replies().make(SCRIPTS[script](OWN, 4).scripts[-1], Wanted("m", 2, 8, chat=chat))
    rows = zip(reply.writes, reply.offsets_ns, strict=True)
    return [(at_ns / 1e9, mark.kind, mark.n_tok) for write, at_ns in rows for mark in write.marks]


@pytest.mark.parametrize("chat", [False, True])
def test_each_script_decides_what_it_is_there_for(chat: bool) -> None:
    assert [n for _, kind, n in events("chunks", chat=chat) if kind == "token"] == [4, 4]
    role, first = (
        next(each for each in events("early-role", chat=chat) if each[1] == kind)
        for kind in ("role", "token")
    )
    assert (role[0], first[0]) == (0.0, 0.2)
    assert "usage" not in [kind for _, kind, _ in events("no-usage", chat=chat)]
    late = events("late-usage", chat=chat)
    assert [(round(at_s, 3), kind) for at_s, kind, _ in late if kind in ("usage", "done")] == [
        (1.27, "usage"),
        (1.27, "done"),
    ]
    assert max(at_s for at_s, kind, _ in late if kind == "token") == pytest.approx(0.27)
    refusing = SCRIPTS["refusing"](OWN, 4)
    assert ([each.status for each in refusing.scripts], refusing.cycle) == ([200, 500], True)


def test_a_request_names_its_script() -> None:
    router = Router(TruthSetup((OWN,)))

    def script(header: bytes) -> Script:
        return router.script(HttpRequest("POST", "/v1/completions", {b"x-burstline-script": header}, b"", 0))

    assert script(b"refusing").status == 500
    assert script(b"chunks").tok_per_event == (4,)
    assert script(b'{"headers_s": 0, "ttft_s": 0, "gaps_s": [0.5], "n_tok": null}').gaps_s == (0.5,)
    call = HttpRequest("POST", "/v1/completions", {b"x-burstline-script": b"nonsense"}, BODY, 0)
    assert router.answer(call).reply.status == 400
    with pytest.raises(WorkloadError, match="role_s 3"):
        Script(role_s=3.0)


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [("1.1", "", True), ("1.1", "Close", False), ("1.0", "", False), ("1.0", "Keep-Alive", True)],
)
def test_a_client_says_whether_its_connection_is_kept(
    version: str, connection: str, keep_alive: bool
) -> None:
    head = f"GET / HTTP/{version}\r\nConnection: {connection}\r\n\r\n".encode()
    call = take_call(bytearray(head), 0)
    assert call is not None
    assert call.keep_alive is keep_alive


@contextmanager
def serving() -> Iterator[TruthServer]:
    server = TruthServer(Router(TruthSetup((Script(ttft_s=0, gaps_s=(0.001,)),))))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)


def exchange(server: TruthServer, request: bytes) -> bytes:
    """All that comes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(65536), b""))


@pytest.mark.parametrize(
    "first", ["POST /v1/completions HTTP/1.0", "GET /health HTTP/1.0", "GET /health HTTP/1.1"]
)
def test_a_client_that_reads_to_the_end_gets_one(first: str) -> None:
    body = BODY if first.startswith("POST") else b""
    head = f"{first}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with serving() as server:
        assert exchange(server, head + body).startswith(b"HTTP/1.1 200")
        assert [row.ended for row in server.exchanges] == ["done"] * bool(body)


def test_what_never_becomes_a_request_is_counted_by_its_path() -> None:
    with serving() as server:
        exchange(server, b"GET /props HTTP/1.0\r\n\r\n")
        exchange(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        exchange(server, b"POST /v1/responses HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        assert server.refused == {"GET /props": 1, "PRI *": 1, "no request of HTTP/1.1": 1}
        assert [(row.path, row.answer.reply.status) for row in server.exchanges] == [("/v1/responses", 404)]


def test_the_server_states_what_was_true() -> None:
    rows = [served(i, i * MS) for i in range(3)] + [served(3, 0, status=500, event_tok=[0] * 5)]
    count, ttft, itl, e2e = statement(rows)
    assert count == "4 requests, 3 of them served whole with 12 tokens"
    assert ttft == "TTFT p50 200.00 ms, p90 200.00 ms, p99 200.00 ms"
    assert itl.startswith("ITL p50 20.00 ms")
    assert e2e.startswith("E2E p50 260.00 ms")
    assert list(statement([])) == ["0 requests, 0 of them served whole with 0 tokens"]


@pytest.mark.slow
def test_serve_truth_shows_its_own_help_and_refuses_bad_times_in_a_line() -> None:
    command = [sys.executable, "-m", "burstline", "serve", "truth", "--"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--tokens-per-event" in shown
    bad = subprocess.run(
        [sys.executable, "-m", "burstline.servers.truth", "--itl", "-1"], capture_output=True, text=True
    )
    assert bad.returncode == 2
    assert "a time is negative" in bad.stderr
