"""Bounds: which level or link binds, when launches do, what a collective takes, what fits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.errors import RooflineError
from burstline.roofline.device.calibration import load_calibration
from burstline.roofline.device.device import Device, Level, Link, collective_s, load_device
from burstline.roofline.model.families import read_config
from burstline.roofline.model.ops import Op, Step, matmul, ops
from burstline.roofline.model.shapes import QUANTS, ModelShape, Parallel, Quant
from burstline.roofline.predict.capacity import (
    kv_bytes,
    room,
    state_bytes,
    weight_bytes,
)
from burstline.roofline.predict.predict import Deployment, ceiling, ceilings, predict, working_set_bytes

MODELS = Path(__file__).parents[2] / "burstline/roofline" / "model" / "configs"
BF16, FP32 = QUANTS["bf16"], QUANTS["fp32"]


def model(name: str) -> ModelShape:
    return read_config(json.loads((MODELS / f"{name}.json").read_text()), name)


def cpu(l3_bytes: float) -> Device:
    levels = (Level("L2", 1e6, 200e9), Level("L3", l3_bytes, 100e9), Level("DRAM", 16e9, 20e9))
    return Device("cpu", "CPU", {"fp32": 2e11}, levels, n_units=2)


def products(found: list[Op]) -> list[Op]:
    return [op for op in found if op.kind in ("matmul", "attention")]


def limits(name: str, device: str, step: Step) -> dict[str, str]:
    found = products(ops(model(name), BF16, Parallel(), step))
    return {op.name: ceiling(op, load_device(device)).limit for op in found}


def test_a_prompt_of_200_tokens_is_compute_bound_on_a100_and_memory_bound_on_h100():
    linears = ("qkv", "o", "gate_up", "down")
    a100 = limits("llama-2-13b", "a100", Step.prefill(1, 200))
    h100 = limits("llama-2-13b", "h100", Step.prefill(1, 200))
    assert {a100[name] for name in linears} == {"compute"}
    assert {h100[name] for name in linears} == {"memory"}


@pytest.mark.parametrize("device", ["a100", "h100", "h200", "rtx4090", "rtx3090"])
def test_prefill_is_bound_by_compute_and_decode_by_memory(device):
    prefill = limits("llama-2-7b", device, Step.prefill(1, 512))
    assert {prefill[name] for name in ("qkv", "o", "gate_up", "down")} == {"compute"}
    assert prefill["lm_head"] == "memory"
    assert prefill["attention"] == ("compute" if device == "rtx3090" else "memory")
    assert set(limits("llama-2-7b", device, Step.decode(64, 513)).values()) == {"memory"}


def test_prompts_over_an_eight_bit_cache_may_reach_the_eight_bit_peak():
    """Blackwell's kernels do: they quantise the queries, too, and reach 105% of the bf16 peak."""
    step = Step.prefill(1, 8192)
    for device, faster in (("b200", 2), ("a100", 1)):
        seconds = []
        for kv in ("bf16", "fp8"):
            found = ops(model("llama-3.1-8b"), Quant(kv=kv), Parallel(), step)
            attention = next(op for op in found if op.kind == "attention")
            seconds.append(ceiling(attention, load_device(device)).compute_s)
        assert seconds[0] == pytest.approx(faster * seconds[1])


def test_attention_is_most_of_a_large_batchs_decode_where_every_head_has_its_own_cache():
    def share(name: str) -> float:
        found = products(ops(model(name), BF16, Parallel(), Step.decode(64, 513)))
        seconds = {op.name: ceiling(op, load_device("h100")).seconds for op in found}
        return seconds["attention"] / sum(seconds.values())

    assert share("llama-2-7b") == pytest.approx(0.56, abs=0.005)
    assert share("llama-2-70b") == pytest.approx(0.07, abs=0.005)


