"""A step's ops: exact against the worked example, and what every formula must keep."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.errors import RooflineError
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import read_config
from burstline.roofline.model.ops import Op, Step, experts_hit, matmul, ops
from burstline.roofline.model.shapes import QUANTS, ModelShape, Moe, Parallel
from burstline.roofline.predict.predict import ceiling

MODELS = Path(__file__).parents[2] / "burstline/roofline" / "model" / "configs"
EXAMPLE = Path(__file__).parents[1] / "golden" / "roofline" / "worked_example.csv"
BF16 = QUANTS["bf16"]


def model(name: str) -> ModelShape:
    return read_config(json.loads((MODELS / f"{name}.json").read_text()), name)


def example_rows() -> list[dict[str, str]]:
    with EXAMPLE.open() as file:
        return list(csv.DictReader(file))


def example_cases() -> list[tuple[str, str, int]]:
    return list(dict.fromkeys((row["model"], row["phase"], int(row["batch"])) for row in example_rows()))


@pytest.mark.parametrize(("name", "phase", "batch"), example_cases())
def test_the_worked_example_is_met_row_by_row_with_difference_zero(name, phase, batch):
    step = Step.prefill(batch, 512) if phase == "prefill" else Step.decode(batch, 513)
    found = ops(model(name.replace("llama2", "llama-2")), BF16, Parallel(), step)
    by_name = {"attn" if op.name == "attention" else op.name: op for op in found}
    rows = [
        row
        for row in example_rows()
        if (row["model"], row["phase"], row["batch"]) == (name, phase, str(batch))
    ]
    products = [row for row in rows if row["op"] != "TOTAL"]
    assert len(products) == 30
    for row in products:
        op, device = by_name[row["op"]], load_device(row["device"])
        bound = ceiling(op, device)
        assert op.count * op.flops == int(row["flops"])
        assert op.count * op.bytes == int(row["bytes"])
        assert round(op.intensity, 4) == float(row["intensity"])
        assert round(device.ridge("bf16"), 2) == float(row["ridge"])
        assert bound.limit == row["bound"]
        assert round(bound.seconds * 1e6, 3) == float(row["t_us"])
    for row in (row for row in rows if row["op"] == "TOTAL"):
        kept = [by_name[product["op"]] for product in products if product["device"] == row["device"]]
        assert sum(op.count * op.flops for op in kept) == int(row["flops"])
        assert sum(op.count * op.bytes for op in kept) == int(row["bytes"])
        seconds = sum(ceiling(op, load_device(row["device"])).seconds for op in kept)
        assert round(seconds * 1e6, 3) == float(row["t_us"])


requests = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 300)).map(lambda qc: (qc[0], qc[0] + qc[1], 1)),
    min_size=1,
    max_size=5,
)


@given(requests, st.one_of(st.none(), st.integers(1, 400)))
def test_keys_seen_are_those_a_mask_leaves(rows, window):
    step = Step.of(rows)
    seen = sum(min(c - q + j, window or c) for q, c, _ in rows for j in range(1, q + 1))
    assert step.keys_seen(window) == seen
    assert seen <= step.keys_full(window) <= sum(q * c for q, c, _ in rows)


@given(st.integers(1, 2000), st.integers(1, 700), st.one_of(st.none(), st.integers(1, 3000)))
def test_chunking_a_prompt_conserves_its_causal_work(n_tok, chunk, window):
    ends = [*range(chunk, n_tok, chunk), n_tok]
    starts = [0, *ends[:-1]]
    chunks = [Step.of([(end - start, end, 0)]) for start, end in zip(starts, ends, strict=True)]
    assert sum(part.keys_seen(window) for part in chunks) == Step.prefill(1, n_tok).keys_seen(window)


def test_a_whole_prompt_sees_half_the_square_and_a_diagonal():
    assert Step.prefill(3, 512).keys_seen() == 3 * 512 * 513 // 2
    assert Step.prefill(3, 512).keys_full() == 3 * 512 * 512


@pytest.mark.parametrize("rows", [[], [(0, 5, 1)], [(6, 5, 1)], [(1, 1, -1)]])
def test_a_step_that_cannot_be_is_refused(rows):
    with pytest.raises(RooflineError, match="a step needs"):
        Step.of(rows)


@pytest.mark.parametrize(("n_experts", "top_k"), [(8, 2), (64, 6), (128, 8), (256, 8)])
@pytest.mark.parametrize("n_tok", [1, 4, 16, 64])
def test_expected_experts_agree_with_a_simulated_router(n_experts, top_k, n_tok):
    rng = np.random.default_rng([n_experts, top_k, n_tok])
    n_trials = 400
    picks = rng.random((n_trials, n_tok, n_experts)).argpartition(top_k - 1, axis=2)[:, :, :top_k]
    hits = np.array([len(np.unique(trial)) for trial in picks])
    error = 5 * hits.std() / n_trials**0.5
    assert hits.mean() == pytest.approx(experts_hit(n_experts, top_k, n_tok), abs=error + 1e-6)


def total(found: list[Op], attribute: str) -> float:
    return sum(op.count * getattr(op, attribute) for op in found)


@pytest.mark.parametrize(
    "name", ["llama-2-70b", "mixtral-8x7b", "qwen3-30b-a3b", "gemma-2-9b", "deepseek-v3"]
)
@pytest.mark.parametrize("step", [Step.prefill(2, 64), Step.decode(8, 100)], ids=["prefill", "decode"])
def test_tensor_parallel_ranks_do_the_whole_models_work_between_them(name, step):
    shape, tp = model(name), 2
    whole = ops(shape, BF16, Parallel(), step)
    rank = ops(shape, BF16, Parallel(tp=tp), step)
    replicated = {"q_a", "kv_a", "router"}
    for op in (op for op in whole if op.kind in ("matmul", "attention")):
        share = next(
            r for r in rank if (r.name, r.count, r.n > 0) == (op.name, op.count, True) and same_window(r, op)
        )
        assert share.flops * (1 if op.name in replicated else tp) == op.flops
    assert total(rank, "link_bytes") > 0


def same_window(a: Op, b: Op) -> bool:
    return a.kind != "attention" or (a.groups, a.m, a.n) == (b.groups, b.m, b.n)


def test_an_all_reduce_follows_the_embedding_and_both_blocks_of_every_layer():
    found = ops(model("llama-2-13b"), BF16, Parallel(tp=4), Step.decode(8, 100))
    (reduce,) = (op for op in found if op.collective == "all_reduce")
    assert reduce.count == 2 * 40 + 1
    assert reduce.link_bytes == 8 * 5120 * 2


def test_expert_parallel_ranks_hold_and_read_their_share_of_the_experts():
    shape = model("deepseek-v3")
    alone = {op.name: op for op in ops(shape, BF16, Parallel(), Step.decode(64, 100))}
    rank = {op.name: op for op in ops(shape, BF16, Parallel(ep=8, dp=8), Step.decode(8, 100))}
    assert rank["experts_down"].groups == pytest.approx(alone["experts_down"].groups / 8)
    assert rank["experts_down"].flops == alone["experts_down"].flops / 8
    assert rank["dispatch"].collective == "all_to_all"
    assert rank["dispatch"].link_bytes < 8 * 8 * 7168 * 2  # fewer ranks than experts: sent once a rank


def test_a_mixed_step_reads_weights_once_and_keeps_its_attentions_apart():
    shape = model("llama-3.1-8b")
    mixed = ops(shape, BF16, Parallel(), Step.of([(512, 512, 1), (1, 300, 1), (1, 700, 1)]))
    qkv = next(op for op in mixed if op.name == "qkv")
    assert (qkv.m, qkv.weight_bytes) == (514, 6144 * 4096 * 2)
    prefill, decode = (op for op in mixed if op.kind == "attention")
    assert (prefill.phase, prefill.groups, prefill.n) == ("prefill", 1, 512)
    assert (decode.phase, decode.groups, decode.n) == ("decode", 2, 500)


def test_verifying_a_draft_counts_as_decoding():
    ((phase, _),) = Step.of([(4, 100, 4)]).phases()
    assert phase == "decode"


def test_windowed_layers_read_no_more_than_their_window():
    found = ops(model("gemma-2-9b"), BF16, Parallel(), Step.decode(1, 8000))
    assert sorted(op.n for op in found if op.kind == "attention") == [4096, 8000]


def test_absorbed_latent_attention_has_the_intensity_of_a_near_ridge_kernel():
    attention = next(
        op
        for op in ops(model("deepseek-v3"), BF16, Parallel(), Step.decode(1, 4096))
        if op.kind == "attention"
    )
    assert attention.flops / attention.kv_bytes == pytest.approx(241.8, abs=0.05)


@pytest.mark.parametrize(
    ("quant", "weight", "dtype"),
    [
        ("bf16", 2, "bf16"),
        ("fp8", 1, "fp8"),
        ("int4", 0.515625, "bf16"),
        ("awq", 0.51953125, "fp16"),
        ("fp32", 4, "fp32"),
    ],
)
def test_a_product_reads_its_weights_in_their_dtype_and_runs_in_that_of_its_inputs(quant, weight, dtype):
    op = matmul("down", 16, 4096, 11008, QUANTS[quant])
    assert op.weight_bytes == weight * 4096 * 11008
    assert op.dtype == dtype


def test_eight_bit_activations_cost_a_pass_over_every_input():
    found = ops(model("llama-2-7b"), QUANTS["fp8"], Parallel(), Step.decode(4, 100))
    passes = [op for op in found if op.name == "quantise"]
    assert sum(op.count for op in passes) == 4 * 32
    assert passes[0].activation_bytes == 3 * 4 * 4096


def test_skewed_routing_touches_fewer_experts_but_never_fewer_than_one_token_needs():
    def touched(share: float, batch: int) -> float:
        found = ops(model("qwen3-30b-a3b"), BF16, Parallel(), Step.decode(batch, 10), expert_share=share)
        return next(op.groups for op in found if op.name == "experts_down")

    assert touched(0.8, 16) == pytest.approx(0.8 * touched(1.0, 16))
    assert touched(0.5, 1) == 8


def test_flops_of_a_token_are_two_per_active_parameter_of_the_products():
    for name in ("llama-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b"):
        shape = model(name)
        found = ops(shape, BF16, Parallel(), Step.decode(1, 1))
        products = sum(op.count * op.flops for op in found if op.kind == "matmul")
        norms = shape.d * (2 * shape.n_layers + 1) + sum(
            la.count * la.attention.norm_params for la in shape.layers
        )
        assert products == 2 * (shape.active_params() - shape.vocab * shape.d - norms)


@pytest.mark.parametrize(
    ("name", "parallel", "says"),
    [
        ("llama-2-7b", Parallel(tp=3), "tp 3 does not divide the 32 query heads"),
        ("llama-2-7b", Parallel(tp=0), "tp must be at least 1"),
        ("llama-2-7b", Parallel(pp=64), "pp 64 is more than the 32 layers"),
        ("qwen2.5-7b", Parallel(tp=8), "tp 8 does not divide the 28 query heads"),
        ("mixtral-8x7b", Parallel(ep=3, dp=3), "ep 3 does not divide the 8 experts"),
        ("mixtral-8x7b", Parallel(ep=4), "ep 4 does not divide tp x dp = 1"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(name, parallel, says):
    with pytest.raises(RooflineError, match=says):
        ops(model(name), BF16, parallel, Step.decode(1, 1))


def test_pipeline_stages_send_the_residual_stream_between_them():
    found = ops(model("llama-2-70b"), BF16, Parallel(pp=4), Step.decode(16, 100))
    (send,) = (op for op in found if op.collective == "send")
    assert (send.count, send.link_bytes) == (3, 16 * 8192 * 2)


def test_a_moe_layers_experts_see_few_rows_each():
    shape = model("mixtral-8x7b")
    assert isinstance(shape.layers[0].ffn, Moe)
    op = next(op for op in ops(shape, BF16, Parallel(), Step.decode(64, 100)) if op.name == "experts_gate_up")
    assert op.groups == pytest.approx(8, abs=1e-6)
    assert op.m == pytest.approx(16, abs=1e-5)
    assert replace(op, count=1).flops == 2 * 64 * 2 * 4096 * 28672


def test_an_attention_knows_its_heads_on_a_rank():
    step = Step.of([(1, 300, 1), (1, 700, 1)])
    op = next(op for op in ops(model("llama-2-70b"), BF16, Parallel(tp=16), step) if op.kind == "attention")
    assert op.n_heads == 4
    latent = next(
        op for op in ops(model("deepseek-v3"), BF16, Parallel(tp=8), step) if op.kind == "attention"
    )
    assert latent.n_heads == 16


def test_the_activation_between_two_products_is_as_wide_as_the_feed_forward_block():
    found = {op.name: op for op in ops(model("llama-2-7b"), BF16, Parallel(), Step.prefill(1, 10))}
    assert found["act"].bytes == 3 * 10 * 11008 * 2
    assert found["norm"].bytes == 4 * 10 * 4096 * 2
    assert found["rope"].bytes == 2 * 10 * 2 * 4096 * 2
    assert found["kv_write"].bytes == 2 * 10 * 4096 * 2
