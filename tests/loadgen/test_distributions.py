"""Our few distributions against scipy.stats, which is the reference and too slow to import in a run."""

import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from burstline.loadgen.stats import distributions as ours

Q = np.array([1e-6, 0.005, 0.025, 0.11, 0.49, 0.91, 0.975, 0.995, 1 - 1e-6])


def test_quantiles_of_normal_and_t_are_scipys_to_the_last_bit() -> None:
    np.testing.assert_array_equal(ours.norm.ppf(Q), stats.norm.ppf(Q))
    np.testing.assert_array_equal(ours.norm.sf(Q), stats.norm.sf(Q))
    for freedom in (1, 2, 7.5, 30, 4000, np.inf):
        np.testing.assert_array_equal(ours.t.ppf(Q, freedom), stats.t.ppf(Q, freedom))
        np.testing.assert_array_equal(ours.t.sf(Q, freedom), stats.t.sf(Q, freedom))


@pytest.mark.parametrize("n", [1, 10, 1000, 100_000])
def test_quantiles_of_beta_are_scipys(n: int) -> None:
    ranks = np.unique(np.linspace(1, n, 50).astype(int))
    for q in (0.005, 0.025, 0.975):
        expected = stats.beta.ppf(q, ranks, n - ranks + 1)
        np.testing.assert_allclose(ours.beta.ppf(q, ranks, n - ranks + 1), expected, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 11, 64, 1000, 6636, 1_000_000])
@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
def test_order_statistics_of_a_binomial_are_scipys(n: int, p: float) -> None:
    np.testing.assert_array_equal(ours.binom.ppf(Q, n, p), stats.binom.ppf(Q, n, p))
    k = np.array([0, n // 2, n])
    np.testing.assert_allclose(ours.binom.cdf(k, n, p), stats.binom.cdf(k, n, p), rtol=1e-10)


def test_slope_and_ranks_are_scipys_with_ties_too() -> None:
    rng = np.random.default_rng(1)
    for series in (rng.normal(size=61), rng.integers(0, 5, 40).astype(float), np.zeros(12)):
        assert ours.theil_slope(series) == pytest.approx(stats.theilslopes(series).slope, abs=1e-15)
        np.testing.assert_array_equal(ours.rankdata(series), stats.rankdata(series))


def test_scipy_stats_is_not_imported() -> None:
    code = "import sys, burstline.loadgen.stats.distributions; print('scipy.stats' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
