"""A run that never happened: a burst against a continuous-batching server simulated step by step.

A step takes 9 ms, 45 us more for each prompt token and 60 us more for each decoding request; at most
`max_seqs` requests are in the batch and at most 4096 prompt tokens enter it per step.
"""

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np

from burstline.loadgen.capture.files import write_json
from burstline.measure.record import tables
from burstline.measure.record.manifest import GpuFacts, Manifest, ServerFacts
from burstline.measure.record.record import Outcome, Record
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.tables import telemetry_table
from burstline.measure.summarize import summarize_run
from burstline.servers.host.telemetry import Row
from burstline.servers.identity import Identity

MS = 1_000_000
ON_VLLM = Identity(
    "vllm", model="llama-2-7b", dtype="bfloat16", kv_cache_dtype="bfloat16", kv_tok=100_000, kv_block_tok=16,
    max_num_seqs=256, max_num_batched_tokens=4096, tensor_parallel_size=1,
)  # fmt: skip
"""A server that says its limits."""


def records(
    n: int = 1000,
    prompt_tok: int = 512,
    output_tok: int = 64,
    n_failed: int = 0,
    max_seqs: int = 256,
    seed: int = 0,
) -> list[Record]:
    """What a burst of `n` requests left behind; the last `n_failed` ended in a timeout, a 503 or a reset."""
    rng = np.random.default_rng(seed)
    arrivals = _arrivals(n, rng)
    tokens = _served(n - n_failed, prompt_tok, output_tok, max_seqs, rng)
    done = [_served_record(k, int(arrivals[k]), tokens[k], prompt_tok, rng) for k in range(n - n_failed)]
    return done + _lost(arrivals, prompt_tok, output_tok, n_failed)


def lost_records(n: int, prompt_tok: int, output_tok: int, n_failed: int) -> list[Record]:
    """The last `n_failed` of `records`, without what was served."""
    return _lost(_arrivals(n, np.random.default_rng(0)), prompt_tok, output_tok, n_failed)


def _arrivals(n: int, rng: np.random.Generator) -> np.ndarray:
    return np.cumsum(rng.uniform(8_000, 14_000, n)).astype(np.int64)


def _lost(arrivals: np.ndarray, prompt_tok: int, output_tok: int, n_failed: int) -> list[Record]:
    n = len(arrivals)
    return [_lost_record(k, int(arrivals[k]), prompt_tok, output_tok) for k in range(n - n_failed, n)]


def _served(
    n: int, prompt_tok: int, output_tok: int, max_seqs: int, rng: np.random.Generator
) -> list[list[int]]:
    """When each request's tokens left the server, ns."""
    tokens: list[list[int]] = [[] for _ in range(n)]
    waiting, running, now = deque(range(n)), deque[int](), 20.0 * MS
    while waiting or running:
        prefill = []
        while waiting and len(prefill) < 4096 // prompt_tok and len(running) + len(prefill) < max_seqs:
            prefill.append(waiting.popleft())
        step_ms = 9 + 0.045 * prompt_tok * len(prefill) + 0.06 * len(running)
        now += step_ms * MS * float(rng.lognormal(0, 0.04))
        running.extend(prefill)
        for k in list(running):
            tokens[k].append(int(now + rng.uniform(0, 0.3) * MS))
        running = deque(k for k in running if len(tokens[k]) < output_tok)
    return tokens


def _served_record(
    index: int, sent_ns: int, tokens: list[int], prompt_tok: int, rng: np.random.Generator
) -> Record:
    return Record(
        index=index,
        outcome=Outcome.OK,
        due_ns=0,
        dispatched_ns=sent_ns - 5_000,
        connected_ns=-2 * MS,
        sent_ns=sent_ns,
        headers_ns=tokens[0] - 50_000,
        closed_ns=tokens[-1] + 100_000,
        answer_ns=tokens[0],
        token_ns=tokens,
        token_n=[1] * len(tokens),
        read_lag_ns=rng.lognormal(10, 0.5, len(tokens)).astype(int).tolist(),
        read_error_ns=[0] * len(tokens),
        planned_prompt_tok=prompt_tok,
        planned_output_tok=len(tokens),
        prompt_tok=prompt_tok,
        prompt_source="usage",
        output_tok=len(tokens),
        output_source="ids",
        output_gap_tok=0,
        split="counted",
        cached_tok=0,
        finish_reason="length",
        http_status=200,
        n_events=len(tokens) + 2,
        n_reads=len(tokens) + 1,
        error=None,
    )


