import numpy as np
import pytest

from burstline.measure.stats.estimates import Absent, Estimate
from burstline.measure.stats.quantiles import Samples, over_runs, percentile_over_runs
from tests.measure.making import percentile


def samples(values, weight=1):
    one = Samples.per_request(np.asarray(values, dtype=float))
    return Samples(one.value, one.weight * np.int32(weight), one.counts)


def repeats(k, n, between, random):
    """Log-normal latencies whose median differs from run to run by `between`."""
    return [random.lognormal(random.normal(0, between), 0.5, n) for _ in range(k)]


@pytest.mark.parametrize(("k", "p"), [(3, 0.5), (5, 0.5), (3, 0.9)])
def test_the_interval_between_runs_covers_what_other_starts_would_give(k, p):
    """The truth is the percentile over all starts there could be, of which each run shows one."""
    random, hits = np.random.default_rng(7), 0
    every = np.concatenate(repeats(4000, 100, 0.1, np.random.default_rng(1)))
    truth = np.quantile(every, p)
    for _ in range(400):
        figure = percentile_over_runs([samples(run) for run in repeats(k, 200, 0.1, random)], p, "s")
        assert isinstance(figure, Estimate)
        hits += figure.low <= truth <= figure.high
    assert 0.92 <= hits / 400 <= 0.98


def test_two_runs_are_pooled_with_equal_weight_and_have_no_interval():
    runs = [np.linspace(1, 2, 30), np.linspace(3, 4, 300)]
    figure = percentile_over_runs([samples(run) for run in runs], 0.5, "s")
    assert 2.0 <= figure.point <= 3.0, "half of the weight lies in each run, however many requests it has"
    assert (figure.low, figure.high) == (None, None)
    assert "3 runs give an interval" in figure.note


def test_the_point_is_the_percentile_of_all_requests_as_a_figure_would_draw_it():
    runs = repeats(3, 200, 0.1, np.random.default_rng(0))
    figure = percentile_over_runs([samples(run) for run in runs], 0.9, "s")
    assert figure.point == pytest.approx(percentile(np.concatenate(runs), 0.9, "s").point)


def test_one_run_has_the_number_that_its_own_table_prints():
    run = np.random.default_rng(0).exponential(1.0, 100)
    assert percentile_over_runs([samples(run)], 0.9, "s") == percentile(run, 0.9, "s")


def test_a_sample_counts_as_often_as_it_weighs():
    light, much = (
        percentile_over_runs([samples([1.0, 2.0, 3.0] * 10, weight=w)] * 3, 0.5, "s") for w in (1, 4)
    )
    assert (light.point, light.n, much.point, much.n) == (2.0, 90, 2.0, 360)


def test_failures_take_the_percentile_they_reach():
    runs = [samples(np.r_[np.linspace(0.1, 0.2, 60), np.full(10, np.inf)])] * 3
    assert isinstance(percentile_over_runs(runs, 0.5, "s"), Estimate)
    lost = percentile_over_runs(runs, 0.9, "s")
    assert isinstance(lost, Absent)
    assert "infinitely late" in lost.reason


def test_where_some_runs_lose_the_percentile_to_failures_there_is_no_interval():
    runs = [samples(np.r_[np.linspace(1, 2, 100), np.full(bad, np.inf)]) for bad in (2, 8, 14)]
    figure = percentile_over_runs(runs, 0.9, "s")
    assert (figure.low, figure.high) == (None, None)
    assert "failures" in figure.note


def test_few_requests_in_all_have_no_tail():
    assert "662" in percentile_over_runs([samples(np.ones(100))] * 3, 0.99, "s").reason


def test_one_number_a_run_makes_students_interval_about_their_geometric_mean():
    values = np.array([90.0, 100.0, 115.0])
    figure = over_runs(values, "tok/s")
    logs = np.log(values)
    assert figure.point == pytest.approx(np.exp(logs.mean()))
    half = 4.30265 * logs.std(ddof=1) / np.sqrt(3)
    assert figure.high == pytest.approx(np.exp(logs.mean() + half), rel=1e-4)


@pytest.mark.parametrize("k", [1, 2])
def test_one_or_two_numbers_have_no_interval(k):
    assert over_runs(np.ones(k), "s").low is None
