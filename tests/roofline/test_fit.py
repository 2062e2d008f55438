"""The fit: finds what made the data, never sees the rows it is scored on, gives the same twice."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from burstline.roofline.calibrate.fitting import spread_of
from burstline.roofline.device.calibration import DecodeFit, GemmFit, PassFit, generic, load_calibration
from burstline.roofline.device.device import load_device
from burstline.roofline.model.ops import Step, ops
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import QUANTS
from burstline.roofline.predict.kernels import Decodes, Products, Rates, decode_s, gemm_s, p_norm, pass_s
from burstline.roofline.predict.predict import predict_step
from research.accuracy_serving import bundled_model
from research.experts import expert_fits, expert_tables, experts_s
from research.fit import (
    fit_decode,
    fit_device,
    fit_gemm,
    fit_passes,
    gemm_start,
    keep_unmeasured,
)
from research.held_out import held_out
from research.kernel_tables import Rows, gemm_tables, measured_folders

MEASURED = Path(__file__).parents[1] / "data" / "measured"
RATES = Rates(1e15, 3e12, 132, 50e6)


def products():
    m, n, k = (
        axis.ravel().astype(float)
        for axis in np.meshgrid([1, 16, 128, 200, 512, 2048], [2048, 4096, 8192], [2048, 4096])
    )
    return Products(m, n, k, np.ones_like(m), 2 * n * k, 2 * m * k, 2 * m * n, 0 * m)


@pytest.mark.parametrize(
    "truth",
    [
        GemmFit(0.8, 0.85, 4e-6, pad=0.5),
        GemmFit(0.6, 0.7, 9e-6, pad=0.3, p=6.0, operand_rows=30.0, reread=0.9),
    ],
)
def test_a_fit_finds_the_parameters_that_made_the_rows(truth):
    x = products()
    rows = Rows(x, gemm_s(truth, RATES, x), 6 * x.weight_bytes, x.n.astype(np.int64))
    found = fit_gemm([(RATES, rows)], replace(truth, eta_c=0.7, eta_m=0.8, t0_s=5e-6, pad=0.1))
    assert (found.eta_c, found.eta_m) == (
        pytest.approx(truth.eta_c, rel=0.02),
        pytest.approx(truth.eta_m, rel=0.02),
    )
    assert found.t0_s == pytest.approx(truth.t0_s, rel=0.05)


def test_passes_that_fit_a_cache_are_told_from_those_that_do_not():
    truth, moved = PassFit(2e-6, 0.8, 2.5), np.geomspace(1e4, 5e8, 30)
    found = fit_passes(RATES, moved, pass_s(truth, RATES, moved))
    assert found.eta_m == pytest.approx(0.8, rel=0.05)
    assert found.eta_cache == pytest.approx(2.5, rel=0.05)


def test_no_row_is_predicted_by_a_fit_that_saw_its_key():
    x = products()
    rows = Rows(x, np.ones(len(x.m)), x.weight_bytes, (x.n * 10_000 + x.k).astype(np.int64))
    seen = []

    def predict(fit, part):
        seen.append((fit, set(part.key.tolist())))
        return part.seconds

    held_out(rows, lambda part: set(part.key.tolist()), predict)
    assert all(not fitted & scored for fitted, scored in seen)
    assert set.union(*(scored for _, scored in seen)) == set(rows.key.tolist())


def test_units_that_limit_a_cache_of_eight_bits_are_told_from_the_memory():
    """Hopper's kernel: the same units read no faster where the memory is."""
    pairs, context = (
        axis.ravel().astype(float) for axis in np.meshgrid([8, 32, 64, 128, 512], [1024, 4096, 16384])
    )
    kv_bytes = 2 * pairs * context * 8 * 128
    x = Decodes(pairs, context, np.full_like(pairs, 8), kv_bytes, 4 * pairs * 64 * 128)
    truth = DecodeFit(1.4e-5, 0.9, 200.0, 0.0, 4.2e-11)
    rates = Rates(0, 4.8e12, 132, 50e6)
    rows = Rows(x, decode_s(truth, rates, x), kv_bytes, pairs.astype(np.int64))
    found = fit_decode(rates, rows, 50e6, eta_m=0.9)
    assert (found.eta_m, found.unit_byte_s) == (0.9, pytest.approx(truth.unit_byte_s, rel=0.05))
    slower = replace(rates, bytes_per_s=2e12)
    assert decode_s(found, slower, x)[-1] > 1.3 * decode_s(found, rates, x)[-1]


