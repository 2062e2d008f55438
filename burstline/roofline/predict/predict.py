"""How long an op, and a step of ops, should take on a device: the ceiling, or what the constants predict.

Nothing in a ceiling is fitted. A `Clock` does the same for a model many thousand times over, as a simulation
needs it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from burstline.roofline.device.calibration import Calibration, ShapeTimes
from burstline.roofline.device.device import Device, Limit, collective_s
from burstline.roofline.model.ops import Op, Step, ops
from burstline.roofline.model.shapes import ELEMENT_BYTES, ModelShape, Parallel, Quant
from burstline.roofline.predict.kernels import Work, difference, op_s, parts

MEASURED = "measured shape"
# A working set past this many times a cache's size gets no credit for what the cache might keep: on measured
# tables (H100, A100, L40S; six rotating weight copies) a single product beyond it beat main memory's ceiling.
CACHE_REACH = 3.0


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds of all `count` runs of an op on one device.

    `level` is the level of memory or the link that `memory_s` or `link_s` belongs to: of several levels, the
    one that takes longest. `expected_memory_s` charges every expert that the batch is expected to touch, not
    only those it must: that tells what limits an op, though it is no bound.
    """

    op: Op
    compute_s: float
    memory_s: float
    expected_memory_s: float
    link_s: float
    level: str

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s, self.link_s)

    @property
    def limit(self) -> Limit:
        """What takes longest; memory where nothing takes any time."""
        if self.op.kind == "collective":
            return "communication"
        return "compute" if self.compute_s > self.expected_memory_s else "memory"


def ceiling(op: Op, device: Device, working_set_bytes: float | None = None) -> Bound:
    """The bound of `op`; memory traffic is charged to each level it must cross.

    `working_set_bytes` is what the step sweeps through again and again (its weights and KV cache): as much of
    it as fits stays in a cache. None: nothing does. Elementwise passes are charged only the cache they write,
    since a perfect compiler fuses the rest into the neighbouring products. Experts are charged as if all
    tokens chose the same ones: how many a batch is expected to touch is a prediction, not a bound.
    """
    if op.kind == "collective":
        seconds, link = collective_s(op.collective, op.link_bytes, op.n_ranks, device.links)
        return Bound(op, 0.0, 0.0, 0.0, op.count * seconds, link)
    # Over a cache of 8 bits kernels may quantise the queries, too: measured prompts beat the bf16 peak by 4%.
    dtype = "fp8" if 0 < op.kv_element_bytes <= 1 and "fp8" in device.peaks else op.dtype
    compute_s = op.count * op.flops / device.peak_flops_per_s(dtype) if op.flops else 0.0
    moved = op.kv_bytes if op.kind == "elementwise" else op.bytes - op.avoidable_bytes
    memory_s, level = _memory_s(op.count * moved, device, working_set_bytes)
    expected_s, _ = _memory_s(op.count * (moved + op.avoidable_bytes), device, working_set_bytes)
    return Bound(op, compute_s, memory_s, expected_s, 0.0, level)


def _memory_s(moved_bytes: float, device: Device, working_set_bytes: float | None) -> tuple[float, str]:
    if working_set_bytes is None:
        return moved_bytes / device.bytes_per_s, device.memory.name
    nearer = [0.0, *(level.capacity_bytes for level in device.levels[:-1])]
    slowest = (0.0, device.levels[0].name)
    for level, cached in zip(device.levels, nearer, strict=True):
        reached = working_set_bytes <= CACHE_REACH * cached
        crossing = max(0.0, 1 - cached / working_set_bytes) if reached and working_set_bytes else 1.0
        if level.bytes_per_s is not None:
            slowest = max(slowest, (moved_bytes * crossing / level.bytes_per_s, level.name))
    return slowest


def working_set_bytes(ops: Iterable[Op]) -> float:
    """The weights and KV cache that a step reads: what the next step will want again."""
    kept = (op for op in ops if op.kind != "elementwise")
    return sum(op.count * (op.weight_bytes - op.avoidable_bytes + op.kv_bytes) for op in kept)


