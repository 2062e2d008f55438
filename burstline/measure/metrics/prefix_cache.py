"""Prefix-cache hits that a plan explains: in a cache of any size, and in the engine's own blocks."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.accounting import NO_CACHE_COUNT
from burstline.measure.metrics.throughput import prompt_tok
from burstline.measure.record.columns import Columns, Floats
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.record import Outcome
from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import CacheSize, PrefixCache
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.stats.estimates import Absent, Estimate, Figure, measured
from burstline.measure.stats.figure import known
from burstline.servers.identity import Identity
from burstline.servers.registry import ENGINES
from burstline.workloads.plan import MOST_IDS, chain_of
from burstline.workloads.prompts import N_SALT_TOK

NO_CHAINS: Final = "the blocks of the prompts are unknown: they are text, or too many"
NO_CAPACITY: Final = "the server does not report the size of its KV cache, or has several"
RESTARTED: Final = "the engine restarted during the load: its counters began again"
SIZES: Final = (0.25, 0.5, 1, 2, 4)
"""The sizes of the miss-ratio curve, as multiples of the engine's own cache."""
MOST_BLOCKS: Final = 2_000_000
"""More blocks than these would take the report minutes."""
SAME_STEP_S: Final = 0.001
"""First tokens closer than this came out of one step of the engine, where no shortest step is known."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What one request does to the cache.

    `chain` names the whole blocks of its prompt and of its reply but the last token, whose keys and values
    are never computed. It takes the blocks of its prompt at `admitted_s`, which others find from `ready_s`,
    and one more at each of `grown_s`; at `closed_s` all may be evicted. Seconds, in this order.
    """

    chain: Sequence[int]
    n_prompt_tok: int
    admitted_s: float
    ready_s: float
    closed_s: float
    grown_s: Sequence[float] = ()


