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
from typing import TYPE_CHECKING

import pyarrow as pa

from burstline.bench.calibration import may_calibrate, measure_again, note_measured
from burstline.bench.fire import DriveOutcome, Drivers, Enough, VitalSigns, fire
from burstline.bench.plan_for_server import plan_for
from burstline.bench.progress import LiveTelemetry, Progress, Snapshot, progress_for
from burstline.bench.recount import recount
from burstline.bench.requests_apart import (
    audit_load,
    check_audit,
    check_profile,
    check_profiler,
    job_at,
    n_audited,
    profile_load,
    send_stages,
)
from burstline.bench.run_settings import Settings, form_of, gpu_facts, manifest_of, server_facts
from burstline.bench.server_session import Say, Serving, Site, check_start, choose_engine, serving
from burstline.cluster.placement import RayOptions
from burstline.cluster.workers import Fleet, fleet_of
from burstline.console import exit_codes
from burstline.loadgen.capture.files import write_json
from burstline.loadgen.driver.canary import TruthProcess, canary
from burstline.loadgen.driver.job import local_drivers, n_drivers
from burstline.loadgen.wire.os_limits import ensure_ports, ensure_sockets
from burstline.machine.hardware import check_hints
from burstline.machine.host_facts import Beside
from burstline.measure.record.manifest import LoadFacts, Status
from burstline.measure.record.record import Outcome
from burstline.measure.record.run_writer import FORECAST, RunDir, read_manifest
from burstline.measure.record.tables import keep_pandas_out, telemetry_table
from burstline.servers.destination import Destination
from burstline.servers.engine import Engine
from burstline.servers.host.child import ChildLostError
from burstline.servers.host.gpus import serving_gpus, shadowing
from burstline.servers.host.interrupt import finishing, terminable, uninterrupted
from burstline.servers.host.ready import passed_through
from burstline.servers.host.serving import UNKNOWN
from burstline.servers.host.telemetry import load_telemetry
from burstline.servers.host.watch import Watcher, WatchTask
from burstline.servers.launch import Launch
from burstline.servers.messages import EngineError, target_at
from burstline.servers.reference.steplog import load_steps
from burstline.wording import time_text
from burstline.workloads.load import Load
from burstline.workloads.plan import Plan
from burstline.workloads.prompts import Vocabulary
from burstline.workloads.request import WorkloadError

if TYPE_CHECKING:
    from burstline.measure.record.summary import Summary

EnoughOf = Callable[["RunDir", "ReadyLoad", Snapshot], bool]
"""Whether a load, whose captures are in the run's folder, may end before its plan does."""
LATE_S = 0.5
"""Counters that need longer to stand still are let settle before the load, too."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A run with its report."""

    run: RunDir
    summary: Summary
    code: int


def carry_out(
    settings: Settings,
    progress: Progress | None = None,
    serve: Serving = serving,
    enough: EnoughOf | None = None,
    *,
    answer: bool = False,
) -> Ended:
    """The whole run; with `answer`, how it went on standard output. Every planned request is accounted for.

    Raises what ended the run, before its load or during it: EngineError, WorkloadError, ChildLostError,
    KeyboardInterrupt, or a driver's own error.
    """
    keep_pandas_out()
    progress = progress or progress_for(settings.quiet)
    load, engine = check(settings, progress.phase)
    run = RunDir.create(settings.out, manifest_of(settings, load, engine))
    progress.phase(f"{'Up to ' if enough else ''}{load.title}, at {engine.title}")
    failure: BaseException | None = None
    with terminable():
        try:
            done, why = serve_and_fire(run, engine, load, settings, progress, serve, enough)
        except (EngineError, WorkloadError, ChildLostError, KeyboardInterrupt) as error:
            slip = isinstance(error, WorkloadError) or (settings.where.url and isinstance(error, EngineError))
            if slip and not run.captures.exists():
                shutil.rmtree(run.path)  # found late: nothing was measured, and no engine left its log
                raise
            account_for_the_rest(run, load, error)
            failure = error
        finally:
            progress.close()
        from burstline.bench.conclusion import conclude, of_summary  # the load does not wait for it

        with finishing(_report_first):
            decoding = "Decoding the captures and writing" if (run.path / "captures").exists() else "Writing"
            progress.phase(f"{decoding} the report")
            again = partial(measure_again, run, settings.hints, progress.phase)
            may = may_calibrate(settings.calibrate)
            summary = conclude(run, engine, again if may else None, answer=answer and failure is None)
    if failure is not None:
        nothing = summary.counts.get(Outcome.NOT_SENT, 0) == summary.counts["planned"]
        print(f"{'Nothing was measured' if nothing else 'Partial run'}: {run.path}", file=sys.stderr)
        raise failure
    if answer:
        print(f"Report: {run.report}")
    if why is not None:
        raise why
    return Ended(run, summary, exit_codes.INTERRUPTED if done.interrupted else of_summary(summary))


