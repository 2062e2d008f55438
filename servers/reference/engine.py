"""The compute loop: one thread that schedules, runs the model, chooses tokens and hands them out."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Rows
from functools import partial
from queue import SimpleQueue
from typing import Any

from servers.reference.kv import KVCache
from servers.reference.metrics import Histograms
from servers.reference.model import GEMMS, Chunk, Model
from servers.reference.sampling import choose
from servers.reference.scheduler import Scheduler, Sequence, Share
from servers.reference.steplog import StepLog

Output = tuple[Any, int | None, str | None]
"""(sink, new token or None, finish reason or None) of one sequence."""


class Engine:
    """Serves sequences from its own thread; `submit`, `abort` and `stop` may be called from any other."""

    def __init__(
        self, model: Model, kv: KVCache, scheduler: Scheduler, step_log: StepLog | None = None
    ) -> None:
        self.model, self.kv, self.scheduler = model, kv, scheduler
        self.failure: str | None = None
        self.n_tok = Counter[str]()  # "prompt" (counted with the first token) and "generation"
        self.n_finished = Counter[str]()
        self.histograms = Histograms()
        self._step_log, self._n_steps = step_log, 0
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliver: Callable[[list[Output]], None] = lambda _: None
        self._stopping = False

    def start(self, deliver: Callable[[list[Output]], None]) -> None:
        """Start computing; `deliver` is called from the compute thread, once a step, with all new tokens."""
        self._deliver = deliver
        threading.Thread(target=self._run, name="compute", daemon=True).start()

    def submit(self, sequence: Sequence) -> None:
        self._inbox.put(partial(self.scheduler.add, sequence))

    def abort(self, sequence: Sequence) -> None:
        """Stop computing for a client that has gone; nothing happens where the sequence has finished."""
        self._inbox.put(partial(self._abort, sequence))

    def stop(self) -> None:
        """End all sequences with finish reason "abort", then the thread."""
        self._stopping = True
        self._inbox.put(lambda: None)

    def _abort(self, sequence: Sequence) -> None:
        if self.scheduler.remove(sequence):
            self.n_finished["abort"] += 1

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_inbox()
                if self.scheduler.running or self.scheduler.waiting:
                    self._deliver(self.step())
        except Exception as error:
            logging.exception("the compute thread failed")
            self.failure = f"{type(error).__name__}: {error}"
        self._end_all("error" if self.failure else "abort")
        while True:  # what still comes in ends the same way
            self._inbox.get()()
            self._end_all("error" if self.failure else "abort")

    def _take_inbox(self) -> None:
        """Do what other threads asked for, waiting for them where there is nothing to compute."""
        if not (self.scheduler.running or self.scheduler.waiting):
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _end_all(self, reason: str) -> None:
        ended = [*self.scheduler.running, *self.scheduler.waiting]
        for sequence in ended:
            self.scheduler.remove(sequence)
            self.n_finished[reason] += 1
        self._deliver([(sequence.sink, None, reason) for sequence in ended])

    def step(self) -> list[Output]:
        """One step of the scheduler's choosing: logged, its tokens accepted and returned."""
        start_ns, n_preempted = time.monotonic_ns(), self.scheduler.n_preemptions
        self.model.clear_clock()
        shares = self.scheduler.schedule()
        used = self.scheduler.pool.n_blocks - self.scheduler.pool.n_free
        tokens = self._compute(shares)
        end_ns = time.monotonic_ns()
        if self._step_log:
            queue = {
                "n_waiting": len(self.scheduler.waiting),
                "n_preempted": self.scheduler.n_preemptions - n_preempted,
                "kv_used_blocks": used,
            }
            self._step_log.write(self._logged(shares, start_ns, end_ns) | queue)
        self._n_steps += 1
        return [self._accept(sequence, token, end_ns) for sequence, token in tokens]

    def _compute(self, shares: Rows[Share]) -> list[tuple[Sequence, int]]:
        chunks = [Chunk(s.sequence.ids[s.start : s.start + s.n], s.start, s.sequence.table) for s in shares]
        hidden = self.model.forward(chunks, self.kv)
        rows, sampled, row = [], [], -1
        for share in shares:
            row += share.n
            share.sequence.n_computed += share.n
            if share.samples:
                rows.append(row)
                sampled.append(share.sequence)
        if not sampled:
            return []
        chosen = choose(self.model.logits(hidden[rows]), sampled, self.model.config.eos_ids)
        return list(zip(sampled, chosen, strict=True))

    def _accept(self, sequence: Sequence, token: int, now_ns: int) -> Output:
        """Append the new token, count it, and end the sequence where it is the last."""
        if sequence.n_output == 0:
            self.n_tok["prompt"] += sequence.n_prompt
            self.histograms.ttft.observe((now_ns - sequence.arrived_ns) / 1e9)
        sequence.ids.append(token)
        self.n_tok["generation"] += 1
        reason = None
        if token in self.model.config.eos_ids and not sequence.ignore_eos:
            reason = "stop"
        elif sequence.n_output >= sequence.max_tokens:
            reason = "length"
        if reason:
            self.scheduler.remove(sequence)
            self.n_finished[reason] += 1
            self.histograms.e2e.observe((now_ns - sequence.arrived_ns) / 1e9)
        return sequence.sink, token, reason

    def _logged(self, shares: Rows[Share], start_ns: int, end_ns: int) -> dict[str, object]:
        spent = self.model.spent_ns
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
        }
