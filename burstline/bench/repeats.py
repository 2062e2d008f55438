"""`burstline run --repeats N`: the same run several times, one page over all, and the noise between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from burstline import exit_codes
from burstline.bench import noise
from burstline.bench.experiment import Settings, run_experiment
from burstline.bench.load_options import MAX_REPEATS
from burstline.bench.server_session import Say, Site, Where, serving
from loadgen.record.rundir import Run, open_run
from servers.engine import Engine
from workloads.request import WorkloadError


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
    noise.remember(runs)
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
