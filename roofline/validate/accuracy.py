"""The model held against measured kernels: goals G2-G6, G9, G10. Whole runs: `accuracy_serving.py`.

A goal is a published target; a gate is what the code must reach today. They are the same wherever the goal is
reached. Every row scored here was held out of the fit that predicts it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roofline.calibrate.fit import (
    decode_held_out,
    gemm_held_out,
    kernel_family,
    pooled_gemm,
    prefill_held_out,
)
from roofline.calibrate.kernel_tables import (
    FOLDERS,
    GemmTable,
    all_reduce_rows,
    decode_rows,
    device_of,
    gemm_tables,
    large,
    prefill_rows,
)
from roofline.predict.bound import CACHE_REACH
from roofline.predict.kernels import Amounts, Rates, gemm_s

TOLERANCE = 0.02  # how far above a ceiling a measurement may lie before something must be wrong


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the accuracy table. `passed` is None where a figure is printed and gates nothing."""

    goal: str
    what: str
    reached: str
    target: str
    data: str
    passed: bool | None
    reason: str = ""


def kernel_checks(data: Path) -> Iterator[Check]:
    """Each check as it is done; needs the folder that holds `measured`."""
    measured = data / "measured"
    yield Check(
        "G1", "FLOPs, bytes, parameters", "exact", "difference 0", "worked_example.csv and torch", None,
        "a test: tests/roofline/test_ops.py, test_flop_counter.py",
    )  # fmt: skip
    yield from _gemms(measured)
    yield from _left_out(measured)
    yield from _attention(measured)
    yield _ceilings(measured)
    yield _classes(measured)


_GEMM_GOALS = {
    ("h100_sxm", "bf16"): ("G2", 4.5, 12.0),
    ("a100_sxm", "bf16"): ("G3", 5.5, 15.0),
    ("l40s", "bf16"): ("G3", 7.0, 16.0),
    ("h100_sxm", "fp8"): ("G4", 9.0, 25.0),
    ("l40s", "fp8"): ("G4", 9.0, 25.0),
}


def _gemms(measured: Path) -> Iterator[Check]:
    for folder in ("h100_sxm", "a100_sxm", "l40s"):
        for table in gemm_tables(measured / folder):
            goal, median, p90 = _GEMM_GOALS[folder, table.dtype]
            yield _error_check(goal, _title(table), gemm_held_out(table), median, p90, f"measured/{folder}")


def _left_out(measured: Path) -> Iterator[Check]:
    tables = {name: _of_dtype(measured / name, "bf16") for name in FOLDERS}
    for name in ("a100_sxm", "h100_sxm", "l40s"):
        others = [table for other in FOLDERS if other != name for table in tables[other]]
        for table in tables[name]:
            fit = pooled_gemm(others, kernel_family(table.device))
            rows = large(table.rows, table.device)
            ratio = gemm_s(fit, Rates.of(table.device, "bf16"), rows.work) / rows.seconds
            what = f"{_title(table)}, never fitted"
            yield _error_check("G5", what, ratio, 10.0, 25.0, f"measured, but {name}", gating=False)


def _attention(measured: Path) -> Iterator[Check]:
    for name in ("a100_sxm", "h100_sxm", "l40s"):
        device = device_of(measured / name)
        rows, ratio = decode_held_out(measured / name)
        cold = ratio[rows.swept_bytes > CACHE_REACH * device.cache_bytes]
        yield _error_check(
            "G6", f"{device.name} decode attention, KV > 3 x L2", cold, 6.0, None, f"measured/{name}"
        )
        prefill = prefill_held_out(measured / name)
        yield _error_check(
            "G6", f"{device.name} prefill attention, s >= 512", prefill, 10.0, None, f"measured/{name}"
        )


def _ceilings(measured: Path) -> Check:
    """No feasible row may beat its ceiling; where a cache can hold what is swept, only compute bounds it."""
    beaten, n = [], 0
    for name in FOLDERS:
        for what, share in _shares(measured / name):
            n += len(share)
            beaten += [f"{what}: {x - 1:+.1%}" for x in share[share > 1 + TOLERANCE]]
    unexplained = [line for line in beaten if not any(known in line for known in _EXPLAINED)]
    reached = f"{len(unexplained)} of {n:,} unexplained, {len(beaten) - len(unexplained)} explained"
    reasons = [*sorted(set(beaten)), *(f"{known}: {why}" for known, why in _EXPLAINED.items())]
    return Check(
        "G9",
        "ceilings beaten by more than 2 %",
        reached,
        "0 unexplained",
        "measured",
        not unexplained,
        "; ".join(reasons),
    )


_EXPLAINED = {
    "L40S vllm bf16 GEMM 256 x 512 x 51200": "its six weight copies are 3.1 x L2, just past the filter",
    "H100-SXM5-80G all-reduce of 8": "reduced in the switch (NVLS), which the ring's bound does not model",
}