def serve_and_fire(
    run: RunDir,
    engine: Engine,
    load: Load,
    settings: Settings,
    progress: Progress,
    serve: Serving,
    enough: EnoughOf | None,
) -> tuple[DriveOutcome, Exception | None]:
    """Everything that needs the server or the drivers, and why it failed; `run` has what is known."""
    where = settings.where.with_room_for(load)
    with _cluster(settings.ray, run, load, progress) as fleet:
        before = "" if where.url else _last_start(run.path, engine.name)
        progress.phase(f"Waiting until the server has generated a token{before}")
        with (
            canary() if settings.canary and fleet is None else nullcontext() as truth,
            Watcher() as watcher,
            serve(engine, where, run.path, progress.phase) as site,
        ):
            if fleet is not None:
                fleet.check_reach(site.target.url)
            if settings.where.profile is not None:
                check_profiler(site)
            ready = make_ready(run, site, load, settings, progress.phase)
            note_measured(run, settings.hints, progress.phase, calibrate=settings.calibrate)
            run.save_manifest()
            hardware = run.manifest.hardware
            if hardware and hardware.absent:  # why, the manifest says, until a report is told the device
                write_json(run.path / FORECAST, {"absent": "device or model was not known before the load"})
            else:
                from burstline.machine.roofline import write_forecast  # a model of the hardware

                write_forecast(run, ready.plan, progress.phase)
            n = len(fleet.drivers) if fleet else n_drivers(load.spec.workers, load.n_connections)
            drivers = local_drivers if fleet is None else fleet.connected
            may_end = partial(enough, run, ready) if enough else None
            done, why = fire_watched(run, ready, n, drivers, watcher, truth, progress, may_end)
            whole, t0_ns, ended_ns = run.manifest.status == "complete", done.t0_ns or 0, time.monotonic_ns()
            if whole:
                try:
                    if load.spec.audit is not None:
                        audit_load(run, ready.site, ready.load, ready.plan, ready.vocabulary, progress.phase)
                    if where.profile is not None:
                        took_s = (ended_ns - t0_ns) / 1e9
                        profile_load(run, ready.site, ready.load, settings.where, took_s, progress.phase)
                except (EngineError, WorkloadError, ChildLostError, KeyboardInterrupt) as error:
                    progress.phase(f"What follows the load ended: {str(error) or 'interrupted'}")
            recount(run, ready.site, load.spec.tokenizer, where.model, progress.phase, ask=whole)
        _keep_steps(run, site.launch, t0_ns, ended_ns)
    return done, why


def _last_start(run: Path, engine: str) -> str:
    """How long a start of this engine took in the newest run beside this one; "" where no late one tells."""
    for path in sorted(run.parent.glob(f"*-{engine}-*/manifest.json"), reverse=True)[:16]:
        with suppress(WorkloadError):
            server = read_manifest(path.parent).server
            if server and server.ready_s and not server.attached:
                return f": the last start took {time_text(server.ready_s)}"
    return ""


