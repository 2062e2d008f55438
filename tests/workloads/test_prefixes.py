"""Prompts share as much as was asked for, and a cache could serve exactly that."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import PrefixTree, Shape, expected_hit_fraction, hits, make_plan
from burstline.workloads.prompts import salted, vocabulary_from_size
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import Sharing

VOCABULARY = vocabulary_from_size(32_000)


def plan(sharing: Sharing, low: int = 300, high: int = 700, block_tok: int = 16):
    shape = Shape(Lengths(low, high), Lengths(4, 4), sharing=sharing)
    return make_plan(shape, [0.0] * 200, VOCABULARY, 3, block_tok)


@pytest.mark.parametrize("block_tok", [16, 32, 128])
@pytest.mark.parametrize("hit", [0.0, 0.3, 0.6, 0.9])
def test_a_primed_cache_serves_the_asked_share(hit, block_tok):
    if hit == 0.9 and block_tok == 128:
        pytest.skip("more than blocks of 128 can serve of these prompts")
    made = plan(Sharing(groups=4, hit=hit), block_tok=block_tok)
    primed = made.stages[0].requests if made.stages else ()
    assert expected_hit_fraction(made.requests, "5eed", block_tok, primed) == pytest.approx(hit, abs=0.002)
    prompts = [salted(r, "5eed", VOCABULARY).prompt_ids for r in [*primed, *made.requests]]
    n_tok = sum(r.n_prompt_tok for r in made.requests)
    assert sum(hits(prompts, block_tok)[len(primed) :]) / n_tok == pytest.approx(hit, abs=0.002)


def test_more_than_whole_blocks_allow_is_refused_with_what_they_allow():
    with pytest.raises(WorkloadError, match=r"--shared-prefix 9.*blocks of 128 tokens serves at most 7"):
        plan(Sharing(hit=0.9), low=512, high=512, block_tok=128)


def test_groups_share_a_prefix_among_themselves_and_with_no_other():
    made = plan(Sharing(groups=3, shared_tok=100))
    heads = {bytes(r.prompt_ids[:100]) for r in made.requests}
    assert len(heads) == 3
    assert len({bytes(r.prompt_ids[:101]) for r in made.requests}) == 200
    assert len({bytes(salted(r, "5eed", VOCABULARY).prompt_ids[:100]) for r in made.requests}) == 3
    with pytest.raises(WorkloadError, match="--shared-prefix 301 is longer"):
        plan(Sharing(shared_tok=301), low=300, high=300)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 99), st.sampled_from([16, 32]))
def test_the_tree_of_segments_counts_as_the_tree_of_tokens(groups, shared_tok, seed, block_tok):
    shape = Shape(Lengths(200, 260), Lengths(1, 1), sharing=Sharing(groups, shared_tok))
    made = make_plan(shape, [0.0] * 12, VOCABULARY, seed)
    by_tokens = hits([r.prompt_ids for r in made.requests], block_tok)
    assert PrefixTree().add(made.requests, block_tok) == by_tokens
