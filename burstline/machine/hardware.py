"""On what a run ran: its model's config and its device, found out once and kept in the run's folder.

The device is the one that was named, else what the driver calls it, else this machine's CPU, measured for
the model after the load has ended and the server is gone (`burstline/machine/cpu_calibration.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from burstline.bench.hints import Hints
from burstline.machine.cpu_calibration import Say, cpu_of, kept, measured
from loadgen.record.files import write_bytes
from loadgen.record.rundir import RunDir, open_run
from roofline.calibrate.calibrate import device_toml
from roofline.device.calibration import load_calibration
from roofline.device.device import load_device
from roofline.errors import RooflineError
from roofline.model.catalog import bundled_config, bundled_models
from servers.engine import CpuSetup, Identity
from servers.registry import ENGINES

DEVICE_FILE: Final = "device.toml"
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


class UnknownHardwareError(Exception):
    """Why something about the hardware is not known, and which flag helps."""


def check_hints(hints: Hints) -> None:
    """A device or a model that does not exist is the user's slip, and found before anything is started."""
    if hints.device not in (None, "cpu"):
        load_device(str(hints.device))
    if hints.model_config is not None:
        _config_at(hints.model_config)


def note_hardware(run: RunDir, hints: Hints, say: Say) -> None:
    """Write the manifest's `hardware`, and `device.toml` where the device is known.

    `hardware` holds `model_config` and `model_from`, and `device_from` or why something is `absent`.
    """
    manifest = open_run(run.path).manifest
    facts: dict[str, Any] = {}
    try:
        facts |= _model(manifest, hints)
        known_by = (manifest.get("hardware") or {}).get("device_from")
        if hints.device is None and known_by and (run.path / DEVICE_FILE).exists():
            facts["device_from"] = known_by  # only the model was named anew
        else:
            text, facts["device_from"] = _device(manifest, facts["model_config"], hints, run.server_log, say)
            write_bytes(run.path / DEVICE_FILE, text.encode())
    except (UnknownHardwareError, RooflineError) as why:
        facts["absent"] = str(why)
    run.update(hardware=facts)


def _model(manifest: Mapping[str, Any], hints: Hints) -> dict[str, Any]:
    """The model's config.json and where it was found."""
    earlier, server = manifest.get("hardware") or {}, manifest.get("server") or {}
    identity = manifest.get("identity") or {}
    if hints.model_config is not None:
        return {
            "model_config": _config_at(hints.model_config),
            "model_from": f"--model-config {hints.model_config}",
        }
    if "model_config" in earlier:
        return {name: earlier[name] for name in ("model_config", "model_from")}
    engine = ENGINES.get(str(manifest.get("engine")))
    own = engine.model_config(Identity(**{"engine": engine.name, **identity})) if engine else None
    if own is not None:
        return {"model_config": dict(own), "model_from": "the engine"}
    names = [name for name in (server.get("model_asked"), identity.get("model"), server.get("model")) if name]
    for name in names:
        try:
            return {"model_config": _config_at(name), "model_from": name}
        except RooflineError:
            continue
    said = f"no config.json of {names[0]!r}" if names else "no model's name"
    raise UnknownHardwareError(f"{said} is at hand: name its folder or a bundled model with --model-config")


def _config_at(name: str) -> dict[str, Any]:
    """The config of a bundled model, a folder, a file, or a repository that Hugging Face's cache holds."""
    if name.lower() in bundled_models():
        return bundled_config(name.lower())
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        path = _in_hub_cache(name) or path
    try:
        config = orjson.loads(path.read_bytes())
    except OSError:
        known = ", ".join(bundled_models())
        raise RooflineError(f"no config.json at {name!r}, nor is it a bundled model ({known})") from None
    except orjson.JSONDecodeError as error:
        raise RooflineError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise RooflineError(f"{path} holds no object, as a config.json does")
    return config


def _in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _device(
    manifest: Mapping[str, Any], config: Mapping[str, Any], hints: Hints, log: Path, say: Say
) -> tuple[str, str]:
    """The text of the device's file, and how the device is known."""
    if hints.device not in (None, "cpu"):
        return _file_of(str(hints.device)), f"--device {hints.device}"
    cpu = cpu_of(manifest, log.read_text("utf-8", errors="replace") if log.exists() else "")
    if hints.device == "cpu" and cpu is None:
        cpu = CpuSetup(1, None, "fp32")
    if cpu is not None:
        text = kept(cpu, config)
        if text is None and not hints.calibrate:
            raise UnknownHardwareError(
                "this CPU has not been measured for this model: leave out --no-calibrate"
            )
        return text or measured(cpu, config, say), "having been measured for this model"
    server = manifest.get("server") or {}
    if server.get("attached") and urlsplit(str(server.get("url"))).hostname not in LOOPBACK:
        raise UnknownHardwareError(
            f"nobody says which device is behind {server.get('url')}: name it with --device"
        )
    names = list(dict.fromkeys(device["name"] for device in manifest.get("devices") or ()))
    if len(names) != 1:
        seen = f"NVML sees {' and '.join(names)}" if names else "NVML sees no GPU"
        raise UnknownHardwareError(
            f"the device is not known, for {seen}: name it with --device (an id, or cpu)"
        )
    return _file_of(names[0]), f"NVML calls it {names[0]}"


def _file_of(name: str) -> str:
    """The device and the best calibration there is for it; a file of the user's own as it stands."""
    device = load_device(name)
    try:
        calibration = load_calibration(name if name.endswith(".toml") else device)
    except RooflineError:  # a device file without measurements
        calibration = load_calibration(device)
    return device_toml(device, calibration)
