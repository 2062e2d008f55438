"""Calibrations: shipped, named by tier, and never under the ceiling they start from."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.device.calibration import ShapeTimes, calibration_toml, generic, load_calibration
from roofline.device.device import load_device
from roofline.errors import RooflineError
from roofline.model.ops import Step, matmul, ops
from roofline.model.parallel import Parallel
from roofline.model.shapes import QUANTS
from roofline.predict.predict import Clock, Deployment, predict, predict_step, step_seconds
from roofline.validate.accuracy_serving import bundled_model

SHIPPED = ("a100-sxm4-80g", "h100-sxm5-80g", "l40s", "rtx4090")
LLAMA = bundled_model("llama-3.1-8b")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_measured_device_has_its_own_fit_with_its_source_and_spread(name):
    calibration = load_calibration(load_device(name))
    assert calibration.tier == 2
    assert "github.com" in calibration.source
    assert calibration.spread["gemm bf16"].low < 1 < calibration.spread["gemm bf16"].high


def test_any_other_device_gets_the_generic_defaults_and_says_so():
    device = load_device("h200")
    op = matmul("qkv", 64, 6144, 4096, QUANTS["bf16"])
    assert load_calibration(device) == generic()
    assert predict(op, device, generic()).tier == 1
    assert predict(op, device, None).tier == 0


def test_what_a_device_was_not_fitted_for_falls_back_to_tier_1():
    device = load_device("h100")
    calibration = load_calibration(device)
    assert predict(matmul("x", 8, 4096, 4096, QUANTS["bf16"]), device, calibration).tier == 2
    fp32 = matmul("x", 8, 4096, 4096, QUANTS["fp32"])
    assert predict(fp32, device, calibration).tier == 1


def test_a_measured_shape_is_believed_and_interpolated():
    device = load_device("h100")
    shape = ShapeTimes("bf16", 4096, 4096, (1.0, 3.0), (10e-6, 30e-6))
    calibration = replace(load_calibration(device), shapes=(shape,))
    for m, seconds in ((1, 10e-6), (2, 20e-6), (6, 60e-6)):
        found = predict(matmul("x", m, 4096, 4096, QUANTS["bf16"]), device, calibration)
        assert (found.seconds, found.tier) == (pytest.approx(seconds), 3)


def test_a_calibration_survives_its_file(tmp_path):
    before = load_calibration(load_device("a100-sxm4-80g"))
    path = tmp_path / "device.toml"
    path.write_text(calibration_toml(before, "calibration"))
    assert load_calibration(str(path)) == before


def test_a_file_without_a_calibration_says_how_to_make_one(tmp_path):
    path = tmp_path / "device.toml"
    path.write_text('name = "x"\n')
    with pytest.raises(RooflineError, match="burstline calibrate"):
        load_calibration(str(path))


@pytest.mark.parametrize("name", SHIPPED)
@given(st.integers(1, 300), st.integers(1, 4000), st.integers(1, 8))
def test_no_prediction_is_below_its_ceiling(name, batch, context, prompts):
    device = load_device(name)
    for step in (Step.decode(batch, context), Step.prefill(prompts, context)):
        for found in predict_step(
            ops(LLAMA, QUANTS["bf16"], Parallel(), step), device, load_calibration(device)
        ):
            if found.op.kind in ("matmul", "attention"):
                assert found.seconds >= found.bound.seconds * (1 - 1e-9), found
            assert found.low_s <= found.seconds <= found.high_s


def test_more_work_takes_longer_and_a_longer_context_too():
    device = load_device("h100")
    clock = Clock(Deployment(LLAMA, QUANTS["bf16"], Parallel(), device), load_calibration(device))
    decodes = [clock(Step.decode(n, 1000)) for n in (1, 16, 64, 256)]
    contexts = [clock(Step.decode(64, c)) for c in (100, 1000, 8000)]
    assert decodes == sorted(decodes)
    assert contexts == sorted(contexts)


def test_the_clock_agrees_with_a_step_predicted_op_by_op():
    device = load_device("a100")
    calibration = load_calibration(device)
    clock = Clock(Deployment(LLAMA, QUANTS["bf16"], Parallel(tp=2), device), calibration)
    step = Step.of([(1, 640, 1)] * 7 + [(200, 500, 1)])
    found = predict_step(ops(LLAMA, QUANTS["bf16"], Parallel(tp=2), step), device, calibration)
    assert clock(step) == pytest.approx(step_seconds(found, calibration.host_s))
    decode = Step.decode(32, 1000)
    found = predict_step(ops(LLAMA, QUANTS["bf16"], Parallel(tp=2), decode), device, calibration)
    assert clock(decode) == pytest.approx(step_seconds(found, calibration.host_s), rel=0.01)


def test_decodes_beside_a_prefill_are_slower_where_that_was_measured():
    device = load_device("rtx4090")
    calibration = load_calibration(device)
    assert 1.5 < calibration.mixed < 3
    mixed = ops(LLAMA, QUANTS["bf16"], Parallel(), Step.of([(1, 4000, 1)] * 16 + [(512, 512, 1)]))
    decode = next(p for p in predict_step(mixed, device, calibration) if p.op.phase == "decode")
    alone = predict(decode.op, device, calibration)
    assert decode.seconds == pytest.approx(calibration.mixed * alone.seconds)