def test_a_small_models_weights_are_read_from_the_cache_that_holds_them():
    found = ops(model("reference"), FP32, Parallel(), Step.decode(1, 64))
    assert 12e6 < working_set_bytes(found) < 18e6
    for l3_bytes, level in ((50e6, "L3"), (2e6, "DRAM")):
        bounds = [b for b in ceilings(found, cpu(l3_bytes)) if b.op.kind == "matmul"]
        assert {bound.level for bound in bounds} == {level}
        assert {bound.limit for bound in bounds} == {"memory"}


def test_a_cache_that_holds_half_the_working_set_saves_half_the_traffic():
    op = matmul("down", 1, 1000, 1000, FP32)
    whole = ceiling(op, cpu(8e6)).memory_s
    assert whole == op.bytes / 20e9
    assert ceiling(op, cpu(8e6), 16e6).memory_s == pytest.approx(whole / 2)
    assert ceiling(op, cpu(8e6), 25e6).memory_s == whole  # past three times the cache nothing is saved


def test_in_a_cache_of_unknown_speed_only_compute_binds():
    op = matmul("down", 64, 1024, 1024, BF16)
    bound = ceiling(op, load_device("h100"), working_set_bytes=2e6)
    assert (bound.memory_s, bound.limit, bound.seconds) == (0, "compute", op.flops / 989.4e12)


def test_only_the_cache_that_an_elementwise_pass_writes_must_reach_memory():
    found = ops(model("llama-2-7b"), BF16, Parallel(), Step.prefill(1, 100))
    seconds = {op.name: ceiling(op, load_device("a100")).seconds for op in found if op.kind == "elementwise"}
    assert seconds.pop("kv_write") == pytest.approx(100 * 524288 / 2039e9)
    assert set(seconds.values()) == {0}


def test_launches_bind_an_op_when_they_take_half_its_time():
    product = predict(matmul("o", 1, 4096, 4096, BF16, count=32), load_device("h100"), None)
    assert product.limit == "memory"
    for share, limit in ((0.5, "latency"), (0.49, "memory")):
        assert replace(product, floor_s=share * product.seconds).limit == limit


@given(st.sampled_from(["a100", "h100", "b200", "l4"]), st.integers(1, 4096), st.integers(1, 64))
def test_a_bound_is_never_below_its_parts_and_grows_with_the_work(device, n_tok, batch):
    here = load_device(device)
    shape = model("llama-3.1-8b")
    small, large = (
        sum(ceiling(op, here).seconds for op in ops(shape, BF16, Parallel(), Step.prefill(b, n_tok)))
        for b in (batch, batch + 1)
    )
    found = ops(shape, BF16, Parallel(), Step.prefill(batch, n_tok))
    assert small <= large
    assert small >= sum(op.count * op.flops for op in found) / here.peak_flops_per_s("bf16")


NVLINK = Link("node", "NVLink", 8, 450e9, 1e-6)
NETWORK = Link("network", "network", 2**20, 50e9, 5e-6)


def test_a_ring_all_reduce_sends_all_but_one_share_twice():
    seconds, link = collective_s("all_reduce", 8e6, 8, [replace(NVLINK, latency_s=0.0)])
    assert seconds == pytest.approx(2 * 7 / 8 * 8e6 / 450e9)
    assert link == "NVLink"


def test_small_messages_go_by_tree_and_large_ones_by_ring():
    def seconds(n_bytes: float, algorithm: str | None) -> float:
        return collective_s("all_reduce", n_bytes, 8, [NVLINK], algorithm)[0]

    assert seconds(1e3, None) == seconds(1e3, "tree") < seconds(1e3, "ring")
    assert seconds(1e9, None) == seconds(1e9, "ring") < seconds(1e9, "tree")
    assert seconds(0, "tree") == pytest.approx(6e-6)


