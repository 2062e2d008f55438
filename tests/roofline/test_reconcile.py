"""Reconciliation: bars that sum, shares that make sense, lies that are found."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from burstline.measure.record.typed_json import from_json, to_json
from burstline.roofline.device.calibration import HostFit, load_calibration
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.ops import Step
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.predict import Deployment, ceilings
from burstline.roofline.predict.simulate import Asked, Limits, simulate
from burstline.roofline.reconcile.inputs import Known, MeasuredRun, Setup, StepSeen
from burstline.roofline.reconcile.reconcile import reconcile
from burstline.roofline.reconcile.reconciliation import WAITING, Reconciliation

H100 = load_device("h100")
ON_H100 = Deployment(load_model("llama-2-7b")[0], QUANTS["bf16"], Parallel(), H100)
SETUP = Setup(ON_H100, load_calibration(H100))
LIMITS = Limits(64, 2048, 40_000)
REQUESTS = [Asked(0.0, 512, 32)] * 100


def logged(slowdown, setup=SETUP):
    """A run as an engine's log would tell it, every step so many times as long as predicted."""
    steps, clock = [], setup.clock()

    def timed(step):
        seconds = slowdown * clock(step)
        steps.append(StepSeen(step, seconds, {"gate_up": 0.3 * seconds}))
        return seconds

    result = simulate(REQUESTS, LIMITS, timed)
    return MeasuredRun(REQUESTS, result.makespan_s, LIMITS, steps)


@pytest.mark.parametrize(
    "run", [logged(1.3), MeasuredRun(REQUESTS, 9.0, LIMITS)], ids=["logged", "simulated"]
)
def test_the_waterfall_ends_at_what_was_measured(run):
    found = reconcile(run, SETUP)
    assert sum(bar.seconds for bar in found.waterfall) == pytest.approx(run.makespan_s)
    assert found.waterfall[0].name == "ceiling"
    assert found.waterfall[0].seconds == pytest.approx(found.ceiling_s)


def test_what_rounding_leaves_of_a_bar_is_none():
    """The steps fill the run: "queue and idle" was −2.7e-13 s, shown as -0.0% of it."""
    run = logged(1.3)
    for beyond in (0.0, -3e-13, 3e-13):
        *_, idle = reconcile(replace(run, makespan_s=run.makespan_s + beyond), SETUP).waterfall
        assert (idle.name, idle.seconds) == ("queue and idle", 0.0)


def test_the_log_of_an_interrupted_run_gives_shares_that_are_numbers():
    """It may end with steps in which nothing was computed."""
    run = logged(1.3)
    empty = Step(*[np.zeros(0, np.int64)] * 3)
    for steps in ([*run.steps, StepSeen(empty, 0.01)], [StepSeen(empty, 0.01)]):
        found = reconcile(replace(run, steps=steps), SETUP)
        shares = [getattr(row, name) for row in found.phases for name in ("mfu", "mfu_full", "mbu")]
        assert shares
        for use in shares:
            assert all(math.isfinite(each) for each in (use.measured or 0.0, use.ceiling, use.reachable))


def test_a_log_gives_measured_shares_between_nothing_and_the_ceiling():
    found = reconcile(logged(1.3), SETUP)
    assert [row.phase for row in found.phases] == ["prefill", "decode"]
    for row in found.phases:
        for use in (row.mfu, row.mfu_full, row.mbu):
            assert 0 < use.measured < use.reachable < use.ceiling <= 1.5
            assert use.measured == pytest.approx(use.reachable / 1.3, rel=0.02)
        assert row.mfu_full.measured >= row.mfu.measured
        assert sum(op.share for op in row.ops) == pytest.approx(1)
        assert sum(row.limit_shares.values()) == pytest.approx(1)
        gate_up = next(op for op in row.ops if op.name == "gate_up")
        assert gate_up.achieved_flops_per_s == pytest.approx(gate_up.flops / gate_up.measured_s)
    assert not found.suspicions


