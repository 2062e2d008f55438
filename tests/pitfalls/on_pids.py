"""A load in driver processes of its own, whose pids a test hears of."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from burstline.bench.fire import OnPids, fire
from burstline.bench.requests_apart import job_of
from burstline.loadgen.capture.capture import read_captures
from burstline.loadgen.capture.drive_report import DriveReport
from burstline.loadgen.driver.job import n_drivers
from burstline.measure.record.columns import Columns, columns_of
from burstline.measure.record.decode import decoded_batches, with_cancelled
from burstline.measure.record.tables import RECORDS, record_table
from burstline.servers.host.ready import send
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES
from burstline.workloads.load import Load
from burstline.workloads.plan_table import PlannedRequests, plan_tables
from burstline.workloads.prompts import ASSUMED
from tests.truth.rig import truth_server
from tests.truth.script import Script
from tests.truth.serve import Served


@dataclass(frozen=True, slots=True)
class Fired:
    """What the client recorded, what the server did, and what the drivers say of themselves."""

    columns: Columns
    served: tuple[Served, ...]
    reports: list[DriveReport]


def fired(load: Load, script: Script, on_pids: OnPids = lambda _: None) -> Fired:
    """Fire a load at a truth server of its own; `on_pids` hears of the driver processes."""
    engine = ENGINES["truth"]
    plan = load.plan()
    cores = sorted(os.sched_getaffinity(0))
    with truth_server(script) as truth, tempfile.TemporaryDirectory(prefix="burstline-") as name:
        os.sched_setaffinity(truth.pid or 0, cores[:1])
        target = Target(truth.url, "truth")
        send(target, engine.ready_call(target), 10.0)
        truth.reset()
        folder = Path(name)
        job = job_of(
            plan,
            load,
            engine=engine.name,
            target=target,
            vocabulary=ASSUMED,
            captures=folder / "captures",
            counters=folder / "counters",
        )

        def started(pids: list[int]) -> None:
            for pid in pids:
                os.sched_setaffinity(pid, cores[1:] or cores)
            on_pids(pids)

        done = fire(job, n_drivers(load.spec.workers, load.n_connections), started, lambda _: None)
        assert (done.error, done.interrupted, list(done.lost)) == (None, False, [])
        requests = PlannedRequests(pa.concat_tables(plan_tables(plan)))
        batches = decoded_batches(read_captures(job.captures), requests, engine.decode)
        seen = pa.concat_tables([RECORDS.empty_table(), *map(record_table, batches)])
        return Fired(columns_of(with_cancelled(seen, requests)), truth.log(), done.reports)
