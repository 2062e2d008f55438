"""Continuous batching, step by step: when each token of a load comes, from an engine's rules and a clock.

Loads are bursts, arrivals at given times, or a closed loop; an engine is one pool of devices with or without
pipeline stages, several replicas of it, or two pools that prefill and decode apart. Rules of admission:
`scheduler.py`.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from burstline.roofline.errors import RooflineError
from burstline.roofline.model.step import Step
from burstline.roofline.predict.scheduler import (
    NO_SPECULATION,
    Asked,
    Batch,
    Ints,
    Limits,
    Speculation,
    Work,
    check,
)

__all__ = [
    "Asked",
    "FrontEnd",
    "Limits",
    "Simulation",
    "Speculation",
    "StepTable",
    "simulate",
    "simulate_disaggregated",
]

Floats = npt.NDArray[np.float64]
Seconds = Callable[[Step], float]


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """The process between clients and scheduler, which works in parallel to the devices: it takes
    `prompt_tok_s` to read each token of a prompt, and `reply_s` to send what a step has given one request, in
    the order in which they come to it.

    Where more comes than it can send, replies queue: first tokens and next requests come later, and fewer
    requests compute at a time.
    """

    prompt_tok_s: float = 0.0
    reply_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTable:
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
    """What came out. Times are per request, in the order asked, from its arrival.

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
    steps: StepTable


def simulate(
    requests: Sequence[Asked],
    limits: Limits,
    step_time: Seconds,
    *,
    concurrency: int | None = None,
    turnaround_s: float = 0.0,
    stages: int = 1,
    replicas: int = 1,
    speculation: Speculation = NO_SPECULATION,
    front_end: FrontEnd = FrontEnd(),
) -> Simulation:
    """The run of `requests`, step by step, each step taking `step_time` seconds.

    `concurrency` makes it a closed loop of that many streams: the first ones are sent when due, each other
    when one ends, and arrives `turnaround_s` later: above 0 the engine's next step has begun by then. With
    pipeline `stages` a step passes through each for an equal share of its time, and as many steps are in
    flight. `replicas` of the engine take requests in turn, the idlest first. All go through one `front_end`.

    Raises RooflineError where a request could never fit.
    """
    check(requests, limits)
    if concurrency is not None and concurrency < 1:
        raise RooflineError(f"a closed loop needs a stream or more, not {concurrency}")
    pools = [_Pool(Batch(requests, limits, speculation), step_time, stages) for _ in range(replicas)]
    return _Run(requests, pools, concurrency, turnaround_s=turnaround_s, front_end=front_end).result()


def simulate_disaggregated(
    requests: Sequence[Asked],
    prefill: tuple[Limits, Seconds, int],
    decode: tuple[Limits, Seconds, int],
    transfer_s: Callable[[int], float],
    *,
    concurrency: int | None = None,
) -> Simulation:
    """The same where one pool makes first tokens and another the rest, each (limits, step time, engines).

    `transfer_s` is how long the keys of that many prompt tokens take from one pool to the other; transfers
    follow one another.
    """
    check(requests, prefill[0])
    check(requests, decode[0])
    firsts = [replace(request, output_tok=1) for request in requests]
    first_pools = [_Pool(Batch(firsts, prefill[0]), prefill[1], 1) for _ in range(prefill[2])]
    then = [_Pool(Batch(requests, decode[0]), decode[1], 1) for _ in range(decode[2])]
    return _Run(requests, first_pools, concurrency, then, transfer_s).result()


class _Pool:
    """One engine: its scheduler, its clock, and when each of its stages is free."""

    def __init__(self, batch: Batch, step_time: Seconds, stages: int) -> None:
        self.batch, self.step_time = batch, step_time
        self.free_s = [0.0] * stages
        self.n_in_flight = 0
        self.n_requests = 0

    def start(self, now_s: float) -> tuple[float, Work] | None:
        """Begin a step if a stage is free for it and there is something to compute: when it ends, and it."""
        batch = self.batch
        if self.n_in_flight == len(self.free_s) or self.free_s[0] > now_s:
            return None
        if batch.idle:
            return None
        work = batch.schedule()
        if work is None:
            return None
        share_s = (self.step_time(work.step) + batch.speculation.draft_s) / len(self.free_s)
        at_s = now_s
        for stage, free_s in enumerate(self.free_s):
            at_s = self.free_s[stage] = max(at_s, free_s) + share_s
        self.n_in_flight += 1
        return at_s, work


