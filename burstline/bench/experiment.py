"""One run: choose the engine, serve, plan, watch, fire, decode, summarise, report.

What only a later part of a run needs is imported there: before the first request numpy alone, tables
(pyarrow) while the drivers prepare, figures and statistics once the last token is here.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from burstline import exit_codes
from burstline.bench.fire import DriveOutcome, DriverDiedError, Drivers, VitalSigns, fire
from burstline.bench.load_options import Load, checked, job_of
from burstline.bench.load_spec import check_limits
from burstline.bench.plan_for_server import plan_for
from burstline.bench.progress import LiveTelemetry, Progress, Snapshot, progress_for
from burstline.bench.run_settings import (
    Settings,
    form_of,
    manifest_of,
    server_facts,
    with_software_and_devices,
)
from burstline.bench.server_session import (
    Say,
    Site,
    check_length,
    check_start,
    check_where,
    choose_engine,
    serving,
)
from burstline.bench.stages import send_stages
from burstline.bench.vocabulary import ASSUMED
from burstline.driver_processes import local_drivers
from burstline.interrupt import finishing, terminable, uninterrupted
from burstline.lean import import_tables, meanwhile
from burstline.machine import host_facts
from loadgen.driver.canary import TruthProcess, canary
from loadgen.driver.job import Job
from loadgen.record.capture import Capture
from loadgen.record.capture_store import CaptureWriter
from loadgen.record.manifest import (
    LoadFacts,
    Status,
)
from loadgen.record.rundir import RunDir, open_run
from loadgen.wire.os_limits import ensure_fd_limit
from servers.engine import Engine
from servers.host.telemetry import load_telemetry
from servers.host.watch import Watcher
from servers.launch import Launch
from servers.messages import EngineError
from workloads.plan import Plan
from workloads.prompts import Vocabulary
from workloads.request import WorkloadError
from workloads.warm_up import WarmUp

if TYPE_CHECKING:
    from burstline.cluster.session import RayOptions
    from loadgen.record.summary import Summary


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


def run_experiment(settings: Settings) -> int:
    """The whole run; its exit code. From the first moment on, every planned request is accounted for."""
    load = checked(settings.spec)
    _check_what_comes_after(settings)
    check_where(settings.where)
    ensure_fd_limit(load.n_connections)
    early_answer = settings.early_answer
    engine = early_answer.engine() if early_answer else choose_engine(settings.where)
    if settings.spec.warmup is None and settings.where.url is None and not engine.brings_model:
        load = replace(
            load, warm_up=WarmUp()
        )  # fresh starts differ by what they compile for the first shapes
    (check_length if early_answer else check_start)(engine, settings.where, load.longest_tok or 0)
    run = RunDir.create(settings.out, manifest_of(settings, load, engine))
    progress = progress_for(settings.quiet)
    progress.phase(f"{load.title}, at {engine.title}")
    with terminable():
        try:
            fired = _measured(run, engine, load, settings, progress)
        except (EngineError, WorkloadError, DriverDiedError, KeyboardInterrupt) as error:
            if isinstance(error, WorkloadError) and not run.captures.exists():
                shutil.rmtree(run.path)  # the user's slip, found late: nothing was measured
                raise
            _account_for_the_rest(run, engine, load, error)
            raise
        finally:
            progress.close()
        with finishing(_report_first):
            from burstline.machine.hardware import note_hardware

            note_hardware(run, settings.hints)
            progress.phase("Decoding what was captured, and writing the report")
            from burstline.bench.noise import known_for

            run.save_manifest(replace(run.manifest, noise=known_for(run.manifest)))
            from burstline.bench.finish import conclude

            summary = conclude(run, engine, fired.status, fired.done.reports)
    return _told(run, summary, fired)


def _report_first() -> None:
    """An interrupt while the report is made: it takes seconds, and the load was worth more."""
    with suppress(OSError):
        os.write(2, b"burstline: writing the report before it ends; interrupt again to end now\n")


def _check_what_comes_after(settings: Settings) -> None:
    """Refuse an unknown tokenizer, SLO or device before anything starts."""
    check_limits(settings.max_failures, settings.vocab_size, settings.tokenizer, settings.usd_per_hour)
    if settings.targets:
        from loadgen.metrics.slo import parse_goal

        for target in settings.targets:
            parse_goal(target)
    if settings.hints.device or settings.hints.model_config:
        from burstline.machine.hardware import check_hints

        check_hints(settings.hints)


def _measured(
    run: RunDir,
    engine: Engine,
    load: Load,
    settings: Settings,
    progress: Progress,
) -> RunOutcome:
    progress.phase("Waiting until the server has generated a token")
    where = replace(settings.where, n_concurrent=load.n_at_once, n_request_tok=load.longest_tok)
    serve = settings.serve or (settings.early_answer.serving if settings.early_answer else serving)
    meanwhile(_prepare)  # the server's first token takes longer
    truth = canary() if settings.canary and settings.ray is None else nullcontext()
    with (
        truth as canary_server,
        Watcher() as watcher,
        serve(engine, where, run.path, progress.phase) as site,
    ):
        if canary_server and site.launch and site.launch.n_cores:
            canary_server.leave_to_server(site.launch.n_cores)
        ready = _made_ready(run, site, load, settings, progress.phase)
        with _drivers(settings.ray, site, progress) as drivers:
            fired = _watched(run, ready, progress, drivers, watcher, canary_server)
        from burstline.bench.finish import recount

        whole = fired.status == "complete"
        recount(run, ready.site, settings.tokenizer, where.model, progress.phase, ask=whole)
        launch = site.launch
    _keep_steps(run, launch, fired.t0_ns)
    return fired


@dataclass(frozen=True, slots=True)
class _Ready:
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


def _made_ready(run: RunDir, site: Site, load: Load, settings: Settings, say: Say) -> _Ready:
    """Plan the requests for this server, and note both in the manifest."""
    model = settings.where.model
    plan, vocabulary, cached = plan_for(load, site, settings.tokenizer, settings.vocab_size, model, say)
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
    return _Ready(site, load, plan, vocabulary)


@contextmanager
def _drivers(ray: RayOptions | None, site: Site, progress: Progress) -> Iterator[Drivers]:
    """Who drives the load: workers on a cluster, or processes of this machine."""
    if ray is None:
        yield local_drivers
        return
    from burstline.cluster.session import ray_session
    from burstline.cluster.workers import fleet_of

    with ray_session(ray) as session, fleet_of(session, ray, site.target.url) as fleet:
        for driver in fleet.drivers:
            progress.phase(f"{driver.name}: clock {driver.before.describe()}")
        yield fleet.connected


def _prepare() -> None:
    """What takes a while and needs no server."""
    import_tables()
    for find_out in (host_facts.commit, host_facts.libraries, host_facts.devices):
        find_out()


def _watched(
    run: RunDir,
    ready: _Ready,
    progress: Progress,
    drivers: Drivers,
    watcher: Watcher,
    canary_server: TruthProcess | None,
) -> RunOutcome:
    """Warm the server up, then fire, while the watcher samples; what is known at the end is on disk."""
    site, load, plan = ready.site, ready.load, ready.plan
    telemetry = run.path / "telemetry.jsonl"
    live, signs = LiveTelemetry(telemetry), VitalSigns(site, progress.phase)

    def on_tick(snapshot: Snapshot) -> None:
        live.refresh()
        signs.look(snapshot)
        progress.update(replace(snapshot, tok_per_s=live.tok_per_s, memory_bytes=live.memory_bytes))

    job = ready.job(run, canary_server.port if canary_server else None)
    sent = send_stages(plan, job, site.engine, progress.phase)
    if sent.facts:
        assert run.manifest.load is not None
        run.save_manifest(replace(run.manifest, load=replace(run.manifest.load, stages=sent.facts)))
    if site.engine.metrics_path is not None and site.engine.counters_settle_s > LATE_S:
        time.sleep(site.engine.counters_settle_s)  # the token of readiness is counted late, too
    with watcher.watch(telemetry, keeper_pid=site.watched_pid, engine=site.engine.name, target=site.target):

        def while_drivers_prepare(pids: list[int]) -> None:
            from loadgen.record.tables import keep_pandas_out

            watcher.add_clients([*pids, *([canary_server.pid] if canary_server else ())])
            keep_pandas_out()
            run.save_plan(plan)
            run.save_manifest(with_software_and_devices(run.manifest))
            if site.engine.metrics_path is not None and not watcher.await_baseline():
                progress.phase("The server's metrics did not answer: its counters are not used")

        done = fire(job, load.n_workers, while_drivers_prepare, on_tick, drivers)
    fired = RunOutcome(done, signs.death())
    if signs.silences and run.manifest.server is not None:
        notes = (*run.manifest.server.notes, *signs.silences)
        run.save_manifest(replace(run.manifest, server=replace(run.manifest.server, notes=notes)))
    with uninterrupted():
        error = fired.engine_error or (str(done.error) if done.error else None)
        run.save_manifest(replace(run.manifest, drivers=tuple(done.reports), error=error))
        _keep_telemetry(run, telemetry, fired.t0_ns)
        if sent.records:
            run.save_warm_up(sent.table(fired.t0_ns))
        job.counters.unlink()
    return fired


def _keep_telemetry(run: RunDir, path: Path, t0_ns: int) -> None:
    """What the watcher saw, on the run's clock."""
    run.save_telemetry(load_telemetry(path), t0_ns)
    path.unlink()