def test_a_hierarchy_sends_between_nodes_only_what_a_node_has_reduced():
    links = [replace(NVLINK, latency_s=0.0), replace(NETWORK, latency_s=0.0)]
    seconds, link = collective_s("all_reduce", 8e6, 16, links)
    inside, between = 2 * 7 / 8 * 8e6 / 450e9, 2 * 1 / 2 * 1e6 / 50e9
    assert seconds == pytest.approx(inside + between)
    assert link == "NVLink"
    assert collective_s("all_gather", 8e6, 16, links)[0] == pytest.approx(seconds / 2)


def test_three_tiers_of_a_frontier_node_are_used_from_the_inside():
    device = load_device("mi250x-gcd-frontier").with_network(25e9)
    seconds, _ = collective_s("all_reduce", 16e6, 16, device.links)
    package, node, network = 16e6 / 200e9, 2 * 3 / 4 * 8e6 / 50e9, 2e6 / 25e9
    assert seconds == pytest.approx(package + node + network)


def test_an_all_to_all_is_as_slow_as_its_busiest_tier():
    links = [replace(NVLINK, latency_s=0.0), replace(NETWORK, latency_s=0.0)]
    assert collective_s("all_to_all", 8e6, 16, links) == (8e6 * 8 / 16 / 50e9, "network")
    assert collective_s("all_to_all", 8e6, 8, links)[0] == pytest.approx(8e6 * 7 / 8 / 450e9)


def test_a_send_crosses_the_farthest_link_its_stages_span():
    assert collective_s("send", 1e6, 2, [NVLINK, NETWORK]) == (1e-6 + 1e6 / 450e9, "NVLink")
    assert collective_s("send", 1e6, 16, [NVLINK, NETWORK]) == (5e-6 + 1e6 / 50e9, "network")


def test_one_rank_needs_no_link_and_too_many_are_refused():
    assert collective_s("all_reduce", 1e6, 1, []) == (0, "")
    with pytest.raises(RooflineError, match=r"16 ranks need links .* reach 8; .*--network"):
        collective_s("all_reduce", 1e6, 16, [NVLINK])


def test_a_collective_is_communication():
    reduce = next(
        op for op in ops(model("llama-2-7b"), BF16, Parallel(tp=2), Step.decode(1, 9)) if op.link_bytes
    )
    bound = ceiling(reduce, load_device("a100"))
    assert bound.limit == replace(predict(reduce, load_device("a100"), None), floor_s=1.0).limit
    assert bound.limit == "communication"
    assert bound.seconds == pytest.approx(65 * 8192 / 300e9)


@pytest.mark.parametrize(
    ("name", "quant", "parallel", "bytes_"),
    [
        ("llama-2-7b", BF16, Parallel(), 524_288),
        ("llama-2-13b", BF16, Parallel(), 819_200),
        ("llama-2-70b", BF16, Parallel(), 327_680),
        ("llama-2-70b", BF16, Parallel(tp=8), 40_960),
        ("llama-3.1-8b", BF16, Parallel(), 131_072),
        ("llama-3.1-8b", Quant(kv="fp8"), Parallel(), 65_536),
        ("llama-3.1-8b", BF16, Parallel(pp=2), 65_536),
        ("deepseek-v3", BF16, Parallel(), 70_272),
        ("deepseek-v3", BF16, Parallel(tp=8), 70_272),
    ],
)
def test_a_token_takes_so_much_cache(name, quant, parallel, bytes_):
    assert kv_bytes(model(name), quant, parallel, 1) == bytes_


def test_windowed_layers_keep_no_more_than_their_window():
    shape = model("gemma-2-9b")
    per_tok = kv_bytes(shape, BF16, Parallel(), 1)
    assert kv_bytes(shape, BF16, Parallel(), 4096) == 4096 * per_tok
    assert kv_bytes(shape, BF16, Parallel(), 8192) == (8192 + 4096) / 2 * per_tok


def test_more_ranks_than_kv_heads_replicate_them():
    shape = model("llama-3.1-8b")
    assert kv_bytes(shape, BF16, Parallel(tp=16), 1) == kv_bytes(shape, BF16, Parallel(tp=8), 1)


