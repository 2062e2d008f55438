"""The compute loop: one thread that schedules, runs the model, samples tokens and hands them out."""

import gzip
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import orjson
from prometheus_client import Histogram

from burstline.compute_threads import yield_to_others
from burstline.servers.reference.model import GEMMS, Chunk, KVCache, Transformer
from burstline.servers.reference.scheduler import Scheduler, Sequence, StepShare
from burstline.servers.reference.steplog import StepLog
from burstline.servers.reference.weights import Array, Weights

LATENCIES = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token."),
    ("vllm:e2e_request_latency_seconds", "Arrival to last token."),
)
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
Output = tuple[Any, int | None, str | None]
"""(sink, new token or None, finish reason or None) of one sequence."""


class InferenceEngine:
    """Serves sequences from its own thread; `submit`, `abort` and `stop` may be called from any other."""

    def __init__(
        self, model: Transformer, kv: KVCache, scheduler: Scheduler, step_log: StepLog | None = None
    ) -> None:
        self.model, self.kv, self.scheduler = model, kv, scheduler
        self.failure: str | None = None
        self.n_tok = Counter[str]()  # "prompt" (counted with the first token) and "generation"
        self.n_finished = Counter[str]()
        self.ttft, self.e2e = [Histogram(*named, registry=None, buckets=SECONDS) for named in LATENCIES]
        self._step_log, self._n_steps = step_log, 0
        self.profiled: list[dict[str, object]] | None = None
        """The log's lines since a profile began, None where none has."""
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._stopping = threading.Event()

    def start(self, deliver: Callable[[list[Output]], None]) -> None:
        """Start computing; `deliver` is called from the compute thread, once a step, with all new tokens."""
        threading.Thread(target=self._run, args=(deliver,), name="compute", daemon=True).start()

    def submit(self, sequence: Sequence) -> None:
        self._inbox.put(partial(self.scheduler.add, sequence))

    def abort(self, sequence: Sequence) -> None:
        """Stop computing for a client that has gone; nothing happens where the sequence has finished."""
        self._inbox.put(partial(self._end, sequence, "abort"))

    def stop(self) -> None:
        """End all sequences with finish reason "abort", then compute no more."""
        self._inbox.put(self._stopping.set)

    def _run(self, deliver: Callable[[list[Output]], None]) -> None:
        yield_to_others()
        scheduler = self.scheduler
        while True:
            if not (scheduler.running or scheduler.waiting):
                self._inbox.get()()
            while not self._inbox.empty():
                self._inbox.get()()
            if self.failure or self._stopping.is_set():
                reason = "error" if self.failure else "abort"
                ended = [*scheduler.running, *scheduler.waiting]
                deliver([self._end(sequence, reason) for sequence in ended])
            elif scheduler.running or scheduler.waiting:
                try:
                    deliver(self.step())
                except Exception as error:
                    logging.exception("the compute thread failed")
                    self.failure = f"{type(error).__name__}: {error}"

    def _end(self, sequence: Sequence, reason: str, token: int | None = None) -> Output:
        if self.scheduler.remove(sequence):
            self.n_finished[reason] += 1
        return sequence.sink, token, reason

    def step(self) -> list[Output]:
        """One step of the scheduler's choosing: logged, its tokens accepted and returned."""
        start_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        n_preempted = self.scheduler.n_preemptions
        self.model.clear_clock()
        shares = self.scheduler.schedule()
        tokens = self._compute(shares)
        end_ns = time.monotonic_ns()
        logged = self._logged(shares, start_ns, end_ns)
        if self._step_log:
            extra = {"cpu_ns": cpu_ns, "n_preempted": self.scheduler.n_preemptions - n_preempted}
            self._step_log.write(logged | extra)
        if (profiled := self.profiled) is not None:  # another thread ends it
            profiled.append(logged)
        self._n_steps += 1
        return [self._accept(sequence, token, end_ns) for sequence, token in tokens]

    def _compute(self, shares: Rows[StepShare]) -> list[tuple[Sequence, int]]:
        chunks = [Chunk(s.sequence.ids[s.start : s.start + s.n], s.start, s.sequence.table) for s in shares]
        hidden = self.model.forward(chunks, self.kv)
        for share in shares:
            self.scheduler.computed(share.sequence, share.n)
        last_rows = np.cumsum([share.n for share in shares]) - 1
        rows = [int(row) for row, share in zip(last_rows, shares, strict=True) if share.samples]
        sampled = [share.sequence for share in shares if share.samples]
        chosen = choose(self.model.logits(hidden[rows]), sampled) if rows else []
        return list(zip(sampled, chosen, strict=True))

    def _accept(self, sequence: Sequence, token: int, now_ns: int) -> Output:
        age_s = (now_ns - sequence.arrived_ns) / 1e9
        if sequence.n_output == 0:
            self.n_tok["prompt"] += sequence.n_prompt
            self.ttft.observe(age_s)
        sequence.ids.append(token)
        self.n_tok["generation"] += 1
        stopped = token in self.model.config.eos_ids and not sequence.ignore_eos
        if not stopped and sequence.n_output < sequence.max_tokens:
            return sequence.sink, token, None
        self.e2e.observe(age_s)
        return self._end(sequence, "stop" if stopped else "length", token)

    def _logged(self, shares: Rows[StepShare], start_ns: int, end_ns: int) -> dict[str, object]:
        spent, pool = self.model.spent_ns, self.scheduler.pool
        n_decode = sum(share.decode for share in shares)
        return {
            "step": self._n_steps,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "prefill_tok": sum(share.n for share in shares) - n_decode,
            "decode_tok": n_decode,
            "new_tok": [share.n for share in shares],
            "context_tok": [share.start + share.n for share in shares],
            "n_logits": sum(share.samples for share in shares),
            "gemm_ns": {name: spent[name] for name in GEMMS},
            "attention_ns": spent["attention"],
            "rest_ns": end_ns - start_ns - sum(spent.values()),
            "n_waiting": len(self.scheduler.waiting),
            "kv_used_blocks": pool.n_blocks - pool.n_free,
        }


