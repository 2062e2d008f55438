"""Measures this machine for the roofline: memory by working set, a model's own products, attention, norms.

What comes out is a device file: the device's ceilings as measured and, in its [calibration] table, the fit,
how far it is off, and the measured shapes themselves. A process measures with the cores it has, so whoever
wants them pinned calls `calibrate_pinned`, which measures in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

import numpy as np

from roofline.calibration import (
    Calibration,
    DecodeFit,
    GemmFit,
    PassFit,
    PrefillFit,
    ShapeTimes,
    Spread,
    calibration_toml,
)
from roofline.device import Device, Level, Link
from roofline.errors import RooflineError
from roofline.fit import fit_gemm, log_errors, search, spread_of
from roofline.kernels import (
    Amounts,
    Decodes,
    Prefills,
    Products,
    Rates,
    decode_s,
    gemm_s,
    pass_s,
    prefill_s,
)
from roofline.measured import Rows
from roofline.model import Attention, ModelShape

Kernel = Callable[[], object]

QUICK_S, FULL_S = 15.0, 100.0
_QUICK_M = (1, 16, 64, 256, 1024)
_MOST_AGAIN = 8
_FULL_M = (1, 2, 4, 8, 16, 32, 64, 128, 129, 256, 512, 1024, 2048, 2049)
_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Probe(Protocol):
    """A device's kernels, made ready to run; `roofline/probe_numpy.py`, `probe_torch.py`."""

    dtype: str
    element_bytes: int
    n_units: int

    @property
    def name(self) -> str: ...
    @property
    def memory_bytes(self) -> float: ...
    def product(self, m: int, n: int, k: int, copies: int) -> Kernel: ...
    def read(self, n_bytes: int) -> Kernel: ...
    def decode(self, batch: int, context: int, heads: int, kv_heads: int, dim: int) -> Kernel: ...
    def prefill(self, tok: int, heads: int, kv_heads: int, dim: int) -> Kernel: ...
    def norm(self, rows: int, width: int) -> Kernel: ...
    def activation(self, rows: int, width: int) -> Kernel: ...
    def once(self, kernel: Kernel, clock: Callable[[], float]) -> float: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """One kernel's repeats: their median, and by which share four of five of them differ."""

    seconds: float
    spread: float


class _Timer:
    """Hands out an equal share of the time that is left to each of the measurements that are left."""

    def __init__(
        self, probe: Probe, budget_s: float, n_measurements: int, clock: Callable[[], float]
    ) -> None:
        self._probe, self._clock = probe, clock
        self._end_s, self._left = clock() + budget_s, n_measurements
        self.spreads: list[float] = []

    def share_s(self) -> float:
        return max(0.0, self._end_s - self._clock()) / max(1, self._left)

    def time(self, kernel: Kernel) -> Timed:
        share_s = self.share_s()
        seconds: list[float] = []
        self._left -= 1
        self._probe.once(kernel, self._clock)  # the first run touches its memory for the first time
        began_s = self._clock()
        while len(seconds) < 5 or (self._clock() - began_s < 0.8 * share_s and len(seconds) < 1000):
            seconds.append(self._probe.once(kernel, self._clock))
            if len(seconds) >= 3 and self._clock() - began_s > 2 * share_s:
                break
        low, mid, high = np.quantile(seconds, [0.1, 0.5, 0.9])
        self.spreads.append(float((high - low) / mid))
        return Timed(float(mid), self.spreads[-1])


def calibrate(
    model: ModelShape, probe: Probe, *, quick: bool = False, clock: Callable[[], float] = time.monotonic
) -> tuple[Device, Calibration]:
    """The device as measured and its calibration, for the shapes of `model`.

    Takes at most 20 s where `quick`, 2 minutes otherwise.
    """
    rows_of = _QUICK_M if quick else _FULL_M
    shapes = _shapes(model)
    sizes = [1 << e for e in range(16, 29, 2 if quick else 1)]
    budget_s = QUICK_S if quick else FULL_S
    timer = _Timer(probe, budget_s, len(sizes) + len(shapes) * len(rows_of) + 15 + _MOST_AGAIN, clock)
    reads = [size / timer.time(probe.read(size)).seconds for size in sizes]
    products = _measure_products(probe, timer, shapes, rows_of)
    flops = 2 * products.work.m * products.work.n * products.work.k
    device = Device(
        id=f"measured-{probe.dtype}-{probe.n_units}",
        name=probe.name,
        vendor="",
        arch="measured",
        peaks={probe.dtype: float((flops / products.seconds).max())},
        levels=levels_of(sizes, reads, probe.memory_bytes),
        links=(),
        n_units=probe.n_units,
        tdp_w=None,
        aliases=(),
        source="measured by burstline calibrate",
        assurance=f"{'quick' if quick else 'full'} measurement, median of repeats",
        note="peak: the fastest of the model's products; bandwidths: one pass of reads",
    )
    return device, _fitted(model, probe, timer, device, products)