class _BlockCache:
    """An engine's blocks: running requests hold theirs, the least recently used of the others are evicted.

    Of a request that ended, the last block goes first. Out of blocks, the youngest request is preempted: it
    frees its blocks, and takes them again when there is room. `names_early`: a prompt's blocks are found as
    soon as it is admitted.
    """

    def __init__(self, uses: Sequence[CacheUse], n_blocks: int, block_tok: int, *, names_early: bool) -> None:
        self._uses, self._n_blocks, self._block_tok = uses, n_blocks, block_tok
        self._names_early = names_early
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._users: dict[int, int] = {}
        self._n_held = 0
        self._running: dict[int, list[int | None]] = {}  # in the order of admission; None: not to be found
        self._preempted: list[int] = []
        self._n_named = [0] * len(uses)
        self._n_wanted = [-(-use.n_prompt_tok // block_tok) for use in uses]
        self.n_found: list[int | None] = [None] * len(uses)
        """How many blocks each request found when it was first admitted."""

    def admit(self, k: int) -> None:
        """Give a request the blocks that it lacks; without room the youngest others make some."""
        if k in self._running:
            return
        found, n_new = self._lookup(k)
        for block in found:
            self._idle.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        self._hold(n_new)
        while self._n_held > self._n_blocks and self._running:
            self._preempt()
        self._running[k] = [*found, *[None] * (self._n_wanted[k] - len(found))]
        self._n_named[k] = len(found)
        if self.n_found[k] is None:
            self.n_found[k] = len(found)
            if self._names_early:
                self.name(k, self._uses[k].n_prompt_tok // self._block_tok)
        else:
            self._preempted.remove(k)
            self.name(k, self._n_wanted[k] - 1)

    def name(self, k: int, n: int) -> None:
        """Let others find the first `n` blocks; of equal ones only the first is found."""
        held, chain = self._running[k], self._uses[k].chain
        for at in range(self._n_named[k], n):
            if chain[at] not in self._users and chain[at] not in self._idle:
                held[at], self._users[chain[at]] = chain[at], 1
        self._n_named[k] = max(self._n_named[k], n)

    def grow(self, k: int) -> None:
        """Give a request whose tokens fill its blocks another one."""
        self.admit(k)
        self.name(k, self._n_wanted[k])
        self._n_wanted[k] += 1
        while k in self._running and self._n_held >= self._n_blocks:
            self._preempt()
        if k in self._running:
            self._running[k].append(None)
            self._hold(1)

    def close(self, k: int) -> None:
        """Free a request's blocks, and admit the preempted ones again that have room."""
        self.admit(k)
        self.name(k, len(self._uses[k].chain))
        self._free(k)
        while self._preempted and self._n_held + self._lookup(self._preempted[-1])[1] <= self._n_blocks:
            self.admit(self._preempted[-1])

    def _lookup(self, k: int) -> tuple[list[int], int]:
        """The blocks that a request finds, and how many more would be held with all of its blocks."""
        chain = self._uses[k].chain[: self._n_wanted[k] - 1]  # the last token is always computed
        found = list(takewhile(lambda block: block in self._users or block in self._idle, chain))
        return found, self._n_wanted[k] - sum(block in self._users for block in found)

    def _preempt(self) -> None:
        self._preempted.append(next(reversed(self._running)))
        self._free(self._preempted[-1])

    def _free(self, k: int) -> None:
        for block in reversed(self._running.pop(k)):
            if block is not None:
                self._users[block] -= 1
                if self._users[block]:
                    continue
                del self._users[block]
                self._idle[block] = None
            self._n_held -= 1
        self._hold(0)

    def _hold(self, n: int) -> None:
        self._n_held += n
        while self._idle and len(self._idle) > self._n_blocks - self._n_held:
            self._idle.popitem(last=False)


def simulate(uses: Sequence[CacheUse], n_blocks: int, block_tok: int, *, names_early: bool) -> list[int]:
    """Prompt tokens of each request that a cache of `n_blocks` serves, with admission as observed."""
    cache = _BlockCache(uses, n_blocks, block_tok, names_early=names_early)
    growing, ready, closing, admitted = range(4)  # in this order where all come at the same time
    events = sorted(
        event
        for k, use in enumerate(uses)
        for event in (
            (use.admitted_s, admitted, k),
            (use.ready_s, ready, k),
            (use.closed_s, closing, k),
            *((at_s, growing, k) for at_s in use.grown_s),
        )
    )
    for _, kind, k in events:
        if kind == growing:
            cache.grow(k)
        elif kind == closing:
            cache.close(k)
        elif kind == ready:
            cache.admit(k)
            cache.name(k, uses[k].n_prompt_tok // block_tok)
        elif cache.n_found[k] is None:
            cache.admit(k)
    return [(n or 0) * block_tok for n in cache.n_found]


def stack_distances(uses: Sequence[CacheUse], block_tok: int) -> list[list[int]]:
    """Of each prompt's blocks that an earlier request had: the smallest cache, in blocks, that holds them.

    As if each request ended before the next began. Every earlier block of a prompt was used after its
    successors, so that what one request used last is always the end of its chain: one count a request.
    """
    last_user: dict[int, int] = {}
    tree = [0] * (len(uses) + 1)  # a Fenwick tree: blocks last used by each request

    def add(k: int, n: int) -> None:
        k += 1
        while k < len(tree):
            tree[k] += n
            k += k & -k

    distances: list[list[int]] = [[] for _ in uses]
    for now, use in enumerate(uses):
        known = [user for block in use.chain if (user := last_user.get(block)) is not None]
        n_lookups, moved = (use.n_prompt_tok - 1) // block_tok, 0
        for user, same in groupby(known):
            n_same, n_later, k = len(list(same)), len(last_user) - moved, user + 1
            while k:  # of all, those that this user or an earlier one used last
                n_later -= tree[k]
                k -= k & -k
            n_looked_up = min(n_same, max(0, n_lookups - moved))
            first = n_later + moved + 1
            distances[now] += range(first, first + n_looked_up)
            add(user, -n_same)
            moved += n_same
        add(now, len(use.chain))
        last_user.update(dict.fromkeys(use.chain, now))
    return distances


def uses_of(run: Run) -> tuple[CacheUse, ...]:
    """What each request of a run did to the cache, in the order of sending; warm-up and priming come first.

    Empty where the plan shares nothing, and where it is not known: prompts are text, or too many to be read.
    """
    c, block_tok = run.columns, run.manifest.block_tok
    load, n_tok = run.manifest.load, int(c.planned_prompt_tok.sum())
    many = n_tok > MOST_IDS or n_tok // block_tok > MOST_BLOCKS
    if (load and load.expected_cached_fraction == 0) or run.plan_columns("index") is None or many:
        return ()
    stages = [request for stage in run.plan.stages for request in stage.requests]
    starts = np.arange(-len(stages), 0.0)  # one after another: they are drained before the load
    sent_s, ready_s, closed_s = (
        np.concatenate([starts + part, column])
        for part, column in (
            (0.0, _admitted_s(c)),
            (0.1, c.first_s),
            (0.2, c.over_s),
        )
    )
    output_tok = np.where(np.isnan(c.output_tok), c.planned_output_tok, c.output_tok)
    n_output_tok = [*(request.n_output_tok for request in stages), *output_tok.astype(int).tolist()]
    contents: dict[int, tuple[Ids, Ids]] = {}  # the prompt and the reply of each turn
    uses = []
    for k, request in enumerate((*stages, *run.plan.requests)):
        if request.prompt_ids is None:
            return ()
        after = request.turn.after if request.turn else ()
        ids = np.array(request.prompt_ids, dtype=np.int64)
        if run.manifest.asked.salt and not request.verbatim and not after:
            # The salt makes the first ids those of its family; no real id is negative.
            ids[:N_SALT_TOK] = -1 - (request.index if request.family is None else request.family)
        if after:
            ids = np.concatenate([*contents[after[0]], ids])
        reply = np.arange(n_output_tok[k], dtype=np.int64) + (request.index + 1 << 32)
        if request.turn:
            contents[request.index] = ids, reply
        if np.isfinite(ready_s[k]):
            chain = chain_of(np.concatenate([ids, reply[:-1]]), block_tok)
            admitted_s = min(sent_s[k], ready_s[k])
            closed = max(closed_s[k], ready_s[k]) if np.isfinite(closed_s[k]) else np.inf
            tok_s = np.full(len(reply), closed)
            if k >= len(stages):
                events = slice(*c.starts[k - len(stages) :][:2])
                arrived_s = np.repeat(c.event_s[events], c.event_n[events])[: len(reply)]
                tok_s[: len(arrived_s)] = arrived_s
            grown_s = tok_s[:-1][-len(ids) % block_tok :: block_tok].tolist()
            uses.append(CacheUse(chain, len(ids), admitted_s, ready_s[k], closed, grown_s))
    return tuple(sorted(uses, key=lambda use: use.admitted_s))


def _admitted_s(c: Columns) -> Floats:
    """When each request's prefill began: by the server's own queue time, else by the step before.

    Whatever step made its first token began when the step before had ended, which made tokens of others.
    """
    steps_s = np.diff(c.event_s)[c.follows[1:]]
    step_s = float(np.median(steps_s)) / 2 if len(steps_s) else SAME_STEP_S
    ends_s = np.concatenate([[-np.inf], np.sort(c.event_s)])
    begun_s = ends_s[np.searchsorted(ends_s[1:], c.first_s - step_s)]
    by_server = c.sent_s + c.server_queue_s
    admitted_s: Floats = np.where(np.isnan(by_server), np.fmax(c.sent_s, begun_s), by_server)
    return admitted_s


def prefix_cache(
    c: Columns, manifest: Manifest, watched: Telemetry, uses: Sequence[CacheUse]
) -> PrefixCache | None:
    """Hits as expected and as counted, in prompt tokens; None where nothing is shared and nothing counted."""
    identity = manifest.identity or Identity(manifest.engine)
    c = c.without(Outcome.NOT_SENT)
    replied = ~np.isnan(c.cached_tok)
    cached_tok = float(c.cached_tok[replied].sum()) if replied.any() else None
    replied_tok = measured(cached_tok, "tok", NO_CACHE_COUNT)
    counted_tok = watched.grown("engine", "prefix_hit_tokens", "tok")
    restarted_s = watched.restarted("engine", "prefix_hit_tokens", "prompt_tokens", "generation_tokens")
    if isinstance(restarted_s, Estimate):
        counted_tok = Absent(RESTARTED)
    load, block_tok = [use.admitted_s >= 0 for use in uses], manifest.block_tok
    total_tok = float(np.nansum(prompt_tok(c)))
    if isinstance(replied_tok, Absent):  # of the same requests as its hits: the server's other clients too
        total_tok = known(watched.grown("engine", "prompt_tokens", "tok")) or total_tok
    if uses:
        rows = zip(stack_distances(uses, block_tok), load, strict=True)
        distances = np.array([distance for row, counts in rows if counts for distance in row], dtype=np.int64)
        infinite_tok = measured(float(len(distances) * block_tok), "tok", "")
    else:
        share = manifest.load.expected_cached_fraction if manifest.load else None
        infinite_tok = measured(None if share is None else share * total_tok, "tok", NO_CHAINS)
    served_tok = counted_tok if isinstance(replied_tok, Absent) else replied_tok
    if not known(infinite_tok) and isinstance(served_tok, Absent):
        return None
    simulated_tok: Figure = Absent(NO_CAPACITY if uses else NO_CHAINS)
    if known(infinite_tok) == 0:
        simulated_tok = infinite_tok
    by_size: tuple[CacheSize, ...] = ()
    if uses and identity.kv_tok and identity.kv_block_tok and identity.data_parallel_size in (None, 1):
        n_blocks = identity.kv_tok // block_tok
        names_early = manifest.engine in ENGINES and ENGINES[manifest.engine].names_early
        hit_tok = simulate(uses, n_blocks, block_tok, names_early=names_early)
        simulated_tok = measured(
            float(sum(hit for hit, counts in zip(hit_tok, load, strict=True) if counts)), "tok", ""
        )
        by_size = tuple(
            CacheSize(n, measured(float((distances <= n).sum() * block_tok), "tok", ""))
            for n in (int(n_blocks * size) for size in SIZES)
        )
    unexplained_tok = served_tok if isinstance(served_tok, Absent) else simulated_tok
    if isinstance(served_tok, Estimate) and isinstance(simulated_tok, Estimate):
        unexplained_tok = measured(served_tok.point - simulated_tok.point, "tok", "")
    return PrefixCache(
        prompt_tok=measured(total_tok, "tok", ""),
        infinite_tok=infinite_tok,
        simulated_tok=simulated_tok,
        counted_tok=counted_tok,
        replied_tok=replied_tok,
        unexplained_tok=unexplained_tok,
        restarted_s=restarted_s,
        by_size=by_size,
    )
