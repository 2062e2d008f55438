"""A short second load with the engine's own profiler on, after the load that counts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

from burstline.bench.plan_for_server import plan_for
from burstline.bench.server_session import Say, Site
from burstline.bench.stages import job_at, sent
from burstline.console.server_options import ServerOptions
from burstline.loadgen.capture.files import TRACES, write_json
from burstline.measure.record.run_writer import PROFILED_LOAD, RunDir
from burstline.measure.record.typed_json import to_json
from burstline.roofline.profile.composition import SentRequest
from burstline.roofline.profile.trace import MOST_STEPS, trace_files
from burstline.servers.engine import Engine
from burstline.servers.host.ready import getter, send
from burstline.servers.messages import Call, EngineError
from burstline.servers.protocol.openai import post
from burstline.workloads.load import Load, load_of
from burstline.workloads.plan import Stage
from burstline.workloads.request import WorkloadError

N_STEPS: Final = 30
"""Steps of each phase that the second load is to have."""
TIMEOUT_S: Final = 600.0
"""How long the profiler may take to start, and to write what it saw."""


def check_profile(engine: Engine, where: ServerOptions) -> None:
    """WorkloadError, before anything starts, where no profile can come of it."""
    if where.profile is None:
        return
    if engine.profiler is None:
        raise WorkloadError(
            f"--profile: {engine.title} has no profiler that a client can start; if it can write a trace of "
            "PyTorch's profiler, pass that to `burstline report RUN --profile TRACE`"
        )
    if (where.url is None) != (where.profile == Path()):
        raise WorkloadError(
            "--profile takes a folder with --url alone, the one that the server writes its traces to "
            "(--profile DIR); traces of a started engine go to the run's folder"
        )


def check_profiler(site: Site) -> None:
    """EngineError where the server that was attached to was started without its profiler."""
    schema = getter(site.target)("/openapi.json")
    if site.server is None and schema.status == 200 and b'"/start_profile"' not in schema.body:
        assert site.engine.profiler is not None
        raise EngineError(
            f"--profile: the server at {site.target.url} has no profiler; start {site.engine.title} "
            f"{site.engine.profiler.flag}"
        )


def profile_load(run: RunDir, site: Site, load: Load, where: ServerOptions, took_s: float, say: Say) -> None:
    """Send the second load, where the first took `took_s`; the traces are in the run's folder then."""
    profiler = site.engine.profiler
    assert profiler is not None
    many = load.arrivals.n
    prompt_tok = max(1.0, (load.shape.prompt_tok.low + load.shape.prompt_tok.high) / 2)
    budget_tok = site.identity.max_num_batched_tokens or 2048
    n = min(many, max(N_STEPS, round(N_STEPS * budget_tok / prompt_tok)))
    say(f"Profiling a second load of {n:,} requests, about {took_s * n / many:.0f} s; no figure counts it")
    spec = load.spec
    salt = f"{int(spec.salt, 16) ^ (1 << 30):x}"  # no prompt is in the prefix cache
    own = replace(spec, salt=salt, duration_s=None, warmup=None, workers=1, cancel_share=None)
    second = load_of(replace(own, sessions=n) if spec.sessions else replace(own, requests=n))
    plan, server = plan_for(second, site, where.model, lambda _: None)
    folder = (run.path / TRACES).resolve()
    writes_to = folder if where.url is None or where.profile is None else where.profile.resolve()
    before = set(trace_files(writes_to))
    _call(site, post(site.target, "/start_profile", profiler.body(writes_to, MOST_STEPS)))
    try:
        job = job_at(run, site, second, plan, server.vocabulary)
        records = sent(Stage("profile", plan.requests, plan.due_ns), job, site.engine)
    finally:
        _call(site, post(site.target, "/stop_profile", {}), may_have_ended=True)
    came = sorted((one for one in records if one.token_ns), key=lambda one: one.token_ns[0])
    counted = [SentRequest(one.prompt_tok or one.planned_prompt_tok, one.output_tok or 0) for one in came]
    write_json(run.path / PROFILED_LOAD, to_json(counted))
    new = set(trace_files(writes_to)) - before
    if not new:
        raise EngineError(f"{site.engine.title} wrote no trace to {writes_to}")
    if writes_to != folder:
        folder.mkdir()
        for path in new:
            shutil.move(path, folder)
    say(f"  {len(records):,} requests profiled; traces in {folder}")


def _call(site: Site, call: Call, *, may_have_ended: bool = False) -> None:
    """A profiler that has seen its steps has ended by itself: to stop it then is an error of some engines."""
    reply = send(site.target, call, TIMEOUT_S)
    if reply.status >= 400 and not may_have_ended:
        raise EngineError(f"{call.path} answered {reply.status}: {reply.body[:200].decode(errors='replace')}")