def _shares(folder: Path) -> Iterator[tuple[str, Amounts]]:
    """What was measured, and each row's share of its ceiling."""
    device = device_of(folder)
    for table in gemm_tables(folder):
        compute, memory = _ceiling_parts(table)
        share = np.maximum(compute, memory) / table.rows.seconds
        x = table.rows.work
        for i in np.flatnonzero(share > 1 + TOLERANCE):  # one by one: each is to be listed
            yield f"{_title(table)} GEMM {x.m[i]:.0f} x {x.n[i]:.0f} x {x.k[i]:.0f}", share[i : i + 1]
        yield _title(table), share[share <= 1 + TOLERANCE]
    dims = (64, 128, 192, 256)
    decodes = decode_rows(folder, dims)
    cold = decodes.where(decodes.swept_bytes > CACHE_REACH * device.cache_bytes)
    moved = cold.work.kv_bytes + cold.work.activation_bytes
    yield f"{device.name} decode attention", moved / device.bytes_per_s / cold.seconds
    prefills = prefill_rows(folder, dims)
    flops_per_s = device.peak_flops_per_s("bf16")
    yield f"{device.name} prefill attention", prefills.work.flops / flops_per_s / prefills.seconds
    for ranks, (message, seconds) in all_reduce_rows(folder).items():
        ring = 2 * (ranks - 1) / ranks * message / device.links[0].bytes_per_s
        yield f"{device.name} all-reduce of {ranks}", ring / seconds


def _ceiling_parts(table: GemmTable) -> tuple[Amounts, Amounts]:
    """Compute and memory ceilings; no memory ceiling where a cache may hold the weights."""
    x, rates = table.rows.work, Rates.of(table.device, table.dtype)
    memory = (x.weight_bytes + x.in_bytes + x.out_bytes) / rates.bytes_per_s
    cold = table.rows.swept_bytes > CACHE_REACH * table.device.cache_bytes
    return 2 * x.m * x.n * x.k / rates.flops_per_s, np.where(cold, memory, 0.0)


def _classes(measured: Path) -> Check:
    """Doubling m must double the time of a compute-bound product and not move a memory-bound one's."""
    right, scored, between = 0, 0, 0
    for name in FOLDERS:
        for table in gemm_tables(measured / name):
            slope, compute_bound = _slopes(table)
            clear = (slope > 0.7) | (slope < 0.3)
            scored += int(clear.sum())
            between += int((~clear).sum())
            right += int(((slope > 0.7) == compute_bound)[clear].sum())
    reached = f"{right / scored:.2%} of {scored:,} ({between / (scored + between):.1%} unscored)"
    return Check(
        "G10", "bound class against measured slope", reached, ">= 99.5 %", "measured", right >= 0.995 * scored
    )


def _slopes(table: GemmTable) -> tuple[Amounts, "np.ndarray[tuple[int], np.dtype[np.bool_]]"]:
    """dlog t / dlog m between m and 2m (powers of two), and whether both are compute-bound; pairs within 25 %
    of the ridge are left out."""
    rows = large(table.rows, table.device)
    compute, memory = _ceiling_parts(GemmTable(table.device, table.library, table.dtype, rows))
    over = compute / memory  # intensity in ridges
    at = {(int(key), int(m)): i for i, (key, m) in enumerate(zip(rows.key, rows.work.m, strict=True))}
    slopes, classes = [], []
    for (key, m), i in at.items():
        j = at.get((key, 2 * m))
        if j is None or m & (m - 1) or (over[j] > 0.75 and over[i] < 1.25):
            continue
        slopes.append(np.log2(rows.seconds[j] / rows.seconds[i]))
        classes.append(over[i] > 1)
    return np.array(slopes), np.array(classes)


def _error_check(
    goal: str, what: str, ratio: Amounts, median: float, p90: float | None, data: str, *, gating: bool = True
) -> Check:
    """Absolute errors in per cent of predicted over measured against the goal."""
    error = 100 * abs(ratio - 1)
    got = float(np.median(error)), float(np.quantile(error, 0.9))
    passed = got[0] <= median and (p90 is None or got[1] <= p90)
    target = f"<= {median:g} %" + ("" if p90 is None else f" / {p90:g} %")
    reached = f"{got[0]:.1f} % / {got[1]:.1f} % ({len(ratio):,} rows)"
    return Check(goal, what, reached, target, data, passed if gating else None)


def _of_dtype(folder: Path, dtype: str) -> list[GemmTable]:
    return [table for table in gemm_tables(folder) if table.dtype == dtype]


def _title(table: GemmTable) -> str:
    return f"{table.device.name} {table.library} {table.dtype}"
