"""A training step: against published measurements, published formulae, and one step by hand."""

import json
from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.cli import main
from burstline.roofline.device.collectives import collective_s
from burstline.roofline.device.device import Link, load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import Attention, Dense, Layer, ModelShape
from burstline.roofline.training.memory import first_stage, layer_activation_bytes, training_memory
from burstline.roofline.training.recipe import Kernels, Recipe
from burstline.roofline.training.sharding import Sharding, three_level, zero, zero_plus_plus
from burstline.roofline.training.step import training_step
from research import training
from research.__main__ import DATA

A100 = load_device("a100-sxm4-80g")
GIB = 2**30


# --- Measured -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "n", "most"),
    [
        (training.megatron, 8, 0.08),
        (training.weak_scaling, 10, 0.10),
        (lambda data: [row for row in training.zero3(data) if row[0].endswith(("1536", "2240"))], 4, 0.10),
    ],
)
def test_measured_steps_are_predicted_with_nothing_set(rows, n, most):
    found = list(rows(DATA))
    assert len(found) == n
    assert np.abs(training.errors(found)).mean() <= most


def test_the_half_of_llm_foundrys_runs_that_set_nothing_is_predicted_within_12_percent():
    found = list(training.foundry(DATA))
    _, judged = training.halves(len(found))
    assert len(found) == 139
    assert np.abs(training.errors([found[k] for k in judged])).mean() <= 0.12


def test_the_shapes_of_llm_foundrys_models_have_the_parameters_that_it_states():
    for row in training.read(DATA, "llm_foundry_zero3_training"):
        model = training.gpt(*training.MPT[row.model], 50368, row.seq, bias=False)
        assert model.params() == pytest.approx(row.params, rel=1e-3)


# --- Formulae -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", training.read(DATA, "activation_memory"))
def test_activations_are_arxiv_2205_05198s_formulae_to_the_byte(row):
    layer = training.gpt(row.layers, row.hidden, row.heads, 51200, 2048).layers[0]
    method = row.method
    one = layer_activation_bytes(
        layer,
        row.hidden,
        2048,
        row.micro_batch,
        row.tp,
        recompute="full" if method == "full" else "selective" if "selective" in method else "none",
        sequence_parallel="sequence parallel" in method,
        kernels=Kernels(fused=False, dropout=True),
    )
    in_flight = 1 + (row.pp - 1) / (row.pp * row.virtual_stages) if row.virtual_stages > 1 else 1
    assert one * row.layers * in_flight / GIB == pytest.approx(row.formula_GiB_first_stage, rel=1e-6)


ranks = st.integers(1, 10).map(lambda power: 2**power)


def sent(sharding: Sharding, *, beyond: int = 1, recomputed: bool = False) -> float:
    """Bytes for each parameter that a rank sends in a step of one micro-batch, over links past `beyond`."""
    return sum(
        (2 if t.kind == "all_reduce" else 1) * t.bytes_ * (t.n_ranks - 1) / t.n_ranks
        for t in sharding.transfers(recomputed=recomputed)
        if t.n_ranks * t.stride > beyond
    )


@given(ranks)
def test_zeros_volumes_are_arxiv_1910_02054s(n):
    """2 bytes a parameter, psi parameters: 2 psi for DDP and stages 1 and 2, 3 psi for stage 3."""
    share = (n - 1) / n
    for stage in (0, 1, 2):
        assert sent(zero(stage, n)) == pytest.approx(2 * 2 * share)
    assert sent(zero(3, n)) == pytest.approx(3 * 2 * share)
    assert sent(zero(3, n, regathers=True), recomputed=True) == pytest.approx(4 * 2 * share)


@given(ranks.filter(lambda n: n > 8))
def test_zero_plus_plus_sends_a_quarter_between_nodes(n):
    """arXiv 2306.10209: half a psi for weights in 8 bits, a quarter for gradients in 4, none backward."""
    share = (n - 1) / n
    assert sent(zero_plus_plus(n, 8), beyond=8) == pytest.approx((1 + 0.5) * share)


