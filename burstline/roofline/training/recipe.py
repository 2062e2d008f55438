"""How a model is trained: its sequences, its parallelism, what is sharded, frozen, computed again.

`Sharding` is how a replica's weights, gradients and optimizer states are divided among data-parallel ranks.
DDP, ZeRO 1 to 3 (arXiv 1910.02054), ZeRO++ (arXiv 2306.10209) and the three-level scheme of arXiv 2501.04266
are values of this one class; what they send and what they keep follows from it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from burstline.errors import RooflineError
from burstline.roofline.device.device import Device, Link, collective_s
from burstline.roofline.model.shapes import (
    QUANTS,
    Attention,
    Dense,
    ModelShape,
    Parallel,
    Quant,
    check_parallel,
)

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "all"]
When = Literal["forward", "backward", "step"]


@dataclass(frozen=True, slots=True)
class State:
    """One kind of state: `bytes_` for each parameter, divided among `degree` neighbouring ranks."""

    bytes_: float
    degree: int = 1


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
        states = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        kept = {name: state.bytes_ / state.degree for name, state in states.items()}
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
    states = State(2, min(n_package, n_ranks)), State(2, min(n_node, n_ranks)), State(12, n_ranks)
    return Sharding("three levels", n_ranks, *states, gather_bytes=1, reduce_bytes=0.5)


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a layer is written. `fused` attention (FlashAttention) keeps no scores; `dropout` keeps masks.

    `attention` and `passes`: how many times as long fused attention and other elementwise passes take as the
    kernels of serving that the calibrations were measured with. `softmax`: bytes that separate attention's
    softmax moves for each score, forward and backward. `logits`: bytes kept of each (in 16 bits, in fp32 for
    the loss, and their gradient). `reserved`: what PyTorch's allocator reserves for a byte of activations,
    without bias on the runs of Hugging Face's benchmark on H100 (research/training.py).
    """

    fused: bool = True
    dropout: bool = False
    attention: float = 1.0
    passes: float = 1.0
    softmax: tuple[float, float] = (4, 8)
    logits: float = 10
    reserved: float = 1.25


FUSED = Kernels()
MEGATRON = Kernels(fused=False, dropout=True)
# transformers' LlamaAttention: scaled 4, masked 4, softmax in fp32 6, cast 6 bytes; backward 6 + 10 + 4.
EAGER = Kernels(fused=False, passes=2.0, softmax=(20, 20))
# Triton's first FlashAttention and PyTorch's own passes, set on a random half of llm-foundry's A100 runs;
# what the allocator reserves, so that all of them fit. Its loss is fused: logits and gradient in 16 bits.
FOUNDRY = Kernels(attention=1.7, passes=2.0, logits=4, reserved=1.1)
KERNELS = {"fused": FUSED, "megatron": MEGATRON, "llm-foundry": FOUNDRY, "eager": EAGER}
KERNELS["llm-foundry-h100"] = replace(FOUNDRY, attention=3.0, passes=3.0)  # on a random half of those
KERNELS["eager-flash"] = replace(EAGER, fused=True)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained.

    `n_seq` sequences of `n_seq_tok` tokens a step, `micro_batch` of them at a time on each data-parallel
    rank. `adapter_rank` trains LoRA's adapters on every product and freezes the rest; `frozen` is the dtype
    of frozen weights: QLoRA's "int4" adds a pass that unpacks each before each use. `offload` keeps gradients
    and optimizer states in the host's memory; "all" the weights too. `overlap`: the share of the collectives
    of weights and gradients that computing can hide, 0 to 1. `host_layer_s`: what the host adds to each layer
    of a micro-batch where it launches kernels more slowly than they run. `products` ("fp8", "fp4") is the
    dtype of the layers' products, attention and head excepted; `wires` that of activations between devices.
    """

    model: ModelShape
    device: Device
    n_seq: int
    n_seq_tok: int
    micro_batch: int
    sharding: Sharding = field(default_factory=lambda: zero(0, 1))
    tp: int = 1
    pp: int = 1
    virtual_stages: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    kernels: Kernels = FUSED
    adapter_rank: int = 0
    frozen: str = "bf16"
    offload: Offload = "none"
    overlap: float = 0.5  # set on arXiv 2104.04473's three runs of ZeRO-3 with 175B (research/training.py)
    host_layer_s: float = 0.0
    products: str = ""
    wires: str = ""

    def __post_init__(self) -> None:
        for layer in self.model.layers:
            if not isinstance(layer.attention, Attention) or not isinstance(layer.ffn, Dense):
                raise RooflineError(
                    f"{self.model.name}: training is modelled for dense layers with ordinary attention only,"
                    f" not for {type(layer.attention).__name__} with {type(layer.ffn).__name__}"
                )
        check_parallel(self.model, Parallel(tp=self.tp, pp=self.pp))
        longest = self.model.max_context or self.model.n_positions
        if longest and self.n_seq_tok > longest:
            raise RooflineError(
                f"sequences of {self.n_seq_tok} tokens are longer than the {longest} of {self.model.name}"
            )
        if self.model.n_layers < self.pp * self.virtual_stages:
            raise RooflineError(
                f"{self.pp} stages x {self.virtual_stages} chunks are more than the {self.model.n_layers}"
                f" layers of {self.model.name}"
            )
        if self.offload == "all" and self.sharding.weights.degree == 1:
            raise RooflineError(
                f"{self.sharding.name} keeps weights on the device; --offload all needs ZeRO-3"
            )
        if self.n_seq % (self.micro_batch * self.sharding.n_ranks) or self.n_seq < 1:
            raise RooflineError(
                f"a batch of {self.n_seq} sequences does not divide into micro-batches of {self.micro_batch}"
                f" on {self.sharding.n_ranks} data-parallel ranks; try"
                f" {self.micro_batch * self.sharding.n_ranks * max(1, self.n_micro)}"
            )

    @property
    def dtype(self) -> str:
        return "bf16" if "bf16" in self.device.peaks else "fp16"

    @property
    def quant(self) -> Quant:
        """Of the layers' products."""
        return QUANTS[{"": self.dtype, "fp4": "nvfp4"}.get(self.products, self.products)]

    @property
    def stream(self) -> Quant:
        """Of what lies between the layers' products."""
        return QUANTS[self.dtype]

    @property
    def n_micro(self) -> int:
        """Micro-batches of one data-parallel rank."""
        return self.n_seq // (self.micro_batch * self.sharding.n_ranks)

    @property
    def n_devices(self) -> int:
        return self.tp * self.pp * self.sharding.n_ranks

    @property
    def adapter_params(self) -> int:
        """Parameters of LoRA's adapters: two thin matrices for each product with weights."""
        return sum(
            layer.count * self.adapter_rank * (linear.n + linear.k)
            for layer in self.model.layers
            for linear in layer.linears(self.model.d)
        )
