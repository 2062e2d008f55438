"""Predictions of kernels against measured ones: G1-G6, G9, G10, G13-G15. Whole runs: `accuracy_serving.py`.

Every row scored here was held out of the fit that predicts it. Tables of Blackwell and of experts are not in
the repository: their rows appear where `--data` has them. Protocol: docs/roofline-accuracy.md.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from burstline.roofline.device.calibration import Calibration, generic, shipped_calibration
from burstline.roofline.device.collectives import collective_s
from burstline.roofline.predict.bound import CACHE_REACH
from burstline.roofline.predict.kernels import Amounts, Rates, decode_s, gemm_s, prefill_s
from research.check import Check, errors, within
from research.experts import expert_tables, experts_held_out, experts_s
from research.fit import (
    decode_held_out,
    gemm_held_out,
    gemm_start,
    kernel_family,
    pooled_gemm,
    prefill_held_out,
)
from research.kernel_tables import (
    BLACKWELL,
    FOLDERS,
    GemmTable,
    all_reduce_rows,
    decode_rows,
    device_of,
    gemm_tables,
    large,
    measured_folders,
    prefill_rows,
)

TOLERANCE = 0.02  # how far above a ceiling a measurement may lie before something must be wrong


def kernel_checks(data: Path) -> Iterator[Check]:
    """Each check as it is done; needs the folder that holds `measured`."""
    measured = data / "measured"
    yield Check(
        "G1", "FLOPs, bytes, parameters", "0", "worked_example.csv", "0", "0", met=True,
        note="exact, by tests/roofline/test_ops.py and test_flops.py",
    )  # fmt: skip
    yield from _gemms(measured)
    yield from _left_out(measured)
    yield from _attention(measured)
    yield from _unseen(measured)
    yield from _experts(measured)
    yield _ceilings(measured)
    yield _classes(measured)


_GEMM_GOALS = {
    ("h100_sxm", "bf16"): ("G2", 4.5, 12.0),
    ("h200_sxm", "bf16"): ("G2", 5.0, 12.5),
    ("a100_sxm", "bf16"): ("G3", 5.5, 15.0),
    ("l40s", "bf16"): ("G3", 7.0, 16.0),
    ("h100_sxm", "fp8"): ("G4", 9.0, 25.0),
    ("h200_sxm", "fp8"): ("G4", 10.0, 25.0),
    ("l40s", "fp8"): ("G4", 9.0, 25.0),
    **{(name, "bf16"): ("G3", 7.0, 16.0) for name in BLACKWELL},
    **{(name, "fp8"): ("G4", 10.0, 25.0) for name in BLACKWELL},
    **{(name, "fp4"): ("G14", 15.0, 35.0) for name in BLACKWELL},
    **{(name, "fp8_block"): ("G14", 10.0, 30.0) for name in FOLDERS},
}
_HOPPER = ("h100_sxm", "h200_sxm")


def _in_detail(measured: Path) -> list[str]:
    """The devices with tables of products and attention alike, and of enough rows to halve."""
    return [name for name in measured_folders(measured) if name != "rtx4090"]


def _gemms(measured: Path) -> Iterator[Check]:
    """A device's own fit, on pairs of n and k that it never saw."""
    for folder in _in_detail(measured):
        for table in gemm_tables(measured / folder):
            if (folder, table.dtype) in _GEMM_GOALS:
                goal, *at_most = _GEMM_GOALS[folder, table.dtype]
                what = f"{_title(table)} GEMM, own fit"
                known = "from 8,192 rows on 45% slower than a B200, unlike two older tables of this device"
                known = known if (folder, table.dtype) == ("gb200", "bf16") else ""
                yield _judged(goal, what, gemm_held_out(table), at_most, folder, known=known)


def _left_out(measured: Path) -> Iterator[Check]:
    """Fits pooled over one generation's devices, judged on the other's: Hopper, and A100 with Ada."""
    tables = {
        name: gemm_tables(measured / name) for name in measured_folders(measured) if name not in BLACKWELL
    }
    for dtype, goal, at_most in (("bf16", "G5", (10.0, 25.0)), ("fp8", "G5", (10.0, 30.0))):
        for name in (name for name in tables if name != "rtx4090"):
            seen = [n for n in tables if (n in _HOPPER) != (name in _HOPPER)]
            others = [t for n in seen for t in tables[n] if t.dtype == dtype]
            for table in (t for t in tables[name] if t.dtype == dtype):
                start = kernel_family(table.device) if dtype == "bf16" else gemm_start(table.device, dtype)
                rows = large(table.rows, table.device)
                ratio = gemm_s(pooled_gemm(others, start), table.rates, rows.work) / rows.seconds
                what = f"{_title(table)} GEMM, fitted on the other generation"
                known = (
                    "" if within(ratio, *at_most) else "one generation says little about another's kernels"
                )
                yield _judged(goal, what, ratio, list(at_most), name, known=known)