@given(st.integers(1, 6).map(lambda power: 8 * 2**power))
def test_three_levels_send_between_nodes_once_a_step_only(n):
    scheme = three_level(n, 2, 8)
    outside = [t for t in scheme.transfers(recomputed=False) if t.n_ranks * t.stride > 8]
    assert [t.when for t in outside] == ["step", "step"]
    # Gradients of an eighth of the model, and weights of half of it, each over n / their degree ranks.
    assert sent(scheme, beyond=8) == pytest.approx(0.5 / 8 * (1 - 8 / n) + 1 / 2 * (1 - 2 / n))


@given(ranks)
def test_states_are_16_bytes_a_parameter_divided_as_zero_says(n):
    kept = [sum(zero(stage, n).kept_bytes().values()) for stage in (0, 1, 2, 3)]
    assert kept == pytest.approx([16, 4 + 12 / n, 2 + 14 / n, 16 / n])


def test_a_flat_ring_takes_the_slowest_link_for_all_of_the_buffer():
    links = (Link("node", "fast", 8, 300e9), Link("network", "slow", 2**20, 25e9, 1e-5))
    seconds, kind = collective_s("all_gather", 1e9, 16, links, "flat")
    assert kind == "slow"
    assert seconds == pytest.approx(15 * (1e-5 + 1e9 / 16 / 25e9))
    assert collective_s("all_gather", 1e9, 16, links)[0] < seconds / 5


# --- By hand ------------------------------------------------------------------------------------------------


TINY = ModelShape("tiny", "llama", 8, 32, (Layer(Attention(2, 2, 4), Dense(16), 2),), tied=False)


def test_one_step_by_hand_to_the_last_flop_and_byte():
    """Two sequences of 4 tokens; d 8, 2 heads of 4, 16 columns, 2 layers, vocabulary 32."""
    step = training_step(Recipe(TINY, A100, 2, 4, 2), None)
    flops = dict.fromkeys(("forward", "backward"), 0.0)
    moved = dict(flops)
    for each in step.work:
        if each.op.kind == "matmul":
            flops[each.during] += each.op.count * each.op.flops
            moved[each.during] += each.op.count * each.op.bytes
    rows = 8
    # qkv 8 x 24, o 8 x 8, gate_up 8 x 32, down 16 x 8, twice; the head 8 x 32.
    shapes = [(8, 24), (8, 8), (8, 32), (16, 8)] * 2 + [(8, 32)]
    assert flops["forward"] == sum(2 * rows * k * n for k, n in shapes)
    assert flops["backward"] == 2 * flops["forward"]
    one_way = sum(2 * (k * n + rows * (k + n)) for k, n in shapes)
    assert moved == {"forward": one_way, "backward": 2 * one_way}  # each operand once, two products back
    # Two heads of 4 for scores and for values; a token of four sees 2.5 keys on average, in two layers.
    attention = 2 * 2 * (2 * 2 * (4 + 4)) * comb(5, 2)
    assert step.model_flops == 3 * (flops["forward"] + attention)


def test_recomputing_runs_the_forward_pass_of_the_layers_again():
    plain = training_step(Recipe(TINY, A100, 2, 4, 2), None)
    again = training_step(Recipe(TINY, A100, 2, 4, 2, recompute="full"), None)
    names = {each.op.name for each in again.work if each.during == "recompute"}
    assert names == {"norm", "qkv", "rope", "attention", "o", "gate_up", "act", "down"}
    assert again.compute_s > plain.compute_s
    assert again.model_flops == plain.model_flops


def test_the_bubble_is_stages_less_one_over_chunks_of_a_micro_batch():
    model = load_model("llama-2-7b")[0]
    recipe = Recipe(model, A100, 8, 512, 1, pp=4)
    plain, chunked = (training_step(replace(recipe, virtual_stages=v), None) for v in (1, 2))
    per_stage = plain.bubble_s / 3
    assert chunked.bubble_s == pytest.approx(plain.bubble_s / 2)
    assert plain.compute_s + plain.tensor_s >= 8 * per_stage


