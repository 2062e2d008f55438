"""The simulator: nothing lost, nothing over capacity, vLLM's rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.errors import RooflineError
from roofline.predict.simulate import Asked, Limits, simulate


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
