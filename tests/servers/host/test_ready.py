"""One call to a server that behaves badly: an answer or an error, in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from burstline.servers.host import ready
from burstline.servers.host.ready import send
from burstline.servers.messages import Call, EngineError, Target


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


def test_a_server_that_dribbles_is_given_up_in_time() -> None:
    def dribble(sock: socket.socket) -> None:
        with pytest.raises(OSError):  # noqa: PT012 until the client hangs up
            while True:
                sock.sendall(b"H")
                time.sleep(0.02)

    began_s = time.monotonic()
    with serving(dribble) as target, pytest.raises(EngineError, match=r"no whole answer within 0\.3 s"):
        get(target, timeout_s=0.3)
    assert time.monotonic() - began_s < 4


def test_an_answer_cut_short_is_no_answer() -> None:
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"
    with serving(lambda sock: sock.sendall(raw)) as target, pytest.raises(EngineError, match="GET http"):
        get(target)


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "MAX_REPLY_BYTES", 1000)
    raw = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000
    with serving(lambda sock: sock.sendall(raw)) as target, pytest.raises(EngineError, match="1,000 bytes"):
        get(target)


def test_what_is_no_http_is_an_error_of_the_server() -> None:
    with serving(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH\r\n")) as target, pytest.raises(EngineError):
        get(target)
