"""The search for the highest load within SLOs, on a virtual clock: it errs no more often than it says.

`LIMIT_SEARCHES=200 pytest -m slow -s tests/measure/test_limit_search.py` for the figures of docs/method.md.
"""

import math
import os

import numpy as np
import pytest
from scipy import signal, special, stats

from burstline.measure.stats.figure import Result
from burstline.measure.stats.limit_search import (
    GROWTH,
    Evidence,
    LatencyBound,
    Purpose,
    _would_miss,
    critical_tail,
    judge,
    search,
)
from tests.measure.queue_lab import bisected, closed_loop, found_by, mmc, systems

N_SEARCHES = int(os.environ.get("LIMIT_SEARCHES", "60"))
P90 = LatencyBound("ttft.p90<=1s", 0.9, 1.0)


def independent(load, limit, n, random, steep=4.0):
    """Latencies that do not depend on each other; nine tenths are below 1 s just at the limit."""
    middle = steep * math.log(load / limit) - 0.3 * special.ndtri(0.9)
    return random.lognormal(middle, 0.3, n)


def searched(
    limit, start, seed, *, users=False, budget=10**9, bounds=(P90,), limits=None, error=0.05, steep=4.0
):
    """What a search finds at a server whose latencies are independent, and how many requests it took."""
    asking, evidence, n_spent, number, drawn = search(bounds, start, users=users, error=error), None, 0, 0, ()
    random = np.random.default_rng(seed)
    while True:
        try:
            ask = asking.send(evidence)
        except StopIteration as ended:
            return ended.value, n_spent
        if ask.number != number:
            number, drawn = ask.number, tuple(np.empty(0) for _ in bounds)
        n_more = ask.n - len(drawn[0])
        n_spent += n_more
        drawn = tuple(
            np.append(old, independent(ask.load, each, n_more, random, steep))
            for old, each in zip(drawn, limits or (limit,), strict=True)
        )
        evidence = Evidence(drawn, None if users else np.zeros(ask.n)) if n_spent < budget else None


def is_wrong(found, limit):
    return (found.low is not None and found.low >= limit) or (found.high is not None and found.high <= limit)


def test_the_interval_is_a_tenth_wide_and_holds_the_limit_as_often_as_it_says():
    n_wrong = 0
    for seed in range(60):
        start = 10 * 2 ** np.random.default_rng(seed).uniform(-4, 3)
        found, _ = searched(10.0, start, seed)
        assert found.low * 1.1001 >= found.high > found.low
        assert found.more_requests is None
        n_wrong += is_wrong(found, 10.0)
    assert stats.binomtest(n_wrong, 60, 0.05, "greater").pvalue > 0.01


@pytest.mark.parametrize("k", [pytest.param(15, marks=pytest.mark.slow), 21])
def test_scouts_that_erred_are_sent_again(k):
    """In both, a scout's wrong answer stands against a claim's."""
    system = systems(k)
    start = system.limit * 2 ** np.random.default_rng(k + 10**6).uniform(-3, 2)
    found, _ = found_by(system, start, k)
    assert found.low < system.limit < found.high


@pytest.mark.slow
def test_a_smaller_error_costs_more_requests():
    def cost(error):
        return np.median([searched(10.0, 5.0, seed, error=error, steep=1.0)[1] for seed in range(8)])

    assert cost(0.005) > 1.3 * cost(0.3)


def test_both_ends_are_claimed_by_fresh_probes():
    found, _ = searched(10.0, 3.0, 1)
    by = {probe.purpose: probe for probe in found.probes if probe.load in (found.low, found.high)}
    assert by[Purpose.HOLDS].load == found.low
    assert by[Purpose.HOLDS].last.judged == Result.PASS
    assert by[Purpose.MISSES].load == found.high
    assert by[Purpose.MISSES].last.judged == Result.FAIL


def test_users_at_a_time_are_whole_and_their_interval_holds_the_limit():
    n_wrong = 0
    for seed in range(20):
        found, _ = searched(6.5, 1.0, seed, users=True)
        assert found.low == int(found.low)
        assert found.high - found.low <= 2
        n_wrong += is_wrong(found, 6.5)
    assert n_wrong <= 3


