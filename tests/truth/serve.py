"""The tests' server: replies that end as their scripts say, and a log that knows the queue and the cache."""

from __future__ import annotations

import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from burstline.servers.truth import serve
from burstline.servers.truth.replies import STAMP, Write
from burstline.servers.truth.serve import ClientSocket, Serving, TruthServer
from tests.truth.dialects import n_cached_tok_of
from tests.truth.router import LoadTally, ScriptedRouter, TruthSetup
from tests.truth.writes import CutWrite

_LINGER_RESET = (1).to_bytes(4, sys.byteorder) + (0).to_bytes(4, sys.byteorder)


@dataclass(frozen=True, slots=True)
class Served(serve.Served):
    """`start_ns` and `departure_ns` are the queue's, `n_cached_tok` the prefix cache's, where there is one.

    `ended` may also be close, half_close or reset; kinds of events may also be role, error and comment.
    """

    n_cached_tok: int | None = None
    start_ns: int | None = None
    departure_ns: int | None = None

    def ns_of(self, kind: str) -> int | None:
        """When the first event of this kind was sent; None where none was."""
        return next((ns for ns, own in zip(self.event_ns, self.event_kind, strict=True) if own == kind), None)


class ScriptedServer(TruthServer):
    """Serves the replies of a `ScriptedRouter`."""

    router: ScriptedRouter

    def __init__(self, setup: TruthSetup, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(ScriptedRouter(setup), host, port)
        self._stamps: dict[int, bytes] = {}

    def log(self) -> bytes:
        return serve.to_jsonl(map(_served, self.exchanges))

    def bytes_of(self, write: Write, exchange: Serving, now_ns: int) -> bytes:
        if not isinstance(write, CutWrite):
            return super().bytes_of(write, exchange, now_ns)
        if write.fresh:
            self._stamps[exchange.number] = STAMP % now_ns
        return self._stamps[exchange.number].join(write.pieces)[slice(*write.cut)]

    def finish(self, exchange: Serving, connection: ClientSocket) -> None:
        end = exchange.answer.reply.end
        if end == "stall":
            return
        if end in ("done", "close"):
            if exchange.token_ns and end == "done":
                ttft_ns = exchange.first_token_ns - exchange.arrival_ns
                e2e_ns = exchange.token_ns - exchange.arrival_ns
                tally = LoadTally(exchange.n_prompt_tok, exchange.n_tok, ttft_ns, e2e_ns)
                self.router.ended(tally, time.monotonic_ns())
            super().finish(exchange, connection)
            return
        exchange.ended, exchange.ended_ns = end, time.monotonic_ns()
        if end == "half_close":
            connection.sock.shutdown(socket.SHUT_WR)
            return
        self.part(connection)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.close(connection)


def _served(exchange: Serving) -> Served:
    answer = exchange.answer
    return Served(
        **asdict(serve.served(exchange)),
        n_cached_tok=n_cached_tok_of(answer.wanted),
        start_ns=getattr(answer, "start_ns", None),
        departure_ns=getattr(answer, "departure_ns", None),
    )


@contextmanager
def serving_in_thread(setup: TruthSetup) -> Iterator[ScriptedServer]:
    """A server in a thread of this process, for tests in which its timing does not matter."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # for the client, too: it is the same process
    server = ScriptedServer(setup)
    thread = threading.Thread(target=server.run, name="truth", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
