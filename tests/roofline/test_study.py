"""The study's findings, held to what they claim."""

import pytest

from burstline.roofline.predict.deployment import UniformBatch, latency_s
from burstline.roofline.predict.generations import dram_scaling, generations
from research.published import OTHERS, mean_error, published_runs

ASKED = UniformBatch(1, 200, 200)


def test_the_published_cells_are_never_faster_than_the_ceiling():
    runs = published_runs()
    assert len(runs) == 22
    assert all(run.ceiling_s < run.calibrated_s < run.hosted_s for run in runs)
    assert all(run.ceiling_s < run.measured_s for run in runs)


@pytest.mark.parametrize("device", ["a100-sxm4-80g", "h100-sxm5-80g"])
def test_one_launch_constant_for_both_devices_meets_the_published_latencies_within_eight_percent(device):
    runs = [run for run in published_runs() if run.device == device]
    for seconds in ([run.hosted_s for run in runs], [run.crossed_s for run in runs]):
        signed, absolute, n = mean_error(runs, seconds)
        assert n == 11
        assert absolute <= 0.08
        assert abs(signed) < 0.08


def test_other_models_errors_on_the_same_cells_are_the_known_ones():
    runs = [run for run in published_runs() if run.device == "a100-sxm4-80g"]
    errors = {name: mean_error(runs, [run.others_s[name] for run in runs])[1:] for name in OTHERS}
    assert {name: (round(error, 2), n) for name, (error, n) in errors.items()} == {
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
    fp16 = [latency_s(g.phases, "generic") for g in found if g.quant == "fp16"]
    assert fp16 == sorted(fp16, reverse=True)
    limits = {g.device.id: g.phases["prefill"].limit() for g in found if g.quant == "fp16"}
    assert limits["a100-sxm4-80g"] == "compute"
    assert limits["h100-sxm5-80g"] == "memory"