def choose(logits: Array, sequences: Rows[Sequence]) -> list[int]:
    """One id a row of `logits` (sequences, vocabulary)."""
    chosen: list[int] = logits.argmax(axis=1).tolist()
    for i, sequence in enumerate(sequences):
        how = sequence.sampling
        if how.temperature > 0 and sequence.rng is not None:
            chosen[i] = draw(logits[i], how.temperature, how.top_p, sequence.rng.random())
    return chosen


def draw(logits: Array, temperature: float, top_p: float, u: float) -> int:
    """The id that `u`, uniform in [0, 1), falls on; top-p keeps the fewest likeliest ids that reach it."""
    weight = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = np.argsort(-weight, kind="stable") if top_p < 1 else np.arange(weight.size)
    kept = weight[order].cumsum()
    if top_p < 1:
        kept = kept[: int(np.searchsorted(kept, top_p * kept[-1])) + 1]
    return int(order[min(int(np.searchsorted(kept, u * kept[-1], side="right")), len(kept) - 1)])


def write_trace(folder: Path, steps: Rows[Mapping[str, Any]], weights: Weights) -> None:
    """Lines of the step log as PyTorch's profiler would write them, each step annotated as vLLM does.

    In it each GEMM and attention are one event for all layers.
    """
    matrices = {**weights.layers[0], "lm_head": weights.lm_head}
    events: list[dict[str, Any]] = []

    def add(kind: str, name: str, start_ns: int, ns: int, *shapes: Rows[int]) -> None:
        args = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
        event = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": 0, "args": args}
        events.append(event | {"ts": start_ns / 1e3, "dur": ns / 1e3})

    for step in steps:
        at_ns = step["start_ns"]
        add("user_annotation", _annotation(step), at_ns, step["end_ns"] - at_ns)
        for name in (GEMMS[0], "attention", *GEMMS[1:]):
            if name == "attention":
                ns = step["attention_ns"]
                add("cpu_op", "burstline::attention", at_ns, ns)
            elif ns := step["gemm_ns"][name]:  # the head has none where no prompt has ended
                rows = step["n_logits"] if name == "lm_head" else sum(step["new_tok"])
                k, n = matrices[name].shape
                add("cpu_op", "burstline::matmul", at_ns, ns, (rows, k), (k, n))
            at_ns += ns
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"reference-{os.getpid()}.pt.trace.json.gz"
    path.write_bytes(gzip.compress(orjson.dumps({"traceEvents": events})))


def _annotation(step: Mapping[str, Any]) -> str:
    """Requests, new tokens and contexts of prompts and of decodes, which the scheduler puts first."""
    n, new, context = step["decode_tok"], step["new_tok"], step["context_tok"]
    prompts, decodes = (
        f"{len(new[part])}(sq{sum(new[part])}sk{sum(context[part])}sqsq0sqsk0)"
        for part in (slice(n, None), slice(n))
    )
    return f"execute_{sum(new)}_context_{prompts}_generation_{decodes}"
