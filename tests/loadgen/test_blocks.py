import math

import numpy as np
import pytest

from loadgen.stats.blocks import block_interval, block_length


def series(phi, n, random):
    """Log-normal, sigma 0.5, its logarithms an autoregression of first order."""
    logs = np.empty(n)
    shocks = random.normal(size=n) * math.sqrt(1 - phi**2)
    logs[0] = random.normal()
    for k in range(1, n):
        logs[k] = phi * logs[k - 1] + shocks[k]
    return np.exp(0.5 * logs)


MEAN = math.exp(0.125)


def coverage(phi, n, n_runs, block=None):
    random = np.random.default_rng(11)
    hits = 0
    for _ in range(n_runs):
        values = series(phi, n, random)
        found = block_interval(values, np.ones(n), block or block_length(values), random)
        assert found is not None
        hits += found[0] <= MEAN <= found[1]
    return hits / n_runs


def test_blocks_grow_with_dependence_and_are_short_without():
    random = np.random.default_rng(0)
    lengths = [
        np.median([block_length(series(phi, 1000, random)) for _ in range(20)]) for phi in (0, 0.5, 0.8)
    ]
    assert lengths[0] <= 4
    assert lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize("values", [np.ones(100), np.ones(1), np.empty(0), np.tile([1.0, 2.0], 50)])
def test_a_series_without_noise_has_a_block_too(values):
    assert 1 <= block_length(values) <= max(1, len(values))


@pytest.mark.slow
def test_intervals_cover_where_neighbours_depend_on_each_other_and_naive_ones_do_not():
    assert coverage(0.8, 500, 120) >= 0.87
    assert coverage(0.8, 500, 120, block=1) < 0.70


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_two_thousand_simulated_runs_are_covered_as_often_as_promised(phi):
    blocked, naive = coverage(phi, 2000, 2000), coverage(phi, 2000, 200, block=1)
    print(f"autocorrelation {phi}: {blocked:.1%} by blocks, {naive:.1%} as if independent")
    assert 0.93 <= blocked <= 0.97
    assert phi == 0 or naive < 0.85


def test_fewer_than_five_blocks_give_no_interval():
    assert block_interval(np.ones(40), np.ones(40), 9, np.random.default_rng(0)) is None
    assert block_interval(np.arange(1.0, 46), np.ones(45), 9, np.random.default_rng(0)) is not None


def test_a_rate_that_may_be_zero_still_has_an_interval():
    found = block_interval(np.r_[np.zeros(95), np.ones(5)], np.ones(100), 10, np.random.default_rng(0))
    assert found is not None
    assert found[0] < 0.05 < found[1]
