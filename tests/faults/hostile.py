"""Servers that do wrong: each fault is a function over one connection's raw socket.

A server counts its connections and answers what a benchmark asks before the load (the list of models, one
token) as an honest one would; `misbehave` gets every request after that.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}).encode()


@dataclass
class Asked:
    """One request: its number among those of the load, its head and body."""

    nth: int
    head: bytes
    body: bytes


Fault = Callable[[socket.socket, Asked], None]


@dataclass
class Hostile:
    url: str
    n_connections: int = 0
    n_load: int = 0
    threads: list[threading.Thread] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    greet: Callable[[socket.socket, int], bool] | None = None


@contextmanager
def serving(
    misbehave: Fault,
    *,
    tls: ssl.SSLContext | None = None,
    greet: Callable[[socket.socket, int], bool] | None = None,
    n_honest: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    pages: Mapping[bytes, bytes] = MappingProxyType({}),
) -> Iterator[Hostile]:
    """A server, at a free port unless told. `pages` are its answers to GET by path. `greet` sees each new connection first, and says whether to go on with it.

    The first `n_honest` generations are answered as asked: those by which the benchmark tries the server.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    name = f"[{host}]" if ":" in host else host
    server = Hostile(f"http{'s' if tls else ''}://{name}:{listener.getsockname()[1]}", greet=greet)
    stopped = threading.Event()
    open_sockets: list[socket.socket] = []

    def one(sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ssl.SSLError, ValueError), contextlib.closing(sock):
            if tls is not None:
                sock = tls.wrap_socket(sock, server_side=True)
                open_sockets.append(sock)
            if greet is not None and not greet(sock, server.n_connections):
                return
            while (asked := read_request(sock)) is not None:
                if asked.head.startswith(b"GET"):
                    path = asked.head.split(b" ")[1]
                    plain(sock, pages.get(path, MODELS if b"/models" in path else b"{}"))
                    continue
                with server.lock:
                    nth = server.n_load - n_honest
                    server.n_load += 1
                if nth < 0:
                    honest(sock, asked)
                else:
                    misbehave(sock, Asked(nth, asked.head, asked.body))

    def accept() -> None:
        while not stopped.is_set():
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            server.n_connections += 1
            open_sockets.append(sock)
            thread = threading.Thread(target=one, args=(sock,), daemon=True)
            thread.start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server
    finally:
        stopped.set()
        for sock in [listener, *open_sockets]:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def read_request(sock: socket.socket) -> Asked | None:
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: *(\d+)", head)
    while length and len(body) < int(length[1]):
        body += sock.recv(65536)
    return Asked(0, head, body)


def event(text: str = "x", *, finish: str | None = None, usage: object = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n"


def usage(n: int, prompt: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": n}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def honest(sock: socket.socket, asked: Asked) -> None:
    """What was asked for, streamed, with a count in every event."""
    fields = json.loads(asked.body)
    n, prompt = fields["max_tokens"], fields["prompt"]
    n_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    parts = [event(finish="length" if k == n else None, usage=usage(k, n_prompt)) for k in range(1, n + 1)]
    sock.sendall(
        STREAM_HEAD + b"".join(chunk(part) for part in parts) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    )


def plain(sock: socket.socket, body: bytes, status: str = "200 OK", more: bytes = b"") -> None:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n".encode()
    sock.sendall(head + more + b"\r\n" + body)


def reset(sock: socket.socket) -> None:
    """Close with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# Faults: those of a reply's bytes.


def says(raw: bytes) -> Fault:
    """Exactly these bytes, and the connection stays."""
    return lambda sock, asked: sock.sendall(raw)


def replies(value: object) -> Fault:
    """This JSON value, as a whole reply."""
    return lambda sock, asked: plain(sock, value if isinstance(value, bytes) else json.dumps(value).encode())


def streams(*events: bytes) -> Fault:
    raw = STREAM_HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"
    return lambda sock, asked: sock.sendall(raw)


def then_resets(raw: bytes) -> Fault:
    def fault(sock: socket.socket, asked: Asked) -> None:
        sock.sendall(raw)
        time.sleep(0.02)
        reset(sock)

    return fault


def then_closes(raw: bytes) -> Fault:
    def fault(sock: socket.socket, asked: Asked) -> None:
        sock.sendall(raw)
        sock.close()

    return fault


def endless(piece: bytes, before: bytes = STREAM_HEAD) -> Fault:
    """`piece` for ever, as fast as it is taken."""

    def fault(sock: socket.socket, asked: Asked) -> None:
        sock.sendall(before)
        block = piece * (65536 // len(piece) + 1)
        while True:
            sock.sendall(block)

    return fault


def dribbles(raw: bytes, pause_s: float = 0.002) -> Fault:
    """A byte at a time."""

    def fault(sock: socket.socket, asked: Asked) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for k in range(len(raw)):
            sock.sendall(raw[k : k + 1])
            time.sleep(pause_s)

    return fault


def hangs(raw: bytes = b"") -> Fault:
    def fault(sock: socket.socket, asked: Asked) -> None:
        sock.sendall(raw)
        sock.recv(1)

    return fault


def quotes_authorization(sock: socket.socket, asked: Asked) -> None:
    """An error that repeats the credentials it refuses, twice: as they came and in JSON's own way."""
    lines = re.findall(rb"(?im)^(?:authorization|x-api-key): *(.*?)\r?$", asked.head)
    said = b" ".join(lines).decode() or "none"
    plain(
        sock, json.dumps({"error": {"message": f"invalid key {said} {said!r}"}}).encode(), "401 Unauthorized"
    )


def refuses_all(sock: socket.socket, n: int) -> bool:
    """A greeting: whatever is asked, its credentials are refused and quoted."""
    while (asked := read_request(sock)) is not None:
        quotes_authorization(sock, asked)
    return False


def for_some(fault: Fault, every: int) -> Fault:
    """The fault for every n-th request of the load, what was asked for the others."""

    def mixed(sock: socket.socket, asked: Asked) -> None:
        (fault if asked.nth % every == 0 else honest)(sock, asked)

    return mixed


def closes_at_once(sock: socket.socket, n: int) -> bool:
    """A greeting that is none."""
    return False


def resets_at_once(sock: socket.socket, n: int) -> bool:
    reset(sock)
    return False
