"""Continuous batching: who computes how many tokens in the next step, in which blocks. No I/O, no clock."""

from collections import OrderedDict, deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burstline.workloads.request import GREEDY, Sampling


class BlockPool:
    """Which blocks are in use, by how many sequences, and which free ones still hold a known prefix.

    Its content is named by the hash of its tokens and of all that stands before them. A free block keeps
    its content until it is needed for something else; the one free for longest goes first (as in vLLM).
    """

    def __init__(self, n_blocks: int, *, caches: bool = True) -> None:
        self.n_blocks, self.caches = n_blocks, caches
        self._blank = list(reversed(range(n_blocks)))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._n_users: dict[int, int] = {}
        self._block_of: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}

    @property
    def n_free(self) -> int:
        return len(self._blank) + len(self._kept)

    def take(self, n: int) -> list[int] | None:
        """`n` blocks of no content, or None (and nothing taken) where fewer are free."""
        if n > self.n_free:
            return None
        blocks = [self._blank.pop() for _ in range(min(n, len(self._blank)))]
        while len(blocks) < n:
            block, _ = self._kept.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
            blocks.append(block)
        self._n_users.update(dict.fromkeys(blocks, 1))
        return blocks

    def share(self, hashes: Rows[int]) -> list[int]:
        """The blocks that hold the longest known beginning of a chain of hashes, now used once more."""
        blocks = []
        for known in hashes:
            block = self._block_of.get(known)
            if block is None:
                break
            self._kept.pop(block, None)
            self._n_users[block] = self._n_users.get(block, 0) + 1
            blocks.append(block)
        return blocks

    def name(self, block: int, content: int) -> None:
        """Have a block that was computed found by its content; where another has the same, that one stays."""
        if self.caches and content not in self._block_of and block not in self._hash_of:
            self._block_of[content], self._hash_of[block] = block, content

    def give_back(self, blocks: list[int]) -> None:
        """One user less of each; the list is emptied, so that it cannot be freed twice.

        The last block goes first where room is needed: a prefix is of use without its end, not without its
        beginning.
        """
        for block in reversed(blocks):
            self._n_users[block] -= 1
            if self._n_users[block]:
                continue
            del self._n_users[block]
            if block in self._hash_of:
                self._kept[block] = None
            else:
                self._blank.append(block)
        blocks.clear()


@dataclass(eq=False, slots=True)
class Sequence:
    """One request on its way: `ids` are prompt and output so far, of which `n_computed` are in the KV cache.

    `n_cached` prompt tokens were found in the cache when it was first admitted. `hashes` name the contents of
    its whole blocks. `sink` waits for its tokens; the scheduler only carries it.
    """

    ids: list[int]
    max_tokens: int
    ignore_eos: bool = False
    sampling: Sampling = GREEDY
    rng: np.random.Generator | None = None
    sink: Any = None
    arrived_ns: int = 0
    n_prompt: int = field(init=False)
    n_computed: int = 0
    n_cached: int | None = None
    hashes: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.ids)

    @property
    def n_output(self) -> int:
        return len(self.ids) - self.n_prompt


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one sequence computes in a step: `n` tokens from `start`; `decode` once its prompt is done.

    `samples` says that the step reaches the sequence's last token, so that a new one follows.
    """

    sequence: Sequence
    start: int
    n: int
    decode: bool
    samples: bool


class Scheduler:
    """First come, first served, under a token budget a step; out of blocks, the youngest is preempted."""

    def __init__(
        self, pool: BlockPool, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.pool, self.block_size = pool, block_size
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.n_preemptions = self.n_queried_tok = self.n_hit_tok = 0

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

    def schedule(self) -> list[StepShare]:
        """The next step: running sequences first, oldest first, then as many waiting ones as fit."""
        shares: list[StepShare] = []
        budget, n_preempted = self.max_num_batched_tokens, self.n_preemptions
        while budget and len(shares) < len(self.running):
            if not self._has_room(self.running[len(shares)]):
                # The youngest loses its blocks, waits at the head of the queue, and is computed again.
                youngest = self.running.pop()
                self.pool.give_back(youngest.table)
                youngest.n_computed = 0
                self.waiting.appendleft(youngest)
                self.n_preemptions += 1
                continue
            shares.append(_share(self.running[len(shares)], budget))
            budget -= shares[-1].n
        while budget and self.waiting and len(self.running) < self.max_num_seqs:
            # Room for the whole prompt at once: only decoding can then run out of blocks.
            if self.n_preemptions > n_preempted or not self._admitted(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
            shares.append(_share(self.running[-1], budget))
            budget -= shares[-1].n
        return shares

    def _admitted(self, sequence: Sequence) -> bool:
        """Give a new sequence the blocks that the cache has of it, and room for the rest; or nothing at all.

        The last token is always computed: the next one follows from it.
        """
        if self.pool.caches:
            n_blocks = (len(sequence.ids) - 1) // self.block_size
            sequence.table.extend(self.pool.share(self._hashes(sequence, n_blocks)))
        n_found = len(sequence.table) * self.block_size
        if not self._has_room(sequence):
            self.pool.give_back(sequence.table)
            return False
        sequence.n_computed = n_found
        if self.pool.caches and sequence.n_cached is None:
            sequence.n_cached = n_found
            self.n_queried_tok += sequence.n_prompt
            self.n_hit_tok += n_found
        return True

    def computed(self, sequence: Sequence, n: int) -> None:
        """`n` more of its tokens are in the cache: blocks that are whole by that can be shared."""
        before = sequence.n_computed // self.block_size
        sequence.n_computed += n
        after = sequence.n_computed // self.block_size
        if self.pool.caches and after > before:
            hashes = self._hashes(sequence, after)
            for k in range(before, after):
                self.pool.name(sequence.table[k], hashes[k])

    def _hashes(self, sequence: Sequence, n_blocks: int) -> list[int]:
        """The contents of its first blocks, each named by its tokens and the block before it."""
        hashes, size = sequence.hashes, self.block_size
        while len(hashes) < n_blocks:
            at = len(hashes) * size
            hashes.append(hash((hashes[-1] if hashes else 0, *sequence.ids[at : at + size])))
        return hashes[:n_blocks]

    def _has_room(self, sequence: Sequence) -> bool:
        """Give it the blocks it lacks for all its ids; False, and none given, where too few are free."""
        n_blocks = -(-len(sequence.ids) // self.block_size)
        blocks = self.pool.take(max(0, n_blocks - len(sequence.table)))
        sequence.table.extend(blocks or ())
        return blocks is not None


def _share(sequence: Sequence, budget: int) -> StepShare:
    start, n_ids = sequence.n_computed, len(sequence.ids)
    n = min(n_ids - start, budget)
    decode = start >= sequence.n_prompt and start + 1 == n_ids
    return StepShare(sequence, start, n, decode, samples=start + n == n_ids)
