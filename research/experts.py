"""Products of mixture-of-experts layers: fitted to tables of whole fused layers, apart from dense products.

An engine computes all experts of a layer with one grouped kernel, whose tiles each belong to one expert. It
reaches less of a device than a dense product of the same sizes, and routing costs launches of its own, which
are counted with the two products. Tables: `moe_perf_vllm.parquet` beside a device's other ones; where a
folder has none, the shipped parameters stay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from burstline.roofline.calibrate.fitting import log_errors, search, spread_of
from burstline.roofline.device.calibration import Calibration, GemmFit, Spread
from burstline.roofline.device.device import Device
from burstline.roofline.model.shapes import ELEMENT_BYTES, QUANTS, Quant
from burstline.roofline.predict.kernels import Amounts, Products, Rates, gemm_s, pass_s, quantise_s
from research.held_out import held_out
from research.kernel_tables import device_of

# Stored dtype -> how we store and multiply weights.
_DTYPES = {
    "bfloat16": "bf16", "fp8": "fp8-static", "fp8_block": "fp8-block", "nvfp4": "nvfp4", "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4",
}  # fmt: skip
# Left out: fp8 on Hopper, where vLLM 0.19's kernel and 0.24's differ fivefold, and 16-bit inputs beside 4-bit
# weights on Blackwell, whose engines give its matrix units inputs of 8 bits.
_LEFT_OUT = {("fp8", "sm90"), ("w4a16_mxfp4", "sm10")}
_LEAST_COLUMNS = 128
"""Columns of an expert on one device: fewer are no layout that engines use, and other kernels take them."""
_STARTS = tuple(GemmFit(0.5, 0.8, 15e-6, pad=0.5, k_fill=500.0, row_tile=tile) for tile in (16, 64, 128))


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Measured layers: both products of each, seconds less what moves between them, and the split's key."""

    up: Products
    down: Products
    seconds: Amounts
    key: npt.NDArray[np.int64]

    def where(self, mask: npt.NDArray[np.bool_]) -> "ExpertRows":
        up, down = (
            Products(*(getattr(work, name)[mask] for name in Products.__dataclass_fields__))
            for work in (self.up, self.down)
        )
        return ExpertRows(up, down, self.seconds[mask], self.key[mask])

    def __len__(self) -> int:
        return len(self.seconds)


def expert_tables(folder: Path, device: Device, dense: Calibration) -> dict[str, tuple[Rates, ExpertRows]]:
    """The layers of a device by kind of kernel ("experts_fp8"), with the ceilings that they run under.

    `dense`: what is known of the passes between products.
    """
    path = folder / "moe_perf_vllm.parquet"
    if not path.is_file():
        return {}
    frame = pd.read_parquet(path)
    frame = frame[(frame.moe_ep_size == 1) & (frame.distribution == "balanced")]
    frame = frame[frame.inter_size >= _LEAST_COLUMNS * frame.moe_tp_size]
    found = {}
    for stored, name in _DTYPES.items():
        if (stored, device.arch[:4]) in _LEFT_OUT:
            continue
        quant, rows = QUANTS[name], frame[frame.moe_dtype == stored].reset_index(drop=True)
        if stored == "w4a16_mxfp4":  # the kernels of gpt-oss
            rows = rows[rows.kernel_source.str.contains("gptoss")].reset_index(drop=True)
        if len(rows):
            sizes = ["num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size"]
            fastest = rows.loc[rows.groupby(sizes).latency.idxmin()]
            rates = Rates.of(device, quant.activations)
            found[quant.expert_kernel] = rates, _layers(fastest, quant, dense, rates)
    return found


