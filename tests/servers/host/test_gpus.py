import sys
from types import SimpleNamespace

import pynvml
import pytest

from burstline.loadgen.record.columns import columns_of
from burstline.loadgen.record.manifest import Manifest
from burstline.loadgen.record.summary import Summary
from burstline.loadgen.record.tables import record_table, telemetry_table
from burstline.loadgen.record.telemetry import Telemetry
from burstline.loadgen.record.verdict import State
from burstline.loadgen.summarize import summarize
from burstline.servers.host import gpus as module
from burstline.servers.host.gpus import Gpu, gpus
from burstline.servers.host.sources import MissingSourceError
from burstline.servers.host.telemetry import Row, rows_of
from tests.loadgen.making import ok


def test_a_machine_without_nvml_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_library)
    with pytest.raises(MissingSourceError, match="no NVML: "):
        gpus()


class FakeNvml:
    """NVML's functions for a GPU that cannot tell its energy."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=5 * 2**30, total=80 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: int, which: int) -> int:
        return {1: 1980, 2: 2619}[which]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetTemperature(self, handle: int, which: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 4


class Metered(FakeNvml):
    """One GPU that draws 100 W idle, 400 W from 2 s to 12 s of its own clock, when heat slows it for half."""

    at_s = 0.0

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        loaded_s = min(max(self.at_s - 2, 0), 10)
        return round(1e3 * (5e6 + 400 * loaded_s + 100 * (self.at_s - loaded_s)))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x20 if 5 < self.at_s < 10 else 0x1


def summary_of(rows: list[Row]) -> Summary:
    """Of 100 requests at once, each of 20 tokens, the last after 10 s."""
    records = columns_of(record_table([ok(k, 0.5, [0.5] * 19) for k in range(100)]))
    manifest = Manifest(engine="truth", workload="made")
    return summarize(records, manifest, telemetry=Telemetry.of(telemetry_table(rows)))


def test_energy_per_token_of_a_known_counter_is_right_and_heat_reaches_the_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = Metered()
    monkeypatch.setattr(module, "_nvml", lambda: nvml)
    (gpu,) = gpus()
    rows = []
    for at_ms in range(0, 14_001, 200):
        nvml.at_s = at_ms / 1000
        rows += rows_of(gpu.name, gpu.read(), (at_ms - 2000) * 1_000_000)
    found = summary_of(rows)
    n_tok, lasted_s = 2000, 10.0
    assert found.throughput.output_tok_per_s.point == pytest.approx(n_tok / lasted_s, rel=1e-3)
    assert found.cost.joules_per_output_tok.point == pytest.approx(400 * lasted_s / n_tok, rel=0.01)
    assert found.cost.device_idle_power_w.point == pytest.approx(100, rel=0.01)
    assert found.cost.joules_above_idle_per_output_tok.point == pytest.approx(1.5, rel=0.01)
    assert found.instrument.gpu_slowed_fraction.point == pytest.approx(0.48, abs=0.02)
    assert found.verdict.state == State.DISTURBED
    assert [reason.code for reason in found.verdict.reasons] == ["gpu-throttled"]


def test_the_power_limit_is_a_warning_alone() -> None:
    rows = [row for k in range(60) for row in rows_of("gpu0", {"throttle_reasons": 4.0}, k * 200_000_000)]
    found = summary_of(rows)
    assert found.verdict.state == State.VALID
    assert "power-cap" in [warning.code for warning in found.verdict.warnings]


class FakeAmdsmi:
    """amdsmi's functions for a GPU that reports no memory activity; keys and units of amdsmi 7.0.2."""

    joules = 100.0

    class AmdSmiException(Exception):
        pass

    def amdsmi_init(self) -> None:
        pass

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["a", "b"]

    def amdsmi_get_gpu_vram_usage(self, handle: str) -> dict[str, int]:
        return {"vram_total": 196_592, "vram_used": 1024}

    def amdsmi_get_gpu_activity(self, handle: str) -> dict[str, object]:
        return {"gfx_activity": 97, "umc_activity": "N/A", "mm_activity": 0}

    def amdsmi_get_power_info(self, handle: str) -> dict[str, object]:
        if handle == "b":
            raise self.AmdSmiException("not supported")
        return {"socket_power": 612, "power_limit": 750}

    def amdsmi_get_energy_count(self, handle: str) -> dict[str, float]:
        self.joules += 50
        return {"energy_accumulator": int(self.joules * 1e6 / 15.3), "counter_resolution": 15.3}


def no_nvml() -> None:
    raise MissingSourceError("no NVML: library not found")


def test_an_amd_gpu_is_read_through_amdsmi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_nvml", no_nvml)
    monkeypatch.setitem(sys.modules, "amdsmi", FakeAmdsmi())
    first, second = gpus()
    values = dict(first.read())
    assert values.pop("energy_j") == pytest.approx(100, rel=1e-6)  # another GPU was read in between
    assert values == {
        "memory_used_bytes": 2**30,
        "memory_total_bytes": 196_592 * 2**20,
        "busy_fraction": 0.97,
        "power_w": 612,
    }
    assert (second.name, "power_w" in second.read()) == ("gpu1", False)


def test_an_amd_gpu_that_cannot_be_opened_is_missing_with_both_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(FakeAmdsmi):
        def amdsmi_init(self) -> None:
            raise self.AmdSmiException("driver not loaded")

    monkeypatch.setattr(module, "_nvml", no_nvml)
    monkeypatch.setitem(sys.modules, "amdsmi", Broken())
    with pytest.raises(MissingSourceError, match=r"no NVML: .*; no amdsmi: driver not loaded"):
        gpus()


def test_each_gpu_is_a_source_and_what_it_cannot_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_nvml", FakeNvml)
    assert [gpu.name for gpu in gpus()] == ["gpu0", "gpu1"]
    assert Gpu(0).read() == {
        "memory_used_bytes": 5 * 2**30,
        "memory_total_bytes": 80 * 2**30,
        "busy_fraction": 0.97,
        "memory_busy_fraction": 0.4,
        "power_w": 700,
        "sm_clock_hz": 1980e6,
        "memory_clock_hz": 2619e6,
        "temperature_c": 61,
        "throttle_reasons": 4,
    }