def test_host_time_is_what_steps_take_above_the_devices_part():
    found = {bar.name: bar.seconds for bar in reconcile(logged(1.3), SETUP).waterfall}
    run = logged(1.3)
    assert found["host and unexplained"] == pytest.approx(run.makespan_s * 0.3 / 1.3, rel=0.02)
    assert found["queue and idle"] == pytest.approx(0, abs=0.02 * run.makespan_s)


def test_a_measured_host_has_a_bar_of_its_own_that_says_what_it_costs():
    host = HostFit("reference", 0.001, 4e-5, 1e-6, "measured")
    setup = replace(SETUP, calibration=replace(SETUP.calibration, host=host))
    run = logged(1.1, setup)
    found = reconcile(run, setup)
    bars = {bar.name: bar for bar in found.waterfall}
    asked_tok = {"token": sum(r.output_tok for r in REQUESTS), "prompt": sum(r.prompt_tok for r in REQUESTS)}
    expected_s = 0.001 * len(run.steps) + 4e-5 * asked_tok["token"] + 1e-6 * asked_tok["prompt"]
    assert bars["host"].seconds == pytest.approx(expected_s, rel=0.02)
    assert "40 µs a token" in bars["host"].why
    assert bars["unexplained"].seconds == pytest.approx(run.makespan_s * 0.1 / 1.1, rel=0.02)
    assert found.phases[0].mfu.measured == pytest.approx(found.phases[0].mfu.reachable / 1.1, rel=0.02)


def test_without_a_log_nothing_is_called_measured_and_the_page_is_told():
    found = reconcile(MeasuredRun(REQUESTS, 9.0, LIMITS, assumed=("KV dtype",)), SETUP)
    assert all(row.mfu.measured is None and row.mbu.measured is None for row in found.phases)
    assert "KV dtype" in found.assumed
    assert any("step log" in line for line in found.assumed)


@pytest.mark.parametrize(
    "run", [logged(0.5), MeasuredRun(REQUESTS, 0.5, LIMITS)], ids=["logged", "simulated"]
)
def test_what_beats_the_ceiling_is_suspect_with_causes_and_never_clamped(run):
    found = reconcile(run, SETUP)
    assert found.suspicions
    # Since Python 3.12 `sum` rounds once, so that a tolerance of 2% has another last digit.
    assert all(suspicion.excess > suspicion.tolerance >= 0.02 - 1e-9 for suspicion in found.suspicions)
    assert found.suspicions[0].causes
    assert found.ceiling_s > run.makespan_s


def at_its_ceilings(faster, phase):
    """A run whose steps of one phase last as long as the ceilings say, or so many times less; others long."""

    def timed(step):
        is_prefill = any(each == "prefill" for each, _ in step.phases())
        least_s = sum(b.seconds for b in ceilings(ON_H100.ops(step), H100))
        seconds = least_s / faster if is_prefill == (phase == "prefill") else 9 * least_s
        steps.append(StepSeen(step, seconds))
        return seconds

    steps = []
    result = simulate(REQUESTS, LIMITS, timed)
    return MeasuredRun(REQUESTS, result.makespan_s, LIMITS, steps)


@pytest.mark.parametrize(
    ("spread", "phase", "possible", "impossible"),
    [
        (None, "prefill", 1.01, 1.03),
        (None, "decode", 1.01, 1.03),
        (0.0, "prefill", 1.04, 1.1),
        (5.0, "prefill", 1.04, 1.1),  # repeats that differ widen nothing
        (0.0, "decode", 1.19, 1.22),
    ],
)
def test_a_ceiling_may_be_exceeded_by_what_its_source_allows_and_no_more(spread, phase, possible, impossible):
    """2% of a specification, 5% of a measured peak, 20% of a measured bandwidth."""
    setup = replace(SETUP, calibration=replace(SETUP.calibration, measured_spread=spread))
    assert not reconcile(at_its_ceilings(possible, phase), setup).suspicions
    (found,) = reconcile(at_its_ceilings(impossible, phase), setup).suspicions
    assert found.what == f"{phase} steps"
    assert found.tolerance < found.excess < impossible - 1 + 0.005


