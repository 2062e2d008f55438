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

from burstline.measure.record.columns import Columns, Floats, Ints
from burstline.measure.stats.estimates import label
from burstline.measure.stats.quantiles import Samples, each_once

QUANTILES: Final = (0.5, 0.9, 0.95, 0.99)
PERCENTILES: Final = tuple(map(label, QUANTILES))
STALL_FLOOR_S: Final = 0.2
STALL_FACTOR: Final = 5.0


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `of` computes one value per request (NaN where undefined, in seconds), `pooled` one
    per token or gap; both None for what is made of the run as a whole. A request that failed counts as
    infinitely late, unless `failures` says that the metric is about the client and keeps what it knows.
    `undefined` are the requests for which it has no value by nature; any other NaN was not measured.
    """

    title: str
    formula: str
    note: str
    source: str
    of: Callable[[Columns], Floats] | None = None
    pooled: Callable[[Columns], Samples] | None = None
    failures: Literal["infinite", "kept"] = "infinite"
    undefined: Callable[[Columns], NDArray[np.bool_]] = lambda c: np.zeros(len(c), dtype=bool)
    unit: str = "s"
    better: Literal["lower", "higher", "neither"] = "lower"


def ttft(c: Columns) -> Floats:
    return c.text_s - c.origin_s


def ttft_service(c: Columns) -> Floats:
    return c.text_s - c.sent_s


def connect(c: Columns) -> Floats:
    """NaN where the connection stood before the request was dispatched, or was used again."""
    took_s = c.connected_s - c.dispatched_s
    return np.where(took_s > 0, took_s, np.nan)


def e2e(c: Columns) -> Floats:
    return c.last_s - c.origin_s


def e2e_service(c: Columns) -> Floats:
    return c.last_s - c.sent_s


def tpot(c: Columns) -> Floats:
    """NaN where no token came after the first event, or the server did not say how many came."""
    n_later = c.shown_tok - c.first_n
    return np.where(n_later > 0, (c.last_s - c.first_s) / np.where(n_later > 0, n_later, 1), np.nan)


def icl(c: Columns) -> Samples:
    came = gaps(c)
    return gap_samples(c, came.value, came.weight, came.counts)


def itl(c: Columns) -> Samples:
    """The rate view: a gap before n tokens is n samples of a n-th of it."""
    came = gaps(c, counted=True)
    return gap_samples(c, came.value / came.weight, came.weight, came.counts)


def latencies(metric: Metric, c: Columns) -> Floats:
    """The metric of every request, +inf for those that failed, NaN where it is undefined."""
    assert metric.of is not None
    values = metric.of(c)
    if metric.failures == "kept":
        return values
    return np.where(c.ok, values, np.where(c.failed, np.inf, np.nan))


def samples_of(metric: Metric, c: Columns) -> Samples:
    """The samples of a metric: one value per request, or one per token or gap."""
    if metric.pooled is not None:
        return metric.pooled(c)
    return Samples.per_request(latencies(metric, c))


@dataclass(frozen=True, eq=False)
class Gaps(Samples):
    """Gaps between successive events, in s, each before `weight` tokens, and which events end one."""

    ends_one: NDArray[np.bool_]


def gaps(c: Columns, *, counted: bool = False) -> Gaps:
    """The gaps of each request that succeeded.

    `counted` leaves out requests whose tokens per event are not known; without it all weights are 1.
    """
    use = c.ok & ~np.isnan(c.output_tok) if counted else c.ok
    ends_one = c.follows
    ends_one &= c.per_event(use)
    value = np.diff(c.event_s)[ends_one[1:]]
    weight = c.event_n[ends_one] if counted and (c.event_n != 1).any() else each_once(value)
    return Gaps(value, weight, np.where(use, (c.n_events - 1).clip(0), 0), ends_one)


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
        "t_1 − s; in a burst t_1 − w",
        "any generated token, reasoning included; a burst is offered as fast as it can be sent",
        LOADGEN,
        of=ttft,
    ),
    "tpot": Metric(
        "TPOT",
        "(t_m − t_1) / (N − n_1)",
        "per request; undefined where nothing follows the first event",
        f"{VLLM}, corrected for the tokens of the first event",
        of=tpot,
        undefined=lambda c: c.shown_tok <= c.first_n,
    ),
    "itl": Metric(
        "ITL",
        "each gap t_i − t_{i−1} gives n_i samples of (t_i − t_{i−1}) / n_i",
        "pooled over all tokens; a failed request counts its planned gaps",
        "token-weighted; where every event carries one token it is the chunk gap that other tools print",
        pooled=itl,
    ),
    "e2e": Metric("E2E", "t_m − s; in a burst t_m − w", "to the last token, not to [DONE]", LOADGEN, of=e2e),
    "ttft_service": Metric("TTFT, service", "t_1 − w", "what most tools call TTFT", VLLM, of=ttft_service),
    "e2e_service": Metric("E2E, service", "t_m − w", "what most tools call E2E", VLLM, of=e2e_service),
    "ttfa": Metric(
        "TTFA",
        "t(first token that is not reasoning) − s",
        "equals TTFT for a model that does not reason",
        "GenAI-Perf's time to first output token",
        of=lambda c: c.answer_s - c.origin_s,
        undefined=lambda c: np.isnan(c.answer_s),
    ),
    "first_event": Metric(
        "First event",
        "t(first event of any kind) − w",
        "an event without text, such as a chat's role, counts",
        "TTFT in OpenLLMetry, OpenInference, Langfuse, LangSmith, Sentry and LiteLLM",
        of=lambda c: c.first_event_s - c.sent_s,
        undefined=lambda c: np.isnan(c.first_event_s),
    ),
    "headers": Metric(
        "Headers",
        "t(headers of the reply) − w",
        "when a client library hands over the stream",
        "the span in Logfire; time to first byte in proxies",
        of=lambda c: c.headers_s - c.sent_s,
        undefined=lambda c: np.isnan(c.headers_s),
    ),
    "icl": Metric(
        "ICL",
        "t_i − t_{i−1}",
        "the gaps between chunks that a user sees; other tools call it ITL",
        "AIPerf's inter-chunk latency",
        pooled=icl,
    ),
    "ntpot": Metric(
        "NTPOT",
        "(t_m − s) / N",
        "includes the first token",
        "inference-perf",
        of=lambda c: e2e(c) / np.where(c.output_tok > 0, c.output_tok, np.nan),
    ),
    "interactivity": Metric(
        "E2E interactivity",
        "1 / percentile of NTPOT",
        "output tokens per second of E2E, with the first token; its p99 is the slow end",
        "InferenceX's agentic charts; those of fixed lengths use 1 / TPOT",
        unit="tok/s",
        better="higher",
    ),
    "connect": Metric(
        "Connect",
        "c_1 − d",
        "only connections that were opened for this request",
        "TCP and TLS",
        of=connect,
        undefined=lambda c: np.isnan(connect(c)),
        failures="kept",
    ),
    "server_queue": Metric(
        "TTFT: queue",
        "q, by the server's clock",
        "the wait for a place in the batch; only of replies that carry the server's own times",
        SERVER_TIMES,
        of=lambda c: c.server_queue_s,
        failures="kept",
    ),
    "server_prefill": Metric(
        "TTFT: prefill",
        "p, by the server's clock",
        "from the first forward pass of the prompt to the end of the last",
        SERVER_TIMES,
        of=lambda c: c.server_prefill_s,
        failures="kept",
    ),
    "server_other": Metric(
        "TTFT: rest of the server",
        "r − q − p, r from receipt to the first token sent, by the server's clock",
        "its front end: parsing, tokenization, messages between its processes, detokenization",
        SERVER_TIMES,
        of=lambda c: c.server_first_token_s - c.server_queue_s - c.server_prefill_s,
        failures="kept",
    ),
    "outside_server": Metric(
        "TTFT: outside the server",
        "(t_1 − w) − r",
        "the network, and the connection's wait until the server reads it",
        "the TTFT from the moment of sending, less the server's own time for the same request",
        of=lambda c: ttft_service(c) - c.server_first_token_s,
        failures="kept",
    ),
    "output_tok_per_s": Metric(
        "Output throughput",
        "tokens that arrive in (a, b], divided by b − a",
        "tokens of requests that succeeded, counted when they arrive",
        "each token in the window in which it was delivered",
        unit="tok/s",
        better="higher",
    ),
    "input_tok_per_s": Metric(
        "Input throughput",
        "prompt tokens of requests with t_1 in (a, b], divided by b − a",
        "of requests that succeeded, by the server's count where it gave one",
        VLLM,
        unit="tok/s",
        better="higher",
    ),
    "total_tok_per_s": Metric(
        "Total throughput",
        "input + output",
        "two different kinds of work in one number",
        VLLM,
        unit="tok/s",
        better="higher",
    ),
    "requests_per_s": Metric(
        "Request throughput",
        "completions in (a, b], divided by b − a",
        "successes only",
        VLLM,
        unit="1/s",
        better="higher",
    ),
    "concurrency": Metric(
        "Concurrency",
        "time average and maximum of requests in [w, f)",
        "exact, from when each request begins and ends; checked by Little's law",
        "Little 1961, L = λW",
        unit="requests",
        better="neither",
    ),
    "stalls": Metric(
        "Stalls",
        "gaps > max(200 ms, 5 × median ICL)",
        "count, total seconds, share of requests with one",
        "shows smoothness better than a p99",
    ),
}
