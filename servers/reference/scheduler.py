"""Continuous batching: which sequences compute how many tokens in the next step. No I/O, no clock."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from servers.reference.kv import BlockPool
from workloads.request import GREEDY, Sampling


@dataclass(eq=False, slots=True)
class Sequence:
    """One request on its way: `ids` are prompt and output so far, of which `n_computed` are in the KV cache.

    `sink` is whoever waits for its tokens; the scheduler only carries it.
    """

    ids: list[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    sampling: Sampling = GREEDY
    rng: np.random.Generator | None = None
    sink: Any = None
    arrived_ns: int = 0
    n_prompt: int = 0
    n_computed: int = 0
    table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.ids)

    @property
    def n_output(self) -> int:
        return len(self.ids) - self.n_prompt


@dataclass(frozen=True, slots=True)
class Share:
    """What one sequence computes in a step: `n` tokens from `start`; `decode` once its prompt is done.

    `samples` says that the step reaches the sequence's last token, so that a new one follows.
    """

    sequence: Sequence
    start: int
    n: int
    decode: bool
    samples: bool


class Scheduler:
    """First come, first served, under a token budget a step; when blocks run out the youngest is preempted.

    A preempted sequence loses its blocks, waits at the head of the queue, and is computed again.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.n_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Forget a finished or aborted sequence and free its blocks; False where it was already gone."""
        queue = self.running if sequence in self.running else self.waiting
        if sequence not in queue:
            return False
        queue.remove(sequence)
        self.pool.give_back(sequence.table)
        return True

    def schedule(self) -> list[Share]:
        """The next step: running sequences first, oldest first, then as many waiting ones as fit."""
        shares: list[Share] = []
        budget, n_preempted = self.max_num_batched_tokens, self.n_preemptions
        while budget and len(shares) < len(self.running):
            sequence = self.running[len(shares)]
            n = min(len(sequence.ids) - sequence.n_computed, budget)
            if self._make_room(sequence, sequence.n_computed + n):
                shares.append(self._share(sequence, n))
                budget -= n
        if self.n_preemptions > n_preempted:
            return shares
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            # Room for the whole prompt at once: only decoding can then run out of blocks.
            if not self._grow(self.waiting[0], len(self.waiting[0].ids)):
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            n = min(len(sequence.ids) - sequence.n_computed, budget)
            shares.append(self._share(sequence, n))
            budget -= n
        return shares

    def _share(self, sequence: Sequence, n: int) -> Share:
        start = sequence.n_computed
        decode = start >= sequence.n_prompt and start + 1 == len(sequence.ids)
        return Share(sequence, start, n, decode, start + n == len(sequence.ids))

    def _grow(self, sequence: Sequence, n_tok: int) -> bool:
        blocks = self.pool.take(max(0, -(-n_tok // self.block_size) - len(sequence.table)))
        if blocks is None:
            return False
        sequence.table.extend(blocks)
        return True

    def _make_room(self, sequence: Sequence, n_tok: int) -> bool:
        """Grow, preempting the youngest while blocks lack; False where that was the sequence itself."""
        while not self._grow(sequence, n_tok):
            victim = self.running.pop()
            self.pool.give_back(victim.table)
            victim.n_computed = 0
            self.waiting.appendleft(victim)
            self.n_preemptions += 1
            if victim is sequence:
                return False
        return True
