import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sps

from burstline.measure.stats.estimates import (
    Absent,
    Estimate,
    early_stopping_bound,
    early_stopping_discards,
    early_stopping_floor,
    measured,
    order_statistic_ranks,
)
from burstline.measure.stats.quantiles import (
    Ranked,
    Samples,
    extremes,
    mean,
    percentiles,
    quantile_of,
)
from burstline.measure.stats.serial_correlation import rate_interval
from tests.measure.making import percentile

FLOORS = {0.5: 11, 0.9: 64, 0.95: 130, 0.99: 662, 0.999: 6636}


@pytest.mark.parametrize(("p", "floor"), FLOORS.items())
def test_the_early_stopping_floors_are_mlperfs(p, floor):
    assert early_stopping_floor(p) == floor
    assert early_stopping_discards(floor - 1, p) == 0


@pytest.mark.parametrize(
    ("n", "p", "t"), [(1000, 0.99, 2), (1000, 0.95, 34), (1000, 0.9, 78), (10_000, 0.99, 77)]
)
def test_early_stopping_takes_the_sample_that_mlperf_takes(n, p, t):
    assert early_stopping_discards(n, p) == t
    bound = early_stopping_bound(np.arange(n, dtype=float), p, "s")
    assert isinstance(bound, Estimate)
    assert bound.point == n - t


@pytest.mark.parametrize("t", [1, 2, 5])
@pytest.mark.parametrize("p", [0.5, 0.9, 0.99])
def test_the_discards_agree_with_the_incomplete_beta_function(p, t):
    """find_min(t) by search, from its definition."""
    h = next(h for h in range(1, 5000) if sps.beta.cdf(p, h, t + 1) < 0.01)
    assert early_stopping_discards(h + t, p) == t
    assert early_stopping_discards(h + t - 1, p) == t - 1


RANKS = {
    100: (97, None),
    200: (195, None),
    500: (490, 500),
    1000: (983, 997),
    3000: (2959, 2981),
    10_000: (9880, 9920),
}


@pytest.mark.parametrize(("n", "ranks"), RANKS.items())
def test_the_ranks_about_a_p99_are_those_of_the_binomial(n, ranks):
    assert order_statistic_ranks(n, 0.99) == ranks


def order_statistic_coverage(n, p, low_rank, high_rank):
    """The probability that the true quantile lies between the two ranks."""
    return sps.binom.cdf(high_rank - 1, n, p) - sps.binom.cdf(low_rank - 1, n, p)


def test_the_interval_of_a_p99_of_1000_holds_it_as_often_as_the_binomial_says_by_hand():
    low, high = order_statistic_ranks(1000, 0.99)
    by_hand = math.fsum(math.comb(1000, k) * 0.99**k * 0.01 ** (1000 - k) for k in range(low, high))
    assert by_hand == pytest.approx(order_statistic_coverage(1000, 0.99, low, high))
    assert 0.95 <= by_hand < 0.98


@given(st.integers(11, 3000), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_an_interval_covers_at_least_what_it_says_and_one_rank_less_does_not(n, p):
    low, high = order_statistic_ranks(n, p)
    tail = 0.025
    if low is not None:
        assert sps.binom.cdf(low - 1, n, p) <= tail < sps.binom.cdf(low, n, p)
    if high is not None:
        assert sps.binom.sf(high - 1, n, p) <= tail < sps.binom.sf(high - 2, n, p)
    if low is not None and high is not None:
        assert order_statistic_coverage(n, p, low, high) >= 0.95


@given(
    st.lists(st.one_of(st.integers(0, 9).map(float), st.just(math.inf)), min_size=1, max_size=60),
    st.lists(st.floats(0, 1), max_size=4),
    st.booleans(),
)
def test_what_is_ordered_for_some_quantiles_has_those_and_the_largest_in_place(values, ps, with_nan):
    values = np.array([*values, *[math.nan] * with_nan])
    samples = Samples(values, np.ones(len(values), np.int8), np.ones(len(values), np.int64))
    some, every = samples.ranked_for(ps), samples.ranked
    np.testing.assert_array_equal([some.quantile(p) for p in ps], [every.quantile(p) for p in ps])
    np.testing.assert_array_equal(some.value[-1], every.value[-1])
    assert samples.value is values, "the samples stay in the order of their requests"


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1e6), min_size=64, max_size=200))
def test_a_percentile_is_numpys_linear_quantile_in_whatever_way_it_is_asked_for(values):
    for p in (0.5, 0.9):
        figure = percentile(np.array(values), p, "s")
        assert isinstance(figure, Estimate)
        assert figure.point == pytest.approx(np.quantile(values, p), rel=1e-9, abs=1e-12)
        assert quantile_of(np.array(values), p) == figure.point
        assert (figure.low, figure.level, figure.note[:5]) == (None, None, "1 run")


