"""Our few distributions against scipy.stats, which is the reference and too slow to import in a run."""

import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from scipy import stats

from burstline.measure.stats.estimates import binom_cdf, binom_ppf
from burstline.measure.stats.serial_correlation import rankdata, theil_slope

Q = np.array([1e-6, 0.005, 0.025, 0.11, 0.49, 0.91, 0.975, 0.995, 1 - 1e-6])


def test_order_statistics_of_a_binomial_are_scipys() -> None:
    for n, p in product((1, 2, 11, 64, 1000, 6636, 1_000_000), (0.01, 0.1, 0.5, 0.9, 0.99, 0.999)):
        np.testing.assert_array_equal(binom_ppf(Q, n, p), stats.binom.ppf(Q, n, p))
        k = np.array([0, n // 2, n])
        np.testing.assert_allclose(binom_cdf(k, n, p), stats.binom.cdf(k, n, p), rtol=1e-10)


def test_slope_and_ranks_are_scipys_with_ties_too() -> None:
    rng = np.random.default_rng(1)
    for series in (rng.normal(size=61), rng.integers(0, 5, 40).astype(float), np.zeros(12)):
        assert theil_slope(series) == pytest.approx(stats.theilslopes(series).slope, abs=1e-15)
        np.testing.assert_array_equal(rankdata(series), stats.rankdata(series))


def test_scipy_stats_is_not_imported() -> None:
    code = "import sys, burstline.measure.stats.significance; print('scipy.stats' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
