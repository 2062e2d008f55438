"""Results of other load generators: numbers to read beside ours, whose error and work nothing shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from burstline.loadgen.stats.figure import Absent, Estimate, Figure
from burstline.loadgen.stats.quantiles import quantile_of
from burstline.workloads.request import WorkloadError

Place = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a tool says it measured; `means` is how its definitions differ from ours.

    `numbers` stand where our summary has the number that means the nearest, in its unit; `defines` says what
    the tool calls a metric and how it defines it. `n_planned` is None where it does not count failures.
    """

    name: str
    tool: str
    n_ok: int
    n_planned: int | None
    numbers: Mapping[Place, float]
    means: str
    defines: Mapping[str, str] = field(default_factory=dict)

    def figure(self, place: Place) -> Figure:
        """A plain reading without an interval; Absent where the tool does not say."""
        value = self.numbers.get(place)
        unit = "s" if place[0] == "metrics" else "tok/s" if "tok" in place[1] else "1/s"
        if value is None:
            return Absent(f"{self.tool} does not report it")
        return Estimate(value, None, None, None, self.n_ok, unit)


_SENT: Final = "Latencies begin before the client connects, and failed requests are left out."
_COUNTS: Final = "Its own tokenizer counts tokens."
_MEAN: Final = "Its inter-token latency, each request's mean, stands as TPOT"
_FROM: Final = "from before it connects"
_MEAN_GAP: Final = 'called "inter-token latency", the mean of each request'
_POOLED: Final = "between events, of all requests together"
_RATES: Final = ("output_tok_per_s", "input_tok_per_s", "requests_per_s")
_TOTALS: Final[tuple[Place, ...]] = tuple(("throughput", name) for name in _RATES)


def foreign_results(path: Path) -> list[Foreign]:
    """Every result in a file; WorkloadError where no known tool wrote it, or it lacks what that writes."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    documents: list[Any] = []
    for parts in ([text], text.splitlines()):  # SGLang appends a line for each run
        with suppress(ValueError):
            # SGLang writes Infinity, which only this takes.
            documents = documents or [json.loads(part) for part in parts if part.strip()]
    name = str(path.with_suffix(""))
    names = [f"{name} {k}" for k in range(1, len(documents) + 1)] if len(documents) > 1 else [name]
    try:
        for has, read in _TOOLS.items():
            if documents and all(isinstance(document, dict) and has in document for document in documents):
                return [each for pair in zip(names, documents, strict=True) for each in read(*pair)]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WorkloadError(f"{path} cannot be read as a result: {error!r}") from None
    raise WorkloadError(
        f"{path} is no run and no result that is known; expected a run's folder, or the JSON file of `vllm "
        "bench serve --save-result`, guidellm, aiperf (profile_export_aiperf.json), SGLang's bench_serving, "
        "genai-perf, inference-perf (summary_lifecycle_metrics.json) or k6 (--summary-export)"
    )


def _percentiles(
    keys: Mapping[str, str], of: Callable[[str], Mapping[str, Any]], *names: str, per_s: float = 1e3
) -> dict[Place, float]:
    """p50, p90 and p99 of our metrics, whose own `keys` and whose own `names` of these are given, as far as
    the tool says them."""
    found: dict[Place, float] = {}
    for metric, key in keys.items():
        values = of(key)
        for p, name in zip(("p50", "p90", "p99"), names or ("p50", "p90", "p99"), strict=True):
            if values.get(name) is not None:
                found["metrics", metric, p] = values[name] / per_s
    return found


def _benchmark(
    name: str, d: Mapping[str, Any], tool: str, e2e: str, n_planned: int | None, itl: str
) -> Iterator[Foreign]:
    """Of vllm/benchmarks/serve.py 0.32, whose latencies the user chooses, and sglang/benchmark/serving.py
    0.5.23, in Python and in Rust."""

    def of(key: str) -> dict[str, Any]:
        return {p: d.get(f"{p}_{key}_ms") for p in ("median", "p90", "p99")}

    rates = d["output_throughput"], d["total_input_tokens"] / d["duration"], d["request_throughput"]
    keys = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": e2e}
    numbers = dict(zip(_TOTALS, rates, strict=True)) | _percentiles(keys, of, "median", "p90", "p99")
    means = f"{_SENT} ITL is the time between events, of all requests together."
    defines = {"ttft": _FROM, "itl": itl, "e2e": _FROM}
    yield Foreign(name, tool, d["completed"], n_planned, numbers, means, defines)


def _guidellm(name: str, d: Mapping[str, Any]) -> Iterator[Foreign]:
    """Of guidellm 0.8; a file may hold several benchmarks, one for each load."""
    several = len(d["benchmarks"]) > 1
    keys = {"ttft": "time_to_first_token_ms", "tpot": "inter_token_latency_ms"}
    for k, benchmark in enumerate(d["benchmarks"], 1):
        m, totals = benchmark["metrics"], benchmark["metrics"]["request_totals"]
        rates = "output_tokens_per_second", "prompt_tokens_per_second", "requests_per_second"

        def of(key: str, m: Mapping[str, Any] = m) -> Mapping[str, Any]:
            found = m[key]["successful"]  # without streaming it is zeros of no request
            return found["percentiles"] if found["count"] else {}

        numbers = {place: m[key]["successful"]["mean"] for place, key in zip(_TOTALS, rates, strict=True)}
        numbers |= _percentiles(keys, of) | _percentiles({"e2e": "request_latency"}, of, per_s=1.0)
        requests = (benchmark.get("requests") or {}).get("successful") or ()
        own_s = [ms / 1e3 for each in requests if (ms := each.get("inter_token_latency_ms"))]
        if own_s:
            tpot_s = np.array(own_s)
            numbers |= {("metrics", "tpot", f"p{p}"): quantile_of(tpot_s, p / 100) for p in (50, 90, 99)}
        weighed = "" if own_s else ", which counts once for each gap"
        tool = f"guidellm {d['metadata']['guidellm_version']}"
        means = f"{_SENT} The wall clock is read. {_MEAN}{weighed}."
        title = f"{name} {k}" if several else name
        defines = {"ttft": _FROM, "tpot": _MEAN_GAP + weighed, "e2e": _FROM}
        n_ended = totals["total"] - totals.get("incomplete", 0)
        yield Foreign(title, tool, totals["successful"], n_ended, numbers, means, defines)


_NVIDIA: Final = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}


def _of_nvidia(d: Mapping[str, Any], keys: Mapping[str, str]) -> dict[Place, float]:
    """The numbers that aiperf and its predecessor genai-perf write in the same way."""
    rates = "output_token_throughput", "input_token_throughput", "request_throughput"
    numbers = {p: d[key]["avg"] for p, key in zip(_TOTALS, rates, strict=True) if key in d}
    return numbers | _percentiles(keys, lambda key: d.get(key, {}))


def _aiperf(name: str, d: Mapping[str, Any]) -> Iterator[Foreign]:
    """Of aiperf 0.13, schema 1.4."""
    numbers = _of_nvidia(d, _NVIDIA | {"itl": "inter_chunk_latency"})
    n_ok = int(d["request_count"]["avg"])
    n_failed = int(d.get("error_request_count", {}).get("avg", 0))
    means = f"{_SENT} {_MEAN}, its inter-chunk latency as ITL. {_COUNTS}"
    of_server = d.get("total_usage_completion_tokens", {}).get("avg")
    if of_server and of_server != (own := d["total_osl"]["avg"]):
        means += f" It counted {own:,.0f} output tokens, the server {of_server:,.0f}."
    defines = {"ttft": _FROM, "tpot": _MEAN_GAP, "itl": 'called "inter-chunk latency"', "e2e": _FROM}
    tool = f"aiperf {d['aiperf_version']}"
    yield Foreign(name, tool, n_ok, n_ok + n_failed, numbers, means, defines)


def _genai_perf(name: str, d: Mapping[str, Any]) -> Iterator[Foreign]:
    """Of genai-perf's json_exporter.py, by its source; not seen live."""
    means = f"{_SENT} {_MEAN}. {_COUNTS}"
    defines = {"ttft": _FROM, "tpot": _MEAN_GAP, "e2e": _FROM}
    n_ok = int(d["request_count"]["avg"])
    yield Foreign(name, "genai-perf", n_ok, None, _of_nvidia(d, _NVIDIA), means, defines)


