"""How a model is trained: its sequences, its parallelism, what is sharded, frozen, computed again."""

from dataclasses import dataclass, field
from typing import Literal

from burstline.roofline.device.device import Device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.parallel import Parallel, check_parallel
from burstline.roofline.model.shapes import Attention, Dense, ModelShape
from burstline.roofline.training.sharding import Sharding, zero

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """How a layer is written. `fused` attention (FlashAttention) keeps no scores; `dropout` keeps masks.

    `attention` and `passes`: how many times as long fused attention and elementwise passes take as the
    kernels of serving that the calibrations were measured with.
    """

    fused: bool = True
    dropout: bool = False
    attention: float = 1.0
    passes: float = 1.0


FUSED = Kernels()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained.

    `n_seq` sequences of `n_seq_tok` tokens a step, `micro_batch` of them at a time on each data-parallel
    rank. `adapter_rank` trains LoRA's adapters on every product and freezes the rest; `frozen` is the dtype
    of frozen weights: QLoRA's "int4" adds a pass that unpacks each before each use. `offload` keeps gradients
    and optimizer states in the host's memory. `overlap`: collectives of weights and gradients run behind
    computing.
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
    offload: bool = False
    overlap: bool = True

    def __post_init__(self) -> None:
        check_trainable(self.model)
        check_parallel(self.model, Parallel(tp=self.tp, pp=self.pp))
        if self.model.max_context is not None and self.n_seq_tok > self.model.max_context:
            raise RooflineError(
                f"sequences of {self.n_seq_tok} tokens are longer than the {self.model.max_context} of"
                f" {self.model.name}"
            )
        if self.model.n_layers < self.pp * self.virtual_stages:
            raise RooflineError(
                f"{self.pp} stages x {self.virtual_stages} chunks are more than the {self.model.n_layers}"
                f" layers of {self.model.name}"
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


def check_trainable(model: ModelShape) -> None:
    """Raises where a layer is of a kind that this model of training does not know."""
    for layer in model.layers:
        if not isinstance(layer.attention, Attention) or not isinstance(layer.ffn, Dense):
            raise RooflineError(
                f"{model.name}: training is modelled for dense layers with ordinary attention only,"
                f" not for {type(layer.attention).__name__} with {type(layer.ffn).__name__}"
            )
