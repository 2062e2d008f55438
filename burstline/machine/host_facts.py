"""What the manifest says about where and with what a run was made; secrets never."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from burstline import __version__

_LIBRARIES = ("httpx", "numpy", "pandas", "pyarrow", "matplotlib", "huggingface_hub", "zstandard", "orjson")


def facts() -> dict[str, Any]:
    """Versions, command line, machine and limits; what cannot be found out is None."""
    return {
        "version": __version__,
        "commit": _commit(),
        "argv": ["burstline", *sys.argv[1:]],
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "host": {
            "platform": platform.platform(),
            "cpu": _cpu_model(),
            "cores": psutil.cpu_count(logical=True),
            "cores_allowed": _cores_allowed(),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": list(os.getloadavg()),
            "open_files_limit": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
        },
        "devices": _devices(),
    }


def _commit() -> str | None:
    """Of our own sources, where they are a checkout; with a + where they have been changed."""
    here = Path(__file__).resolve().parent
    with suppress(OSError, subprocess.SubprocessError):
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
        return described.stdout.strip() or None
    return None


def _cpu_model() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _cores_allowed() -> int | None:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count()


def _devices() -> list[dict[str, Any]]:
    """Every GPU that NVML knows; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "driver": driver,
            }
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
