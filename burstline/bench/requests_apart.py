"""Requests that are sent apart from the load: before it warm-up bursts and prompts that fill a prefix cache.

After it an audit sends some of the load's requests again, alone, and twice; a profile sends a short second
load with the engine's own profiler on.
"""

import shutil
from array import array
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from burstline.bench.fire import STARTING_LIMIT_S, fire
from burstline.bench.plan_for_server import plan_for
from burstline.bench.server_session import Say, Site
from burstline.console.server_options import ServerOptions
from burstline.loadgen.capture.capture import read_captures
from burstline.loadgen.capture.files import TRACES, write_json
from burstline.loadgen.driver.job import Job
from burstline.measure.record.decode import Reading, Readings
from burstline.measure.record.manifest import LoadFacts, StageFacts
from burstline.measure.record.record import Outcome, Record, record_of
from burstline.measure.record.run_writer import AUDIT, PROFILED_LOAD, READINGS, RunDir
from burstline.measure.record.typed_json import to_json
from burstline.roofline.profile.trace import MOST_STEPS, SentRequest, trace_files
from burstline.servers.engine import Engine
from burstline.servers.host.child import Child, ChildLostError
from burstline.servers.host.ready import getter, send
from burstline.servers.messages import Call, EngineError
from burstline.servers.openai import post
from burstline.wording import counted
from burstline.workloads.load import Load, load_of
from burstline.workloads.plan import PRIMING, Plan, Stage
from burstline.workloads.prompts import Vocabulary, rng
from burstline.workloads.request import WorkloadError


def send_stages(plan: Plan, job: Job, engine: Engine, say: Say) -> tuple[StageFacts, ...]:
    """Send each stage and wait until it has ended; KeyboardInterrupt where a person interrupts.

    Of the bursts of an automatic warm-up those after two that agree are left out.
    """
    facts: list[StageFacts] = []
    for stage in plan.stages:
        if stage.name.startswith("warm-up ") and LoadFacts(stages=tuple(facts)).warm_up_agrees:
            continue
        say(f"Sending {stage.name}: {counted(len(stage.requests), 'request')}, not measured")
        # Prefixes are wanted in the cache of every replica.
        urls = (job.target.url, *(job.target.replicas if stage.name == PRIMING else ()))
        targets = [replace(job.target, url=url) for url in urls]
        came = [record for each in targets for record in sent(stage, replace(job, target=each), engine)]
        ok = [record for record in came if record.outcome == Outcome.OK]
        took = [(record.token_ns[-1] - record.due_ns) / 1e9 for record in ok if record.token_ns]
        facts.append(StageFacts(stage.name, len(came), len(ok), float(np.median(took)) if took else None))
        if not facts[-1].ok:
            say(f"  none of them succeeded: {came[0].outcome if came else 'nothing was captured'}")
    if (known := LoadFacts(stages=tuple(facts))).warm_up:
        say(known.warm_up_sentence)
    return tuple(facts)


def sent(stage: Stage, job: Job, engine: Engine) -> list[Record]:
    folder = job.captures.with_name("stage")
    asked = {request.index: request for request in stage.requests}
    try:
        send_apart(replace(job, requests=stage.requests, due_ns=stage.due_ns, captures=folder))
        captures = [capture for capture in read_captures(folder) if capture.index in asked]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    records = [record_of(asked[capture.index], capture, engine.decode) for capture in captures]
    return sorted(records, key=lambda record: record.index)


def job_of(plan: Plan, load: Load, **rest: Any) -> Job:
    """What the drivers have to do with the plan; `rest` says where and into which files."""
    return Job(
        requests=plan.requests,
        due_ns=plan.due_ns,
        salt=load.spec.salt,
        deadline_s=load.spec.deadline_s,
        concurrency=load.spec.concurrency,
        until_s=load.until_s,
        hang_ups=load.hang_ups(plan),
        **rest,
    )


def job_at(
    run: RunDir, site: Site, load: Load, plan: Plan, vocabulary: Vocabulary, canary_port: int | None = None
) -> Job:
    return job_of(
        plan, load, engine=site.engine.name, target=site.target, vocabulary=vocabulary,
        captures=run.captures, counters=run.path / "counters", canary_port=canary_port,
    )  # fmt: skip


def send_apart(job: Job) -> None:
    """Send requests that are no part of the load; KeyboardInterrupt where a person interrupts."""
    # The canary's server takes one connection, which is the load's.
    apart = replace(job, until_s=None, canary_port=None)
    if fire(apart, 1, lambda _: None, lambda _: None).interrupted:
        raise KeyboardInterrupt


def check_audit(where: ServerOptions) -> None:
    """WorkloadError, before anything starts, where this server's replies could not be compared."""
    if len(where.urls) > 1:
        raise WorkloadError("--audit compares the replies of one server: give one --url")
    for name in ("temperature", "do_sample", "top_p", "top_k"):
        if where.extra_body and f'"{name}"' in where.extra_body.reveal():
            raise WorkloadError(
                f"--audit compares greedy replies: {name} in --extra-body sets the sampling; drop one of them"
            )


def n_audited(load: Load, n: int) -> int:
    return min(n, max(1, round((load.spec.audit or 0.0) * n)))


def audit_load(run: RunDir, site: Site, load: Load, plan: Plan, vocabulary: Vocabulary, say: Say) -> None:
    """Send some of the requests that were answered, one at a time; their captures are kept in the run."""
    answered = [capture.index for capture in read_captures(run.captures) if capture.failure is None]
    if load.has_sessions:  # a later turn needs the replies before it
        answered = [k for k in answered if (turn := plan.requests[k].turn) is None or not turn.after]
    n = n_audited(load, len(answered))
    chosen = sorted(rng(load.spec.seed, "audit").permutation(answered)[:n].tolist())
    say(f"Auditing {counted(n, 'reply')}: {2 * n:,} requests, one at a time")
    requests, at_once = tuple(plan.requests[k] for k in chosen), array("q", [0] * n)
    job = job_at(run, site, load, plan, vocabulary)
    alone = replace(job, requests=requests, due_ns=at_once, concurrency=1, hang_ups={})
    first, second = (replace(alone, captures=run.path / folder) for folder in AUDIT)
    send_apart(first)
    client = site.engine.own_client if site.engine.speaks == "native" else "httpx"
    if client is None:
        send_apart(second)
    else:
        _read_again(run, second, client, say)


def _read_again(run: RunDir, job: Job, client: str, say: Say) -> None:
    """Send the requests once more, by this client; what it makes of the replies is kept with the run."""
    replies: list[Reading] = []
    with Child("burstline.bench.second_reader", f"the second reader ({client})") as child:
        child.send((client, job))
        try:
            while (reading := child.receive(STARTING_LIMIT_S + (job.deadline_s or 0.0))) is not None:
                replies.append(reading)
        except ChildLostError as error:
            say(f"{error}; the audit has the {len(replies):,} replies before that")
    write_json(run.path / READINGS, to_json(Readings(f"{client} {version(client)}", tuple(replies))))


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
    spec, salt = load.spec, f"{int(load.spec.salt, 16) ^ (1 << 30):x}"  # no prompt is in the prefix cache
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
