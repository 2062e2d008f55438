"""The JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burstline.workloads.request import WorkloadError


def read_json(path: Path) -> dict[str, Any]:
    """The file's JSON object, empty where there is no such file; WorkloadError for anything else."""
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise WorkloadError(f"{path}: expected a JSON object, found {type(parsed).__name__}")
    return parsed
