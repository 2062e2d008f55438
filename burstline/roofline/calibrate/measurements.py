"""The measurements behind a calibration: memory by working set, a model's own products, attention, norms.

A probe runs the kernels; what comes out is the device's ceilings as measured and the fit to its kernels.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from burstline.errors import RooflineError
from burstline.roofline.calibrate.probe_numpy import Kernel, NumpyProbe
from burstline.roofline.calibrate.probe_torch import TorchProbe
from burstline.roofline.device.calibration import AGREES, Calibration, Constants, ShapeTimes, Spread, shared
from burstline.roofline.device.device import Device, Level
from burstline.roofline.model.shapes import ELEMENT_BYTES, Attention, Mla, ModelShape
from burstline.roofline.predict.kernels import Amounts, Work, seconds_of

LEAST_S, MOST_S, REACHED = 2.0, 4.0, 3
"""How long a ceiling is looked for, at least and at most, and how often it must be reached."""
Probe = NumpyProbe | TorchProbe
"""A device's kernels, made ready to run.

Its `passes` name the elementwise kernels that are as engines have them, by what ends our ops' names.
"""


@dataclass(slots=True, eq=False)
class Timed:
    """One kernel: its repeats' lower quartile, the better of both rounds, and how far four of five differ.

    A repeat longer than a few ms is interrupted wherever another process wants the core: not the quartile.
    """

    make: Callable[[], Kernel]
    seconds: float = math.inf
    spread: float = 0.0


class Timer:
    """Hands out an equal share of the time that is left to each of the measurements that are left.

    Everything is measured twice, some seconds apart: what else runs on the machine only ever slows it down.
    """

    def __init__(
        self, probe: Probe, budget_s: float, n_measurements: int, clock: Callable[[], float]
    ) -> None:
        self._probe, self._clock = probe, clock
        self._end_s, self._left = clock() + budget_s, 2 * n_measurements
        self._all: list[Timed] = []

    def share_s(self) -> float:
        return max(0.0, self._end_s - self._clock()) / max(1, self._left)

    def time(self, make: Callable[[], Kernel]) -> Timed:
        """The kernel's first round."""
        self._all.append(Timed(make))
        self._round(self._all[-1])
        return self._all[-1]

    def ceiling(
        self, kernels: Sequence[tuple[Callable[[], Kernel], float]], most: float
    ) -> tuple[float, float]:
        """The most a second of what each kernel does so much of; how far the fastest repeats of it differ.

        Others, and a hypervisor's, only ever lower a repeat, for seconds at a time: slow ones say nothing,
        also where they agree. A ceiling is what the machine reaches again and again. Ends once that holds to
        `most`.
        """
        made = [(amount, make(), list[float]()) for make, amount in kernels]
        for _, kernel, _ in made:
            self._probe.once(kernel, self._clock)
        began_s, best, apart = self._clock(), 0.0, math.inf
        while (spent_s := self._clock() - began_s) < LEAST_S or (apart > most and spent_s < MOST_S):
            for amount, kernel, fastest in made:
                fastest[:] = sorted([*fastest, self._probe.once(kernel, self._clock)])[:REACHED]
                if len(fastest) == REACHED and amount / fastest[-1] >= best:
                    best, apart = amount / fastest[-1], fastest[-1] / fastest[0] - 1
        return best, apart

    def again(self) -> float:
        """The second round of every kernel; the median of their spreads."""
        self._left = len(self._all)
        for timed in self._all:
            self._round(timed)
        return float(np.median([timed.spread for timed in self._all]))

    def _round(self, timed: Timed) -> None:
        share_s, kernel = self.share_s(), timed.make()
        seconds: list[float] = []
        self._left -= 1
        self._probe.once(kernel, self._clock)  # the first run touches its memory for the first time
        began_s = self._clock()
        while len(seconds) < 5 or (self._clock() - began_s < 0.8 * share_s and len(seconds) < 1000):
            seconds.append(self._probe.once(kernel, self._clock))
            if len(seconds) >= 3 and self._clock() - began_s > 2 * share_s:
                break
        low, quarter, high = np.quantile(seconds, [0.1, 0.25, 0.9])
        if quarter < timed.seconds:
            timed.seconds, timed.spread = float(quarter), float((high - low) / quarter)


