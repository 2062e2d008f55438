"""One run, from the settings to the page: serve, plan, watch, fire, decode, summarise, report."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from burstline import exit_codes
from burstline.bench.fire import DriveOutcome, Drivers, VitalSigns, fire
from burstline.bench.load_options import Load, checked, job_of
from burstline.bench.plan_for_server import plan_for
from burstline.bench.progress import LiveTelemetry, Progress, Snapshot, progress_for
from burstline.bench.recount import recount
from burstline.bench.run_settings import Settings, form_of, manifest_of, server_facts
from burstline.bench.server_session import (
    Say,
    Serving,
    Site,
    check_start,
    check_where,
    choose_engine,
    serving,
)
from burstline.bench.stages import send_stages
from burstline.bench.vocabulary import ASSUMED
from burstline.cluster.placement import RayOptions
from burstline.cluster.workers import Fleet, fleet_of
from burstline.driver_processes import local_drivers
from burstline.loadgen.driver.canary import TruthProcess, canary
from burstline.loadgen.driver.job import Job
from burstline.loadgen.record.capture import Capture
from burstline.loadgen.record.capture_store import CaptureWriter
from burstline.loadgen.record.manifest import LoadFacts, Status
from burstline.loadgen.record.rundir import RunDir
from burstline.loadgen.record.tables import keep_pandas_out
from burstline.loadgen.wire.os_limits import ensure_fd_limit
from burstline.machine.hardware import check_hints
from burstline.servers.engine import Engine
from burstline.servers.host.child import ChildLostError
from burstline.servers.host.interrupt import finishing, terminable, uninterrupted
from burstline.servers.host.telemetry import load_telemetry
from burstline.servers.host.watch import Watcher
from burstline.servers.launch import Launch
from burstline.servers.messages import EngineError
from burstline.servers.reference.steplog import load_steps
from burstline.workloads.plan import Plan
from burstline.workloads.prompts import Vocabulary
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import WarmUp, check_goals

LATE_S = 0.5
"""Counters that need longer to stand still are let settle before the load, too."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """What a load left behind besides its captures. `engine_error` is why the server ended under it."""

    done: DriveOutcome
    engine_error: str | None

    @property
    def t0_ns(self) -> int:
        return self.done.t0_ns or 0

    @property
    def status(self) -> Status:
        if self.done.interrupted:
            return "interrupted"
        return "failed" if self.engine_error or self.done.error else "complete"


def run_once(settings: Settings, serve: Serving = serving) -> int:
    """The whole run; its exit code. From the first moment on, every planned request is accounted for."""
    keep_pandas_out()
    load, engine = check(settings)
    where = replace(settings.where, n_concurrent=load.n_at_once, n_request_tok=load.longest_tok)
    run = RunDir.create(settings.out, manifest_of(settings, load, engine))
    progress = progress_for(settings.quiet)
    progress.phase(f"{load.title}, at {engine.title}")
    with terminable():
        with (
            _accounted_for(run, engine, load, progress),
            _cluster(settings.ray, run, load, progress) as fleet,
        ):
            progress.phase("Waiting until the server has generated a token")
            has_canary = settings.canary and fleet is None
            with (
                canary() if has_canary else nullcontext() as truth,
                Watcher() as watcher,
                serve(engine, where, run.path, progress.phase) as site,
            ):
                if fleet is not None:
                    fleet.check_reach(site.target.url)
                    load = replace(load, n_workers=len(fleet.drivers))
                ready = make_ready(run, site, load, settings, progress.phase)
                drivers = local_drivers if fleet is None else fleet.connected
                fired = fire_watched(run, ready, drivers, watcher, truth, progress)
                whole = fired.status == "complete"
                recount(run, ready.site, settings.spec.tokenizer, where.model, progress.phase, ask=whole)
            _keep_steps(run, site.launch, fired.t0_ns)
        from burstline.bench.report import conclude, note_facts, said  # the load does not wait for it

        with finishing(_report_first):
            progress.phase("Decoding what was captured, and writing the report")
            note_facts(run, settings.hints)
            summary = conclude(run, engine, fired.status)
        code = said(run, summary)
    if fired.engine_error:
        raise EngineError(fired.engine_error)
    if fired.done.error:
        raise fired.done.error
    return exit_codes.INTERRUPTED if fired.done.interrupted else code


def check(settings: Settings) -> tuple[Load, Engine]:
    """The load and the engine; refuses what cannot be, before anything starts."""
    load = checked(settings.spec)
    check_goals(settings.goals)
    if settings.goals.slo:
        from burstline.loadgen.metrics.slo import parse_goal  # statistics: only the report needs them else

        for target in settings.goals.slo:
            parse_goal(target)
    if settings.hints.device or settings.hints.model_config:
        check_hints(settings.hints)
    check_where(settings.where)
    ensure_fd_limit(load.n_connections)
    engine = choose_engine(settings.where)
    check_start(engine, settings.where, load.longest_tok or 0)
    if settings.spec.warmup is None and settings.where.url is None and not engine.brings_model:
        # Fresh starts differ by what they compile for the first shapes.
        load = replace(load, spec=replace(load.spec, warmup=WarmUp()))
    return load, engine


@dataclass(frozen=True, slots=True)
class ReadyLoad:
    """A load that waits for nothing but its drivers, and the server that it goes to."""

    site: Site
    load: Load
    plan: Plan
    vocabulary: Vocabulary

    def job(self, run: RunDir, canary_port: int | None) -> Job:
        return job_of(
            self.plan,
            self.load,
            engine=self.site.engine.name,
            target=self.site.target,
            vocabulary=self.vocabulary,
            captures=run.captures,
            counters=run.path / "counters",
            canary_port=canary_port,
        )


def make_ready(run: RunDir, site: Site, load: Load, settings: Settings, say: Say) -> ReadyLoad:
    """Plan the requests for this server, and note both in the manifest."""
    model = settings.where.model
    plan, vocabulary, cached = plan_for(load, site, model, say)
    expected = site.engine.before_load(site.identity, load.n_at_once, plan.longest_output_tok)
    for note in expected:
        say(note)
    site = replace(site, notes=site.notes + expected)
    server = server_facts(site, model)
    facts = LoadFacts(plan.dropped, cached, prompts=form_of(plan))
    title = load.title
    if not load.has_sessions:  # rows that did not fit are not asked for
        title = replace(load, arrivals=replace(load.arrivals, n=len(plan.requests))).title
    begun = replace(run.manifest, identity=site.identity, server=server, plan_sha256=plan.sha256, title=title)
    run.save_manifest(replace(begun, load=facts))
    say(f"Ready after {site.startup.ready_s:.1f} s; opening connections, then the load")
    return ReadyLoad(site, load, plan, vocabulary)


@contextmanager
def _cluster(ray: RayOptions | None, run: RunDir, load: Load, progress: Progress) -> Iterator[Fleet | None]:
    """Workers on a cluster, asked before anything is sent to the server; None without one."""
    if ray is None:
        yield None
        return
    progress.phase(f"Placing load drivers on the Ray cluster at {ray.address}")
    with fleet_of(ray, load.spec.concurrency or load.arrivals.n, run.path / "ray.log") as fleet:
        for driver in fleet.drivers:
            progress.phase(f"{driver.name}: clock {driver.before.describe()}")
        yield fleet


def fire_watched(
    run: RunDir,
    ready: ReadyLoad,
    drivers: Drivers,
    watcher: Watcher,
    truth: TruthProcess | None,
    progress: Progress,
) -> RunOutcome:
    """Warm the server up, then fire, while the watcher samples; what is known at the end is on disk."""
    site = ready.site
    if truth and site.launch and site.launch.n_cores:
        truth.leave_to_server(site.launch.n_cores)
    job = ready.job(run, truth.port if truth else None)
    sent = send_stages(ready.plan, job, site.engine, progress.phase)
    if sent.facts:
        assert run.manifest.load is not None
        run.save_manifest(replace(run.manifest, load=replace(run.manifest.load, stages=sent.facts)))
    counts = site.engine.metrics_path is not None
    if counts and site.engine.counters_settle_s > LATE_S:
        time.sleep(site.engine.counters_settle_s)  # the token of readiness is counted late, too
    telemetry, signs = run.path / "telemetry.jsonl", VitalSigns(site, progress.phase)
    with watcher.watch(telemetry, keeper_pid=site.watched_pid, engine=site.engine.name, target=site.target):
        if counts and not watcher.await_baseline():
            progress.phase("The server's metrics did not answer: its counters are not used")
        run.save_plan(ready.plan)

        def watch_clients(pids: list[int]) -> None:
            watcher.add_clients([*pids, *([truth.pid] if truth else ())])

        on_tick = _display(LiveTelemetry(telemetry), signs, progress, int(ready.plan.output_tok.sum()))
        done = fire(job, ready.load.n_workers, watch_clients, on_tick, drivers, progress.phase)
    fired = RunOutcome(done, signs.death())
    if signs.silences and run.manifest.server is not None:
        notes = (*run.manifest.server.notes, *signs.silences)
        run.save_manifest(replace(run.manifest, server=replace(run.manifest.server, notes=notes)))
    with uninterrupted():
        error = fired.engine_error or (str(done.error) if done.error else None)
        run.save_manifest(replace(run.manifest, drivers=tuple(done.reports), lost=done.lost, error=error))
        _keep_telemetry(run, telemetry, fired.t0_ns)
        if sent.records:
            run.save_warm_up(sent.table(fired.t0_ns))
        job.counters.unlink()
    return fired


def _display(
    live: LiveTelemetry, signs: VitalSigns, progress: Progress, planned_tok: int
) -> Callable[[Snapshot], None]:
    """What is done at each look at a load: show it, and see whether the server lives."""

    def on_tick(snapshot: Snapshot) -> None:
        live.refresh()
        signs.look(snapshot)
        watched = replace(snapshot, tok_per_s=live.tok_per_s, memory_bytes=live.memory_bytes)
        progress.update(replace(watched, planned_tok=planned_tok, tok=live.tok))

    return on_tick


def _keep_telemetry(run: RunDir, path: Path, t0_ns: int) -> None:
    """What the watcher saw, on the run's clock."""
    run.save_telemetry(load_telemetry(path), t0_ns)
    path.unlink()


