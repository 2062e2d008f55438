"""An engine of somebody else's, in one module of its own: found, started, recognised, run and compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers.engine import EngineError
from servers.registry import ENGINES, register

TOY = '''
"""A toy engine: a server of its own dialect, and everything that Burstline has to know of it."""
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json

from servers.engine import Admission, Call, Capabilities, Engine, Event, Identity, Kind, Launch, Sign
from servers.protocol.openai import post
from servers.protocol.replies import decode_reply
from workloads.request import Request


class Toy(Engine):
    name = "toy"
    title = "Toy"
    how_to_get = "it is here"
    metrics_path = None
    brings_model = True
    signs = (Sign("/toy", b"^I am a toy"),)
    admission = Admission(chunked_prefill=False)
    capabilities = Capabilities(True, True, False, "ids", False, False)

    def installed(self, python):
        return "0.1"

    def launch(self, options):
        argv = (sys.executable, __file__, str(options.port))
        return Launch(argv, ready_timeout_s=30.0, stop_grace_s=2.0)

    def ready_call(self, target):
        return self.encode(Request(0, (1, 2, 3), None, 3, 1), target)

    def identify(self, get, log):
        return Identity("toy", version="0.1", model="toy", vocab_size=1000, dtype="float32")

    def encode(self, request, target):
        return post(target, "/speak", {"ids": list(request.prompt_ids), "n": request.n_output_tok})

    def decode(self, reply):
        return decode_reply(reply, take)


def take(tally, answer, end):
    tally.n_output_ids = (tally.n_output_ids or 0) + 1
    tally.terminated = answer["last"]
    tally.n_prompt = answer["prompt"]
    tally.finish_reason = "length" if answer["last"] else None
    return Event(end, Kind.ANSWER, 1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = b"I am a toy" if self.path == "/toy" else b"{}"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i in range(asked["n"]):
            row = {"token": i, "prompt": len(asked["ids"]), "last": i + 1 == asked["n"]}
            event = b"data: " + json.dumps(row).encode() + b"\\n\\n"
            self.wfile.write(b"%x\\r\\n%b\\r\\n" % (len(event), event))
            self.wfile.flush()
            time.sleep(0.002)
        self.wfile.write(b"0\\r\\n\\r\\n")

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


ENGINE = Toy()
if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
'''


def burstline(folder: Path, *words: str) -> tuple[int, str]:
    environment = os.environ | {
        "BURSTLINE_ENGINES": "a_toy_engine",
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    argv = [sys.executable, "-m", "burstline", *words]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "a_toy_engine.py").write_text(TOY)
    return tmp_path


def test_a_burst_runs_at_an_engine_that_is_one_module_and_nothing_else(toy: Path) -> None:
    load = ("--requests", "24", "--prompt-tokens", "64", "--output-tokens", "6", "--no-certify")
    code, text = burstline(toy, "run", "--engine", "toy", *load, "--no-calibrate", "--out", str(toy / "runs"))
    assert code in (0, 4), text  # 4: on a busy machine the client may have set the pace
    (run,) = (toy / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["counts"]["ok"] == summary["counts"]["planned"] == 24
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["engine"] == "toy"
    assert "Toy" in (run / "report.html").read_text()


def test_its_own_sign_tells_it_at_a_url(toy: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(toy / "a_toy_engine.py"), str(port)], cwd=Path.cwd())
    try:
        for _ in range(100):
            _, text = burstline(toy, "engines", "--ports", str(port))
            if f"http://127.0.0.1:{port}" in text:
                break
    finally:
        server.terminate()
        server.wait()
    (row,) = [line for line in text.splitlines() if line.startswith("toy ")]
    assert row.split()[:3] == ["toy", "0.1", f"http://127.0.0.1:{port}"]


def test_a_module_that_is_no_engine_is_named() -> None:
    with pytest.raises(EngineError, match="BURSTLINE_ENGINES=json: json is no module with an ENGINE"):
        register("json")
    assert "json" not in ENGINES
