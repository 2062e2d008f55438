import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from burstline.measure.metrics.instrument import gap_cv, mean_rate_per_s, rate_error
from burstline.workloads.arrivals import ARRIVALS, Arrival, asked, parse_arrival, parse_times
from burstline.workloads.due_times import due_times
from burstline.workloads.load import load_of
from burstline.workloads.prompts import rng
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LoadSpec
from tests.schedules import dispersion, gap_ks, mean_in_flight
from tests.workloads.open_requests import in_flight

RATE = 50.0
EXAMPLES = {
    "burst": ("burst", {}),
    "constant": ("constant", {"rate_per_s": RATE}),
    "poisson": ("poisson", {"rate_per_s": RATE}),
    "gamma": ("gamma:0.25", {"rate_per_s": RATE}),
    "ramp": ("ramp:10..90", {}),
    "steps": ("steps:20x30,80x30", {}),
    "replay": ("replay", {"times_s": tuple(float(k * k) for k in range(400))}),
}


def due(pattern: str, n: int, seed: int = 0, **parameters: object) -> np.ndarray:
    name = pattern.partition(":")[0]
    text, own = EXAMPLES[name]
    arrival = parse_arrival(pattern if ":" in pattern else text)
    return due_times(asked(arrival, n=n, **(own | parameters)), rng(seed, "arrivals"))  # type: ignore[arg-type]


def test_every_pattern_has_an_example_here():
    assert list(EXAMPLES) == list(ARRIVALS)


@given(pattern=st.sampled_from(list(ARRIVALS)), n=st.integers(1, 400), seed=st.integers(0, 2**32))
def test_due_times_are_n_finite_ascending_and_never_negative(pattern, n, seed):
    due_s = due(pattern, n, seed)
    assert due_s.shape == (n,)
    assert np.isfinite(due_s).all()
    assert due_s[0] >= 0
    assert (np.diff(due_s) >= 0).all()


@given(
    low=st.floats(1e-3, 1e3),
    high=st.floats(1e-3, 1e3),
    n=st.integers(1, 50),
    seed=st.integers(0, 1000),
)
def test_a_ramp_between_any_two_rates_stays_in_order(low, high, n, seed):
    due_s = due(f"ramp:{low}..{high}", n, seed)
    assert np.isfinite(due_s).all()
    assert (np.diff(due_s) >= -1e-9 * due_s[-1]).all()


@pytest.mark.parametrize("pattern", list(ARRIVALS))
def test_the_same_seed_gives_the_same_times_and_a_prefix_of_a_longer_plan(pattern):
    assert (due(pattern, 100, 3) == due(pattern, 100, 3)).all()
    if pattern != "ramp":  # a ramp's span is its number of requests
        assert np.allclose(due(pattern, 100, 3), due(pattern, 300, 3)[:100])


@pytest.mark.parametrize("pattern", ["poisson", "gamma", "ramp", "steps"])
def test_another_seed_gives_other_times(pattern):
    assert not np.allclose(due(pattern, 100, 0), due(pattern, 100, 1))


def test_due_times_are_pinned_so_that_saved_plans_can_be_made_again():
    assert due("poisson", 3, 0) == pytest.approx([0.019236, 0.036297, 0.041826], abs=1e-6)


def test_poisson_gaps_are_exponential():
    due_s = due("poisson", 20_000)
    assert stats.kstest(np.diff(due_s, prepend=0.0), "expon", args=(0, 1 / RATE)).pvalue > 0.01


def test_a_poisson_plan_keeps_the_spread_of_its_length():
    ends_s = [due("poisson", 400, seed)[-1] for seed in range(400)]
    # The sum of n exponential gaps has CV 1/sqrt(n); a schedule rescaled to end at n/rate has 0.
    assert np.std(ends_s) / np.mean(ends_s) == pytest.approx(1 / 20, rel=0.15)


