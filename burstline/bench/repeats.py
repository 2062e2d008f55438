"""`burstline run --repeats N`: the same run several times, and one page over all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from burstline.bench.load_options import MAX_REPEATS
from burstline.bench.run import run_once
from burstline.bench.run_settings import Settings
from burstline.bench.server_session import Say, Site, serving
from burstline.console import exit_codes
from burstline.console.server_options import ServerOptions
from burstline.console.terminal import show
from burstline.loadgen.metrics.slo import judge_over_runs, parse_goal
from burstline.loadgen.record.rundir import Run, open_run
from burstline.reports.model.comparison import Contender, view_of
from burstline.reports.model.contenders import comparison_of
from burstline.reports.page.digest import digest
from burstline.reports.page.files import write_all
from burstline.servers.engine import Engine
from burstline.workloads.request import WorkloadError


@dataclass(slots=True)
class SharedServer:
    """Serves several repeats from one start of the server, until `close`."""

    _stack: ExitStack = field(default_factory=ExitStack)
    _site: Site | None = None

    @contextmanager
    def serving(self, engine: Engine, where: ServerOptions, run_dir: Path, say: Say) -> Iterator[Site]:
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
            f"--restart: the server at {settings.where.url} was not started by Burstline; drop --restart"
        )
    if restart_after is not None and not 1 <= restart_after < n:
        raise WorkloadError(f"--restart {restart_after}: expected 1 or more, and less than --repeats {n}")
    before = set(settings.out.glob("*")) if settings.out.is_dir() else set()
    server, codes = SharedServer(), []
    try:
        for k in range(n):
            print(f"Repeat {k + 1} of {n}")
            spec = replace(settings.spec, salt=f"{int(settings.spec.salt, 16) + k:x}")
            # A server of one run is stopped before its report is written.
            serve = serving if restart_after == 1 else server.serving
            codes.append(run_once(replace(settings, spec=spec), serve))
            if restart_after is not None and (k + 1) % restart_after == 0:
                server.close()
    finally:
        server.close()
    runs = [open_run(path) for path in sorted(set(settings.out.glob("*")) - before) if path.is_dir()]
    folder = settings.out / f"{runs[0].name}-repeats"
    folder.mkdir()
    comparison = comparison_of(runs, folder, anyway=True)
    page = write_all(comparison, folder)
    show(digest(comparison))
    print(f"\nReport over {n} repeats: {page}")
    return _code_of(runs, codes)


def _code_of(runs: Sequence[Run], codes: Sequence[int]) -> int:
    """The worst exit code of the runs; where SLOs were asked, that of their figures over all runs."""
    goals = [parse_goal(text) for text in runs[0].manifest.targets]
    summaries = [run.summary for run in runs if run.summary is not None]
    judged = (exit_codes.DONE, exit_codes.TARGET_MISSED, exit_codes.INCONCLUSIVE)
    if len(summaries) < len(runs) or not all(code in judged for code in codes):
        return exit_codes.worst(codes)
    contender = Contender("", tuple(map(view_of, runs)))
    results = judge_over_runs(goals, summaries, lambda path: contender.figure(*path))
    if not results:
        return exit_codes.worst(codes)
    for row in results:
        print(f"{row.result}: {row.target} over {len(runs)} runs: {row.reason}")
    return exit_codes.of_results(row.result for row in results)
