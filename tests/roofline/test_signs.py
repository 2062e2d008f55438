"""Signs: which of two choices is faster, where bytes and FLOPs do not decide, as published kernels have it.

Each row: a source (engine, version, device) and what it measured. A prediction has that sign, or its range
holds both and says whose kernels differ.
"""

import pytest

from burstline.roofline.device.calibration import load_calibration, with_host
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.ops import Step
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.answer import (
    UniformBatch,
    latency_ends_s,
    latency_s,
    phase_bounds,
)
from burstline.roofline.predict.forecast import PlannedLoad, predicted_figures
from burstline.roofline.predict.predict import Clock, Deployment, Prediction, StepTimes
from burstline.roofline.predict.simulate import Asked, Limits

DECODE = UniformBatch(8, 1, 2)


def deployment(model: str, device: str, quant: str | None, **ranks: int) -> Deployment:
    return Deployment(*load_model(model, quant), Parallel(**ranks), load_device(device))


def found(on: Deployment, step: Step, name: str) -> Prediction:
    times = on.predict(step, with_host(load_calibration(on.device)))
    return next(p for p in times.predictions if p.op.name == name)


def one_us(model: str, device: str, quant: str, step: Step, name: str, **ranks: int) -> float:
    prediction = found(deployment(model, device, quant, **ranks), step, name)
    return prediction.seconds / prediction.op.count * 1e6


def decode(on: Deployment, batch: int, context_tok: int) -> dict[str, StepTimes]:
    asked = UniformBatch(batch, context_tok - 1, 2)
    phases = phase_bounds(on, asked, with_host(load_calibration(on.device)))
    return {"decode": phases["decode"]}


@pytest.mark.parametrize("context_tok", [4096, 8192, 32768, 65536])
def test_sparse_attention_decodes_no_faster_than_dense_up_to_64k_tokens(context_tok):
    """vLLM 0.24 and TensorRT-LLM, H200, TP 8, batch 8, fp8-block: slower at every context to 64k."""
    sparse, dense = (
        decode(deployment(name, "h200", None, tp=8), 8, context_tok)
        for name in ("deepseek-v3.2", "deepseek-v3")
    )
    low, high = latency_ends_s(sparse)
    assert high > latency_s(dense)
    assert low > latency_s(dense) or context_tok > 32768


def test_a_sparse_step_of_32k_tokens_takes_as_much_longer_as_was_measured():
    """vLLM 0.24, H200, TP 8, batch 8: 5.4 ms a step slower than V3."""
    sparse, dense = (
        decode(deployment(name, "h200", None, tp=8), 8, 32768) for name in ("deepseek-v3.2", "deepseek-v3")
    )
    least, most = (end - latency_s(dense) for end in latency_ends_s(sparse))
    assert 3e-3 < least < 5.4e-3 < most + 2e-4


@pytest.mark.parametrize(
    ("model", "quant", "device", "batch", "source"),
    [
        ("qwen3-30b-a3b", "int4", "b200", 16, "vLLM 0.19, B200: 220 us, bf16 117"),
        ("qwen3-30b-a3b", "fp8", "h100", 16, "vLLM 0.24, H100: 638 us, bf16 220"),
        ("deepseek-v3", "int4", "b200", 16, "B200: slower than bf16 in all of 9,234 shapes"),
    ],
)
def test_experts_of_fewer_bits_are_not_ranked_where_kernels_differ(model, quant, device, batch, source):
    step = Step.decode(batch, 1000)
    fewer = found(deployment(model, device, quant), step, "experts_gate_up")
    plain = found(deployment(model, device, "bf16"), step, "experts_gate_up")
    assert fewer.ends_s[0] < plain.seconds < fewer.ends_s[1], source
    assert "experts in" in fewer.differs
    assert plain.differs == ""


def test_more_ranks_do_not_shorten_a_scan_that_runs_in_one_wave():
    """vLLM 0.24, H100, Qwen3-Next: 102 + 6 us of 2,048 tokens with 4 heads (TP 8)."""
    step = Step.prefill(1, 2048)
    took = [one_us("qwen3-next-80b-a3b", "h100", "bf16", step, "delta_rule", tp=tp) for tp in (1, 4, 8)]
    assert took[2] == pytest.approx(108, rel=0.05)
    assert took[0] < 1.5 * took[2]
    many = Step.prefill(8, 2048)  # 8 requests x 32 heads: two waves of 132 multiprocessors on one device
    waves = [one_us("qwen3-next-80b-a3b", "h100", "bf16", many, "delta_rule", tp=tp) for tp in (1, 8)]
    assert waves[0] > 1.9 * waves[1]


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_an_expert_exchange_has_a_floor_of_its_own(name):
    """H100, dp 8, ep 8, batch 4: 14, 15 (SGLang); 63, 53 (vLLM); 77, 28 us (TensorRT-LLM)."""
    on = deployment("qwen3-235b-a22b", "h100", "bf16", dp=8, ep=8)
    prediction = found(on, Step.decode(4, 1000), name)
    low, high = (end * 1e6 / prediction.op.count for end in prediction.ends_s)
    assert low < 15
    assert high > 76
    assert "expert exchange" in prediction.differs


