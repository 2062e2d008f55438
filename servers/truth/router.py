"""The desk: decides which scene a request gets, and remembers what that decision rests on. No sockets."""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import accumulate
from typing import Any, Final

import orjson

from servers.truth.dialects import ROUTES, Ask, read_request
from servers.truth.http_requests import Call
from servers.truth.queue import PrefixCache, Queue
from servers.truth.script import Script, script_from_header
from servers.truth.timed_reply import Pace, Scene, Scenes, error_reply, plain_reply
from workloads.request import WorkloadError

LATENCIES = {"ttft": "truth:time_to_first_token_seconds", "e2e": "truth:e2e_request_latency_seconds"}


@dataclass(frozen=True, slots=True)
class TruthSetup:
    """What a server plays and under which rules.

    `scripts` are used in the order of arrival, the last for all that follow; a request that brings its own in
    `x-burstline-script` (laid over the next of them) uses none up. `native` names the engine whose
    own paths are served besides the OpenAI ones. `queue` sets every token's time instead of the scripts: the
    tokens of a request are spread evenly over its service and the last leaves with the departure.
    What `/metrics` counts appears `counters_late_s` after a reply has ended, and the share `counters_lost` of
    the replies never (LightLLM's monitor queue); 0 counts each token as it is sent.
    `max_in_flight` requests are served at once, others refused with `shed_status`; None: no limit.
    """

    scripts: tuple[Script, ...] = (Script(),)
    native: str = "openai"
    model: str = "truth"
    max_model_len: int = 1 << 20
    queue: Queue | None = None
    prefix_cache: bool = False
    max_in_flight: int | None = None
    shed_status: int = 503
    counters_late_s: float = 0.0
    counters_lost: float = 0.0

    def __post_init__(self) -> None:
        if self.native not in ROUTES:
            raise WorkloadError(f"dialect {self.native!r}: expected one of {', '.join(ROUTES)}")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise WorkloadError(f"max in flight {self.max_in_flight}: expected at least 1")


@dataclass(frozen=True, slots=True)
class RoutedAnswer:
    """The scene for a generation request and its facts; queue times are None without a queue."""

    scene: Scene
    ask: Ask | None = None
    start_ns: int | None = None
    departure_ns: int | None = None


KV_TOK: Final = 1_000_000
AT_MOST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, math.inf)


@dataclass(slots=True)
class LatencyHistogram:
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


@dataclass(frozen=True, slots=True)
class LoadTally:
    """What a whole reply adds to the counters."""

    prompt_tok: int
    output_tok: int
    ttft_ns: int
    e2e_ns: int


@dataclass(slots=True)
class TruthCounters:
    """What `/metrics` tells; all counted since the start. Latencies count from the request's arrival.

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
    ttft: LatencyHistogram = field(default_factory=LatencyHistogram)
    e2e: LatencyHistogram = field(default_factory=LatencyHistogram)


@dataclass(slots=True)
class Desk:
    """Answers calls by the setup's rules."""

    setup: TruthSetup
    counters: TruthCounters = field(default_factory=TruthCounters)
    _late: deque[tuple[int, LoadTally]] = field(default_factory=deque)
    _n_ended: int = 0
    _scenes: Scenes = field(default_factory=Scenes)
    _cache: PrefixCache = field(default_factory=PrefixCache)
    _order: int = 0

    def reset(self) -> None:
        """Forgets prompts and queue and begins the scripts anew; counters go on."""
        self._order = 0
        self._cache.reset()
        if self.setup.queue:
            self.setup.queue.reset()

    @property
    def counts_late(self) -> bool:
        return self.setup.counters_late_s > 0 or self.setup.counters_lost > 0

    def ended(self, tally: LoadTally, at_ns: int) -> None:
        """Count a whole reply late, or never, as the setup is made."""
        before, self._n_ended = int(self._n_ended * self.setup.counters_lost), self._n_ended + 1
        if int(self._n_ended * self.setup.counters_lost) == before:
            self._late.append((at_ns + round(self.setup.counters_late_s * 1e9), tally))

    def _count_what_is_due(self, now_ns: int) -> None:
        counters = self.counters
        while self._late and self._late[0][0] <= now_ns:
            tally = self._late.popleft()[1]
            counters.prompt_tok += tally.prompt_tok
            counters.output_tok += tally.output_tok
            counters.ttft.observe(tally.ttft_ns)
            counters.e2e.observe(tally.e2e_ns)

    def answer(self, call: Call) -> RoutedAnswer:
        """The scene for a POST to a generating path; a mistake in the request is answered with a 400."""
        self.counters.arrived += 1
        try:
            body = orjson.loads(call.body)
            ask, prompt = read_request(call.path, body, self.setup.model, self.setup.native)
            script = self._script(call)
        except KeyError:
            return RoutedAnswer(plain_reply(404, b'{"detail":"Not Found"}'))
        except (AttributeError, TypeError, orjson.JSONDecodeError, WorkloadError) as error:
            self.counters.refused += 1
            return RoutedAnswer(error_reply("completions", 400, str(error)))
        if self.setup.max_in_flight is not None and self.counters.running >= self.setup.max_in_flight:
            self.counters.refused += 1
            return RoutedAnswer(self._shed(ask), ask)
        if self.setup.prefix_cache:
            ask = replace(ask, n_cached_tok=self._cache.look_up(prompt))
        if not self.counts_late:
            self.counters.prompt_tok += ask.n_prompt_tok
        self.counters.cached_tok += ask.n_cached_tok or 0
        if self.setup.queue is None:
            return RoutedAnswer(self._scenes.make(script, ask, _cached_pace(script, ask)), ask)
        start_ns, departure_ns = self.setup.queue.admit(call.arrival_ns)
        pace = _spread(start_ns - call.arrival_ns, departure_ns - call.arrival_ns)
        return RoutedAnswer(self._scenes.make(script, ask, pace), ask, start_ns, departure_ns)

    def _script(self, call: Call) -> Script:
        scripts = self.setup.scripts
        script = scripts[min(self._order, len(scripts) - 1)]
        if own := call.headers.get(b"x-burstline-script"):
            return script_from_header(own, script)
        self._order += 1
        return script

    def _shed(self, ask: Ask) -> Scene:
        message = f"Model is overloaded: {self.setup.max_in_flight} requests are in flight"
        if ask.dialect == "tgi" and ask.stream:
            return self._scenes.refusal_in_stream(ask, 429, message)
        return error_reply(ask.dialect, self.setup.shed_status, message)

    def page(self, path: str) -> Scene:
        """The scene for a GET: health, identity and gauges."""
        pages: dict[str, Any] = {
            "/health": {},
            "/version": {"version": version("burstline")},
            "/v1/models": _models(self.setup),
            "/info": _info(self.setup),
            "/get_server_info": _lightllm_info(self.setup),
        }
        if path == "/metrics":
            self._count_what_is_due(time.monotonic_ns())
            text = metrics(self.counters, time.process_time(), self.setup.native).encode()
            return plain_reply(200, text, "text/plain; version=0.0.4")
        if path not in pages:
            return plain_reply(404, b'{"detail":"Not Found"}')
        return plain_reply(200, orjson.dumps(pages[path]))