QUICK_S, FULL_S, N_FASTEST = 7.0, 100.0, 4
# Libraries for CPUs cut few rows into blocks of 4 to 16, and rows left over cost as much as a block: 3 rows
# may take twice as long as 4. So each small count is measured. Beyond, multiples of 16 are the best case (the
# ceiling's), not the usual one: 13 more costs what a remainder costs on average.
_SMALL_M = tuple(range(1, 17))
_QUICK_M = (*_SMALL_M, 29, 61, 253, 1024)
_FULL_M = (*_SMALL_M, 29, 61, 128, 129, 253, 509, 1024, 2048, 2049)
_SWEPT_BYTES = 1 << 29  # the caches of a server's CPU hold hundreds of MB


def calibrate(
    model: ModelShape, probe: Probe, *, quick: bool = False, clock: Callable[[], float] = time.monotonic
) -> tuple[Device, Calibration]:
    """The device as measured and its calibration, for the shapes of `model`.

    Takes at most 17 s where `quick`, 2 minutes otherwise. Raises RooflineError where the peak or the
    bandwidth is not reached again and again.
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
    fastest = sorted(timed, key=lambda each: math.prod(each[:3]) / each[3].seconds)[-N_FASTEST:]
    peak: list[tuple[Callable[[], Kernel], float]] = [
        (partial(probe.product, m, n, k, 1), 2.0 * m * n * k) for m, n, k, _ in fastest
    ]
    looked_at = ("peak", peak), ("bandwidth", [(reads[-1].make, float(sizes[-1]))])
    ceilings = []
    for (what, kernels), most in zip(looked_at, AGREES, strict=True):
        ceiling, apart = timer.ceiling(kernels, most)
        if apart > most:
            raise RooflineError(
                f"the fastest repeats differ by {apart:.1%} in the {what}; on a steady machine by at most "
                f"{most:.0%}"
            )
        ceilings.append(ceiling)
    m, n, k = np.array([sizes for *sizes, _ in timed], dtype=float).T
    products = Work(m, n, k, bytes=probe.element_bytes * (n * k + m * k + m * n))
    products_s = np.array([one.seconds for *_, one in timed])
    rates = [size / read.seconds for size, read in zip(sizes, reads, strict=True)]
    rates[-1] = max(rates[-1], ceilings[1])
    device = Device(
        id=f"measured-{probe.dtype}-{probe.n_units}",
        name=probe.name,
        arch="measured",
        peaks={probe.dtype: max(ceilings[0], float((2 * m * n * k / products_s).max()))},
        levels=levels_of(sizes, rates, probe.memory_bytes),
        n_units=probe.n_units,
        source="measured by burstline calibrate",
        assurance=f"{'quick' if quick else 'full'} measurement, the better of two lower quartiles of repeats",
        note="peak: the fastest of the model's products; bandwidths: one pass of reads",
    )
    calibration = _fitted(model, probe, device, (products, products_s), rest)
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


def _fitted(
    model: ModelShape, probe: Probe, device: Device, products: tuple[Work, Amounts], rest: "_Rest"
) -> Calibration:
    """The constants that one machine's kernels can set; the others stay shared or do not apply."""
    before = shared()
    found = replace(before.constants, mixed=1.0, pad_8=0.0)
    name, _ = found.of_products(probe.dtype)
    rates = {"peak": device.peak_flops_per_s(probe.dtype), "bytes_per_s": device.bytes_per_s}
    rates["bits"] = 8 * ELEMENT_BYTES[probe.dtype]
    moved, passes_s = np.array([(moved, timed.seconds) for moved, timed in rest[2]]).T
    decode, prefill = _attention_rows(model, probe)
    rows = {
        "matmul": products,
        "decode": (decode, np.array([timed.seconds for timed in rest[0]])),
        "prefill": (prefill, np.array([timed.seconds for timed in rest[1]])),
        "elementwise": (Work(bytes=moved), passes_s),
    }
    known = {kind: (seconds_of(kind, x._replace(**rates)), took_s) for kind, (x, took_s) in rows.items()}
    share, floor = (0.005, 30.0), (0.0, 1e-2)
    for kinds, limits in (
        (["matmul"], {name: (0.01, 1.3), "memory": (0.01, 30.0), "launch_s": (0.0, 1e-3)}),
        (["decode", "prefill"], {"cache": share, "prompt": share, "attention_s": floor}),
        (["elementwise"], {"passes": share, "pass_s": floor}),
    ):
        found = fitted(found, limits, [known[kind] for kind in kinds])
    spread = dict(before.spread)
    for kind, (of, took_s) in known.items():
        off = np.quantile(took_s / of(found), (0.1, 0.9)).tolist()
        spread[name if kind == "matmul" else kind] = Spread(*off)
    names = (slot.name for slot in fields(Constants))
    own = tuple(one for one in names if getattr(found, one) != getattr(before.constants, one))
    tables = _tables(probe.dtype, *products)
    return Calibration(device.id, found, "measured by burstline calibrate", own, spread, tables)


