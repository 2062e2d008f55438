"""The server's state of each connection and request, and the true times of a run as JSON rows."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from zlib import crc32

import orjson

from burstline.servers.truth.http_requests import HttpRequest
from burstline.servers.truth.router import RoutedAnswer


@dataclass(slots=True, eq=False)
class ClientSocket:
    """One socket: bytes of requests not yet answered, and of replies that the kernel had no room for."""

    sock: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    exchange: Serving | None = None
    closing: bool = False
    number: int = 0
    kernel_stamps: bool = False
    first_byte_ns: int = 0
    stamp_ns: int = 0
    read_ns: int = 0


class Serving:
    """One request and the reply in progress."""

    def __init__(
        self, connection: ClientSocket, answer: RoutedAnswer, number: int, call: HttpRequest
    ) -> None:
        self.connection: ClientSocket | None = connection
        self.connection_number = connection.number
        self.answer = answer
        self.number = number
        index = call.headers.get(b"x-burstline-index", b"")
        self.index = int(index) if index.isdigit() else None
        self.path, self.keep_alive = call.path, call.keep_alive
        self.is_probe = b"x-burstline-probe" in call.headers
        self.body_hash = crc32(call.body)
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
    `event_kind[i]` (headers, role, token, usage, done, plain), carries `event_tok[i]` tokens,
    was due at `event_due_ns[i]` and its last byte was handed to the kernel right after `event_ns[i]`; events
    that were not sent are not listed. `ended` is done, close or client_closed; None: still open.
    Requests of one `connection` came over the same socket, those of one `body_hash` said the same; `text` is
    the prompt's, None where it came as token ids; `n_output_tok` is how many tokens it asked for.
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
    connection: int = 0
    body_hash: int = 0
    text: str | None = None
    n_output_tok: int | None = None

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
        connection=exchange.connection_number,
        body_hash=exchange.body_hash,
        text=exchange.answer.text,
        n_output_tok=wanted.n_output_tok if wanted else None,
    )


def to_jsonl(rows: Iterable[Served]) -> bytes:
    return b"".join(orjson.dumps(asdict(row)) + b"\n" for row in rows)


def from_jsonl(text: bytes) -> tuple[Served, ...]:
    return tuple(Served(**orjson.loads(line)) for line in text.splitlines())
