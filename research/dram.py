"""`python -m research.dram`: one A100 whose memory alone changes, as arXiv 2407.14645 asks.

What comes from DRAM crosses the L2 too, so the slower of the two sets the pace. Shared constants.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace

from burstline.reports.formats.text import columns
from burstline.roofline.device.calibration import shared, with_host
from burstline.roofline.device.device import Level, load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.answer import UniformBatch, phase_bounds
from burstline.roofline.predict.predict import Deployment, StepTimes

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


def dram_scaling(model: str, batch: UniformBatch, tp: int) -> dict[str, dict[str, float]]:
    """By technology the seconds of a request that each resource binds; they sum to its latency."""
    a100 = load_device("a100-sxm4-80g")
    by_technology = {}
    for technology, bytes_per_s in DRAM_BYTES_PER_S.items():
        name = "DRAM" if bytes_per_s <= _A100_L2_BYTES_PER_S else "L2"
        slower = Level(name, a100.memory.capacity_bytes, min(bytes_per_s, _A100_L2_BYTES_PER_S))
        device = replace(a100, levels=(slower,))
        deployment = Deployment(load_model(model)[0], QUANTS["fp16"], Parallel(tp=tp), device)
        by_technology[technology] = _parts(phase_bounds(deployment, batch, with_host(shared())))
    return by_technology


def _parts(phases: Mapping[str, StepTimes]) -> dict[str, float]:
    parts = dict.fromkeys(("compute", "DRAM", "L2", "network", "launches", "host"), 0.0)
    for phase in phases.values():
        parts["host"] += phase.n_steps * phase.host_s
        for each in phase.predictions:
            rest = {"communication": "network", "compute": "compute"}.get(each.bound.limit, each.bound.level)
            floor_s = 0.0 if rest == "network" else each.floor_s
            parts["launches"] += phase.n_steps * floor_s
            parts[rest] += phase.n_steps * (each.seconds - floor_s)
    return parts


def main() -> int:
    for tp in (1, 8):
        by_technology = dram_scaling("llama-2-13b", UniformBatch(1, 200, 200), tp)
        parts = next(iter(by_technology.values()))
        rows = [["memory", "GB/s", "latency s", *parts]]
        for technology, seconds in by_technology.items():
            latency_s = sum(seconds.values())
            shares = [f"{seconds[part] / latency_s:.0%}" for part in parts]
            rows.append(
                [technology, f"{DRAM_BYTES_PER_S[technology] / 1e9:,.0f}", f"{latency_s:.3f}", *shares]
            )
        print(f"Llama-2-13B, batch 1, 200 in, 200 out, fp16, tp {tp}\n{columns(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
