from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import poisson

from burstline.workloads.prompts import rng
from burstline.workloads.request import WorkloadError
from tests.truth.queue import Queue, departures, service_times


def mean_wait(rho: float, cv: float, n: int, n_servers: int = 1, seed: int = 0) -> float:
    """The simulated mean wait in units of the mean service."""
    arrivals = np.cumsum(rng(seed, "arrivals").exponential(1 / (rho * n_servers), n))
    draws = rng(seed, "services")
    services = draws.gamma(cv**-2, cv**2, n) if cv else np.ones(n)
    return float((departures(arrivals, services, n_servers) - services - arrivals).mean())


def pollaczek_khinchine(rho: float, cv: float) -> float:
    """Mean wait of M/G/1 in units of the mean service (Kleinrock 1975, eq. 5.64)."""
    return rho * (1 + cv**2) / (2 * (1 - rho))


def erlang_c(rho: float, c: int) -> float:
    """Mean wait of M/M/c in units of the mean service (Kleinrock 1975, eq. 3.40)."""
    load = rho * c
    queued = load**c / factorial(c) / (1 - rho)
    return queued / (sum(load**k / factorial(k) for k in range(c)) + queued) / (c * (1 - rho))


def pollaczek(rho: float, c: int) -> float:
    """Mean wait of M/D/c in units of the service, exact (Pollaczek 1930, Crommelin 1932).

    Besides M/M/c this is the only M/G/c for c > 1 with an exact mean wait: there are approximations for the
    others (Allen-Cunneen), and nothing to hold a simulation against.
    """
    i = np.arange(1, 20_000)  # the series of one server at 95 % dies out that slowly
    return float((poisson.sf(i * c - 1, i * c * rho) - poisson.sf(i * c, i * c * rho) / rho).sum())


def test_the_formulas_of_several_servers_are_those_of_one_where_there_is_one():
    for rho in (0.5, 0.8, 0.95):
        assert pollaczek(rho, 1) == pytest.approx(pollaczek_khinchine(rho, 0.0))
        assert erlang_c(rho, 1) == pytest.approx(pollaczek_khinchine(rho, 1.0))


@pytest.mark.parametrize(
    ("rho", "n"),
    [(0.5, 500_000), (0.8, 2_000_000), pytest.param(0.95, 6_000_000, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("cv", [0.0, 1.0, 1.5], ids=["M/D/1", "M/M/1", "M/G/1"])
def test_one_servers_mean_wait_is_the_textbooks(rho, n, cv):
    # A constant service needs no draws, and heavy traffic needs many: the wait's own memory is 1/(1 - rho)^2.
    assert mean_wait(rho, cv, n) == pytest.approx(pollaczek_khinchine(rho, cv), rel=0.03)


@pytest.mark.parametrize(("rho", "n"), [(0.5, 300_000), (0.8, 500_000)])
@pytest.mark.parametrize(("cv", "exact"), [(1.0, erlang_c), (0.0, pollaczek)], ids=["M/M/3", "M/D/3"])
def test_several_servers_mean_wait_is_the_textbooks(rho, n, cv, exact):
    assert mean_wait(rho, cv, n, 3) == pytest.approx(exact(rho, 3), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("c", [2, 4])
@pytest.mark.parametrize(("cv", "exact"), [(1.0, erlang_c), (0.0, pollaczek)], ids=["M/M/c", "M/D/c"])
def test_several_servers_mean_wait_is_the_textbooks_in_heavy_traffic(c, cv, exact):
    assert mean_wait(0.95, cv, 12_000_000, c) == pytest.approx(exact(0.95, c), rel=0.03)


gaps_and_services = st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=60)


@given(gaps_and_services)
def test_the_unrolled_recursion_is_the_recursion(pairs):
    arrivals = np.cumsum([gap for gap, _ in pairs])
    services = [service for _, service in pairs]
    left, free = [], 0.0
    for arrival, service in zip(arrivals, services, strict=True):
        free = max(arrival, free) + service
        left.append(free)
    assert departures(arrivals, services) == pytest.approx(left)


@given(gaps_and_services, st.integers(2, 70))
def test_more_servers_never_make_anyone_later_and_enough_make_nobody_wait(pairs, n_servers):
    arrivals = np.cumsum([gap for gap, _ in pairs])
    services = np.array([service for _, service in pairs])
    several = departures(arrivals, services, n_servers)
    assert (several <= departures(arrivals, services, 1) + 1e-9).all()
    if n_servers >= len(pairs):
        assert several == pytest.approx(arrivals + services)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_service_times_have_the_asked_mean_and_variation(cv):
    times = service_times(0.01, cv, seed=1)
    drawn = np.array([next(times) for _ in range(50_000)])
    assert drawn.mean() == pytest.approx(0.01, rel=0.05)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, abs=0.05)


@pytest.mark.parametrize("n_servers", [1, 3])
def test_the_queue_admits_as_the_recursion_says(n_servers):
    arrivals_s = np.cumsum(rng(3, "arrivals").exponential(0.004, 500))
    services = service_times(0.01, 1.0, seed=3)
    services_s = [next(services) for _ in arrivals_s]
    queue = Queue(n_servers, 0.01, 1.0, seed=3)
    admitted = [queue.admit(round(at_s * 1e9)) for at_s in arrivals_s]
    expected_ns = departures(arrivals_s, services_s, n_servers) * 1e9
    assert np.array([left for _, left in admitted]) == pytest.approx(expected_ns, abs=1000)
    queue.reset()
    assert queue.admit(round(arrivals_s[0] * 1e9)) == admitted[0]


@pytest.mark.parametrize("given", [(0, 0.01, 1.0), (1, 0.0, 1.0), (1, 0.01, -1.0)])
def test_an_impossible_queue_is_refused(given):
    with pytest.raises(WorkloadError, match="expected at least 1, above 0"):
        Queue(*given)
