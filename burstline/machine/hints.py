"""Facts about the hardware that only the user can state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

from burstline.workloads.options import given, option, options_of

DEVICE_FILE: Final = "device.toml"
"""In a run's folder: the device that it is compared with."""


@dataclass(frozen=True, slots=True)
class Stated:
    """Facts of the engine that a person states; None where they leave them open.

    Ranks count as 1 where another kind is stated. `quant` is a name of `QUANTS`.
    `draft_tokens` are proposed in each step by speculative decoding, 0 for none. `expert_share`: distinct
    experts that a batch touches, as a share of what uniform routing would touch.
    """

    tp: int | None = option("tensor-parallel size of the server", parse=int, metavar="N")
    pp: int | None = option("pipeline-parallel size of the server", parse=int, metavar="N")
    dp: int | None = option("data-parallel size of the server", parse=int, metavar="N")
    ep: int | None = option("expert-parallel size of the server", parse=int, metavar="N")
    quant: str | None = option("format of the server's weights: bf16, fp8, awq, nvfp4, ...", metavar="NAME")
    kv_dtype: str | None = option("data type of the server's KV cache: bf16, fp16, fp8, fp4", metavar="DTYPE")
    token_budget: int | None = option("most tokens the server computes in one step", parse=int, metavar="N")
    draft_tokens: int | None = option("speculative tokens per step; 0: none", parse=int, metavar="N")
    expert_share: float | None = option(
        "experts that a batch uses, relative to uniform routing (1)", parse=float, metavar="X"
    )

    @property
    def ranks(self) -> bool:
        return any(n is not None for n in (self.tp, self.pp, self.dp, self.ep))

    def to_json(self) -> dict[str, Any]:
        return {row.name: value for row, value in given(self)}

    @classmethod
    def from_json(cls, node: Mapping[str, Any]) -> Self:
        return cls(**{name: node[name] for name in options_of(cls) if name in node})


@dataclass(frozen=True, slots=True)
class Hints:
    """`device` is an id, a driver's name, a file of `burstline calibrate`, or "cpu": this machine's, as it
    was calibrated. `model_config` is a bundled model's name, or a folder or file with a config.json.
    """

    device: str | None = option("the server's device: a name, a device file, or cpu", metavar="NAME|FILE")
    model_config: str | None = option(
        "the server's model: a bundled name, or the path of its config.json", metavar="NAME|PATH"
    )
    stated: Stated = field(default_factory=Stated)
