"""NVIDIA's 22 latencies of Llama-2 (batch 1, 200 in, 200 out; arXiv 2407.14645), and a real run replayed."""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from burstline.roofline.device.calibration import Calibration, load_calibration, stack_host, with_host
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.answer import UniformBatch, latency_s, phase_bounds
from burstline.roofline.predict.predict import Clock, Deployment
from burstline.roofline.predict.simulate import Asked, Limits, simulate

OTHERS = ("genz", "llmcompass", "vidur")


@dataclass(frozen=True, slots=True)
class Cell:
    """A measured latency and what models predict: seconds, None where one gives no figure for the cell."""

    device: str
    model: str
    tp: int
    measured_s: float
    ceiling_s: float
    predicted_s: float
    others_s: Mapping[str, float | None]


def cells() -> list[Cell]:
    """The software of 2023 launched its kernels one by one: the stack "eager" costs so much for each."""
    text = (Path(__file__).parent / "data" / "llama2_200_200_batch1.csv").read_text("utf-8")
    found = []
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        device, parallel = load_device(row["device"]), Parallel(tp=int(row["tp"]))
        deployment = Deployment(load_model(row["model"])[0], QUANTS["fp16"], parallel, device)
        known = replace(load_calibration(device), host=stack_host("eager"))
        phases = phase_bounds(deployment, UniformBatch(1, 200, 200), known)
        others = {name: float(row[f"{name}_s"]) if row[f"{name}_s"] else None for name in OTHERS}
        times = float(row["measured_s"]), latency_s(phases, ceiling=True), latency_s(phases)
        found.append(Cell(row["device"], row["model"], parallel.tp, *times, others))
    return found


def replayed(path: Path, known: Calibration | None = None) -> dict[str, float]:
    """Predicted over measured makespan, TPOT and TTFT of vLLM 0.19 on an RTX 4090, from its request log."""
    log = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    start_s = min(row["queued_ts"] for row in log)
    asked = [Asked(row["queued_ts"] - start_s, row["input_toks"], row["output_toks"]) for row in log]
    first, last, queued = (
        np.array([row[name] for row in log]) for name in ("first_token_ts", "last_token_ts", "queued_ts")
    )
    outputs = np.array([request.output_tok for request in asked])
    device = load_device("rtx4090")
    deployment = Deployment(load_model("llama-3.1-8b")[0], QUANTS["bf16"], Parallel(), device)
    known = known or with_host(load_calibration(device))
    result = simulate(asked, Limits(256, 2048, 41_408), Clock(deployment, known))
    return {
        "makespan": result.makespan_s / float(last.max() - start_s),
        "TPOT": float(result.tpot_s.mean() / ((last - first) / (outputs - 1)).mean()),
        "TTFT": float(result.ttft_s.mean() / (first - queued).mean()),
    }
