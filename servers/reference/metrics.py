"""`/metrics`, under vLLM's names where the meaning is the same, so that one reader serves both."""

from collections.abc import Iterator, Mapping

from prometheus_client import disable_created_metrics
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from servers.reference.engine import Engine

CACHE = (
    "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_memory_bytes", "cache_dtype",
    "enable_prefix_caching",
)  # fmt: skip
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics(Collector):
    """What the engine counts; `info` has the model's name, and what becomes `vllm:cache_config_info`."""

    def __init__(self, engine: Engine, info: Mapping[str, object]) -> None:
        self._engine, self._cache = engine, {name: str(info[name]) for name in CACHE}
        self._labels = {"engine": "0", "model_name": str(info["served_model_name"])}

    def collect(self) -> Iterator[Metric]:
        engine, scheduler, pool = self._engine, self._engine.scheduler, self._engine.scheduler.pool
        used = 1 - pool.n_free / pool.n_blocks
        n_prompt_tok, n_output_tok = engine.n_tok["prompt"], engine.n_tok["generation"]
        ended = [({"finished_reason": r}, engine.n_finished[r]) for r in ("stop", "length", "abort", "error")]
        for family, name, text, samples in (
            (Gauge, "num_requests_running", "Requests being computed.", [({}, len(scheduler.running))]),
            (Gauge, "num_requests_waiting", "Requests not yet computed.", [({}, len(scheduler.waiting))]),
            (Gauge, "kv_cache_usage_perc", "KV cache in use, 1 is all of it.", [({}, used)]),
            (Gauge, "cache_config_info", "The KV cache.", [(self._cache, 1)]),
            (Counter, "num_preemptions", "Requests that lost their blocks.", [({}, scheduler.n_preemptions)]),
            (Counter, "prompt_tokens", "Prompt tokens up to a first token.", [({}, n_prompt_tok)]),
            (Counter, "prefix_cache_queries", "Prompt tokens looked up.", [({}, scheduler.n_queried_tok)]),
            (Counter, "prefix_cache_hits", "Prompt tokens found cached.", [({}, scheduler.n_hit_tok)]),
            (Counter, "generation_tokens", "Tokens generated.", [({}, n_output_tok)]),
            (Counter, "request_success", "Requests ended.", ended),
        ):
            metric = family(f"vllm:{name}", text, labels=[*self._labels, *samples[0][0]])
            for labels, value in samples:
                metric.add_metric([*self._labels.values(), *labels.values()], value)
            yield metric
        yield from (*engine.ttft.collect(), *engine.e2e.collect())