def test_adapters_train_few_parameters_and_drop_the_weights_gradients():
    model = load_model("llama-2-7b")[0]
    whole, adapted = (Recipe(model, A100, 1, 512, 1, adapter_rank=rank) for rank in (0, 64))
    # 32 layers; qkv 4096 x 12288, o 4096 x 4096, gate_up 4096 x 22016, down 11008 x 4096.
    assert adapted.adapter_params == 32 * 64 * (16384 + 8192 + 26112 + 15104)
    names = {each.op.name for each in training_step(adapted, None).work}
    assert not {"qkv.dw", "gate_up.dw"} & names
    assert {"qkv.dx", "adapter.dw"} <= names
    assert training_memory(adapted).optimizer < training_memory(whole).optimizer / 20


def test_frozen_products_count_twice_and_adapters_three_times():
    """As above with adapters of rank 4: two thin products for each product of the two layers."""
    step = training_step(Recipe(TINY, A100, 2, 4, 2, adapter_rank=4), None)
    shapes = [(8, 24), (8, 8), (8, 32), (16, 8)] * 2
    frozen = sum(2 * 8 * k * n for k, n in [*shapes, (8, 32)])
    adapters = sum(2 * 8 * 4 * (k + n) for k, n in shapes)
    attention = 2 * 2 * (2 * 2 * (4 + 4)) * comb(5, 2)
    assert step.model_flops == 2 * frozen + 3 * (adapters + attention)


def test_only_what_was_trained_is_gathered_after_a_step_and_frozen_weights_as_they_are_stored():
    """On a ring without latency over 8 ranks: 7/8 of each buffer, twice for an all-reduce."""
    model, gb_per_s = load_model("llama-2-7b")[0], 300e9
    link = Link("node", "ring", 8, gb_per_s)
    device = replace(A100, links=(link,))
    plain = Recipe(model, device, 8, 512, 1, zero(0, 8), adapter_rank=64, overlap=False)
    buffer_s = 7 / 8 / gb_per_s
    for stage in (0, 1):  # gradients reduced and adapters gathered take as long as one all-reduce
        sharded = replace(plain, sharding=zero(stage, 8))
        expected_s = 2 * 2 * plain.adapter_params * buffer_s
        assert training_step(sharded, None).exposed_s == pytest.approx(expected_s)
    packed = replace(plain, sharding=zero(3, 8), frozen="int4")
    stored = training_memory(replace(packed, sharding=zero(0, 8))).weights
    gathered_s = 2 * stored * buffer_s  # forward and backward
    reduced_s = 2 * plain.adapter_params * buffer_s
    assert training_step(packed, None).exposed_s == pytest.approx(gathered_s + reduced_s)
    working = [training_memory(replace(packed, frozen=frozen)).activations for frozen in ("bf16", "int4")]
    assert working[0] - working[1] == pytest.approx(1.25 * 2 * (2 * model.params() - stored) / 32)


def test_frozen_weights_of_4_bits_are_a_quarter_and_are_unpacked_forward_and_backward():
    """But for the embedding and the head, 32,000 x 4,096 each, and the last norm."""
    model = load_model("llama-2-7b")[0]
    recipe = Recipe(model, A100, 1, 512, 1, adapter_rank=64)
    packed = replace(recipe, frozen="int4")
    ends = 2 * 32000 * 4096 + 4096
    expected = 2 * ends + 0.5 * (model.params() - ends)
    assert training_memory(packed).weights == pytest.approx(expected)
    step = training_step(packed, None)
    assert [each.during for each in step.work if each.op.name == "unpack"].count("backward") >= 4


