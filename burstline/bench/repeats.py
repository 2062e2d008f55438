"""`burstline run --repeats N`: the same run several times, one page over all, and the noise between them.

The A/A noise is kept per host, engine, model and workload; later single runs of the same system cite it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from burstline import exit_codes
from burstline.bench import repeats
from burstline.bench.experiment import Settings, run_experiment
from burstline.bench.load_options import MAX_REPEATS
from burstline.bench.server_session import Say, Site, Where, serving
from loadgen.record.files import user_cache, write_bytes
from loadgen.record.manifest import Manifest, RunNoise
from loadgen.record.rundir import Run, open_run
from loadgen.stats.figure import Absent
from servers.engine import Engine
from workloads.request import WorkloadError

if TYPE_CHECKING:
    from loadgen.stats.across_runs import Noise


@dataclass(slots=True)
class SharedServer:
    """Serves every repeat from one start of the server; the last one to leave ends it."""

    _stack: ExitStack = field(default_factory=ExitStack)
    _site: Site | None = None

    @contextmanager
    def serving(self, engine: Engine, where: Where, run_dir: Path, say: Say) -> Iterator[Site]:
        if self._site is None:
            self._site = self._stack.enter_context(serving(engine, where, run_dir, say))
        yield self._site

    def close(self) -> None:
        self._stack.close()


def run_repeats(settings: Settings, n: int, *, restart: bool) -> int:
    """Run n times, restarting the server between runs or not; the worst exit code of the runs.

    Each repeat has prompts of its own salt, so that none is served from the prefix cache of another.
    """
    if not 2 <= n <= MAX_REPEATS:
        raise WorkloadError(f"--repeats {n}: expected 2 to {MAX_REPEATS}; 3 give intervals between runs")
    before = set(settings.out.glob("*")) if settings.out.is_dir() else set()
    server, codes = SharedServer(), []
    try:
        for k in range(n):
            print(f"Repeat {k + 1} of {n}")
            wish = replace(settings.wish, salt=f"{int(settings.wish.salt, 16) + k:x}")
            shared = None if restart else server.serving
            codes.append(run_experiment(replace(settings, wish=wish, serve=shared)))
    finally:
        server.close()
    runs = [open_run(path) for path in sorted(set(settings.out.glob("*")) - before) if path.is_dir()]
    print(_page_over(runs, settings.out))
    repeats.remember(runs)
    return exit_codes.worst(codes)


def _page_over(runs: list[Run], out: Path) -> str:
    """One page over the repeats, and its short form as text."""
    from burstline.verbs.compare import comparison_of, write_all
    from reports.compare.digest import digest
    from reports.formats.text import text

    folder = out / f"{runs[0].name}-repeats"
    folder.mkdir()
    comparison = comparison_of(runs, folder, anyway=True)
    page = write_all(comparison, folder)
    return f"{text(digest(comparison))}\n\nReport over {len(runs)} repeats: {page}"


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
