import numpy as np
import pytest

from loadgen.columns import columns_of
from loadgen.repeats import mean_over, noise_floor, output_rate_over, over_runs, percentile_over, two_level
from loadgen.stats import Absent, Estimate, mean
from loadgen.tables import record_table
from tests.loadgen.making import failed, ok


def repeats(k, n, between, random):
    """Log-normal latencies whose median differs from run to run by `between`."""
    return [random.lognormal(random.normal(0, between), 0.5, n) for _ in range(k)]


def covered(k, between, of, n_runs=300):
    """How often the interval holds the mean over all restarts there could be."""
    random, hits = np.random.default_rng(7), 0
    truth = float(np.exp((0.25 + between**2) / 2))
    for _ in range(n_runs):
        figure = of(repeats(k, 200, between, random), random)
        assert isinstance(figure, Estimate)
        hits += figure.low <= truth <= figure.high
    return hits / n_runs


def by_two_levels(runs, random):
    return two_level(runs, lambda pooled: float(pooled.mean()), "s", random)


def by_requests(runs, random):
    return mean(np.concatenate(runs), "s", random)


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 5])
def test_two_levels_cover_the_truth_over_restarts_where_requests_alone_do_not(k):
    two, one = (covered(k, 0.1, of) for of in (by_two_levels, by_requests))
    print(f"{k} repeats that differ by 10 %: {two:.0%} by two levels, {one:.0%} over requests")
    assert two >= 0.93
    assert one < 0.70


def test_repeats_that_do_not_differ_cost_little_but_the_widening_for_their_number():
    random = np.random.default_rng(1)
    runs = repeats(5, 400, 0.0, random)
    two, one = by_two_levels(runs, random), by_requests(runs, random)
    assert two.point == pytest.approx(one.point)
    assert one.high - one.low < two.high - two.low < 4 * (one.high - one.low)


def test_a_percentile_is_that_of_all_requests_not_an_average_of_percentiles():
    runs = [columns_of(record_table([ok(i, t, [0.01]) for i in range(30)])) for t in (0.1, 0.2, 0.9)]
    figure = percentile_over(runs, "ttft", 0.9, np.random.default_rng(0))
    assert isinstance(figure, Estimate)
    assert (figure.point, figure.n) == (pytest.approx(0.9), 90)
    average = mean_over(runs, "ttft", np.random.default_rng(0))
    assert isinstance(average, Estimate)
    assert average.point == pytest.approx(0.4)


def test_failures_take_the_percentile_they_reach():
    rows = [*(ok(i, 0.1, [0.01]) for i in range(60)), *(failed(60 + i) for i in range(10))]
    runs = [columns_of(record_table(rows))] * 3
    assert isinstance(percentile_over(runs, "ttft", 0.5, np.random.default_rng(0)), Estimate)
    lost = percentile_over(runs, "ttft", 0.9, np.random.default_rng(0))
    assert isinstance(lost, Absent)
    assert "infinitely late" in lost.reason


@pytest.mark.parametrize("k", [0, 1, 2])
def test_two_repeats_are_too_few_for_any_of_it(k):
    runs = [np.ones(50)] * k
    assert isinstance(two_level(runs, np.mean, "s", np.random.default_rng(0)), Absent)
    assert isinstance(noise_floor(np.ones(k)), Absent)
    assert isinstance(over_runs(np.ones(k), "s"), Absent)


def test_one_rate_a_repeat_makes_students_interval():
    runs = [columns_of(record_table([ok(0, 0.101, [0.1 * f] * 9)])) for f in (1.0, 1.1, 0.9)]
    figure = output_rate_over(runs)
    assert isinstance(figure, Estimate)
    rates = [10 / (0.1 + 0.9 * f) for f in (1.0, 1.1, 0.9)]
    assert figure.point == pytest.approx(np.mean(rates))
    half = 4.30265 * np.std(rates, ddof=1) / np.sqrt(3)
    assert figure.high == pytest.approx(np.mean(rates) + half, rel=1e-4)


@pytest.mark.parametrize("k", [3, 6])
def test_two_equal_runs_exceed_the_noise_floor_once_in_twenty(k):
    random = np.random.default_rng(3)
    exceeded = 0
    for _ in range(2000):
        floor = noise_floor(random.lognormal(0, 0.05, k))
        assert isinstance(floor, Estimate)
        a, b = random.lognormal(0, 0.05, 2)
        exceeded += max(a / b, b / a) - 1 > floor.point
    assert exceeded / 2000 == pytest.approx(0.05, abs=0.015)