@pytest.mark.slow
def test_users_who_wait_for_each_other_err_as_seldom_as_stated():
    n_wrong, costs = 0, []
    for seed in range(30):
        random = np.random.default_rng(seed)
        c, p = int(random.choice([2, 4, 8, 16])), float(random.choice([0.9, 0.95]))
        system = closed_loop(c, p, float(random.uniform(0.8, 6.0)))
        start = max(1, round(system.limit * 2 ** random.uniform(-3, 2)))
        found, n_requests = found_by(system, start, seed, users=True)
        n_wrong += is_wrong(found, system.limit)
        costs.append(n_requests)
        assert found.high <= found.low * 1.1 + 2
    print(f"{n_wrong} of 30 wrong, {np.median(costs):,.0f} requests in the median")
    assert stats.binomtest(n_wrong, 30, 0.05, "greater").pvalue > 0.01


def drifting(share, n, random):
    """Latencies whose middle drifts, while those beyond 1 s are independent."""
    middle = np.tanh(signal.lfilter([0.05], [1, -0.99], random.standard_normal(n)))
    return np.where(random.random(n) < share, 2.0, 0.3 * np.exp(0.5 * middle))


def test_a_drift_of_latencies_below_the_bound_costs_a_share_beyond_it_little():
    random = np.random.default_rng(0)
    sizes = [
        judge(Evidence((drifting(0.1, 740, random),), None), (P90,), 0.01, 4).shares[0].n_effective
        for _ in range(50)
    ]
    assert np.median(sizes) > 200
    passed = [
        judge(Evidence((drifting(0.1, 2000, random),), None), (P90,), 0.05, 4).judged == Result.PASS
        for _ in range(200)
    ]
    assert sum(passed) <= stats.binom.ppf(0.99, 200, 0.05), "just at the limit as often as its level"


def test_of_several_slos_the_first_that_is_missed_is_the_limit():
    bounds = (P90, LatencyBound("tpot.p90<=1s", 0.9, 1.0))
    found, _ = searched(0, 4.0, 3, bounds=bounds, limits=(30.0, 10.0))
    assert found.low < 10.0 < found.high


def test_where_no_load_holds_it_says_so_and_which_slo_is_missed():
    bounds = (P90, LatencyBound("tpot.p90<=1s", 0.9, 1.0))
    found, _ = searched(0, 4.0, 0, users=True, bounds=bounds, limits=(30.0, 0.5))
    assert found.none_holds
    assert found.worst.text == "tpot.p90<=1s"
    assert found.low is None


@pytest.mark.parametrize("budget", [10, 100, 1000])
def test_a_budget_ends_the_search_with_what_is_known(budget):
    found, spent = searched(10.0, 5.0, 0, budget=budget)
    assert spent < 3 * budget + 500
    assert found.low is None or found.low < 10
    assert found.more_requests
    whole, all_spent = searched(10.0, 5.0, 0)
    assert whole.more_requests is None
    if budget == 1000:
        assert all_spent / 20 < found.more_requests < 20 * all_spent


def test_the_looks_together_keep_the_error():
    random = np.random.default_rng(0)
    steps = np.diff(GROWTH ** np.arange(12), prepend=0)
    walks = np.cumsum(random.standard_normal((40_000, 12)) * np.sqrt(steps), axis=1)
    line = -special.ndtri(critical_tail(0.05, 12))
    crossed = (walks / np.sqrt(np.cumsum(steps)) > line).any(axis=1).mean()
    assert crossed == pytest.approx(0.05, abs=0.005)
    assert critical_tail(0.05, 1) == pytest.approx(0.05, rel=0.01)


def test_a_slow_start_decides_nothing():
    random = np.random.default_rng(0)
    for n_slow in (20, 50, 100):
        values = independent(5, 10, 300, random)
        values[:n_slow] = 5.0
        look = judge(Evidence((values,), np.zeros(300)), (P90,), 0.01)
        assert look.judged != Result.FAIL
    fast = independent(20, 10, 300, random)
    fast[:60] = 0.01
    assert judge(Evidence((fast,), np.zeros(300)), (P90,), 0.01).judged != Result.PASS


def test_a_load_whose_latency_still_rises_does_not_pass():
    values = np.linspace(0.01, 0.9, 400) * np.random.default_rng(0).lognormal(0, 0.1, 400)
    assert judge(Evidence((values,), np.zeros(400)), (P90,), 0.1).judged == Result.INCONCLUSIVE
    steady = np.random.default_rng(0).permutation(values)
    assert judge(Evidence((steady,), np.zeros(400)), (P90,), 0.1).judged == Result.PASS


