"""Bottleneck analyses of inference across devices, memories and generations.

The questions are those of arXiv 2407.14645: what faster DRAM buys, what a new generation of devices buys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from burstline.roofline.device.calibration import load_calibration, shared, with_host
from burstline.roofline.device.device import Device, Level, load_device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.families import load_model
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import QUANTS
from burstline.roofline.predict.deployment import PhaseBound, UniformBatch, phase_bounds
from burstline.roofline.predict.predict import Deployment, Prediction

GENERATIONS = ("a100-sxm4-80g", "h100-sxm5-80g", "h200-sxm-141g", "b200-sxm")


# Bandwidth of one A100's worth of memory by technology: five stacks, or twelve GDDR6 chips of 32 bits.
DRAM_BYTES_PER_S: Mapping[str, float] = {
    "GDDR6": 12 * 32 / 8 * 16e9,  # 16 Gb/s a pin, JESD250
    "HBM2": 5 * 1024 / 8 * 2.4e9,  # JESD235
    "HBM2E": 5 * 1024 / 8 * 3.6e9,  # JESD235
    "HBM3": 5 * 1024 / 8 * 6.4e9,  # JESD238
    "HBM3E": 5 * 1024 / 8 * 9.6e9,  # vendors' parts of 1.2 TB/s a stack
    "HBM4": 5 * 2048 / 8 * 8e9,  # JESD270-4
}
_A100_L2_BYTES_PER_S = 5120 * 1.41e9  # 5,120 bytes a clock: NVIDIA A100 architecture whitepaper, 2020


@dataclass(frozen=True, slots=True)
class DramPoint:
    """Latency with one DRAM technology, and the seconds of it that each resource binds."""

    technology: str
    bytes_per_s: float
    latency_s: float
    bound_s: Mapping[str, float]


def dram_scaling(model: str, asked: UniformBatch, tp: int) -> list[DramPoint]:
    """An A100 whose memory alone changes: what binds in DRAM's stead as it gets faster.

    Predicted by the shared constants. What comes from DRAM crosses the L2 too, so the slower of the two
    sets the pace.
    """
    a100 = load_device("a100-sxm4-80g")
    found = []
    for technology, bytes_per_s in DRAM_BYTES_PER_S.items():
        name = "DRAM" if bytes_per_s <= _A100_L2_BYTES_PER_S else "L2"
        slower = Level(name, a100.memory.capacity_bytes, min(bytes_per_s, _A100_L2_BYTES_PER_S))
        device = replace(a100, levels=(slower,))
        deployment = Deployment(load_model(model)[0], QUANTS["fp16"], Parallel(tp=tp), device)
        parts = _parts(phase_bounds(deployment, asked, with_host(shared())))
        found.append(DramPoint(technology, bytes_per_s, sum(parts.values()), parts))
    return found


def _parts(phases: Mapping[str, PhaseBound]) -> dict[str, float]:
    parts = dict.fromkeys(("compute", "DRAM", "L2", "network", "launches", "host"), 0.0)
    for phase in phases.values():
        parts["host"] += phase.n_steps * phase.host_s
        for line in phase.lines:
            assert line.prediction is not None
            for resource, seconds in _split(line.prediction):
                parts[resource] += phase.n_steps * seconds
    return parts


def _split(prediction: Prediction) -> list[tuple[str, float]]:
    """What a prediction's floor counts as, and what the rest."""
    bound, floor_s = prediction.bound, prediction.floor_s
    rest_s = prediction.seconds - floor_s
    if bound.limit == "communication":
        return [("network", floor_s + rest_s)]
    return [("launches", floor_s), ("compute" if bound.limit == "compute" else bound.level, rest_s)]


@dataclass(frozen=True, slots=True)
class Generation:
    """A request on one device, or why that device cannot take it."""

    device: Device
    quant: str
    phases: Mapping[str, PhaseBound]
    impossible: str = ""


def generations(model: str, asked: UniformBatch, devices: Sequence[str] = GENERATIONS) -> list[Generation]:
    """The same request on one generation after another, in fp16, and in fp8 where the device has it."""
    found = []
    for name in devices:
        for quant in ("fp16", "fp8"):
            device = load_device(name)
            deployment = Deployment(load_model(model)[0], QUANTS[quant], Parallel(), device)
            try:
                known = with_host(load_calibration(device))
                found.append(Generation(device, quant, phase_bounds(deployment, asked, known)))
            except RooflineError as error:
                found.append(Generation(device, quant, {}, str(error)))
    return found
