"""What a person says of the hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hints:
    """`device` is an id, a driver's name, a file of `burstline calibrate`, or "cpu": this machine's, to be
    measured. `model_config` is a bundled model's name, or a folder or file with a config.json.
    """

    device: str | None = None
    model_config: str | None = None
    calibrate: bool = True