def ceilings(ops: Sequence[Op], device: Device) -> list[Bound]:
    """The bound of each op of one step, its working set taken from the ops themselves."""
    swept = working_set_bytes(ops)
    return [ceiling(op, device, swept) for op in ops]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The seconds all runs of an op should take. `low` and `high` hold four of five measured cases.

    `floor_s` is the part that no larger op would take longer for: launches, latency of links. `by` names the
    constants that set it: the rate's, the floor's, and "mixed" where that counts. `ends_s`: between which
    published kernels lie where they differ in sign, and `differs` whose; elsewhere `seconds` twice.
    """

    op: Op
    bound: Bound
    seconds: float
    low_s: float
    high_s: float
    floor_s: float
    by: tuple[str, ...] = ()
    ends_s: tuple[float, float] = (0.0, 0.0)
    differs: str = ""

    @property
    def limit(self) -> Limit:
        """Latency where launches are half of its time or more."""
        launches = self.op.kind != "collective" and 0 < self.floor_s >= self.seconds / 2
        return "latency" if launches else self.bound.limit


def predict(
    op: Op,
    device: Device,
    calibration: Calibration | None,
    *,
    mixed: bool = False,
    swept_bytes: float | None = None,
) -> Prediction:
    """What `op` should take; without a calibration its ceiling.

    `mixed`: the step both prefills and decodes. `swept_bytes` is what the step reads again and again, as in
    `ceiling`; it moves the bound only. Raises where the device has no peak for the op's dtype.
    """
    bound = ceiling(op, device, swept_bytes)
    if calibration is None:
        ends_s = bound.seconds, bound.seconds
        return Prediction(op, bound, bound.seconds, *ends_s, 0.0, ends_s=ends_s)
    one_s, floor_s, by = _one(op, device, calibration)
    if mixed and op.kind == "attention" and op.phase == "decode":
        one_s, by = one_s * calibration.constants.mixed, (*by, "mixed")
    if by != (MEASURED,) and op.kind in ("matmul", "attention"):
        one_s = max(one_s, bound.seconds / op.count)  # a constant may err; the ceiling does not
    kind = calibration.constants.of_products(op.dtype)[0] if op.kind == "matmul" else op.phase or op.kind
    around = calibration.spread.get(kind, calibration.spread["other"])
    seconds, floor_s = op.count * one_s, op.count * floor_s
    least, most, differs = difference(op, device)
    scaled_s = floor_s if kernel(op) in ("exchange", "index", "elementwise") else seconds
    ends_s = seconds + scaled_s * (least - 1), seconds + scaled_s * (most - 1)
    low_s, high_s = min(seconds * around.low, ends_s[0]), max(seconds * around.high, ends_s[1])
    return Prediction(op, bound, seconds, low_s, high_s, floor_s, by, ends_s, differs)


def predict_step(step_ops: Sequence[Op], device: Device, calibration: Calibration | None) -> list[Prediction]:
    phases = {op.phase for op in step_ops if op.kind == "attention"}
    swept = working_set_bytes(step_ops)
    return [predict(op, device, calibration, mixed=len(phases) > 1, swept_bytes=swept) for op in step_ops]


def host_seconds(step: Step, predictions: Sequence[Prediction], calibration: Calibration | None) -> float:
    """What the serving stack's host adds to a step of these ops.

    Where it launches each kernel, collectives are NCCL's, which pass from rank to rank: 7, 11 and 18 us of 2,
    4 and 8 ranks on an H100, as a launch for each pair of ranks gives.
    """
    if calibration is None or calibration.host is None:
        return 0.0
    n_launches = sum(p.op.count * max(1.0, p.op.n_ranks / 2) for p in predictions)
    return calibration.host.seconds(step, n_launches, sum(p.seconds for p in predictions))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step on one device: its ops, one after another, and what the host adds, which is not hidden.

    `n_steps` is how often a request runs it.
    """

    predictions: tuple[Prediction, ...]
    host_s: float
    n_steps: int = 1

    @property
    def ceiling_s(self) -> float:
        return sum(p.bound.seconds for p in self.predictions)

    @property
    def predicted_s(self) -> float:
        return sum(p.seconds for p in self.predictions) + self.host_s

    @property
    def range_s(self) -> tuple[float, float]:
        """Between which four of five measured cases lie, if all ops err together."""
        low, high = (sum(ends) for ends in zip(*((p.low_s, p.high_s) for p in self.predictions), strict=True))
        return low + self.host_s, high + self.host_s

    @property
    def ends_s(self) -> tuple[float, float]:
        """The least and the most with published kernels, where those differ; else as predicted, twice."""
        low, high = (sum(ends) for ends in zip(*(p.ends_s for p in self.predictions), strict=True))
        return low + self.host_s, high + self.host_s

    @property
    def differs(self) -> list[str]:
        """Whose published kernels differ, each once."""
        return list(dict.fromkeys(p.differs for p in self.predictions if p.differs))

    @property
    def limit_s(self) -> dict[Limit, float]:
        """The predicted seconds of the ops that each limit bounds."""
        seconds: dict[Limit, float] = {}
        for p in self.predictions:
            seconds[p.limit] = seconds.get(p.limit, 0.0) + p.seconds
        return seconds

    @property
    def limit(self) -> Limit | Literal["host"]:
        """The host where that takes longer than the device, else the limit with most of the time."""
        seconds = self.limit_s
        longest: Limit = max(seconds, key=seconds.__getitem__)
        return "host" if self.host_s > sum(seconds.values()) else longest


