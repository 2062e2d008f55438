"""How a model is trained: its sequences, its parallelism, what is sharded, frozen, computed again."""

from dataclasses import dataclass, field
from typing import Literal

from burstline.errors import RooflineError
from burstline.roofline.device.device import Device
from burstline.roofline.model.parallel import Parallel, check_parallel
from burstline.roofline.model.shapes import QUANTS, Attention, Dense, ModelShape, Quant
from burstline.roofline.training.sharding import Sharding, zero

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "all"]


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
                f"{self.sharding.name} keeps all weights on the device; --offload all needs ZeRO-3"
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
        """Of the layers' products; what lies between them has `dtype`."""
        return QUANTS[{"": self.dtype, "fp4": "nvfp4"}.get(self.products, self.products)]

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
