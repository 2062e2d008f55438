"""The GPUs of this machine as sources of the watcher, through NVML or amdsmi, and which of them serve."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any, Final

import psutil
import pynvml

from burstline.servers.host.serving import ServingProcesses
from burstline.servers.host.sources import MissingSourceError

VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
LEAST_HELD_BYTES: Final = 2**30
"""A GPU that holds less may be idle."""
_HOLDERS: Final = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses")


@dataclass(eq=False)
class Gpu:
    """A GPU, or a slice of one: NVIDIA's MIG, a partition of AMD's. `energy_j` counts from the first reading.

    `pids` are the processes that hold memory on it, as far as the driver tells.
    """

    name: str
    index: int
    title: str
    uuid: str
    driver: str | None
    is_slice: bool
    pids: Callable[[], set[int]]
    reads: Mapping[str, Callable[[], float]]
    _energy_base_j: float | None = None

    def read(self) -> Mapping[str, float]:
        """What this model tells. MissingSourceError where that is nothing: it is lost, or may not be read."""
        values, why = dict[str, float](), ""
        for name, read in self.reads.items():
            if self.is_slice and name not in ("memory_used_bytes", "memory_total_bytes"):
                continue  # power, energy and clocks are those of the whole GPU
            try:
                values[name] = float(read())
            except Exception as error:  # of NVML, of amdsmi; a missing key, or the text "N/A"
                why = str(error)
        if not values:
            raise MissingSourceError(f"{self.name} cannot be read: {why}")
        if "energy_j" in values:
            if self._energy_base_j is None:
                self._energy_base_j = values["energy_j"]
            values["energy_j"] -= self._energy_base_j
        return values

    def value(self, name: str) -> float | None:
        with suppress(MissingSourceError):
            return self.read().get(name)
        return None


def gpus() -> Sequence[Gpu]:
    """Every GPU and slice that NVML or, without it, amdsmi reports; MissingSourceError if neither is there.

    What one of them does not tell hides none.
    """
    try:
        nvml = _nvml()
    except MissingSourceError as no_nvml:
        try:
            with redirect_stdout(StringIO()):  # amdsmi prints where it lacks its library
                smi = importlib.import_module("amdsmi")
            smi.amdsmi_init()
            return [_amd(smi, index, each) for index, each in enumerate(smi.amdsmi_get_processor_handles())]
        except Exception as error:  # of the import a KeyError too, where the package lacks its library
            raise MissingSourceError(f"{no_nvml}; no amdsmi: {error}") from error
    found: list[Gpu] = []
    for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
        with suppress(nvml.NVMLError):  # it was lost
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            is_sliced = (_ask(nvml, "nvmlDeviceGetMigMode", handle) or [0])[0] == 1
            many = _ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or 0 if is_sliced else 0
            slices = [_ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, k) for k in range(many)]
            names = {f"gpu{index}.{k}": each for k, each in enumerate(slices) if each is not None}
            for name, each in (names or {f"gpu{index}": handle}).items():
                found.append(_nvidia(nvml, index, each, name, is_slice=is_sliced))
    return found


def _ask(library: Any, name: str, *arguments: object) -> Any:
    """What a function of the library returns; None where it has none of this name, or refuses."""
    with suppress(Exception):
        return getattr(library, name)(*arguments)
    return None


def _nvml() -> Any:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MissingSourceError(f"no NVML: {error}") from error
    return pynvml


def _nvidia(nvml: Any, index: int, handle: Any, name: str, *, is_slice: bool) -> Gpu:
    return Gpu(
        name,
        index,
        str(_ask(nvml, "nvmlDeviceGetName", handle) or "NVIDIA GPU"),
        str(_ask(nvml, "nvmlDeviceGetUUID", handle)),
        _ask(nvml, "nvmlSystemGetDriverVersion"),
        is_slice,
        lambda: {process.pid for holder in _HOLDERS for process in _ask(nvml, holder, handle) or ()},
        {
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "busy_fraction": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_busy_fraction": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory / 100,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "sm_clock_hz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
            "memory_clock_hz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6,
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        },
    )


def _amd(smi: Any, index: int, handle: Any) -> Gpu:
    def energy_j() -> float:
        count = smi.amdsmi_get_energy_count(handle)
        return float(count["energy_accumulator"] * count["counter_resolution"] / 1e6)

    return Gpu(
        f"gpu{index}",
        index,
        str((_ask(smi, "amdsmi_get_gpu_asic_info", handle) or {}).get("market_name", "AMD GPU")),
        str(_ask(smi, "amdsmi_get_gpu_device_uuid", handle)),
        None,
        _ask(smi, "amdsmi_get_gpu_compute_partition", handle) not in (None, "SPX", "N/A"),
        lambda: {each["pid"] for each in _ask(smi, "amdsmi_get_gpu_process_list", handle) or ()},
        {
            "memory_used_bytes": lambda: smi.amdsmi_get_gpu_vram_usage(handle)["vram_used"] * 2**20,
            "memory_total_bytes": lambda: smi.amdsmi_get_gpu_vram_usage(handle)["vram_total"] * 2**20,
            "busy_fraction": lambda: smi.amdsmi_get_gpu_activity(handle)["gfx_activity"] / 100,
            "memory_busy_fraction": lambda: smi.amdsmi_get_gpu_activity(handle)["umc_activity"] / 100,
            "power_w": lambda: smi.amdsmi_get_power_info(handle)["socket_power"],
            "energy_j": energy_j,
        },
    )


def serving_gpus(server: ServingProcesses, named: str | None = None) -> tuple[Sequence[Gpu], str]:
    """The GPUs that serve and how that is known, or none and why.

    Those that are `named`, by index or UUID; else those that hold the server's processes; else those that
    its environment makes visible; else the only one, where it holds memory for processes that the driver
    hides.
    """
    try:
        found = gpus()
    except MissingSourceError as why:
        return [], str(why)
    pids, many = server.pids(), f"{len(found)} GPU{'s' * (len(found) != 1)} of this machine"
    if named is not None:
        return _chosen(found, named), "--gpus"
    if not pids:
        return [], f"{server.unknown or 'the server has ended'}; name its own of the {many} with --gpus"
    if holding := [each for each in found if each.pids() & pids]:
        return holding, "they hold the server's processes"
    visible = dict[str, str]()
    for pid in pids:
        with suppress(psutil.Error):
            environ = psutil.Process(pid).environ()
            visible |= {environ[name]: name for name in VISIBLE if name in environ}
    if visible:
        text = ",".join(visible)
        return _chosen(found, text), f"the server's {next(iter(visible.values()))} is {text!r}"
    held_bytes = found[0].value("memory_used_bytes") if len(found) == 1 and not found[0].pids() else None
    if (held_bytes or 0.0) >= LEAST_HELD_BYTES:
        return found, "it is the only one here"
    return [], f"none of the {many} is seen to hold a process of the server; name its own with --gpus"


def _chosen(found: Sequence[Gpu], text: str) -> Sequence[Gpu]:
    """Those in a list such as `0,GPU-8932f937`; a UUID may be cut."""
    keys = [key.strip() for key in text.split(",")]
    by_uuid = tuple(key for key in keys if len(key) > len("GPU-"))
    return [each for each in found if str(each.index) in keys or each.uuid.startswith(by_uuid)]


def shadowing() -> str:
    """That the old package pynvml is read in place of nvidia-ml-py, whose file has its name; "" where not."""
    path = Path(pynvml.__file__ or "")
    if path.name != "__init__.py":  # nvidia-ml-py is a file, the old package a folder, which Python prefers
        return ""
    old, new = (_ask(metadata, "version", name) for name in ("pynvml", "nvidia-ml-py"))
    return f"pynvml {old} ({path}) hides nvidia-ml-py {new}, and lacks newer GPUs: `pip uninstall pynvml`"
