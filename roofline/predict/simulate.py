"""Continuous batching, step by step: what a burst should take, from an engine's limits and a clock.

The rules are vLLM V1's scheduler (vllm/v1/core/sched/scheduler.py): every step takes first the running
requests in their order, then waiting ones, within a budget of new tokens; prompts are cut into chunks; the
cache is given in blocks, and where none is left the youngest running request is evicted, to be computed
again from its start. Engines without chunked prefill run a step of whole prompts whenever one fits, and
decode otherwise.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from roofline.errors import RooflineError
from roofline.model.step import Step

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it arrives, its prompt, how many tokens it wants, and how many of the prompt's a
    prefix cache already holds."""

    due_s: float
    prompt_tok: int
    output_tok: int
    cached_tok: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine allows at once. `kv_tok`: take its own count of cache tokens wherever it prints one.

    `reserve_output`: a request is admitted only when its whole output fits too (TGI), so nothing is ever
    evicted. `whole_prompt`: only when its whole prompt fits, though it is computed in chunks (vLLM 0.19).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tok: int
    block_tok: int = 16
    chunked_prefill: bool = True
    reserve_output: bool = False
    whole_prompt: bool = True


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

    `tpot_s` is (E2E - TTFT) / (output - 1), NaN for a single token. `makespan_s` runs from the first arrival
    to the last token.
    """

    makespan_s: float
    ttft_s: Floats
    e2e_s: Floats
    tpot_s: Floats
    n_preemptions: int
    steps: StepTable


def simulate(requests: Sequence[Asked], limits: Limits, step_time: Callable[[Step], float]) -> Simulation:
    """The run of `requests`, step by step, each step taking `step_time` seconds.

    Raises where a request could never fit.
    """
    _check(requests, limits)
    batch = _Batch(requests, limits)
    due = np.array([request.due_s for request in requests])
    arrivals = deque(np.argsort(due, kind="stable").tolist())
    first, last = np.full(len(requests), np.nan), np.full(len(requests), np.nan)
    now_s, rows = float(due.min()), []
    while arrivals or batch.waiting or batch.running:
        if not batch.waiting and not batch.running:
            now_s = max(now_s, float(due[arrivals[0]]))
        while arrivals and due[arrivals[0]] <= now_s:
            batch.waiting.append(arrivals.popleft())
        work = batch.schedule()
        seconds = step_time(work.step)
        rows.append((now_s, seconds, *work.facts))
        now_s += seconds
        batch.finish(work)
        sampled = work.ids[work.step.logits > 0]
        first[sampled] = np.where(np.isnan(first[sampled]), now_s, first[sampled])
        last[sampled] = now_s
    return _result(due, first, last, batch, rows)


def _result(
    due: Floats, first: Floats, last: Floats, batch: "_Batch", rows: list[tuple[float, ...]]
) -> Simulation:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    steps = StepTable(columns[0], columns[1], *(column.astype(np.int64) for column in columns[2:]))
    outputs = batch.wanted
    tpot = np.full(len(due), np.nan)
    np.divide(last - first, outputs - 1, out=tpot, where=outputs > 1)
    makespan_s = float(last.max() - due.min())
    return Simulation(makespan_s, first - due, last - due, tpot, int(steps.n_preempted.sum()), steps)


def _check(requests: Sequence[Asked], limits: Limits) -> None:
    if not requests:
        raise RooflineError("a simulation needs at least one request")
    if limits.max_num_seqs < 1 or limits.max_num_batched_tokens < 1:
        raise RooflineError(f"an engine that may run nothing cannot be simulated: {limits}")
    for request in requests:
        if request.prompt_tok < 1 or request.output_tok < 1:
            raise RooflineError(f"a request needs a prompt and an output of a token or more; got {request}")
        blocks = -(-(request.prompt_tok + request.output_tok) // limits.block_tok)
        if blocks > limits.kv_tok // limits.block_tok:
            raise RooflineError(
                f"a request of {request.prompt_tok} + {request.output_tok} tokens never fits a cache of"
                f" {limits.kv_tok} tokens; shorten it or give the engine more memory"
            )
        if not limits.chunked_prefill and request.prompt_tok > limits.max_num_batched_tokens:
            raise RooflineError(
                f"a prompt of {request.prompt_tok} tokens exceeds max_num_batched_tokens"
                f" {limits.max_num_batched_tokens} of an engine without chunked prefill"
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """One step: whose requests, the shape, and the rest of its row in the table."""

    ids: Ints
    step: Step
    facts: tuple[int, ...]


@dataclass(slots=True)
class _Grants:
    """What a step being scheduled has given so far."""

    budget: int
    ids: list[int] = field(default_factory=list)
    new_tok: list[int] = field(default_factory=list)
    n_preempted: int = 0

    def give(self, i: int, n_tok: int) -> None:
        self.ids.append(i)
        self.new_tok.append(n_tok)
        self.budget -= n_tok


class _Batch:
    """The scheduler's state. Per request: tokens known (prompt and sampled), computed, and blocks held."""

    def __init__(self, requests: Sequence[Asked], limits: Limits) -> None:
        self.limits = limits
        self.prompt = np.array([request.prompt_tok for request in requests], dtype=np.int64)
        self.wanted = np.array([request.output_tok for request in requests], dtype=np.int64)
        self.known = self.prompt.copy()
        self.computed = np.zeros_like(self.prompt)
        self.blocks = np.zeros_like(self.prompt)
        self.n_free = limits.kv_tok // limits.block_tok
        self.running: list[int] = []
        self.waiting: deque[int] = deque()

    def schedule(self) -> _Work:
        grants = _Grants(self.limits.max_num_batched_tokens)
        if self.limits.chunked_prefill:
            self._continue_running(grants)
            if not grants.n_preempted:
                self._admit(grants)
        else:
            self._admit(grants)
            if not grants.ids:
                self._continue_running(grants)
        return self._work(grants)

    def _continue_running(self, grants: _Grants) -> None:
        if self._all_decode(grants):
            return
        at = 0
        while at < len(self.running) and grants.budget > 0:
            i = self.running[at]
            n_tok = min(int(self.known[i] - self.computed[i]), grants.budget)
            if not self._make_room(i, n_tok, grants):
                return
            grants.give(i, n_tok)
            at += 1

    def _all_decode(self, grants: _Grants) -> bool:
        """The usual step, all at once: every running request decodes, and there is room."""
        ids = np.array(self.running, dtype=np.int64)
        if not len(ids) or len(ids) > grants.budget or (self.known[ids] - self.computed[ids] != 1).any():
            return False
        full = self.computed[ids] == self.blocks[ids] * self.limits.block_tok
        if full.sum() > self.n_free:
            return False
        self.blocks[ids] += full
        self.n_free -= int(full.sum())
        grants.ids, grants.new_tok = self.running.copy(), [1] * len(ids)
        grants.budget -= len(ids)
        return True

    def _make_room(self, i: int, n_tok: int, grants: _Grants) -> bool:
        """Blocks for `n_tok` more of request i, evicting the youngest; False where i itself had to go."""
        while not self._allocate(i, int(self.computed[i]) + n_tok):
            victim = self.running.pop()
            self._release(victim)
            self.computed[victim] = 0
            self.waiting.appendleft(victim)
            grants.n_preempted += 1
            if victim == i:
                return False
        return True

    def _admit(self, grants: _Grants) -> None:
        limits = self.limits
        while self.waiting and len(self.running) < limits.max_num_seqs and grants.budget > 0:
            i = self.waiting[0]
            pending = int(self.known[i])
            n_tok = min(pending, grants.budget)
            # An evicted request may have outgrown the budget: it then runs alone.
            if not limits.chunked_prefill and n_tok < pending and grants.ids:
                return
            n_tok = n_tok if limits.chunked_prefill else pending
            if not self._fits(i, n_tok):
                return
            self._allocate(i, self._reserved(i, n_tok))
            self.running.append(self.waiting.popleft())
            grants.give(i, n_tok)

    def _fits(self, i: int, n_tok: int) -> bool:
        tok = max(self._reserved(i, n_tok), int(self.known[i]) if self.limits.whole_prompt else 0)
        return self._blocks_for(tok) <= self.n_free

    def _reserved(self, i: int, n_tok: int) -> int:
        return int(self.prompt[i] + self.wanted[i]) if self.limits.reserve_output else n_tok

    def _allocate(self, i: int, tok: int) -> bool:
        more = self._blocks_for(tok) - int(self.blocks[i])
        if more > self.n_free:
            return False
        if more > 0:
            self.blocks[i] += more
            self.n_free -= more
        return True

    def _release(self, i: int) -> None:
        self.n_free += int(self.blocks[i])
        self.blocks[i] = 0

    def _blocks_for(self, tok: int) -> int:
        return -(-tok // self.limits.block_tok)

    def _work(self, grants: _Grants) -> _Work:
        assert grants.ids, "a step computes something: every request fits an empty cache"
        ids = np.array(grants.ids, dtype=np.int64)
        new_tok = np.array(grants.new_tok, dtype=np.int64)
        decodes = (self.known[ids] - self.computed[ids] == 1) & (self.known[ids] > self.prompt[ids])
        context = self.computed[ids] + new_tok
        step = Step(new_tok, context, (context == self.known[ids]).astype(np.int64))
        n_tok, n_decode = int(new_tok.sum()), int(decodes.sum())
        used = self.limits.kv_tok // self.limits.block_tok - self.n_free
        facts = (
            n_tok - n_decode, n_decode, int(context.sum()), step.n_logits, len(self.running),
            len(self.waiting), grants.n_preempted, used * self.limits.block_tok,
        )  # fmt: skip
        return _Work(ids, step, facts)

    def finish(self, work: _Work) -> None:
        self.computed[work.ids] += work.step.new_tok
        sampled = work.ids[work.step.logits > 0]
        self.known[sampled] += 1
        done = sampled[self.known[sampled] - self.prompt[sampled] == self.wanted[sampled]]
        if len(done):
            gone = set(done.tolist())
            self.running = [i for i in self.running if i not in gone]
            for i in done.tolist():
                self._release(i)