def _inference_perf(name: str, d: Mapping[str, Any]) -> Iterator[Foreign]:
    """Of inference-perf's reportgen/base.py, by its source; not seen live."""
    done = d["successes"]
    latency, rates = done["latency"], done["throughput"]
    keys = {"ttft": "time_to_first_token", "tpot": "time_per_output_token"}
    keys |= {"itl": "inter_token_latency", "e2e": "request_latency"}
    rate_keys = "output_tokens_per_sec", "input_tokens_per_sec", "requests_per_sec"
    numbers = {place: rates[key] for place, key in zip(_TOTALS, rate_keys, strict=True)}
    numbers |= _percentiles(keys, lambda key: latency.get(key) or {}, "median", "p90", "p99", per_s=1.0)
    defines = {"ttft": _FROM, "itl": _POOLED, "e2e": _FROM}
    n = d["load_summary"]["count"]
    yield Foreign(name, "inference-perf", done["count"], n, numbers, f"{_SENT} {_COUNTS}", defines)


def _k6(name: str, d: Mapping[str, Any]) -> Iterator[Foreign]:
    """Of k6's --summary-export or handleSummary, by its documentation; not seen live."""
    m = {key: each.get("values", each) for key, each in d["metrics"].items()}
    keys = {"ttfb": "http_req_waiting", "e2e": "http_req_duration"}
    numbers = _percentiles(keys, lambda key: m[key], "med", "p(90)", "p(99)")
    numbers["throughput", "requests_per_s"] = m["http_reqs"]["rate"]
    n, n_failed = m["http_reqs"]["count"], m.get("http_req_failed", {}).get("passes", 0)
    means = (
        "It knows no tokens: its waiting ends with the first byte of the reply, and failures are included."
    )
    defines = {"ttfb": "from the request's last byte to the reply's first", "e2e": "without connecting"}
    yield Foreign(name, "k6", n - n_failed, n, numbers, means, defines)


_TOOLS: Final[Mapping[str, Callable[[str, Mapping[str, Any]], Iterator[Foreign]]]] = {
    "aiperf_version": _aiperf,
    "benchmarks": _guidellm,
    "median_e2e_latency_ms": lambda name, d: _benchmark(
        name, d, "SGLang bench_serving", "e2e_latency", None, f"{_POOLED}, each divided among its tokens"
    ),
    "output_throughput": lambda name, d: _benchmark(
        name, d, "vllm bench serve", "e2el", d["num_prompts"], _POOLED
    ),
    "load_summary": _inference_perf,
    "root_group": _k6,
    "input_config": _genai_perf,
}
"""By a key that only this tool's file has, of those above it."""
