"""What the server holds of each connection and request, and the truth of a run as rows that survive JSON."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import orjson

from burstline.servers.truth.http_requests import HttpRequest
from burstline.servers.truth.router import RoutedAnswer


class ClientSocket:
    """One socket: bytes of requests not yet answered, and of replies that the kernel had no room for."""

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
        self.exchange: Serving | None = None
        self.closing = False
        self.kernel_stamps = False
        self.first_byte_ns = self.stamp_ns = self.read_ns = 0


class Serving:
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
        "n_prompt_tok",
        "n_tok",
        "number",
        "path",
        "read_ns",
        "stamps_ns",
        "token_ns",
    )

    def __init__(
        self, connection: ClientSocket, answer: RoutedAnswer, number: int, call: HttpRequest
    ) -> None:
        self.connection: ClientSocket | None = connection
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
    `event_kind[i]` (headers, token, usage, done, plain), carries `event_tok[i]` tokens,
    was due at `event_due_ns[i]` and its last byte was handed to the kernel right after `event_ns[i]`; events
    that were not sent are not listed. `ended` is done or client_closed; None: still open.
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

    @property
    def token_ns(self) -> list[int]:
        """When each event with tokens was sent."""
        return [ns for ns, n_tok in zip(self.event_ns, self.event_tok, strict=True) if n_tok]

    @property
    def lateness_ns(self) -> list[int]:
        """By how much each event was sent after it was due: the server's own error."""
        return [sent - due for sent, due in zip(self.event_ns, self.event_due_ns, strict=True)]


def served(exchange: Serving) -> Served:
    """The row of one exchange, as far as it went."""
    kinds: list[str] = []
    n_toks, due_ns, sent_ns = array("q"), array("q"), array("q")
    reply, wanted = exchange.answer.reply, exchange.answer.wanted
    for write, offset_ns, at_ns in zip(reply.writes, reply.offsets_ns, exchange.stamps_ns, strict=False):
        for mark in write.marks:
            kinds.append(mark.kind)
            n_toks.append(mark.n_tok)
            due_ns.append(exchange.arrival_ns + offset_ns)
            sent_ns.append(at_ns)
    return Served(
        number=exchange.number,
        index=exchange.index,
        path=exchange.path,
        status=reply.status,
        first_byte_ns=exchange.first_byte_ns,
        arrival_ns=exchange.arrival_ns,
        read_ns=exchange.read_ns,
        kernel_stamps=exchange.kernel_stamps,
        ended_ns=exchange.ended_ns,
        ended=exchange.ended,
        n_prompt_tok=wanted.n_prompt_tok if wanted else None,
        event_kind=kinds,
        event_tok=n_toks.tolist(),
        event_due_ns=due_ns.tolist(),
        event_ns=sent_ns.tolist(),
    )


def to_jsonl(rows: Iterable[Served]) -> bytes:
    """One JSON object a line."""
    return b"".join(orjson.dumps(asdict(row)) + b"\n" for row in rows)


def from_jsonl(text: bytes) -> tuple[Served, ...]:
    """What `to_jsonl` wrote."""
    return tuple(Served(**orjson.loads(line)) for line in text.splitlines())
