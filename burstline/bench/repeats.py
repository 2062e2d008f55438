"""`burstline run --repeats N`: the same run several times, one page over all, and the noise between them.

The A/A noise is kept per host, engine, model and workload: that of repeats of one start of the server, and
with `--restart` that of fresh starts. A later single run of the same system cites that of fresh starts where
it is known, since a run that starts its own server is one.
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
from burstline.bench.experiment import run_experiment
from burstline.bench.load_options import MAX_REPEATS
from burstline.bench.run_settings import Settings
from burstline.bench.server_session import Say, Site, Where, serving
from loadgen.record.files import user_cache, write_bytes
from loadgen.record.manifest import Manifest, RunNoise
from loadgen.record.rundir import Run, open_run
from loadgen.stats.figure import Absent
from servers.engine import Engine
from workloads.request import WorkloadError

if TYPE_CHECKING:
    from loadgen.stats.across_runs import Spreads


@dataclass(slots=True)
class SharedServer:
    """Serves several repeats from one start of the server, until `close`."""

    _stack: ExitStack = field(default_factory=ExitStack)
    _site: Site | None = None

    @contextmanager
    def serving(self, engine: Engine, where: Where, run_dir: Path, say: Say) -> Iterator[Site]:
        if self._site is None:
            self._site = self._stack.enter_context(serving(engine, where, run_dir, say))
        yield self._site

    def close(self) -> None:
        self._site = None
        self._stack.close()


def run_repeats(settings: Settings, n: int, *, restart_after: int | None) -> int:
    """Run n times, with a fresh server after every `restart_after` runs; the worst exit code of the runs.

    Each repeat has prompts of its own salt, so that none is served from the prefix cache of another.
    """
    if not 2 <= n <= MAX_REPEATS:
        raise WorkloadError(f"--repeats {n}: expected 2 to {MAX_REPEATS}; 3 give intervals between runs")
    if restart_after is not None and settings.where.url is not None:
        raise WorkloadError(
            f"--restart: the server at {settings.where.url} was not started here; leave --restart out"
        )
    if restart_after is not None and not 1 <= restart_after < n:
        raise WorkloadError(f"--restart {restart_after}: expected 1 or more, and less than --repeats {n}")
    before = set(settings.out.glob("*")) if settings.out.is_dir() else set()
    server, codes = SharedServer(), []
    try:
        for k in range(n):
            print(f"Repeat {k + 1} of {n}")
            wish = replace(settings.wish, salt=f"{int(settings.wish.salt, 16) + k:x}")
            # A server of one run is stopped before its report is written.
            shared = None if restart_after == 1 else server.serving
            codes.append(run_experiment(replace(settings, wish=wish, serve=shared)))
            if restart_after is not None and (k + 1) % restart_after == 0:
                server.close()
    finally:
        server.close()
    runs = [open_run(path) for path in sorted(set(settings.out.glob("*")) - before) if path.is_dir()]
    print(_page_over(runs, settings.out))
    remember(runs)
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

    Of a started server that of fresh starts counts, and where it is unknown that of repeats.
    """
    is_attached = manifest.server is not None and manifest.server.attached
    kinds = ("repeats",) if is_attached else ("repeats", "starts")
    return {name: noise for kind in kinds for name, noise in _stored(manifest, kind).items()}


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
    from loadgen.stats.across_runs import spreads_of

    starts: dict[object, list[float]] = {}
    for run in runs:
        figure = None if run.summary is None else run.summary.figure(*path)
        if figure is None or isinstance(figure, Absent):
            return None
        starts.setdefault(run.manifest.server and run.manifest.server.start, []).append(figure.point)
    return spreads_of([np.array(values) for values in starts.values()])


def _kept_at(manifest: Manifest, kind: str) -> Path:
    """By all that must be the same for two runs to be repeats of one another: what `compare` looks at."""
    from burstline.verbs.compare import factors

    key = {"factors": factors(manifest), "memory": manifest.host.memory_bytes, "kind": kind}
    digest = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return Path(user_cache(), "noise", f"{digest[:32]}.json")