class _Run:
    """Arrivals and ends of steps in the order of time."""

    def __init__(
        self,
        requests: Sequence[Asked],
        pools: Sequence[_Pool],
        concurrency: int | None,
        then: Sequence[_Pool] = (),
        transfer_s: Callable[[int], float] | None = None,
        turnaround_s: float = 0.0,
        front_end: FrontEnd = FrontEnd(),
    ) -> None:
        self.pools, self.then, self.transfer_s = pools, then, transfer_s
        self.turnaround_s, self.front_end = turnaround_s, front_end
        self.prompts = [request.prompt_tok for request in requests]
        self.outputs = np.array([request.output_tok for request in requests], dtype=np.int64)
        self.due = np.array([request.due_s for request in requests], dtype=np.float64)
        order = np.argsort(self.due, kind="stable").tolist()
        n = len(order) if concurrency is None else min(concurrency, len(order))
        self.later = order[n:][::-1]
        self.first, self.last = np.full(len(order), np.nan), np.full(len(order), np.nan)
        self.rows: list[tuple[float, ...]] = []
        self.link_free_s = self.front_end_free_s = 0.0
        # (time, order of entry, what happens then)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.n_events = 0
        for i in order[:n]:
            self._push(float(self.due[i]), partial(self._read, i))

    def _push(self, at_s: float, what: Callable[[float], None]) -> None:
        self.n_events += 1
        heapq.heappush(self.events, (at_s, self.n_events, what))

    def result(self) -> Simulation:
        while self.events:
            now_s = self.events[0][0]
            while self.events and self.events[0][0] <= now_s:
                heapq.heappop(self.events)[2](now_s)
            for each in (*self.pools, *self.then):
                self._begin(now_s, each)
        return self._table()

    def _read(self, i: int, now_s: float) -> None:
        """The front end gets a request."""
        if self.front_end.prompt_tok_s:
            begun_s = max(now_s, self.front_end_free_s)
            self.front_end_free_s = begun_s + self.front_end.prompt_tok_s * self.prompts[i]
            self._push(self.front_end_free_s, partial(self._arrive, i))
        else:
            self._arrive(i, now_s)

    def _arrive(self, i: int, _now_s: float) -> None:
        idlest = min(self.pools, key=lambda each: each.n_requests)
        idlest.n_requests += 1
        idlest.batch.arrive(i)

    def _begin(self, now_s: float, pool: _Pool) -> None:
        while (begun := pool.start(now_s)) is not None:
            end_s, work = begun
            self.rows.append((now_s, end_s - now_s, *work.facts))
            self._push(end_s, partial(self._end, work, pool))
            if len(pool.free_s) > 1:
                self._push(pool.free_s[0], lambda _now_s: None)  # its first stage is free for the next step

    def _end(self, work: Work, pool: _Pool, now_s: float) -> None:
        gained, done = pool.batch.finish(work)
        pool.n_in_flight -= 1
        sent_s = self._sent_s(len(gained), now_s)
        new = np.isnan(self.first[gained])
        self.first[gained[new]] = sent_s[new]
        self.last[gained] = sent_s
        for i in done.tolist():
            pool.n_requests -= 1
            if self.then and pool in self.pools and self.outputs[i] > 1:
                self._hand_over(i, pool, now_s)
            elif self.later:
                later = self.later.pop()
                self.due[later] = max(self.last[i] + self.turnaround_s, self.due[later])
                self._push(float(self.due[later]), partial(self._read, later))

    def _sent_s(self, n: int, now_s: float) -> Floats:
        """When the front end has sent each of a step's `n` replies."""
        sent_s = np.full(n, now_s, dtype=np.float64)
        if n and self.front_end.reply_s:
            begun_s = max(now_s, self.front_end_free_s)
            sent_s = begun_s + self.front_end.reply_s * np.arange(1, n + 1, dtype=np.float64)
            self.front_end_free_s = float(sent_s[-1])
        return sent_s

    def _hand_over(self, i: int, pool: _Pool, now_s: float) -> None:
        assert self.transfer_s is not None
        to = min(self.then, key=lambda each: each.n_requests)
        to.n_requests += 1
        self.link_free_s = max(now_s, self.link_free_s) + self.transfer_s(int(pool.batch.prompt[i]))
        self._push(self.link_free_s, lambda _now_s: to.batch.arrive_prefilled(i))

    def _table(self) -> Simulation:
        assert not np.isnan(self.last).any(), "every request fits an empty cache, so that each one ends"
        columns = [np.array(column) for column in zip(*self.rows, strict=True)]
        steps = StepTable(columns[0], columns[1], *(column.astype(np.int64) for column in columns[2:]))
        tpot = np.full(len(self.due), np.nan)
        np.divide(self.last - self.first, self.outputs - 1, out=tpot, where=self.outputs > 1)
        return Simulation(
            float(self.last.max() - self.due.min()), self.due, self.first - self.due, self.last - self.due,
            tpot, int(steps.n_preempted.sum()), steps,
        )  # fmt: skip