def _attention(measured: Path) -> Iterator[Check]:
    """A device's own fit, on head counts that it never saw; decode also over a cache of 8 bits."""
    for name in _in_detail(measured):
        device = device_of(measured / name)
        for kv, goal in (("bfloat16", 6.0), ("fp8", 10.0)):
            rows, ratio = decode_held_out(measured / name, kv)
            if len(rows):
                cold = ratio[rows.swept_bytes > CACHE_REACH * device.cache_bytes]
                what = f"{device.name} decode attention, {kv} KV, own fit"
                known = "kernels over 8 bits follow tile sizes that vary by length"
                yield _judged("G6", what, cold, [goal], name, known=known)
        what = f"{device.name} prefill attention, own fit"
        yield _judged("G6", what, prefill_held_out(measured / name), [10.0], name)


# Devices judged by the fit of another: what a device without tables gets from its generation.
_NEIGHBOURS = {
    "h200_sxm": "h100_sxm", "h100_sxm": "h200_sxm", "b200_sxm": "gb200", "gb200": "b200_sxm",
    "b300_sxm": "gb300", "gb300": "b300_sxm",
}  # fmt: skip


def _unseen(measured: Path) -> Iterator[Check]:
    """Kernels of devices by calibrations that never saw their tables.

    The H200 and Blackwell by the generic one, as if no device of their generation had been measured, and
    devices of one generation by each other's, as a device without tables gets its generation's.
    """
    for name in measured_folders(measured):
        if name == "h200_sxm" or name in BLACKWELL:
            yield from _seen_by(measured / name, generic(device_of(measured / name)), "generic")
        if name in _NEIGHBOURS:
            other = shipped_calibration(FOLDERS[_NEIGHBOURS[name]])
            yield from _seen_by(measured / name, other, f"the {other.name}'s fit")


def _seen_by(folder: Path, known: Calibration, by: str) -> Iterator[Check]:
    device = device_of(folder)
    why = "kernels differ by generation: a device without tables takes the fit of its own"
    for table in (t for t in gemm_tables(folder) if t.library == "vllm" or t.dtype == "fp8_block"):
        rows = large(table.rows, table.device)
        ratio = gemm_s(known.gemm_fit(table.dtype)[0], table.rates, rows.work) / rows.seconds
        limit = 15.0 if table.dtype == "fp4" else 10.0
        yield _judged("G13", f"{_title(table)} GEMM, {by}", ratio, [limit], folder.name, known=why)
    for kv, kv_bytes in (("bfloat16", 2), ("fp8", 1)):
        decodes = decode_rows(folder, kv=kv)
        cold = decodes.where(decodes.swept_bytes > CACHE_REACH * device.cache_bytes)
        fit = known.attention_fits(kv_bytes)[0]
        ratio = decode_s(fit, Rates.of(device), cold.work) / cold.seconds
        yield _judged("G13", f"{device.name} decode, {kv} KV, {by}", ratio, [12.0], folder.name, known=why)
    prompts = prefill_rows(folder)
    ratio = prefill_s(known.prefill, Rates.of(device, "bf16"), prompts.work) / prompts.seconds
    yield _judged("G13", f"{device.name} prefill attention, {by}", ratio, [15.0], folder.name, known=why)


def _experts(measured: Path) -> Iterator[Check]:
    """Layers of experts: a device's own fit on models that it never saw, its neighbour's, and dense ones."""
    for name in measured_folders(measured):
        device = device_of(measured / name)
        own, other = shipped_calibration(device.id), _NEIGHBOURS.get(name)
        for kind, (rates, rows) in expert_tables(measured / name, device, own).items():
            what = f"{device.name} {kind.removeprefix('experts_')} experts"
            if len(np.unique(rows.key)) > 1:
                yield _judged("G15", f"{what}, own fit", experts_held_out(rates, rows), [15.0], name)
            if other is not None:
                known = shipped_calibration(FOLDERS[other])
                ratio = experts_s(known.gemm_fit(kind)[0], rates, rows) / rows.seconds
                yield _judged("G15", f"{what}, the {known.name}'s fit", ratio, [15.0], name)
            dense = own.gemm_fit(kind.removeprefix("experts_"))[0]
            ratio = experts_s(dense, rates, rows) / rows.seconds
            yield Check(
                "G15",
                f"{what}, had they dense products' fit",
                "",
                f"measured/{name}",
                out_of_sample=errors(ratio),
            )