def _layers(frame: "pd.DataFrame", quant: Quant, dense: Calibration, rates: Rates) -> ExpertRows:
    tok, d, top_k, experts = (
        frame[name].to_numpy(float) for name in ("num_tokens", "hidden_size", "topk", "num_experts")
    )
    columns = (frame.inter_size / frame.moe_tp_size).to_numpy(float)
    hit = np.minimum(experts, tok * top_k)  # "balanced": as many as can be
    m = tok * top_k / hit
    in_bytes, out_bytes = ELEMENT_BYTES[quant.activations], ELEMENT_BYTES[quant.stream]

    def products(n: Amounts, k: Amounts) -> Products:
        weights = quant.weight_bytes * hit * n * k
        moved = in_bytes * hit * m * k, out_bytes * hit * m * n
        return Products(m, n, k, hit, weights, *moved, np.zeros_like(m))

    between_s = pass_s(dense.elementwise, rates, out_bytes * 3 * hit * m * columns)
    if quant.quantises:
        fit = dense.gemm_fit(quant.kernel)[0]
        for n in (tok * d, hit * m * columns):
            between_s = between_s + quantise_s(fit, rates, (out_bytes + in_bytes) * n)
    seconds = frame.latency.to_numpy(float) * 1e-3
    key = (frame.num_experts * 100_000 + frame.hidden_size + frame.inter_size).to_numpy(np.int64)
    return ExpertRows(
        products(2 * columns, d), products(d, columns), np.maximum(seconds - between_s, 0.3 * seconds), key
    )


def experts_s(fit: GemmFit, rates: Rates, rows: ExpertRows) -> Amounts:
    """Seconds of both products of each layer."""
    return gemm_s(fit, rates, rows.up) + gemm_s(fit, rates, rows.down)


def fit_experts(tables: Sequence[tuple[Rates, ExpertRows]], most_eta_c: float = 0.99) -> GemmFit:
    """One fit to all tables together, each of which weighs the same; `eta_c` is at most `most_eta_c`."""
    weight = np.concatenate([np.full(len(rows), 1 / len(rows) / len(tables)) for _, rows in tables])
    tried = []
    for start in _STARTS:

        def at(x: Sequence[float], start: GemmFit = start) -> GemmFit:
            eta_c, eta_m, t0_us, pad, k_fill = x
            return replace(start, eta_c=eta_c, eta_m=eta_m, t0_s=t0_us * 1e-6, pad=pad, k_fill=k_fill * 100)

        def errors(x: Sequence[float], at: Callable[[Sequence[float]], GemmFit] = at) -> Amounts:
            return log_errors([(experts_s(at(x), rates, rows), rows.seconds) for rates, rows in tables])

        first = [start.eta_c, start.eta_m, start.t0_s * 1e6, start.pad, start.k_fill / 100]
        x = search(errors, first, upper=[most_eta_c, 0.99, 1000, 1.5, 50], weight=weight)
        tried.append((float(weight @ abs(errors(x))), at(x)))
    return min(tried, key=lambda each: each[0])[1]


def experts_held_out(rates: Rates, rows: ExpertRows, most_eta_c: float = 0.99) -> Amounts:
    """Predicted over measured seconds of each layer, from a fit to the half of the models it is not among."""
    return held_out(
        rows,
        lambda part: fit_experts([(rates, part)], most_eta_c),
        lambda fit, part: experts_s(fit, rates, part),
    )


def expert_fits(folders: Sequence[Path], dense: Calibration) -> tuple[dict[str, GemmFit], dict[str, Spread]]:
    """One fit for each kind of kernel to the tables of all folders together, and its spread.

    The spread is held out where one folder has several models, else that of the fit's own rows.
    """
    tables: dict[str, list[tuple[Rates, ExpertRows]]] = {}
    for folder in folders:
        for kind, table in expert_tables(folder, device_of(folder), dense).items():
            tables.setdefault(kind, []).append(table)
    # gpt-oss's products count against the peak of 16 bits, which inputs of 8 bits pass.
    most = {kind: 2.0 if kind == "experts_mxfp4" else 0.99 for kind in tables}
    fits = {kind: fit_experts(some, most[kind]) for kind, some in tables.items()}
    spread = {}
    for kind, some in tables.items():
        if len(some) == 1 and len(np.unique(some[0][1].key)) > 1:
            ratio = experts_held_out(*some[0], most[kind])
        else:
            ratio = np.concatenate([experts_s(fits[kind], *table) / table[1].seconds for table in some])
        spread[f"gemm {kind}"] = spread_of(ratio)
    return fits, spread
