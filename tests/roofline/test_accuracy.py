"""The model against measured data; the whole table is `python -m research`."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from burstline.roofline.device.calibration import load_calibration, shared, stack_host
from burstline.roofline.device.device import load_device
from research.__main__ import fit, is_set_on, loads
from research.kernels import beaten, read_tables, slopes
from research.points import read_loops, trace
from research.published import replayed
from research.tried import Change, Tried

pytestmark = pytest.mark.slow
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def tables():
    return read_tables(DATA / "measured")


@pytest.fixture(scope="module")
def tried():
    """Every eighth closed loop that set nothing, and short bursts of 8-bit dense models on the H200."""
    found = [load for load in loads(DATA / "serving") if load.is_dense and not is_set_on(load)]
    loops = [load for load in found if load.kind == "loop" and (load.streams or 0) <= 64][::8]
    bursts = [
        load
        for load in found
        if load.kind == "burst" and load.device == "h200-sxm-141g" and load.asked[0].output_tok <= 500
    ]
    return Tried([trace(load) for load in [*loops, *bursts]])


def errors(tried, ratio, name):
    return 100 * abs(ratio[[figure == name for _, figure in tried.figures]] - 1)


def test_points_that_set_nothing_are_predicted_within_their_goals(tried):
    ratio = tried.ratios()
    assert errors(tried, ratio, "TPOT").mean() <= 9
    assert errors(tried, ratio, "throughput").mean() <= 10


def test_inferencex_starts_vllm_with_steps_of_8192_tokens_scheduled_ahead():
    """As its scripts say, whose points the file has without a version."""
    rows = (DATA / "serving" / "aic_operating_points.csv").read_text().splitlines()
    stated = [row.startswith("InferenceX,vllm,,") for row in rows]
    assert sum(stated) == 60
    found = [
        load
        for load in read_loops(DATA / "serving" / "aic_operating_points.csv")
        if load.backend == "vllm" and load.asked[0] != load.asked[1]
    ]  # lengths are drawn
    assert len(found) >= 60
    assert {(load.limits.max_num_batched_tokens, load.limits.ahead) for load in found} == {(8192, True)}


def test_many_traces_at_once_are_what_the_model_says_of_each(tried):
    ratio = tried.ratios()
    for each in (tried.traces[0], tried.traces[-1]):
        at = [i for i, (of, _) in enumerate(tried.figures) if of is each]
        assert ratio[at].tolist() == pytest.approx(list(each.ratios().values()))


def test_a_trace_gives_what_its_simulation_gives(tried):
    each = next(of for of in tried.traces if of.load.kind == "loop")
    result, _ = each.load.simulated()
    lengths = [1e-2 + 1e-5 * step.n_tok for step in each.steps]
    tpot = float(np.dot(each.weights["TPOT"], lengths)) + each.rest_s["TPOT"]
    assert tpot == pytest.approx(float(result.tpot_s.mean()), rel=0.1)


def test_without_a_bound_on_the_hosts_cost_throughput_is_predicted_too_low(tried):
    uncapped = {name: replace(stack_host(name), most_tok=1e9) for name in tried.stacks}
    before, after = (
        errors(tried, tried.ratios(change), "throughput").mean()
        for change in (Change(), Change(host=uncapped))
    )
    assert after > before + 2


def test_a_real_run_of_vllm_is_replayed_within_its_goals():
    found = replayed(DATA / "serving" / "rtx4090_replay" / "requests.jsonl")
    limits = {"makespan": 0.08, "TPOT": 0.08, "TTFT": 0.15}
    assert {name for name, ratio in found.items() if abs(ratio - 1) > limits[name]} == set()


def test_no_measured_row_beats_its_ceiling_without_a_reason(tables):
    assert beaten(tables) == []


def test_bound_classes_agree_with_measured_slopes(tables):
    right = scored = 0
    for table in tables:
        if table.kind in ("bf16 products", "fp8 products"):
            slope, compute_bound = slopes(table)
            clear = (slope > 0.7) | (slope < 0.3)
            scored += int(clear.sum())
            right += int(((slope > 0.7) == compute_bound)[clear].sum())
    assert scored > 1000
    assert right >= 0.995 * scored


def test_a_devices_own_constants_at_least_nearly_halve_the_error_of_its_kernels(tables):
    for id_, kind in (
        ("a100-sxm4-80g", "bf16 products"),
        ("a100-sxm4-80g", "decode attention"),
        ("l40s", "fp8 products"),
        ("rtx4090", "bf16 products"),
    ):
        table = next(t for t in tables if (t.device.id, t.kind) == (id_, kind))
        own, common = (
            float(np.median(abs(table.ratios(known.constants) - 1)))
            for known in (load_calibration(load_device(id_)), shared())
        )
        assert own < 0.6 * common, (id_, kind, own, common)


def test_the_shipped_constants_are_near_those_that_the_h100s_kernels_set(tables):
    set_by = dict(line.split("  #")[0].split(" = ") for line in fit(tables).splitlines())
    of = shared().constants
    for name, value in set_by.items():
        near = {"pad_8": 0.6, "attention_s": 0.5}.get(name, 0.2)
        assert getattr(of, name) == pytest.approx(float(value), rel=near), name