def levels_of(sizes: Sequence[int], bytes_per_s: Sequence[float], memory_bytes: float) -> tuple[Level, ...]:
    """Levels of memory from bandwidth by working set: each fall by 30 % or more ends a level.

    A level is given the first size that is slower, so that no ceiling drawn from it is too low. A fall may
    take several sizes; it ends where the next size is no more than 15 % slower.
    """
    found: list[Level] = []
    plateau, falling = [bytes_per_s[0]], False
    for size, rate, after in zip(sizes[1:], bytes_per_s, bytes_per_s[1:], strict=False):
        if falling:
            falling = after < 0.85 * rate
            plateau = [after] if falling else [rate, after]
        elif after < 0.7 * max(plateau):
            found.append(Level(f"cache {len(found) + 1}", float(size), float(max(plateau))))
            plateau, falling = [after], True
        else:
            plateau.append(after)
    return (*found, Level("memory", memory_bytes, float(max(plateau))))


def _shapes(model: ModelShape) -> dict[tuple[int, int], int]:
    """(n, k) of the model's products, without the experts' copies, and how many of them one step runs.

    So many weights rotate: a step comes back to each of them only after all others.
    """
    runs = {(model.vocab, model.d): 1}
    for layer in model.layers:
        for linear in layer.linears(model.d):
            runs[linear.n, linear.k] = runs.get((linear.n, linear.k), 0) + layer.count
    return dict(sorted(runs.items()))


def _measure_products(
    probe: Probe, timer: _Timer, shapes: Mapping[tuple[int, int], int], rows_of: Sequence[int]
) -> Rows[Products]:
    found: list[tuple[int, int, int, float]] = []
    flops_per_s = 0.0
    for (n, k), copies in shapes.items():
        for m in rows_of:
            if flops_per_s and 2 * m * n * k / flops_per_s > max(2 * timer.share_s(), 0.05):
                continue  # too long for what is left; the fit extends to it
            seconds = timer.time(probe.product(m, n, k, copies)).seconds
            flops_per_s = max(flops_per_s, 2 * m * n * k / seconds)
            found.append((m, n, k, seconds))
    rows, columns, depth, times = (np.array(column, dtype=float) for column in zip(*found, strict=True))
    weights = probe.element_bytes * columns * depth
    none = np.zeros_like(rows)
    inputs, outputs = probe.element_bytes * rows * depth, probe.element_bytes * rows * columns
    work = Products(rows, columns, depth, none + 1, weights, inputs, outputs, none)
    copies = np.array([shapes[n, k] for _, n, k, _ in found], dtype=float)
    return Rows(work, times, copies * weights, (columns * 1_000_000 + depth).astype(np.int64))


def _fitted(
    model: ModelShape, probe: Probe, timer: _Timer, device: Device, products: Rows[Products]
) -> Calibration:
    rates = Rates.of(device, probe.dtype)
    start = GemmFit(0.8, 1.0, 2e-6, k_fill=0.0)
    products = _again(probe, timer, products, fit_gemm([(rates, products)], start), rates)
    gemm = fit_gemm([(rates, products)], start)
    ratio = gemm_s(gemm, rates, products.work) / products.seconds
    decode, prefill, passes, spread = _fit_rest(model, probe, timer, device)
    return Calibration(
        name=device.id,
        tier=2,
        gemm={probe.dtype: gemm},
        decode=decode,
        prefill=prefill,
        elementwise=passes,
        spread={f"gemm {probe.dtype}": spread_of(ratio), **spread},
        shapes=_tables(probe.dtype, products),
        source="measured by burstline calibrate",
        fitted_on=f"{len(products)} products of {model.name}; spreads are of the rows fitted",
        measured_spread=float(np.median(timer.spreads)),
    )


