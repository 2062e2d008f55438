"""The measurements behind a calibration: memory by working set, a model's own products, attention, norms.

A probe runs the kernels; what comes out is the device's ceilings as measured and the fit to its kernels.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from burstline.roofline.calibrate.fitting import Rows, fit_gemm, log_errors, search, spread_of
from burstline.roofline.calibrate.timer import Kernel, Probe, Timed, Timer
from burstline.roofline.device.calibration import (
    Calibration,
    DecodeFit,
    GemmFit,
    PassFit,
    PrefillFit,
    ShapeTimes,
    Spread,
)
from burstline.roofline.device.device import Device, Level
from burstline.roofline.model.shapes import Attention, Mla, ModelShape
from burstline.roofline.predict.kernels import (
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

QUICK_S, FULL_S = 15.0, 100.0
# Libraries for CPUs cut few rows into blocks of 4 to 16, and rows left over cost as much as a block: 3 rows
# may take twice as long as 4. So each small count is measured. Beyond, multiples of 16 are the best case (the
# ceiling's), not the usual one: 13 more costs what a remainder costs on average.
_SMALL_M = tuple(range(1, 17))
_QUICK_M = (*_SMALL_M, 29, 61, 253, 1024)
_FULL_M = (*_SMALL_M, 29, 61, 128, 129, 253, 509, 1024, 2048, 2049)
_SWEPT_BYTES = 1 << 26


def calibrate(
    model: ModelShape, probe: Probe, *, quick: bool = False, clock: Callable[[], float] = time.monotonic
) -> tuple[Device, Calibration]:
    """The device as measured and its calibration, for the shapes of `model`.

    Takes at most 20 s where `quick`, 2 minutes otherwise.
    """
    rows_of = _QUICK_M if quick else _FULL_M
    shapes = _shapes(model, probe.element_bytes)
    swept_bytes = probe.element_bytes * max(n * k * copies for (n, k), copies in shapes.items())
    sizes = [1 << e for e in range(16, 29, 2 if quick else 1)]
    n_rest = len(_DECODES) + len(_PREFILLS) + len(probe.passes) * len(_PASS_ROWS)
    n_measurements = len(sizes) + len(shapes) * len(rows_of) + n_rest
    timer = Timer(probe, QUICK_S if quick else FULL_S, n_measurements, clock)
    reads = [timer.time(partial(probe.read, size)) for size in sizes]
    timed = _time_products(probe, timer, shapes, rows_of)
    rest = _time_rest(model, probe, timer, swept_bytes)
    measured_spread = timer.again()
    products = _product_rows(probe, shapes, timed)
    flops = 2 * products.work.m * products.work.n * products.work.k
    rates = [size / read.seconds for size, read in zip(sizes, reads, strict=True)]
    device = Device(
        id=f"measured-{probe.dtype}-{probe.n_units}",
        name=probe.name,
        vendor="",
        arch="measured",
        peaks={probe.dtype: float((flops / products.seconds).max())},
        levels=levels_of(sizes, rates, probe.memory_bytes),
        links=(),
        n_units=probe.n_units,
        tdp_w=None,
        aliases=(),
        source="measured by burstline calibrate",
        assurance=f"{'quick' if quick else 'full'} measurement, the better of two lower quartiles of repeats",
        note="peak: the fastest of the model's products; bandwidths: one pass of reads",
    )
    calibration = _fitted(model, probe, device, products, rest)
    return device, replace(calibration, measured_spread=measured_spread)


def levels_of(sizes: Sequence[int], bytes_per_s: Sequence[float], memory_bytes: float) -> tuple[Level, ...]:
    """Levels of memory from bandwidth by working set: each fall by 30% or more ends a level.

    A level is given the first size that is slower, so that no ceiling drawn from it is too low. A fall may
    take several sizes; it ends where the next size is no more than 15% slower.
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