@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2", "mixtral-8x7b", "deepseek-v3"])
def test_weights_of_one_device_take_two_bytes_a_parameter(name):
    shape = model(name)
    assert weight_bytes(shape, BF16, Parallel()) == 2 * shape.params()


def test_ranks_and_stages_share_the_weights():
    shape = model("llama-2-70b")
    whole = weight_bytes(shape, BF16, Parallel())
    assert weight_bytes(shape, BF16, Parallel(tp=8)) == pytest.approx(whole / 8, rel=1e-3)
    assert weight_bytes(shape, BF16, Parallel(pp=8)) == pytest.approx(whole / 8, rel=0.03)
    sparse = model("qwen3-30b-a3b")
    assert weight_bytes(sparse, BF16, Parallel(dp=8, ep=8)) < 0.2 * weight_bytes(sparse, BF16, Parallel())


def test_stages_of_alternating_layers_hold_some_of_each_kind():
    """Maverick: experts in every other layer; Qwen3-Next: a cache in every fourth."""
    shape = replace(model("llama-4-maverick"), vision_params=0)  # the first stage has the tower
    end, norm = 2 * shape.vocab * shape.d, 2 * shape.d
    in_layers = weight_bytes(shape, BF16, Parallel()) - 2 * end - norm
    assert weight_bytes(shape, BF16, Parallel(pp=2)) == in_layers / 2 + end + norm
    shape = model("qwen3-next-80b-a3b")
    assert 4 * kv_bytes(shape, BF16, Parallel(pp=4), 1) == kv_bytes(shape, BF16, Parallel(), 1)
    assert 4 * state_bytes(shape, Parallel(pp=4)) == state_bytes(shape, Parallel())


def test_the_cache_is_what_weights_and_reserve_leave_in_whole_blocks():
    shape, device = model("llama-3.1-8b"), load_device("rtx4090")
    here = room(Deployment(shape, BF16, Parallel(), device))
    assert here.kv_tok == here.kv_bytes // (16 * 131072) * 16
    assert here.kv_tok == pytest.approx(41_408, rel=0.05)  # what vLLM 0.19 found on this card
    assert here.largest_batch(1024) == here.kv_tok // 1024


def test_a_model_that_does_not_fit_is_told_what_it_needs():
    with pytest.raises(
        RooflineError, match=r"llama-2-70b does not fit A100-SXM4-80G: weights take 138.0 GB .*--tp"
    ):
        room(Deployment(model("llama-2-70b"), BF16, Parallel(), load_device("a100")))
    assert room(Deployment(model("llama-2-70b"), BF16, Parallel(tp=4), load_device("a100"))).kv_tok > 0


def test_a_batch_beyond_the_cache_or_the_context_is_told_the_most_that_fits():
    shape = model("llama-2-13b")
    here = room(Deployment(shape, BF16, Parallel(), load_device("a100")))
    most = here.largest_batch(400)
    here.check(most, 400)
    with pytest.raises(
        RooflineError, match=f"batch {most + 1} of 400 tokens does not fit .* at most {most};"
    ):
        here.check(most + 1, 400)
    with pytest.raises(RooflineError, match="5000 tokens of prompt and output are more than the 4096"):
        here.check(1, 5000)


def test_a_device_on_which_nothing_was_measured_has_a_wide_range_and_says_so():
    """Llama-3.1-70B took 1.4 to 1.7 times as long on MI300X as predicted, Mixtral 1.7 to 2.4 times."""
    for device, wide in (("mi300x", True), ("rtx3090", True), ("h100", False), ("l40s", False)):
        known = load_calibration(load_device(device))
        on = Deployment(model("llama-3.1-8b"), BF16, Parallel(), load_device(device))
        step = on.predict(Step.decode(8, 512), known)
        assert (step.range_s[1] > 2.3 * step.predicted_s) == wide
        assert ("nothing was measured" in " ".join(known.sentences())) == wide