def _keep_steps(run: RunDir, launch: Launch | None, t0_ns: int) -> None:
    """The engine's own step log, where it wrote one, on the run's clock."""
    if launch is None or launch.step_log is None or not launch.step_log.exists():
        return

    header, columns = load_steps(launch.step_log)
    for name in ("start_ns", "end_ns"):
        columns[name] = [at_ns - t0_ns for at_ns in columns.get(name, [])]
    if columns["start_ns"]:
        run.save_steps(pa.table(columns))
    run.save_manifest(replace(run.manifest, step_log=header))
    launch.step_log.unlink()


@contextmanager
def _accounted_for(run: RunDir, engine: Engine, load: Load, progress: Progress) -> Iterator[None]:
    """Where it fails or is interrupted, what is there is reported before the error goes on."""
    try:
        yield
    except (EngineError, WorkloadError, ChildLostError, KeyboardInterrupt) as error:
        progress.close()
        if isinstance(error, WorkloadError) and not run.captures.exists():
            shutil.rmtree(run.path)  # the user's slip, found late: nothing was measured
        else:
            _account_for_the_rest(run, engine, load, error)
        raise
    finally:
        progress.close()


def _account_for_the_rest(run: RunDir, engine: Engine, load: Load, error: BaseException) -> None:
    """A record of every planned request, "not_sent" where the server never got one."""
    why = str(error) or _interrupted(run)
    run.save_manifest(replace(run.manifest, error=why))
    if not (run.path / "plan.parquet").exists():
        plan = load.plan(ASSUMED)
        run.save_plan(plan)
        run.save_manifest(replace(run.manifest, plan_sha256=plan.sha256))
        spool = CaptureWriter(run.captures)
        for request, due_ns in zip(plan.requests, plan.due_ns, strict=True):
            spool.put(partial(Capture, request.index, due_ns, None, None, None, None, (), "not_sent", why))
        spool.close()
    from burstline.bench.report import conclude

    status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    with finishing(_report_first):
        conclude(run, engine, status)
    print(f"Kept of this run: {run.path}", file=sys.stderr)


def _interrupted(run: RunDir) -> str:
    """When it was interrupted; during a load the first interrupt is answered by the drivers, not here."""
    if run.manifest.drivers:
        return "interrupted after the load"
    if run.captures.exists():
        return "interrupted before the drivers had stopped; the replies that they had not kept are lost"
    return "interrupted before the load began"


def _report_first() -> None:
    """An interrupt while the report is made: it takes seconds, and the load was worth more."""
    with suppress(OSError):
        os.write(2, b"burstline: writing the report before it ends; interrupt again to end now\n")
