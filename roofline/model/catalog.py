"""Models by name: the bundled configs, or a folder or file with a config.json."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roofline.errors import RooflineError
from roofline.model.families import quant_of, read_config
from roofline.model.shapes import ModelShape, Quant

_FOLDER = Path(__file__).parent / "configs"


def bundled_models() -> list[str]:
    """The names of the bundled configs, in alphabetical order."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def bundled_config(name: str) -> dict[str, Any]:
    """A bundled model's config.json, parsed."""
    config: dict[str, Any] = json.loads((_FOLDER / f"{name}.json").read_text("utf-8"))
    return config


def load_model(name_or_path: str) -> tuple[ModelShape, Quant]:
    """A model's shape and how its checkpoint is stored; a bundled name wins over a path."""
    if name_or_path.lower() in bundled_models():
        return _read(_FOLDER / f"{name_or_path.lower()}.json", name_or_path.lower())
    path = Path(name_or_path)
    if path.is_dir():
        return _read(path / "config.json", path.resolve().name)
    if path.is_file():
        return _read(path, path.resolve().parent.name if path.name == "config.json" else path.stem)
    near = difflib.get_close_matches(name_or_path.lower(), bundled_models(), n=3, cutoff=0.4)
    raise RooflineError(
        f"unknown model {name_or_path!r}: neither a bundled one ({', '.join(near or bundled_models())})"
        " nor a folder or file with a config.json"
    )


def _read(path: Path, name: str) -> tuple[ModelShape, Quant]:
    if not path.is_file():
        raise RooflineError(f"no config.json in {path.parent}")
    try:
        config: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise RooflineError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise RooflineError(f"{path} holds no object, as a config.json does")
    return read_config(config, name), quant_of(config)
