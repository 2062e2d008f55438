"""Runs of several engines that never happened: bursts, closed and open loops against a simulated server.

A step takes `speed` times 8 ms, 30 us more for each prompt token and 150 us more for each decoding request.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapreplace
from pathlib import Path

import numpy as np

from burstline.loadgen.capture.files import write_json
from burstline.measure.record import tables
from burstline.measure.record.manifest import GpuFacts, HostFacts, Manifest, ServerFacts
from burstline.measure.record.record import Record
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.tables import telemetry_table
from burstline.measure.summarize import summarize_run
from burstline.servers.identity import Identity
from burstline.workloads.arrivals import ARRIVALS, parse_arrival
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Shape, make_plan
from burstline.workloads.prompts import vocabulary_from_size
from burstline.workloads.spec import LoadSpec
from tests.reports import synthetic

MS, LAG_NS, MAX_SEQS = 1_000_000, 60_000, 64
PROMPT_TOK, OUTPUT_TOK = 128, 24


def finished_run(
    parent: Path,
    engine: str,
    n: int,
    *,
    speed: float = 1.0,
    concurrency: int | None = None,
    rate: float | None = None,
    n_failed: int = 0,
    targets: Sequence[str] = (),
    output_tok: int = OUTPUT_TOK,
    served_tok: int | None = None,
    seed: int = 0,
    gpu: str = "NVIDIA H100 80GB HBM3",
) -> Run:
    """A burst of `n` requests, or a closed or open loop, kept in a folder under `parent` as a run is.

    Replies have `served_tok` tokens where these are others than planned.
    """
    due_ns = (np.arange(n) * 1e9 / rate).astype(int).tolist() if rate else [0] * n
    rows = _records(n - n_failed, due_ns, concurrency or n, speed, served_tok or output_tok, seed)
    if served_tok:
        rows = [replace(row, planned_output_tok=output_tok) for row in rows]
    lost = synthetic.lost_records(n, PROMPT_TOK, output_tok, n_failed)
    # In a closed loop their turn comes last: each takes the slot of a request that has ended.
    slots = sorted(row.closed_ns or 0 for row in rows)[-(concurrency or n) :]
    for row in lost:
        at = slots[0] + LAG_NS if concurrency else due_ns[row.index]
        rows.append(_moved(row, at))
        if concurrency:
            heapreplace(slots, rows[-1].closed_ns)
    arrival = parse_arrival("constant" if rate else "burst")
    asked = LoadSpec(
        n, "128", str(output_tok), concurrency=concurrency, rate=rate, arrival=arrival, salt="5eed"
    )
    load = (
        f"concurrency {concurrency}"
        if concurrency
        else f"{ARRIVALS['constant'].title} at {rate:g} req/s"
        if rate
        else "all at once"
    )
    manifest = Manifest(
        engine=engine,
        workload="load",
        title=f"{n} requests of 128 → {output_tok} tokens, {load}",
        asked=asked,
        targets=tuple(targets),
        devices=(GpuFacts(gpu, 85_520_809_984),) if gpu else (),
        host=HostFacts(cpu="A CPU", cores=8),
        identity=Identity(
            engine,
            version="1.2",
            model="llama-2-7b",
            dtype="bfloat16",
            kv_cache_dtype="bfloat16",
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=2048,
            prefix_cache=False,
            tensor_parallel_size=1,
        ),
        server=ServerFacts(argv=(engine, "--port", "8000"), model="llama-2-7b"),
    )
    run = RunDir.create(parent, manifest)
    shape = Shape(Lengths(PROMPT_TOK, PROMPT_TOK), Lengths(output_tok, output_tok))
    run.save_plan(make_plan(shape, [at / 1e9 for at in due_ns], vocabulary_from_size(32_000), seed=0))
    run.save("records.parquet", [tables.record_table(rows)])
    run.save(
        "telemetry.parquet",
        [telemetry_table(synthetic.telemetry(rows, max_seqs=MAX_SEQS, n_prefill=MAX_SEQS))],
    )
    run.save_manifest(replace(run.manifest, status="complete"))
    write_json(run.path / "summary.json", summarize_run(open_run(run.path)).to_json())
    return open_run(run.path)


def _moved(row: Record, due_ns: int) -> Record:
    by_ns = due_ns - row.due_ns
    return replace(
        row,
        due_ns=due_ns,
        dispatched_ns=row.dispatched_ns + by_ns,
        sent_ns=row.sent_ns + by_ns,
        closed_ns=row.closed_ns + by_ns,
    )


def _records(
    n: int, due_ns: list[int], at_once: int, speed: float, output_tok: int, seed: int
) -> list[Record]:
    """At most `at_once` requests are in the batch; in a closed loop others are not yet due."""
    rng = np.random.default_rng(seed)
    sent, tokens = [0] * n, [[] for _ in range(n)]
    running: list[int] = []
    now, upcoming = 0.0, 0
    while upcoming < n or running:
        if not running:
            now = max(now, float(due_ns[upcoming]))
        room = min(at_once, MAX_SEQS) - len(running)
        entering = [k for k in range(upcoming, min(upcoming + room, n)) if due_ns[k] <= now]
        upcoming += len(entering)
        for k in entering:
            # A slot is free once its last reply has ended, a little after its last token.
            sent[k] = (int(now + MS) if at_once < n else due_ns[k]) + LAG_NS
        running += entering
        step_ms = speed * (8 + 0.03 * PROMPT_TOK * len(entering) + 0.15 * len(running))
        now += step_ms * MS * float(rng.lognormal(0, 0.05))
        for k in running:
            tokens[k].append(max(int(now + rng.uniform(0, 0.2) * MS), sent[k] + MS))
        running = [k for k in running if len(tokens[k]) < output_tok]
    return [
        replace(
            synthetic._served_record(k, sent[k], tokens[k], PROMPT_TOK, rng),
            due_ns=sent[k] - LAG_NS,
        )
        for k in range(n)
    ]