def test_a_spread_turns_predicted_over_measured_round():
    spread = spread_of(np.array([0.5, 1.0, 2.0]))
    assert spread.mid == 1
    assert spread.low < 1 < spread.high


def test_a_p_norm_lies_between_the_larger_and_the_sum():
    joined = p_norm(np.array([1.0, 3.0]), np.array([1.0, 0.0]), 4.0)
    assert joined.tolist() == [pytest.approx(2**0.25), 3.0]


def test_the_shipped_fit_comes_out_of_the_tables_again():
    shipped = load_calibration(load_device("rtx4090"))
    again = fit_device(MEASURED / "rtx4090", shipped.elementwise, shipped.mixed)
    assert again.gemm["bf16"].eta_c == pytest.approx(shipped.gemm["bf16"].eta_c, rel=1e-2)
    assert again.decode.eta_m == pytest.approx(shipped.decode.eta_m, rel=1e-2)
    assert again.spread["gemm bf16"].n == shipped.spread["gemm bf16"].n


# Products of four bits: inputs quantised first, a chain for each tile.
FOUR_BITS = GemmFit(0.5, 0.7, 4e-6, pad=0.8, quantise_s=2e-6, quantise_byte_s=6e-11, chain_s=7e-10)


def table(tmp_path, library, dtype, truth, size):
    """A table as published: milliseconds by m, n and k, with the kernel that quantises."""
    b200 = load_device("b200")
    m, n, k = (
        axis.ravel().astype(float)
        for axis in np.meshgrid(
            [1, 16, 100, 128, 512, 4096], [1024, 4096, 16384, 32768], [8192, 16384, 65536]
        )
    )
    x = Products(m, n, k, np.ones_like(m), size * n * k, size * m * k, 2 * m * n, (2 + size) * m * k)
    ms = 1e3 * gemm_s(truth, Rates.of(b200, "fp4" if dtype == "nvfp4" else "fp8"), x)
    folder = tmp_path / "b200_sxm"
    folder.mkdir(exist_ok=True)
    frame = pd.DataFrame({"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": ms, "version": "1"})
    frame.to_parquet(folder / f"gemm_perf_{library}.parquet")
    return folder


def test_a_table_of_four_bits_gives_its_parameters_back(tmp_path):
    (found,) = gemm_tables(table(tmp_path, "vllm", "nvfp4", FOUR_BITS, 0.5625))
    assert (found.dtype, found.device.id, measured_folders(tmp_path)) == ("fp4", "b200-sxm", ["b200_sxm"])
    assert found.rows.work.weight_bytes[0] == found.rows.work.n[0] * found.rows.work.k[0] * (0.5 + 1 / 16)
    fit = fit_gemm([(found.rates, found.rows)], gemm_start(found.device, "fp4"))
    for name in ("eta_c", "eta_m", "chain_s", "quantise_s"):
        assert getattr(fit, name) == pytest.approx(getattr(FOUR_BITS, name), rel=0.05), name


def test_a_product_of_four_bits_pays_for_its_quantising_once():
    device, llama = load_device("b200"), bundled_model("llama-3.1-8b")
    known = replace(load_calibration(device), gemm={"fp4": FOUR_BITS}, sustained=1.0)
    step = ops(llama, QUANTS["nvfp4"], Parallel(), Step.prefill(1, 4096))
    took = {p.op.name: p.seconds / p.op.count for p in predict_step(step, device, known)}
    down = next(op for op in step if op.name == "down")
    quantise = next(op for op in step if op.name == "quantise" and op.n == down.k)
    quantising_s = next(p.seconds / p.op.count for p in predict_step(step, device, known) if p.op is quantise)
    m, n, k = down.m, down.n, down.k
    sizes = (m, n, k, 1.0, down.weight_bytes, 0.5 * m * k, 2.0 * m * n, quantise.bytes)
    together = gemm_s(FOUR_BITS, Rates.of(device, "fp4"), Products(*(np.array([size]) for size in sizes)))
    assert took["down"] + quantising_s == pytest.approx(float(together[0]))


