"""A deployment asked for requests: phases, tiers, latency; models by name."""

import json
from dataclasses import replace

import pytest

from burstline.errors import RooflineError
from burstline.roofline.device.calibration import HostFit, shared, stack_host, with_host
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import bundled_models, load_model
from burstline.roofline.model.ops import Step
from burstline.roofline.model.shapes import QUANTS, Parallel, Quant
from burstline.roofline.predict.answer import UniformBatch, latency_s, phase_bounds, ridge_tok
from burstline.roofline.predict.predict import Deployment


def llama(tp: int = 1) -> Deployment:
    return Deployment(load_model("llama-2-7b")[0], QUANTS["bf16"], Parallel(tp=tp), load_device("h100"))


def test_a_request_is_one_prefill_and_a_decode_for_every_further_token():
    phases = phase_bounds(llama(), UniformBatch(1, 200, 200))
    assert [(name, phase.n_steps) for name, phase in phases.items()] == [("prefill", 1), ("decode", 199)]
    attention = next(p.op for p in phases["decode"].predictions if p.op.kind == "attention")
    assert attention.n == 300
    assert latency_s(phases) == phases["prefill"].ceiling_s + 199 * phases["decode"].ceiling_s
    assert list(phase_bounds(llama(), UniformBatch(1, 200, 1))) == ["prefill"]


def test_decoding_at_the_mean_context_takes_as_long_as_decoding_step_by_step():
    whole = 100 * phase_bounds(llama(), UniformBatch(4, 100, 101))["decode"].ceiling_s
    steps = sum(phase_bounds(llama(), UniformBatch(4, 100 + i, 2))["decode"].ceiling_s for i in range(100))
    assert whole == pytest.approx(steps, rel=1e-4)


def test_predictions_stand_beside_the_ceiling_and_launches_can_bind():
    phases = phase_bounds(llama(tp=8), UniformBatch(1, 200, 200), with_host(shared()))
    decode = phases["decode"]
    ops_s = sum(p.seconds for p in decode.predictions)
    assert decode.host_s == pytest.approx(stack_host().step_s + stack_host().token_s)
    assert decode.predicted_s == pytest.approx(ops_s + decode.host_s)
    assert latency_s(phases) > latency_s(phases, ceiling=True)
    limit = {p.op.name: p.limit for p in decode.predictions}
    assert limit["o"] == "latency"
    assert limit["lm_head"] == "memory"
    assert limit["all_reduce"] == "communication"
    assert {p.limit for p in phases["prefill"].predictions if p.op.name == "gate_up"} == {"memory"}
    assert decode.limit == max(decode.limit_s, key=decode.limit_s.__getitem__) != "host"


def test_experts_are_compute_bound_once_their_expected_weights_take_less_time():
    device = load_device("h100")
    shape, stored = load_model("gpt-oss-120b")
    on = Deployment(shape, stored, Parallel(), device)

    def margin_s(n_tok: int) -> float:
        products = [op for op in on.ops(Step.decode(n_tok, 1)) if op.kind == "matmul"]
        return sum(
            op.count * (op.flops / device.peak_flops_per_s(op.dtype) - op.bytes / device.bytes_per_s)
            for op in products
        )

    ridge = ridge_tok(on)
    assert ridge == 2216
    assert margin_s(ridge - 1) < 0 <= margin_s(ridge)
    prefill = phase_bounds(on, UniformBatch(1, 512, 1))["prefill"].predictions
    experts = next(p for p in prefill if p.op.name == "experts_gate_up")
    assert (experts.limit, round(experts.op.intensity)) == ("memory", 58)  # the ridge is at 295
    assert experts.bound.seconds < experts.bound.expected_memory_s  # the ceiling's seconds stay a ceiling


def test_a_slow_host_adds_to_every_step_and_binds_it():
    slow = replace(shared(), host=HostFit("slow", 0.5, 0.0, 0.0, ""))
    phases = phase_bounds(llama(), UniformBatch(1, 200, 3), slow)
    without = phase_bounds(llama(), UniformBatch(1, 200, 3), shared())
    assert latency_s(phases) == pytest.approx(latency_s(without) + 3 * 0.5)
    assert phases["decode"].limit == "host"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((64, 512, 1, 2048), {"prefill": (4, 512, 512, 16)}),
        ((10, 500, 1, 2048), {"prefill": (4, 500, 500, 2), "last prefill": (2, 500, 500, 1)}),
        ((3, 8192, 1, 2048), {"prefill": (1, 2048, 5120, 12)}),
        ((2, 512, 1, 2048), {"prefill": (2, 512, 512, 1)}),
    ],
)
def test_prompts_longer_than_a_steps_budget_are_computed_in_chunks(asked, expected):
    found = UniformBatch(*asked).steps()
    assert {
        name: (step.n_requests, int(step.new_tok[0]), int(step.context_tok[0]), n)
        for name, (step, n) in found.items()
    } == expected
    whole = Step.prefill(asked[0], asked[1]).keys_seen()  # chunks see as many keys as whole prompts do
    assert sum(step.keys_seen() * n for step, n in found.values()) == pytest.approx(whole, rel=1e-3)


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


@pytest.mark.parametrize(("text", "says"), [("{", "is not JSON"), ("[]", "is not a JSON object")])
def test_a_config_that_cannot_be_read_is_refused(tmp_path, text, says):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RooflineError, match=says):
        load_model(str(tmp_path))
