"""The simulator: nothing lost, nothing over capacity, vLLM's rules."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstline.errors import RooflineError
from burstline.roofline.predict.simulate import Asked, Batch, Limits, simulate
from burstline.servers.reference.scheduler import BlockPool, Scheduler, Sequence


def tick(step):
    """A clock on which every step takes a second and a bit for each token."""
    return 1.0 + 1e-3 * step.n_tok


asked = st.builds(
    Asked, st.floats(0, 20), st.integers(1, 60), st.integers(1, 30)
)  # at most 90 tokens: fits every cache below
limits = st.builds(
    Limits,
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(60, 200),
    kv_tok=st.integers(96, 400),
    chunked_prefill=st.booleans(),
    reserve_output=st.booleans(),
    whole_prompt=st.booleans(),
    mixed_steps=st.booleans(),
    ahead=st.booleans(),
)


@given(st.lists(asked, min_size=1, max_size=12), limits)
@settings(max_examples=150, deadline=None)
def test_every_token_is_computed_once_beyond_what_evictions_repeat_and_the_cache_never_overflows(
    requests, bounds
):
    result = simulate(requests, bounds, tick)
    steps = result.steps
    assert steps.n_sampled.sum() == sum(request.output_tok for request in requests)
    needed = sum(request.prompt_tok + request.output_tok - 1 for request in requests)
    computed = steps.prefill_tok.sum() + steps.decode_tok.sum()
    assert computed == needed if result.n_preemptions == 0 else computed > needed
    assert (steps.kv_tok <= bounds.kv_tok).all()
    assert (steps.context_tok <= steps.kv_tok).all()
    assert (steps.n_running <= bounds.max_num_seqs).all()
    if bounds.chunked_prefill:
        assert (steps.prefill_tok + steps.decode_tok <= bounds.max_num_batched_tokens).all()
    if bounds.reserve_output:
        assert result.n_preemptions == 0
    assert (result.ttft_s > 0).all()
    assert (result.e2e_s >= result.ttft_s).all()


def test_a_burst_that_fits_takes_its_prefill_and_one_step_a_token():
    result = simulate([Asked(0, 10, 5)] * 4, Limits(8, 1000, 10_000), lambda step: 1.0)
    assert result.makespan_s == 5
    assert result.ttft_s.tolist() == [1] * 4
    assert result.tpot_s.tolist() == [1] * 4


def test_a_prompt_longer_than_the_budget_is_cut_into_chunks_that_decodes_share():
    result = simulate([Asked(0, 4, 20), Asked(0.5, 100, 2)], Limits(8, 40, 1000), lambda step: 1.0)
    chunks = result.steps.prefill_tok[result.steps.prefill_tok > 0].tolist()
    assert chunks == [4, 39, 39, 22]


def test_without_chunked_prefill_decodes_stand_still_while_a_prompt_is_computed():
    result = simulate(
        [Asked(0, 4, 5), Asked(1.5, 30, 2)],
        Limits(8, 40, 1000, chunked_prefill=False, mixed_steps=False),
        lambda step: 1.0,
    )
    both = (result.steps.prefill_tok > 0) & (result.steps.decode_tok > 0)
    assert not both.any()


def test_the_youngest_is_evicted_and_computed_again_from_its_start():
    result = simulate([Asked(0, 16, 30), Asked(0, 16, 30)], Limits(8, 100, 64, whole_prompt=False), tick)
    assert result.n_preemptions > 0
    assert result.e2e_s[0] < result.e2e_s[1]


def test_fewer_cache_tokens_never_make_a_burst_faster():
    spans = [
        simulate([Asked(0, 32, 32)] * 20, Limits(64, 512, kv), tick).makespan_s for kv in (2000, 400, 80)
    ]
    assert spans == sorted(spans)
    assert spans[0] < spans[-1]


def test_an_idle_engine_waits_for_the_next_arrival():
    result = simulate([Asked(0, 4, 1), Asked(100, 4, 1)], Limits(4, 100, 100), lambda step: 1.0)
    assert result.makespan_s == 101
    assert result.e2e_s.tolist() == [1, 1]
    assert np.isnan(result.tpot_s).all()


@pytest.mark.parametrize(
    ("requests", "bounds", "says"),
    [
        ([], Limits(1, 1, 100), "at least one"),
        ([Asked(0, 90, 20)], Limits(1, 100, 96), "never fits"),
        ([Asked(0, 0, 1)], Limits(1, 100, 96), "a token or more"),
        ([Asked(0, 50, 1)], Limits(1, 40, 96, chunked_prefill=False), "exceeds"),
        ([Asked(0, 5, 1)], Limits(0, 40, 96), "run nothing"),
    ],
)
def test_what_could_never_run_is_refused(requests, bounds, says):
    with pytest.raises(RooflineError, match=says):
        simulate(requests, bounds, tick)


def test_a_closed_loop_sends_the_next_request_when_one_ends():
    result = simulate([Asked(0, 10, 5)] * 6, Limits(8, 1000, 10_000), lambda step: 1.0, concurrency=2)
    assert result.due_s.tolist() == [0, 0, 5, 5, 10, 10]
    assert result.ttft_s.tolist() == [1] * 6
    assert result.makespan_s == 15
    assert (result.steps.n_running <= 2).all()


def test_a_client_that_needs_time_to_send_the_next_request_waits_for_a_step_that_has_begun():
    requests = [Asked(0, 10, 5), Asked(0, 10, 9), Asked(0, 10, 5)]
    result = simulate(requests, Limits(8, 1000, 10_000), lambda step: 1.0, concurrency=2, turnaround_s=0.01)
    assert result.due_s.tolist() == [0, 0, 5.01]
    assert result.ttft_s.tolist() == pytest.approx([1, 1, 1.99])


def test_an_engine_that_schedules_ahead_lets_an_arrival_miss_the_next_step_too_unless_it_idles():
    requests = [Asked(0, 10, 9), Asked(1.5, 10, 2), Asked(20.5, 10, 2)]
    ahead = Limits(8, 1000, 10_000, ahead=True)
    assert simulate(requests, ahead, lambda step: 1.0).ttft_s.tolist() == [1, 2.5, 1]
    assert simulate(requests, replace(ahead, ahead=False), lambda step: 1.0).ttft_s.tolist() == [1, 1.5, 1]


def test_prompts_that_are_held_back_are_computed_together_unless_nothing_decodes():
    requests = [Asked(0, 10, 20), Asked(5.5, 10, 2), Asked(7.5, 10, 2)]
    held = Limits(8, 1000, 10_000, hold_steps=3)
    assert simulate(requests, held, lambda step: 1.0).ttft_s.tolist() == [1, 4.5, 2.5]
    assert simulate(requests[:1], held, lambda step: 1.0).makespan_s == 20


def test_equal_streams_stay_together_where_prompts_stop_decodes_and_spread_where_they_do_not():
    """As SGLang 0.5.23 on a CPU: 16 streams, two prompts a step, without and with --enable-mixed-chunk."""

    def spread_s(*, mixed):
        bounds = Limits(16, 64, 10_000, chunked_prefill=False, mixed_steps=mixed)
        result = simulate([Asked(0, 24, 40)] * 64, bounds, tick, concurrency=16, turnaround_s=0.01)
        return np.ptp(result.due_s[-16:])

    assert spread_s(mixed=False) == 0
    assert spread_s(mixed=True) > 5


def test_an_open_loop_below_the_rate_of_service_never_queues():
    arrivals = [Asked(10.0 * i, 10, 5) for i in range(5)]
    result = simulate(arrivals, Limits(8, 1000, 10_000), lambda step: 1.0)
    assert result.e2e_s.tolist() == [5] * 5


def test_a_cached_prefix_is_not_computed_but_takes_its_blocks():
    asked = [Asked(0, 100, 2, cached_tok=96), Asked(0, 100, 2)]
    result = simulate(asked, Limits(8, 1000, 10_000), tick)
    assert result.steps.prefill_tok.tolist() == [104, 0]
    assert result.steps.kv_tok[0] == 2 * 112
    assert simulate([Asked(0, 16, 1, cached_tok=16)], Limits(1, 100, 100), tick).steps.prefill_tok.sum() == 1


def test_whole_prompts_may_be_computed_beside_decodes():
    result = simulate(
        [Asked(0, 30, 9), Asked(0.5, 35, 2)], Limits(8, 40, 1000, chunked_prefill=False), lambda step: 1.0
    )
    assert 35 in result.steps.prefill_tok.tolist()
    assert ((result.steps.prefill_tok == 35) & (result.steps.decode_tok == 1)).any()


def test_prompts_apart_from_decodes_go_first_in_chunks():
    result = simulate(
        [Asked(0, 4, 9), Asked(1.5, 100, 2)], Limits(8, 40, 1000, mixed_steps=False), lambda step: 1.0
    )
    steps = result.steps
    assert not ((steps.prefill_tok > 0) & (steps.decode_tok > 0)).any()
    assert steps.prefill_tok[steps.prefill_tok > 0].tolist() == [4, 40, 40, 20]


@pytest.mark.parametrize(("n_blocks", "budget"), [(400, 64), (400, 48), (40, 64), (24, 200)])
def test_the_embedded_engines_scheduler_gives_the_same_steps(n_blocks, budget):
    """Step by step: who computes how many tokens. With little cache both evict the same requests."""
    rng = np.random.default_rng(3)
    requests = [Asked(0.0, int(p), int(o)) for p, o in zip(*rng.integers(4, 40, (2, 24)), strict=True)]
    ours = Batch(requests, Limits(6, budget, n_blocks * 16))
    theirs = Scheduler(BlockPool(n_blocks, caches=False), 16, 6, budget)
    sequences = [Sequence(list(range(r.prompt_tok)), r.output_tok) for r in requests]
    for i, sequence in enumerate(sequences):
        ours.arrive(i)
        theirs.add(sequence)
    n_steps = 0
    while not ours.idle:
        work, shares = ours.schedule(), theirs.schedule()
        assert work is not None
        expected = [(sequences.index(share.sequence), share.n) for share in shares]
        assert list(zip(work.ids.tolist(), work.step.new_tok.tolist(), strict=True)) == expected
        ours.finish(work)
        for share in shares:
            share.sequence.n_computed += share.n
            if share.samples:
                share.sequence.ids.append(0)
                if share.sequence.n_output == share.sequence.max_tokens:
                    theirs.remove(share.sequence)
        n_steps += 1
    assert not theirs.running
    assert n_steps > 24


def prompts_cost(step):
    """About the embedded engine's steps on one core: 2 ms, 0.4 ms a token decoded, 0.1 ms one of a prompt."""
    return 2e-3 + 4e-4 * step.n_logits + 1e-4 * int(step.new_tok[step.new_tok > 1].sum())