def _ceilings(measured: Path) -> Check:
    """No feasible row may beat its ceiling; where a cache can hold what is swept, only compute bounds it."""
    beaten, n = [], 0
    for name in measured_folders(measured):
        for what, share in _shares(measured / name):
            n += len(share)
            beaten += [f"{what}: {x - 1:+.1%}" for x in share[share > 1 + TOLERANCE]]
    unexplained = [line for line in beaten if not any(known in line for known in _EXPLAINED)]
    found = f"{len(unexplained)} of {n:,} unexplained"
    reasons = [*sorted(set(beaten)), *(f"{known}: {why}" for known, why in _EXPLAINED.items())]
    return Check(
        "G9", "ceilings beaten by more than 2%", "0 unexplained", "measured", out_of_sample=found,
        met=not unexplained, note="; ".join(reasons),
    )  # fmt: skip


_EXPLAINED = {
    "L40S vllm bf16 GEMM 256 x 512 x 51200": "its six weight copies are 3.1 x L2, just past the filter",
    "RTX PRO 6000 Blackwell Server vllm bf16 GEMM 1 x 7168 x 7168": "its six copies are 4.6 x L2",
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
    for kv, dtype in (("bfloat16", "bf16"), ("fp8", "fp8")):
        decodes = decode_rows(folder, dims, kv)
        cold = decodes.where(decodes.swept_bytes > CACHE_REACH * device.cache_bytes)
        moved = cold.work.kv_bytes + cold.work.activation_bytes
        yield f"{device.name} decode attention, {kv} KV", moved / device.bytes_per_s / cold.seconds
        prefills = prefill_rows(folder, dims, kv)
        if len(prefills):
            flops_per_s = device.peak_flops_per_s(dtype)
            share = prefills.work.flops / flops_per_s / prefills.seconds
            yield f"{device.name} prefill attention, {kv} KV", share
    for ranks, (message, seconds) in all_reduce_rows(folder).items():
        least = np.array([collective_s("all_reduce", size, ranks, device.links)[0] for size in message])
        yield f"{device.name} all-reduce of {ranks}", least / seconds


def _ceiling_parts(table: GemmTable) -> tuple[Amounts, Amounts]:
    """Compute and memory ceilings; no memory ceiling where a cache may hold the weights."""
    x, rates = table.rows.work, table.rates
    memory = (x.weight_bytes + x.in_bytes + x.out_bytes) / rates.bytes_per_s
    cold = table.rows.swept_bytes > CACHE_REACH * table.device.cache_bytes
    return 2 * x.m * x.n * x.k / rates.flops_per_s, np.where(cold, memory, 0.0)


def _classes(measured: Path) -> Check:
    """Doubling m must double the time of a compute-bound product and not move a memory-bound one's."""
    right, scored, between = 0, 0, 0
    for name in measured_folders(measured):
        for table in (t for t in gemm_tables(measured / name) if t.dtype in ("bf16", "fp8")):
            slope, compute_bound = _slopes(table)
            clear = (slope > 0.7) | (slope < 0.3)
            scored += int(clear.sum())
            between += int((~clear).sum())
            right += int(((slope > 0.7) == compute_bound)[clear].sum())
    reached = f"{right / scored:.2%} of {scored:,} ({between / (scored + between):.1%} unscored)"
    return Check(
        "G10", "bound class against measured slope", ">= 99.5%", "measured", out_of_sample=reached,
        met=right >= 0.995 * scored,
    )  # fmt: skip


def _slopes(table: GemmTable) -> tuple[Amounts, "np.ndarray[tuple[int], np.dtype[np.bool_]]"]:
    """dlog t / dlog m between m and 2m (powers of two), and whether both are compute-bound; pairs within 25%
    of the ridge are left out."""
    rows = large(table.rows, table.device)
    compute, memory = _ceiling_parts(GemmTable(table.device, table.library, table.dtype, rows))
    over = compute / np.maximum(memory, 1e-30)  # intensity in ridges
    at = {(int(key), int(m)): i for i, (key, m) in enumerate(zip(rows.key, rows.work.m, strict=True))}
    slopes, classes = [], []
    for (key, m), i in at.items():
        j = at.get((key, 2 * m))
        if j is None or m & (m - 1) or (over[j] > 0.75 and over[i] < 1.25):
            continue
        slopes.append(np.log2(rows.seconds[j] / rows.seconds[i]))
        classes.append(over[i] > 1)
    return np.array(slopes), np.array(classes)


def _judged(
    goal: str, what: str, ratio: Amounts, at_most: Sequence[float], data: str, *, known: str = ""
) -> Check:
    """Predicted over measured of rows that set nothing, against the largest errors allowed.

    `known` is why they are larger, if they are.
    """
    target = " / ".join(f"{limit:g}" for limit in at_most)
    met = within(ratio, *at_most)
    return Check(
        goal,
        what,
        target,
        f"measured/{data}",
        out_of_sample=errors(ratio),
        met=met,
        known="" if met else known,
    )


def _title(table: GemmTable) -> str:
    return f"{table.device.name} {table.library} {table.dtype}"
