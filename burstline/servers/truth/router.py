"""Parses requests, decides which reply each gets, and counts what `/metrics` shows. No sockets."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from heapq import heapreplace
from importlib.metadata import version
from typing import Any, Final

import orjson

from burstline.servers.truth.replies import (
    Prompt,
    Replies,
    Script,
    TimedReply,
    Wanted,
    error,
    plain_reply,
    read,
    token_offsets_ns,
)
from burstline.workloads.request import WorkloadError

_MAX_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One whole HTTP request. Header names are lower case; `arrival_ns` is when its last byte was there. The
    connection ends with the reply where the client does not `keep_alive`."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    arrival_ns: int
    keep_alive: bool = True


def take_call(inbox: bytearray, arrival_ns: int) -> HttpRequest | None:
    """Takes one whole request off the inbox; None where it is not whole yet, ValueError where it is none."""
    head_end = inbox.find(b"\r\n\r\n")
    if head_end < 0:
        if len(inbox) > _MAX_HEAD_BYTES:
            raise ValueError("the request's head is too long")
        return None
    request_line, *lines = bytes(inbox[:head_end]).split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    if b"transfer-encoding" in headers:
        raise ValueError("chunked requests are not served; send a Content-Length")
    body_begin = head_end + 4
    body_end = body_begin + int(headers.get(b"content-length", b"0"))
    if len(inbox) < body_end:
        return None
    method, path, version = request_line.decode("latin-1").split(" ")
    connection = headers.get(b"connection", b"").lower()
    keep_alive = connection == b"keep-alive" if version == "HTTP/1.0" else b"close" not in connection
    body = bytes(inbox[body_begin:body_end])
    call = HttpRequest(method, path.partition("?")[0], headers, body, arrival_ns, keep_alive)
    del inbox[:body_end]
    return call


@dataclass(frozen=True, slots=True)
class TruthSetup:
    """What a server plays.

    `scripts` are used in the order of arrival, the last for all that follow, or all again and again where
    they `cycle`. `slots`: so many requests are served at once and others wait for their turn; None: all.
    """

    scripts: tuple[Script, ...] = (Script(),)
    model: str = "truth"
    max_model_len: int = 1 << 20
    cycle: bool = False
    slots: int | None = None


@dataclass(frozen=True, slots=True)
class RoutedAnswer:
    """The reply to a generation request, and what was asked for; None where that could not be read.

    `text` is that of the prompt, None where it is token ids.
    """

    reply: TimedReply
    wanted: Wanted | None = None
    text: str | None = None


SCRIPTS: Final[Mapping[str, Callable[[Script, int], TruthSetup]]] = {
    "fixed": lambda own, _: TruthSetup((own,)),
    "queue": lambda own, n: TruthSetup((own,), slots=max(1, n // 4)),
    "bursts": lambda own, _: TruthSetup((replace(own, events_per_write=4),)),
    "chunks": lambda own, _: TruthSetup((replace(own, tok_per_event=(4,)),)),
    "slow-first-byte": lambda own, _: TruthSetup((replace(own, headers_s=2.0, ttft_s=2.0),)),
    "early-role": lambda own, _: TruthSetup((replace(own, role_s=own.headers_s),)),
    "no-usage": lambda own, _: TruthSetup((replace(own, usage_s=None),)),
    "late-usage": lambda own, _: TruthSetup((replace(own, usage_s=1.0),)),
    "refusing": lambda own, _: TruthSetup((own, replace(own, status=500)), cycle=True),
    "failing": lambda own, _: TruthSetup(
        (*[own] * 9, replace(own, status=503), *[own] * 9, replace(own, cut_after_tok=3)), cycle=True
    ),
}
"""By name what the server plays, of a script with fixed times and the number of connections."""
KV_TOK: Final = 1_000_000


@dataclass(slots=True)
class TruthCounters:
    """What `/metrics` shows; all counted since the start.

    `kv_tok` is what the requests in flight hold of a cache of `KV_TOK` tokens: prompts and generated tokens.
    """

    arrived: int = 0
    refused: int = 0
    running: int = 0
    kv_tok: int = 0
    prompt_tok: int = 0
    cached_tok: int = 0
    output_tok: int = 0


class Router:
    """Answers calls by the setup's rules."""

    def __init__(self, setup: TruthSetup) -> None:
        self.setup = setup
        self.counters = TruthCounters()
        self._replies = Replies()
        Router.reset(self)  # a subclass is not made yet

    def reset(self) -> None:
        self._n_scripts_used = 0
        self._free_ns = [0] * (self.setup.slots or 0)

    def answer(self, call: HttpRequest) -> RoutedAnswer:
        """The reply to a POST to a generating path; a mistake in the request is answered with a 400."""
        self.counters.arrived += 1
        try:
            wanted, prompt = self.read(call.path, orjson.loads(call.body or b"{}"))
            script = self.script(call)
        except KeyError:
            return RoutedAnswer(plain_reply(404, b'{"detail":"Not Found"}'))
        except (AttributeError, TypeError, orjson.JSONDecodeError, WorkloadError) as wrong:
            self.counters.refused += 1
            return RoutedAnswer(plain_reply(400, orjson.dumps(error(str(wrong), 400))))
        answer = self.admit(call, script, wanted, prompt)
        return replace(answer, text=prompt) if isinstance(prompt, str) else answer

    def read(self, path: str, body: Any) -> tuple[Wanted, Prompt]:
        """What a request to `path` wants, and its prompt; KeyError where nothing is served there."""
        return read(path, body, self.setup.model)

    def admit(self, call: HttpRequest, script: Script, wanted: Wanted, prompt: Prompt) -> RoutedAnswer:
        del prompt
        self.counters.prompt_tok += wanted.n_prompt_tok
        wait_ns = 0
        if self._free_ns:
            start_ns = max(call.arrival_ns, self._free_ns[0])
            wait_ns = start_ns - call.arrival_ns
            heapreplace(self._free_ns, start_ns + token_offsets_ns(script, wanted.n_output_tok)[-1])
        return RoutedAnswer(self._replies.make(script, wanted, wait_ns), wanted)

    def script(self, call: HttpRequest) -> Script:
        """The script of the next request: what its header says, a name or JSON, else the setup's."""
        if (own := call.headers.get(b"x-burstline-script", b"").decode()) in SCRIPTS:
            return SCRIPTS[own](self.setup.scripts[0], 1).scripts[-1]
        if own:
            values: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in orjson.loads(own).items()}
            return replace(self.setup.scripts[0], **values)
        n, k = len(self.setup.scripts), self._n_scripts_used
        self._n_scripts_used += 1
        return self.setup.scripts[k % n if self.setup.cycle else min(k, n - 1)]

    def page(self, path: str) -> TimedReply:
        """The reply to a GET: health, identity and gauges."""
        pages = self.pages()
        if path == "/metrics":
            return plain_reply(200, self.metrics().encode(), "text/plain; version=0.0.4")
        if path not in pages:
            return plain_reply(404, b'{"detail":"Not Found"}')
        return plain_reply(200, orjson.dumps(pages[path]))

    def pages(self) -> dict[str, Any]:
        model = {"id": self.setup.model, "object": "model", "created": 0, "owned_by": "burstline-truth"}
        models = [{**model, "max_model_len": self.setup.max_model_len}]
        return {
            "/health": {},
            "/version": {"version": version("burstline")},
            "/v1/models": {"object": "list", "data": models},
        }

    def metrics(self) -> str:
        counters = self.counters
        rows = [
            ("truth:requests_running", "gauge", counters.running),
            ("truth:requests_total", "counter", counters.arrived),
            ("truth:kv_usage", "gauge", counters.kv_tok / KV_TOK),
            ("truth:requests_refused_total", "counter", counters.refused),
            ("truth:prompt_tokens_total", "counter", counters.prompt_tok),
            ("truth:prefix_cache_hit_tokens_total", "counter", counters.cached_tok),
            ("truth:generation_tokens_total", "counter", counters.output_tok),
            ("process_cpu_seconds_total", "counter", time.process_time()),
        ]
        return "".join(f"# TYPE {name} {kind}\n{name} {value}\n" for name, kind, value in rows)
