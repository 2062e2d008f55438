"""Forecasts of loads whose figures a hand works out, and the width of their intervals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from burstline.roofline.device.calibration import HostFit, interval_factors, load_calibration, stack_host
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import bundled_config, read_config
from burstline.roofline.model.shapes import Parallel, Quant
from burstline.roofline.predict.forecast import PlannedLoad, paced, predicted_figures
from burstline.roofline.predict.predict import Deployment
from burstline.roofline.predict.simulate import Asked, Limits

H100 = load_device("h100-sxm5-80g")
LLAMA = Deployment(read_config(bundled_config("llama-2-7b")), Quant("bf16", "bf16", "bf16"), Parallel(), H100)
ROOM = Limits(8, 1000, 100_000)
TTFT, TPOT, E2E = (f"metrics.{name}.p50" for name in ("ttft", "tpot", "e2e"))
RATE = "throughput.requests_per_s"


def forecast(load, clock=lambda step: 0.5):
    figures, makespan_s, _ = predicted_figures(load, clock, LLAMA, load_calibration(H100))
    return {name: each.point for name, each in figures.items()} | {"makespan": makespan_s}, figures


def test_a_batch_of_one_takes_a_step_for_its_prompt_and_one_for_each_token_that_follows():
    points, figures = forecast(PlannedLoad((Asked(0.0, 10, 5),), ROOM))
    assert points == {TTFT: 0.5, TPOT: 0.5, E2E: 2.5, RATE: 1 / 2.5, "makespan": 2.5}
    for each in figures.values():
        assert each.low < each.point < each.high
        assert each.point / each.low == pytest.approx(each.high / each.point)


def test_single_tokens_have_no_tpot():
    assert TPOT not in forecast(PlannedLoad((Asked(0.0, 10, 1),), ROOM))[0]


def test_a_closed_loop_serves_its_streams_per_latency_and_its_first_tokens_race_with_a_step():
    """Alone in its stream a request takes its 5 steps; the third is the last to begin before 6 s."""
    points, _ = forecast(PlannedLoad((Asked(0.0, 10, 5),) * 400, ROOM, concurrency=1))
    assert points[E2E] == pytest.approx(2.5)
    assert points[RATE] == pytest.approx(1 / 2.5, rel=1e-3)
    points, _ = forecast(PlannedLoad((Asked(0.0, 10, 5),) * 40, ROOM, concurrency=1, until_s=6.0))
    assert points["makespan"] == pytest.approx(7.5, rel=1e-3)


def test_an_open_loop_below_its_capacity_serves_what_arrives():
    due_s = np.cumsum(np.random.default_rng(3).exponential(1.0, 400))
    points, _ = forecast(
        PlannedLoad(tuple(Asked(at, 8, 2) for at in due_s.tolist()), ROOM), lambda step: 0.01
    )
    assert points[RATE] == pytest.approx(1.0, rel=0.1)
    assert points[TTFT] == pytest.approx(0.01, rel=0.01)


def test_the_rate_counts_no_phase_in_which_a_loop_fills():
    """A request a second that stays 2.5 s: of 21, those that end after 2.5 and up to 20 s are 17."""
    load = PlannedLoad(tuple(Asked(float(at), 10, 5) for at in range(21)), ROOM)
    assert forecast(load)[0][RATE] == pytest.approx(17 / 17.5)
    assert forecast(replace(load, one_rate=False))[0][RATE] == pytest.approx(21 / 22.5)
    assert RATE not in forecast(replace(load, requests=load.requests[:3]))[0]  # no request ends before 2 s


@pytest.mark.parametrize(("n", "rate"), [(10, 10 / 5.0), (18, 18 / 7.5), (32, 8 / 2.5)])
def test_a_closed_loop_without_a_plateau_is_rated_over_its_whole_run(n, rate):
    """Waves of 8 that take 2.5 s; a plateau has 11 requests after the first 8 ends."""
    load = PlannedLoad((Asked(0.0, 10, 5),) * n, ROOM, concurrency=8)
    assert forecast(load)[0][RATE] == pytest.approx(rate, rel=1e-3)


@pytest.mark.parametrize("error", [1 / 1.1, 1.1])
def test_near_saturation_the_interval_holds_what_a_queue_makes_of_an_error_of_its_steps(error):
    """One request at a time, at 80% of the highest rate: with steps 10% slower it is 88%."""
    due_s = np.cumsum(np.random.default_rng(3).exponential(0.025, 400)).tolist()
    load = PlannedLoad(tuple(Asked(at, 8, 2) for at in due_s), replace(ROOM, max_num_seqs=1))
    points, figures = forecast(load, lambda step: 0.01)
    truth, _ = forecast(load, paced(lambda step: 0.01, error))
    low, high = figures[E2E].low, figures[E2E].high
    assert abs(math.log(truth[E2E] / points[E2E])) > 1.5 * abs(math.log(error))
    assert low <= truth[E2E] <= high
    assert high / points[E2E] > 1.2


def test_intervals_are_wider_the_less_is_measured_of_a_device():
    calibration = replace(load_calibration(H100), measured_spread=0.0)
    own = replace(calibration, host=HostFit("reference", 0.0, 0.0, 0.0, "here"))
    ways = [own, replace(calibration, host=stack_host("synchronous")), None]
    for name in ("ttft", "tpot", "e2e", "requests_per_s"):
        factors = [interval_factors(H100, way, dense=True)[0][name] for way in ways]
        assert 1 < factors[0] < factors[1] == factors[2]
        assert 1 < interval_factors(H100, load_calibration(H100), dense=True)[0][name] < factors[2]
    spread = interval_factors(H100, replace(own, measured_spread=0.2), dense=True)[0]["tpot"]
    assert math.log(spread) == pytest.approx(
        math.hypot(math.log(1.2), math.log(interval_factors(H100, own, dense=True)[0]["tpot"]))
    )
