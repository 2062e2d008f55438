"""Fits a device's parameters to its measured kernels, and says how far it is off on rows it never saw.

    python -m research.fit tests/data/measured

makes the files of `roofline/device/calibrations` again, of those devices whose tables are there. The
objective is the mean absolute log error plus 0.3 of its root mean square; the search is Nelder-Mead from
fixed starts, so the same tables give the same files. Spreads come from a two-fold split by a row's key (n and
k of a product, heads of an attention), seeded; what is shipped is fitted to all rows.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from burstline.roofline.calibrate.fitting import Rows, fit_gemm, log_errors, search, spread_of
from burstline.roofline.device.calibration import (
    Calibration,
    DecodeFit,
    GemmFit,
    LinkFit,
    PassFit,
    PrefillFit,
    calibration_toml,
    shipped_calibration,
)
from burstline.roofline.device.device import Device
from burstline.roofline.predict.kernels import (
    Amounts,
    Decodes,
    Prefills,
    Rates,
    all_reduce_s,
    decode_s,
    gemm_s,
    pass_s,
    prefill_s,
)
from research.experts import expert_fits
from research.held_out import held_out
from research.kernel_tables import (
    POOLED,
    GemmTable,
    all_reduce_rows,
    decode_rows,
    device_of,
    gemm_tables,
    large,
    measured_folders,
    mixed_ratios,
    pass_rows,
    prefill_rows,
    versions,
)

X = TypeVar("X")
F = TypeVar("F")

# Decode attention that shares a kernel with a prefill: 2.06 times as long on the RTX 4090, 1.67 on the
# RTX PRO 6000 (LLMServingSim's tables of both), the only two devices measured. Their geometric mean.
MIXED = 1.85
# Data centre GPUs' tables are timed in runs of milliseconds at boost clocks. Under load the compute rate
# falls to this share: set on the serving points, see docs/roofline-accuracy.md. The RTX 4090's table was
# timed layer by layer inside the serving engine; the generic fit's pooled rate is lower already.
SUSTAINED = 0.85

SOURCE = (
    "kernels measured by github.com/ai-dynamo/aiconfigurator"
    " @095f58a51c4ca8e61b66ec108d86f223f8d559ce (Apache-2.0)"
)
SOURCE_4090 = (
    "kernels measured by github.com/casys-kaist/LLMServingSim @5daddb21a545658d5150b535712d0494584b5278 (MIT)"
)

# sm80-sm89 libraries run tiles in waves and read operands through the cores; from sm90 on copies are
# asynchronous and tiles persist, and neither effect is left in the tables. The form's own constants (p,
# operand_rows, reread, k_fill) were chosen once, on all tables of a generation; four a table are fitted.
_TILED = GemmFit(0.8, 0.8, 4e-6, pad=0.3, p=6.0, operand_rows=30.0, reread=0.9, k_fill=250.0)
_PERSISTENT = GemmFit(0.8, 0.83, 4e-6, pad=0.1)


def kernel_family(device: Device) -> GemmFit:
    """The form of this device's products, with parameters to start a fit from."""
    return _TILED if device.arch in ("sm70", "sm75", "sm80", "sm86", "sm89") else _PERSISTENT


def gemm_start(device: Device, dtype: str) -> GemmFit:
    if dtype != "bf16":  # kernels of 8 and 4 bits pad rows whatever the generation
        return replace(_PERSISTENT, eta_c=0.6, t0_s=_LAUNCH_S, pad=0.5, quantise_s=3e-6)
    return kernel_family(device)


_LAUNCH_S = 4e-6  # of an 8-bit product: its launch is a 16-bit one's; what it takes longer is the quantising