def _info(setup: TruthSetup) -> dict[str, Any]:
    """As TGI tells its limits."""
    limits = {"max_concurrent_requests": setup.max_in_flight, "max_total_tokens": setup.max_model_len}
    return {"model_id": setup.model, "router": "text-generation-router", "version": "3.3.7", **limits}


def _lightllm_info(setup: TruthSetup) -> dict[str, Any]:
    """As LightLLM tells its slots: the servers of the queue."""
    slots = setup.queue.n_servers if setup.queue else 1000
    types = {"data_type": "float32", "llm_kv_type": "None", "vocab_size": None}
    return {"model_dir": setup.model, "running_max_req_size": slots, "tp": 1, **types}


def _models(setup: TruthSetup) -> dict[str, Any]:
    row = {"id": setup.model, "object": "model", "created": 0, "owned_by": "burstline-truth"}
    return {"object": "list", "data": [row | {"max_model_len": setup.max_model_len}]}


def _cached_pace(script: Script, ask: Ask) -> Pace | None:
    """Prefill takes as much less time as the cache holds of the prompt; the headers' delay stays."""
    if not ask.n_cached_tok:
        return None
    prefill_ns = round((script.ttft_s - script.headers_s) * 1e9)
    saved_ns = prefill_ns * ask.n_cached_tok // ask.n_prompt_tok

    def pace(own_ns: Sequence[int]) -> list[int]:
        return [at_ns - saved_ns for at_ns in own_ns]

    return pace


def _spread(start_ns: int, departure_ns: int) -> Pace:
    """Token events evenly over a service: the last one leaves with the departure."""

    def pace(own_ns: Sequence[int]) -> list[int]:
        n = len(own_ns)
        return [start_ns + (departure_ns - start_ns) * (i + 1) // n for i in range(n)]

    return pace


_NATIVE_ROWS = {
    "tgi": ("tgi_batch_current_size", "tgi_request_input_length_sum", "tgi_request_generated_tokens_sum"),
    "lightllm": (
        "lightllm_batch_current_size",
        "lightllm_prompt_tokens_total",
        "lightllm_generation_tokens_total",
    ),
}
_NATIVE_LATENCIES = {
    "tgi": (None, "tgi_request_duration"),
    "lightllm": ("lightllm_request_first_token_duration", "lightllm_request_inference_duration"),
}


def _native_metrics(counters: TruthCounters, native: str) -> str:
    """The same under the names of the engine that the setup speaks like."""
    if native not in _NATIVE_ROWS:
        return ""
    values = (counters.running, counters.prompt_tok, counters.output_tok)
    text = "".join(f"{name} {value}\n" for name, value in zip(_NATIVE_ROWS[native], values, strict=True))
    ttft, e2e = _NATIVE_LATENCIES[native]
    return text + (counters.ttft.lines(ttft) if ttft else "") + counters.e2e.lines(e2e)


def metrics(counters: TruthCounters, cpu_s: float, native: str = "openai") -> str:
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
    text += counters.ttft.lines(LATENCIES["ttft"]) + counters.e2e.lines(LATENCIES["e2e"])
    return text + _native_metrics(counters, native)