@pytest.mark.parametrize(("p", "floor"), [(0.5, 11), (0.9, 64), (0.95, 130), (0.99, 662)])
def test_below_its_floor_a_percentile_is_absent_and_says_how_many_it_needs(p, floor):
    short = percentile(np.ones(floor - 1), p, "s")
    assert isinstance(short, Absent)
    assert str(floor) in short.reason
    assert isinstance(percentile(np.ones(floor), p, "s"), Estimate)


def test_a_p99_is_absent_when_more_than_one_percent_failed():
    values = np.arange(1000.0)
    values[:11] = np.inf
    figure = percentile(values, 0.99, "s")
    assert isinstance(figure, Absent)
    assert "11 of the 1,000 measured requests did not succeed" in figure.reason
    assert isinstance(percentile(values, 0.9, "s"), Estimate)


def test_ten_failures_of_1001_leave_a_p99_just_below_them():
    values = np.arange(1001.0)
    values[-10:] = np.inf
    figure = percentile(values, 0.99, "s")
    assert isinstance(figure, Estimate)
    assert figure.point == 990.0


@given(st.integers(1, 200))
def test_failures_never_improve_a_percentile(n_failed):
    values = np.random.default_rng(n_failed).exponential(1.0, 1000)
    spoilt = values.copy()
    spoilt[:n_failed] = np.inf
    for p in (0.5, 0.9, 0.99):
        before, after = percentile(values, p, "s"), percentile(spoilt, p, "s")
        assert isinstance(before, Estimate)
        assert isinstance(after, Absent) or after.point >= before.point


def test_a_percentile_next_to_a_failure_is_one():
    values = np.r_[np.arange(10.0), np.full(10, np.inf)]
    assert isinstance(percentile(values, 0.5, "s"), Absent)
    assert quantile_of(values, 0.5) == np.inf


def test_a_mean_is_absent_when_any_failed():
    assert isinstance(mean(Samples.per_request(np.array([1.0, np.inf, 2.0])), "s"), Absent)


def test_what_is_undefined_is_left_out_and_not_counted():
    figure = mean(Samples.per_request(np.array([1.0, np.nan, 3.0])), "s")
    assert isinstance(figure, Estimate)
    assert (figure.point, figure.n) == (2.0, 2)


def test_what_is_undefined_is_no_fast_request_in_a_percentile_or_its_bound():
    values = np.concatenate([np.full(30, np.nan), np.arange(1.0, 31.0)])
    figure, bound = percentile(values, 0.5, "s"), early_stopping_bound(values, 0.5, "s")
    assert isinstance(figure, Estimate)
    assert isinstance(bound, Estimate)
    assert (figure.point, figure.n, bound.n) == (15.5, 30, 30)
    assert bound == early_stopping_bound(values[30:], 0.5, "s")
    assert quantile_of(values, 0.5) == 15.5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 9)), min_size=12, max_size=60))
def test_a_weighted_percentile_is_that_of_the_values_repeated(samples):
    values, weights = (np.array(column) for column in zip(*sorted(samples), strict=True))
    pooled = Samples(values.astype(float), weights, np.ones(len(values), np.int64))
    found = percentiles(pooled, [0.5], "s")["p50"]
    assert isinstance(found, Estimate)
    assert found.point == pytest.approx(np.quantile(np.repeat(values, weights), 0.5))
    assert found.n == int(weights.sum())
    assert mean(pooled, "s").point == pytest.approx(np.repeat(values, weights).mean())


