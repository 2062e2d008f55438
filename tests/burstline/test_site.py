"""Where the engine is: a URL as people write it, and what is said where nothing of the kind is there."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from burstline.site import Where, choose_engine, serving
from servers.engine import EngineError

MODELS = b'{"object":"list","data":[{"id":"m","owned_by":"vllm"}]}'


class Desk(BaseHTTPRequestHandler):
    """Lists a model as vLLM does, has no other page, and refuses every request."""

    def do_GET(self) -> None:
        self.answer(*((200, MODELS) if self.path == "/v1/models" else (404, b"")))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(400, b'{"error":{"message":"no such luck"}}')

    def answer(self, status: int, body: bytes) -> None:
        self.server.asked.append(self.path)
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: object) -> None:
        pass


@pytest.fixture
def desk() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Desk) as server:
        server.asked = []
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_url_with_v1_is_asked_for_the_same_as_one_without(desk, tmp_path, end):
    where = Where(url=f"http://127.0.0.1:{desk.server_port}{end}")
    engine = choose_engine(where)
    assert engine.name == "vllm"
    refused = pytest.raises(EngineError, match=r"refuses a request for one token \(HTTP 400\): no such luck$")
    with refused, serving(engine, where, tmp_path, print):
        pass
    assert {"/v1/models", "/version", "/health", "/v1/completions"} <= set(desk.asked)
    assert not [path for path in desk.asked if path.startswith(("/v1/v1", "/v1/health", "/v1/version"))]
