"""Replies compared: where they part, loops, and the interval of a paired difference of shares."""

import math

import numpy as np
import pytest

from burstline.measure.metrics.audit import audit, ends_in_loop, first_difference
from burstline.measure.record.verdict import Replies
from burstline.measure.stats.estimates import paired_excess, share_of
from burstline.servers.registry import ENGINES


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ("ab", "a", 1),
        ("", "", None),
    ],
)
def test_two_replies_part_at_their_first_difference(one, other, at):
    assert first_difference(one, other) == at


TOTAL = {"meta_info": {"completion_tokens": 2}}
FIRST = {"meta_info": {"completion_tokens": 1}, "output_ids": [7]}


@pytest.mark.parametrize(
    ("engine", "answers", "reply"),
    [
        ("sglang", [FIRST, TOTAL | {"output_ids": [7, 9]}], [7, 9]),
        ("sglang", [FIRST, TOTAL | {"output_ids": [9]}, TOTAL | {"output_ids": []}], [7, 9]),
        ("tgi", [{"token": {"id": 7}}, {"token": None}, {"token": {"id": 9}}], [7, 9]),
        ("lightllm", [{"token": {"id": 7}}, {"token": {"id": 9}}], [7, 9]),
        ("llamacpp", [{"content": "a"}, {"content": "b", "tokens": [9]}], "ab"),
        ("vllm", [{"choices": [{"text": "a"}]}, {"choices": []}, {"choices": [{"text": "b"}]}], "ab"),
        ("vllm", [{"choices": [{"text": "", "token_ids": [7, 9]}]}], [7, 9]),
        (
            "openai-chat",
            [{"choices": [{"delta": {"reasoning": "a"}}]}, {"choices": [{"delta": {"content": "b"}}]}],
            "ab",
        ),
        ("vllm+chat", [{"choices": [{"delta": {"content": "b"}}]}], "b"),
    ],
)
def test_a_reply_is_its_ids_or_else_its_text_in_every_dialect(engine, answers, reply):
    assert ENGINES[engine].generated(answers) == reply


def test_a_loop_is_one_sequence_four_times_over_at_the_end():
    assert ends_in_loop([9, 8, *[1, 2, 3, 4] * 4])
    assert ends_in_loop([7] * 16)
    assert not ends_in_loop([7] * 15)
    assert not ends_in_loop([*[1, 2, 3, 4] * 4, 5])
    assert not ends_in_loop(list(range(100)))
    assert ends_in_loop("He said so. " * 6)
    assert not ends_in_loop("He said so. " * 3)
    assert not ends_in_loop("...." * 15)


def test_what_became_of_replies_is_counted_apart():
    whole, cut, loop = list(range(40)), list(range(20)), [1, 2] * 20
    found = audit([(whole, whole, whole), (cut, whole, whole), (loop, whole, whole), (whole, whole, loop)])
    assert [f.point for f in (found.under_load, found.alone, found.excess)] == [0.5, 0.25, 0.25]
    assert [f.point for f in (found.cut_short, found.loops, found.loops_alone)] == [0.25, 0.25, 0.0]
    assert found.first_difference_p50.point == 10  # of 20 and 0
    assert found.answer == Replies.AS_ALONE


def test_one_difference_is_enough_where_the_engine_alone_never_differs():
    same = ([1], [1], [1])
    assert audit([same] * 299 + [([2], [1], [1])]).answer == Replies.MORE
    assert audit([same] * 299 + [([2], [1], [2])]).answer == Replies.AS_ALONE
    assert audit([same] * 300).answer == Replies.SAME
    # The stated power: one in a hundred replies, 300 audited.
    assert pytest.approx(0.951, abs=5e-4) == 1 - 0.99**300
    assert share_of(0, 300).high == pytest.approx(1 - 0.025 ** (1 / 300))


def test_the_interval_of_a_paired_difference_is_newcombes():
    """His first example (1998, table II, method 10): 36 both, 12 the first only, 2 the second only."""
    found = paired_excess(50, 48, 38, 36)
    assert (found.low, found.high) == pytest.approx((0.0569, 0.3404), abs=5e-5)


@pytest.mark.parametrize(("p", "q"), [(0.05, 0.05), (0.3, 0.3), (0.02, 0.1), (0.2, 0.05)])
def test_the_interval_covers_the_true_difference(p, q):
    """Requests that differ alone also tend to differ under load: both compare with the same first reply."""
    draw, n, held = np.random.default_rng(1), 300, 0
    for _ in range(2000):
        odd = draw.random(n) < 0.5 * min(p, q)
        first = odd | (draw.random(n) < p)
        second = odd | (draw.random(n) < q)
        found = paired_excess(n, int(first.sum()), int(second.sum()), int((first & second).sum()))
        true = (1 - 0.5 * min(p, q)) * (p - q)
        held += found.low <= true <= found.high
    assert 0.93 <= held / 2000 <= 0.99


def test_identical_shares_leave_the_difference_open():
    found = paired_excess(50, 10, 10, 10)
    assert found.point == 0
    assert found.low < 0 < found.high
    assert math.isclose(found.low, -found.high)
