import numpy as np
import pytest

from loadgen.metrics.definitions import Samples
from loadgen.stats.across_runs import over_runs, percentile_over
from loadgen.stats.estimates import Absent, Estimate, percentile


def samples(values, weight=1, owner=None):
    n = len(values)
    owners = np.arange(n) if owner is None else owner
    return Samples(np.asarray(values, dtype=float), np.full(n, weight, np.int32), owners.astype(np.int32))


def repeats(k, n, between, random):
    """Log-normal latencies whose median differs from run to run by `between`."""
    return [random.lognormal(random.normal(0, between), 0.5, n) for _ in range(k)]


def covered(k, between, of, n_runs=300):
    """How often the interval holds the median over all restarts there could be."""
    random, hits = np.random.default_rng(7), 0
    for _ in range(n_runs):
        figure = of(repeats(k, 200, between, random), random)
        assert isinstance(figure, Estimate)
        hits += figure.low <= 1.0 <= figure.high
    return hits / n_runs


def by_two_levels(runs, random):
    return percentile_over([samples(run) for run in runs], 0.5, "s", random)


def by_requests(runs, random):
    return percentile(np.concatenate(runs), 0.5, "s")


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
    runs = [samples(np.full(30, t)) for t in (0.1, 0.2, 0.9)]
    figure = percentile_over(runs, 0.9, "s", np.random.default_rng(0))
    assert isinstance(figure, Estimate)
    assert (figure.point, figure.n) == (pytest.approx(0.9), 90)


def test_tokens_stay_with_their_requests_which_stutter_as_one():
    random = np.random.default_rng(2)
    slow = [np.repeat(random.lognormal(0, 0.5, 40), 50)] * 3
    owner = np.repeat(np.arange(40), 50)
    together, alone = (
        percentile_over([samples(run, owner=own) for run in slow], 0.5, "s", np.random.default_rng(0))
        for own in (owner, None)
    )
    assert together.point == alone.point
    assert np.log(together.high / together.low) > 1.5 * np.log(alone.high / alone.low)


def test_a_sample_counts_as_often_as_it_weighs():
    runs = [samples([1.0, 2.0, 3.0] * 10, weight=w) for w in (1, 1, 1)]
    heavy = [samples([1.0, 2.0, 3.0] * 10, weight=4) for _ in range(3)]
    light, much = (percentile_over(each, 0.5, "s", np.random.default_rng(0)) for each in (runs, heavy))
    assert (light.point, light.n, much.point, much.n) == (2.0, 90, 2.0, 360)


def test_failures_take_the_percentile_they_reach():
    runs = [samples(np.r_[np.full(60, 0.1), np.full(10, np.inf)])] * 3
    assert isinstance(percentile_over(runs, 0.5, "s", np.random.default_rng(0)), Estimate)
    lost = percentile_over(runs, 0.9, "s", np.random.default_rng(0))
    assert isinstance(lost, Absent)
    assert "infinitely late" in lost.reason


def test_a_bound_that_lies_among_failures_in_some_resamples_is_none():
    runs = [samples(np.r_[np.linspace(1, 2, 100), np.full(bad, np.inf)]) for bad in (2, 8, 14)]
    figure = percentile_over(runs, 0.9, "s", np.random.default_rng(0))
    assert isinstance(figure, Estimate)
    assert (figure.low, figure.high) == (None, None)
    assert "failed" in figure.note


@pytest.mark.parametrize("k", [0, 1, 2])
def test_two_repeats_are_too_few_for_any_of_it(k):
    assert isinstance(percentile_over([samples(np.ones(50))] * k, 0.5, "s", np.random.default_rng(0)), Absent)
    assert isinstance(over_runs(np.ones(k), "s"), Absent)


def test_few_requests_in_all_have_no_tail():
    few = percentile_over([samples(np.ones(100))] * 3, 0.99, "s", np.random.default_rng(0))
    assert "662" in few.reason


def test_one_number_a_repeat_makes_students_interval_about_their_geometric_mean():
    values = np.array([90.0, 100.0, 115.0])
    figure = over_runs(values, "tok/s")
    assert isinstance(figure, Estimate)
    logs = np.log(values)
    assert figure.point == pytest.approx(np.exp(logs.mean()))
    half = 4.30265 * logs.std(ddof=1) / np.sqrt(3)
    assert figure.high == pytest.approx(np.exp(logs.mean() + half), rel=1e-4)
    assert figure.low > 0


def test_a_repeat_without_any_rate_has_no_interval_of_ratios():
    assert isinstance(over_runs(np.array([0.0, 1.0, 1.0]), "1/s"), Absent)