def test_blackwell_exchanges_no_faster_than_hopper():
    """Measured in vLLM, SGLang and TensorRT-LLM: B200's exchange is no faster than H100's."""
    step = Step.prefill(4, 2048)
    b200, h100 = (
        one_us("qwen3-235b-a22b", device, "bf16", step, "dispatch", dp=8, ep=8) for device in ("b200", "h100")
    )
    assert b200 == pytest.approx(h100)


@pytest.mark.parametrize(
    ("device", "batch", "measured_us", "within"),
    [
        ("h100", 16, 10.8, 0.15),  # vLLM 0.24's own kernel in a CUDA graph, 8 ranks, 256 kB
        ("h200", 16, 10.1, 0.2),
        ("b200", 16, 7.9, 0.05),  # TensorRT-LLM (vLLM: 25.8)
        ("h100", 4, 6.4, 0.15),  # 64 kB
        ("h100", 64, 15.0, 0.15),  # 1 MB
    ],
)
def test_middle_all_reduces_take_the_least_of_three_ways(device, batch, measured_us, within):
    took = one_us("llama-3.1-70b", device, "bf16", Step.decode(batch, 100), "all_reduce", tp=8)
    assert took == pytest.approx(measured_us, rel=within)


def test_an_all_reduce_on_pcie_is_a_range():
    """L40S, TP 8, 2,048 x 8,192: about 30 ms in four tables, 2.9 in one."""
    on = deployment("llama-3.1-70b", "l40s", "fp8", tp=8)
    prediction = found(on, Step.prefill(1, 2048), "all_reduce")
    low, high = (end * 1e3 / prediction.op.count for end in prediction.ends_s)
    assert low == pytest.approx(2.9, rel=0.05)
    assert high == pytest.approx(30, rel=0.05)
    pair = found(deployment("llama-3.1-70b", "l40s", "fp8", tp=2), Step.prefill(1, 2048), "all_reduce")
    assert pair.differs == ""


def test_an_8_bit_cache_on_l40s_may_be_slower_than_one_of_16():
    """TensorRT-LLM, L40S, batch 1, 64k: 1,057 us, 415 with 16 bits."""
    step = Step.decode(1, 65536)
    eight = found(deployment("llama-3.1-8b", "l40s", "fp8-kv8"), step, "attention")
    sixteen = found(deployment("llama-3.1-8b", "l40s", "fp8"), step, "attention")
    assert eight.ends_s[0] < sixteen.seconds < eight.ends_s[1]
    assert "8-bit cache" in eight.differs


def test_quantising_few_rows_may_cost_more_than_it_saves_on_b200():
    """TensorRT-LLM, B200, 4096 x 4096, 4 rows: 18.8 us in fp8, 9.9 in bf16."""
    prediction = found(deployment("llama-3.1-8b", "b200", "fp8"), Step.decode(4, 100), "quantise")
    assert prediction.ends_s[1] / prediction.op.count > 8e-6


def test_a_forecast_reaches_as_far_as_published_kernels_do():
    on = deployment("qwen3-30b-a3b", "h100", "fp8")
    known = with_host(load_calibration(on.device))
    load = PlannedLoad([Asked(0.0, 64, 16)] * 4, Limits(256, 2048, 100_000))
    figures, _, source = predicted_figures(load, Clock(on, known), on, known)
    slow = load.simulate(Clock(on, known, 1))[0]
    assert figures["metrics.tpot.p50"].high >= slow.tpot_s.mean() * 0.999
    assert "engines' kernels differ here: narrow experts in 8 bits" in source
    plain = deployment("qwen3-30b-a3b", "h100", "bf16")
    assert "differ" not in predicted_figures(load, Clock(plain, known), plain, known)[2]


def test_xgmi_gives_two_devices_one_link_of_seven():
    """MI300X: 7 x 64 GB/s, one link to each other device."""
    from burstline.roofline.device.device import collective_s

    links = load_device("mi300x").links
    pair, _ = collective_s("all_gather", 64e9, 2, links)
    assert pair == pytest.approx(0.5)
    whole, _ = collective_s("all_gather", 448e9, 8, links)
    assert whole == pytest.approx(7 / 8)


def test_each_stage_decodes_a_micro_batch_of_its_own():
    whole, split = (
        decode(deployment("llama-3.1-70b", "h100", "fp8", pp=pp), 64, 4000)["decode"] for pp in (1, 4)
    )
    rows = {p.op.m for p in split.predictions if p.op.name == "gate_up"}
    assert rows == {16}
    assert split.predicted_s < whole.predicted_s


def test_stored_formats_are_read_from_the_bundled_files():
    for name in ("deepseek-v3", "deepseek-v3.2", "kimi-k2"):
        assert load_model(name)[1] == QUANTS["fp8-block"]