def _keep_steps(run: RunDir, launch: Launch | None, t0_ns: int) -> None:
    """The engine's own step log, where it wrote one, on the run's clock."""
    if launch is None or launch.step_log is None or not launch.step_log.exists():
        return
    import pyarrow as pa

    from servers.reference.steplog import load_steps

    header, columns = load_steps(launch.step_log)
    for name in ("start_ns", "end_ns"):
        columns[name] = [at_ns - t0_ns for at_ns in columns.get(name, [])]
    if columns["start_ns"]:
        run.save_steps(pa.table(columns))
    run.save_manifest(replace(run.manifest, step_log=header))
    launch.step_log.unlink()


def _account_for_the_rest(run: RunDir, engine: Engine, load: Load, error: BaseException) -> None:
    """A record of every planned request, "not_sent" where the server never got one."""
    why = str(error) or "interrupted before the load began"
    run.save_manifest(replace(with_software_and_devices(run.manifest), error=why))
    if not (run.path / "plan.parquet").exists():
        plan = load.plan(ASSUMED)
        run.save_plan(plan)
        run.save_manifest(replace(run.manifest, plan_sha256=plan.sha256))
        spool = CaptureWriter(run.captures)
        for request, due_ns in zip(plan.requests, plan.due_ns, strict=True):
            spool.put(partial(Capture, request.index, due_ns, None, None, None, None, (), "not_sent", why))
        spool.close()
    from burstline.bench.finish import conclude

    status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    with finishing(_report_first):
        conclude(run, engine, status, run.manifest.drivers)
    print(f"Kept of this run: {run.path}", file=sys.stderr)


def _told(run: RunDir, summary: Summary, fired: RunOutcome) -> int:
    """Say in a few lines how it went and where the page is; the exit code."""
    from reports.formats.text import text
    from reports.model.comparison import view_of
    from reports.page.digest import headline

    print(text(headline(view_of(open_run(run.path)))))
    print(f"Report: {run.report}")
    if fired.engine_error:
        raise EngineError(fired.engine_error)
    if fired.done.error:
        raise fired.done.error
    if fired.done.interrupted:
        return exit_codes.INTERRUPTED
    return exit_codes.of_summary(summary)