def fit_decode(
    rates: Rates, rows: Rows[Decodes], cache_bytes: float, eta_m: float | None = None
) -> DecodeFit:
    """Rows that a cache holds inform the floor; how much faster it is than memory is fitted and dropped.

    With `eta_m` the memory's share is that, and the units' time for a byte is fitted in its place.
    """
    cached = rows.swept_bytes < 0.7 * cache_bytes
    rows, cached = rows.where(keep := cached | (rows.swept_bytes > 3 * cache_bytes)), cached[keep]
    weight = np.where(cached, 0.3 / max(1, cached.sum()), 1 / max(1, (~cached).sum()))

    def at(x: Sequence[float]) -> DecodeFit:
        if eta_m is None:
            return DecodeFit(x[0] * 1e-6, x[1], x[2] * 100, x[3])
        return DecodeFit(x[0] * 1e-6, eta_m, x[2] * 100, x[3], x[1] * 1e-9)

    def errors(x: Sequence[float]) -> Amounts:
        near = replace(
            rows.work, kv_bytes=np.where(cached, rows.work.kv_bytes / max(x[4], 0.1), rows.work.kv_bytes)
        )
        return log_errors([(decode_s(at(x), rates, near), rows.seconds)])

    # A start at which the units do not limit would stay there, and one of these does limit on any device.
    starts = (0.8,) if eta_m is None else (0.02, 0.04, 0.06)
    upper = [60, 1.1, 10, 1, 20]
    found = [search(errors, [12, start, 0.4, 0.1, 2.0], upper, weight) for start in starts]
    return at(min(found, key=lambda x: float((weight * abs(errors(x))).sum())))


def fit_decode_over(folder: Path, kv: str, rows: Rows[Decodes]) -> DecodeFit:
    """The fit to `rows` of a device's decode attention over a cache of `kv`.

    Hopper's kernel over 8 bits is limited by the units where memory is faster (docs/roofline-accuracy.md).
    """
    device = device_of(folder)
    eta_m = None
    if kv == "fp8" and device.arch == "sm90":
        eta_m = fit_decode(Rates.of(device), decode_rows(folder), device.cache_bytes).eta_m
    return fit_decode(Rates.of(device), rows, device.cache_bytes, eta_m)


def fit_prefill(rates: Rates, rows: Rows[Prefills]) -> PrefillFit:
    """`eta_c` is a share of the bf16 peak; kernels that multiply in 8 bits over a cache of 8 may pass 1."""

    def at(x: Sequence[float]) -> PrefillFit:
        return PrefillFit(x[0] * 1e-6, x[1], x[2] * 100, x[3], x[4])

    def errors(x: Sequence[float]) -> Amounts:
        return log_errors([(prefill_s(at(x), rates, rows.work), rows.seconds)])

    return at(search(errors, [10, 0.6, 1, 0.3, 0.5], upper=[60, 2, 20, 2, 1.5]))


def fit_links(device: Device, by_ranks: Mapping[int, tuple[Amounts, Amounts]]) -> tuple[LinkFit, ...]:
    per_s = device.links[0].bytes_per_s if device.links else 1.0
    found = []
    for n, (message, seconds) in by_ranks.items():

        def errors(
            x: Sequence[float], n: int = n, message: Amounts = message, seconds: Amounts = seconds
        ) -> Amounts:
            fit = LinkFit(n, x[0] * 1e-6, x[1])
            return log_errors([(all_reduce_s(fit, per_s, message), seconds)])

        x = search(errors, [5, 0.6], upper=[50, 2])
        found.append(LinkFit(n, x[0] * 1e-6, x[1]))
    return tuple(found)


def fit_passes(rates: Rates, moved_bytes: Amounts, seconds: Amounts) -> PassFit:
    def at(x: Sequence[float]) -> PassFit:
        return PassFit(x[0] * 1e-6, x[1], x[2])

    def errors(x: Sequence[float]) -> Amounts:
        return log_errors([(pass_s(at(x), rates, moved_bytes), seconds)])

    return at(search(errors, [2, 0.8, 2], upper=[20, 1.1, 20]))


def gemm_held_out(table: GemmTable) -> Amounts:
    """Predicted over measured of the table's large products, each from a fit without its (n, k)."""
    rates, start = table.rates, gemm_start(table.device, table.dtype)
    return held_out(
        large(table.rows, table.device),
        lambda rows: fit_gemm([(rates, rows)], start),
        lambda fit, rows: gemm_s(fit, rates, rows.work),
    )


def decode_held_out(folder: Path, kv: str = "bfloat16") -> tuple[Rows[Decodes], Amounts]:
    """Decode rows, and predicted over measured of each."""
    rows, rates = decode_rows(folder, kv=kv), Rates.of(device_of(folder))
    ratio = held_out(
        rows,
        lambda part: fit_decode_over(folder, kv, part),
        lambda fit, part: decode_s(fit, rates, part.work),
    )
    return rows, ratio


