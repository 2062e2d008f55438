"""Calibrations: shipped, named by tier, and never under the ceiling they start from."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.roofline.device.calibration import (
    ShapeTimes,
    calibration_toml,
    generic,
    load_calibration,
    shipped_calibration,
    stack_host,
    with_host,
)
from burstline.roofline.device.device import load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.ops import Step, matmul, ops
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import QUANTS
from burstline.roofline.predict.deployment import calibrations_of
from burstline.roofline.predict.predict import (
    Clock,
    Deployment,
    host_seconds,
    predict,
    predict_step,
    step_seconds,
)
from research.accuracy_serving import bundled_model

BLACKWELL = ("b200-sxm", "b300-sxm", "gb200", "gb300", "rtx-pro-6000-server")
SHIPPED = ("a100-sxm4-80g", "h100-sxm5-80g", "h200-sxm-141g", "l40s", "rtx4090", *BLACKWELL)
LLAMA = bundled_model("llama-3.1-8b")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_measured_device_has_its_own_fit_with_its_source_and_spread(name):
    calibration = load_calibration(load_device(name))
    assert calibration.tier == 2
    assert "github.com" in calibration.source
    assert calibration.spread["gemm bf16"].low < 1 < calibration.spread["gemm bf16"].high
    for kind, fit in calibration.gemm.items():  # above 1 a peak would be wrong
        assert fit.eta_c < (2 if kind == "experts_mxfp4" else 1)
        assert fit.eta_m < 1


@pytest.mark.parametrize("name", BLACKWELL)
def test_blackwell_has_its_own_products_of_four_bits(name):
    calibration = load_calibration(load_device(name))
    assert calibration.gemm_fit("fp4") == (calibration.gemm["fp4"], 2)
    assert calibration.gemm["fp4"] != calibration.gemm["fp8"]
    assert calibration.spread["gemm fp4"].n > 5000
    assert calibration.decode_kv8
    assert calibration.all_reduce


def test_any_other_device_gets_the_generic_defaults_and_says_so():
    device = load_device("mi300x")
    op = matmul("qkv", 64, 6144, 4096, QUANTS["bf16"])
    assert load_calibration(device) == generic()
    assert predict(op, device, generic()).tier == 1
    assert predict(op, device, None).tier == 0


def test_a_device_without_tables_takes_the_fit_of_its_generation_one_tier_down():
    near = load_calibration(load_device("h20"))
    assert near.gemm == load_calibration(load_device("h100")).gemm
    assert near.tier == 1
    assert load_calibration(load_device("rtx5090")).name == "rtx-pro-6000-server"


def test_graphics_memory_without_ecc_is_read_as_another_card_of_the_kind_reads_it():
    def shares(known):
        return known.gemm["bf16"].eta_m, known.decode.eta_m

    of_the_pro, of_the_4090 = (shares(shipped_calibration(id_)) for id_ in ("rtx-pro-6000-server", "rtx4090"))
    assert of_the_pro == pytest.approx(of_the_4090, rel=0.03)
    pooled = shares(generic())
    expected = {
        "rtx3090": of_the_pro,
        "rtx4090": of_the_pro,
        "rtx5090": of_the_4090,
        "l40s": pooled,
        "h100": pooled,
    }
    assert {name: shares(generic(load_device(name))) for name in expected} == expected
    assert load_calibration(load_device("rtx3090")) == generic(load_device("rtx3090"))


def test_every_tier_pays_for_the_same_host():
    device, step = load_device("h100"), Step.decode(64, 1000)
    hosts = [known.host for known in calibrations_of(device).values()]
    assert hosts == [stack_host()] * 2
    assert stack_host().seconds(step, 300) == pytest.approx(stack_host().step_s + 64 * stack_host().token_s)
    assert stack_host("eager").seconds(step, 300) == pytest.approx(300 * stack_host("eager").launch_s)
    with pytest.raises(RooflineError, match="unknown serving stack"):
        stack_host("imaginary")


def test_static_scales_save_the_launch_that_quantises_and_four_bits_run_at_their_own_peak():
    device = load_device("b200")

    def took(quant):
        one = Step.decode(8, 500)
        return sum(
            p.seconds for p in predict_step(ops(LLAMA, QUANTS[quant], Parallel(), one), device, generic())
        )

    assert took("fp8") > took("fp8-static") > took("nvfp4") * 0.9
    assert took("fp8-static-kv8") < took("fp8-static")
    prefill = ops(LLAMA, QUANTS["nvfp4"], Parallel(), Step.prefill(1, 4096))
    gate_up = next(p for p in predict_step(prefill, device, generic()) if p.op.name == "gate_up")
    assert gate_up.bound.compute_s == pytest.approx(
        gate_up.op.count * gate_up.op.flops / device.peak_flops_per_s("fp4")
    )
    assert generic().gemm_fit("fp4")[0] == generic().gemm["fp8"]


def test_nccl_and_the_engines_own_all_reduces_are_told_apart():
    device = load_device("h100")
    calibration, step = load_calibration(device), Step.decode(8, 500)
    times = [
        next(p.seconds for p in predict_step(ops(LLAMA, QUANTS["bf16"], parallel, step), device, calibration)
             if p.op.name == "all_reduce")
        for parallel in (Parallel(tp=8), Parallel(tp=8, nccl=True))
    ]  # fmt: skip
    assert times[0] < times[1]


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
    calibration = with_host(load_calibration(device))
    clock = Clock(Deployment(LLAMA, QUANTS["bf16"], Parallel(tp=2), device), calibration)
    step = Step.of([(1, 640, 1)] * 7 + [(200, 500, 1)])
    found = predict_step(ops(LLAMA, QUANTS["bf16"], Parallel(tp=2), step), device, calibration)
    assert clock(step) == pytest.approx(step_seconds(found, host_seconds(step, found, calibration)))
    decode = Step.decode(32, 1000)
    found = predict_step(ops(LLAMA, QUANTS["bf16"], Parallel(tp=2), decode), device, calibration)
    assert clock(decode) == pytest.approx(
        step_seconds(found, host_seconds(decode, found, calibration)), rel=0.01
    )


def test_decodes_beside_a_prefill_are_slower_where_that_was_measured():
    device = load_device("rtx4090")
    calibration = load_calibration(device)
    assert 1.5 < calibration.mixed < 3
    mixed = ops(LLAMA, QUANTS["bf16"], Parallel(), Step.of([(1, 4000, 1)] * 16 + [(512, 512, 1)]))
    decode = next(p for p in predict_step(mixed, device, calibration) if p.op.phase == "decode")
    alone = predict(decode.op, device, calibration)
    assert decode.seconds == pytest.approx(calibration.mixed * alone.seconds)
