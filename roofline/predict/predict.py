"""How long an op, and a step of ops, should take on a device: the ceiling, or a calibrated prediction.

A `Clock` does the same for a model many thousand times over, as a simulation needs it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from burstline.roofline.device.calibration import Calibration, GemmFit, ShapeTimes, Spread
from burstline.roofline.device.collectives import collective_s
from burstline.roofline.device.device import Device, Limit
from burstline.roofline.model.ops import Op, ops
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import ELEMENT_BYTES, ModelShape, Quant
from burstline.roofline.model.step import Step
from burstline.roofline.predict.bound import Bound, ceiling, classify, working_set_bytes
from burstline.roofline.predict.kernels import (
    Amounts,
    Decodes,
    Prefills,
    Products,
    Rates,
    all_reduce_s,
    decode_s,
    pass_s,
    prefill_s,
    product_s,
    quantise_s,
)

_UNKNOWN = Spread(0.75, 1.0, 1.35, 0)  # of kinds no table holds: the generic defaults' own spread


@dataclass(frozen=True, slots=True)
class Prediction:
    """The seconds all runs of an op should take. `low` and `high` hold four of five measured cases.

    `floor_s` is the part that no larger op would take longer for: launches, latency of links.
    `tier` counts as `calibration.TIERS`.
    """

    op: Op
    bound: Bound
    seconds: float
    low_s: float
    high_s: float
    floor_s: float
    tier: int

    @property
    def limit(self) -> Limit:
        return classify(self.bound, self.floor_s, self.seconds)


def predict(
    op: Op,
    device: Device,
    calibration: Calibration | None,
    *,
    mixed: bool = False,
    swept_bytes: float | None = None,
) -> Prediction:
    """What `op` should take; without a calibration its ceiling, tier 0.

    `mixed`: the step both prefills and decodes. `swept_bytes` is what the step reads again and again, as in
    `bound.ceiling`; it moves the bound only. Raises where the device has no peak for the op's dtype.
    """
    bound = ceiling(op, device, swept_bytes)
    if calibration is None:
        return Prediction(op, bound, bound.seconds, bound.seconds, bound.seconds, 0.0, 0)
    one_s, floor_s, tier = _one(op, device, calibration)
    if mixed and op.kind == "attention" and op.phase == "decode":
        one_s *= calibration.mixed
    if tier < 3 and op.kind in ("matmul", "attention"):
        one_s = max(one_s, bound.seconds / op.count)  # a fit may err; the ceiling does not
    around = calibration.spread.get(_kind(op), _UNKNOWN)
    seconds = op.count * one_s
    return Prediction(
        op, bound, seconds, seconds * around.low, seconds * around.high, op.count * floor_s, tier
    )


def predict_step(step_ops: Sequence[Op], device: Device, calibration: Calibration | None) -> list[Prediction]:
    """Each op of one step."""
    phases = {op.phase for op in step_ops if op.kind == "attention"}
    swept = working_set_bytes(step_ops)
    return [predict(op, device, calibration, mixed=len(phases) > 1, swept_bytes=swept) for op in step_ops]


def host_seconds(step: Step, predictions: Iterable[Prediction], calibration: Calibration | None) -> float:
    """What the serving stack's host adds to a step of these ops."""
    if calibration is None or calibration.host is None:
        return 0.0
    return calibration.host.seconds(step, sum(p.op.count for p in predictions))


def step_seconds(predictions: Iterable[Prediction], host_s: float = 0.0) -> float:
    """Ops run one after another; the host's part is not hidden."""
    return sum(prediction.seconds for prediction in predictions) + host_s


def _kind(op: Op) -> str:
    if op.kind == "matmul":
        return f"gemm {op.kernel if op.kernel.startswith('experts_') else op.dtype}"
    return op.phase or op.collective or op.kind


def _one(op: Op, device: Device, calibration: Calibration) -> tuple[float, float, int]:
    """Seconds of one run, its floor, the tier."""
    if op.kind == "matmul":
        return _matmul(op, device, calibration)
    if op.kind == "attention":
        seconds = (
            _decode(op, device, calibration) if op.phase == "decode" else _prefill(op, device, calibration)
        )
        decode, prefill = calibration.attention_fits(_kv_element_bytes(op))
        floor_s = decode.t0_s if op.phase == "decode" else prefill.t0_s
        return seconds, floor_s, calibration.tier
    if op.kind == "collective":
        return _collective(op, device, calibration)
    fit, rates = calibration.pass_fit(op.name), Rates.of(device)
    if op.name == "quantise":  # measured together with the product that follows it
        gemm, tier = calibration.gemm_fit(op.kernel)
        return float(quantise_s(gemm, rates, *_amounts(op.bytes))), gemm.quantise_s, tier
    return float(pass_s(fit, rates, *_amounts(op.bytes))), fit.t0_s, calibration.tier


@lru_cache(maxsize=4096)
def _gemm_s(fit: GemmFit, rates: Rates, sizes: tuple[float, ...]) -> float:
    return float(product_s(fit, rates, Products(*(np.array([size], dtype=float) for size in sizes)))[0])


