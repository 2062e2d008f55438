"""A run as the file that `vllm bench serve --save-result --save-detailed` writes: its keys, its definitions.

Source: vllm/benchmarks/serve.py of vLLM 0.32 (`calculate_metrics`, `benchmark`). Only requests that succeeded
count, a latency begins as the request is sent, and a percentile is interpolated (numpy's default), without an
interval. All is of the whole run: `duration` is from the first request that was sent to the last reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burstline.loadgen.record.columns import Columns
from burstline.loadgen.record.rundir import Run

PERCENTILES = (50, 90, 95, 99)


def latencies_ms(c: Columns) -> dict[str, NDArray[np.float64]]:
    """By vLLM's names, each request's TTFT, TPOT and E2E latency, and every ITL; of those that succeeded."""
    ok = np.flatnonzero(c.ok)
    e2e_s, ttft_s, n_later = (c.last_s - c.sent_s)[ok], (c.first_s - c.sent_s)[ok], c.output_tok[ok] - 1
    several = n_later > 0
    gaps_s = np.diff(c.event_s, prepend=np.nan)[c.follows & c.per_event(c.ok)]
    found_s = {
        "ttft": ttft_s,
        "tpot": (e2e_s - ttft_s)[several] / n_later[several],
        "itl": gaps_s,
        "e2el": e2e_s,
    }
    return {name: values_s * 1e3 for name, values_s in found_s.items()}


def span_s(c: Columns) -> float:
    """From the first request that was sent to the last reply; 0 where none succeeded."""
    return float(c.end_s - np.nanmin(c.sent_s)) if c.ok.any() else 0.0


def vllm_result(run: Run) -> dict[str, Any]:
    """The document, ready for JSON; 0 where vLLM writes 0 for what no request has."""
    manifest, c = run.manifest, run.columns
    ok = np.flatnonzero(c.ok)
    events = np.split(c.event_s, c.starts[1:-1])
    latency_s, ttft_s = c.last_s - c.sent_s, c.first_s - c.sent_s
    prompts, outputs = int(np.nansum(c.prompt_tok[ok])), int(np.nansum(c.output_tok[ok]))
    itls = [np.diff(events[k]) if c.ok[k] else np.empty(0) for k in range(len(c))]
    duration_s = span_s(c)
    per_s = 1 / duration_s if duration_s else 0.0
    model = (manifest.server.model_name if manifest.server else None) or ""
    asked = manifest.asked
    shape = asked.arrival.parameter if asked.arrival and asked.pattern == "gamma" else 1.0
    return {
        "date": (manifest.clock.utc if manifest.clock else "")
        .replace("-", "")
        .replace(":", "")
        .replace("T", "-")[:15],
        "endpoint_type": manifest.engine,
        "backend": manifest.engine,
        "label": run.name,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": len(c),
        "request_rate": asked.rate or "inf",
        "burstiness": shape,
        "max_concurrency": asked.concurrency,
        "duration": duration_s,
        "completed": len(ok),
        "failed": len(c) - len(ok),
        "total_input_tokens": prompts,
        "total_output_tokens": outputs,
        "request_throughput": len(ok) * per_s,
        "request_goodput": None,
        "output_throughput": outputs * per_s,
        "total_token_throughput": (prompts + outputs) * per_s,
        "input_lens": _numbers(c.prompt_tok, int),
        "output_lens": _numbers(np.where(c.ok, c.output_tok, 0), int),
        "ttfts": _numbers(np.where(c.ok, ttft_s, 0.0), float),
        "itls": [gaps.tolist() for gaps in itls],
        "latencies": _numbers(np.where(c.ok, latency_s, 0.0), float),
        "start_times": _numbers(c.sent_s, float),
        "errors": ["" if good else "failed" for good in c.ok],
        **_busiest(c, events, ok),
        **{key: value for name, ms in latencies_ms(c).items() for key, value in _statistics(name, ms)},
    }


def _numbers(values: NDArray[Any], kind: type) -> list[Any]:
    """As JSON has them: 0 for what is not known, as vLLM writes."""
    return [kind(value) for value in np.nan_to_num(values, nan=0.0)]


def _statistics(name: str, ms: NDArray[np.float64]) -> Iterator[tuple[str, float]]:
    """Mean, median, standard deviation and percentiles."""
    ms = ms if len(ms) else np.zeros(1)
    of_all = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
    some = {f"p{p}": np.percentile(ms, p) for p in PERCENTILES}
    yield from ((f"{what}_{name}_ms", float(value)) for what, value in (of_all | some).items())


def _busiest(c: Columns, events: list[NDArray[np.float64]], ok: NDArray[np.intp]) -> dict[str, float]:
    """The most events, and the most requests that were open, in a second counted from the first start."""
    if not len(ok):
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    start_s = c.sent_s[ok].min()
    seconds = (np.concatenate([events[k] for k in ok]) - start_s).astype(int)
    first, last = (c.sent_s[ok] - start_s).astype(int), (c.last_s[ok] - start_s).astype(int)
    change = np.bincount(first, minlength=last.max() + 2) - np.bincount(last + 1, minlength=last.max() + 2)
    return {
        "max_output_tokens_per_s": float(np.bincount(seconds).max()),
        "max_concurrent_requests": int(np.cumsum(change).max()),
    }