@pytest.mark.parametrize(
    ("shares", "measured", "begins", "says"),
    [
        ({"memory": 0.7, "compute": 0.3}, 0.5, "memory-bound: MBU 40%", ", 50% of what these shapes reach"),
        (
            {"memory": 0.5, "compute": 0.5},
            0.5,
            "memory-bound for 50% of the time and compute-bound for 50%",
            "",
        ),
        ({"memory": 1.0}, 1.24, "memory-bound: MBU", ", 24% faster than predicted for these shapes"),
        ({"memory": 1.0}, None, "memory-bound: MBU 80%", " predicted; the largest part is"),
    ],
)
def test_a_phase_is_called_bound_by_what_has_most_of_its_time(shares, measured, begins, says):
    found = reconcile(logged(2.0), SETUP)
    use = replace(found.phases[0].mbu, reachable=0.8, measured=measured and 0.8 * measured)
    told = replace(found.phases[0], limit_shares=shares, mfu=use, mbu=use).use(found.device)
    assert told.startswith(begins)
    assert says in told


@pytest.mark.parametrize(("faster", "condemned"), [(0.9, set()), (1.3, {"the product gate_up"})])
def test_one_product_above_its_ceiling_is_judged_as_a_whole_run_is(faster, condemned):
    """Though the steps that it is a part of are slow."""
    run = logged(2.0)
    steps = [
        replace(each, op_seconds={"gate_up": ceiling_of("gate_up", each.step) / faster}) for each in run.steps
    ]
    found = reconcile(replace(run, steps=steps), SETUP)
    assert {each.what for each in found.suspicions} == condemned
    fewer_bits = reconcile(replace(run, steps=steps), replace(SETUP, known=Known(weights=False)))
    assert not fewer_bits.suspicions
    assert {each.what for each in fewer_bits.explained} == condemned


def ceiling_of(name, step):
    return sum(b.seconds for b in ceilings(ON_H100.ops(step), H100) if b.op.name == name)


def test_changes_that_help_are_shorter_and_impossible_ones_say_why():
    found = {row.change: row for row in reconcile(MeasuredRun(REQUESTS, 9.0, LIMITS), SETUP).sensitivity}
    assert found["fp8 KV cache"].ratio < 1
    assert found["fp8 weights"].ratio < 1
    assert found["TP 2"].ratio < 1
    a100 = load_device("a100")
    other = Setup(replace(ON_H100, device=a100), load_calibration(a100))
    refused = {row.change: row for row in reconcile(MeasuredRun(REQUESTS, 9.0, LIMITS), other).sensitivity}
    assert refused["fp8 weights"].makespan_s is None
    assert "fp8" in refused["fp8 weights"].why


def test_a_reconciliation_is_plain_enough_for_json_and_says_one_sentence():
    found = reconcile(logged(1.3), SETUP)
    assert from_json(Reconciliation, json.loads(json.dumps(to_json(found)))) == found
    assert found.sentence.startswith("Decode is ")
    assert "bound" in found.sentence
    assert found.by == "shared constants"


def test_the_waterfall_names_the_constants_behind_each_bar():
    bars = {bar.name: bar.why for bar in reconcile(MeasuredRun(REQUESTS, 9.0, LIMITS), SETUP).waterfall}
    of = SETUP.calibration.constants
    assert f"memory {of.memory:.3g}" in bars["kernel efficiency"]
    assert f"attention_s {of.attention_s:.3g}" in bars["launch floors"]
    assert f"pass_s {of.pass_s:.3g}" in bars["elementwise"]
    assert f"mixed {of.mixed:.3g}" in bars["mixed steps"]


