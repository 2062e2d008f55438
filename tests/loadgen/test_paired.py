import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.paired import Comparison, compare_means, holm, moving_blocks, survival
from loadgen.stats import Absent


def rng(seed=0):
    return np.random.default_rng(seed)


def pairs(ratio, n=400, seed=1, spread=0.05):
    """Requests that differ much among themselves and little between the two runs."""
    random = rng(seed)
    a = np.exp(0.5 * random.standard_normal(n))
    return a, a * ratio * np.exp(spread * random.standard_normal(n))


def test_a_ten_percent_difference_is_found_though_requests_differ_by_far_more():
    found = compare_means(*pairs(1.1), 5, rng())
    assert isinstance(found, Comparison)
    assert found.ratio.low < found.ratio.point < found.ratio.high
    assert found.ratio.low > 1.05
    assert found.p < 1e-6
    assert not found.equivalent


def test_two_equal_runs_are_called_equivalent():
    found = compare_means(*pairs(1.0), 5, rng())
    assert isinstance(found, Comparison)
    assert found.equivalent
    assert found.detectable < 0.03


def test_few_noisy_pairs_can_show_neither_difference_nor_equivalence():
    found = compare_means(*pairs(1.02, n=12, spread=0.4), 2, rng())
    assert isinstance(found, Comparison)
    assert found.p > 0.05
    assert not found.equivalent
    assert found.detectable > 0.1


def test_pairs_with_a_failure_are_left_out_and_too_few_are_absent():
    a, b = pairs(1.0, n=10)
    a[:3] = np.inf
    assert isinstance(compare_means(a, b, 1, rng()), Absent)


@given(st.integers(1, 40), st.integers(1, 10))
def test_blocks_are_runs_of_neighbours(n, block):
    block = min(n, block)
    drawn = moving_blocks(n, block, 20, rng())
    assert drawn.shape == (20, n)
    assert drawn.min() >= 0
    assert drawn.max() < n
    inside = np.arange(1, n) % block != 0
    assert (np.diff(drawn, axis=1)[:, inside] == 1).all()


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_survival_by_hand():
    """Ends at 1 and 3, one lost sight of at 2, of four."""
    moments, running = survival(np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, True, False]))
    assert moments.tolist() == [1.0, 3.0]
    assert running == pytest.approx([3 / 4, 3 / 4 * 1 / 2])


@pytest.mark.slow
def test_the_ratio_interval_covers_the_truth_in_93_to_97_of_100_runs():
    covered = 0
    for seed in range(2000):
        found = compare_means(*pairs(1.05, n=200, seed=seed), 1, rng(seed))
        covered += found.ratio.low <= 1.05 * np.exp(0.05**2 / 2) <= found.ratio.high
    assert 0.93 <= covered / 2000 <= 0.97
