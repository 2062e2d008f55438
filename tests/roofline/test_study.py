"""The study's findings, held to what they claim."""

import pytest

from burstline.roofline.predict.deployment import UniformBatch, latency_s
from burstline.roofline.predict.generations import dram_scaling, generations
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
            max(p.bound_s, key=lambda part: p.bound_s[part]) for p in dram_scaling("llama-2-13b", ASKED, tp)
        ]

    assert most(1) == ["DRAM"] * 5 + ["L2"]
    assert most(8) == ["DRAM"] * 3 + ["launches"] * 3


def test_the_parts_of_a_latency_sum_to_it_and_faster_memory_never_hurts():
    for tp in (1, 8):
        points = dram_scaling("llama-2-7b", ASKED, tp)
        latencies = [point.latency_s for point in points]
        assert latencies == sorted(latencies, reverse=True)
        assert all(sum(point.bound_s.values()) == pytest.approx(point.latency_s) for point in points)
        assert (points[0].bound_s["network"] > 0) == (tp > 1)


def test_each_generation_is_faster_and_one_without_fp8_says_so():
    found = generations("llama-2-13b", ASKED)
    assert [(g.device.id, g.quant) for g in found if g.impossible] == [("a100-sxm4-80g", "fp8")]
    fp16 = [latency_s(g.phases) for g in found if g.quant == "fp16"]
    assert fp16 == sorted(fp16, reverse=True)
    limits = {g.device.id: g.phases["prefill"].limit() for g in found if g.quant == "fp16"}
    assert limits["a100-sxm4-80g"] == "compute"
    assert limits["h100-sxm5-80g"] == "memory"
