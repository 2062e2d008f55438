"""The limit of an op on a device and its minimum time. Nothing here is fitted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from burstline.roofline.device.device import Device, Limit, collective_s
from burstline.roofline.model.ops import Op

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
    moved = op.kv_bytes if op.kind == "elementwise" else op.least_bytes
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
    return sum(
        op.count * (op.weight_bytes - op.avoidable_bytes + op.kv_bytes)
        for op in ops
        if op.kind != "elementwise"
    )


def ceilings(ops: Sequence[Op], device: Device) -> list[Bound]:
    """The bound of each op of one step, its working set taken from the ops themselves."""
    swept = working_set_bytes(ops)
    return [ceiling(op, device, swept) for op in ops]
