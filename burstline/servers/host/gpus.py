"""The GPUs of this machine as sources of the watcher, through NVML or amdsmi."""

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from burstline.servers.host.sources import MissingSourceError, Source


class Gpu:
    """One NVIDIA GPU through NVML; `energy_j` counts from when the source is made."""

    def __init__(self, index: int) -> None:
        self.name = f"gpu{index}"
        self._nvml = _nvml()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        self._energy_base_j = 0.0
        self._energy_base_j = self.read().get("energy_j", 0.0)

    def read(self) -> Mapping[str, float]:
        nvml, handle = self._nvml, self._handle
        reads: dict[str, Callable[[], float]] = {
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "busy_fraction": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_busy_fraction": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory / 100,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "sm_clock_hz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
            "memory_clock_hz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM) * 1e6,
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000 - self._energy_base_j,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        }
        return _values(reads, nvml.NVMLError)


class AmdGpu:
    """One AMD GPU through amdsmi, by the names of `Gpu`; `energy_j` counts from when the source is made."""

    def __init__(self, index: int, amdsmi: Any, handle: Any) -> None:
        self.name = f"gpu{index}"
        self._amdsmi, self._handle = amdsmi, handle
        self._energy_base_j = 0.0
        self._energy_base_j = self.read().get("energy_j", 0.0)

    def read(self) -> Mapping[str, float]:
        smi, handle, mib = self._amdsmi, self._handle, 2**20
        reads: dict[str, Callable[[], float]] = {
            "memory_used_bytes": lambda: smi.amdsmi_get_gpu_vram_usage(handle)["vram_used"] * mib,
            "memory_total_bytes": lambda: smi.amdsmi_get_gpu_vram_usage(handle)["vram_total"] * mib,
            "busy_fraction": lambda: smi.amdsmi_get_gpu_activity(handle)["gfx_activity"] / 100,
            "memory_busy_fraction": lambda: smi.amdsmi_get_gpu_activity(handle)["umc_activity"] / 100,
            "power_w": lambda: smi.amdsmi_get_power_info(handle)["socket_power"],
            "energy_j": self._energy_j,
        }
        return _values(reads, smi.AmdSmiException)

    def _energy_j(self) -> float:
        count = self._amdsmi.amdsmi_get_energy_count(self._handle)
        return float(count["energy_accumulator"] * count["counter_resolution"] / 1e6 - self._energy_base_j)


def _values(reads: Mapping[str, Callable[[], float]], unsupported: type[Exception]) -> dict[str, float]:
    """The values that this model of GPU has. amdsmi reports some missing ones as the text "N/A"."""
    values = {}
    for name, read in reads.items():
        with contextlib.suppress(unsupported, KeyError, TypeError, ValueError):
            values[name] = float(read())
    return values


def gpus() -> list[Source]:
    """Every GPU that NVML or, without it, amdsmi reports; MissingSourceError if neither is available."""
    try:
        return [Gpu(index) for index in range(_nvml().nvmlDeviceGetCount())]
    except MissingSourceError as no_nvml:
        try:
            smi = importlib.import_module("amdsmi")
            smi.amdsmi_init()
            return [AmdGpu(index, smi, each) for index, each in enumerate(smi.amdsmi_get_processor_handles())]
        except Exception as error:  # of the import a KeyError too, where the package lacks its library
            raise MissingSourceError(f"{no_nvml}; no amdsmi: {error}") from error


def _nvml() -> Any:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise MissingSourceError(f"no NVML: {error}") from error
    return pynvml
