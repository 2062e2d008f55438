"""This machine's CPU as an engine computes on it: measured for one model, and kept for its next run.

What was measured while others used the machine counts for one run only, with their share as its spread.
"""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import orjson
import psutil

from burstline import __version__
from burstline.machine import host_facts
from burstline.machine.hints import DTYPES
from loadgen.record.files import write_bytes
from loadgen.record.manifest import Manifest
from roofline.device.calibration import load_calibration
from roofline.device.device import load_device
from roofline.errors import RooflineError
from servers.identity import CpuSetup, Identity
from servers.registry import ENGINES

MOST_OTHERS: Final = 0.05
"""The share of the machine that other processes may use while it is measured for later runs."""

Say = Callable[[str], None]


def cpu_of(manifest: Manifest, log: str, dtype: str, *, named: bool = False) -> CpuSetup | None:
    """How the engine computes on this machine's CPU; None where it does not, or nothing says so.

    A server that was started here on a machine without a GPU computes on the CPU, in the dtype that it
    states, else in the checkpoint's (`dtype`). So does an attached one where the user has `named` the CPU,
    on one core as far as is known.
    """
    server, engine = manifest.server, ENGINES.get(manifest.engine)
    identity = manifest.identity or Identity(manifest.engine)
    started = server is not None and not server.attached
    argv = (server.argv or ()) if server and started else ()
    if engine is not None and started and server and not server.image:
        setup = engine.cpu_setup(identity, argv, log)
        if setup is not None:
            return setup
    if not named and not (started and not manifest.devices):
        return None
    computes = DTYPES.get(str(identity.dtype), dtype)
    threads = len(os.sched_getaffinity(0)) if started and hasattr(os, "sched_getaffinity") else 1
    if computes not in ("bf16", "fp16"):
        return CpuSetup(threads, None, "fp32")
    return CpuSetup(threads, torch_python(argv), computes)


def torch_python(argv: Sequence[str]) -> str:
    """The interpreter of an engine's command, else the first of this one's that has torch.

    Raises RooflineError where none has: numpy computes in fp32 only.
    """
    for python in (*_interpreters(argv), sys.executable):
        if torch_version(python) is not None:
            return python
    raise RooflineError(
        "numpy cannot measure 16-bit products on this CPU, and no torch is at hand: run `burstline calibrate"
        " --python PATH` with the engine's interpreter, and pass the file it writes with --device"
    )


def _interpreters(argv: Sequence[str]) -> list[str]:
    """The command itself, or what a script's first line names."""
    if not argv:
        return []
    if Path(argv[0]).name.startswith("python"):
        return [argv[0]]
    with suppress(OSError):
        with Path(shutil.which(argv[0]) or argv[0]).open("rb") as script:
            first = script.readline().decode("utf-8", "replace")
        if first.startswith("#!") and "python" in first:
            return [first[2:].split()[0]]
    return []


@cache
def torch_version(python: str) -> str | None:
    """The version of torch that an interpreter has; None where it has none."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip() or None
    return None


def kept(cpu: CpuSetup, config: Mapping[str, Any]) -> str | None:
    """The device file of an earlier measurement; None where there is none."""
    path = _kept_at(cpu, config)
    return path.read_text("utf-8") if path.exists() else None


def measured(cpu: CpuSetup, config: Mapping[str, Any], say: Say) -> str:
    """The device file of a measurement made now, kept where the machine was quiet."""
    from burstline.machine.host_overhead import add_host
    from roofline.calibrate.calibrate import calibrate_pinned

    with_what = "torch" if cpu.torch_python else "numpy"
    say(
        f"Measuring this CPU for the roofline: this model's shapes by {with_what} on {cpu.threads} core(s), "
        "once, in about 20 s (--no-calibrate leaves it out)"
    )
    before = _CpuTime.now()
    with tempfile.TemporaryDirectory(prefix="burstline-") as name:
        config_file, out = Path(name, "config.json"), Path(name, "device.toml")
        config_file.write_bytes(orjson.dumps(config))
        calibrate_pinned(
            config_file, out, threads=cpu.threads, quick=True, torch_python=cpu.torch_python, dtype=cpu.dtype
        )
        if cpu.host and add_host(out, config, cpu.threads) is None:
            say("The engine's host was not measured: predictions leave its time out")
        others = before.others_until(_CpuTime.now())
        text = out.read_text("utf-8") if others <= MOST_OTHERS else _doubted(str(out), others)
    if others <= MOST_OTHERS:
        path = _kept_at(cpu, config)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, text.encode())
    else:
        say(f"Other processes used {others:.0%} of this machine meanwhile: measured for this run only")
    return text


def _doubted(path: str, others: float) -> str:
    """The file's device and calibration, said to be uncertain by the share that others used."""
    from roofline.calibrate.calibrate import device_toml

    device, calibration = load_device(path), load_calibration(path)
    return device_toml(
        replace(device, assurance=f"{device.assurance}, while others used {others:.0%} of the machine"),
        replace(calibration, measured_spread=(calibration.measured_spread or 0.0) + others),
    )


@dataclass(frozen=True, slots=True)
class _CpuTime:
    """CPU seconds so far: of the whole machine, of it busy, and of this process and its children."""

    all_s: float
    busy_s: float
    ours_s: float

    @classmethod
    def now(cls) -> _CpuTime:
        times = psutil.cpu_times()
        # Guests are in user time already.
        all_s = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        return cls(all_s, all_s - idle_s, sum(each.ru_utime + each.ru_stime for each in used))

    def others_until(self, later: _CpuTime) -> float:
        """The share of the machine that other processes used."""
        others_s = (later.busy_s - self.busy_s) - (later.ours_s - self.ours_s)
        return max(0.0, others_s / max(later.all_s - self.all_s, 1e-9))


def _kept_at(cpu: CpuSetup, config: Mapping[str, Any]) -> Path:
    """One file for a model, a way to compute, a version of torch, a machine and a version of ours."""
    from roofline.calibrate.calibrate import cached_file

    host = host_facts.host()
    library = torch_version(cpu.torch_python) if cpu.torch_python else None
    key = [config, cpu.torch_python, library, cpu.host, host.cpu, host.cores, host.memory_bytes, __version__]
    digest = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]
    kind = f"torch-{cpu.dtype}" if cpu.torch_python else "numpy"
    return cached_file(digest, f"cpu-{kind}", cpu.threads, quick=True)
