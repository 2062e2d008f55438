"""`burstline run` several times, `--repeats N` or at each load of a sweep, and one page over all."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from burstline.bench.run import carry_out
from burstline.bench.run_settings import Settings
from burstline.bench.server_session import Say, Site, serving
from burstline.console import exit_codes
from burstline.console.server_options import ServerOptions
from burstline.console.terminal import show
from burstline.measure.record.rundir import Run, open_run
from burstline.reports.model.comparison import Contender, view_of
from burstline.reports.model.contenders import comparison_of
from burstline.reports.model.sweep_load import SweepLoad, load_of
from burstline.reports.model.sweeps import Point, sweeps_in
from burstline.reports.page.digest import digest
from burstline.reports.page.files import write_all
from burstline.servers.engine import Engine
from burstline.workloads.load import MAX_REPEATS
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


def run_several(every: Sequence[Settings], n: int, *, restart_after: int | None) -> int:
    """Run each load n times, with a fresh server after every `restart_after` runs; the worst exit code of the
    runs, of a sweep that of its best load.

    Each run has prompts of its own salt, so that none is served from the prefix cache of another.
    """
    room = every[0].where.with_room_for(*(each.load for each in every))  # one server serves them all
    every = [replace(each, where=room) for each in every]
    settings, swept = every[0], len(every) > 1
    if not 2 - swept <= n <= MAX_REPEATS:
        raise WorkloadError(f"--repeats {n}: expected 2 to {MAX_REPEATS}; 3 give intervals between runs")
    if restart_after is not None and settings.where.url is not None:
        raise WorkloadError("--restart: the server at --url was not started by Burstline; drop --restart")
    # Every other round goes backwards: what drifts with time falls on all loads alike.
    order = [each for k in range(n) for each in every[:: 1 if k % 2 == 0 else -1]]
    if restart_after is not None and not 1 <= restart_after < len(order):
        raise WorkloadError(f"--restart {restart_after}: expected 1 or more, below all {len(order)} runs")
    server, every_run = SharedServer(), list[tuple[Path, int]]()
    try:
        for k, each in enumerate(order):
            print(f"{'Run' if swept else 'Repeat'} {k + 1} of {len(order)}")
            spec = replace(each.load.spec, salt=each.load.spec.salt_of_run(k))
            # A server of one run is stopped before its report is written.
            serve = serving if restart_after == 1 else server.serving
            ended = carry_out(replace(each, load=replace(each.load, spec=spec)), None, serve, answer=True)
            every_run.append((ended.run.path, ended.code))
            if ended.code == exit_codes.INTERRUPTED:
                return exit_codes.INTERRUPTED
            if restart_after is not None and (k + 1) % restart_after == 0:
                server.close()
    finally:
        server.close()
    runs = [open_run(path) for path, _ in every_run]  # read back: each load has the memory of those before it
    folder = settings.out / f"{runs[0].name}-{'sweep' if swept else 'repeats'}"
    folder.mkdir()
    comparison = comparison_of(runs, folder, anyway=True)
    page = write_all(comparison, folder)
    show(digest(comparison))
    print(f"\nReport over {len(order)} {'runs' if swept else 'repeats'}: {page}")
    of = dict[SweepLoad | None, list[tuple[Run, int]]]()
    for run, (_, code) in zip(runs, every_run, strict=True):
        of.setdefault(load_of(run.manifest), []).append((run, code))
    codes = {load: code_of_runs(*zip(*ended, strict=True)) for load, ended in of.items()}
    loads = [(codes[at.load], at) for sweep, _ in sweeps_in(comparison.cases) for at in sweep.points]
    return code_of_loads(loads) if loads else exit_codes.best(codes.values())


def code_of_loads(loads: Sequence[tuple[int, Point]]) -> int:
    """The exit code of a sweep, as its page: DONE if a reliable load is, else that of the lowest reliable."""
    reliable = [own for own, at in loads if not at.doubts]
    worse = exit_codes.worst([exit_codes.INCONCLUSIVE, exit_codes.best(own for own, _ in loads)])
    return exit_codes.DONE if exit_codes.DONE in reliable else [*reliable, worse][0]


def code_of_runs(runs: Sequence[Run], codes: Sequence[int]) -> int:
    """The worst exit code of the runs; where SLOs were asked, that of their figures over all runs."""
    judged = (exit_codes.DONE, exit_codes.TARGET_MISSED, exit_codes.INCONCLUSIVE)
    if len(runs) < 2 or not all(code in judged for code in codes):
        return exit_codes.worst(codes)
    slos = Contender("", tuple(map(view_of, runs))).slos
    return exit_codes.of_results(row.result for row in slos) if slos else exit_codes.worst(codes)