@pytest.mark.slow
def test_a_queue_multiplies_an_error_of_its_steps():
    """Steps 5% longer are 5% of a lone request's TPOT, and more of it the fuller the engine is."""
    rng = np.random.default_rng(1)
    bounds = Limits(256, 2048, 1 << 20)
    outputs = rng.integers(16, 49, 150).tolist()
    burst = [Asked(0.0, 512, n_tok) for n_tok in outputs]
    served_per_s = len(burst) / simulate(burst, bounds, prompts_cost).makespan_s
    arrivals = rng.exponential(1 / served_per_s, len(burst)).cumsum()

    def tpot_growth(share):
        asked = [replace(each, due_s=at / share) for each, at in zip(burst, arrivals, strict=True)]
        slower, as_it_is = (
            simulate(asked, bounds, lambda step, f=factor: f * prompts_cost(step)).tpot_s.mean()
            for factor in (1.05, 1.0)
        )
        return slower / as_it_is - 1

    growth = [tpot_growth(share) for share in (0.01, 0.5, 0.8)]
    print(*(f"{each:+.1%}" for each in growth))
    assert growth[0] == pytest.approx(0.05, abs=0.01)
    assert growth[1] > 0.08
    assert growth[2] > 0.12


@pytest.mark.parametrize("load", [pytest.param(0.1, marks=pytest.mark.slow), 0.4, 0.7])
def test_one_request_at_a_time_with_poisson_arrivals_waits_as_pollaczek_and_khinchine_say(load):
    """M/D/1: each request is one step of a second, so the mean wait is load / (2 (1 - load)) s."""
    n = 8_000
    due_s = np.cumsum(np.random.default_rng(7).exponential(1 / load, n))
    result = simulate([Asked(at_s, 8, 1) for at_s in due_s.tolist()], Limits(1, 100, 1000), lambda step: 1.0)
    wait_s = result.ttft_s - 1
    # Waits that follow each other depend on each other: 20 blocks of 400 give the standard error.
    error_s = wait_s.reshape(20, -1).mean(axis=1).std(ddof=1) / np.sqrt(20)
    assert abs(wait_s.mean() - load / (2 * (1 - load))) <= 4 * error_s
    assert error_s < 0.15


def test_a_lone_request_in_a_closed_loop_takes_its_steps_and_the_loop_ends_when_its_time_is_over():
    """One prefill step and 4 decodes of a second each: starts at 0, 5, 10 s, and none from 12 s on."""
    asked = [Asked(0, 10, 5)] * 50
    result = simulate(asked, Limits(1, 100, 1000), lambda step: 1.0, concurrency=1, until_s=12.0)
    assert result.due_s.tolist() == [0, 5, 10]
    assert result.ttft_s.tolist() == [1] * 3
    assert result.tpot_s.tolist() == [1] * 3
    assert result.e2e_s.tolist() == [5] * 3
    assert result.makespan_s == 15