@pytest.mark.parametrize("window_s", [0.1, 1.0, 10.0])
def test_poisson_counts_are_as_dispersed_as_their_mean_in_every_window(window_s):
    due_s = due("poisson", 200_000)
    n_windows = due_s[-1] / window_s
    assert dispersion(due_s, window_s) == pytest.approx(1.0, abs=4 * np.sqrt(2 / n_windows))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_asked_variation_rate_and_law(burstiness):
    due_s = due(f"gamma:{burstiness}", 40_000)
    assert gap_cv(due_s) == pytest.approx(burstiness**-0.5, rel=0.03)
    assert mean_rate_per_s(due_s) == pytest.approx(RATE, rel=0.03)
    assert gap_ks(due_s, RATE, burstiness) * np.sqrt(40_000) < 1.36


def test_the_ks_distance_agrees_with_scipys_and_sees_a_wrong_law():
    due_s = due("poisson", 2000)
    expected = stats.kstest(np.diff(due_s), "expon", args=(0, 1 / RATE)).statistic
    assert gap_ks(due_s, RATE) == pytest.approx(expected)
    assert gap_ks(due("gamma", 2000), RATE) > 0.1


def test_constant_arrivals_start_at_zero_with_equal_gaps():
    due_s = due("constant", 1000)
    assert due_s[0] == 0
    assert gap_cv(due_s) < 1e-9
    assert dispersion(due_s, 1.05) < 0.01


def test_a_ramp_goes_from_one_rate_to_the_other():
    due_s = due("ramp", 100_000)
    counts, _ = np.histogram(due_s, bins=4, range=(0, 2 * 100_000 / 100))
    # The mean rates of the quarters of a ramp from 10 to 90 per second.
    assert counts / counts.sum() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.005)


def test_steps_keep_their_rates_and_go_on_at_the_last():
    due_s = due("steps:100x50,400x25", 30_000)
    counts, _ = np.histogram(due_s, bins=[0, 50, 75, 100])
    assert counts / [50, 25, 25] == pytest.approx([100, 400, 400], rel=0.05)


def test_replay_starts_at_its_first_time_and_stretches_to_a_rate():
    recorded = (7.0, 5.0, 6.0, 9.0)
    assert due("replay", 4, times_s=recorded).tolist() == [0.0, 1.0, 2.0, 4.0]
    assert mean_rate_per_s(due("replay", 4, times_s=recorded, rate_per_s=8.0)) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("pattern", "given", "n"),
    [
        ("constant", {"rate_per_s": 5.0, "duration_s": 10.0}, 50),
        ("poisson", {"rate_per_s": 2.5, "duration_s": 10.0}, 25),
        ("ramp:5..15", {"duration_s": 10.0}, 100),
        ("steps:5x10,1x20", {}, 70),
        ("replay", {"times_s": (1.0, 2.0, 3.0)}, 3),
    ],
)
def test_a_duration_says_how_many(pattern, given, n):
    assert asked(parse_arrival(pattern), **given).n == n


@pytest.mark.parametrize(
    ("pattern", "given", "message"),
    [
        ("uniform", {"n": 5}, "no arrival pattern 'uniform'; there are burst, constant"),
        ("poisson", {"n": 5}, "poisson arrivals need --rate: requests per second, e.g. --rate 10"),
        ("gamma", {"n": 5, "rate_per_s": 1.0}, "'gamma': expected e.g. gamma:0.5"),
        ("steps", {"n": 5}, "'steps': expected e.g. steps:5x30,10x30"),
        ("ramp:1..2", {"n": 5, "rate_per_s": 1.0}, "ramp arrivals would ignore --rate"),
        (
            "burst",
            {"n": 5, "rate_per_s": 1.0},
            "burst arrivals would ignore --rate; it is for constant, poisson",
        ),
        ("poisson", {"n": 5, "rate_per_s": -1.0}, "--rate -1: expected requests per second"),
        ("poisson", {"n": 5, "rate_per_s": float("nan")}, "--rate nan: expected"),
        ("poisson", {"n": 0, "rate_per_s": 1.0}, "0 requests; expected at least 1"),
        ("poisson", {"rate_per_s": 1.0}, "poisson: give --requests, or"),
        ("poisson", {"rate_per_s": 1.0, "duration_s": -3.0}, "--duration-s -3.0"),
        ("burst", {"duration_s": 3.0}, "burst: give --requests, or"),
        ("replay", {"n": 5, "times_s": (1.0, 2.0)}, "5 requests asked, 2 times recorded"),
        ("steps:1x0", {"n": 5}, "rates and spans above 0"),
        ("replay", {"times_s": ()}, "--arrival file:FILE"),
    ],
)
def test_a_wrong_wish_is_told_what_to_do(pattern, given, message):
    with pytest.raises(WorkloadError) as raised:
        asked(parse_arrival(pattern), **given)
    assert message in str(raised.value)


