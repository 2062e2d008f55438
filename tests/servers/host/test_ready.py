"""One call to a server that behaves badly: an answer or an error, in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from burstline.servers.engines.vllm import Vllm
from burstline.servers.host import ready
from burstline.servers.host.ready import send
from burstline.servers.messages import Call, EngineError, Target
from tests.sockets import full_queue


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[Target]:
    """A server that answers one request in its own way; the target."""

    def serve() -> None:
        accepted, _ = listener.accept()
        with accepted:
            accepted.recv(1 << 16)
            answer(accepted)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "model")
        thread.join(5)


def get(target: Target, timeout_s: float = 5.0) -> ready.HttpReply:
    return send(target, Call("GET", "/x", headers=()), timeout_s)


def test_a_chunked_answer_is_put_together() -> None:
    raw = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with serving(lambda sock: sock.sendall(raw)) as target:
        reply = get(target)
    assert (reply.status, reply.body, reply.headers["x-a"]) == (200, b"abcde", "b")


def dribble(sock: socket.socket, part: bytes) -> None:
    """Until the client hangs up."""
    with pytest.raises(OSError):  # noqa: PT012
        while True:
            sock.sendall(part)
            time.sleep(0.02)


@pytest.mark.parametrize("begin", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_dribbles_is_given_up_in_time(begin: bytes) -> None:
    """Also where its answer says no length, and so would end where the connection does."""

    def answer(sock: socket.socket) -> None:
        sock.sendall(begin)
        dribble(sock, b"H")

    began_s = time.monotonic()
    with serving(answer) as target, pytest.raises(EngineError, match=r"no complete answer within 0\.3 s"):
        get(target, timeout_s=0.3)
    assert time.monotonic() - began_s < 4


def test_an_answer_cut_short_is_no_answer() -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"
    with serving(lambda sock: sock.sendall(raw)) as target, pytest.raises(EngineError, match="GET http"):
        get(target)


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "MAX_REPLY_BYTES", 1000)

    def endless(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        dribble(sock, b"x" * 500)

    with serving(endless) as target, pytest.raises(EngineError, match="1,000 bytes"):
        get(target, timeout_s=600.0)


@pytest.fixture
def mute() -> Iterator[Target]:
    """A server that takes a connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "model")


def test_a_server_whose_queue_of_connections_is_full_is_not_waited_for() -> None:
    with full_queue() as (host, port):
        target = Target(f"http://{host}:{port}", "model")
        with pytest.raises(EngineError, match=r"no connection to 127.0.0.1 within 0\.2 s"):
            get(target, timeout_s=0.2)


def test_a_server_that_does_not_greet_in_tls_may_have_none(mute: Target) -> None:
    asked = replace(mute, url=mute.url.replace("http:", "https:"))
    with pytest.raises(EngineError, match=r"within 0\.2 s, not even a greeting in TLS: try http:// instead"):
        get(asked, timeout_s=0.2)


def test_many_pages_share_a_limit(mute: Target) -> None:
    asked = ready.getter(mute, within_s=0.2)
    with pytest.raises(EngineError, match="no complete answer within"):
        asked("/a")
    with pytest.raises(EngineError, match=r"/b: no answers within 0\.2 s"):
        asked("/b")


def test_a_page_may_take_half_a_minute_where_no_other_limit_is_given(
    mute: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "send", lambda target, call, timeout_s: timeout_s)
    assert ready.getter(mute)("/a") == 30.0


class WithoutProbe(Vllm):
    probe_path = None


@pytest.mark.parametrize(("engine", "limit_s"), [(Vllm(), 600.0), (WithoutProbe(), 0.1)])
def test_a_server_that_says_nothing_is_asked_again_or_given_up(
    engine: Vllm, limit_s: float, mute: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its health page has a limit of its own, the request for a token what is left of the start's."""
    monkeypatch.setattr(ready, "PAGE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ready, "POLL_S", 0.0)
    assert "no complete answer within 0.1 s" in str(
        next(filter(None, ready._attempts(engine, mute, limit_s)))
    )


def test_what_is_no_http_is_an_error_of_the_server() -> None:
    with serving(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH\r\n")) as target, pytest.raises(EngineError):
        get(target)
