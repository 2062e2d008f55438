"""Pitfalls 12, 13 and 17: the schedule as the server saw it, queues with a textbook answer, warm-up."""

import numpy as np
import pytest

from burstline.measure.metrics.instrument import gap_cv, rate_error
from burstline.workloads.arrivals import Arrival, Arrivals
from burstline.workloads.due_times import due_times, poisson
from burstline.workloads.prompts import rng
from tests import schedules
from tests.pitfalls.chain import fired, requests
from tests.truth.queue import Queue, departures, service_times
from tests.truth.rig import truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import Script

FAST = Script(ttft_s=0.0, gaps_s=(0.0,))


def arrived_s(due_s: np.ndarray, *, process: bool = False) -> np.ndarray:
    """When each request was at the server, by the server's own log, s from the run's start."""
    with truth_server(FAST, thread=not process) as truth:
        played = fired(truth, requests(len(due_s), 1), due_s.tolist())
    by_index = sorted(played.served, key=lambda row: row.index or 0)
    return np.array([row.first_byte_ns - (played.report.t0_ns or 0) for row in by_index]) / 1e9


@pytest.mark.measures
def test_12_the_server_sees_the_schedule_that_was_planned() -> None:
    due_s = poisson(100, 100, rng(0, "arrivals"))
    at_s = arrived_s(due_s)
    assert (at_s >= due_s).all(), "a request left before it was due"
    assert np.median(at_s - due_s) < 0.2 * np.diff(due_s).mean()
    assert rate_error(at_s, due_s) == pytest.approx(0, abs=0.02)
    assert schedules.gap_ks(np.sort(at_s), 100) < 1.95 / np.sqrt(len(at_s) - 1)  # p = 0.001


@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.parametrize("pattern", ["constant", "poisson", "gamma"])
def test_12_rate_regularity_and_law_hold_at_the_server(pattern: str) -> None:
    """Over 10 s at 50 a second."""
    shape = 0.5 if pattern == "gamma" else 1.0
    due_s = due_times(Arrivals(Arrival(pattern, shape), 500, 50.0), rng(0, "arrivals"))
    at_s = np.sort(arrived_s(due_s, process=True))
    assert abs(rate_error(at_s, due_s)) < 1e-2
    assert np.median(np.abs(np.diff(at_s) - np.diff(due_s))) < 0.05 / 50, "half of all gaps, to 5 % of a gap"
    assert np.median(at_s - due_s) < 1e-3, "lateness adds up"
    for window_s in (0.1, 1.0):
        planned, seen = schedules.dispersion(due_s, window_s), schedules.dispersion(at_s, window_s)
        assert seen == pytest.approx(planned, abs=0.1)
    if pattern != "constant":
        assert schedules.gap_ks(at_s, 50, shape) < 1.63 / np.sqrt(len(at_s) - 1)


@pytest.mark.bench
@pytest.mark.parametrize("pattern", ["constant", "poisson", "gamma"])
def test_12_strictly_the_rate_is_right_to_a_thousandth_and_gaps_vary_as_planned(pattern: str) -> None:
    """Over 30 s at 50 a second, on a quiet machine."""
    shape = 0.5 if pattern == "gamma" else 1.0
    due_s = due_times(Arrivals(Arrival(pattern, shape), 1500, 50.0), rng(0, "arrivals"))
    at_s = np.sort(arrived_s(due_s, process=True))
    assert abs(rate_error(at_s, due_s)) < 1e-3
    planned_cv = gap_cv(due_s)
    assert gap_cv(at_s) == pytest.approx(planned_cv, abs=0.02)
    for window_s in (0.1, 1.0, 10.0):
        planned, seen = schedules.dispersion(due_s, window_s), schedules.dispersion(at_s, window_s)
        assert seen == pytest.approx(planned, abs=0.05)
    if pattern != "constant":
        assert schedules.gap_ks(at_s, 50, shape) < 1.36 / np.sqrt(len(at_s) - 1)


@pytest.mark.bench
def test_12_strictly_a_burst_of_1000_is_there_within_30_ms() -> None:
    assert np.ptp(arrived_s(np.zeros(1000), process=True)) < 0.03


@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.parametrize(("cv", "n_servers"), [(1.0, 1), (0.0, 1), (1.5, 2)])
def test_13_departures_over_sockets_follow_the_recursion(cv: float, n_servers: int) -> None:
    """M/M/1, M/D/1 and M/G/2 at 80 % load: what the client has is what the queue let go."""
    mean_s, n = 0.01, 400
    due_s = poisson(0.8 * n_servers / mean_s, n, rng(1, "arrivals"))
    queue = Queue(n_servers, mean_s, cv, seed=3)
    with truth_server(TruthSetup().scripts[0], setup=TruthSetup(queue=queue)) as truth:
        played = fired(truth, requests(n, 1), due_s.tolist())
    rows = sorted(played.served, key=lambda row: row.number)
    services = service_times(mean_s, cv, 3)
    arrived = np.array([row.arrival_ns for row in rows]) / 1e9
    expected_s = departures(arrived, [next(services) for _ in rows], n_servers)
    assert np.abs(expected_s - np.array([row.departure_ns for row in rows]) / 1e9).max() < 1e-6
    sent_s = np.array([row.token_ns[0] for row in rows]) / 1e9
    got_s = np.array([played.records[row.index].token_ns[0] + played.report.t0_ns for row in rows]) / 1e9
    assert np.quantile(got_s - sent_s, 0.99) < 1e-3
    assert np.median(sent_s - expected_s) < 1e-3, "the truth server itself was late"
