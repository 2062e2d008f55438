"""Analyses of where inference time goes: which resource binds, across devices, memories and generations.

The questions are those of arXiv 2407.14645: what bounds each product, how predictions compare with published
latencies, what faster DRAM buys, what a new generation of devices buys.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from roofline.device.calibration import generic, load_calibration, stack_host, with_host
from roofline.device.device import Device, Level, load_device
from roofline.errors import RooflineError
from roofline.model.catalog import load_model
from roofline.model.parallel import Parallel
from roofline.model.shapes import QUANTS
from roofline.predict.deployment import PhaseBound, UniformBatch, latency_s, phase_bounds
from roofline.predict.kernels import Amounts
from roofline.predict.predict import Deployment, Prediction

GENERATIONS = ("a100-sxm4-80g", "h100-sxm5-80g", "h200-sxm-141g", "b200-sxm")


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A measured latency and what models predict: seconds, None where a model gives no figure for the cell.

    `hosted_s` adds a launch cost that is the same for every device, `crossed_s` the one that the other
    devices' cells ask for.
    """

    device: str
    model: str
    tp: int
    measured_s: float
    ceiling_s: float
    calibrated_s: float
    hosted_s: float
    crossed_s: float
    others_s: Mapping[str, float | None]


@cache
def published_runs() -> list[PublishedRun]:
    """NVIDIA's 22 cells of Llama-2, 200 in, 200 out, batch 1, beside ours and three other models'.

    `calibrated_s` knows kernels and NCCL's all-reduces as measured on the device, but none of these runs.
    The software of 2023 launched its kernels one by one: the stack "eager" costs so much for each.
    """
    rows = _published()
    found = [_predicted(row) for row in rows]
    measured = np.array([float(row["measured_s"]) for row in rows])
    missing = measured - [calibrated for _, calibrated, _ in found]
    launches = np.array([n for *_, n in found], dtype=float)
    devices = np.array([row["device"] for row in rows])
    eager_s = stack_host("eager").launch_s
    runs = []
    for row, (ideal, calibrated, n) in zip(rows, found, strict=True):
        apart = devices != row["device"]
        crossed_s = _launch_s(missing[apart], launches[apart], measured[apart])
        others = {name: float(row[f"{name}_s"]) if row[f"{name}_s"] else None for name in OTHERS}
        runs.append(
            PublishedRun(
                row["device"], row["model"], int(row["tp"]), float(row["measured_s"]), ideal, calibrated,
                calibrated + eager_s * n, calibrated + crossed_s * n, others,
            )
        )  # fmt: skip
    return runs


def _launch_s(missing_s: Amounts, launches: Amounts, measured_s: Amounts) -> float:
    """The seconds a launch that leave the least mean absolute relative error."""
    grid = np.arange(0, 10e-6, 0.05e-6)
    return float(grid[abs((grid[:, None] * launches - missing_s) / measured_s).mean(axis=1).argmin()])


OTHERS = ("genz", "llmcompass", "vidur")


@cache
def _published() -> list[dict[str, str]]:
    text = (Path(__file__).parent / "data" / "llama2_200_200_batch1.csv").read_text("utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def _predicted(row: Mapping[str, str]) -> tuple[float, float, int]:
    """Ceiling and calibrated seconds of one cell, and how many launches it takes."""
    device, parallel = load_device(row["device"]), Parallel(tp=int(row["tp"]), nccl=True)
    deployment = Deployment(load_model(row["model"])[0], QUANTS["fp16"], parallel, device)
    phases = phase_bounds(deployment, UniformBatch(1, 200, 200), {"own": load_calibration(device)})
    n_launches = sum(
        phase.n_steps * sum(line.bound.op.count for line in phase.lines) for phase in phases.values()
    )
    return latency_s(phases), latency_s(phases, "own"), n_launches


def mean_error(runs: Sequence[PublishedRun], predicted_s: Sequence[float | None]) -> tuple[float, float, int]:
    """Mean signed and mean absolute relative error, over as many runs as have a prediction."""
    errors = [p / run.measured_s - 1 for run, p in zip(runs, predicted_s, strict=True) if p is not None]
    return sum(errors) / len(errors), sum(map(abs, errors)) / len(errors), len(errors)


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

    Predicted by the generic calibration. What comes from DRAM crosses the L2 too, so the slower of the two
    sets the pace.
    """
    a100 = load_device("a100-sxm4-80g")
    found = []
    for technology, bytes_per_s in DRAM_BYTES_PER_S.items():
        name = "DRAM" if bytes_per_s <= _A100_L2_BYTES_PER_S else "L2"
        slower = Level(name, a100.memory.capacity_bytes, min(bytes_per_s, _A100_L2_BYTES_PER_S))
        device = replace(a100, levels=(slower,))
        deployment = Deployment(load_model(model)[0], QUANTS["fp16"], Parallel(tp=tp), device)
        parts = _parts(phase_bounds(deployment, asked, {"generic": with_host(generic())}))
        found.append(DramPoint(technology, bytes_per_s, sum(parts.values()), parts))
    return found


def _parts(phases: Mapping[str, PhaseBound]) -> dict[str, float]:
    parts = dict.fromkeys(("compute", "DRAM", "L2", "network", "launches", "host"), 0.0)
    for phase in phases.values():
        parts["host"] += phase.n_steps * phase.host_s["generic"]
        for line in phase.lines:
            for resource, seconds in _split(line.predictions["generic"]):
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
                found.append(
                    Generation(
                        device, quant, phase_bounds(deployment, asked, {"generic": with_host(generic())})
                    )
                )
            except RooflineError as error:
                found.append(Generation(device, quant, {}, str(error)))
    return found
