"""The metrics: for each one function over the records and one row that defines it.

The letters of the formulae: s due, d dispatched, c_1 connected, w the request fully written, t_1 ... t_m when
the events that carry tokens arrived, n_1 ... n_m how many tokens each carries, N their sum, f the end of the
stream; all on one monotonic clock. A window is [a, b].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from burstline.loadgen.record.columns import Columns, Floats, Ints
from burstline.loadgen.stats.quantiles import Samples as Samples
from burstline.loadgen.stats.quantiles import each_once

QUANTILES: Final = (0.5, 0.9, 0.95, 0.99)
STALL_FLOOR_S: Final = 0.2
STALL_FACTOR: Final = 5.0


PerRequest = Callable[[Columns], Floats]
Which = Callable[[Columns], NDArray[np.bool_]]
Pooled = Callable[[Columns], Samples]


def never(c: Columns) -> NDArray[np.bool_]:
    return np.zeros(len(c), dtype=bool)


def without_later_tokens(c: Columns) -> NDArray[np.bool_]:
    """Replies whose tokens were counted and all came with the first event."""
    return c.output_tok <= c.first_n


@dataclass(frozen=True, slots=True)
class Metric:
    """What a name means. `of` computes one value per request (NaN where undefined, in seconds), `pooled` one
    per token or gap; both None for what is made of the run as a whole. A request that failed counts as
    infinitely late, unless `failures` says that the metric is about the client and keeps what it knows.
    `undefined` are the requests for which it has no value by nature; any other NaN was not measured.
    """

    title: str
    unit: str
    better: Literal["lower", "higher", "neither"]
    formula: str
    note: str
    source: str
    of: PerRequest | None = None
    pooled: Pooled | None = None
    failures: Literal["infinite", "kept"] = "infinite"
    undefined: Which = never


def ttft(c: Columns) -> Floats:
    return c.first_s - c.origin_s


def ttft_due(c: Columns) -> Floats:
    return c.first_s - c.due_s


def ttft_service(c: Columns) -> Floats:
    return c.first_s - c.sent_s


def ttfa(c: Columns) -> Floats:
    return c.answer_s - c.origin_s


def dispatch_delay(c: Columns) -> Floats:
    return c.dispatched_s - c.due_s


def connect(c: Columns) -> Floats:
    """NaN where the connection stood before the request was dispatched, or was used again."""
    took_s = c.connected_s - c.dispatched_s
    return np.where(took_s > 0, took_s, np.nan)


def e2e(c: Columns) -> Floats:
    return c.last_s - c.origin_s


def e2e_due(c: Columns) -> Floats:
    return c.last_s - c.due_s


def e2e_service(c: Columns) -> Floats:
    return c.last_s - c.sent_s


def tpot(c: Columns) -> Floats:
    """NaN where no token came after the first event, or the server did not say how many came."""
    n_later = c.output_tok - c.first_n
    return np.where(n_later > 0, (c.last_s - c.first_s) / np.where(n_later > 0, n_later, 1), np.nan)


def ntpot(c: Columns) -> Floats:
    return e2e(c) / np.where(c.output_tok > 0, c.output_tok, np.nan)


def server_queue(c: Columns) -> Floats:
    return c.server_queue_s


def server_prefill(c: Columns) -> Floats:
    return c.server_prefill_s


def server_other(c: Columns) -> Floats:
    return c.server_first_token_s - c.server_queue_s - c.server_prefill_s


def outside_server(c: Columns) -> Floats:
    return ttft_service(c) - c.server_first_token_s


def icl(c: Columns) -> Samples:
    came = gaps(c)
    return gap_samples(c, came.value, came.n, came.counts)


def itl(c: Columns) -> Samples:
    """The rate view: a gap before n tokens is n samples of a n-th of it."""
    came = gaps(c, counted=True)
    return gap_samples(c, came.value / came.n, came.n, came.counts)


def itl_delivery(c: Columns) -> Samples:
    """The delivery view: the first token of an event waited the whole gap, the others not at all."""
    came = gaps(c, counted=True)
    n = came.n
    if not (n > 1).any():
        return gap_samples(c, came.value, n, came.counts)
    # Of each gap before several tokens two samples in a row: the gap, and 0 for the tokens behind the first.
    event = np.repeat(np.arange(len(n)), 1 + (n > 1))
    is_more = np.diff(event, prepend=-1) == 0
    per_request = Samples(came.value, n, came.counts).by_request(1 + (n > 1)).astype(np.int64)
    value, weight = np.where(is_more, 0.0, came.value[event]), np.where(is_more, n[event] - 1, 1)
    return gap_samples(c, value, weight, per_request)


def latencies(metric: Metric, c: Columns) -> Floats:
    """The metric of every request, +inf for those that failed, NaN where it is undefined."""
    assert metric.of is not None
    values = metric.of(c)
    if metric.failures == "kept":
        return values
    return np.where(c.ok, values, np.where(c.failed, np.inf, np.nan))


def samples_of(metric: Metric, c: Columns) -> Samples:
    """What a metric's percentiles are made of: one value a request, or one per token or gap."""
    if metric.pooled is not None:
        return metric.pooled(c)
    return Samples.per_request(latencies(metric, c))


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Gaps between successive events, request by request, and which events end one.

    Gap i is `value[i]` seconds long and comes before `n[i]` tokens; `counts[k]` of them are of request k.
    """

    value: Floats
    n: NDArray[Any]
    ends_one: NDArray[np.bool_]
    counts: Ints


def gaps(c: Columns, *, counted: bool = False, use: NDArray[np.bool_] | None = None) -> Gaps:
    """The gaps of each request that succeeded, or of those to `use`.

    `counted` leaves out requests whose tokens per event are not known; without it all `n` are 1.
    """
    use = c.ok if use is None else use
    if counted:
        use = use & ~np.isnan(c.output_tok)
    ends_one = c.follows
    ends_one &= c.per_event(use)
    value = np.diff(c.event_s)[ends_one[1:]]
    n = c.event_n[ends_one] if counted and (c.event_n != 1).any() else each_once(value)
    return Gaps(value, n, ends_one, np.where(use, (c.n_events - 1).clip(0), 0))


def gap_samples(c: Columns, value: Floats, weight: NDArray[Any], counts: Ints) -> Samples:
    """The samples of successes, and the gaps that failures were to have, infinitely long."""
    failed = ~c.ok & (c.planned_output_tok > 1)
    if not failed.any():
        return Samples(value, weight, counts)
    place, planned = np.cumsum(counts)[failed], c.planned_output_tok[failed].astype(np.int32)
    weight = np.insert(weight.astype(np.int32), place, planned - 1)
    return Samples(np.insert(value, place, np.inf), weight, counts + failed)


VLLM: Final = "vLLM benchmarks/serve.py"
LOADGEN: Final = "MLPerf LoadGen: latency counts from the scheduled time"

SERVER_TIMES: Final = "the server's own time of each request, e.g. SGLang's meta_info"

METRICS: Final[dict[str, Metric]] = {
    "ttft": Metric(
        "TTFT",
        "s",
        "lower",
        "t_1 − s; in a burst t_1 − w",
        "any generated token, reasoning included; a burst is offered as fast as it can be sent",
        LOADGEN,
        of=ttft,
    ),
    "tpot": Metric(
        "TPOT",
        "s",
        "lower",
        "(t_m − t_1) / (N − n_1)",
        "per request; undefined where nothing follows the first event",
        f"{VLLM}, with the tokens that really came first",
        of=tpot,
        undefined=without_later_tokens,
    ),
    "itl": Metric(
        "ITL",
        "s",
        "lower",
        "each gap t_i − t_{i−1} gives n_i samples of (t_i − t_{i−1}) / n_i",
        "pooled over tokens, rate view; a failed request counts its planned gaps",
        "token-weighted; where every event carries one token it is the chunk gap that other tools print",
        pooled=itl,
    ),
    "e2e": Metric(
        "E2E",
        "s",
        "lower",
        "t_m − s; in a burst t_m − w",
        "to the last token, not to [DONE]",
        LOADGEN,
        of=e2e,
    ),
    "ttft_due": Metric(
        "TTFT, from due", "s", "lower", "t_1 − s", "late sends of the client included", LOADGEN, of=ttft_due
    ),
    "e2e_due": Metric(
        "E2E, from due", "s", "lower", "t_m − s", "late sends of the client included", LOADGEN, of=e2e_due
    ),
    "ttft_service": Metric(
        "TTFT, service", "s", "lower", "t_1 − w", "what most tools print as TTFT", VLLM, of=ttft_service
    ),
    "e2e_service": Metric(
        "E2E, service", "s", "lower", "t_m − w", "what most tools print as E2E", VLLM, of=e2e_service
    ),
    "ttfa": Metric(
        "TTFA",
        "s",
        "lower",
        "t(first token that is not reasoning) − s",
        "equals TTFT for a model that does not reason",
        "GenAI-Perf's time to first output token",
        of=ttfa,
        undefined=lambda c: np.isnan(c.answer_s),
    ),
    "icl": Metric(
        "ICL",
        "s",
        "lower",
        "t_i − t_{i−1}",
        "the gaps between chunks that a user sees; other tools call it ITL",
        "AIPerf's inter-chunk latency",
        pooled=icl,
    ),
    "itl_delivery": Metric(
        "ITL, delivery view",
        "s",
        "lower",
        "each gap gives one sample of t_i − t_{i−1} and n_i − 1 of 0",
        "how long each token waited for the one before it to arrive",
        "token-weighted",
        pooled=itl_delivery,
    ),
    "ntpot": Metric(
        "NTPOT", "s", "lower", "(t_m − s) / N", "includes the first token", "inference-perf", of=ntpot
    ),
    "interactivity": Metric(
        "Interactivity",
        "tok/s",
        "higher",
        "1 / percentile of NTPOT",
        "how fast one user is served, waits included; its p99 is the slow end",
        "InferenceX's horizontal axis",
    ),
    "connect": Metric(
        "Connect",
        "s",
        "lower",
        "c_1 − d",
        "only connections opened for the request at hand",
        "TCP and TLS",
        of=connect,
        undefined=lambda c: np.isnan(connect(c)),
        failures="kept",
    ),
    "dispatch_delay": Metric(
        "Dispatch delay",
        "s",
        "lower",
        "d − s",
        "the client's own queue; about 0 in a valid open-loop run",
        "inference-perf's schedule delay",
        of=dispatch_delay,
        failures="kept",
    ),
    "server_queue": Metric(
        "TTFT: queue",
        "s",
        "lower",
        "q, by the server's clock",
        "the request waits for a place in the batch; of replies that carry the server's own times",
        SERVER_TIMES,
        of=server_queue,
        failures="kept",
    ),
    "server_prefill": Metric(
        "TTFT: prefill",
        "s",
        "lower",
        "p, by the server's clock",
        "from the first forward pass of the prompt to the end of the last",
        SERVER_TIMES,
        of=server_prefill,
        failures="kept",
    ),
    "server_other": Metric(
        "TTFT: rest of the server",
        "s",
        "lower",
        "r − q − p, r from receipt to the first token sent, by the server's clock",
        "its front end: parsing, tokenization, messages between its processes, detokenization",
        SERVER_TIMES,
        of=server_other,
        failures="kept",
    ),
    "outside_server": Metric(
        "TTFT: outside the server",
        "s",
        "lower",
        "(t_1 − w) − r",
        "the network, and the connection's wait until the server reads it",
        "the client's service TTFT less the server's own time for the same request",
        of=outside_server,
        failures="kept",
    ),
    "output_tok_per_s": Metric(
        "Output throughput",
        "tok/s",
        "higher",
        "Σ n_k with t_k in (a, b] / (b − a)",
        "tokens of requests that succeeded, counted when they arrive",
        "each token in the window in which it was delivered",
    ),
    "input_tok_per_s": Metric(
        "Input throughput",
        "tok/s",
        "higher",
        "Σ prompt tokens with t_1 in (a, b] / (b − a)",
        "of requests that succeeded, by the server's count where it gave one",
        VLLM,
    ),
    "total_tok_per_s": Metric(
        "Total throughput",
        "tok/s",
        "higher",
        "input + output",
        "two different kinds of work in one number",
        VLLM,
    ),
    "requests_per_s": Metric(
        "Request throughput", "1/s", "higher", "completions in (a, b] / (b − a)", "successes only", VLLM
    ),
    "concurrency": Metric(
        "Concurrency",
        "requests",
        "neither",
        "time average and maximum of requests in [w, f)",
        "by sweep line; checked by Little's law",
        "Little 1961, L = λW",
    ),
    "stalls": Metric(
        "Stalls",
        "s",
        "lower",
        "gaps > max(200 ms, 5 × median ICL)",
        "count, total seconds, share of requests with one",
        "answers whether it reads smoothly better than a p99 does",
    ),
}