def test_each_way_to_bound_a_load_that_a_refusal_names_bounds_one():
    with pytest.raises(WorkloadError) as refused:
        load_of(LoadSpec(duration_s=3.0))
    ways = {
        "--requests": {"requests": 3},
        "--duration-s with --rate": {"duration_s": 3.0, "rate": 2.0},
        "--concurrency": {"duration_s": 3.0, "concurrency": 2},
    }
    assert re.split(", or | or ", str(refused.value).partition("give ")[2]) == [*ways]
    for options in ways.values():
        assert load_of(LoadSpec(**options)).arrivals.n


def test_equal_recorded_times_cannot_be_given_a_rate():
    with pytest.raises(WorkloadError, match="--rate cannot scale them"):
        due("replay", 3, times_s=(1.0, 1.0, 1.0), rate_per_s=2.0)


def test_steps_and_times_are_read_from_text():
    assert parse_arrival("steps:5x30, 10X15").parameter == ((5.0, 30.0), (10.0, 15.0))
    assert parse_arrival("file:times.txt") == Arrival("replay", "times.txt")
    assert parse_times(enumerate(["0", "", "1.5  # second", "# all", "2e1"], 1)) == (0.0, 1.5, 20.0)
    with pytest.raises(WorkloadError, match="5 by 30"):
        parse_arrival("steps:5 by 30")
    with pytest.raises(WorkloadError, match="line 2: 'soon'"):
        parse_times(enumerate(["0", "soon"], 1))


@pytest.mark.parametrize("pattern", ARRIVALS)
def test_the_example_in_a_patterns_message_is_one(pattern):
    assert parse_arrival(ARRIVALS[pattern].form).pattern == pattern


def test_the_rate_error_is_a_signed_fraction():
    assert rate_error([0.0, 1.01], [0.0, 1.0]) == pytest.approx(1 / 1.01 - 1)
    assert rate_error([0.0, 0.0], [0.0, 1.0]) is None


def test_too_few_times_say_nothing():
    assert mean_rate_per_s([]) is None
    assert gap_cv([1.0, 2.0]) is None
    assert gap_ks([1.0, 2.0], 1.0) is None
    assert dispersion([], 1.0) is None
    assert dispersion([0.0, 1.5], 1.0) is None


def test_in_flight_counts_the_open_requests():
    instants, counts = in_flight([0.0, 1.0, 2.0], [2.0, np.inf, 3.0])
    assert instants.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert counts.tolist() == [1, 2, 2, 1]
    assert mean_in_flight([0.0, 1.0, 2.0], [2.0, np.inf, 3.0], 0.0, 4.0) == pytest.approx((2 + 3 + 1) / 4)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 50)), min_size=1, max_size=30))
def test_the_mean_in_flight_is_the_area_under_the_curve(spans):
    starts = [start for start, _ in spans]
    ends = [start + length for start, length in spans]
    instants, counts = in_flight(starts, ends)
    area = float((np.diff(instants) * counts[:-1]).sum())
    span = instants[-1] - instants[0]
    assert counts[-1] == 0
    assert mean_in_flight(starts, ends, instants[0], instants[-1]) == pytest.approx(area / span)