def _matmul(op: Op, device: Device, calibration: Calibration) -> tuple[float, float, int]:
    fit, tier = calibration.gemm_fit(op.kernel or op.dtype)
    if calibration.sustained != 1:
        fit = replace(fit, eta_c=fit.eta_c * calibration.sustained)
    for shape in calibration.shapes:
        if (shape.dtype, shape.n, shape.k) == (op.dtype, op.n, op.k) and op.groups == 1:
            return _measured_shape(shape, op.m), fit.t0_s, 3
    in_bytes = op.m * op.groups * op.k * ELEMENT_BYTES[op.dtype]
    sizes = (op.m, op.n, op.k, op.groups, op.weight_bytes, in_bytes, op.activation_bytes - in_bytes, 0.0)
    return fit.t0_s + _gemm_s(fit, Rates.of(device, op.dtype), sizes), fit.t0_s, tier


def _measured_shape(shape: ShapeTimes, m: float) -> float:
    """Between measured m on a line; beyond the largest in proportion."""
    if m > shape.m[-1]:
        return shape.seconds[-1] * m / shape.m[-1]
    return float(np.interp(m, shape.m, shape.seconds))


def _decode(op: Op, device: Device, calibration: Calibration) -> float:
    sizes = (op.groups, op.n, op.n_kv_heads, op.kv_bytes, op.activation_bytes)
    work = Decodes(*_amounts(*sizes))
    decode, prefill = calibration.attention_fits(_kv_element_bytes(op))
    compute = op.flops / (prefill.eta_c * device.peak_flops_per_s(op.dtype))
    return max(float(decode_s(decode, Rates.of(device), work)), decode.t0_s + compute)


def _kv_element_bytes(op: Op) -> float:
    """How wide an element of the cache is that an attention reads."""
    return op.kv_element_bytes or ELEMENT_BYTES[op.dtype]


def _prefill(op: Op, device: Device, calibration: Calibration) -> float:
    pairs = op.flops / (op.m * op.groups)  # FLOPs of one query, over all the keys it sees
    sizes = (op.flops, pairs / (4 * op.n_heads * op.k), op.longest_tok, op.k, op.activation_bytes)
    work = Prefills(*_amounts(*sizes))
    decode, fit = calibration.attention_fits(_kv_element_bytes(op))
    seconds = float(prefill_s(fit, Rates.of(device, op.dtype), work))
    return max(seconds, fit.t0_s + op.kv_bytes / (decode.eta_m * device.bytes_per_s))


def _collective(op: Op, device: Device, calibration: Calibration) -> tuple[float, float, int]:
    fit, tier = calibration.link_fit(op.n_ranks, nccl=op.kernel == "nccl")
    if op.collective == "all_reduce" and op.n_ranks <= fit.n_ranks and device.links:
        ring = replace(fit, n_ranks=op.n_ranks)
        seconds = float(all_reduce_s(ring, device.links[0].bytes_per_s, *_amounts(op.link_bytes)))
        return seconds, fit.t0_s, tier
    ideal, _ = collective_s(op.collective, op.link_bytes, op.n_ranks, device.links)
    return fit.t0_s + ideal / fit.eta, fit.t0_s, 1


def _amounts(*values: float) -> list[Amounts]:
    return [np.asarray(value, dtype=np.float64) for value in values]


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine's worth of a model: `parallel.n_devices` of one kind of device.

    `expert_share`: distinct experts that a batch touches, as a share of what uniform routing would touch.
    """

    model: ModelShape
    quant: Quant
    parallel: Parallel
    device: Device
    expert_share: float = 1.0

    def ops(self, step: Step) -> list[Op]:
        """What one device does in `step`."""
        return ops(self.model, self.quant, self.parallel, step, expert_share=self.expert_share)

    def predict(self, step: Step, calibration: Calibration | None) -> list[Prediction]:
        """Each op of `step`, timed."""
        return predict_step(self.ops(step), self.device, calibration)


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of a step, for `simulate`. Without a calibration: ceilings.

    Consecutive steps differ by a token for each request, so a step is remembered by the mean context of its
    decodes.
    """

    deployment: Deployment
    calibration: Calibration | None
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def __call__(self, step: Step) -> float:
        decodes = (step.new_tok == 1) & (step.logits == 1)
        n = int(decodes.sum())
        at = int(step.context_tok[decodes].sum()) // (n * 16) if n else 0
        key: tuple[object, ...] = (n, at)
        if n < step.n_requests:
            rest = Step(*(column[~decodes] for column in (step.new_tok, step.context_tok, step.logits)))
            key = (n, at, rest.new_tok.tobytes(), rest.context_tok.tobytes(), rest.logits.tobytes())
        if key not in self._known:
            self._known[key] = self._seconds(Step.decode(n, at * 16 + 8) if n == step.n_requests else step)
        return self._known[key]

    def _seconds(self, step: Step) -> float:
        predictions = self.deployment.predict(step, self.calibration)
        return step_seconds(predictions, host_seconds(step, predictions, self.calibration))
