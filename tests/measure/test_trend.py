import numpy as np
import pytest

from burstline.measure.stats.serial_correlation import mann_kendall, warm_up_end


def noise(n, seed=0):
    return np.random.default_rng(seed).normal(1.0, 0.1, n)


@pytest.mark.parametrize("cut", [50, 100, 200])
def test_a_slow_start_is_cut_within_five_percent_of_where_it_ends(cut):
    series = noise(1000)
    series[:cut] += 1.0
    assert warm_up_end(series) == pytest.approx(cut, abs=50)
    assert warm_up_end(series) >= cut


def test_a_steady_series_loses_next_to_nothing():
    assert warm_up_end(noise(1000)) <= 100


@pytest.mark.parametrize(("n", "begin"), [(120, 0.25), (240, 0.25), (240, 0.08), (1000, 0.25), (1000, 0.08)])
@pytest.mark.parametrize("end", [0.3, 0.42])
def test_a_slow_spell_in_the_middle_is_no_warm_up(n, begin, end):
    """It begins as it goes on: without the spell the latencies would look better than they were."""
    series = noise(n)
    series[int(begin * n) : int(end * n)] += 4 * series.std()
    assert warm_up_end(series) == 0


def test_a_step_past_the_middle_is_never_steady():
    series = noise(1000)
    series[:800] += 1.0
    assert warm_up_end(series) is None


def test_too_short_a_series_cannot_be_judged():
    assert warm_up_end(np.ones(19)) is None
    assert mann_kendall(np.arange(7.0)) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_drift_is_found_with_its_direction(sign):
    trend = mann_kendall(noise(60) + sign * np.linspace(0, 0.5, 60))
    assert trend is not None
    tau, p = trend
    assert p < 0.001
    assert np.sign(tau) == sign


def test_a_monotone_series_has_the_largest_tau_and_a_constant_none():
    rising, flat = mann_kendall(np.arange(20.0)), mann_kendall(np.ones(20))
    assert rising is not None
    assert rising[0] == 1.0
    assert flat == (0.0, 1.0)


def false_alarms(phi, n_runs=300, n=60):
    random = np.random.default_rng(5)
    alarms = 0
    for _ in range(n_runs):
        shocks = random.normal(size=n + 50)
        series = np.zeros(n + 50)
        for i in range(1, n + 50):
            series[i] = phi * series[i - 1] + shocks[i]
        trend = mann_kendall(series[50:])
        alarms += trend is not None and trend[1] < 0.05
    return alarms / n_runs


def test_independent_noise_is_called_a_trend_as_rarely_as_promised():
    assert false_alarms(0.0) <= 0.08


def test_autocorrelation_is_less_often_taken_for_a_trend():
    # Without the correction it is 30 % of these very series; with it 20 %, for 60 values tell little of their
    # own autocorrelation.
    assert false_alarms(0.6) <= 0.22
