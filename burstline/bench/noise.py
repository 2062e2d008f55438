"""The A/A noise of a system: how far identical runs differ, kept per host, engine, model and workload.

`burstline run --repeats 3` measures it; later single runs of the same system cite it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from loadgen.record.files import user_cache, write_bytes
from loadgen.record.manifest import Manifest, RunNoise
from loadgen.record.rundir import Run
from loadgen.stats.figure import Absent

if TYPE_CHECKING:
    from loadgen.stats.across_runs import Noise

METRICS: Final = ("ttft", "tpot", "itl", "e2e")
PERCENTILES: Final = ("p50", "p90", "p95", "p99", "mean")
RATES: Final = ("output_tok_per_s", "input_tok_per_s", "total_tok_per_s", "requests_per_s")


def remember(runs: Sequence[Run]) -> None:
    """Keep the noise of three repeats or more for later runs of the same system."""
    from loadgen.stats.across_runs import LEAST_RUNS, Noise  # statistics: every run asks for what is stored

    if len(runs) < LEAST_RUNS or any(run.summary is None for run in runs):
        return
    rows = {
        name: {"spread": found.spread, "n_runs": found.n_runs}
        for name, path in _paths().items()
        if isinstance(found := _noise(runs, path), Noise)
    }
    with suppress(OSError, RuntimeError):  # without a home nothing is kept
        path = _kept_at(runs[0].manifest)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, orjson.dumps(rows))


def known_for(manifest: Manifest) -> dict[str, RunNoise]:
    """The stored noise of this system by number ("ttft.p50", "output_tok_per_s"); empty where none is."""
    try:
        rows: Mapping[str, Any] = orjson.loads(_kept_at(manifest).read_bytes())
        return {name: RunNoise(float(row["spread"]), int(row["n_runs"])) for name, row in rows.items()}
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError):
        return {}


def _paths() -> dict[str, tuple[str, ...]]:
    latencies = {f"{m}.{p}": ("metrics", m, p) for m in METRICS for p in PERCENTILES}
    return {**latencies, **{name: ("throughput", name) for name in RATES}}


def _noise(runs: Sequence[Run], path: tuple[str, ...]) -> Noise | Absent:
    from loadgen.stats.across_runs import noise_of

    figures = [run.summary.figure(*path) for run in runs if run.summary is not None]
    points = [figure.point for figure in figures if not isinstance(figure, Absent)]
    if len(points) < len(runs):
        return Absent("a run lacks it")
    return noise_of(np.array(points))


def _kept_at(manifest: Manifest) -> Path:
    """By all that must be the same for two runs to be repeats of one another."""
    host, identity, server = manifest.host, manifest.identity, manifest.server
    key = {
        "host": (host.cpu, host.cores_allowed or host.cores, host.memory_bytes),
        "devices": [device.name for device in manifest.devices],
        "engine": (manifest.engine, identity.version if identity else None),
        "model": server.model_name if server else None,
        "settings": (identity.max_num_seqs, identity.max_batched_tok, identity.dtype) if identity else None,
        "workload": manifest.title,
    }
    digest = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return Path(user_cache(), "noise", f"{digest[:32]}.json")
