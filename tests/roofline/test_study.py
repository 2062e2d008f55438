"""The study's findings, held to what they claim."""

import pytest

from burstline.roofline.device.calibration import load_calibration, with_host
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.answer import UniformBatch, latency_s, phase_bounds
from burstline.roofline.predict.predict import Deployment
from burstline.verbs.bound import GENERATIONS
from research.dram import dram_scaling
from research.published import OTHERS, cells

ASKED = UniformBatch(1, 200, 200)


def errors(device, predicted):
    found = [cell for cell in cells() if cell.device == device and predicted(cell) is not None]
    return [predicted(cell) / cell.measured_s - 1 for cell in found]


def test_the_published_cells_are_never_faster_than_the_ceiling():
    found = cells()
    assert len(found) == 22
    assert all(cell.ceiling_s < min(cell.predicted_s, cell.measured_s) for cell in found)


@pytest.mark.parametrize("device", ["a100-sxm4-80g", "h100-sxm5-80g"])
def test_the_published_latencies_are_met_within_eight_percent(device):
    of = errors(device, lambda cell: cell.predicted_s)
    assert len(of) == 11
    assert sum(map(abs, of)) / len(of) <= 0.08
    assert abs(sum(of) / len(of)) < 0.05


def test_other_models_errors_on_the_same_cells_are_the_known_ones():
    found = {name: errors("a100-sxm4-80g", lambda cell, n=name: cell.others_s[n]) for name in OTHERS}
    assert {name: (round(sum(map(abs, of)) / len(of), 2), len(of)) for name, of in found.items()} == {
        "genz": (0.30, 11),
        "llmcompass": (0.70, 11),
        "vidur": (0.12, 5),
    }


def test_faster_dram_gives_way_to_the_cache_on_one_device_and_to_launches_on_eight():
    def most(tp: int) -> list[str]:
        return [
            max(parts, key=parts.__getitem__) for parts in dram_scaling("llama-2-13b", ASKED, tp).values()
        ]

    assert most(1) == ["DRAM"] * 5 + ["L2"]
    assert most(8) == ["DRAM"] * 3 + ["launches"] * 3


def test_faster_memory_never_hurts():
    for tp in (1, 8):
        by_technology = dram_scaling("llama-2-7b", ASKED, tp)
        latencies = [sum(parts.values()) for parts in by_technology.values()]
        assert latencies == sorted(latencies, reverse=True)
        assert (by_technology["GDDR6"]["network"] > 0) == (tp > 1)


def test_each_generation_is_faster():
    devices = {name: load_device(name) for name in GENERATIONS}
    phases = {
        name: phase_bounds(
            Deployment(load_model("llama-2-13b")[0], QUANTS["fp16"], Parallel(), device),
            ASKED,
            with_host(load_calibration(device)),
        )
        for name, device in devices.items()
    }
    latencies = [latency_s(of) for of in phases.values()]
    assert latencies == sorted(latencies, reverse=True)
    assert phases["a100-sxm4-80g"]["prefill"].limit == "compute"
    assert phases["h100-sxm5-80g"]["prefill"].limit == "memory"
