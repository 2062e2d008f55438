"""What a person says about the hardware, beside what is found out. Imports nothing: every run holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Stated:
    """Facts of the engine that a person states; None where they leave them open.

    Ranks count as 1 where another kind is stated. `quant` is a name of `roofline.model.shapes.QUANTS`.
    `draft_tokens` are proposed in each step by speculative decoding, 0 for none. `expert_share`: distinct
    experts that a batch touches, as a share of what uniform routing would touch.
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    quant: str | None = None
    kv_dtype: str | None = None
    token_budget: int | None = None
    draft_tokens: int | None = None
    expert_share: float | None = None

    @property
    def ranks(self) -> bool:
        """Whether any kind of rank is stated."""
        return any(n is not None for n in (self.tp, self.pp, self.dp, self.ep))

    def to_json(self) -> dict[str, Any]:
        return {slot.name: value for slot in fields(self) if (value := getattr(self, slot.name)) is not None}

    @classmethod
    def from_json(cls, node: Mapping[str, Any]) -> Stated:
        return cls(**{slot.name: node[slot.name] for slot in fields(cls) if slot.name in node})


@dataclass(frozen=True, slots=True)
class Hints:
    """`device` is an id, a driver's name, a file of `burstline calibrate`, or "cpu": this machine's, to be
    measured. `model_config` is a bundled model's name, or a folder or file with a config.json.
    """

    device: str | None = None
    model_config: str | None = None
    calibrate: bool = True
    stated: Stated = field(default_factory=Stated)