def _one(op: Op, device: Device, calibration: Calibration) -> tuple[float, float, tuple[str, ...]]:
    """Seconds of one run, its floor, the constants that set it."""
    of, kind = calibration.constants, kernel(op)
    for shape in calibration.shapes if kind == "matmul" and op.groups == 1 else ():
        if (shape.dtype, shape.n, shape.k) == (op.dtype, op.n, op.k):
            return _measured_shape(shape, op.m), of.launch_s, (MEASURED,)
    floor_s, rest = parts(kind, of, x := work(op, device))
    rate = max(rest, key=lambda name: float(rest[name]))
    rate = of.of_products(op.dtype)[0] if rate == "product" else rate
    floor = "shot_s" if rate in ("one_link", "two_link") else _FLOORS[kind]
    return float(op_s(kind, of, x)), float(floor_s), (rate, floor)


_FLOORS = {
    "matmul": "launch_s", "decode": "attention_s", "prefill": "attention_s", "index": "sparse_s",
    "collective": "launch_s", "exchange": "exchange_s", "elementwise": "pass_s", "scan": "scan_s",
}  # fmt: skip


def kernel(op: Op) -> str:
    """The kind of kernel that runs an op, as `kernels.parts` knows it."""
    if op.name == "delta_rule" and op.phase == "prefill":
        return "scan"
    if op.name == "indexer" and op.phase == "decode":
        return "index"
    return op.phase if op.kind == "attention" else "exchange" if op.collective == "all_to_all" else op.kind


def work(op: Op, device: Device) -> Work:
    """What one run of an op does, beside the ceilings of its device."""
    links = device.links
    keys = op.flops / (op.m * op.groups) / (4 * op.n_heads * op.k) if op.n_heads and op.k else 0.0
    ideal_s, rate, peak = 0.0, 0.0, 1.0
    if op.kind in ("matmul", "attention"):
        # An indexer's products have 8 bits where the device multiplies those (DeepSeek-V3.2).
        in_8_bits = op.name == "indexer" and "fp8" in device.peaks
        peak = device.peak_flops_per_s("fp8" if in_8_bits else op.dtype)
    if op.collective:
        ideal_s, _ = collective_s(op.collective, op.link_bytes, op.n_ranks, links)
        own = links and links[0].kind.startswith("NVLink") and op.n_ranks <= links[0].n_devices
        rate = links[0].bytes_per_s if own and op.collective in ("all_reduce", "all_to_all") else 0.0
    return Work(
        op.m, op.n, op.k, op.groups, 8 * ELEMENT_BYTES[op.dtype], op.bytes, op.flops, op.kv_bytes,
        op.activation_bytes, keys, op.n_heads, peak, device.bytes_per_s,
        device.n_units or 1, ideal_s, op.link_bytes, op.n_ranks, bool(links) and links[0].in_switch, rate,
    )  # fmt: skip


def _measured_shape(shape: ShapeTimes, m: float) -> float:
    """Between measured m on a line; beyond the largest in proportion."""
    if m > shape.m[-1]:
        return shape.seconds[-1] * m / shape.m[-1]
    return float(np.interp(m, shape.m, shape.seconds))


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
        return ops(self.model, self.quant, self.parallel, step, expert_share=self.expert_share)

    def predict(self, step: Step, calibration: Calibration | None) -> StepTimes:
        """The ceilings without a calibration."""
        predictions = predict_step(self.ops(step), self.device, calibration)
        return StepTimes(tuple(predictions), host_seconds(step, predictions, calibration))


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds of a step, for `simulate`. Without a calibration: ceilings.

    `end`: at the fast or the slow end of published kernels, where those differ. Consecutive steps differ by a
    token for each request, so a step is remembered by the mean context of its decodes.
    """

    deployment: Deployment
    calibration: Calibration | None
    end: Literal[0, 1] | None = None
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
        times = self.deployment.predict(step, self.calibration)
        return times.predicted_s if self.end is None else times.ends_s[self.end]
