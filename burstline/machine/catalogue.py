"""Models and devices by name: bundled, of a file, or kept on this machine."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import huggingface_hub
import orjson
from huggingface_hub import constants

from burstline import __version__
from burstline.errors import RooflineError, read_toml
from burstline.roofline.device.calibration import (
    Calibration,
    Conditions,
    Constants,
    device_toml,
    load_calibration,
    read_calibration,
    read_device_file,
)
from burstline.roofline.device.device import Device, cpu_model, load_device
from burstline.roofline.model.checkpoint import config_file
from burstline.roofline.model.families import bundled_config, bundled_models, read_config


def config_at(name: str) -> dict[str, Any]:
    """The config of a bundled model, a folder, a file, a GGUF file's folder, or Hugging Face's cache."""
    if name.lower() in bundled_models():
        return bundled_config(name.lower())
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".gguf":  # a GGUF file is gigabytes: its folder has the config
        path = (path if path.is_dir() else path.parent) / "config.json"
    found = path if path.is_file() else cached_config(name)
    if found is None:
        known = ", ".join(bundled_models())
        raise RooflineError(f"no config.json at {name!r}, nor is it a bundled model ({known})")
    return config_file(found)


def cached_config(name: str) -> Path | None:
    """The config.json of a model in Hugging Face's cache; None where it has none of that name."""
    if not Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}").is_dir():
        return None
    try:
        found = huggingface_hub.try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of a model
        return None
    return Path(found) if isinstance(found, str) else None


def device_text(name: str, config: Mapping[str, Any] | None = None) -> str:
    """The device file of a device by name, of a user's file, or of `cpu`, measured for `config`'s model."""
    if name == "cpu" and config is not None:
        found = (kept(n, config, "reference") for n in range(os.cpu_count() or 1, 0, -1))
        if (text := next(filter(None, found), None)) is None:
            raise RooflineError("--device cpu is not calibrated for this model: `burstline calibrate`")
        return text
    calibration = load_calibration(device := load_device(name))
    if name.endswith(".toml"):
        with suppress(RooflineError, LookupError):  # a device file without measurements
            calibration = read_calibration(read_toml(Path(name))["calibration"], name)
    return device_toml(device, calibration)


def kept(n_cores: int, config: Mapping[str, Any], engine: str) -> str | None:
    """The device file that was kept for this model on so many cores; None without one.

    The one with the engine's own host, if there is one.
    """
    for path in kept_paths(n_cores, config, engine):
        try:
            data = path.read_bytes()
            device, calibration = read_device_file(data, path)
            if calibration.conditions and device.name.startswith(f"{cpu_model()}, "):
                return data.decode()
        except (OSError, RooflineError):
            continue
    return None


def read_kept(path: Path) -> tuple[Device, Calibration, Conditions]:
    """A kept calibration; RooflineError where it is damaged, or does not say how it was made."""
    device, calibration = read_device_file(path.read_bytes(), path)
    if calibration.conditions is None:
        raise RooflineError(f"{path} does not say when and beside what it was made")
    return device, calibration, calibration.conditions


def kept_paths(n_cores: int, config: Mapping[str, Any], engine: str) -> list[Path]:
    return [
        path_of(n_cores, config, quick=quick, engine=of) for of in (engine, None) for quick in (False, True)
    ]


def path_of(n_cores: int, config: Mapping[str, Any], *, quick: bool, engine: str | None = None) -> Path:
    """One file for a model's shape, a number of cores, a machine, a version of ours and its constants.

    Another for each engine whose host a run of it told.
    """
    shape = replace(read_config(config, "model"), name="", max_context=None)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    constants = [slot.name for slot in fields(Constants)]
    key = [constants, asdict(shape), cpu_model(), os.cpu_count(), memory_bytes, __version__]
    digest = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS, default=str)).hexdigest()[:16]
    return cached_file(digest, f"cpu-{engine}" if engine else "cpu", n_cores, quick=quick)


def cached_file(of: str, device: str, n_cores: int, *, quick: bool) -> Path:
    """Where the calibration of a device is kept, `of` the shape or the model that it was measured with."""
    kind = "quick" if quick else "full"
    return cache_folder() / f"device-{Path(of).name}-{device.replace(':', '')}-{n_cores}-{kind}.toml"


def cache_folder() -> Path:
    """Where calibrations are kept, as device-*.toml."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burstline"
