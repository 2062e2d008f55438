"""Decides which reply a request gets at the tests' server: by a queue, a prefix cache, or shed."""

from __future__ import annotations

import math
import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any

from burstline.servers.truth.replies import Prompt, TimedReply
from burstline.servers.truth.router import HttpRequest, RoutedAnswer, Router, TruthCounters
from burstline.servers.truth.router import TruthSetup as ProductSetup
from burstline.workloads.request import WorkloadError
from tests.truth.dialects import ROUTES, CachedWanted, Wanted, read_request
from tests.truth.queue import PrefixCache, Queue
from tests.truth.replies import Pace, ScriptedReplies
from tests.truth.script import Script, script_from_header
from tests.truth.speed import Speed


@dataclass(frozen=True, slots=True)
class TruthSetup(ProductSetup):
    """What a server plays and under which rules.

    `native` names the engine whose own paths are served besides the OpenAI ones. `queue` sets every token's
    time instead of the scripts: the tokens of a request are spread evenly over its service and the last
    leaves with the departure. What `/metrics` counts appears `counters_late_s` after a reply has ended, and
    the share `counters_lost` of the replies never (LightLLM's monitor queue); 0 counts each token as it is
    sent. The share `swaps_in_batch` of the replies to requests that are not alone, and `swaps_alone` of the
    others, have another token at their fourth place. `max_in_flight` requests are served at once, others
    refused with `shed_status`; None: no limit. `speed` stretches the times of every reply. The KV cache
    of which "vllm" shows the use has room for `kv_requests`. With `bare_list` the models are a list alone.
    """

    scripts: tuple[Script, ...] = (Script(),)
    native: str = "openai"
    queue: Queue | None = None
    speed: Speed | None = None
    prefix_cache: bool = False
    max_in_flight: int | None = None
    shed_status: int = 503
    counters_late_s: float = 0.0
    counters_lost: float = 0.0
    swaps_in_batch: float = 0.0
    swaps_alone: float = 0.0
    kv_requests: int = 1000
    bare_list: bool = False

    def __post_init__(self) -> None:
        if self.native not in ROUTES:
            raise WorkloadError(f"dialect {self.native!r}: expected one of {', '.join(ROUTES)}")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise WorkloadError(f"max in flight {self.max_in_flight}: expected at least 1")


@dataclass(frozen=True, slots=True)
class QueuedAnswer(RoutedAnswer):
    """An answer, and when the queue serves it."""

    start_ns: int | None = None
    departure_ns: int | None = None


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


@dataclass(frozen=True, slots=True)
class LoadTally:
    """What a whole reply adds to the counters."""

    prompt_tok: int
    output_tok: int
    ttft_ns: int
    e2e_ns: int


