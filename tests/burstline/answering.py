"""A server of a few words, for tests of who asks it what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

Answer = Callable[[str, Any], tuple[int, object]]
"""By path and body (None of a GET), the status and what is sent as JSON."""


@contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """The URL of a server that answers so, for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(*answer(self.path, None))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.reply(*answer(self.path, orjson.loads(body)))

        def reply(self, status: int, value: object) -> None:
            body = orjson.dumps(value)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