def test_json_has_every_key_and_never_a_naked_number():
    assert Estimate(1.0, None, 2.0, 0.95, 3, "s", "why").to_json() == {
        "point": 1.0, "low": None, "high": 2.0, "level": 0.95, "n": 3, "unit": "s", "note": "why",
    }  # fmt: skip
    assert Absent("no", "never-sent").to_json() == {"point": None, "absent": "no", "code": "never-sent"}
    assert Absent.from_json({"point": None, "absent": "no"}) == Absent("no")
    assert measured(math.nan, "s", "never") == measured(None, "s", "never") == Absent("never")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ranks_and_bounds_of_independent_samples_cover_what_they_promise_over_2000_runs():
    random, truth, n = (
        np.random.default_rng(7),
        {p: math.exp(0.5 * sps.norm.ppf(p)) for p in (0.5, 0.99)},
        1000,
    )
    hits = dict.fromkeys((0.5, 0.99, "bound"), 0)
    for _ in range(2000):
        values = np.sort(np.exp(0.5 * random.standard_normal(n)))
        for p in (0.5, 0.99):
            low, high = order_statistic_ranks(n, p)
            hits[p] += values[low - 1] <= truth[p] <= values[high - 1]
        hits["bound"] += truth[0.99] <= early_stopping_bound(values, 0.99, "s").point
    for p in (0.5, 0.99):
        exact = order_statistic_coverage(n, p, *order_statistic_ranks(n, p))
        assert hits[p] / 2000 == pytest.approx(exact, abs=0.01)
    assert hits["bound"] / 2000 >= 0.985


@pytest.mark.parametrize("weights", [(1, 1), (2, 2), (1, 2, 3)])
def test_ranks_are_those_of_the_values_repeated_whatever_their_weights(weights):
    rng = np.random.default_rng(0)
    value = rng.integers(0, 20, 1000).astype(float)  # mostly equal ones
    weight = rng.choice(weights, 1000)
    every = np.sort(np.repeat(value, weight))
    ranked = Ranked.of(value, weight)
    assert ranked.total == len(every)
    assert [ranked.at(k - 0.5) for k in range(1, len(every) + 1)] == every.tolist()
    assert [ranked.quantile(p) for p in (0.0, 0.3, 0.999, 1.0)] == np.quantile(
        every, [0, 0.3, 0.999, 1]
    ).tolist()


def test_amounts_are_summed_by_request_also_where_a_request_has_no_sample():
    samples = Samples(np.array([1.0, 2.0, 3.0]), np.array([1, 2, 1]), np.array([0, 2, 0, 1]))
    assert samples.by_request(samples.value).tolist() == [0, 3, 0, 3]
    assert samples.by_request(samples.value > 1).tolist() == [0, 1, 0, 1]


def test_no_rate_is_below_zero() -> None:
    """Where almost nothing came, the interval reaches down to nothing at all and no further."""
    came = np.zeros(64)
    came[[5, 40]] = (1.0, 30.0)
    low, high = rate_interval(came, np.ones(64), 8) or (math.nan, math.nan)
    assert low == 0.0
    assert high > came.mean()


def test_the_spread_and_the_ends_of_weighted_values_are_numpys_of_the_values_repeated():
    values, weights = np.array([3.0, 1.0, 2.0, 9.0]), np.array([1, 4, 2, 1])
    found = extremes(Samples(values, weights, np.array([2, 2])), "s")
    repeated = np.repeat(values, weights)
    assert found["std"].point == pytest.approx(np.std(repeated, ddof=1))
    assert (found["min"].point, found["max"].point, found["max"].n) == (1.0, 9.0, len(repeated))
    assert isinstance(extremes(Samples.per_request(np.array([1.0, np.inf])), "s")["max"], Absent)
