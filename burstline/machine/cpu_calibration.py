"""This machine's CPU as an engine computes on it: what `burstline calibrate` has measured for a model."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from burstline import __version__
from burstline.loadgen.record.manifest import Manifest
from burstline.machine import host_facts
from burstline.machine.hints import DTYPES
from burstline.roofline.device.calibration import cached_file
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.families import read_config
from burstline.servers.identity import CpuSetup, Identity
from burstline.servers.registry import ENGINES


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
    """The device file that `burstline calibrate` kept for this model and way to compute; None without one."""
    paths = (path_of(cpu, config, quick=quick) for quick in (False, True))
    return next((path.read_text("utf-8") for path in paths if path.exists()), None)


def path_of(cpu: CpuSetup, config: Mapping[str, Any], *, quick: bool) -> Path:
    """One file for a model's shape, a way to compute, a version of torch, a machine and a version of ours."""
    shape = replace(read_config(config, "model"), name="", dtype="", max_context=None)
    host = host_facts.host()
    library = torch_version(cpu.torch_python) if cpu.torch_python else None
    key = [asdict(shape), cpu.torch_python, library, host.cpu, host.cores, host.memory_bytes, __version__]
    digest = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS, default=str)).hexdigest()[:16]
    kind = f"torch-{cpu.dtype}" if cpu.torch_python else "numpy"
    return cached_file(digest, f"cpu-{kind}", cpu.threads, quick=quick)


def how_to_calibrate(cpu: CpuSetup, model: str) -> str:
    """The command that measures this CPU for a model, once."""
    words = ["burstline", "calibrate", "--device", "cpu", "--quick", "--model", model]
    words += ["--threads", str(cpu.threads)]
    if cpu.torch_python:
        words += ["--python", cpu.torch_python, "--dtype", cpu.dtype]
    return shlex.join(words)
