"""Intervals in an open loop: requests that wait in the same queue say less than their number."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from burstline.measure.metrics.definitions import METRICS, samples_of
from burstline.measure.record.columns import columns_of
from burstline.measure.stats.estimates import Absent, Estimate, early_stopping_bound, order_statistic_ranks
from burstline.measure.stats.quantiles import Samples
from burstline.measure.stats.serial_correlation import (
    OrderedSamples,
    block_length,
    bound_in_order,
    effective_size,
    mean_in_order,
    percentile_in_order,
    rate_interval,
    share_in_order,
)
from tests.measure.making import percentile
from tests.measure.queueing import queued

PS = (0.5, 0.9, 0.95, 0.99)


def series(phi, n, random):
    """Log-normal, sigma 0.5, its logarithms an autoregression of first order."""
    logs = np.empty(n)
    shocks = random.normal(size=n) * math.sqrt(1 - phi**2)
    logs[0] = random.normal()
    for k in range(1, n):
        logs[k] = phi * logs[k - 1] + shocks[k]
    return np.exp(0.5 * logs)


def ordered(metric, c):
    return OrderedSamples.of(samples_of(metric, c), c.due_s)


def by_ranks(values, p):
    """The interval of order statistics, which takes requests for independent."""
    low, high = order_statistic_ranks(len(values), p)
    return replace(percentile(values, p, "s"), low=np.sort(values)[low - 1], high=np.sort(values)[high - 1])


def in_time(values):
    """Values in the order of time, one a request."""
    return OrderedSamples.of(Samples.per_request(values), np.arange(len(values)))


def mm1(load, n, random):
    """Times in an M/M/1 system, empty at first, mean service 1: at last exponential, mean 1 / (1 - load)."""
    services, gaps = random.exponential(1, n), random.exponential(1 / load, n)
    steps = np.concatenate([[0.0], np.cumsum(services[:-1] - gaps[1:])])
    return services + steps - np.minimum.accumulate(steps)


def bare(point, n):
    return Estimate(point, None, None, 0.95, n, "s")


def holds(figure, truth):
    low = -math.inf if figure.low is None else figure.low
    return low <= truth <= (math.inf if figure.high is None else figure.high)


def coverage(load, n_runs, n=1000):
    """How often the intervals of mean and percentiles hold the truth, and have an upper end."""
    random = np.random.default_rng(21)
    hits, ends = dict.fromkeys(("mean", *PS), 0), dict.fromkeys(("mean", *PS), 0)
    for _ in range(n_runs):
        values = mm1(load, n, random)
        samples = in_time(values)
        found = {p: percentile_in_order(bare(np.quantile(values, p), n), samples, p) for p in PS}
        for name, figure in {"mean": mean_in_order(bare(values.mean(), n), samples), **found}.items():
            quantile = 1.0 if name == "mean" else -math.log(1 - name)
            hits[name] += holds(figure, quantile / (1 - load))
            ends[name] += figure.high is not None
    return {name: hit / n_runs for name, hit in hits.items()}, {k: v / n_runs for k, v in ends.items()}


def test_independent_values_are_worth_their_number_and_a_queue_far_less():
    random = np.random.default_rng(0)
    alone = effective_size(in_time(random.lognormal(0, 0.5, 1000)), 0.9)
    queue = effective_size(in_time(mm1(0.7, 1000, random)), 0.9)
    assert 600 < alone <= 1000
    assert queue < 150


def test_without_dependence_the_interval_is_near_the_order_statistics_own():
    values = np.random.default_rng(1).lognormal(0, 0.5, 1000)
    for p in (0.5, 0.9, 0.95):
        exact = by_ranks(values, p)
        found = percentile_in_order(exact, in_time(values), p)
        assert found.point == exact.point
        assert found.high - found.low == pytest.approx(exact.high - exact.low, rel=0.35)


def test_a_queues_percentile_says_what_its_requests_are_worth():
    values = mm1(0.7, 1000, np.random.default_rng(2))
    for p in PS:
        found = percentile_in_order(percentile(values, p, "s"), in_time(values), p)
        assert found.low < found.point
        assert "1,000 correlated values have an effective sample size of" in found.note


def test_a_short_run_at_a_queue_says_that_its_intervals_are_often_too_narrow():
    random = np.random.default_rng(1)
    told = [
        "(the intervals of fewer than 1,000 correlated values are often too narrow)"
        in percentile_in_order(bare(np.quantile(values, 0.9), len(values)), in_time(values), 0.9).note
        for values in (mm1(0.8, 260, random), random.exponential(1, 260), mm1(0.5, 2000, random))
    ]
    assert told == [True, False, False]


def test_above_the_largest_value_the_tail_is_taken_for_exponential():
    values = np.random.default_rng(0).exponential(1.0, 200)
    point = float(np.quantile(values, 0.99))
    found = percentile_in_order(bare(point, 200), in_time(values), 0.99)
    excess = values[values > point].mean() - point
    assert values.max() < found.high < point + math.log(1000) * excess


def test_where_too_little_is_known_of_the_tail_the_note_says_how_much_longer_to_run():
    values = series(0.99, 200, np.random.default_rng(0))
    found = percentile_in_order(percentile(values, 0.95, "s"), in_time(values), 0.95)
    assert found.low < found.point
    assert found.high is None
    assert re.search(r"p95 has no upper bound; run \d+ times as long$", found.note)


def test_no_time_is_below_0():
    values = series(0.99, 100, np.random.default_rng(1))
    assert percentile_in_order(percentile(values, 0.5, "s"), in_time(values), 0.5).low == 0.0


def test_where_the_error_is_as_large_as_the_mean_there_is_no_upper_end():
    values = np.r_[np.full(90, 1.0), np.full(10, 200.0)]
    found = mean_in_order(bare(values.mean(), 100), in_time(values))
    assert found.high is None
    assert 0 < found.low < found.point
    assert "no upper bound" in found.note


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_values_that_never_vary_have_an_interval_without_width(value):
    values = np.full(100, value)
    assert mean_in_order(bare(value, 100), in_time(values)).high == value
    found = percentile_in_order(bare(value, 100), in_time(values), 0.5)
    assert (found.low, found.high) == (value, value)


def test_failures_lie_above_every_bound():
    values = np.r_[np.random.default_rng(0).lognormal(0, 0.5, 905), np.full(95, np.inf)]
    np.random.default_rng(1).shuffle(values)
    found = percentile_in_order(percentile(values, 0.9, "s"), in_time(values), 0.9)
    assert (found.high, found.note.endswith("p90 has no upper bound")) == (None, True)
    assert math.isfinite(found.low)


def test_what_is_absent_stays_absent():
    gone = Absent("why")
    samples = in_time(np.ones(20))
    assert mean_in_order(gone, samples) is gone
    assert percentile_in_order(gone, samples, 0.5) is gone


def test_a_bound_with_99_percent_confidence_needs_662_independent_requests():
    random = np.random.default_rng(3)
    alone, queue = random.lognormal(0, 0.5, 1000), mm1(0.7, 1000, random)
    assert early_stopping_bound(alone, 0.99, "s", 1000) == early_stopping_bound(alone, 0.99, "s")
    wider = early_stopping_bound(alone, 0.9, "s", 200)
    assert wider.point > early_stopping_bound(alone, 0.9, "s").point
    lost = bound_in_order(in_time(queue), 0.99, "s")
    assert isinstance(lost, Absent)
    assert "662" in lost.reason
    assert "effective sample size" in lost.reason


def test_one_token_replies_have_no_time_per_token_and_no_bound_on_it():
    c = columns_of(queued(0.5, 100, 0, tokens=1))
    assert bound_in_order(ordered(METRICS["tpot"], c), 0.5, "s") == Absent(
        "a bound on p50 needs 11 samples, there are 0"
    )


def test_a_share_over_requests_that_fail_in_crowds_is_known_less_well():
    crowded, scattered = np.zeros(1000), np.zeros(1000)
    crowded[400:500] = math.inf
    scattered[::10] = math.inf
    found = [share_in_order(in_time(missed)) for missed in (crowded, scattered)]
    assert [figure.point for figure in found] == [0.9, 0.9]
    assert found[0].high - found[0].low > 2 * (found[1].high - found[1].low)
    assert isinstance(share_in_order(in_time(np.empty(0))), Absent)


def attained(load, true, n_runs, n):
    """How often the interval of a share whose misses are `1 - true` holds it, and lies above 99% wholly."""
    random, within, passed = np.random.default_rng(3), 0, 0
    bound = -math.log(1 - true) / (1 - load)
    for _ in range(n_runs):
        found = share_in_order(in_time(mm1(load, 2 * n, random)[n:] / bound))
        within += holds(found, true)
        passed += found.low >= 0.99
    return within / n_runs, passed / n_runs


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_no_queue_passes_for_better_because_no_crowd_of_misses_came(load):
    """Were all requests independent, 10 and 58% of runs at a true 98.5% would show at least 99%."""
    within, passed = attained(load, 0.985, 100, 1000)
    assert within >= 0.92
    assert passed <= 0.05


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("true", [0.8, 0.95, 0.985])
def test_shares_of_a_queue_cover(true):
    for n in (1000, 4000):
        for load in (0.5, 0.7, 0.8, 0.85):
            within, passed = attained(load, true, 1000, n)
            print(f"share {true:.1%}, {n:,} at {load:.0%}: holds {within:.1%}, at least 99%: {passed:.1%}")
            assert within >= 0.91
            assert passed <= 0.05


def test_samples_are_numbered_by_when_their_requests_were_due_and_those_of_a_token_count_as_often():
    c = columns_of(queued(0.7, 50, 0, tokens=4))
    samples = ordered(METRICS["itl"], c)
    assert samples.order.tolist() == np.argsort(c.due_s, kind="stable").tolist()
    assert samples.weights.tolist() == [3.0] * 50


def test_intervals_of_a_queue_hold_the_truth_where_those_of_single_requests_do_not():
    covered, _ = coverage(0.7, 120)
    assert min(covered.values()) >= 0.85
    random, naive = np.random.default_rng(4), 0
    for _ in range(120):
        naive += holds(by_ranks(mm1(0.7, 1000, random), 0.9), -math.log(0.1) / 0.3)
    assert naive / 120 < 0.5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("load", "least"), [(0.5, 0.93), (0.7, 0.90), (0.8, 0.86), (0.9, 0.75)])
def test_2000_runs_of_1000_requests_to_a_queue_are_covered(load, least):
    """A p99 of 1,000 has mostly no upper end, so that its interval holds the truth more often."""
    covered, ended = coverage(load, 2000)
    print(f"load {load}: covered {covered}, with an upper end {ended}")
    for name, share in covered.items():
        assert least <= share <= (1.0 if name == 0.99 else 0.98), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phi", [0.0, 0.8])
def test_2000_series_are_covered_with_and_without_dependence(phi):
    random, hits = np.random.default_rng(13), {"mean": 0, 0.5: 0, 0.9: 0}
    truth = {"mean": math.exp(0.125), 0.5: 1.0, 0.9: math.exp(0.5 * 1.2815516)}
    for _ in range(2000):
        values = series(phi, 1000, random)
        samples = in_time(values)
        hits["mean"] += holds(mean_in_order(bare(values.mean(), 1000), samples), truth["mean"])
        for p in (0.5, 0.9):
            hits[p] += holds(percentile_in_order(bare(np.quantile(values, p), 1000), samples, p), truth[p])
    print(f"autocorrelation {phi}: {hits}")
    assert all(0.93 <= hit / 2000 <= 0.995 for hit in hits.values())


# ---- blocks and rates


def rate_coverage(phi, n, n_runs):
    random = np.random.default_rng(11)
    hits = 0
    for _ in range(n_runs):
        low, high = rate_interval(series(phi, n, random), np.ones(n), 1)
        hits += low <= math.exp(0.125) <= high
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


def test_too_few_blocks_give_no_interval_of_a_rate():
    assert rate_interval(np.ones(26), np.ones(26), 9) is None
    assert rate_interval(np.arange(1.0, 46), np.ones(45), 9) is not None


def test_a_rate_that_may_be_zero_still_has_an_interval():
    low, high = rate_interval(np.r_[np.zeros(95), np.ones(5)], np.ones(100), 10)
    assert low < 0.05 < high


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_two_thousand_rates_are_covered_with_and_without_dependence(phi):
    share = rate_coverage(phi, 2000, 2000)
    print(f"autocorrelation {phi}: {share:.1%}")
    assert 0.93 <= share <= 0.985
