"""Decides which reply a request gets, and counts what `/metrics` shows. No sockets."""

import math
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from typing import Any, Final

import orjson

from burstline.servers.truth.http_requests import HttpRequest
from burstline.servers.truth.openai import DIALECTS, PATHS, Prompt, Wanted
from burstline.servers.truth.replies import Replies, TimedReply, plain_reply
from burstline.servers.truth.script import Script, script_from_header
from burstline.workloads.request import WorkloadError

LATENCIES = {"ttft": "truth:time_to_first_token_seconds", "e2e": "truth:e2e_request_latency_seconds"}


@dataclass(frozen=True, slots=True)
class TruthSetup:
    """What a server plays.

    `scripts` are used in the order of arrival, the last for all that follow; a request that brings its own in
    `x-burstline-script` (laid over the next of them) uses none up.
    """

    scripts: tuple[Script, ...] = (Script(),)
    model: str = "truth"
    max_model_len: int = 1 << 20


@dataclass(frozen=True, slots=True)
class RoutedAnswer:
    """The reply to a generation request, and what was asked for; None where that could not be read."""

    reply: TimedReply
    wanted: Wanted | None = None


KV_TOK: Final = 1_000_000
AT_MOST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, math.inf)


@dataclass(slots=True)
class TruthHistogram:
    """Latencies by bucket, as engines keep them."""

    counts: list[int] = field(default_factory=lambda: [0] * len(AT_MOST_S))
    sum_s: float = 0.0

    def observe(self, latency_ns: int) -> None:
        self.counts[bisect_left(AT_MOST_S, latency_ns / 1e9)] += 1
        self.sum_s += latency_ns / 1e9

    def lines(self, name: str) -> str:
        """In Prometheus's text format."""
        buckets = zip(AT_MOST_S, accumulate(self.counts), strict=True)
        rows = [f'{name}_bucket{{le="{at_most_s}"}} {n}' for at_most_s, n in buckets]
        rows += [f"{name}_count {sum(self.counts)}", f"{name}_sum {self.sum_s}"]
        return "\n".join([f"# TYPE {name} histogram", *rows, ""]).replace('"inf"', '"+Inf"')


@dataclass(slots=True)
class TruthCounters:
    """What `/metrics` shows; all counted since the start. Latencies count from the request's arrival.

    `kv_tok` is what the requests in flight hold of a cache of `KV_TOK` tokens: prompts and generated tokens.
    """

    arrived: int = 0
    refused: int = 0
    running: int = 0
    kv_tok: int = 0
    prompt_tok: int = 0
    cached_tok: int = 0
    output_tok: int = 0
    events: int = 0
    ttft: TruthHistogram = field(default_factory=TruthHistogram)
    e2e: TruthHistogram = field(default_factory=TruthHistogram)


class Router:
    """Answers calls by the setup's rules."""

    def __init__(self, setup: TruthSetup, replies: Replies | None = None) -> None:
        self.setup = setup
        self.counters = TruthCounters()
        self.replies = replies or Replies()
        self._n_scripts_used = 0

    def reset(self) -> None:
        """Begin the scripts anew; counters go on."""
        self._n_scripts_used = 0

    def answer(self, call: HttpRequest) -> RoutedAnswer:
        """The reply to a POST to a generating path; a mistake in the request is answered with a 400."""
        self.counters.arrived += 1
        try:
            wanted, prompt = self.read(call.path, orjson.loads(call.body))
            script = self._script(call)
        except KeyError:
            return RoutedAnswer(plain_reply(404, b'{"detail":"Not Found"}'))
        except (AttributeError, TypeError, orjson.JSONDecodeError, WorkloadError) as error:
            self.counters.refused += 1
            return RoutedAnswer(self.replies.error("completions", 400, str(error)))
        return self.admit(call, script, wanted, prompt)

    def read(self, path: str, body: Any) -> tuple[Wanted, Prompt]:
        """What a request to `path` wants, and its prompt; KeyError where nothing is served there."""
        return DIALECTS[PATHS[path]].read(body, self.setup.model)

    def admit(self, call: HttpRequest, script: Script, wanted: Wanted, prompt: Prompt) -> RoutedAnswer:
        """The reply to a request that could be read."""
        del call, prompt
        self.counters.prompt_tok += wanted.n_prompt_tok
        return RoutedAnswer(self.replies.make(script, wanted), wanted)

    def _script(self, call: HttpRequest) -> Script:
        scripts = self.setup.scripts
        script = scripts[min(self._n_scripts_used, len(scripts) - 1)]
        if own := call.headers.get(b"x-burstline-script"):
            return script_from_header(own, self.base_of_own(script))
        self._n_scripts_used += 1
        return script

    def base_of_own(self, script: Script) -> Script:
        """What the script that a request brings is laid over, made of the next one."""
        return script

    def page(self, path: str) -> TimedReply:
        """The reply to a GET: health, identity and gauges."""
        pages = self.pages()
        if path == "/metrics":
            return plain_reply(200, self.metrics().encode(), "text/plain; version=0.0.4")
        if path not in pages:
            return plain_reply(404, b'{"detail":"Not Found"}')
        return plain_reply(200, orjson.dumps(pages[path]))

    def pages(self) -> dict[str, Any]:
        """The JSON at each path."""
        model = {"id": self.setup.model, "object": "model", "created": 0, "owned_by": "burstline-truth"}
        models = [{**model, "max_model_len": self.setup.max_model_len}]
        return {
            "/health": {},
            "/version": {"version": version("burstline")},
            "/v1/models": {"object": "list", "data": models},
        }

    def metrics(self) -> str:
        """The counters in Prometheus's text format."""
        return metrics(self.counters, time.process_time())


def metrics(counters: TruthCounters, cpu_s: float) -> str:
    """The counters in Prometheus's text format."""
    rows = [
        ("truth:requests_running", "gauge", counters.running),
        ("truth:requests_total", "counter", counters.arrived),
        ("truth:kv_usage", "gauge", counters.kv_tok / KV_TOK),
        ("truth:requests_refused_total", "counter", counters.refused),
        ("truth:prompt_tokens_total", "counter", counters.prompt_tok),
        ("truth:prefix_cache_hit_tokens_total", "counter", counters.cached_tok),
        ("truth:generation_tokens_total", "counter", counters.output_tok),
        ("truth:events_total", "counter", counters.events),
        ("process_cpu_seconds_total", "counter", cpu_s),
    ]
    text = "".join(f"# TYPE {name} {kind}\n{name} {value}\n" for name, kind, value in rows)
    return text + counters.ttft.lines(LATENCIES["ttft"]) + counters.e2e.lines(LATENCIES["e2e"])