def layers_of_experts(folder, truth, times=1.0):
    """A table of whole layers that take what `truth` says, and what moves between its two products."""
    sizes = itertools.product((1, 4, 64, 1024, 8192), ((64, 4, 2048, 1024), (128, 8, 4096, 1536)), (1, 4))
    rows = [
        {"moe_dtype": "bfloat16", "num_tokens": tok, "hidden_size": d, "inter_size": d_ff, "topk": top_k}
        | {"num_experts": n, "moe_tp_size": tp, "moe_ep_size": 1, "distribution": "balanced"}
        | {"kernel_source": "one", "latency": 1.0}
        for tok, (n, top_k, d, d_ff), tp in sizes
    ]
    folder.mkdir(parents=True, exist_ok=True)
    path, device, dense = (
        folder / "moe_perf_vllm.parquet",
        load_device("h100"),
        load_calibration(load_device("h100")),
    )
    pd.DataFrame(rows).to_parquet(path)
    (rates, layers) = expert_tables(folder, device, dense)["experts_bf16"]
    between_s = 1e-3 - layers.seconds  # a row of 1 ms, less what moves between its products
    latency = 1e3 * (experts_s(truth, rates, layers) + np.minimum(between_s, 0.7e-3)) * times
    pd.DataFrame(rows).assign(latency=latency).to_parquet(path)
    return dense


def test_layers_of_experts_give_their_parameters_back(tmp_path):
    truth = GemmFit(0.6, 0.8, 15e-6, pad=0.4, k_fill=700.0, row_tile=64)
    dense = layers_of_experts(tmp_path / "h100_sxm", truth)
    (found,) = expert_fits([tmp_path / "h100_sxm"], dense)[0].values()
    assert (found.eta_c, found.eta_m) == (pytest.approx(0.6, rel=0.1), pytest.approx(0.8, rel=0.1))
    assert found.t0_s == pytest.approx(15e-6, rel=0.1)


def test_experts_take_longer_than_dense_products_of_their_sizes_would():
    device = load_device("h200")
    dense = replace(
        known := load_calibration(device),
        gemm={kind: fit for kind, fit in known.gemm.items() if not kind.startswith("experts")},
        tier=1,  # falls back to no pooled fit
    )
    step = Step.decode(64, 1024)
    for model, quant in (("qwen3-30b-a3b", "bf16"), ("deepseek-v3", "fp8-block"), ("gpt-oss-120b", "mxfp4")):
        of = ops(bundled_model(model), QUANTS[quant], Parallel(tp=8), step)
        with_fit, without = (
            sum(p.seconds for p in predict_step(of, device, each) if p.op.name.startswith("experts_"))
            for each in (known, dense)
        )
        assert with_fit > 1.2 * without, model


def test_a_machine_that_was_measured_itself_multiplies_experts_as_it_multiplies_all():
    own = replace(load_calibration(load_device("h100")), measured_spread=0.02)
    assert own.gemm_fit("experts_bf16") == own.gemm_fit("bf16")


def test_block_scaled_products_are_read_where_they_were_timed_in_graphs(tmp_path):
    table(tmp_path, "vllm", "fp8_block", FOUR_BITS, 1.0)
    folder = table(tmp_path, "sglang", "fp8_block", FOUR_BITS, 1.0)
    assert [(t.library, t.dtype) for t in gemm_tables(folder)] == [("sglang", "fp8_block")]


def test_a_fit_keeps_the_kinds_that_its_tables_lack():
    shipped = generic()
    again = keep_unmeasured(replace(shipped, gemm={"bf16": FOUR_BITS}, spread={}), shipped)
    assert again.gemm == {**shipped.gemm, "bf16": FOUR_BITS}
    assert again.spread == shipped.spread