def test_a_closed_loop_that_drifts_far_below_the_bound_passes():
    drift = np.linspace(0.2, 0.3, 400) * np.random.default_rng(0).lognormal(0, 0.1, 400)
    assert judge(Evidence((drift,), None), (P90,), 0.1, 4).judged == Result.PASS
    for rise in (2.5 * drift, np.linspace(0.01, 0.7, 400)):  # as much again takes both past the bound
        assert judge(Evidence((rise,), None), (P90,), 0.1, 4).judged == Result.INCONCLUSIVE
    assert judge(Evidence((drift,), np.zeros(400)), (P90,), 0.1).judged == Result.INCONCLUSIVE


def test_a_growing_queue_fails_before_its_requests_are_late():
    system = mmc(1, 0.9, 1e6)
    at_s, left_s, values = system.draw(1.5, 2000, 0)
    in_flight = np.arange(2000.0) - np.searchsorted(np.sort(left_s), at_s)
    look = judge(Evidence((values,), in_flight), (system.bound,), 0.01)
    assert look.overloaded
    assert look.judged == Result.FAIL
    assert not look.shares[0].beyond


def test_a_queue_at_capacity_is_hardly_ever_called_overloaded():
    """Even there it grows, as a random walk does: what is not sure to be too much is not called so."""
    n_called = 0
    for seed in range(150):
        at_s, left_s, values = mmc(1, 0.9, 1.0).draw(1.0, 1000, seed)
        in_flight = np.arange(1000.0) - np.searchsorted(np.sort(left_s), at_s)
        bound = LatencyBound("never", 0.9, 1e9)
        n_called += judge(Evidence((values,), in_flight), (bound,), 0.05).overloaded
    assert n_called <= stats.binom.ppf(0.999, 150, 0.05)


def test_a_share_is_of_the_requests_behind_the_first_that_have_a_latency():
    values = np.full(400, 0.5)
    values[300:320] = np.nan
    (share,) = judge(Evidence((values,), None), (P90,), 0.01, 4).shares
    assert share.n == 400 - 40 - 20


def test_few_requests_decide_nothing():
    assert judge(Evidence((np.full(20, 9.0),), None), (P90,), 0.4).judged == Result.INCONCLUSIVE


def test_failed_requests_are_late_and_those_without_a_latency_do_not_count():
    values = np.full(400, 0.5)
    values[::3] = np.nan
    assert judge(Evidence((values,), None), (P90,), 0.01).judged == Result.PASS
    values[1::3] = np.inf
    assert judge(Evidence((values,), None), (P90,), 0.01).judged == Result.FAIL


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_searches_at_queues_err_as_often_as_they_say_and_cost_less_than_plain_bisection():
    """Bisection with 1/0.6 times as many requests, in probes of equal length, still errs more often."""
    n, n_wrong, n_bisections_wrong, n_open = N_SEARCHES, 0, 0, 0
    for k in range(n):
        system = systems(k)
        start = system.limit * 2 ** np.random.default_rng(k + 10**6).uniform(-3, 2)
        found, n_requests = found_by(system, start, k)
        n_wrong += is_wrong(found, system.limit)
        n_open += found.low is None or found.high is None
        low, high = bisected(system, start, round(n_requests / 0.6), k)
        n_bisections_wrong += low >= system.limit or high <= system.limit
    print(f"{n_wrong} of {n} wrong, {n_open} open; plain bisection {n_bisections_wrong} wrong")
    assert stats.binomtest(n_wrong, n, 0.05, "greater").pvalue > 0.05
    assert stats.binomtest(n_bisections_wrong, n, 0.05, "greater").pvalue < 0.05
    assert n_open <= 0.05 * n


@pytest.mark.parametrize(("failed", "misses"), [(0, False), (1, True), (3, True), (40, True)])
def test_requests_that_fail_miss_their_bound(failed, misses):
    """Where the percentile lies between two failures numpy's says NaN, which misses nothing."""
    latencies = np.concatenate([np.full(400 - failed, 0.5), np.full(failed, math.inf)])
    assert _would_miss(latencies, LatencyBound("ttft.p99<=1s", 0.99, 1.0), np.zeros(16)) is misses
