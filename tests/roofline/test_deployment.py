"""A deployment asked for requests: phases, tiers, latency; models by name."""

import json
from dataclasses import replace

import pytest

from burstline.roofline.device.calibration import HostFit, generic, load_calibration, stack_host, with_host
from burstline.roofline.device.device import load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.families import bundled_models, load_model
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import QUANTS, Quant
from burstline.roofline.predict.deployment import (
    UniformBatch,
    calibrations_of,
    latency_s,
    phase_bounds,
    unmeasured,
)
from burstline.roofline.predict.predict import Deployment


def llama(tp: int = 1) -> Deployment:
    return Deployment(load_model("llama-2-7b")[0], QUANTS["bf16"], Parallel(tp=tp), load_device("h100"))


def test_a_request_is_one_prefill_and_a_decode_for_every_further_token():
    phases = phase_bounds(llama(), UniformBatch(1, 200, 200))
    assert [(name, phase.n_steps) for name, phase in phases.items()] == [("prefill", 1), ("decode", 199)]
    attention = next(line.bound.op for line in phases["decode"].lines if line.bound.op.kind == "attention")
    assert attention.n == 300
    assert latency_s(phases) == phases["prefill"].ceiling_s + 199 * phases["decode"].ceiling_s
    assert list(phase_bounds(llama(), UniformBatch(1, 200, 1))) == ["prefill"]


def test_decoding_at_the_mean_context_takes_as_long_as_decoding_step_by_step():
    whole = 100 * phase_bounds(llama(), UniformBatch(4, 100, 101))["decode"].ceiling_s
    steps = sum(phase_bounds(llama(), UniformBatch(4, 100 + i, 2))["decode"].ceiling_s for i in range(100))
    assert whole == pytest.approx(steps, rel=1e-4)


def test_a_tier_predicts_beside_the_ceiling_and_its_launches_can_bind():
    phases = phase_bounds(llama(tp=8), UniformBatch(1, 200, 200), {"generic": with_host(generic())})
    decode = phases["decode"]
    ops_s = sum(line.seconds for line in decode.lines)
    assert decode.host_s["generic"] == pytest.approx(stack_host().step_s + stack_host().token_s)
    assert decode.predicted_s("generic") == pytest.approx(ops_s + decode.host_s["generic"])
    assert latency_s(phases, "generic") > latency_s(phases)
    limit = {line.bound.op.name: line.limit for line in decode.lines}
    assert limit["o"] == "latency"
    assert limit["lm_head"] == "memory"
    assert limit["all_reduce"] == "communication"
    assert {line.limit for line in phases["prefill"].lines if line.bound.op.name == "gate_up"} == {"memory"}


def test_a_slow_host_adds_to_every_step_and_binds_it():
    slow = replace(generic(), host=HostFit("slow", 0.5, 0.0, 0.0, ""))
    phases = phase_bounds(llama(), UniformBatch(1, 200, 3), {"slow": slow})
    without = phase_bounds(llama(), UniformBatch(1, 200, 3), {"slow": replace(slow, host=None)})
    assert latency_s(phases, "slow") == pytest.approx(latency_s(without, "slow") + 3 * 0.5)
    assert phases["decode"].limit() == "host"


def test_a_measured_device_is_predicted_by_its_own_fit_last():
    assert list(calibrations_of(load_device("h100"))) == ["generic", "device fit"]
    assert list(calibrations_of(load_device("mi300x"))) == ["generic"]


@pytest.mark.parametrize("asked", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_asking_for_nothing_is_refused(asked):
    with pytest.raises(RooflineError, match="must be at least 1, not 0"):
        UniformBatch(*asked)


def test_models_are_found_by_name_folder_and_file(tmp_path):
    config = {
        "model_type": "gpt2",
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "vocab_size": 32,
    }
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    for path in (folder, folder / "config.json"):
        shape, quant = load_model(str(path))
        assert (shape.name, shape.d, quant) == ("my-model", 8, Quant("fp32", "fp32", "fp32"))
    assert load_model("Llama-2-7B")[0].name == "llama-2-7b"
    assert "reference" in bundled_models()


def test_a_model_that_is_not_there_names_the_nearest(tmp_path):
    with pytest.raises(RooflineError, match=r"unknown model 'llama-2-17b'.*llama-2-7b"):
        load_model("llama-2-17b")
    with pytest.raises(RooflineError, match=r"no config.json in"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("text", "says"), [("{", "is not JSON"), ("[]", "holds no object")])
def test_a_config_that_cannot_be_read_is_refused(tmp_path, text, says):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RooflineError, match=says):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("quant", "device", "says"),
    [
        ("nvfp4", "b200-sxm", []),
        ("nvfp4", "mi355x", []),
        ("int8", "h100-sxm5-80g", ["no table of int8 products: predicted with fp8's parameters"]),
        ("mxfp4", "h100-sxm5-80g", []),
        ("int4", "h100-sxm5-80g", ["no table of products with int4 weights"]),
        ("fp8-block", "h200-sxm-141g", []),
        ("fp16", "a100-sxm4-80g", []),
    ],
)
def test_products_that_no_table_covers_are_called_untested(quant, device, says):
    lines = unmeasured(QUANTS[quant], load_calibration(load_device(device)))
    assert [line[: len(start)] for line, start in zip(lines, says, strict=True)] == says
    assert all(line.endswith("untested") for line in lines)
