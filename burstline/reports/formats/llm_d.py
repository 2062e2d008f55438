"""A run as llm-d's benchmark report, version 0.2 (the package llmd-benchmark-report on PyPI has its schema).

Latencies are those of requests that succeeded, from when each was sent, as llm-d's own harnesses report them;
they have no intervals. `failures` are requests that were not served as asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from burstline.loadgen.record.manifest import Manifest
from burstline.loadgen.record.rundir import Run
from burstline.loadgen.record.verdict import State
from burstline.reports.formats.vllm_bench import latencies_ms, span_s

VERSION: Final = "0.2"
"""Its revision 0.2.1 only adds fields, and reads this."""
PERCENTILES: Final = (1, 5, 10, 25, 50, 75, 90, 95, 99)
LATENCIES: Final = {
    "ttft": ("time_to_first_token", "ms"),
    "tpot": ("time_per_output_token", "ms/token"),
    "itl": ("inter_token_latency", "ms/token"),
    "e2el": ("request_latency", "ms"),
}


def llm_d_report(run: Run) -> dict[str, Any]:
    """The document, ready for JSON (which is YAML, too)."""
    manifest, c = run.manifest, run.columns
    duration_s, n_ok = span_s(c), int(c.ok.sum())
    prompts, outputs = (float(np.nansum(tok[c.ok])) for tok in (c.prompt_tok, c.output_tok))
    totals = {"input_token": prompts, "output_token": outputs, "request": n_ok}
    totals["total_token"] = prompts + outputs
    state = run.summary.verdict.state if run.summary else State.FAILED
    lengths = {"input_length": c.prompt_tok[c.ok], "output_length": c.output_tok[c.ok]}
    latencies = {LATENCIES[name]: ms for name, ms in latencies_ms(c).items()}
    return {
        "version": VERSION,
        "run": {
            "uid": run.name,
            "time": _time(manifest, duration_s),
            "description": manifest.title or manifest.workload,
            "keywords": ["burstline", str(state)],
        },
        "scenario": {"stack": [_server(manifest)], "load": _load(run)},
        "results": {
            "request_performance": {
                "aggregate": {
                    "requests": {"total": len(c), "failures": int(c.failed.sum())}
                    | {
                        name: _statistics(tok, "count")
                        for name, tok in lengths.items()
                        if not np.isnan(tok).all()
                    },
                    "latency": {n: _statistics(ms, unit) for (n, unit), ms in latencies.items() if len(ms)},
                    "throughput": {
                        f"{name}_rate": {
                            "units": "queries/s" if name == "request" else "tokens/s",
                            "mean": total / duration_s if duration_s else 0.0,
                        }
                        for name, total in totals.items()
                    },
                }
            }
        },
    }


def _statistics(values: NDArray[np.float64], units: str) -> dict[str, Any]:
    values = values[~np.isnan(values)]
    found = {"mean": values.mean(), "stddev": values.std(), "min": values.min(), "max": values.max()}
    found |= {f"p{p}": np.percentile(values, p) for p in PERCENTILES}
    return {"units": units, **{name: float(value) for name, value in found.items()}}


def _time(manifest: Manifest, duration_s: float) -> dict[str, str]:
    """Start, end and ISO 8601 duration of the load."""
    if manifest.clock is None:
        return {}
    start = datetime.fromisoformat(manifest.clock.utc)
    end = start + timedelta(seconds=duration_s)
    return {"start": start.isoformat(), "end": end.isoformat(), "duration": f"PT{duration_s:.6f}S"}


def _hash(value: Mapping[str, Any]) -> str:
    return hashlib.md5(orjson.dumps(value, option=orjson.OPT_SORT_KEYS), usedforsecurity=False).hexdigest()


def _server(manifest: Manifest) -> dict[str, Any]:
    """The engine; without accelerators where its machine is not this one."""
    server, identity = manifest.server, manifest.identity
    facts: dict[str, Any] = {
        "kind": "generic",
        "tool": manifest.engine,
        "tool_version": (identity.version if identity else None) or "unknown",
        "model": {
            "name": (identity.model if identity else None) or (server.model if server else None) or "unknown"
        },
    }
    if server is not None and not server.attached and manifest.devices:
        sizes = {
            name: getattr(identity, f"{long}_parallel_size", None) or 1
            for name, long in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"))
        }
        devices = [device.name for device in manifest.devices]
        parallelism = sizes | {"dp_local": sizes["dp"], "workers": 1, "ep": 1}
        accelerator = {"model": devices[0], "count": len(devices), "parallelism": parallelism}
        facts |= {"kind": "inference_engine", "role": "replica", "replicas": 1, "accelerator": accelerator}
    native: dict[str, Any] = {}
    if server is not None and server.argv:
        native = {"args": {"argv": list(server.command)}, "envars": dict(server.env or {})}
    return {
        "metadata": {"schema_version": "0.0.1", "label": manifest.engine, "cfg_id": _hash(facts | native)},
        "standardized": facts,
        "native": native,
    }


def _load(run: Run) -> dict[str, Any]:
    manifest, c, spec = run.manifest, run.columns, run.manifest.asked
    native = {"args": {name: value for name, value in spec.to_json().items() if value is not None}}
    return {
        "metadata": {"schema_version": "0.0.1", "cfg_id": _hash(native), "description": manifest.title},
        "standardized": {
            "tool": "burstline",
            "tool_version": manifest.version or "unknown",
            "parallelism": max(1, len(manifest.drivers)),
            "source": "sampled" if spec.data or spec.trace else "random",
            "input_seq_len": _length(c.planned_prompt_tok),
            "output_seq_len": _length(c.planned_output_tok),
            "rate_qps": spec.rate,
            "concurrency": spec.concurrency,
        },
        "native": native,
    }


def _length(tok: NDArray[np.float64]) -> dict[str, Any]:
    known = tok[~np.isnan(tok)] if not np.isnan(tok).all() else np.zeros(1)
    kind = "fixed" if known.min() == known.max() else "other"
    low, high = int(known.min()), max(1, int(known.max()))
    return {"distribution": kind, "value": float(known.mean()), "min": low, "max": high}
