"""A toy engine in one file: the adapter, then a small server to try it on."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from burstline import Engine
from burstline.servers.identity import Admission, Capabilities, Identity, Sign
from burstline.servers.launch import Launch, LaunchOptions
from burstline.servers.messages import Call, Event, Get, Kind, Target
from burstline.servers.openai import post
from burstline.servers.replies import Tally
from burstline.workloads.request import Request


class Toy(Engine):
    name = "toy"
    title = "Toy"
    how_to_get = "nothing to install"
    metrics_path = None  # no Prometheus metrics
    brings_model = True  # --model is not needed
    signs = (Sign("/toy", b"^I am a toy"),)  # how `burstline engines` recognises it at a URL
    admission = Admission(chunked_prefill=False)  # for the roofline's simulation of a burst
    capabilities = Capabilities(
        token_id_prompts=True,
        forced_output_length=True,
        prefix_cache_control=False,
        per_event_tok="ids",
        queue_depth=False,
        graceful_overload=False,
    )

    def installed(self, python: str | None) -> str | None:  # noqa: ARG002
        """The version that is installed here, None without one."""
        return "0.1"

    def launch(self, options: LaunchOptions) -> Launch:
        """The command that starts the server."""
        argv = (sys.executable, __file__, str(options.port))
        return Launch(argv, ready_timeout_s=30.0, stop_grace_s=2.0)

    def identify(self, get: Get, log: str) -> Identity:  # noqa: ARG002
        """Version, model, data type, limits: from GET requests and the server's log."""
        return Identity("toy", version="0.1", model="toy", vocab_size=1000, dtype="float32")

    def encode(self, request: Request, target: Target) -> Call:
        """One planned request as an HTTP call."""
        return post(target, "/speak", {"ids": list(request.prompt_ids or ()), "n": request.n_output_tok})

    def take(self, tally: Tally, answer: Any, end: int) -> Event:
        """Read one event: what it adds to the reply, and how many tokens came with it."""
        tally.n_output_ids = (tally.n_output_ids or 0) + 1
        tally.terminated = answer["last"]
        tally.n_prompt_tok = answer["prompt"]
        tally.finish_reason = "length" if answer["last"] else None
        return Event(end, Kind.ANSWER, 1)


ENGINE = Toy()


class Handler(BaseHTTPRequestHandler):
    """The server: each reply is a stream of JSON events, one token in each."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = b"I am a toy" if self.path == "/toy" else b"{}"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i in range(request["n"]):
            row = {"token": i, "prompt": len(request["ids"]), "last": i + 1 == request["n"]}
            event = b"data: " + json.dumps(row).encode() + b"\n\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            self.wfile.flush()
            time.sleep(0.002)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