def test_overlap_hides_no_more_than_there_is_computing():
    recipe = Recipe(load_model("llama-2-7b")[0], A100, 8, 512, 1, zero(3, 8))
    hidden, exposed = training_step(recipe, None), training_step(replace(recipe, overlap=False), None)
    assert hidden.exposed_s + hidden.hidden_s == pytest.approx(exposed.exposed_s)
    assert hidden.hidden_s <= hidden.compute_s


def test_stages_are_divided_so_that_the_head_counts_as_layers():
    """A head of 131,072 x 2,048 costs as much as 4 of the 16 layers: four stages hold 5, 5, 5 and 1."""
    layer = Layer(Attention(32, 32, 64), Dense(8192), 16)
    model = ModelShape("m", "llama", 2048, 131072, (layer,), tied=True)
    params, n_layers = first_stage(model, 4)
    assert n_layers == 5
    assert params == pytest.approx(5 * (4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048) + 131072 * 2048)


def test_memory_falls_with_each_stage_of_zero_and_with_recomputation():
    model = load_model("llama-2-13b")[0]
    kept = [training_memory(Recipe(model, A100, 8, 2048, 1, zero(stage, 8))) for stage in (0, 1, 2, 3)]
    totals = [memory.total for memory in kept]
    assert totals == sorted(totals, reverse=True)
    full = training_memory(Recipe(model, A100, 8, 2048, 1, zero(3, 8), recompute="full"))
    assert full.activations < kept[3].activations / 3


# --- The command --------------------------------------------------------------------------------------------


@pytest.mark.drawn
def test_the_study_prints_time_bounds_memory_and_other_methods(capsys, tmp_path):
    words = ["study", "training", "--model", "llama-2-7b", "--device", "a100-sxm4-80g", "--devices", "8"]
    assert main([*words, "--zero", "3"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("llama-2-7b on 8 x A100-SXM4-80G, ZeRO-3:")
    assert "It fits" in text
    assert [line[:2] for line in text.splitlines() if line[:1].isdigit()] == ["1.", "2.", "3.", "4."]
    assert main([*words, "--zero", "0", "--json", "--figures", str(tmp_path)]) == 0
    assert "ZeRO-3, recompute full" in (tmp_path / "training.svg").read_text()
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["methods"]["ZeRO-3, recompute full"]["fits"] is True


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tp", "3", "--devices", "6"], "tp 3 does not divide the 32 query heads"),
        (["--pp", "64", "--devices", "64"], "pp 64 is more than the 32 layers"),
        (["--sequences", "7"], "a batch of 7 sequences does not divide"),
        (["--tp", "16", "--devices", "8"], "does not divide --devices 8"),
        (["--seq", "5000"], "sequences of 5000 tokens are longer than the 4096 of llama-2-7b"),
        (["--micro-batch", "0"], "--micro-batch must be at least 1"),
        (["--lora", "8", "--qlora", "8"], "give one of them"),
        (["--lora", "0"], "--lora must be at least 1, not 0"),
        (["--qlora", "-8"], "--qlora must be at least 1, not -8"),
        (["--sequences", "0"], "--sequences must be at least 1, not 0"),
        (["--network-gb-per-s", "nan"], "--network-gb-per-s nan: expected a number above 0"),
        (["--network-gb-per-s", "-4"], "--network-gb-per-s -4: expected a number above 0"),
        (["--virtual-stages", "2"], "--virtual-stages 2 would be ignored"),
        (["--sequence-parallel"], "--sequence-parallel would be ignored"),
        (["--devices", "64"], "--network-gb-per-s"),
        (["--virtual-stages", "5", "--pp", "8"], "are more than the 32 layers"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, words, expected):
    assert main(["study", "training", "--model", "llama-2-7b", "--device", "a100-sxm4-80g", *words]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_experts_are_refused():
    with pytest.raises(RooflineError, match="dense layers with ordinary attention only"):
        Recipe(load_model("mixtral-8x7b")[0], A100, 1, 512, 1)