def _tables(dtype: str, x: Work, took_s: Amounts) -> tuple[ShapeTimes, ...]:
    found = []
    for n, k in dict.fromkeys(zip(x.n.tolist(), x.k.tolist(), strict=True)):
        one = (x.n == n) & (x.k == k)
        m, seconds = tuple(x.m[one].tolist()), tuple(took_s[one].tolist())
        found.append(ShapeTimes(dtype, int(n), int(k), m, seconds))
    return tuple(found)


_SMALL_BATCH = (8, 512)
_DECODES = ((1, 256), (1, 1024), _SMALL_BATCH, (32, 512), (64, 512), (192, 512))
_PREFILLS = (128, 512, 1024)
_PASS_ROWS = (1, 64, 2048)


_Rest = tuple[list[Timed], list[Timed], list[tuple[float, Timed]]]
"""Attention of `_DECODES` and of `_PREFILLS`; elementwise passes with the bytes they move."""


def _time_rest(model: ModelShape, probe: Probe, timer: Timer, swept_bytes: int) -> _Rest:
    """Caches rotate as weights do: a step comes back to a layer's after all weights and all other layers'."""
    heads = _heads(model)
    _, kv_heads, dim = heads
    token_bytes = 2 * kv_heads * dim * probe.element_bytes
    copies = {(b, c): max(model.n_layers, -(-swept_bytes // (token_bytes * b * c))) for b, c in _DECODES}
    passes: list[tuple[float, Timed]] = []
    for rows in _PASS_ROWS:
        for kind, moved, make in _pass_kernels(model, probe, rows):
            if kind in probe.passes:
                passes.append((moved, timer.time(make)))
    decodes = [timer.time(partial(probe.decode, *sizes, *heads, n)) for sizes, n in copies.items()]
    return decodes, [timer.time(partial(probe.prefill, tok, *heads)) for tok in _PREFILLS], passes


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


def _heads(model: ModelShape) -> tuple[int, int, int]:
    """Query heads, KV heads, head size of the first layer."""
    attention = model.layers[0].attention
    if isinstance(attention, Attention):
        return attention.n_heads, attention.n_kv_heads, attention.head_dim
    size = attention.v_dim if isinstance(attention, Mla) else attention.value_dim
    return attention.n_heads, attention.n_heads, size


def _attention_rows(model: ModelShape, probe: Probe) -> tuple[Work, Work]:
    """What decode and prefill do in each row that is measured."""
    n_heads, kv_heads, dim = _heads(model)
    batch, context = (np.array(column, dtype=float) for column in zip(*_DECODES, strict=True))
    one = 2.0 * batch * dim * probe.element_bytes
    decode = Work(n=context, kv_bytes=one * context * kv_heads, activation_bytes=one * n_heads)
    tok = np.array(_PREFILLS, dtype=float)
    seen = (tok + 1) / 2
    return decode, Work(flops=4 * n_heads * dim * tok * seen, keys=seen)


def fitted(
    start: Constants,
    limits: Mapping[str, tuple[float, float]],
    tables: Sequence[tuple[Callable[[Constants], Amounts], Amounts]],
) -> Constants:
    """`start` with those constants that `limits` names, each within its limits, of the least errors.

    `tables`: how the seconds of rows are predicted, and the seconds measured; each table weighs the same. The
    objective is the mean absolute log error plus 0.3 of its root mean square.
    """
    names = list(limits)
    low, high = np.array([limits[name] for name in names]).T
    weight = np.concatenate([np.full(len(seconds), 1 / len(seconds) / len(tables)) for _, seconds in tables])

    def at(x: npt.NDArray[np.float64]) -> Constants:
        return replace(start, **dict(zip(names, (low + x * (high - low)).tolist(), strict=True)))

    def cost(x: npt.NDArray[np.float64]) -> float:
        if (x < 0).any() or (x > 1).any():
            return 9.0
        e = np.concatenate([np.log(predict(at(x)) / seconds) for predict, seconds in tables])
        return float((weight * abs(e)).sum() + 0.3 * np.sqrt((weight * e * e).sum()))

    begin = np.clip((np.array([getattr(start, name) for name in names]) - low) / (high - low), 0.01, 0.99)
    options = {"maxfev": 800, "xatol": 1e-4, "fatol": 1e-6, "adaptive": True}
    return at(minimize(cost, begin, method="Nelder-Mead", options=options).x)  # type: ignore[call-overload]