def test_without_a_calibration_there_are_only_ceilings():
    found = reconcile(MeasuredRun(REQUESTS, 9.0, LIMITS), replace(SETUP, calibration=None))
    bars = {bar.name: bar.seconds for bar in found.waterfall}
    assert bars["kernel efficiency"] == bars["launch floors"] == 0
    assert bars["host"] == pytest.approx(0, abs=0.01)  # the clock rounds contexts to 16 tokens
    assert found.by == "ceilings"


def test_the_ceiling_of_a_closed_loop_knows_nothing_of_when_its_requests_were_sent():
    """A faster server would have been sent each as soon as another ended."""
    sent = [Asked(k * 0.5, 128, 32) for k in range(16)]
    runs = [
        MeasuredRun([replace(each, due_s=each.due_s * slower) for each in sent], 9.0, LIMITS, concurrency=4)
        for slower in (0.0, 1.0, 7.0)
    ]
    ceilings = [reconcile(run, SETUP).ceiling_s for run in runs]
    assert ceilings[0] == ceilings[1] == ceilings[2] < 1
    open_loop = reconcile(replace(runs[1], concurrency=None), SETUP)
    assert open_loop.ceiling_s > sent[-1].due_s
    small = replace(LIMITS, kv_tok=2 * 160)
    names = {
        kv_tok: {bar.name for bar in reconcile(replace(runs[1], limits=limits), SETUP).waterfall}
        for kv_tok, limits in ((LIMITS.kv_tok, LIMITS), (small.kv_tok, small))
    }
    assert "batching" in names[LIMITS.kv_tok]
    assert "KV waves" in names[small.kv_tok]


def alone(n_requests: int, n_tok: int, host_s: float = 0.0) -> MeasuredRun:
    """Requests that come one a second and never meet: a prefill, then `n_tok` - 1 steps of one token."""
    clock, steps = SETUP.clock(), []
    for _ in range(n_requests):
        of = [Step.prefill(1, 128), *(Step.decode(1, 128 + k) for k in range(1, n_tok))]
        steps += [StepSeen(step, clock(step) + host_s) for step in of]
    requests = [Asked(float(k), 128, n_tok) for k in range(n_requests)]
    return MeasuredRun(requests, float(n_requests), LIMITS, steps, paced=True)


@pytest.mark.parametrize("n_tok", [16, 20, 32, 37])
def test_steps_and_their_time_are_whole_however_often_prompts_come(n_tok):
    """Of 4,800 to 11,100 steps few are looked at; every nth would meet each prompt, or none."""
    run = alone(300, n_tok)
    prefill, decode = (
        [seen.seconds for seen in run.steps if seen.step.phase == phase] for phase in ("prefill", "decode")
    )
    rows = {row.phase: row for row in reconcile(run, SETUP).phases}
    assert {name: row.n_steps for name, row in rows.items()} == {
        "prefill": len(prefill), "decode": len(decode),
    }  # fmt: skip
    assert rows["prefill"].seconds == pytest.approx(sum(prefill))
    assert rows["decode"].seconds == pytest.approx(sum(decode))


def test_the_bars_of_a_paced_run_are_of_its_steps_and_the_rest_is_waiting():
    run = alone(40, 16)
    found = reconcile(run, SETUP)
    bars = {bar.name: bar.seconds for bar in found.waterfall}
    busy_s = sum(seen.seconds for seen in run.steps)
    assert sum(bars.values()) == pytest.approx(run.makespan_s)
    assert bars[WAITING] == pytest.approx(run.makespan_s - busy_s)
    assert 0 < bars["ceiling"] < busy_s
    assert not {"KV waves", "batching"} & bars.keys()
    assert found.ceiling_s > 39


def test_host_time_of_another_engine_that_is_more_than_all_there_is_is_no_bar():
    run = alone(40, 16)
    slow = replace(
        SETUP,
        calibration=replace(SETUP.calibration, host=HostFit("other", 0.5, 0.0, 0.0, "measured elsewhere")),
    )
    bars = {bar.name: bar.seconds for bar in reconcile(run, slow).waterfall}
    assert "host" not in bars
    assert sum(bars.values()) == pytest.approx(run.makespan_s)