def prefill_held_out(folder: Path, kv: str = "bfloat16") -> Amounts:
    rates = Rates.of(device_of(folder), "bf16")
    return held_out(
        prefill_rows(folder, kv=kv),
        lambda part: fit_prefill(rates, part),
        lambda fit, part: prefill_s(fit, rates, part.work),
    )


def fit_device(folder: Path, elementwise: PassFit, mixed: float) -> Calibration:
    """One device's calibration from its folder of tables."""
    device = device_of(folder)
    tables = [t for t in gemm_tables(folder) if t.library == ("sglang" if t.dtype == "fp8_block" else "vllm")]
    decode, decode_ratio = decode_held_out(folder)
    spread = {f"gemm {table.dtype}": spread_of(gemm_held_out(table)) for table in tables}
    spread["decode"] = spread_of(decode_ratio[decode.swept_bytes > 3 * device.cache_bytes])
    spread["prefill"] = spread_of(prefill_held_out(folder))
    known = versions(folder)
    gemm = {
        t.dtype: fit_gemm([(t.rates, large(t.rows, device))], gemm_start(device, t.dtype)) for t in tables
    }
    if {"fp8", "fp8_block"} <= gemm.keys():
        gemm["fp8_block"] = _quantised_as(gemm["fp8"], gemm["fp8_block"])
    dense = Calibration(
        name=device.id,
        tier=2,
        gemm=gemm,
        decode_kv8=_decode_kv8(folder),
        prefill_kv8=_prefill_kv8(folder, device),
        nccl=fit_links(device, all_reduce_rows(folder, nccl=True)),
        decode=fit_decode(Rates.of(device), decode, device.cache_bytes),
        prefill=fit_prefill(Rates.of(device, "bf16"), prefill_rows(folder)),
        elementwise=elementwise,
        all_reduce=fit_links(device, all_reduce_rows(folder)),
        mixed=mixed,
        sustained=1.0 if folder.name == "rtx4090" else SUSTAINED,
        spread=spread,
        source=SOURCE_4090 if folder.name == "rtx4090" else SOURCE,
        fitted_on=f"kernels on {device.name}: "
        + ", ".join(f"{k} {s.n} rows" for k, s in spread.items())
        + (f"; tables: {known}" if known else ""),
    )
    return with_experts(dense, [folder])


def _quantised_as(dense: GemmFit, block: GemmFit) -> GemmFit:
    """Products scaled by block, whose inputs take no longer to quantise than others of 8 bits.

    SGLang's tables of Blackwell hold 13 us for it, its serving points do not: a step of DeepSeek-V3 on eight
    B200s would take 14.8 ms at 4 streams, of which 6.4 to quantise, where 6.7 and 8.8 ms were measured.
    """
    return replace(
        block,
        quantise_s=min(block.quantise_s, dense.quantise_s),
        quantise_byte_s=min(block.quantise_byte_s, dense.quantise_byte_s),
    )


def _decode_kv8(folder: Path) -> DecodeFit | None:
    rows = decode_rows(folder, kv="fp8")
    return fit_decode_over(folder, "fp8", rows) if len(rows) else None


def _prefill_kv8(folder: Path, device: Device) -> PrefillFit | None:
    rows = prefill_rows(folder, kv="fp8")
    return fit_prefill(Rates.of(device, "bf16"), rows) if len(rows) else None


def pooled_gemm(tables: Sequence[GemmTable], start: GemmFit, most: int = 2000) -> GemmFit:
    """One fit to several devices' tables, of each `most` rows, so that a long table weighs no more."""
    thinned = []
    for table in tables:
        rows = large(table.rows, table.device)
        keep = np.random.default_rng(0).permutation(len(rows)) < most
        thinned.append((table.rates, rows.where(keep)))
    return fit_gemm(thinned, start)