def _shapes(model: ModelShape, element_bytes: int) -> dict[tuple[int, int], int]:
    """(n, k) of the model's products, without the experts' copies, and over how many weights each rotates.

    A step comes back to a weight only after all others and its requests' keys: they are as many as it has of
    this shape, and more where those are fewer bytes than all that a small batch reads, up to what no cache
    holds.
    """
    runs = {(model.vocab, model.d): 1}
    for layer in model.layers:
        for linear in layer.linears(model.d):
            runs[linear.n, linear.k] = runs.get((linear.n, linear.k), 0) + layer.count
    batch, context = _SMALL_BATCH
    _, kv_heads, dim = _heads(model)
    swept = sum(n * k * count for (n, k), count in runs.items())
    swept += 2 * batch * context * kv_heads * dim * model.n_layers
    swept = min(swept, _SWEPT_BYTES // element_bytes)
    return {(n, k): max(count, -(-swept // (n * k))) for (n, k), count in sorted(runs.items())}


def _time_products(
    probe: Probe, timer: Timer, shapes: Mapping[tuple[int, int], int], rows_of: Sequence[int]
) -> list[tuple[int, int, int, Timed]]:
    found: list[tuple[int, int, int, Timed]] = []
    flops_per_s = 0.0
    for (n, k), copies in shapes.items():
        for m in rows_of:
            if flops_per_s and 2 * m * n * k / flops_per_s > max(4 * timer.share_s(), 0.05):
                continue  # too long for what is left; the fit extends to it
            timed = timer.time(partial(probe.product, m, n, k, copies))
            flops_per_s = max(flops_per_s, 2 * m * n * k / timed.seconds)
            found.append((m, n, k, timed))
    return found


def _product_rows(
    probe: Probe, shapes: Mapping[tuple[int, int], int], found: Sequence[tuple[int, int, int, Timed]]
) -> Rows[Products]:
    rows, columns, depth = np.array([sizes for *sizes, _ in found], dtype=float).T
    seconds = np.array([timed.seconds for *_, timed in found])
    weights = probe.element_bytes * columns * depth
    none = np.zeros_like(rows)
    inputs, outputs = probe.element_bytes * rows * depth, probe.element_bytes * rows * columns
    work = Products(rows, columns, depth, none + 1, weights, inputs, outputs, none)
    swept = weights * np.array([shapes[n, k] for _, n, k, _ in found])
    return Rows(work, seconds, swept, (columns * 1_000_000 + depth).astype(np.int64))


def _fitted(
    model: ModelShape, probe: Probe, device: Device, products: Rows[Products], rest: "_Rest"
) -> Calibration:
    rates = Rates.of(device, probe.dtype)
    gemm = fit_gemm([(rates, products)], GemmFit(0.8, 1.0, 2e-6, k_fill=0.0))
    ratio = gemm_s(gemm, rates, products.work) / products.seconds
    decode, prefill, passes, spread = _fit_rest(model, probe, device, rest)
    return Calibration(
        name=device.id,
        tier=2,
        gemm={probe.dtype: gemm},
        decode=decode,
        prefill=prefill,
        elementwise=passes.pop("all"),
        passes=passes,
        spread={f"gemm {probe.dtype}": spread_of(ratio), **spread},
        shapes=_tables(probe.dtype, products),
        source="measured by burstline calibrate",
        fitted_on=f"{len(products)} products of {model.name}; spreads are of the rows fitted",
    )


def _tables(dtype: str, products: Rows[Products]) -> tuple[ShapeTimes, ...]:
    x, found = products.work, []
    for key in np.unique(products.key):
        one = products.key == key
        m, seconds = tuple(x.m[one].tolist()), tuple(products.seconds[one].tolist())
        found.append(ShapeTimes(dtype, int(x.n[one][0]), int(x.k[one][0]), m, seconds))
    return tuple(found)


_SMALL_BATCH = (8, 512)
_DECODES = ((1, 256), (1, 1024), _SMALL_BATCH, (32, 512), (64, 512), (192, 512))
_PREFILLS = (128, 512, 1024)
_PASS_ROWS = (1, 64, 2048)


@dataclass(frozen=True, slots=True)
class _Rest:
    """Attention of `_DECODES` and of `_PREFILLS`; elementwise passes by kind, with the bytes they move."""

    decodes: list[Timed]
    prefills: list[Timed]
    passes: dict[str, list[tuple[float, Timed]]]


def _time_rest(model: ModelShape, probe: Probe, timer: Timer, swept_bytes: int) -> _Rest:
    """Caches rotate as weights do: a step comes back to a layer's after all weights and all other layers'."""
    heads = _heads(model)
    _, kv_heads, dim = heads
    token_bytes = 2 * kv_heads * dim * probe.element_bytes
    copies = {(b, c): max(model.n_layers, -(-swept_bytes // (token_bytes * b * c))) for b, c in _DECODES}
    passes: dict[str, list[tuple[float, Timed]]] = {}
    for rows in _PASS_ROWS:
        for kind, moved, make in _pass_kernels(model, probe, rows):
            if kind in probe.passes:
                passes.setdefault(kind, []).append((moved, timer.time(make)))
    return _Rest(
        [timer.time(partial(probe.decode, *sizes, *heads, n)) for sizes, n in copies.items()],
        [timer.time(partial(probe.prefill, tok, *heads)) for tok in _PREFILLS],
        passes,
    )


def _pass_kernels(
    model: ModelShape, probe: Probe, rows: int
) -> Iterator[tuple[str, float, Callable[[], Kernel]]]:
    """Elementwise kernels by kind, with their bytes as `ops` counts them."""
    heads, kv_heads, dim = _heads(model)
    width, one = model.layers[0].linears(model.d)[-1].k, rows * probe.element_bytes
    yield "norm", 4.0 * one * model.d, partial(probe.norm, rows, model.d)
    yield "act", 3.0 * one * width, partial(probe.activation, rows, width)
    yield "rope", 2.0 * one * (heads + kv_heads) * dim, partial(probe.rope, rows, heads + kv_heads, dim)
    yield "write", 2.0 * one * kv_heads * dim, partial(probe.kv_write, rows, kv_heads, dim)


def _fit_rest(
    model: ModelShape, probe: Probe, device: Device, rest: _Rest
) -> tuple[DecodeFit, PrefillFit, dict[str, PassFit], dict[str, Spread]]:
    """Attention and passes, each by a floor and a rate: few points, so few parameters."""
    heads = _heads(model)
    decodes = _decode_rows(probe, heads, rest.decodes)
    prefills = _prefill_rows(probe, heads, rest.prefills)
    bare, full = Rates.of(device), Rates.of(device, probe.dtype)

    def decode_at(x: Sequence[float]) -> DecodeFit:
        return DecodeFit(x[0] * 1e-6, x[1])

    def prefill_at(x: Sequence[float]) -> PrefillFit:
        return PrefillFit(x[0] * 1e-6, x[1], eta_m=30.0)

    def two(errors: Callable[[Sequence[float]], Amounts]) -> list[float]:
        return search(errors, [10, 0.5], upper=[1e4, 30])

    decode = decode_at(
        two(lambda x: log_errors([(decode_s(decode_at(x), bare, decodes.work), decodes.seconds)]))
    )
    prefill = prefill_at(
        two(lambda x: log_errors([(prefill_s(prefill_at(x), full, prefills.work), prefills.seconds)]))
    )
    passes, ratios = {}, []
    for kind, points in {**rest.passes, "all": [*itertools.chain(*rest.passes.values())]}.items():
        moved, seconds = np.array([(moved, timed.seconds) for moved, timed in points]).T
        errors = partial(_pass_errors, bare, moved, seconds)
        passes[kind] = _pass_at(two(errors))
        ratios.append(pass_s(passes[kind], bare, moved) / seconds)
    spread = {
        "decode": spread_of(decode_s(decode, bare, decodes.work) / decodes.seconds),
        "prefill": spread_of(prefill_s(prefill, full, prefills.work) / prefills.seconds),
        "elementwise": spread_of(np.concatenate(ratios[:-1])),
    }
    return decode, prefill, passes, spread


def _pass_at(x: Sequence[float]) -> PassFit:
    return PassFit(x[0] * 1e-6, x[1], x[1])


def _pass_errors(rates: Rates, moved: Amounts, seconds: Amounts, x: Sequence[float]) -> Amounts:
    return log_errors([(pass_s(_pass_at(x), rates, moved), seconds)])


def _heads(model: ModelShape) -> tuple[int, int, int]:
    """Query heads, KV heads, head size of the first layer."""
    attention = model.layers[0].attention
    if isinstance(attention, Attention):
        return attention.n_heads, attention.n_kv_heads, attention.head_dim
    size = attention.v_dim if isinstance(attention, Mla) else attention.value_dim
    return attention.n_heads, attention.n_heads, size


def _decode_rows(probe: Probe, heads: tuple[int, int, int], timed: Sequence[Timed]) -> Rows[Decodes]:
    n_heads, kv_heads, dim = heads
    seconds = np.array([one.seconds for one in timed])
    batch, context = (np.array(column, dtype=float) for column in zip(*_DECODES, strict=True))
    kv_bytes = 2.0 * batch * context * kv_heads * dim * probe.element_bytes
    queries = 2.0 * batch * n_heads * dim * probe.element_bytes
    work = Decodes(batch, context, np.full_like(batch, kv_heads), kv_bytes, queries)
    return Rows(work, seconds, kv_bytes, context.astype(np.int64))


def _prefill_rows(probe: Probe, heads: tuple[int, int, int], timed: Sequence[Timed]) -> Rows[Prefills]:
    n_heads, _, dim = heads
    seconds = np.array([one.seconds for one in timed])
    tok = np.array(_PREFILLS, dtype=float)
    seen = (tok + 1) / 2
    queries = 2 * tok * n_heads * dim * probe.element_bytes
    work = Prefills(4 * n_heads * dim * tok * seen, seen, tok, np.full_like(tok, dim), queries)
    return Rows(work, seconds, queries, tok.astype(np.int64))
