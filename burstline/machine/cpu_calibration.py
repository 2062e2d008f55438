"""This machine's CPU as `burstline calibrate` measured it for a model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import orjson

from burstline import __version__
from burstline.errors import RooflineError, parse_toml
from burstline.machine import host_facts
from burstline.machine.hints import DEVICE_FILE
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.run_writer import RunDir
from burstline.roofline.device.calibration import (
    Calibration,
    Conditions,
    Constants,
    read_device_file,
)
from burstline.roofline.device.device import Device
from burstline.roofline.model.checkpoint import DTYPES
from burstline.roofline.model.families import read_config
from burstline.servers.host.control_group import usable_cores
from burstline.servers.identity import Identity
from burstline.servers.registry import ENGINES


def cache_folder() -> Path:
    """Where calibrations are kept, as device-*.toml."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burstline"


def cores_of(manifest: Manifest, dtype: str, *, named: bool = False) -> int | None:
    """On how many of this machine's cores the engine computed; None where it did not, or nothing says so.

    A server that was started here on a machine without a GPU computes on the CPU, in the dtype that it
    states, else in the checkpoint's (`dtype`). So does an attached one where the user has `named` the CPU,
    on one core as far as is known. Raises RooflineError for any dtype but fp32, which alone is measured.
    """
    server, engine = manifest.server, ENGINES.get(manifest.engine)
    identity = manifest.identity or Identity(manifest.engine)
    started = server is not None and not server.attached
    n_cores = engine.cores_of(identity) if engine is not None and started else None
    if n_cores is not None:
        return n_cores
    if not named and not (started and not manifest.devices):
        return None
    computes = DTYPES.get(str(identity.dtype), dtype)
    if computes in ("bf16", "fp16"):
        raise RooflineError(
            f"{computes} products on a CPU are not measured: pass a device file with --device"
        )
    if server is None or not started:
        return 1
    return server.n_cores or usable_cores()


def kept(n_cores: int, config: Mapping[str, Any], engine: str) -> str | None:
    """The device file that was kept for this model on so many cores; None without one.

    The one with the engine's own host, if there is one.
    """
    for path in _paths(n_cores, config, engine):
        try:
            data = path.read_bytes()
            device, calibration = read_device_file(data, path)
            if calibration.conditions and device.name.startswith(f"{host_facts.host().cpu}, "):
                return data.decode()
        except (OSError, RooflineError):
            continue
    return None


Kept = tuple[Device, Calibration, Conditions]


def read_kept(path: Path) -> Kept:
    """A kept calibration; RooflineError where it is damaged, or does not say how it was made."""
    device, calibration = read_device_file(path.read_bytes(), path)
    if calibration.conditions is None:
        raise RooflineError(f"{path} does not say when and beside what it was made")
    return device, calibration, calibration.conditions


def throw_away(run: RunDir) -> bool:
    """The calibration that the run exceeded, where it is still the one that is kept; whether it was."""
    if (hardware := run.manifest.hardware) is None:
        return False
    data = (run.path / DEVICE_FILE).read_bytes()
    n_cores = parse_toml(data, run.path / DEVICE_FILE).get("n_units") or 1
    paths = _paths(n_cores, hardware.model_config or {}, run.manifest.engine)
    exceeded = [path for path in paths if path.exists() and path.read_bytes() == data]
    for path in exceeded:
        path.unlink()
    return bool(exceeded)


def _paths(n_cores: int, config: Mapping[str, Any], engine: str) -> list[Path]:
    return [
        path_of(n_cores, config, quick=quick, engine=of) for of in (engine, None) for quick in (False, True)
    ]


def path_of(n_cores: int, config: Mapping[str, Any], *, quick: bool, engine: str | None = None) -> Path:
    """One file for a model's shape, a number of cores, a machine, a version of ours and its constants.

    Another for each engine whose host a run of it told.
    """
    shape = replace(read_config(config, "model"), name="", max_context=None)
    host = host_facts.host()
    constants = [slot.name for slot in fields(Constants)]
    key = [constants, asdict(shape), host.cpu, host.cores, host.memory_bytes, __version__]
    digest = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS, default=str)).hexdigest()[:16]
    return cached_file(digest, f"cpu-{engine}" if engine else "cpu", n_cores, quick=quick)


def cached_file(of: str, device: str, n_cores: int, *, quick: bool) -> Path:
    """Where the calibration of a device is kept, `of` the shape or the model that it was measured with."""
    kind = "quick" if quick else "full"
    return cache_folder() / f"device-{Path(of).name}-{device.replace(':', '')}-{n_cores}-{kind}.toml"
