"""Requests before the load, which are not measured: warm-up bursts, prompts that fill a prefix cache."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import numpy as np

from burstline.bench.fire import fire
from burstline.bench.server_session import Say, Site
from burstline.loadgen.capture.capture import read_captures
from burstline.loadgen.driver.job import Job
from burstline.measure.record.manifest import LoadFacts, StageFacts
from burstline.measure.record.record import Outcome, Record, record_of
from burstline.measure.record.run_writer import RunDir
from burstline.reports.number_format import counted
from burstline.servers.engine import Engine
from burstline.workloads.load import Load
from burstline.workloads.plan import PRIMING, Plan, Stage
from burstline.workloads.prompts import Vocabulary


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
