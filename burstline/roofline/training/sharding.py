"""How a replica's weights, gradients and optimizer states are divided among data-parallel ranks.

DDP, ZeRO 1 to 3 (arXiv 1910.02054), ZeRO++ (arXiv 2306.10209) and the three-level scheme of arXiv 2501.04266
are values of one class; what they send and what they keep follows from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from burstline.errors import RooflineError
from burstline.roofline.device.collectives import collective_s
from burstline.roofline.device.device import Link

When = Literal["forward", "backward", "step"]


@dataclass(frozen=True, slots=True)
class State:
    """One kind of state: `bytes_` for each parameter, divided among `degree` neighbouring ranks."""

    bytes_: float
    degree: int = 1

    @property
    def kept_bytes(self) -> float:
        """Bytes for each parameter that one rank keeps."""
        return self.bytes_ / self.degree


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective over `n_ranks` ranks that lie `stride` ranks apart.

    `bytes_` is the whole buffer for each parameter of the model: each rank sends (n - 1) / n of it.
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    when: When
    bytes_: float
    n_ranks: int
    stride: int = 1

    def seconds(self, n_params: float, links: tuple[Link, ...], n_messages: int, *, flat: bool) -> float:
        """In `n_messages` equal parts; `flat`: one ring over all ranks, at the rate of the slowest link."""
        apart = tuple(replace(link, n_devices=max(1, link.n_devices // self.stride)) for link in links)
        kind = "all_reduce" if self.kind == "all_reduce" else "all_gather"  # a reduce-scatter is its mirror
        message = self.bytes_ * n_params / n_messages
        one_s, _ = collective_s(kind, message, self.n_ranks, apart, "flat" if flat else "ring")
        return n_messages * one_s


@dataclass(frozen=True, slots=True)
class Sharding:
    """Degrees nest: `weights` divides `gradients`, `gradients` divides `optimizer`, that one `n_ranks`.

    `secondary`: ranks among which a second copy of the weights is divided for the backward pass (ZeRO++'s
    hpZ). `gather_bytes`, `reduce_bytes`: what a weight and a gradient take on the wire. `regathers`: with
    full recomputation weights are gathered a third time (DeepSpeed's hooks; PyTorch's FSDP keeps them).
    `flat`: collectives run as one ring through one network card of each node.
    """

    name: str
    n_ranks: int
    weights: State
    gradients: State
    optimizer: State
    secondary: int = 0
    gather_bytes: float = 2
    reduce_bytes: float = 2
    regathers: bool = False
    flat: bool = False

    def __post_init__(self) -> None:
        degrees = self.weights.degree, self.gradients.degree, self.optimizer.degree, self.n_ranks
        for inner, outer in pairwise(degrees):
            if inner < 1 or outer % inner:
                raise RooflineError(
                    f"{self.name}: {inner} does not divide {outer}; weights, gradients and optimizer states"
                    f" are divided among {degrees[:-1]} of {self.n_ranks} data-parallel ranks"
                )

    def transfers(self, *, recomputed: bool) -> Iterator[Transfer]:
        """What is sent for each micro-batch (forward, backward) and once a step."""
        weights, gradients, optimizer = self.weights.degree, self.gradients.degree, self.optimizer.degree
        if weights > 1:
            yield Transfer("all_gather", "forward", self.gather_bytes, weights)
            again = 2 if recomputed and self.regathers else 1
            for _ in range(again):
                yield Transfer("all_gather", "backward", self.gather_bytes, self.secondary or weights)
        if gradients > 1:
            yield Transfer("reduce_scatter", "backward", self.reduce_bytes, gradients)
        if optimizer > gradients:
            share = self.reduce_bytes / gradients
            yield Transfer("reduce_scatter", "step", share, optimizer // gradients, gradients)
        if self.n_ranks > optimizer:
            share = self.reduce_bytes / optimizer
            yield Transfer("all_reduce", "step", share, self.n_ranks // optimizer, optimizer)
        if optimizer > weights:
            share = self.gather_bytes / weights
            yield Transfer("all_gather", "step", share, optimizer // weights, weights)

    def kept_bytes(self) -> dict[str, float]:
        """Bytes for each parameter that one rank keeps, by kind of state."""
        kept = {name: getattr(self, name).kept_bytes for name in ("weights", "gradients", "optimizer")}
        if self.secondary:
            kept["weights"] += self.gather_bytes / self.secondary
        return kept


def zero(
    stage: int, n_ranks: int, *, states: str = "fp32", flat: bool = False, regathers: bool = False
) -> Sharding:
    """Stage 0 is DDP. 16 bytes a parameter: bf16 weights and gradients, fp32 weights, Adam's moments.

    With `states` in bf16 there are no fp32 weights and the moments take 4 bytes; DDP's buckets then copy the
    gradients.
    """
    if stage not in (0, 1, 2, 3):
        raise RooflineError(f"ZeRO has stages 0 (DDP) to 3, not {stage}")
    plain = states == "bf16"
    buckets = 2 if plain and stage == 0 and n_ranks > 1 else 0
    degrees = (n_ranks if stage >= 3 else 1, n_ranks if stage >= 2 else 1, n_ranks if stage >= 1 else 1)
    return Sharding(
        f"ZeRO-{stage}" if stage else "DDP",
        n_ranks,
        State(2, degrees[0]),
        State(2 + buckets, degrees[1]),
        State(4 if plain else 12, degrees[2]),
        regathers=regathers,
        flat=flat,
    )


def zero_plus_plus(n_ranks: int, n_node: int, reduce_bytes: float = 0.5) -> Sharding:
    """ZeRO-3 with weights sent in 8 bits, gradients in 4, and a copy of the weights within each node."""
    node = min(n_node, n_ranks)
    return replace(zero(3, n_ranks), name="ZeRO++", secondary=node, gather_bytes=1, reduce_bytes=reduce_bytes)


def three_level(n_ranks: int, n_package: int, n_node: int) -> Sharding:
    """Weights within a package, gradients within a node, optimizer states over all (arXiv 2501.04266)."""
    return Sharding(
        "three levels",
        n_ranks,
        State(2, min(n_package, n_ranks)),
        State(2, min(n_node, n_ranks)),
        State(12, n_ranks),
        gather_bytes=1,
        reduce_bytes=0.5,
    )
