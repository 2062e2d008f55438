"""Continuous batching, step by step: when each token of a load comes, from an engine's rules and a clock.

Loads are bursts, arrivals at given times, or a closed loop. `Batch` is the engine's scheduler: which requests
compute how many tokens in the next step, and who holds which blocks. The rules are vLLM V1's
(vllm/v1/core/sched/scheduler.py): a step takes first the running requests in their order, then waiting ones,
within a budget of new tokens; prompts are cut into chunks; the cache is given in blocks, and where none is
left the youngest running request is evicted, to be computed again from its start. `Limits` says where an
engine differs.
"""

import math
from collections import deque, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from burstline.errors import RooflineError
from burstline.roofline.model.ops import Step

Floats = npt.NDArray[np.float64]
Seconds = Callable[[Step], float]
Ints = npt.NDArray[np.int64]
_NONE: Ints = np.empty(0, dtype=np.int64)


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
    """The engine's limits. `kv_tok`: take its own count of cache tokens wherever it prints one.

    `chunked_prefill` False: a prompt is computed in one step. `mixed_steps` False: steps either prefill or
    decode, and prefills go first (SGLang, TGI). `reserve_output`: a request is
    admitted only when its whole output fits too (TGI), so nothing is ever evicted. `whole_prompt`: only when
    its whole prompt fits, though it is computed in chunks (vLLM 0.19). `ahead`: a step is scheduled when the
    one before it begins, so that a request which arrives during a step misses the next one too (the overlap
    schedulers of SGLang and TensorRT-LLM). `hold_steps`: while others decode, waiting prompts are held back
    for so many steps, to be computed together (TensorRT-LLM's `batch_wait_timeout_iters`).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_tok: int
    block_tok: int = 16
    chunked_prefill: bool = True
    reserve_output: bool = False
    whole_prompt: bool = True
    mixed_steps: bool = True
    ahead: bool = False
    hold_steps: int = 0


def check(requests: Sequence[Asked], limits: Limits) -> None:
    """Raise RooflineError where a request could never be served within `limits`."""
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
class Work:
    """One step: whose requests, the shape, and the rest of its row in the table of steps."""

    ids: Ints
    step: Step
    facts: tuple[int, ...]
    sampled: npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Grants:
    """What a step being scheduled has given so far: to all that run at once, then one by one."""

    budget: int
    continued: tuple[Ints, Ints] = (_NONE, _NONE)
    ids: list[int] = field(default_factory=list)
    new_tok: list[int] = field(default_factory=list)
    n_preempted: int = 0

    @property
    def n(self) -> int:
        return len(self.continued[0]) + len(self.ids)

    def columns(self) -> tuple[Ints, Ints]:
        """Whose requests, and the new tokens of each."""
        if not self.ids:
            return self.continued
        more = np.array([self.ids, self.new_tok], dtype=np.int64)
        return np.append(self.continued[0], more[0]), np.append(self.continued[1], more[1])

    def give(self, i: int, n_tok: int) -> None:
        self.ids.append(i)
        self.new_tok.append(n_tok)
        self.budget -= n_tok


class Batch:
    """The scheduler's state. Per request: tokens known (prompt and sampled), computed, and blocks held."""

    def __init__(self, requests: Sequence[Asked], limits: Limits) -> None:
        self.limits = limits
        self.prompt = np.array([request.prompt_tok for request in requests], dtype=np.int64)
        self.wanted = np.array([request.output_tok for request in requests], dtype=np.int64)
        cached = np.array([request.cached_tok for request in requests], dtype=np.int64)
        self.cached = np.clip(cached, 0, self.prompt - 1)
        self.known = self.prompt.copy()
        self.computed = np.zeros_like(self.prompt)
        self.blocks = np.zeros_like(self.prompt)
        self.n_free = limits.kv_tok // limits.block_tok
        self.running = _NONE  # in the order of admission
        self.waiting: deque[int] = deque()
        self.arrived: list[int] = []  # since the next step was scheduled
        self.n_held = 0  # steps for which the waiting prompts have been held back

    @property
    def idle(self) -> bool:
        return not (len(self.running) or self.waiting or self.arrived)

    def arrive(self, i: int) -> None:
        (self.arrived if self.limits.ahead else self.waiting).append(i)

    def schedule(self) -> Work | None:
        """The next step; None where nothing has arrived."""
        limits = self.limits
        if not (len(self.running) or self.waiting):  # an idle engine has scheduled nothing ahead
            self._enqueue()
        grants = _Grants(limits.max_num_batched_tokens)
        if limits.mixed_steps:
            self._continue_running(grants)
            if not grants.n_preempted:
                self._admit(grants)
        else:
            if limits.chunked_prefill:
                self._continue_running(grants, prompts_only=True)
            self._admit(grants)
            if not grants.n:
                self._continue_running(grants)
        self._enqueue()  # they can join the step after this one
        return self._work(grants) if grants.n else None

    def _enqueue(self) -> None:
        self.waiting.extend(self.arrived)
        self.arrived.clear()

    def _continue_running(self, grants: _Grants, *, prompts_only: bool = False) -> None:
        if prompts_only:
            if not (self.computed[self.running] < self.prompt[self.running]).any():
                return
        elif self._all_at_once(grants):
            return
        for i in self.running.tolist():
            n_tok = min(int(self.known[i] - self.computed[i]), grants.budget)
            was_evicted = not self.blocks[i]
            if was_evicted or n_tok == 0 or (prompts_only and self.computed[i] >= self.prompt[i]):
                continue
            if not self._make_room(i, n_tok, grants):
                return
            grants.give(i, n_tok)

    def _all_at_once(self, grants: _Grants) -> bool:
        """The usual step: every running request computes all that it would, and there is room."""
        ids = self.running
        pending = self.known[ids] - self.computed[ids]
        n_tok = int(pending.sum())
        if not n_tok or n_tok > grants.budget:
            return False
        more = np.maximum(0, -(-self.known[ids] // self.limits.block_tok) - self.blocks[ids])
        n_blocks = int(more.sum())
        if n_blocks > self.n_free:
            return False
        self.blocks[ids] += more
        self.n_free -= n_blocks
        grants.continued = ids, pending
        grants.budget -= n_tok
        return True

    def _make_room(self, i: int, n_tok: int, grants: _Grants) -> bool:
        """Blocks for `n_tok` more of request i, evicting the youngest; False where i itself had to go."""
        while not self._allocate(i, int(self.computed[i]) + n_tok):
            victim = int(self.running[-1])
            self.running = self.running[:-1]
            self._release(victim)
            self.computed[victim] = 0
            self.waiting.appendleft(victim)
            grants.n_preempted += 1
            if victim == i:
                return False
        return True

    def _admit(self, grants: _Grants) -> None:
        limits, admitted = self.limits, list[int]()
        if not self.waiting:
            return
        if grants.n and self.n_held < limits.hold_steps:
            self.n_held += 1
            return
        self.n_held = 0
        while self.waiting and len(self.running) + len(admitted) < limits.max_num_seqs and grants.budget > 0:
            i = self.waiting[0]
            pending = int(self.known[i] - self.cached[i])
            n_tok = min(pending, grants.budget)
            # An evicted request may have outgrown the budget: it then runs alone.
            alone = not grants.n or pending > limits.max_num_batched_tokens
            if not limits.chunked_prefill and n_tok < pending and not alone:
                break
            n_tok = n_tok if limits.chunked_prefill else pending
            reserved = int(self.cached[i]) + n_tok
            if limits.reserve_output:
                reserved = int(self.prompt[i] + self.wanted[i])
            if self._blocks_for(max(reserved, int(self.known[i]) * limits.whole_prompt)) > self.n_free:
                break
            self.computed[i] = self.cached[i]
            self._allocate(i, reserved)
            admitted.append(self.waiting.popleft())
            grants.give(i, n_tok)
        self.running = np.append(self.running, np.array(admitted, dtype=np.int64))

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

    def _work(self, grants: _Grants) -> Work:
        ids, new_tok = grants.columns()
        decodes = (self.known[ids] - self.computed[ids] == 1) & (self.known[ids] > self.prompt[ids])
        context = self.computed[ids] + new_tok
        sampled = context >= self.known[ids]
        self.computed[ids] = context
        n_tok, n_decode = int(new_tok.sum()), int(decodes.sum())
        used = self.limits.kv_tok // self.limits.block_tok - self.n_free
        facts = (
            n_tok - n_decode, n_decode, int(context.sum()), int(sampled.sum()), len(self.running),
            len(self.waiting), grants.n_preempted, used * self.limits.block_tok,
        )  # fmt: skip
        # A chunk wants no logits, a prompt's end and a decode one row.
        return Work(ids, Step(new_tok, context, sampled.astype(np.int64)), facts, sampled)

    def finish(self, work: Work) -> tuple[Ints, Ints]:
        """The step is done: (requests that gained tokens, those of them that are complete)."""
        gained = work.ids[work.sampled]
        self.known[gained] += 1
        done = gained[self.known[gained] - self.prompt[gained] >= self.wanted[gained]]
        if len(done):
            self.running = self.running[~np.isin(self.running, done)]
            for i in done.tolist():
                self._release(i)
        return gained, done


StepTable = namedtuple(
    "StepTable",
    "start_s seconds prefill_tok decode_tok context_tok n_sampled n_running n_waiting n_preempted kv_tok",
)
"""Every step, by column: its start and length, what it computed, and how full the engine was in it.

`context_tok` sums what all its requests hold after the step; `kv_tok` counts whole blocks.
"""


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
    steps: StepTable


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
    batch, due = Batch(requests, limits), [float(request.due_s) for request in requests]
    first, last = np.full(len(due), np.nan), np.full(len(due), np.nan)
    order = sorted(range(len(due)), key=due.__getitem__)
    n_first = len(order) if concurrency is None else concurrency
    # Requests arrive in this order also in a closed loop: each is sent no earlier than the one before it.
    arriving, later = deque(order[:n_first]), deque(order[n_first:])
    rows: list[tuple[float, ...]] = []
    work: Work | None = None  # the step that runs
    end_s = math.inf
    while arriving or work:
        now_s = min(end_s, due[arriving[0]] if arriving else math.inf)
        if work and end_s <= now_s:
            gained, done = batch.finish(work)
            first[gained[np.isnan(first[gained])]] = now_s
            last[gained] = now_s
            work, end_s = None, math.inf
            for _ in range(min(len(done), len(later))):
                i = later.popleft()
                due[i] = max(now_s + turnaround_s, due[i])
                if due[i] >= until_s:
                    later.clear()
                    break
                arriving.append(i)
        while arriving and due[arriving[0]] <= now_s:
            batch.arrive(arriving.popleft())
        if not (work or batch.idle) and (work := batch.schedule()):
            end_s = now_s + step_time(work.step)
            rows.append((now_s, end_s - now_s, *work.facts))
    sent = ~np.isnan(last)
    assert sent.all() or until_s < math.inf, "every request fits an empty cache, so each one ends"
    due_s, first, last = np.array(due)[sent], first[sent], last[sent]
    outputs = np.array([request.output_tok for request in requests])[sent]
    tpot_s = np.full(len(due_s), np.nan)
    np.divide(last - first, outputs - 1, out=tpot_s, where=outputs > 1)
    steps = StepTable(*(np.array(column) for column in zip(*rows, strict=True)))
    n_preempted = int(steps.n_preempted.sum())
    return Simulation(
        float(last.max() - due_s.min()), due_s, first - due_s, last - due_s, tpot_s, n_preempted, steps
    )
