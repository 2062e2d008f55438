import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from burstline.bench.run_settings import gpu_facts
from burstline.machine.hardware import note_hardware
from burstline.machine.hints import Hints
from burstline.measure.record.columns import columns_of
from burstline.measure.record.manifest import GpuFacts, Manifest, ServerFacts
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.summary import Summary
from burstline.measure.record.tables import record_table, telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import State
from burstline.measure.summarize import summarize
from burstline.servers.host import gpus as module
from burstline.servers.host.gpus import gpus, serving_gpus, shadowing
from burstline.servers.host.serving import UNKNOWN, ServingProcesses
from burstline.servers.host.sources import MissingSourceError
from burstline.servers.host.telemetry import Row, rows_of
from tests.measure.making import ok


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
    assert values.pop("energy_j") == 0, "it counts from here"
    second.read()
    assert first.read()["energy_j"] == pytest.approx(100, rel=1e-6), "another GPU was read in between"
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
    assert gpus()[0].read() == {
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


class Node(FakeNvml):
    """Eight GPUs, ours at 100 W and the other seven at 700 W; `holders` are the processes on each."""

    titles = "NVIDIA H100 80GB HBM3"
    memory_bytes = 60 * 2**30

    def __init__(self, holders: dict[int, int], n: int = 8) -> None:
        self.holders, self.n = holders, n

    def nvmlDeviceGetCount(self) -> int:
        return self.n

    def nvmlDeviceGetName(self, handle: object) -> str:
        return self.titles

    def nvmlDeviceGetUUID(self, handle: object) -> str:
        return f"GPU-{handle}{handle}{handle}-0000"

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
        return SimpleNamespace(used=self.memory_bytes, total=80 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        return 100_000 if handle == 3 else 700_000

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid, index in self.holders.items() if index == handle]


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose CUDA_VISIBLE_DEVICES is 5 and a UUID."""
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "5,GPU-666"}
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, env=environ
    ) as process:
        while "CUDA_VISIBLE_DEVICES" not in psutil.Process(process.pid).environ():
            pass  # it is a copy of us still
        yield process


def at(process: subprocess.Popen[bytes]) -> ServingProcesses:
    return ServingProcesses(listening=frozenset([process.pid]), client_pid=os.getpid())


def serving(
    monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, found: ServingProcesses, named: str | None = None
) -> tuple[list[str], str]:
    monkeypatch.setattr(module, "_nvml", lambda: nvml)
    chosen, how = serving_gpus(found, named)
    return [each.name for each in chosen], how


def test_of_eight_gpus_the_one_that_holds_the_server_is_counted_with_its_energy_and_its_price(
    monkeypatch: pytest.MonkeyPatch, server: subprocess.Popen[bytes]
) -> None:
    others = {1_000_000_000 + index: index for index in range(8) if index != 3}
    nvml = Node(others | {server.pid: 3})
    monkeypatch.setattr(module, "_nvml", lambda: nvml)
    chosen, how = serving_gpus(at(server))
    assert ([each.name for each in chosen], how) == (["gpu3"], "they hold the server's processes")
    rows = [
        row
        for each in chosen
        for at_ms in range(0, 14_001, 200)
        for row in rows_of(each.name, each.read(), (at_ms - 2000) * 1_000_000)
    ]
    cost = summary_of(rows).cost
    assert cost.device_power_w.point == pytest.approx(100)
    assert cost.joules_per_output_tok.point == pytest.approx(0.5, rel=0.01), "1,000 J for 2,000 tokens"
    assert [gpu_facts(each).name for each in chosen] == [Node.titles]


def test_else_its_environment_or_the_option_names_them_and_else_there_is_none(
    monkeypatch: pytest.MonkeyPatch, server: subprocess.Popen[bytes]
) -> None:
    nvml = Node({1_000_000_000: 0})
    names, how = serving(monkeypatch, nvml, at(server))
    assert (names, how) == (["gpu5", "gpu6"], "the server's CUDA_VISIBLE_DEVICES is '5,GPU-666'")
    assert serving(monkeypatch, nvml, at(server), "0,GPU-777")[0] == ["gpu0", "gpu7"], "stated outweighs seen"
    assert serving(monkeypatch, nvml, UNKNOWN, "9") == ([], "--gpus")
    names, why = serving(monkeypatch, nvml, UNKNOWN)
    assert (names, UNKNOWN.unknown in why, "--gpus" in why) == ([], True, True)
    assert serving(monkeypatch, nvml, ServingProcesses(keeper_pid=server.pid))[1].startswith("the server has")


def test_a_server_that_is_on_no_gpu_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {name: value for name, value in os.environ.items() if name not in module.VISIBLE}
    argv = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        names, why = serving(monkeypatch, Node({1_000_000_000: 0}), at(process))
        assert (names, "none of the 8 GPUs" in why) == ([], True)
        alone = Node({}, n=1)
        assert serving(monkeypatch, alone, at(process))[0] == ["gpu0"], "memory of whom the driver hides"
        alone.memory_bytes = 2**20
        assert serving(monkeypatch, alone, at(process))[0] == [], "it is idle: the server is on the CPU"


class Sliced(Node):
    """An H100 in two slices, of which the second holds a process."""

    may_list = True

    def nvmlDeviceGetMigMode(self, handle: object) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: object) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: object, k: int) -> str:
        if k > 1 or not self.may_list:
            raise self.NVMLError("Not Found")
        return f"slice{k}"

    def nvmlDeviceGetName(self, handle: object) -> str:
        return f"{self.titles} MIG 3g.40gb" if isinstance(handle, str) else self.titles

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self.holders if handle == "slice1"]


def test_a_slice_is_no_whole_gpu(
    monkeypatch: pytest.MonkeyPatch, server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    nvml = Sliced({server.pid: 0}, n=1)
    monkeypatch.setattr(module, "_nvml", lambda: nvml)
    (only,), _ = serving_gpus(at(server))
    assert (only.name, only.is_slice, sorted(only.read())) == (
        "gpu0.1", True, ["memory_total_bytes", "memory_used_bytes"],
    )  # fmt: skip
    nvml.may_list = False
    (whole,) = gpus()
    assert (whole.name, whole.is_slice, "power_w" in whole.read()) == ("gpu0", True, False)
    facts = (gpu_facts(only),)
    manifest = Manifest(engine="openai", workload="made", devices=facts, server=ServerFacts(attached=False))
    run = RunDir.create(tmp_path, manifest)
    note_hardware(run, Hints(model_config="llama-3.1-8b"))
    assert run.manifest.hardware is not None
    assert "3g.40gb, a slice): name it with --device" in str(run.manifest.hardware.absent)


def test_one_reading_that_fails_hides_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unified(Node):
        """GB10: memory is the machine's. Of two GPUs the first is lost."""

        def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
            raise self.NVMLError("Not Supported")

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index == 0:
                raise self.NVMLError("GPU is lost")
            return index

    monkeypatch.setattr(module, "_nvml", lambda: Unified({}, n=2))
    (only,) = gpus()
    assert (only.name, gpu_facts(only)) == ("gpu1", GpuFacts(Node.titles))
    assert "memory_used_bytes" not in only.read()


def test_a_gpu_that_is_lost_in_the_load_has_no_energy_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_nvml", FakeNvml)
    first, second = gpus()
    rows = []
    for at_ms in range(0, 14_001, 200):
        if at_ms == 9000:
            second.reads = {"power_w": lambda: FakeNvml().nvmlDeviceGetTotalEnergyConsumption(0)}
        for each in (first, second):
            try:
                rows += rows_of(each.name, each.read(), (at_ms - 2000) * 1_000_000)
            except MissingSourceError as error:
                rows.append(Row((at_ms - 2000) * 1_000_000, each.name, "*", None, str(error)))
    cost = summary_of(rows).cost
    assert cost.device_power_w.reason == "gpu1 cannot be read: Not Supported"
    assert cost.joules_per_output_tok.reason == cost.device_power_w.reason


def test_the_old_package_that_hides_the_reader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shadowing() == ""
    monkeypatch.setattr(pynvml, "__file__", "/env/site-packages/pynvml/__init__.py")
    monkeypatch.setattr(
        module.metadata, "version", {"pynvml": "11.5.3", "nvidia-ml-py": "13.615.71"}.__getitem__
    )
    assert shadowing() == (
        "pynvml 11.5.3 (/env/site-packages/pynvml/__init__.py) hides nvidia-ml-py 13.615.71, and lacks newer "
        "GPUs: `pip uninstall pynvml`"
    )
