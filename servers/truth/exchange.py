"""What the server holds of each connection and of each request on it."""

from __future__ import annotations

import socket
from array import array

from servers.truth.http_requests import Call
from servers.truth.router import Answer


class Connection:
    """One socket: what came in and is not yet asked, what is to go out and does not fit."""

    __slots__ = (
        "closing",
        "exchange",
        "first_byte_ns",
        "inbox",
        "kernel_stamps",
        "outbox",
        "read_ns",
        "sock",
        "stamp_ns",
    )

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.exchange: Exchange | None = None
        self.closing = False
        self.kernel_stamps = False
        self.first_byte_ns = self.stamp_ns = self.read_ns = 0


class Exchange:
    """One request and the reply in progress."""

    __slots__ = (
        "answer",
        "arrival_ns",
        "connection",
        "ended",
        "ended_ns",
        "first_byte_ns",
        "first_token_ns",
        "index",
        "kernel_stamps",
        "n_tok",
        "number",
        "path",
        "read_ns",
        "stamp",
        "stamps_ns",
        "token_ns",
    )

    def __init__(self, connection: Connection, answer: Answer, number: int, call: Call) -> None:
        self.connection: Connection | None = connection
        self.answer = answer
        self.number = number
        index = call.headers.get(b"x-burstline-index", b"")
        self.index = int(index) if index.isdigit() else None
        self.path = call.path
        self.first_byte_ns = connection.first_byte_ns
        self.arrival_ns = call.arrival_ns
        self.read_ns = connection.read_ns
        self.kernel_stamps = connection.kernel_stamps
        self.stamps_ns = array("q")
        self.stamp = b""
        self.token_ns = self.first_token_ns = 0  # when the latest and the first token were sent
        self.n_tok = 0
        self.ended: str | None = None
        self.ended_ns: int | None = None

    def due_ns(self) -> int | None:
        """When the next write is due, None after the last."""
        offsets_ns, step = self.answer.scene.offsets_ns, len(self.stamps_ns)
        return self.arrival_ns + offsets_ns[step] if step < len(offsets_ns) else None
