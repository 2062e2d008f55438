"""Model folders with a file of our own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burstline.servers.messages import EngineError


def endless_copy(folder: Path, to: Path) -> tuple[Path, int]:
    """A new folder of links to a model in which no id that can be sampled ends a text, and the id that does.

    It is the first that the model has no logit for. The original is left as it is.
    """
    unused = _json(folder / "config.json").get("vocab_size")
    if not isinstance(unused, int):
        raise EngineError(f"{folder / 'config.json'} has no vocab_size; expected a number of token ids")
    config = _json(folder / "generation_config.json") | {"eos_token_id": [unused]}
    return linked_copy(folder, to, {"generation_config.json": json.dumps(config, indent=2)}), unused


def linked_copy(folder: Path, to: Path, files: Mapping[str, str]) -> Path:
    """A new folder of links to all that `folder` holds, but for `files`, which get these texts."""
    to.mkdir(parents=True)
    for entry in folder.resolve().iterdir():
        if entry.name not in files:
            (to / entry.name).symlink_to(entry)
    for name, text in files.items():
        (to / name).write_text(text, "utf-8")
    return to.resolve()


def _json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise EngineError(f"{path} cannot be read as JSON: {error}") from error
    return parsed if isinstance(parsed, dict) else {}
