"""The real chain for a test: known-truth server, driver, captures, records, columns, summary."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import pyarrow as pa

from burstline.loadgen.capture.capture import read_captures
from burstline.loadgen.capture.drive_report import DriveReport
from burstline.loadgen.driver import drive
from burstline.loadgen.driver.job import Counters, Go, Job, Ready
from burstline.measure.record.columns import Columns, columns_of
from burstline.measure.record.decode import decoded_batches, with_cancelled
from burstline.measure.record.record import Record
from burstline.measure.record.tables import record_table
from burstline.servers.engines.truth import Truth
from burstline.servers.host.child import Failed
from burstline.servers.messages import Call, Target
from burstline.servers.openai import encode_completion
from burstline.servers.registry import ENGINES
from burstline.workloads.plan import Plan
from burstline.workloads.plan_table import PlannedRequests, plan_tables
from burstline.workloads.prompts import DrawnRequests, vocabulary_from_size
from burstline.workloads.request import Request
from tests.measure.making import conditions, records_of, summarized
from tests.truth.rig import TruthRig, truth_server
from tests.truth.script import Script
from tests.truth.serve import Served

VOCABULARY = vocabulary_from_size(32_000)


class Plain(Truth):
    """A server that gives no token ids away."""

    def encode(self, request: Request, target: Target) -> Call:
        call = encode_completion(request, target)
        return Call(
            call.method, call.path, call.body, (*call.headers, ("x-burstline-index", str(request.index)))
        )


class Chat(Truth):
    """The same by chat, as most servers are: usage at the end, no token ids."""

    def encode(self, request: Request, target: Target) -> Call:
        call = super().encode(request, target)
        body = {
            "model": target.model,
            "messages": [{"role": "user", "content": "x " * request.n_prompt_tok}],
            "max_tokens": request.n_output_tok,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Call("POST", "/v1/chat/completions", orjson.dumps(body), call.headers)


CHAIN_ENGINES = {"truth": Truth(), "plain": Plain(), "chat": Chat()}


@dataclass(frozen=True)
class Played:
    """What client and server say of one load; both on the run's clock."""

    table: pa.Table
    served: tuple[Served, ...]
    report: DriveReport

    @cached_property
    def columns(self) -> Columns:
        return columns_of(self.table)

    @cached_property
    def records(self) -> list[Record]:
        return list(records_of(self.table))

    def truth(self, index: int) -> Served:
        return next(row for row in self.served if row.index == index)

    def sent_ns(self, index: int) -> list[int]:
        """When the server sent each token event of a request, ns from the run's start."""
        return [at_ns - (self.report.t0_ns or 0) for at_ns in self.truth(index).token_ns]

    def summary(self, **context: Any) -> dict[str, Any]:
        return summarized(self.table, conditions(reports=[self.report], **context))


def requests(n: int, n_output_tok: int = 8, n_prompt_tok: int = 24, seed: int = 0) -> tuple[Request, ...]:
    lengths = (np.full(n, n_prompt_tok), np.full(n, n_output_tok))
    return tuple(DrawnRequests(np.arange(n), *lengths, VOCABULARY, seed))


def play(
    script: Script | Sequence[Script],
    n: int = 1,
    *,
    n_output_tok: int = 8,
    process: bool = False,
    **options: Any,
) -> Played:
    """Fire n requests at a server with this script; in a `process` of its own where timing matters.

    Of several scripts each request gets its own: they are due a millisecond apart, in that order.
    """
    if not isinstance(script, Script) and options.get("concurrency") is None:
        options.setdefault("due_s", [0.001 * i for i in range(n)])
    with truth_server(script, thread=not process) as truth:
        return fired(truth, requests(n, n_output_tok), **options)


def fired(
    truth: TruthRig,
    asked: Sequence[Request],
    due_s: Sequence[float] | None = None,
    *,
    engine: str = "truth",
    meanwhile: Callable[[Connection], None] = lambda conn: None,
    **options: Any,
) -> Played:
    """Fire requests (all at once unless `due_s`) from a driver in a thread of this process."""
    due_ns = array("q", [round(at_s * 1e9) for at_s in due_s or [0.0] * len(asked)])
    with tempfile.TemporaryDirectory() as name, patch.dict(ENGINES, CHAIN_ENGINES):
        folder = Path(name)
        Counters.create(folder / "counters", 1).close()
        target = Target(truth.url, "truth")
        files = (folder / "captures", folder / "counters")
        options = {"vocabulary": VOCABULARY, "deadline_s": 60.0, **options}
        report = driven(Job(tuple(asked), due_ns, engine, target, *files, **options), meanwhile)
        by_index = [asked[i] for i in range(len(asked))]
        batches = decoded_batches(read_captures(files[0]), by_index, CHAIN_ENGINES[engine].decode)
        seen = pa.concat_tables([record_table(records) for records in batches])
    planned = pa.concat_tables(plan_tables(Plan(tuple(asked), due_ns, 0, "")))
    return Played(with_cancelled(seen, PlannedRequests(planned)), truth.log(), report)


def driven(job: Job, meanwhile: Callable[[Connection], None]) -> DriveReport:
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=drive.run, args=(job, theirs))
    thread.start()
    try:
        message = ours.recv()
        if isinstance(message, Ready):
            ours.send(Go(time.monotonic_ns() + 20_000_000))
            meanwhile(ours)
            message = ours.recv()
        if isinstance(message, Failed):
            raise message.error
        report: DriveReport = message.report
        return report
    finally:
        thread.join()
        ours.close()
        theirs.close()
