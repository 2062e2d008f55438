"""The sequential test of two contenders and of a series: how often it is wrong, by simulation."""

import math

import numpy as np
import pytest

from burstline.measure.stats.significance import LEAST_SERIES, Answer, look, series

NOTHING = np.empty(0)


def decided(draw, effect, noise, *, most=10, n_stored=0, drift=0.0):
    """What comes of pairs run A B B A until it is decided, and after how many."""
    stored = draw.normal(0, noise, n_stored)
    values, found = [], None
    for k in range(most):
        baseline = 0.0 if n_stored else draw.normal(0, noise)
        turn = drift if k % 2 == 0 else -drift  # the second of a pair is later
        values.append(math.log1p(effect) + draw.normal(0, noise) - baseline + turn)
        found = look(np.array(values), stored, margin=0.05, most=most)
        if found.answer != Answer.INCONCLUSIVE:
            break
    return found.answer, len(values)


def shares(n, effect, noise, **how):
    draw = np.random.default_rng(7)
    answers = [decided(draw, effect, noise, **how)[0] for _ in range(n)]
    return {answer: answers.count(answer) / n for answer in Answer}


@pytest.mark.parametrize("how", [{}, {"drift": 0.01}, {"n_stored": 5}], ids=["pairs", "drift", "stored"])
def test_of_500_equal_contenders_at_most_5_percent_are_called_different(how):
    found = shares(500, 0.0, 0.02, **how)
    print(f"A/A, 2% noise, {how}: {found}")
    assert found[Answer.DIFFERENT] <= 0.05


def test_false_alarms_without_any_equivalence_to_end_early_are_as_stated():
    """At 20% noise nothing is the same within 5%: all looks are taken, and all may alarm."""
    n = 2000
    found = shares(n, 0.0, 0.2)
    print(f"A/A, 20% noise: {found}")
    assert abs(found[Answer.DIFFERENT] - 0.05) < 3.3 * math.sqrt(0.05 * 0.95 / n)


def test_a_slow_down_of_5_percent_at_2_percent_noise_is_found_nine_times_in_ten():
    found = shares(500, 0.05, 0.02)
    print(f"5% slower, 2% noise: {found}")
    assert found[Answer.DIFFERENT] >= 0.90
    assert found[Answer.SAME] <= 0.05


def test_a_large_difference_is_told_within_four_pairs():
    draw = np.random.default_rng(3)
    found = [decided(draw, 1.0, 0.1) for _ in range(200)]
    assert sum(answer == Answer.DIFFERENT and n <= 4 for answer, n in found) >= 195


def test_several_numbers_are_judged_more_strictly():
    values = np.array([0.10, 0.06, 0.13, 0.07])
    one, many = (look(values, NOTHING, margin=0.05, most=10, n_numbers=n).ratio for n in (1, 8))
    assert many.low < one.low < 1.09 < one.high < many.high


def test_runs_without_any_noise_are_the_same_or_different_as_they_are():
    assert look(np.full(3, 0.001), NOTHING, margin=0.05, most=10).answer == Answer.SAME
    assert look(np.full(3, 0.1), NOTHING, margin=0.05, most=10).answer == Answer.DIFFERENT


def test_two_pairs_decide_nothing():
    found = look(np.array([1.0, 1.001]), NOTHING, margin=0.05, most=10)
    assert (found.answer, found.ratio.low) == (Answer.INCONCLUSIVE, None)


def bad_in(values):
    found = series(values, margin=0.05, n_numbers=1, lower_is_better=True)
    assert found[:LEAST_SERIES] == [None] * LEAST_SERIES
    return [k for k, each in enumerate(found) if each and each.answer == Answer.DIFFERENT]


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_a_series_without_a_change_seldom_has_a_bad_run(drift):
    draw, n = np.random.default_rng(5), 300
    alarms = 0
    for _ in range(n):
        alarms += bool(bad_in(draw.normal(0, 0.02, 20) + np.cumsum(draw.normal(0, drift, 20))))
    print(f"series of 20 runs, 2% noise, {drift:.0%} drift a run: {alarms / n:.1%} alarms")
    assert alarms <= 0.05 * n


def test_an_improvement_that_is_lost_again_is_a_bad_run():
    draw, n = np.random.default_rng(5), 100
    lost = 0
    for _ in range(n):
        values = draw.normal(0, 0.02, 25)
        values[10:20] += math.log(0.8)
        found = series(values, margin=0.05, n_numbers=1, lower_is_better=True)
        lost += any(each.answer == Answer.DIFFERENT and each.ratio.point > 1 for each in found[20:])
    print(f"20% faster in 10 runs, then as before, 2% noise: found in {lost / n:.0%}")
    assert lost >= 0.8 * n
    found = series(values[:20], margin=0.05, n_numbers=1, lower_is_better=True)
    assert not any(each and each.ratio.point > 1.05 for each in found)


def test_the_first_bad_run_of_a_series_is_named():
    draw, n = np.random.default_rng(5), 200
    first = 0
    for _ in range(n):
        values = draw.normal(0, 0.02, 20)
        values[16:] += math.log(1.1)
        first += bad_in(values)[:1] == [16]
    print(f"10% slower from the 17th of 20 runs on, 2% noise: named in {first / n:.0%}")
    assert first >= 0.8 * n