def _again(
    probe: Probe, timer: _Timer, products: Rows[Products], fit: GemmFit, rates: Rates
) -> Rows[Products]:
    """The rows with those that stand out measured once more: another process may have been in the way."""
    x, seconds = products.work, products.seconds.copy()
    slower = seconds / gemm_s(fit, rates, x)
    for i in np.argsort(-slower)[:_MOST_AGAIN]:
        if slower[i] > 1.2:
            copies = round(products.swept_bytes[i] / x.weight_bytes[i])
            kernel = probe.product(int(x.m[i]), int(x.n[i]), int(x.k[i]), copies)
            seconds[i] = min(seconds[i], timer.time(kernel).seconds)
    return Rows(x, seconds, products.swept_bytes, products.key)


def _tables(dtype: str, products: Rows[Products]) -> tuple[ShapeTimes, ...]:
    x, found = products.work, []
    for key in np.unique(products.key):
        one = products.key == key
        m, seconds = tuple(x.m[one].tolist()), tuple(products.seconds[one].tolist())
        found.append(ShapeTimes(dtype, int(x.n[one][0]), int(x.k[one][0]), m, seconds))
    return tuple(found)


_DECODES = ((1, 256), (1, 1024), (8, 512), (8, 2048), (32, 512), (64, 512))
_PREFILLS = (128, 512, 1024)
_PASS_ROWS = (1, 64, 1024)


def _fit_rest(
    model: ModelShape, probe: Probe, timer: _Timer, device: Device
) -> tuple[DecodeFit, PrefillFit, PassFit, dict[str, Spread]]:
    """Attention and norms, each by a floor and a rate: few points, so few parameters."""
    heads = _heads(model)
    decodes = _measure_decodes(probe, timer, heads)
    prefills = _measure_prefills(probe, timer, heads)
    bare, full = Rates.of(device), Rates.of(device, probe.dtype)
    moved, passes_s = _measure_passes(probe, timer, model)

    def decode_at(x: Sequence[float]) -> DecodeFit:
        return DecodeFit(x[0] * 1e-6, x[1])

    def prefill_at(x: Sequence[float]) -> PrefillFit:
        return PrefillFit(x[0] * 1e-6, x[1], eta_m=30.0)

    def pass_at(x: Sequence[float]) -> PassFit:
        return PassFit(x[0] * 1e-6, x[1], x[1])

    def two(errors: Callable[[Sequence[float]], Amounts]) -> list[float]:
        return search(errors, [10, 0.5], upper=[1e4, 30])

    decode = decode_at(
        two(lambda x: log_errors([(decode_s(decode_at(x), bare, decodes.work), decodes.seconds)]))
    )
    prefill = prefill_at(
        two(lambda x: log_errors([(prefill_s(prefill_at(x), full, prefills.work), prefills.seconds)]))
    )
    passes = pass_at(two(lambda x: log_errors([(pass_s(pass_at(x), bare, moved), passes_s)])))
    spread = {
        "decode": spread_of(decode_s(decode, bare, decodes.work) / decodes.seconds),
        "prefill": spread_of(prefill_s(prefill, full, prefills.work) / prefills.seconds),
        "elementwise": spread_of(pass_s(passes, bare, moved) / passes_s),
    }
    return decode, prefill, passes, spread


def _measure_passes(probe: Probe, timer: _Timer, model: ModelShape) -> tuple[Amounts, Amounts]:
    """Bytes as `ops` counts them, and seconds, of norms and activations."""
    down = model.layers[0].linears(model.d)[-1]
    size, found = probe.element_bytes, []
    for rows in _PASS_ROWS:
        found.append((4 * rows * model.d * size, timer.time(probe.norm(rows, model.d)).seconds))
        found.append((3 * rows * down.k * size, timer.time(probe.activation(rows, down.k)).seconds))
    moved, seconds = np.array(found, dtype=float).T
    return moved, seconds


def _heads(model: ModelShape) -> tuple[int, int, int]:
    """Query heads, KV heads, head size of the first layer."""
    attention = model.layers[0].attention
    if isinstance(attention, Attention):
        return attention.n_heads, attention.n_kv_heads, attention.head_dim
    return attention.n_heads, attention.n_heads, attention.v_dim


def _measure_decodes(probe: Probe, timer: _Timer, heads: tuple[int, int, int]) -> Rows[Decodes]:
    n_heads, kv_heads, dim = heads
    seconds = np.array([timer.time(probe.decode(b, c, *heads)).seconds for b, c in _DECODES])
    batch, context = (np.array(column, dtype=float) for column in zip(*_DECODES, strict=True))
    kv_bytes = 2.0 * batch * context * kv_heads * dim * probe.element_bytes
    queries = 2.0 * batch * n_heads * dim * probe.element_bytes
    work = Decodes(batch, context, np.full_like(batch, kv_heads), kv_bytes, queries)
    return Rows(work, seconds, kv_bytes, context.astype(np.int64))