class ScriptedRouter(Router):
    """Answers calls by the setup's rules."""

    setup: TruthSetup

    def __init__(self, setup: TruthSetup) -> None:
        self._cache = PrefixCache()
        super().__init__(setup)
        self.replies = ScriptedReplies()
        self._late: deque[tuple[int, LoadTally]] = deque()
        self._late_counters = TruthCounters()
        self._ttft, self._e2e = TruthHistogram(), TruthHistogram()
        self._n_ended = 0
        self._chance = random.Random(0)
        self._speed_from_ns: int | None = None

    def reset(self) -> None:
        """Forget prompts and the queue too."""
        super().reset()
        self._cache.reset()
        self._speed_from_ns = None
        if self.setup.queue:
            self.setup.queue.reset()

    @property
    def counts_late(self) -> bool:
        return self.setup.counters_late_s > 0 or self.setup.counters_lost > 0

    def ended(self, tally: LoadTally, at_ns: int) -> None:
        """Count a whole reply now, late, or never, as the setup is made."""
        if not self.counts_late:
            self._ttft.observe(tally.ttft_ns)
            self._e2e.observe(tally.e2e_ns)
            return
        before, self._n_ended = int(self._n_ended * self.setup.counters_lost), self._n_ended + 1
        if int(self._n_ended * self.setup.counters_lost) == before:
            self._late.append((at_ns + round(self.setup.counters_late_s * 1e9), tally))

    def metrics(self) -> str:
        late, at_once = self._late_counters, self.counters
        while self._late and self._late[0][0] <= time.monotonic_ns():
            tally = self._late.popleft()[1]
            late.prompt_tok += tally.prompt_tok
            late.output_tok += tally.output_tok
            self._ttft.observe(tally.ttft_ns)
            self._e2e.observe(tally.e2e_ns)
        if self.counts_late:
            self.counters = replace(at_once, prompt_tok=late.prompt_tok, output_tok=late.output_tok)
        try:
            own = super().metrics() + _native_metrics(self.counters, self.setup.native)
            if self.setup.native == "vllm":
                own += _vllm_metrics(self.counters, self.setup)
        finally:
            self.counters = at_once
        names = _LATENCIES.get(self.setup.native, _LATENCIES["openai"])
        latencies = [self._ttft.lines(name) for name in names["ttft"]]
        return own + "".join((*latencies, *(self._e2e.lines(name) for name in names["e2e"])))

    def read(self, path: str, body: Any) -> tuple[Wanted, Prompt]:
        return read_request(path, body, self.setup.model, self.setup.native)

    def script(self, call: HttpRequest) -> Script:
        """A request that brings a script of its own uses none up, and gets no failure of the next one."""
        if (own := call.headers.get(b"x-burstline-script")) is None:
            return super().script(call)
        scripts = self.setup.scripts
        default = scripts[min(self._n_scripts_used, len(scripts) - 1)]
        return script_from_header(own, replace(default, role_s=None, status=200, fault=None))

    def admit(self, call: HttpRequest, script: Script, wanted: Wanted, prompt: Prompt) -> RoutedAnswer:
        setup = self.setup
        if setup.max_in_flight is not None and self.counters.running >= setup.max_in_flight:
            self.counters.refused += 1
            return RoutedAnswer(self._shed(wanted), wanted)
        if self._chance.random() < (setup.swaps_in_batch if self.counters.running else setup.swaps_alone):
            script = replace(script, swapped=3)
        pace = None
        if setup.prefix_cache:
            wanted = CachedWanted(**asdict(wanted), n_cached_tok=self._cache.look_up(prompt))
            self.counters.cached_tok += wanted.n_cached_tok
            pace = _cached_pace(script, wanted)
        self.counters.prompt_tok += wanted.n_prompt_tok
        if setup.speed is not None:
            if self.counters.running + 1 >= setup.speed.from_running:
                self._speed_from_ns = self._speed_from_ns or call.arrival_ns
            pace = setup.speed.pace(call.arrival_ns, self._speed_from_ns)
        if setup.queue is None:
            return RoutedAnswer(self.replies.make(script, wanted, pace), wanted)
        start_ns, departure_ns = setup.queue.admit(call.arrival_ns)
        pace = _spread(start_ns - call.arrival_ns, departure_ns - call.arrival_ns)
        reply = self.replies.make(script, wanted, pace)
        return QueuedAnswer(reply, wanted, start_ns=start_ns, departure_ns=departure_ns)

    def _shed(self, wanted: Wanted) -> TimedReply:
        message = f"Model is overloaded: {self.setup.max_in_flight} requests are in flight"
        if wanted.dialect == "tgi" and wanted.stream:
            return self.replies.refusal_in_stream(wanted, 429, message)
        return self.replies.error(wanted.dialect, self.setup.shed_status, message)

    def pages(self) -> dict[str, Any]:
        own = {"/info": _info(self.setup), "/get_server_info": _lightllm_info(self.setup)}
        pages = super().pages()
        if self.setup.native == "vllm":
            pages["/v1/models"]["data"][0]["owned_by"] = "vllm"
            pages["/version"] = {"version": "0.33.0"}
        if self.setup.bare_list:
            pages["/v1/models"] = pages["/v1/models"]["data"]
        return pages | own


def _info(setup: TruthSetup) -> dict[str, Any]:
    """As TGI tells its limits."""
    limits = {"max_concurrent_requests": setup.max_in_flight, "max_total_tokens": setup.max_model_len}
    return {"model_id": setup.model, "router": "text-generation-router", "version": "3.3.7", **limits}


def _lightllm_info(setup: TruthSetup) -> dict[str, Any]:
    """As LightLLM tells its slots: the servers of the queue."""
    slots = setup.queue.n_servers if setup.queue else 1000
    types = {"data_type": "float32", "llm_kv_type": "None", "vocab_size": None}
    return {"model_dir": setup.model, "running_max_req_size": slots, "tp": 1, **types}


def _cached_pace(script: Script, wanted: CachedWanted) -> Pace | None:
    """Prefill takes as much less time as the cache holds of the prompt; the headers' delay stays."""
    if not wanted.n_cached_tok:
        return None
    prefill_ns = round((script.ttft_s - script.headers_s) * 1e9)
    saved_ns = prefill_ns * wanted.n_cached_tok // wanted.n_prompt_tok

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


def _vllm_metrics(counters: TruthCounters, setup: TruthSetup) -> str:
    """vLLM's gauges: what is served, what waits for it, and the share of the KV cache in use."""
    waiting = setup.queue.waiting(time.monotonic_ns()) if setup.queue else 0
    running = max(0, counters.running - waiting)
    values = {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": min(1.0, running / setup.kv_requests),
        "num_preemptions_total": 0,
        "prompt_tokens_total": counters.prompt_tok,
        "generation_tokens_total": counters.output_tok,
    }
    return "".join(f"vllm:{name} {value}\n" for name, value in values.items())


_TTFT, _E2E = "truth:time_to_first_token_seconds", "truth:e2e_request_latency_seconds"
_LATENCIES = {
    "openai": {"ttft": (_TTFT,), "e2e": (_E2E,)},
    "tgi": {"ttft": (_TTFT,), "e2e": (_E2E, "tgi_request_duration")},
    "lightllm": {
        "ttft": (_TTFT, "lightllm_request_first_token_duration"),
        "e2e": (_E2E, "lightllm_request_inference_duration"),
    },
}


def _native_metrics(counters: TruthCounters, native: str) -> str:
    """The same under the names of the engine that the setup speaks like."""
    if native not in _NATIVE_ROWS:
        return ""
    values = (counters.running, counters.prompt_tok, counters.output_tok)
    return "".join(f"{name} {value}\n" for name, value in zip(_NATIVE_ROWS[native], values, strict=True))
