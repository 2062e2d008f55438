"""Continuous batching, step by step: when each token of a load comes, from an engine's rules and a clock.

Loads are bursts, arrivals at given times, or a closed loop. Rules of admission: `scheduler.py`.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from burstline.errors import RooflineError
from burstline.roofline.model.step import Step
from burstline.roofline.predict.scheduler import Asked, Batch, Ints, Limits, Work, check

__all__ = ["Asked", "Limits", "Simulation", "_StepTable", "simulate"]

Floats = npt.NDArray[np.float64]
Seconds = Callable[[Step], float]


@dataclass(frozen=True, slots=True)
class _StepTable:
    """Every step, by column: its start and length, what it computed, and how full the engine was in it.

    `context_tok` sums what all its requests hold after the step; `kv_tok` counts whole blocks.
    """

    start_s: Floats
    seconds: Floats
    prefill_tok: Ints
    decode_tok: Ints
    context_tok: Ints
    n_sampled: Ints
    n_running: Ints
    n_waiting: Ints
    n_preempted: Ints
    kv_tok: Ints


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation. Times are per request that was sent, in plan order, from its arrival.

    `due_s` is when each was sent; in a closed loop, when another one ended. `tpot_s` is
    (E2E - TTFT) / (output - 1), NaN for a single token. `makespan_s` runs from the first arrival to the last
    token.
    """

    makespan_s: float
    due_s: Floats
    ttft_s: Floats
    e2e_s: Floats
    tpot_s: Floats
    n_preemptions: int
    steps: _StepTable


def simulate(
    requests: Sequence[Asked],
    limits: Limits,
    step_time: Seconds,
    *,
    concurrency: int | None = None,
    turnaround_s: float = 0.0,
    until_s: float = math.inf,
) -> Simulation:
    """The run of `requests`, step by step, each step taking `step_time` seconds.

    `concurrency` makes it a closed loop of that many streams: the first ones are sent when due, each other
    when one ends, and arrives `turnaround_s` later: above 0 the engine's next step has begun by then.
    From `until_s` on it sends no more; the result is of the requests that were sent.

    Raises RooflineError where a request could never fit.
    """
    check(requests, limits)
    if concurrency is not None and concurrency < 1:
        raise RooflineError(f"a closed loop needs a stream or more, not {concurrency}")
    return _Run(requests, Batch(requests, limits), step_time, concurrency, turnaround_s, until_s).result()


class _Run:
    """Arrivals and ends of steps in the order of time."""

    def __init__(
        self,
        requests: Sequence[Asked],
        batch: Batch,
        step_time: Seconds,
        concurrency: int | None,
        turnaround_s: float,
        until_s: float,
    ) -> None:
        self.batch, self.step_time, self.turnaround_s, self.until_s = batch, step_time, turnaround_s, until_s
        self.outputs = np.array([request.output_tok for request in requests], dtype=np.int64)
        self.due = np.array([request.due_s for request in requests], dtype=np.float64)
        order = np.argsort(self.due, kind="stable").tolist()
        n = len(order) if concurrency is None else min(concurrency, len(order))
        self.later = order[n:][::-1]
        self.first, self.last = np.full(len(order), np.nan), np.full(len(order), np.nan)
        self.rows: list[tuple[float, ...]] = []
        self.in_step = False
        # (time, order of entry, what happens then)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.n_events = 0
        for i in order[:n]:
            self._push(float(self.due[i]), partial(self._arrive, i))

    def _push(self, at_s: float, what: Callable[[float], None]) -> None:
        self.n_events += 1
        heapq.heappush(self.events, (at_s, self.n_events, what))

    def result(self) -> Simulation:
        while self.events:
            now_s = self.events[0][0]
            while self.events and self.events[0][0] <= now_s:
                heapq.heappop(self.events)[2](now_s)
            if not (self.in_step or self.batch.idle):
                self._begin(now_s)
        return self._table()

    def _arrive(self, i: int, _now_s: float) -> None:
        self.batch.arrive(i)

    def _begin(self, now_s: float) -> None:
        work = self.batch.schedule()
        if work is None:
            return
        end_s = now_s + self.step_time(work.step)
        self.rows.append((now_s, end_s - now_s, *work.facts))
        self.in_step = True
        self._push(end_s, partial(self._end, work))

    def _end(self, work: Work, now_s: float) -> None:
        self.in_step = False
        gained, done = self.batch.finish(work)
        self.first[gained[np.isnan(self.first[gained])]] = now_s
        self.last[gained] = now_s
        for _ in range(min(len(done), len(self.later))):
            later = self.later.pop()
            self.due[later] = max(now_s + self.turnaround_s, self.due[later])
            if self.due[later] >= self.until_s:
                self.later = []
                return
            self._push(float(self.due[later]), partial(self._arrive, later))

    def _table(self) -> Simulation:
        sent = ~np.isnan(self.last)
        assert sent.all() or self.until_s < math.inf, "every request fits an empty cache, so each one ends"
        due, first, last, outputs = self.due[sent], self.first[sent], self.last[sent], self.outputs[sent]
        columns = [np.array(column) for column in zip(*self.rows, strict=True)]
        steps = _StepTable(columns[0], columns[1], *(column.astype(np.int64) for column in columns[2:]))
        tpot = np.full(len(due), np.nan)
        np.divide(last - first, outputs - 1, out=tpot, where=outputs > 1)
        return Simulation(
            float(last.max() - due.min()),
            due,
            first - due,
            last - due,
            tpot,
            int(steps.n_preempted.sum()),
            steps,
        )
