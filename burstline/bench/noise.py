"""How far runs of one system differ (A/A noise), kept for its later runs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from burstline.loadgen.record.files import user_cache, write_bytes
from burstline.loadgen.record.manifest import Manifest, RunNoise
from burstline.loadgen.record.rundir import Run
from burstline.loadgen.stats.across_runs import LEAST_RUNS, Noise, Spreads, spreads_of
from burstline.loadgen.stats.figure import Absent
from burstline.loadgen.verdict.factors import factors

METRICS: Final = ("ttft", "tpot", "itl", "e2e")


PERCENTILES: Final = ("p50", "p90", "p95", "p99", "mean")


RATES: Final = ("output_tok_per_s", "input_tok_per_s", "total_tok_per_s", "requests_per_s")


def remember(runs: Sequence[Run]) -> None:
    """Keep the noise of three repeats or more for later runs of the same system."""
    if len(runs) < LEAST_RUNS or any(run.summary is None for run in runs):
        return
    spreads = {name: _spreads(runs, path) for name, path in _paths().items()}
    for kind in ("starts", "repeats"):
        noise = {name: getattr(both, kind) for name, both in spreads.items() if both is not None}
        rows = {
            name: {"spread": one.spread, "n_runs": one.n_runs}
            for name, one in noise.items()
            if isinstance(one, Noise)
        }
        if not rows:
            continue
        with suppress(OSError, RuntimeError):  # without a home nothing is kept
            path = _kept_at(runs[0].manifest, kind)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, orjson.dumps(rows))


def known_for(manifest: Manifest) -> dict[str, RunNoise]:
    """The stored noise of this system by number ("ttft.p50", "output_tok_per_s"); empty where none is.

    Of a started server that of fresh starts alone counts: repeats of one start differ less.
    """
    is_attached = manifest.server is not None and manifest.server.attached
    return _stored(manifest, "repeats" if is_attached else "starts")


def _stored(manifest: Manifest, kind: str) -> dict[str, RunNoise]:
    try:
        rows: Mapping[str, Any] = orjson.loads(_kept_at(manifest, kind).read_bytes())
        return {name: RunNoise(float(row["spread"]), int(row["n_runs"])) for name, row in rows.items()}
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, AttributeError):
        return {}


def _paths() -> dict[str, tuple[str, ...]]:
    latencies = {f"{m}.{p}": ("metrics", m, p) for m in METRICS for p in PERCENTILES}
    return {**latencies, **{name: ("throughput", name) for name in RATES}}


def _spreads(runs: Sequence[Run], path: tuple[str, ...]) -> Spreads | None:
    """Both kinds of noise of one number; None where a run lacks it."""
    starts: dict[object, list[float]] = {}
    for run in runs:
        figure = None if run.summary is None else run.summary.figure(*path)
        if figure is None or isinstance(figure, Absent):
            return None
        starts.setdefault(run.manifest.server and run.manifest.server.start, []).append(figure.point)
    return spreads_of([np.array(values) for values in starts.values()])


def _kept_at(manifest: Manifest, kind: str) -> Path:
    """By all that must be the same for two runs to be repeats of one another: what `compare` looks at."""
    key = {"factors": factors(manifest), "memory": manifest.host.memory_bytes, "kind": kind}
    digest = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return Path(user_cache(), "noise", f"{digest[:32]}.json")
