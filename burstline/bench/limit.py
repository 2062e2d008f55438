"""`burstline limit`: probe one server, each probe a run of its own, until the highest load is known."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from burstline.bench.progress import Snapshot, progress_for
from burstline.bench.repeats import SharedServer
from burstline.bench.run import ReadyLoad, carry_out
from burstline.bench.run_settings import Settings
from burstline.console import exit_codes
from burstline.console.terminal import show
from burstline.loadgen.capture.files import write_json
from burstline.measure.metrics.slo import bounds_of, evidence_of, parse_slo, spoilt_by
from burstline.measure.record.columns import columns_of
from burstline.measure.record.decode import Share
from burstline.measure.record.record import Outcome
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.summary import Summary
from burstline.measure.record.tables import RECORDS
from burstline.measure.record.verdict import HELD, State, Use, withheld, worst
from burstline.measure.stats.figure import Estimate, Result
from burstline.measure.stats.limit_search import Ask, Evidence, Found, ProbeLook, leaning, search
from burstline.reports.page.limit_page import RESULT, LimitResult, limit_blocks, limit_page, why_open
from burstline.workloads.arrivals import STEADY_PATTERNS, parse_arrival
from burstline.workloads.load import load_of
from burstline.workloads.options import flag_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import Goals, LimitOptions, LoadSpec

CODES: Final = {
    "confirmed": exit_codes.DONE,
    "none": exit_codes.TARGET_MISSED,
    "open": exit_codes.INCONCLUSIVE,
    "lost": exit_codes.INCONCLUSIVE,
}
"""The exit code by the state of a search."""
LEAST_ROOM: Final = 64
"""Requests at once for which a server that a search starts has room, wherever the search begins."""
MOST_REQUESTS: Final = 20_000
"""A probe is planned no longer than this: all of its prompts are made before its load begins."""
BY_TIME: Final = 3.0
"""A closed loop is planned for so many times as many requests as its users made so far in the same time."""
FEW: Final = 4
"""About so many requests in flight begin a search: few for a server that batches."""


def check_limit(spec: LoadSpec, goals: Goals, options: LimitOptions) -> LoadSpec:
    """The load that is searched, with Poisson arrivals unless others are asked; WorkloadError for another."""
    if spec.rate is not None and spec.concurrency is not None:
        raise WorkloadError(
            "limit: say where the search begins: --rate R (requests per second) or --concurrency N (users at "
            "a time), not both; neither, and it begins at the speed of one request"
        )
    for name in ("requests", "duration_s", "sessions", "turns", "trace"):
        if getattr(spec, name) is not None:
            raise WorkloadError(f"limit: probes last as long as they must; drop {flag_of(name)}")
    if spec.audit is not None:
        raise WorkloadError("limit: probes are not audited; drop --audit, and audit a run at the load found")
    if spec.rate is not None and spec.arrival is None:
        spec = replace(spec, arrival=parse_arrival("poisson"))
    if spec.rate is not None and spec.pattern not in STEADY_PATTERNS:
        raise WorkloadError(f"limit --arrival {spec.pattern}: expected one of {', '.join(STEADY_PATTERNS)}")
    bounds_of(tuple(map(parse_slo, goals.slo)))
    if not 0.001 <= options.error <= 0.5:
        raise WorkloadError(f"--error {options.error:g}: expected a share from 0.1% to 50%, e.g. 5%")
    if not 10 <= options.budget_s < math.inf:
        raise WorkloadError(f"--budget-s {options.budget_s:g}: expected at least 10 seconds")
    return spec


def run_limit(settings: Settings, options: LimitOptions) -> int:
    """Search, keep every probe as a run, write the page, and tell the result; the exit code."""
    result, runs, folder, interrupted = searched(settings, options)
    show(limit_blocks(result, runs))
    print(f"Report: {folder / 'report.html'}")
    return exit_codes.INTERRUPTED if interrupted else CODES[result.state]


def searched(settings: Settings, options: LimitOptions) -> tuple[LimitResult, list[Run], Path, bool]:
    """Search and write the page: what was found, by which runs, its folder, whether a person stopped it."""
    server, until_s = SharedServer(), time.monotonic() + options.budget_s
    again = settings.again(options, verb="limit")
    settings = replace(settings, where=settings.where.with_room_for(settings.load, least=LEAST_ROOM))
    try:
        if settings.load.spec.rate is None and settings.load.spec.concurrency is None:
            settings = _begun(settings, server)
        prober = _Prober(settings, options.error, server, until_s)
        interrupted = prober.run()
    finally:
        server.close()
    if not prober.folders:
        raise WorkloadError(f"--budget-s {options.budget_s:g}: not one probe began; allow more")
    found, runs = prober.found(), list(map(open_run, prober.folders.values()))  # no probe had their memory
    more, n_requests = found.more_requests, prober.n_requests
    why, advice = why_open(found, runs)
    # Interrupted in its first probe, the search knows no pace.
    more_s = more * prober.load_s / n_requests if more is not None and n_requests else None
    result = LimitResult(
        engine=runs[0].manifest.engine,
        kind="rate" if settings.load.spec.concurrency is None else "concurrency",
        targets=settings.goals.slo,
        budget_s=options.budget_s,
        found=found,
        more_s=more_s,
        runs=tuple(run.name for run in runs),
        verdicts=tuple(str(run.summary.verdict.state) for run in runs if run.summary),
        why=why,
        again=again,
        advice=advice,
    )
    folder = settings.out / f"{runs[0].name}-limit"
    folder.mkdir(parents=True)
    write_json(folder / RESULT, result.to_json())
    (folder / "report.html").write_text(limit_page(result, runs), "utf-8")
    return result, runs, folder, interrupted


def _begun(settings: Settings, server: SharedServer) -> Settings:
    """With the rate at which FEW requests are in flight if each takes as long as one that is sent alone."""
    progress, spec = progress_for(settings.quiet), settings.load.spec
    one = replace(settings, load=load_of(replace(spec, requests=1, warmup=0)), goals=Goals())
    ended = carry_out(one, progress, server.serving)
    if not isinstance(e2e := ended.summary.figure("metrics", "e2e", "mean"), Estimate):
        raise WorkloadError(f"limit: the first request failed ({e2e.reason}); see {ended.run.report}")
    rate = float(f"{FEW / e2e.point:.2g}")
    progress.phase(f"One request took {e2e.point:.3g} s: the search begins at {rate:g} requests per second")
    load = load_of(replace(spec, rate=rate, arrival=parse_arrival("poisson")))
    return replace(settings, load=load, calibrate=False)  # that has been tried


class _Prober:
    """Runs what the search asks for, one run for each probe, on one server."""

    def __init__(self, settings: Settings, error: float, server: SharedServer, until_s: float) -> None:
        self.server, self.folders = server, dict[int, Path]()
        self.n_requests, self.load_s = 0, 0.0
        self._looked_s = self._after_s = 0.0
        """When a probe was looked at last; the longest that one took after that, within the budget."""
        self._settings, self._until_s = settings, until_s
        self._slos = tuple(map(parse_slo, settings.goals.slo))
        spec = settings.load.spec
        self._users = spec.concurrency is not None
        start = float(spec.concurrency or spec.rate or 0.0)
        self._search = search(bounds_of(self._slos), start, users=self._users, error=error)
        self._found: Found | None = None
        self._ask = next(self._search)
        self._at_n = 0
        """The next look is taken once so many requests have ended."""

    def found(self) -> Found:
        """What is known, now that there is no time for more."""
        self._tell(None)
        assert self._found is not None
        return self._found

    def run(self) -> bool:
        """Probe until all is known or the time is up; whether a person interrupted."""
        progress = progress_for(self._settings.quiet)
        while self._found is None and self._is_time:
            ask, self._at_n = self._ask, self._ask.n
            unit = "users at a time" if self._users else "requests per second"
            left_s, self._looked_s = self._until_s - time.monotonic(), time.monotonic()
            progress.phase(f"Probe {ask.number}: do {ask.load:g} {unit} meet the SLOs? {left_s:.0f} s left")
            ended = carry_out(self._settings_of(ask), progress, self.server.serving, self._enough)
            self.folders[ask.number], look, lost = ended.run.path, None, ""
            if ended.code == exit_codes.INTERRUPTED:
                return True
            while self._found is None and self._ask.number == ask.number:
                over = replace(self._evidence(ended.run), over=True)
                look = self._ask.look or look
                self._tell(replace(over, lost=(lost := self._lost(ended.summary, self._ask.look))))
            told = lost or (look.judged if look else Result.INCONCLUSIVE)
            progress.phase(f"Probe {ask.number}, {ask.load:g}: {told}")
            self._after_s = max(self._after_s, time.monotonic() - self._looked_s)
        return False

    def _lost(self, summary: Summary, look: ProbeLook | None) -> str:
        """The verdict for which a probe may not decide what the look says; "" where it may.

        One that is undecided decides nothing: if its speed changed, it may still say where to probe next.
        """
        if look is None or not look.shares:
            return ""
        state, grows = withheld(summary.verdict, Use.SEARCHED), look.overloaded
        if by := next(filter(None, (spoilt_by(slo, summary) for slo in self._slos)), ""):
            return (state or by) if by == HELD else worst([state or State.VALID, State.CLIENT_BOUND])
        grows |= look.change > 0 and not self._users  # in a closed loop no queue grows
        if leaning(look, bounds_of(self._slos)) == Result.FAIL:
            state = state and withheld(summary.verdict, Use.MISSED, grows=grows)
        undecided = look.judged == Result.INCONCLUSIVE and state == State.NOT_STATIONARY
        return "" if state is None or undecided else state

    @property
    def _is_time(self) -> bool:
        return time.monotonic() + self._after_s < self._until_s

    def _settings_of(self, ask: Ask) -> Settings:
        """A probe: prompts and arrivals of its own; the first warms up, and may measure the CPU."""
        own, left_s = self._settings.load.spec, self._until_s - time.monotonic()
        pace = self.n_requests / self.load_s * BY_TIME if self.load_s else math.inf
        n_in_time = left_s * (pace if self._users else ask.load)
        own = replace(own, concurrency=round(ask.load)) if self._users else replace(own, rate=ask.load)
        # Some more than it asks for: those in flight when it has enough are not looked at.
        n = max(ask.n, 1 + round(min(n_in_time, MOST_REQUESTS, 1.2 * ask.n_most)))
        salt, warmup = own.salt_of_run(ask.number), own.warmup if ask.number == 1 else 0
        own = replace(own, requests=n, seed=own.seed + ask.number, salt=salt, warmup=warmup)
        calibrate = self._settings.calibrate and ask.number == 1
        return replace(self._settings, load=load_of(own), calibrate=calibrate)

    def _enough(self, run: RunDir, ready: ReadyLoad, now: Snapshot) -> bool:
        """Look at the run where the search wants it; whether it wants no more of it."""
        self._decode, self._looked_s = ready.site.engine.decode, time.monotonic()
        if not self._is_time:
            return True
        n_ended = now.done + now.failed
        if n_ended < self._at_n:
            return False
        evidence, ask = self._evidence(run), self._ask
        n = len(evidence.latencies[0])
        if n < ask.n:  # one that takes longer holds back those behind it
            self._at_n = n_ended + ask.n - n
            return False
        self._tell(evidence)
        self._at_n = self._ask.n
        if self._ask.look is None:
            return False
        self.n_requests += now.sent
        self.load_s += now.elapsed_s
        return True

    def _tell(self, evidence: Evidence | None) -> None:
        if self._found is not None:
            return
        try:
            self._ask = self._search.send(evidence)
        except StopIteration as ended:
            self._found = ended.value

    def _evidence(self, run: RunDir) -> Evidence:
        """What has ended of the run, up to the first request that has not."""
        table = pa.concat_tables([RECORDS.empty_table(), *Share(run.path, self._decode).tables()])
        table = table.filter(pc.not_equal(table.column("outcome"), Outcome.NOT_SENT.value))
        table = table.sort_by("index")
        indices = table.column("index").to_numpy()
        n = int((indices == np.arange(len(indices))).cumprod().sum())
        return evidence_of(self._slos, columns_of(table.slice(0, n)), open_loop=not self._users)
