"""A plan is made once, says what it asks for, and can be made again."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.workloads.lengths import Lengths, parse_lengths
from burstline.workloads.plan import Shape, make_plan
from burstline.workloads.prompts import (
    N_SALT_TOK,
    DrawnRequests,
    Segments,
    Stream,
    salted,
    vocabulary_from_size,
    vocabulary_from_tokenizer,
)
from burstline.workloads.request import WorkloadError

VOCABULARY = vocabulary_from_size(8192)
SHAPE = Shape(Lengths(32, 32), Lengths(4, 4))


def plan(seed: int = 0, shape: Shape = SHAPE, due_s: tuple[float, ...] = (0.0, 0.0, 0.5)):
    return make_plan(shape, due_s, VOCABULARY, seed)


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    assert plan(0).sha256 == plan(0).sha256
    assert plan(0).requests == plan(0).requests
    assert plan(0).sha256 != plan(1).sha256


def test_due_times_and_lengths_are_part_of_the_hash():
    assert plan().sha256 != plan(due_s=(0.0, 0.0, 0.6)).sha256
    assert plan().sha256 != plan(shape=Shape(Lengths(32, 32), Lengths(5, 5))).sha256


def test_every_prompt_has_exactly_the_asked_number_of_tokens():
    made = plan(shape=Shape(Lengths(16, 48), Lengths(1, 9)), due_s=(0.0,) * 200)
    assert all(len(r.prompt_ids) == r.n_prompt_tok for r in made.requests)
    assert {r.n_prompt_tok for r in made.requests} == set(range(16, 49))
    assert {r.n_output_tok for r in made.requests} == set(range(1, 10))


def test_a_longer_plan_begins_with_the_same_requests():
    assert plan(due_s=(0.0,) * 9).requests[:3] == plan(due_s=(0.0,) * 3).requests


def test_ids_are_the_same_for_ever():
    """Pinned: a run is repeated from its seed, also by a later version."""
    drawn = Stream(7, "prompts").ids([0, 3, 2**62, 3], [2, 3, 0, 1], VOCABULARY)
    assert drawn.tolist() == [4899, 4340, 1621, 1318, 7008, 1621]


@given(st.lists(st.sampled_from([1, 9, 100, 16_384, 20_000]), min_size=1, max_size=8), st.booleans())
def test_a_request_is_the_same_alone_in_a_slice_and_among_others(sizes, shares):
    n = len(sizes)
    numbers, n_tok, ones = np.arange(n), np.array(sizes), np.ones(n, dtype=np.int64)
    segments = None
    if shares:  # a token that all begin with, and the rest
        keys = np.stack([np.full(n, 77), numbers], axis=1).ravel()
        segments = Segments(np.arange(0, 2 * n + 1, 2), keys, np.stack([ones, n_tok - 1], axis=1).ravel())
    requests = DrawnRequests(numbers, n_tok, ones, VOCABULARY, 5, segments)
    made = list(requests)
    assert [len(r.prompt_ids) for r in made] == sizes
    assert [requests[i] for i in range(-1, n)] == [made[-1], *made]
    assert list(requests[1::2]) == made[1::2]
    assert not shares or len({r.prompt_ids[0] for r in made}) == 1


def test_special_ids_are_never_drawn():
    tokenizer = {
        "model": {"vocab": {"<s>": 0, "a": 1, "b": 2, "c": 3, "</s>": 4}},
        "added_tokens": [{"id": 0, "special": True}, {"id": 4, "special": True}],
    }
    vocabulary = vocabulary_from_tokenizer(json.loads(json.dumps(tokenizer)), "tokenizer.json")
    assert set(Stream(0, "x").ids(7, 1000, vocabulary).tolist()) == {1, 2, 3}


def test_a_unigram_vocabulary_is_a_list_in_the_order_of_ids():
    tokenizer = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]}, "added_tokens": [{"id": 0}]}
    assert vocabulary_from_tokenizer(tokenizer, "t").ids.tolist() == [1, 2]


def test_a_tokenizer_without_ordinary_tokens_is_refused():
    with pytest.raises(WorkloadError, match="no ordinary tokens"):
        vocabulary_from_tokenizer({}, "tokenizer.json")


def test_a_salt_overwrites_the_first_eight_ids_and_nothing_else():
    request = plan().requests[1]
    one, again, other = (salted(request, s, VOCABULARY) for s in ("aa", "aa", "bb"))
    assert one == again
    assert one.prompt_ids[N_SALT_TOK:] == request.prompt_ids[N_SALT_TOK:]
    assert one.prompt_ids[:N_SALT_TOK] != other.prompt_ids[:N_SALT_TOK]
    assert set(one.prompt_ids[:N_SALT_TOK]) <= set(VOCABULARY.ids.tolist())


def test_two_requests_under_one_salt_share_no_prefix():
    heads = {bytes(salted(r, "aa", VOCABULARY).prompt_ids[:1]) for r in plan(due_s=(0.0,) * 50).requests}
    assert len(heads) > 40


def test_a_prompt_shorter_than_the_salt_keeps_its_length():
    request = plan(shape=Shape(Lengths(3, 3), Lengths(1, 1))).requests[0]
    assert len(salted(request, "aa", VOCABULARY).prompt_ids) == 3


@given(st.integers(16, 200_000))
def test_ids_drawn_from_a_bare_size_keep_away_from_both_ends(n_ids):
    ids = vocabulary_from_size(n_ids).ids
    assert ids[0] >= n_ids // 8
    assert ids[-1] < n_ids * 7 // 8


def test_prompts_are_uniform_over_the_vocabulary():
    counts = np.bincount(Stream(0, "u").ids(1, 200_000, vocabulary_from_size(64)), minlength=64)[8:56]
    assert abs(counts / counts.mean() - 1).max() < 0.1


@pytest.mark.parametrize("text", ["0", "-1", "x", "9..3", "..4", ""])
def test_a_silly_length_is_refused_with_the_flag_that_said_it(text):
    with pytest.raises(WorkloadError, match="--prompt-tokens"):
        parse_lengths(text, "--prompt-tokens")


def test_lengths_print_as_they_are_typed():
    assert str(parse_lengths("512", "-")) == "512"
    assert str(parse_lengths("256..768", "-")) == "256..768"