def check(settings: Settings, say: Say = lambda _: None) -> tuple[Load, Engine]:
    """The load, of which it says what it cannot meet, and the engine; refuses what the two cannot be."""
    load = settings.load
    if settings.goals.slo:
        from burstline.measure.metrics.slo import cannot_be_met

        for note in cannot_be_met(settings.goals.slo, load):
            say(note)
    if settings.hints.device or settings.hints.model_config:
        check_hints(settings.hints)
    check_profile(engine := choose_engine(settings.where), settings.where)
    path = engine.ready_call(target_at("http://localhost")).path
    if load.has_sessions and "completions" not in path:
        raise WorkloadError(f"{engine.title} is used through {path}; sessions need --endpoint chat")
    if load.spec.audit is not None:
        check_audit(settings.where)
    if settings.where.gpus is not None:
        gpus, why = serving_gpus(UNKNOWN, settings.where.gpus)
        if not gpus:
            what = f"--gpus {settings.where.gpus}: {why}"
            raise WorkloadError(f"{what}; expected GPUs of this machine by index or UUID")
    ensure_sockets(load.n_connections)
    if settings.ray is None:  # the workers of a cluster have ports of their own
        urls = settings.where.urls
        for port in {Destination.of(target_at(url)).port for url in urls} or {0}:
            ensure_ports(load.n_connections // max(1, len(urls)), port)
    check_start(engine, settings.where, load.longest_tok or 0)
    if load.spec.warmup is None and settings.where.url is None and not engine.brings_model:
        # Fresh starts differ by what they compile for the first shapes.
        load = replace(load, spec=replace(load.spec, warmup="auto"))
    return load, engine


@dataclass(frozen=True, slots=True)
class ReadyLoad:
    """A load that waits for nothing but its drivers, and the server that it goes to, with its GPUs' names."""

    site: Site
    gpus: tuple[str, ...]
    load: Load
    plan: Plan
    vocabulary: Vocabulary


def make_ready(run: RunDir, site: Site, load: Load, settings: Settings, say: Say) -> ReadyLoad:
    """Plan the requests for this server, and note both."""
    model = settings.where.model
    plan, known = plan_for(load, site, model, say)
    expected = site.engine.before_load(site.identity, load.n_at_once, plan.longest_output_tok)
    expected += passed_through(site.target, of_sessions=load.has_sessions)
    for note in expected:
        say(note)
    serve, known_by = serving_gpus(site.processes, settings.where.gpus)
    hidden = shadowing() if serve else ""
    site = replace(site, notes=(*site.notes, *expected, *filter(None, (hidden,))))
    sealed = replace(
        run.manifest,
        identity=site.identity,
        server=server_facts(site, model),
        plan_sha256=plan.sha256,
        title=load.title_for(len(plan.requests)),  # rows that did not fit are not asked for
        load=LoadFacts(plan.dropped, load.expected_cached(plan, known), prompts=form_of(plan)),
        devices=tuple(map(gpu_facts, serve)),
        devices_from=known_by,
    )
    run.note(sealed)
    if load.spec.audit is not None:
        n = n_audited(load, len(plan.requests))
        say(f"After the load at most {n:,} of its requests are sent again, alone and twice: {2 * n:,} in all")
    say(f"Ready after {site.startup.ready_s:.1f} s; opening connections, then the load")
    return ReadyLoad(site, tuple(each.name for each in serve), load, plan, known.vocabulary)


@contextmanager
def _cluster(ray: RayOptions | None, run: RunDir, load: Load, progress: Progress) -> Iterator[Fleet | None]:
    """Workers on a cluster, asked before anything is sent to the server; None without one."""
    if ray is None:
        yield None
        return
    progress.phase(f"Placing load drivers on the Ray cluster at {ray.address}")
    with fleet_of(ray, load.spec.concurrency or load.arrivals.n, run.path / "ray.log") as fleet:
        for driver in fleet.drivers:
            ahead_s, bound_us = driver.before.ns / 1e9, driver.before.bound_ns / 1e3
            progress.phase(f"{driver.name}: clock {ahead_s:+.6f} s from ours, known to {bound_us:.0f} us")
        yield fleet


def fire_watched(
    run: RunDir,
    ready: ReadyLoad,
    n: int,
    drivers: Drivers,
    watcher: Watcher,
    truth: TruthProcess | None,
    progress: Progress,
    enough: Enough | None,
) -> tuple[DriveOutcome, Exception | None]:
    """Warm the server up, then fire by n drivers, while the watcher samples; the manifest is on disk then.

    With it comes why the load failed: the server ended under it, or the drivers' own error.
    """
    site = ready.site
    if truth and site.launch and site.launch.n_cores:
        truth.leave_to_server(site.launch.n_cores)
    others, port = ((truth.pid,), truth.port) if truth else ((), None)
    job = job_at(run, site, ready.load, ready.plan, ready.vocabulary, canary_port=port)
    sent = send_stages(ready.plan, job, site.engine, progress.phase)
    if sent and (facts := run.manifest.load):
        run.save_manifest(replace(run.manifest, load=replace(facts, stages=sent)))
    counts = site.engine.metrics_path is not None
    if counts and site.engine.counters_settle_s > LATE_S:
        time.sleep(site.engine.counters_settle_s)  # the token of readiness is counted late, too
    telemetry, signs = run.path / "telemetry.jsonl", VitalSigns(site, progress.phase)
    live, planned_tok = LiveTelemetry(telemetry), int(ready.plan.output_tok.sum())
    goes_by_need, enough, until_s = enough is not None, enough or (lambda _: False), ready.load.until_s
    last_due_s = 0.0 if ready.load.spec.concurrency else max(ready.plan.due_ns) / 1e9

    def on_tick(snapshot: Snapshot) -> None:
        live.refresh(snapshot.first_tokens)
        signs.look(snapshot)
        watched = replace(snapshot, tok=live.tok, tok_per_s=live.tok_per_s, memory_bytes=live.memory_bytes)
        known = replace(watched, until_s=until_s, last_due_s=last_due_s, planned_tok=planned_tok)
        progress.update(replace(known, spare=until_s is not None or goes_by_need))

    no_gpu = "" if ready.gpus else run.manifest.devices_from or ""
    task = WatchTask(telemetry, site.processes, ready.gpus, no_gpu, others, site.engine.name, site.target)
    with watcher.watch(task):
        if counts and not watcher.await_baseline():
            progress.phase("The server's metrics did not answer: its counters are not used")
        run.save_plan(ready.plan)
        beside = Beside()
        done = fire(job, n, watcher.add_clients, on_tick, drivers, progress.phase, enough)
        is_cluster = any(each.machine for each in done.reports)  # whose drivers watch their machines
        ours = {watcher.pid, *others, *site.processes.pids()}
        named = None if is_cluster else beside.others(ours)[1]
    death = signs.death()
    why = EngineError(death) if death else done.error
    status: Status = "interrupted" if done.interrupted else "failed" if why else "complete"
    with uninterrupted():
        error, code = str(why) if why else None, "client-failed" if why and not death else None
        if why and code and exit_codes.of_error(why) == exit_codes.OUR_BUG:
            place = getattr(why, "__notes__", [""])[-1]
            error = f"Internal error at {place}: {type(why).__name__}: {why}"
        ended = replace(run.manifest, drivers=tuple(done.reports), lost=done.lost)
        ended = replace(ended, error=error, error_code=code, status=status, others_cpu=named)
        if signs.silences and ended.server is not None:
            notes = (*ended.server.notes, *signs.silences)
            ended = replace(ended, server=replace(ended.server, notes=notes))
        if done.ended_s is not None and not ready.load.has_sessions:
            n_sent = sum(report.n_sent for report in done.reports)
            ended = replace(ended, title=ready.load.title_for(n_sent), ended_s=done.ended_s)
        run.save_manifest(ended)  # a second interrupt may end all that follows
        run.telemetry_table = telemetry_table(load_telemetry(telemetry), done.t0_ns or 0)
        run.save("telemetry.parquet", [run.telemetry_table])
        telemetry.unlink()
    return done, why


def _keep_steps(run: RunDir, launch: Launch | None, t0_ns: int, ended_ns: int) -> None:
    """The engine's own step log of the load, where it wrote one, on the run's clock."""
    if launch is None or launch.step_log is None or not launch.step_log.exists():
        return
    header, columns = load_steps(launch.step_log)
    n = sum(start_ns < ended_ns for start_ns in columns.get("start_ns", ()))  # a profiled load may follow
    columns = {name: values[:n] for name, values in columns.items()}
    for name in ("start_ns", "end_ns"):
        columns[name] = [at_ns - t0_ns for at_ns in columns.get(name, [])]
    if columns["start_ns"]:
        run.save("steps.parquet", [pa.table(columns)])
    run.note(replace(run.manifest, step_log=header))
    launch.step_log.unlink()


def account_for_the_rest(run: RunDir, load: Load, error: BaseException) -> None:
    """Keep what was planned: of what has no capture the records say "not_sent"."""
    why = str(error) or _interrupted(run)
    status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    run.save_manifest(replace(run.manifest, error=why, status=status))
    if not (run.path / "plan.parquet").exists():
        plan = load.plan()
        run.save_plan(plan)
        run.note(replace(run.manifest, plan_sha256=plan.sha256))


def _interrupted(run: RunDir) -> str:
    """When it was interrupted; during a load the first interrupt is answered by the drivers, not here."""
    if run.manifest.drivers:
        return "interrupted after the load"
    if run.captures.exists():
        return "interrupted before the drivers had stopped; unsaved replies are lost"
    return "interrupted before the load began"


def _report_first() -> None:
    """An interrupt while the report is made: it takes seconds, and the load was worth more."""
    with suppress(OSError):
        os.write(2, b"burstline: writing the report before it ends; interrupt again to end now\n")
