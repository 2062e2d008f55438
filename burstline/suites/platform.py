"""A platform of a suite: which nodes of a cluster its runs go to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from burstline.servers.settings import SETTINGS, Settings
from burstline.suites.toml_table import TomlTable
from burstline.workloads.request import WorkloadError


@dataclass(frozen=True, slots=True, eq=False)
class Platform:
    """Where runs go: Ray resources, or an accelerator type, and the environment of the command there.

    `device` is the roofline's name of its GPUs. `models` are settings of models there, before the models'
    own: what takes one GPU here takes two where a GPU has half of the memory.
    """

    name: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)
    accelerator: str | None = None
    gpus: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    device: str | None = None
    models: Mapping[str, Settings] = field(default_factory=dict)

    def ray_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": self.gpus, "resources": dict(self.resources)}
        if self.accelerator:
            options["accelerator_type"] = self.accelerator
        if self.image:
            options["runtime_env"] = {"image_uri": self.image}
        return options

    def __str__(self) -> str:
        needs = [f"{name} {amount:g}" for name, amount in self.resources.items()]
        needs += [self.accelerator] if self.accelerator else []
        needs += [f"{self.gpus:g} GPU"] if self.gpus else []
        return ", ".join(needs) or "any node"


def platform_of(table: TomlTable) -> Platform:
    """A [[platform]] table of a suite."""
    table.only("name", "resources", "accelerator", "gpus", "env", "image", "device", "models")
    name = table.need("name", str)
    amounts = _mapping(table, "resources", float)
    bad = next((key for key, amount in amounts.items() if amount <= 0), None)
    if bad is not None:
        raise WorkloadError(f"{table.where}: resources.{bad} must be above 0")
    return Platform(
        name=name,
        resources=amounts,
        accelerator=table.get("accelerator", str, None),
        gpus=float(table.get("gpus", float, 0.0)),
        env=_mapping(table, "env", str),
        image=table.get("image", str, None),
        device=table.get("device", str, None),
        models=dict(_models(table)),
    )


def _models(table: TomlTable) -> Iterator[tuple[str, Settings]]:
    for name, raw in _mapping(table, "models", dict).items():
        inner = TomlTable(raw, f"{table.where}, models.{name}")
        inner.only(*SETTINGS)
        yield name, Settings(**inner.options(Settings))


def _mapping(table: TomlTable, key: str, kind: type) -> dict[str, Any]:
    raw = table.raw.get(key, {})
    if not isinstance(raw, dict):
        raise WorkloadError(f"{table.where}: {key} must be a table, e.g. {key} = {{ a100 = 1 }}")
    inner = TomlTable(raw, f"{table.where}, {key}")
    return {name: inner.get(name, kind, None) for name in raw}
