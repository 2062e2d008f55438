"""What a person says about the hardware, beside what is found out, and the flags to say it by.

Imports nothing: every run holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import argparse

DEVICE_FILE: Final = "device.toml"
"""In a run's folder: the device that it is compared with."""


DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""What engines call their number formats, and we."""


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
    """`device` is an id, a driver's name, a file of `burstline calibrate`, or "cpu": this machine's, as it
    was calibrated. `model_config` is a bundled model's name, or a folder or file with a config.json.
    """

    device: str | None = None
    model_config: str | None = None
    stated: Stated = field(default_factory=Stated)


def add_hints(group: argparse._ActionsContainer) -> None:
    """What the roofline needs to know and cannot read from the server."""
    group.add_argument(
        "--device", metavar="NAME|FILE", help="what it runs on: a device's name, a device file, or cpu"
    )
    group.add_argument("--model-config", metavar="NAME|PATH", help="a bundled model, or where config.json is")
    for ranks, meaning in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data"), ("ep", "expert")):
        group.add_argument(
            f"--{ranks}", type=int, metavar="N", help=f"{meaning}-parallel ranks of the server"
        )
    group.add_argument(
        "--quant", metavar="NAME", help="how its weights are stored: bf16, fp8, awq, nvfp4, ..."
    )
    group.add_argument("--kv-dtype", metavar="DTYPE", help="of its KV cache: bf16, fp16, fp8, fp4")
    group.add_argument("--token-budget", type=int, metavar="N", help="new tokens that it computes in a step")
    group.add_argument("--draft-tokens", type=int, metavar="N", help="speculative decoding; 0: none")
    group.add_argument(
        "--expert-share", type=float, metavar="X", help="experts a batch touches, of uniform routing's (1)"
    )


def hints_of(args: argparse.Namespace) -> Hints:
    """What these flags say."""
    stated = Stated(
        args.tp,
        args.pp,
        args.dp,
        args.ep,
        args.quant,
        args.kv_dtype,
        args.token_budget,
        args.draft_tokens,
        args.expert_share,
    )
    return Hints(args.device, args.model_config, stated)


def add_cost(group: argparse._ActionsContainer) -> None:
    """What the hardware costs."""
    group.add_argument(
        "--usd-per-hour",
        type=float,
        metavar="USD",
        help="what the server's hardware costs: the report then shows the cost of a million output tokens",
    )
