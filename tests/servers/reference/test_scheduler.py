"""Blocks are conserved, the budget holds, and everything that was asked for ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.servers.reference.scheduler import BlockPool, Scheduler, Sequence, StepShare

BLOCK = 4


def check(scheduler: Scheduler, shares: list[StepShare]) -> None:
    """What must hold after every call of schedule()."""
    tables = [sequence.table for sequence in scheduler.running]
    assert all(len(table) == len(set(table)) for table in tables)
    held = {block for table in tables for block in table}  # prompts that begin alike share blocks
    assert len(held) + scheduler.pool.n_free == scheduler.pool.n_blocks
    assert all(not sequence.table and not sequence.n_computed for sequence in scheduler.waiting)
    assert sum(share.n for share in shares) <= scheduler.max_num_batched_tokens
    assert len(scheduler.running) <= scheduler.max_num_seqs
    assert len({id(share.sequence) for share in shares}) == len(shares)
    for share in shares:
        assert share.n > 0
        assert share.sequence in scheduler.running
        assert len(share.sequence.table) * BLOCK >= share.start + share.n


def advance(scheduler: Scheduler, shares: list[StepShare]) -> None:
    """Do as the engine does, without a model: computed, one token more, the finished leave."""
    for share in shares:
        scheduler.computed(share.sequence, share.n)
        if share.samples:
            share.sequence.ids.append(0)
            if share.sequence.n_output == share.sequence.max_tokens:
                assert scheduler.remove(share.sequence)


@given(
    asks=st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16)), min_size=1, max_size=20),
    n_blocks=st.integers(10, 40),
    seqs=st.integers(1, 8),
    budget=st.integers(1, 40),
    aborts=st.sets(st.integers(0, 60)),
)
def test_blocks_are_conserved_until_every_sequence_has_ended(
    asks: list[tuple[int, int]], n_blocks: int, seqs: int, budget: int, aborts: set[int]
) -> None:
    scheduler = Scheduler(BlockPool(n_blocks), BLOCK, seqs, budget)
    every = [Sequence([1] * n, max_tokens=m) for n, m in asks]
    for sequence in every:
        scheduler.add(sequence)
    n_steps = 0
    while scheduler.running or scheduler.waiting:
        shares = scheduler.schedule()
        check(scheduler, shares)
        assert shares, "a step that computes nothing never ends"
        advance(scheduler, shares)
        if n_steps in aborts:
            scheduler.remove(every[n_steps % len(every)])
        n_steps += 1
        assert n_steps < 20_000
    assert scheduler.pool.n_free == n_blocks
    if not aborts:
        assert all(sequence.n_output == sequence.max_tokens for sequence in every)


def test_running_sequences_come_before_waiting_ones_and_the_rest_of_the_budget_is_a_chunk() -> None:
    scheduler = Scheduler(BlockPool(40), BLOCK, 8, 10)
    first, second = Sequence([1] * 6, 5), Sequence([1] * 20, 5)
    scheduler.add(first)
    scheduler.add(second)
    steps = []
    for _ in range(3):
        shares = scheduler.schedule()
        steps.append([(share.sequence is first, share.start, share.n, share.decode) for share in shares])
        advance(scheduler, shares)
    assert steps == [
        [(True, 0, 6, False), (False, 0, 4, False)],
        [(True, 6, 1, True), (False, 4, 9, False)],
        [(True, 7, 1, True), (False, 13, 7, False)],
    ]


def test_the_youngest_is_preempted_and_waits_at_the_head() -> None:
    scheduler = Scheduler(BlockPool(4), BLOCK, 8, 100)
    old, young, later = Sequence([1] * 8, 8), Sequence([1] * 8, 8), Sequence([1], 1)
    for sequence in (old, young, later):
        scheduler.add(sequence)
    advance(scheduler, scheduler.schedule())
    shares = scheduler.schedule()
    assert [share.sequence for share in shares] == [old]
    assert list(scheduler.waiting) == [young, later]
    assert (young.n_computed, young.table, scheduler.n_preemptions) == (0, [], 1)


def test_removing_twice_frees_once() -> None:
    scheduler = Scheduler(BlockPool(4), BLOCK, 8, 100)
    sequence = Sequence([1] * 8, 8)
    scheduler.add(sequence)
    scheduler.schedule()
    assert scheduler.remove(sequence)
    assert not scheduler.remove(sequence)
    assert scheduler.pool.n_free == 4


def test_taking_more_blocks_than_are_free_takes_none() -> None:
    pool = BlockPool(3)
    taken = pool.take(2)
    assert taken is not None
    assert pool.take(2) is None
    assert pool.n_free == 1
    pool.give_back(taken)
    pool.give_back(taken)
    assert pool.n_free == 3


@pytest.mark.parametrize(("n_tok", "n_blocks"), [(4, 1), (5, 2)])
def test_a_prompt_takes_whole_blocks(n_tok: int, n_blocks: int) -> None:
    scheduler = Scheduler(BlockPool(8), BLOCK, 8, 2)
    sequence = Sequence([1] * n_tok, 1)
    scheduler.add(sequence)
    scheduler.schedule()
    assert len(sequence.table) == n_blocks
