"""`/metrics`, under vLLM's names where the meaning is the same, so that one reader serves both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from servers.reference.engine import Engine

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
FINISH_REASONS = ("stop", "length", "abort", "error")


class Histograms:
    """Latencies seen by the engine, in seconds from a request's arrival at the server."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", registry=None, buckets=SECONDS
        )
        self.e2e = Histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", registry=None, buckets=SECONDS
        )


class _Collector:
    def __init__(self, engine: Engine, labels: Mapping[str, str], cache: Mapping[str, str]) -> None:
        self._engine, self._labels, self._cache = engine, labels, cache

    def collect(self) -> Iterator[Metric]:
        engine, scheduler = self._engine, self._engine.scheduler
        pool = scheduler.pool
        gauges = {
            "num_requests_running": (len(scheduler.running), "Requests being computed."),
            "num_requests_waiting": (len(scheduler.waiting), "Requests waiting to be computed."),
            "kv_cache_usage_perc": (1 - pool.n_free / pool.n_blocks, "KV cache in use, 1 is all of it."),
        }
        counters = {
            "num_preemptions": (scheduler.n_preemptions, "Times a request lost its KV blocks."),
            "prompt_tokens": (engine.n_tok["prompt"], "Prompt tokens of requests that got a first token."),
            "generation_tokens": (engine.n_tok["generation"], "Tokens generated."),
        }
        names, values = list(self._labels), list(self._labels.values())
        family: GaugeMetricFamily | CounterMetricFamily
        for name, (value, text) in gauges.items():
            family = GaugeMetricFamily(f"vllm:{name}", text, labels=names)
            family.add_metric(values, value)
            yield family
        for name, (value, text) in counters.items():
            family = CounterMetricFamily(f"vllm:{name}", text, labels=names)
            family.add_metric(values, value)
            yield family
        family = CounterMetricFamily(
            "vllm:request_success", "Requests ended.", labels=[*names, "finished_reason"]
        )
        for reason in FINISH_REASONS:
            family.add_metric([*values, reason], engine.n_finished[reason])
        yield family
        family = GaugeMetricFamily("vllm:cache_config_info", "The KV cache.", labels=[*names, *self._cache])
        family.add_metric([*values, *self._cache.values()], 1)
        yield family
        yield from engine.histograms.ttft.collect()
        yield from engine.histograms.e2e.collect()


def registry(engine: Engine, model: str, cache: Mapping[str, str]) -> CollectorRegistry:
    """What `/metrics` shows of `engine`; `cache` becomes the labels of `vllm:cache_config_info`."""
    shown = CollectorRegistry(auto_describe=False)
    shown.register(_Collector(engine, {"engine": "0", "model_name": model}, cache))
    return shown
