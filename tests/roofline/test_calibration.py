"""The constants: shared by all devices, named behind each prediction, never under the ceiling."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.errors import RooflineError
from burstline.machine.catalogue import device_text
from burstline.roofline.device.calibration import (
    Conditions,
    Constants,
    ShapeTimes,
    device_toml,
    load_calibration,
    read_calibration,
    read_device_file,
    shared,
    stack_host,
    with_host,
)
from burstline.roofline.device.device import bundled_devices, load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.ops import Step, matmul, ops
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.predict import (
    MEASURED,
    Clock,
    Deployment,
    predict,
    predict_step,
)

LLAMA = load_model("llama-3.1-8b")[0]
H100 = load_device("h100")


def test_there_are_few_constants_and_few_devices_have_any_of_their_own():
    host = stack_host()
    assert len(fields(Constants)) + len([host.step_s, host.token_s, host.most_tok]) <= 26
    own = {device.id: load_calibration(device).own for device in bundled_devices()}
    assert not any(own[id_] for id_ in ("h100-sxm5-80g", "h200-sxm-141g", "b200-sxm", "gb200", "mi300x"))
    assert own["rtx-pro-6000"] == own["rtx-pro-6000-server"] == ("product_8",)
    assert load_device("rtx-pro-6000").bytes_per_s > load_device("rtx-pro-6000-server").bytes_per_s


def test_a_constant_can_be_changed_and_says_that_it_was():
    slower = shared().changed({"memory": 0.5})
    assert (slower.constants.memory, slower.own) == (0.5, ("memory",))
    assert str(slower) == "shared constants, but memory 0.5"
    assert str(shared()) == "shared constants"
    with pytest.raises(RooflineError, match=r"no constant 'speed'; known: .*memory"):
        shared().changed({"speed": 1.0})
    for name, value in (("memory", 0.0), ("launch_s", -1.0)):
        with pytest.raises(RooflineError, match=f"constant {name} cannot be"):
            shared().changed({name: value})


def test_each_prediction_names_the_constants_that_set_it():
    step = Step.of([(1, 4000, 1)] * 16 + [(512, 512, 1)])
    found = predict_step(ops(LLAMA, QUANTS["fp8"], Parallel(tp=2), step), H100, shared())
    by = {(p.op.name, p.op.phase): p.by for p in found}
    assert by["gate_up", ""] == ("product_8", "launch_s")
    assert by["lm_head", ""] == ("memory", "launch_s")
    assert by["attention", "decode"] == ("cache", "attention_s", "mixed")
    assert by["attention", "prefill"] == ("prompt", "attention_s")
    assert by["norm", ""] == ("passes", "pass_s")
    assert by["all_reduce", ""] == ("link", "launch_s")


@pytest.mark.parametrize("name", [slot.name for slot in fields(Constants)])
def test_every_constant_moves_a_step(name):
    step, b200 = Step.of([(1, 4000, 1)] * 16 + [(3000, 3000, 1)]), load_device("b200")
    few = Step.decode(16, 1000)
    of = [
        *((ops(LLAMA, QUANTS[quant], Parallel(tp=2), step), H100) for quant in ("bf16", "fp8")),
        *((ops(LLAMA, QUANTS["nvfp4"], Parallel(tp=tp), few), b200) for tp in (4, 8)),
        *(
            (ops(LLAMA, QUANTS["bf16"], Parallel(tp=8), Step.prefill(1, 512)), load_device(name))
            for name in ("a100", "h100")
        ),
        (ops(load_model("qwen3-next-80b-a3b")[0], QUANTS["bf16"], Parallel(), step), H100),
        (ops(*load_model("deepseek-v3.2"), Parallel(dp=8, ep=8), step), b200),
    ]
    more = shared().changed({name: 1.2 * getattr(shared().constants, name)})
    before, after = (
        sum(p.seconds for each, device in of for p in predict_step(each, device, known))
        for known in (shared(), more)
    )
    assert before != after


def test_a_host_shows_what_few_tokens_cost_and_hides_more_behind_the_device():
    host, one = stack_host(), Step.decode(64, 1000)
    assert host.seconds(one, 300, 0.01) == pytest.approx(host.step_s + 64 * host.token_s)
    many = Step.decode(1024, 1000)
    assert host.seconds(many, 300, 0.05) == pytest.approx(host.step_s + host.most_tok * host.token_s)
    assert host.seconds(many, 300, 0.001) == pytest.approx(host.step_s + 1024 * host.token_s - 0.001)
    later = stack_host("synchronous")  # nothing is hidden by an engine that schedules after each step
    assert later.seconds(many, 300, 0.05) == pytest.approx(later.step_s + 1024 * later.token_s)
    assert stack_host("eager").seconds(one, 300, 0.0) == pytest.approx(300 * stack_host("eager").launch_s)
    with pytest.raises(RooflineError, match="unknown serving stack"):
        stack_host("imaginary")


def test_static_scales_save_the_pass_that_quantises_and_four_bits_run_at_their_own_peak():
    device = load_device("b200")

    def took(quant):
        step = ops(LLAMA, QUANTS[quant], Parallel(), Step.decode(8, 500))
        return sum(p.seconds for p in predict_step(step, device, shared()))

    assert took("fp8") > took("fp8-static") > took("nvfp4") * 0.9
    assert took("fp8-static-kv8") < took("fp8-static")
    prefill = ops(LLAMA, QUANTS["nvfp4"], Parallel(), Step.prefill(1, 4096))
    gate_up = next(p for p in predict_step(prefill, device, shared()) if p.op.name == "gate_up")
    assert gate_up.bound.compute_s == pytest.approx(
        gate_up.op.count * gate_up.op.flops / device.peak_flops_per_s("fp4")
    )


def test_a_measured_shape_is_believed_and_interpolated():
    shape = ShapeTimes("bf16", 4096, 4096, (1.0, 3.0), (10e-6, 30e-6))
    calibration = replace(shared(), shapes=(shape,))
    for m, seconds in ((1, 10e-6), (2, 20e-6), (6, 60e-6)):
        found = predict(matmul("x", m, 4096, 4096, QUANTS["bf16"]), H100, calibration)
        assert (found.seconds, found.by) == (pytest.approx(seconds), (MEASURED,))


def test_a_calibration_survives_its_file(tmp_path):
    device = load_device("a100-sxm4-80g")
    before = replace(
        load_calibration(device),
        host=stack_host(),
        measured_spread=0.02,
        conditions=Conditions("2026-11-28T12:00:00+00:00", 0.01, "reference", "numpy 2"),
        shapes=(ShapeTimes("bf16", 4096, 4096, (1.0, 3.0), (10e-6, 30e-6)),),
    )
    path = tmp_path / "device.toml"
    path.write_text(device_toml(device, before))
    assert read_device_file(path.read_bytes(), path)[1] == before


def test_a_file_that_is_no_calibration_is_refused_and_of_a_device_alone_the_constants_are_shared(tmp_path):
    with pytest.raises(RooflineError, match="is damaged"):
        read_device_file('name = "x"\n', "device.toml")
    with pytest.raises(RooflineError, match="is not a calibration"):
        read_calibration({"tier": 2}, "device.toml")
    path = tmp_path / "device.toml"
    device = replace(load_device("a100-sxm4-80g"), id="mine", arch="none of ours")
    whole = device_toml(device, replace(load_calibration(device), name="measured here"))
    for text, name in ((whole, "measured here"), (whole[: whole.index("[calibration]")], "mine")):
        path.write_text(text)
        assert read_device_file(device_text(str(path)), path)[1].name == name


@pytest.mark.parametrize("name", ["h100", "a100", "l40s", "rtx4090", "rtx-pro-6000-server", "b200"])
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
    clock = Clock(Deployment(LLAMA, QUANTS["bf16"], Parallel(), H100), shared())
    decodes = [clock(Step.decode(n, 1000)) for n in (1, 16, 64, 256)]
    contexts = [clock(Step.decode(64, c)) for c in (100, 1000, 8000)]
    assert decodes == sorted(decodes)
    assert contexts == sorted(contexts)


def test_the_clock_agrees_with_a_step_predicted_op_by_op():
    device = load_device("a100")
    calibration = with_host(load_calibration(device))
    on = Deployment(LLAMA, QUANTS["bf16"], Parallel(tp=2), device)
    clock = Clock(on, calibration)
    step = Step.of([(1, 640, 1)] * 7 + [(200, 500, 1)])
    assert clock(step) == pytest.approx(on.predict(step, calibration).predicted_s)
    decode = Step.decode(32, 1000)
    assert clock(decode) == pytest.approx(on.predict(decode, calibration).predicted_s, rel=0.01)


def test_decodes_beside_a_prefill_are_slower():
    mixed = ops(LLAMA, QUANTS["bf16"], Parallel(), Step.of([(1, 4000, 1)] * 16 + [(512, 512, 1)]))
    decode = next(p for p in predict_step(mixed, H100, shared()) if p.op.phase == "decode")
    alone = predict(decode.op, H100, shared())
    assert decode.seconds == pytest.approx(shared().constants.mixed * alone.seconds)
