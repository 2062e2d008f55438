import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as sps

from loadgen.stats.estimates import Absent
from loadgen.stats.paired_runs import moving_blocks, paired_percentiles
from loadgen.stats.significance import Answer, Difference, holm, judged
from tests.loadgen.test_blocks import series


def rng(seed=0):
    return np.random.default_rng(seed)


def pairs(ratio, n=400, seed=1, spread=0.05):
    """Requests that differ much among themselves and little between the two runs."""
    random = rng(seed)
    a = np.exp(0.5 * random.standard_normal(n))
    return a, a * ratio * np.exp(spread * random.standard_normal(n))


def median(a, b, random=None):
    return paired_percentiles(a, b, [0.5], random or rng())[0.5]


def p_within(found: Difference) -> float:
    """For no difference between these two runs: nothing is allowed for the noise between runs."""
    return float(2 * sps.t.sf(abs(found.point) / found.error, found.freedom))


def test_a_ratio_is_known_far_better_pair_by_pair_than_request_by_request():
    a, b = pairs(1.1)
    found = median(a, b)
    shuffled = median(a, rng(5).permutation(b))
    assert found.point == pytest.approx(math.log(np.median(b) / np.median(a)))
    assert abs(found.point - math.log(1.1)) < 3 * found.error
    assert found.error < shuffled.error / 3


def test_the_percentiles_are_numpys():
    a, b = pairs(1.3, n=1000)
    found = paired_percentiles(a, b, [0.5, 0.99], rng())
    for p, each in found.items():
        assert math.exp(each.point) == pytest.approx(np.quantile(b, p) / np.quantile(a, p))


def test_twice_as_slow_is_different_in_one_run_each_and_five_percent_is_not():
    assert judged({"x": median(*pairs(2.0))})["x"].answer == Answer.DIFFERENT
    assert judged({"x": median(*pairs(1.05))})["x"].answer == Answer.CANNOT_TELL


def test_the_very_same_run_twice_is_no_difference_and_no_proof_of_sameness():
    a, _ = pairs(1.0)
    found = median(a, a)
    assert (found.point, found.error) == (0.0, 0.0)
    assert judged({"x": found})["x"].answer == Answer.CANNOT_TELL


def test_what_is_undefined_in_either_run_is_left_out():
    a, b = pairs(1.1)
    a[:50], b[50:90] = np.nan, np.nan
    assert median(a, b).n == 310


def test_percentiles_among_failures_and_of_too_few_are_absent():
    a, b = pairs(1.0, n=100)
    b[:60] = np.inf
    assert "infinitely late" in median(a, b).reason
    few = paired_percentiles(*pairs(1.0, n=100), [0.5, 0.99], rng())
    assert isinstance(few[0.5], Difference)
    assert "662" in few[0.99].reason
    assert isinstance(median(np.empty(0), np.empty(0)), Absent)


def test_a_few_failures_leave_the_median():
    a, b = pairs(1.0)
    b[:5] = np.inf
    assert isinstance(median(a, b), Difference)


def test_neighbours_that_depend_on_each_other_widen_the_error():
    random = rng(3)
    base = random.lognormal(0, 0.5, 800)
    alone, together = (
        median(base * series(phi, 800, random), base * series(phi, 800, random)) for phi in (0.0, 0.9)
    )
    assert together.error > 2 * alone.error
    assert together.freedom < alone.freedom


@given(st.integers(1, 40), st.integers(1, 10))
def test_blocks_are_runs_of_neighbours(n, block):
    block = min(n, block)
    drawn = moving_blocks(n, block, 20, rng())
    assert drawn.shape == (20, n)
    assert drawn.min() >= 0
    assert drawn.max() < n
    inside = np.arange(1, n) % block != 0
    assert (np.diff(drawn, axis=1)[:, inside] == 1).all()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phi", [0.0, 0.8])
def test_of_1000_pairs_of_equal_runs_at_most_67_would_be_called_different_even_with_nothing_allowed(phi):
    """Three metrics, two percentiles each; what slows requests is as long as `phi` says."""
    random, alarms, allowed = rng(6), 0, 0
    for _ in range(1000):
        base, found = random.lognormal(0, 0.5, 700), []
        for _ in range(3):
            a, b = (base * series(phi, 700, random) ** 0.4 for _ in "ab")
            found += paired_percentiles(a, b, [0.5, 0.99], random).values()
        alarms += min(holm([p_within(each) for each in found])) < 0.05
        answers = judged({str(k): each for k, each in enumerate(found)}).values()
        allowed += any(each.answer == Answer.DIFFERENT for each in answers)
    print(f"autocorrelation {phi}: {alarms} of 1,000, {allowed} with what runs may differ by")
    assert alarms <= 67
    assert allowed <= 1


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_the_ratio_interval_covers_the_truth_in_19_of_20_runs_and_more(spread):
    """Medians jump from request to request when resampled, so that the error is rather too large."""
    covered = 0
    for seed in range(1000):
        found = median(*pairs(1.05, n=200, seed=seed, spread=spread), rng(seed))
        reach = float(sps.t.ppf(0.975, found.freedom)) * found.error
        covered += abs(found.point - math.log(1.05)) <= reach
    print(f"spread {spread}: covered {covered / 1000:.1%}")
    assert covered / 1000 >= 0.94