FAILURES = (
    (Outcome.TIMEOUT, None, "no reply within 60 s"),
    ("http_503", 503, '{"error":"queue is full & <busy>"}'),
    (Outcome.RESET, None, "connection reset by peer"),
)


def _lost_record(index: int, sent_ns: int, prompt_tok: int, output_tok: int) -> Record:
    outcome, status, error = FAILURES[index % len(FAILURES)]
    nothing: dict[str, None] = dict.fromkeys(
        ["answer_ns", "prompt_tok", "prompt_source", "output_tok", "output_source", "output_gap_tok", "split",
         "cached_tok", "finish_reason"]
    )  # fmt: skip
    return Record(
        index=index,
        outcome=outcome,
        due_ns=0,
        dispatched_ns=sent_ns - 5_000,
        connected_ns=-2 * MS,
        sent_ns=sent_ns,
        headers_ns=None,
        closed_ns=sent_ns + (index % 7 + 2) * 1000 * MS,
        token_ns=[],
        token_n=[],
        read_lag_ns=[],
        read_error_ns=[],
        planned_prompt_tok=prompt_tok,
        planned_output_tok=output_tok,
        http_status=status,
        n_events=0,
        n_reads=0,
        error=error,
        **nothing,
    )


def telemetry(rows: list[Record], max_seqs: int = 256, every_ms: int = 100, n_prefill: int = 0) -> list[Row]:
    """What the watcher would have seen: the engine's gauges, memory of server, device and client.

    `n_prefill` requests can be in prefill at a time: they run.
    """
    first = np.array([r.token_ns[0] for r in rows if r.token_ns])
    last = np.array([r.token_ns[-1] for r in rows if r.token_ns])
    due = np.array([r.due_ns for r in rows if r.token_ns])
    end = max(r.closed_ns or 0 for r in rows)
    readings = []
    for at in range(-2000 * MS, end + 500 * MS, every_ms * MS):
        running = int((first <= at).sum() - (last <= at).sum())
        waiting = int(((due <= at) & (first > at)).sum())
        entering = min(n_prefill, waiting, max(max_seqs - running, 0))
        running, waiting = running + entering, waiting - entering
        grown = min(max(at, 0) / (4000 * MS), 1.0)
        readings += [
            (at, "engine", "running", float(running)),
            (at, "engine", "waiting", float(waiting)),
            (at, "engine", "kv_used_fraction", running / max_seqs * 0.83),
            (at, "server", "rss_bytes", 6.1e9 + 0.9e9 * grown),
            (at, "client", "rss_bytes", 9.5e7 + 2.1e7 * grown),
            (at, "gpu0", "memory_used_bytes", 7.31e10),
        ]
    return [Row(*reading) for reading in readings]


def finished_run(parent: Path, rows: list[Record], watched: bool = True) -> Run:
    """The rows kept in a folder under `parent` as a run keeps them, with the summary that Burstline makes."""
    n_prompt, n_output = rows[0].planned_prompt_tok, rows[0].planned_output_tok
    manifest = Manifest(
        engine="vllm",
        workload="burst",
        max_failures=0.1,
        title=f"{len(rows):,} request{'s' * (len(rows) > 1)} of {n_prompt} → {n_output} tokens, all at once",
        repeat=f"burstline run --engine vllm --model llama-2-7b --requests {len(rows)} "
        f"--prompt-tokens {n_prompt} --output-tokens {n_output} --salt 00112233",
        devices=(GpuFacts("NVIDIA H100 80GB HBM3", 85_520_809_984, "570.86"),),
        identity=Identity("vllm", version="0.11.2", model="llama-2-7b", dtype="bfloat16"),
        server=ServerFacts(argv=("vllm", "serve", "llama-2-7b", "--port", "8000")),
    )
    run = RunDir.create(parent, manifest)
    run.save("records.parquet", [tables.record_table(rows)])
    if watched:
        run.save("telemetry.parquet", [telemetry_table(telemetry(rows))])
    run.save_manifest(replace(run.manifest, status="complete"))
    write_json(run.path / "summary.json", summarize_run(open_run(run.path)).to_json())
    return open_run(run.path)