def fit_generic(measured: Path, fits: Sequence[Calibration], elementwise: PassFit) -> Calibration:
    """Tier 1: products fitted to all tables together, the rest the devices' median."""
    tables = [table for name in POOLED for table in gemm_tables(measured / name)]
    # TensorRT-LLM's tables of 8 bits hold other quantising kernels, of 9 us and of 3.
    tables = [t for t in tables if t.dtype == "bf16" or t.library != "trtllm"]
    by_dtype = {dtype: [t for t in tables if t.dtype == dtype] for dtype in sorted({t.dtype for t in tables})}
    gemm = {
        dtype: pooled_gemm(of, _PERSISTENT if dtype == "bf16" else gemm_start(of[0].device, dtype))
        for dtype, of in by_dtype.items()
    }
    spread = {}
    for dtype, of in by_dtype.items():
        ratios = [
            gemm_s(gemm[dtype], t.rates, large(t.rows, t.device).work) / large(t.rows, t.device).seconds
            for t in of
        ]
        spread[f"gemm {dtype}"] = spread_of(np.concatenate(ratios))
    # By memory alone: units are no measure of devices that are not GPUs, and Blackwell's do not limit.
    over_8_bits = [
        fit_decode(Rates.of(device_of(folder)), rows, device_of(folder).cache_bytes)
        for folder in (measured / name for name in POOLED)
        if len(rows := decode_rows(folder, kv="fp8"))
    ]
    dense = Calibration(
        name="generic",
        tier=1,
        gemm=gemm,
        decode=_median_of(DecodeFit, [fit.decode for fit in fits]),
        prefill=_median_of(PrefillFit, [fit.prefill for fit in fits]),
        elementwise=elementwise,
        all_reduce=_pooled_links([fit.all_reduce for fit in fits if fit.all_reduce]),
        decode_kv8=_median_of(DecodeFit, over_8_bits),
        prefill_kv8=_median_of(PrefillFit, [fit.prefill_kv8 for fit in fits if fit.prefill_kv8]),
        nccl=_pooled_links([fit.nccl for fit in fits if fit.nccl]),
        mixed=MIXED,
        spread=spread,
        source="pooled from the fits of " + ", ".join(fit.name for fit in fits),
        fitted_on=f"{len(tables)} GEMM tables of {len(fits)} devices",
    )
    return with_experts(dense, [measured / name for name in POOLED])


def with_experts(dense: Calibration, folders: Sequence[Path]) -> Calibration:
    """The calibration, with products of experts fitted to the tables of these folders that have any."""
    fits, around = expert_fits(folders, dense)
    return replace(dense, gemm={**dense.gemm, **fits}, spread={**dense.spread, **around})


def _median_of(kind: Callable[..., F], fits: Sequence[F]) -> F:
    names = fits[0].__dataclass_fields__  # type: ignore[attr-defined]
    return kind(**{name: float(np.median([getattr(fit, name) for fit in fits])) for name in names})


def _pooled_links(fits: Sequence[tuple[LinkFit, ...]]) -> tuple[LinkFit, ...]:
    return tuple(
        LinkFit(
            same[0].n_ranks,
            float(np.median([fit.t0_s for fit in same])),
            float(np.median([fit.eta for fit in same])),
        )
        for same in zip(*fits, strict=True)
    )


def fit_all(measured: Path) -> list[Calibration]:
    """Every shipped calibration, the generic one last."""
    folder = measured / "rtx4090"
    # Only this table times elementwise passes and mixed steps; the other devices borrow both.
    passes = fit_passes(Rates.of(device_of(folder)), *pass_rows(folder))
    mixed = float(np.median(mixed_ratios(folder)))
    fits = {
        name: fit_device(measured / name, passes, mixed if name == "rtx4090" else MIXED)
        for name in measured_folders(measured)
    }
    return [*fits.values(), fit_generic(measured, [fits[name] for name in POOLED], passes)]


def keep_unmeasured(fit: Calibration, before: Calibration) -> Calibration:
    """`fit`, with those kinds of products of the fit before that no table at hand covers."""
    if set(before.gemm) <= set(fit.gemm):
        return fit
    kept = {**before.gemm, **fit.gemm}
    return replace(fit, gemm=kept, spread={**before.spread, **fit.spread}, fitted_on=before.fitted_on)


def write_fits(measured: Path) -> list[Path]:
    """The files written."""
    folder = Path(__file__).parents[1] / "device" / "calibrations"
    head = "# Made by `python -m research --fit`; do not edit.\n"
    paths = []
    for fit in fit_all(measured):
        paths.append(folder / f"{fit.name}.toml")
        if paths[-1].is_file():
            fit = keep_unmeasured(fit, shipped_calibration(fit.name))
        paths[-1].write_text(head + calibration_toml(fit), "utf-8")
    shipped_calibration.cache_clear()
    return paths


if __name__ == "__main__":
    for path in write_fits(Path(sys.argv[1])):
        sys.stdout.write(f"{path}\n")