def _measure_prefills(probe: Probe, timer: _Timer, heads: tuple[int, int, int]) -> Rows[Prefills]:
    n_heads, _, dim = heads
    seconds = np.array([timer.time(probe.prefill(tok, *heads)).seconds for tok in _PREFILLS])
    tok = np.array(_PREFILLS, dtype=float)
    seen = (tok + 1) / 2
    queries = 2 * tok * n_heads * dim * probe.element_bytes
    work = Prefills(4 * n_heads * dim * tok * seen, seen, tok, np.full_like(tok, dim), queries)
    return Rows(work, seconds, queries, tok.astype(np.int64))


def device_toml(device: Device, calibration: Calibration) -> str:
    """Both as one file, which `load_device` and `load_calibration` read."""
    texts = ("id", "name", "vendor", "arch", "source", "assurance", "note")
    head = [f"{name} = {json.dumps(getattr(device, name))}" for name in texts if getattr(device, name)]
    head += [f"{name} = {value}" for name in ("n_units", "tdp_w") if (value := getattr(device, name))]
    peaks = ", ".join(f"{dtype} = {peak:.4e}" for dtype, peak in device.peaks.items())
    head.append(f"peak_flops_per_s = {{ {peaks} }}")
    head += ["levels = [", *map(_inline, device.levels), "]"]
    if device.links:
        head += ["links = [", *map(_inline, device.links), "]"]
    return "\n".join(head) + "\n\n" + calibration_toml(calibration, "calibration")


def _inline(part: Level | Link) -> str:
    """A level or a link as one line of a TOML list; what is None is left out."""
    values = [(slot.name, getattr(part, slot.name)) for slot in fields(part)]
    shown = (
        f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {json.dumps(value)}"
        for name, value in values
        if value is not None
    )
    return f"    {{ {', '.join(shown)} }},"


def cached_file(model: str, device: str, threads: int, *, quick: bool) -> Path:
    """Where this machine's calibration for a model is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burstline"
    kind = "quick" if quick else "full"
    return cache / f"device-{Path(model).name}-{device.replace(':', '')}-{threads}-{kind}.toml"


def calibrate_pinned(
    config: Path,
    out: Path,
    *,
    device: str = "cpu",
    threads: int = 1,
    quick: bool = False,
    torch_python: str | None = None,
    dtype: str = "bf16",
) -> Path:
    """`out`, written by a process of its own on the last `threads` cores that this one may use.

    `config` is a model's config.json. `torch_python` is an interpreter that has torch: its kernels in `dtype`
    are measured, else numpy's in fp32. Raises where that process fails.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "roofline.calibrate", str(config), str(out)]
    command += ["--device", device, "--threads", str(threads), *(["--quick"] if quick else [])]
    if torch_python:
        command += ["--torch-python", torch_python, "--dtype", dtype]
    env = {**os.environ, **dict.fromkeys(_THREADS, str(threads))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RooflineError(f"calibration on {device} failed: {done.stderr.strip()[-600:]}")
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """The process that `calibrate_pinned` starts."""
    parser = argparse.ArgumentParser(prog="roofline.calibrate")
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--torch-python")
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args(argv)
    model = ModelShape.from_config(json.loads(args.config.read_text()), args.config.stem)
    probe: Probe
    if args.torch_python:
        from roofline.probe_remote import RemoteProbe

        probe = RemoteProbe(args.torch_python, args.threads, args.dtype)
    else:
        probe = _probe(args.device, args.threads)
    device, calibration = calibrate(model, probe, quick=args.quick)
    partial = args.out.with_suffix(".partial")
    partial.write_text(device_toml(device, calibration))
    partial.rename(args.out)


def _probe(device: str, threads: int) -> Probe:
    if device == "cpu":
        from roofline.probe_numpy import NumpyProbe

        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
        return NumpyProbe(threads)
    try:
        from roofline.probe_torch import TorchProbe

        return TorchProbe(device)
    except ImportError as error:
        raise RooflineError(f"measuring {device} needs torch, which is not installed: {error}") from error


if __name__ == "__main__":
    main()
