"""The laboratory of `burstline certify`: a load of the planned shape, fired at a server of known truth."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from burstline.bench.fire import OnPids, fire
from burstline.bench.load_options import Load, checked, job_of
from burstline.bench.vocabulary import ASSUMED
from burstline.loadgen.record.capture_store import read_captures
from burstline.loadgen.record.columns import Columns, columns_of
from burstline.loadgen.record.decode import decoded_batches, with_cancelled
from burstline.loadgen.record.drive_report import DriveReport
from burstline.loadgen.record.tables import RECORDS, record_table
from burstline.loadgen.verdict.certificate import Certificate, EventRateLimit, certificate, limit
from burstline.loadgen.wire.os_limits import ensure_fd_limit
from burstline.machine.host_facts import CpuTime
from burstline.servers.host.ready import send
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES
from burstline.servers.truth.exchanges import Served
from burstline.servers.truth.rig import TruthRig, truth_server
from burstline.servers.truth.script import Script
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Plan, make_plan
from burstline.workloads.seeds import rng
from burstline.workloads.spec import LoadSpec

N_CLIMBS: Final = 3


def certified(drill: Drill) -> Certificate:
    """Fire the drill; how far off the client was."""
    found = fired(drill)
    return certificate(
        found.columns,
        found.served,
        found.reports,
        open_loop=drill.load.spec.concurrency is None,
        law=drill.law,
        others_cpu_fraction=found.others_cpu_fraction,
    )


def climbed() -> EventRateLimit:
    """How many events a second the client follows, as far as the truth server can tell.

    The best of up to three climbs: what else runs on the machine can only take from it.
    """
    drill, rungs = ladder()
    tries: list[EventRateLimit] = []
    while len(tries) < N_CLIMBS and all(found.by == "client" for found in tries):
        found = fired(drill)
        tries.append(limit(found.columns, found.served, found.reports[0].t0_ns or 0, rungs))
    return max(tries, key=lambda found: found.events_per_s)


@dataclass(frozen=True, slots=True)
class Fired:
    """What the client recorded, what the server did, what the drivers say of themselves and who else ran."""

    columns: Columns
    served: tuple[Served, ...]
    reports: list[DriveReport]
    others_cpu_fraction: float


def fired(drill: Drill, on_pids: OnPids = lambda _: None) -> Fired:
    """Fire the drill at a truth server of its own; `on_pids` hears of the driver processes."""
    load, engine = drill.load, ENGINES["truth"]
    ensure_fd_limit(load.n_at_once)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with truth_server(drill.scripts) as truth, tempfile.TemporaryDirectory(prefix="burstline-") as name:
        _pin([truth.pid], cores[:1])
        target = Target(truth.url, "truth")
        send(target, engine.ready_call(target), 10.0)
        truth.reset()
        folder = Path(name)
        job = job_of(
            drill.plan,
            load,
            engine=engine.name,
            target=target,
            vocabulary=ASSUMED,
            captures=folder / "captures",
            counters=folder / "counters",
        )
        before = CpuTime.now(_cpu_s(truth))

        def started(pids: list[int]) -> None:
            _pin(pids, cores[1:])
            on_pids(pids)

        fired = fire(job, load.n_workers, started, lambda _: None)
        if fired.error is not None:
            raise fired.error
        if fired.interrupted:
            raise KeyboardInterrupt
        others = before.others_until(CpuTime.now(_cpu_s(truth)))
        return Fired(columns_of(_records(job.captures, drill.plan)), truth.log(), fired.reports, others)


def _cpu_s(truth: TruthRig) -> float:
    return float(truth.metrics()["process_cpu_seconds_total"])


def _records(captures: Path, plan: Plan) -> pa.Table:
    requests = list(plan.requests)
    batches = decoded_batches(read_captures(captures), requests, ENGINES["truth"].decode)
    parts = [record_table(records) for records in batches]
    seen = pa.concat_tables(parts) if parts else RECORDS.empty_table()
    return with_cancelled(seen, requests, plan.due_ns)


def _pin(pids: Sequence[int | None], cores: Sequence[int]) -> None:
    """Client and truth server apart, where there are two cores."""
    for pid in pids:
        if pid and cores:
            with suppress(OSError):
                os.sched_setaffinity(pid, cores)


EVENTS_PER_S: Final = 20_000
"""As many tokens a second as a fast GPU streams; our truth server sends so many on time."""
GAP_S: Final = 0.01
TTFT_S: Final = 0.2
N_LEAST: Final = 32
DEADLINE_S: Final = 30.0

LADDER_PER_S: Final = (10_000, 20_000, 30_000, 40_000, 60_000, 80_000, 120_000)
N_STREAMS: Final = 100
RUNG_S: Final = 0.4


@dataclass(frozen=True, slots=True)
class Drill:
    """A plan and how the truth server answers it, one script or one per arrival.

    `law` is the rate and burstiness of random gaps between arrivals, None where they follow no such law;
    `notes` say how the drill differs from the load that it stands for.
    """

    load: Load
    plan: Plan
    scripts: tuple[Script, ...]
    law: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


def drill(load: Load, budget_s: float) -> Drill:
    """As many requests at once, and as often, as the load's own; it lasts about `budget_s`.

    Replies come as from an engine that shares `EVENTS_PER_S` among all requests in flight, none faster than a
    token in 10 ms. What does not fit is cut, and arrivals too slow for it are hastened: made harder, never
    easier.
    """
    due_s = load.arrivals.due_s(rng(load.spec.seed, "arrivals"))
    n, n_in_flight, n_waves = _extent(load, due_s, budget_s)
    hastened = max(1.0, float(due_s[n - 1]) / budget_s)
    gap_s = max(GAP_S, n_in_flight / EVENTS_PER_S)
    ttft_s = min(TTFT_S, budget_s / n_waves / 2)
    n_most_tok = max(2, int((budget_s / n_waves - ttft_s) / gap_s))
    asked_tok = load.shape.output_tok
    lengths = Lengths(min(asked_tok.low, n_most_tok), min(asked_tok.high, n_most_tok))
    plan = make_plan(
        replace(load.shape, output_tok=lengths), (due_s[:n] / hastened).tolist(), ASSUMED, load.spec.seed
    )
    notes = (
        (n < len(due_s), f"the first {n:,} of {len(due_s):,} requests"),
        (hastened > 1, f"arrivals {hastened:.3g} times as fast"),
        (asked_tok.high > n_most_tok, f"{lengths} of {asked_tok} output tokens"),
    )
    script = Script(ttft_s=ttft_s, gaps_s=(gap_s,))
    law = _law(load, hastened)
    load = replace(load, spec=replace(load.spec, deadline_s=DEADLINE_S, cancel_share=None))
    return Drill(load, plan, (script,), law, tuple(note for so, note in notes if so))


def ladder() -> tuple[Drill, tuple[tuple[float, int], ...]]:
    """One burst of streams that go ever faster together; its rungs as `certificate.limit` wants them."""
    rungs = tuple((float(rate), round(rate * RUNG_S / N_STREAMS)) for rate in LADDER_PER_S)
    gaps_s = [N_STREAMS / rate for rate, n_tok in rungs for _ in range(n_tok)]
    load = checked(LoadSpec(requests=N_STREAMS, prompt_tokens="16", output_tokens=str(len(gaps_s))))
    # Their phases spread evenly: one thread cannot send a hundred events at one instant.
    scripts = tuple(
        Script(ttft_s=TTFT_S + k / N_STREAMS * gaps_s[0], gaps_s=tuple(gaps_s[1:])) for k in range(N_STREAMS)
    )
    return Drill(load, load.plan(ASSUMED), scripts), rungs


def _extent(load: Load, due_s: np.ndarray, budget_s: float) -> tuple[int, int, int]:
    """How many requests are fired, how many of them are in flight at once, and in how many waves."""
    n = len(due_s)
    if load.spec.concurrency is not None:
        n = min(n, max(2 * load.spec.concurrency, N_LEAST))
        n_in_flight = min(load.spec.concurrency, n)
        return n, n_in_flight, -(-n // n_in_flight)
    n_within = int(np.searchsorted(due_s, budget_s, side="right"))
    n = max(n_within, min(N_LEAST, n))
    # Seconds of arrivals are answered in as many more: about half of them are open at a time.
    return n, n if due_s[n - 1] == 0 else n // 2, 1


def _law(load: Load, hastened: float) -> tuple[float, float] | None:
    wanted = load.arrivals
    if wanted.pattern not in ("poisson", "gamma") or wanted.rate_per_s is None or load.spec.concurrency:
        return None
    return wanted.rate_per_s * hastened, wanted.burstiness or 1.0
