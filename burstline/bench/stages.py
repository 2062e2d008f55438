"""What is sent before the load and does not count: warm-up bursts, prompts that fill a prefix cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import pyarrow as pa

from burstline.bench.fire import fire
from burstline.loadgen.driver.job import Job
from burstline.loadgen.record.capture_store import read_captures
from burstline.loadgen.record.manifest import LoadFacts, StageFacts
from burstline.loadgen.record.record import Outcome, Record, record_of
from burstline.loadgen.record.tables import record_table
from burstline.servers.engine import Engine
from burstline.workloads.plan import PRIMING, Plan, Stage

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Sent:
    """Stages that were sent and drained: facts, and each record with when its own clock started."""

    facts: tuple[StageFacts, ...] = ()
    records: tuple[tuple[int, Record], ...] = ()

    def table(self, t0_ns: int) -> pa.Table:
        """The records on the run's clock, whose zero is `t0_ns`: all of their times are negative."""
        return record_table([_shifted(record, own_ns - t0_ns) for own_ns, record in self.records])


def send_stages(plan: Plan, job: Job, engine: Engine, say: Say) -> Sent:
    """Send each stage and wait until it has ended; KeyboardInterrupt where a person interrupts.

    Of the bursts of an automatic warm-up those after two that agree are left out.
    """
    facts: list[StageFacts] = []
    records: list[tuple[int, Record]] = []
    for stage in plan.stages:
        if stage.name.startswith("warm-up ") and _is_warm(facts):
            continue
        say(f"Sending {stage.name}: {len(stage.requests):,} requests that do not count")
        # Prefixes are wanted in the cache of every replica.
        urls = (job.target.url, *(job.target.replicas if stage.name == PRIMING else ()))
        came: list[Record] = []
        for url in urls:
            t0_ns, of_url = _sent(stage, replace(job, target=replace(job.target, url=url)), engine)
            records += [(t0_ns, record) for record in of_url]
            came += of_url
        facts.append(_facts(stage.name, came))
        if not facts[-1].ok:
            say(f"  none of them succeeded: {came[0].outcome if came else 'nothing was captured'}")
    if (warm_up := LoadFacts(stages=tuple(facts)).warm_up) is not None:
        say(warm_up.sentence)
    return Sent(tuple(facts), tuple(records))


def _sent(stage: Stage, job: Job, engine: Engine) -> tuple[int, list[Record]]:
    """When the stage began (ns, monotonic), and the records of its requests."""
    folder = job.captures.with_name("stage")
    # The canary's server takes one connection, which is the load's.
    own = replace(job, requests=stage.requests, due_ns=stage.due_ns, captures=folder, canary_port=None)
    own = replace(own, until_s=None)
    done = fire(own, 1, lambda _: None, lambda _: None)
    asked = {request.index: request for request in stage.requests}
    records = [record_of(asked[c.index], c, engine.decode) for c in read_captures(folder) if c.index in asked]
    shutil.rmtree(folder)
    if done.interrupted:
        raise KeyboardInterrupt
    return done.t0_ns or 0, sorted(records, key=lambda record: record.index)


def _facts(name: str, records: Sequence[Record]) -> StageFacts:
    took = [
        (record.token_ns[-1] - record.due_ns) / 1e9
        for record in records
        if record.outcome == Outcome.OK and record.token_ns
    ]
    n_ok = sum(record.outcome == Outcome.OK for record in records)
    return StageFacts(name, len(records), n_ok, median(took) if took else None)


def _is_warm(facts: Sequence[StageFacts]) -> bool:
    warm_up = LoadFacts(stages=tuple(facts)).warm_up
    return warm_up is not None and warm_up.agree


def _shifted(record: Record, by_ns: int) -> Record:
    names = ("dispatched_ns", "connected_ns", "sent_ns", "headers_ns", "closed_ns", "answer_ns")
    moved: dict[str, Any] = {
        name: None if getattr(record, name) is None else getattr(record, name) + by_ns for name in names
    }
    token_ns = [at_ns + by_ns for at_ns in record.token_ns]
    return replace(record, due_ns=record.due_ns + by_ns, token_ns=token_ns, **moved)
