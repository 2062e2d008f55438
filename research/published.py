"""Latencies that NVIDIA published, with our predictions and three other models'."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from burstline.roofline.device.calibration import load_calibration, stack_host
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.parallel import Parallel
from burstline.roofline.model.shapes import QUANTS
from burstline.roofline.predict.deployment import UniformBatch, latency_s, phase_bounds
from burstline.roofline.predict.kernels import Amounts
from burstline.roofline.predict.predict import Deployment


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
