"""A model's shape: its matrices, parameters and KV-cache bytes per token, and how devices divide it.

`roofline/model/families.py` reads it from a checkpoint's config.json.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from burstline.dtypes import DTYPES
from burstline.errors import RooflineError, tables_beside

ELEMENT_BYTES: Mapping[str, float] = {dtype.short: dtype.n_bytes for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class Quant:
    """How numbers are stored and multiplied: weights, inputs of the products, KV cache.

    `group` is how many weights share one fp16 scale (int4, int8, fp4), None for one scale per channel or
    block, which is not counted; `zero_points` adds one weight-sized integer per group. `scales` of the inputs
    of 8 and 4 bits are "dynamic" (a kernel of its own reads and quantises them), "static" (known beforehand,
    so that the kernel before quantises) or "block" (dynamic, for every 128 elements). The embedding, router
    and LM head keep the stream's dtype, as the published fp8, AWQ and GPTQ checkpoints do; with
    `experts_only` everything but the routed experts does (gpt-oss). `others` are products stored in another
    way, each under the name of its `product` (a `Linear`'s). `held`: bytes of the files that were read over
    those of the format.
    """

    weights: str = "bf16"
    activations: str = "bf16"
    kv: str = "bf16"
    group: int | None = None
    zero_points: bool = False
    scales: Literal["dynamic", "static", "block"] = "dynamic"
    experts_only: bool = False
    product: str = ""
    others: tuple["Quant", ...] = ()
    held: float = 1.0

    def __post_init__(self) -> None:
        for what, dtype in (("weights", self.weights), ("activations", self.activations), ("kv", self.kv)):
            if dtype not in ELEMENT_BYTES:
                raise RooflineError(f"unknown {what} dtype {dtype!r}; known: {', '.join(ELEMENT_BYTES)}")

    @property
    def stream(self) -> str:
        """The dtype between the products: that of the activations, bf16 where those are 8 bits or fewer."""
        return "bf16" if ELEMENT_BYTES[self.activations] < 2 else self.activations

    @property
    def plain(self) -> "Quant":
        """What is not quantised."""
        return Quant(self.stream, self.stream, self.kv)

    def of(self, name: str, quantised: bool = True) -> "Quant":
        """How the product of this name is stored and multiplied."""
        if not quantised or (self.experts_only and not name.startswith("experts_")):
            return self.plain
        return next((other for other in self.others if other.product == name), self)

    def holding(self, held: float) -> "Quant":
        """The same with so many times the bytes that its format has."""
        return replace(self, held=held, others=tuple(replace(each, held=held) for each in self.others))

    @property
    def weight_bytes(self) -> float:
        """Bytes of one quantised weight with its share of scales and zero points (int4 in 128s: 0.515625)."""
        bytes_ = ELEMENT_BYTES[self.weights]
        if self.group is not None:
            bytes_ += ((1 if self.weights == "fp4" else 2) + bytes_ * self.zero_points) / self.group
        return bytes_ * self.held

    @property
    def quantises(self) -> bool:
        """Whether inputs are quantised by a kernel of its own."""
        return ELEMENT_BYTES[self.activations] < 2 and self.scales != "static"


QUANTS: Mapping[str, Quant] = {
    name: Quant(**row) for name, row in tables_beside(__file__, "quants.toml").items()
}


@dataclass(frozen=True, slots=True)
class Linear:
    """A product with a weight matrix of k inputs and n outputs; `copies` counts a layer's experts."""

    name: str
    n: int
    k: int
    bias: bool = False
    copies: int = 1
    quantised: bool = True

    @property
    def params(self) -> int:
        return self.copies * (self.n * self.k + (self.n if self.bias else 0))


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention. `window` is None where every token is seen.

    `chunk`: a token sees those of its own chunk of this many positions (Llama 4). `sinks`: a learned logit
    for each head (gpt-oss). `gated`: the outputs are multiplied by a gate, which the queries' product makes.
    `wide_norm`: queries and keys are normed over all heads at once (OLMo 2).
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    rope: bool = True
    chunk: int | None = None
    wide_norm: bool = False
    sinks: bool = False
    gated: bool = False

    def kv_heads(self, tp: int) -> int:
        """KV heads on one of `tp` ranks: replicated where there are fewer heads than ranks."""
        return max(1, self.n_kv_heads // tp)

    def kv_elements(self, tp: int) -> int:
        """Bytes of one token in the cache of one layer on one of `tp` ranks."""
        return 2 * self.kv_heads(tp) * self.head_dim

    def linears(self, d: int, tp: int) -> list[Linear]:
        heads = self.n_heads // tp
        n = (heads * (2 if self.gated else 1) + 2 * self.kv_heads(tp)) * self.head_dim
        return [Linear("qkv", n, d, self.qkv_bias), Linear("o", d, heads * self.head_dim, self.out_bias)]

    @property
    def norm_params(self) -> int:
        norms = self.n_heads + self.n_kv_heads if self.wide_norm else 2 * self.qk_norm
        return norms * self.head_dim + (self.n_heads if self.sinks else 0)


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (arXiv 2405.04434 §2.1). `q_rank` is None: queries are not compressed.

    With `index_topk` an indexer of its own heads scores all keys, and attention sees that many of the best
    (DeepSeek-V3.2); the index keys are cached with the latent.
    """

    n_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    window: None = None
    chunk: None = None

    def kv_elements(self, tp: int) -> int:
        """The latent is one for all heads, so tensor parallelism replicates it."""
        del tp
        return self.latent + self.index_dim

    @property
    def latent(self) -> int:
        """Elements of one token's latent that attention reads."""
        return self.kv_rank + self.rope_dim

    def linears(self, d: int, tp: int) -> list[Linear]:
        heads = self.n_heads // tp
        q_out = heads * (self.nope_dim + self.rope_dim)
        queries = (
            [Linear("q", q_out, d)]
            if self.q_rank is None
            else [Linear("q_a", self.q_rank, d), Linear("q_b", q_out, self.q_rank)]
        )
        return [
            *queries,
            Linear("kv_a", self.kv_rank + self.rope_dim, d),
            Linear("kv_b", heads * (self.nope_dim + self.v_dim), self.kv_rank),
            *self._indexer(d),
            Linear("o", d, heads * self.v_dim),
        ]

    def _indexer(self, d: int) -> list[Linear]:
        """Every rank has all of it."""
        if not self.index_topk:
            return []
        return [
            Linear("index_q", self.index_heads * self.index_dim, self.q_rank or d),
            Linear("index_k", self.index_dim, d),
            Linear("index_weights", self.index_heads, d, quantised=False),
        ]

    @property
    def norm_params(self) -> int:
        return (self.q_rank or 0) + self.kv_rank + 2 * self.index_dim


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Linear attention by the gated delta rule (arXiv 2412.06464), as in Qwen3-Next.

    Each value head keeps a state of `key_dim` x `value_dim` in fp32 instead of keys and values of all tokens.
    """

    n_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    window: None = None
    chunk: None = None

    def kv_elements(self, tp: int) -> int:
        """No token leaves anything in the cache."""
        del tp
        return 0

    def state_elements(self, tp: int) -> int:
        """What one request keeps on one of `tp` ranks, however long it is."""
        return (self.n_value_heads * self.key_dim * self.value_dim + self.conv * self._convolved) // tp

    @property
    def _convolved(self) -> int:
        return 2 * self.n_heads * self.key_dim + self.n_value_heads * self.value_dim

    def linears(self, d: int, tp: int) -> list[Linear]:
        values = self.n_value_heads * self.value_dim
        return [
            Linear("qkvz", (2 * self.n_heads * self.key_dim + 2 * values) // tp, d),
            Linear("ba", 2 * self.n_value_heads // tp, d, quantised=False),
            Linear("o", d, values // tp),
        ]

    @property
    def norm_params(self) -> int:
        """The convolution, two numbers for each value head, and the norm of the outputs."""
        return self.conv * self._convolved + 2 * self.n_value_heads + self.value_dim


def token_kv_bytes(attention: Attention | Mla | DeltaNet, tp: int, kv: str) -> float:
    """Bytes of one token in the cache of one layer on one of `tp` ranks; an indexer's keys are of 8 bits."""
    index = attention.index_dim if isinstance(attention, Mla) else 0
    return ELEMENT_BYTES[kv] * (attention.kv_elements(tp) - index) + index


@dataclass(frozen=True, slots=True)
class Dense:
    """A feed-forward block; `gated` ones have two matrices in (SwiGLU, GeGLU), fused into one product."""

    d_ff: int
    gated: bool = True
    bias: bool = False

    def linears(self, d: int, tp: int, prefix: str = "", copies: int = 1) -> list[Linear]:
        inner = self.d_ff // tp
        up = Linear("gate_up", 2 * inner, d) if self.gated else Linear("up", inner, d)
        down = Linear("down", d, inner)
        return [Linear(prefix + linear.name, linear.n, linear.k, self.bias, copies) for linear in (up, down)]


@dataclass(frozen=True, slots=True)
class Moe:
    """A router, `n_experts` gated experts of which each token visits `top_k`, and experts shared by all."""

    n_experts: int
    top_k: int
    d_ff: int
    d_ff_shared: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False

    def __post_init__(self) -> None:
        if self.top_k > self.n_experts:
            raise RooflineError(f"a token cannot visit {self.top_k} of {self.n_experts} experts")

    def linears(self, d: int, tp: int, moe_tp: int, ep: int) -> list[Linear]:
        """One rank's share: experts are divided among `ep` ranks, each expert among `moe_tp`."""
        shared = Dense(self.d_ff_shared).linears(d, tp, "shared_") if self.d_ff_shared else []
        gate = [Linear("shared_gate", 1, d, quantised=False)] if self.shared_gate else []
        return [
            Linear("router", self.n_experts, d, self.router_bias, quantised=False),
            *Dense(self.d_ff, bias=self.expert_bias).linears(d, moe_tp, "experts_", self.n_experts // ep),
            *shared,
            *gate,
        ]


@dataclass(frozen=True, slots=True)
class Layer:
    """`count` decoder layers of the same shape."""

    attention: Attention | Mla | DeltaNet
    ffn: Dense | Moe
    count: int

    def linears(self, d: int, tp: int = 1, moe_tp: int = 1, ep: int = 1) -> list[Linear]:
        """Every product with weights of one such layer, on one rank, in the order it runs."""
        ffn = self.ffn.linears(d, tp) if isinstance(self.ffn, Dense) else self.ffn.linears(d, tp, moe_tp, ep)
        return [*self.attention.linears(d, tp), *ffn]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only transformer's shape. `n_positions` counts learned positions (0: rotary).

    `order`: which of `layers` each of its layers is, where kinds alternate; empty: one kind after the other.
    `vision_params`: of the tower that reads images, which takes memory and is in no other count.
    """

    name: str
    family: str
    d: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool
    norms_per_layer: int = 2
    norm: Literal["rms", "layer"] = "rms"
    n_positions: int = 0
    max_context: int | None = None
    order: tuple[int, ...] = ()
    vision_params: int = 0

    @property
    def n_layers(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def norm_params(self) -> int:
        """Of one norm: its weight, and for a LayerNorm its bias."""
        return self.d * (2 if self.norm == "layer" else 1)

    def params(self) -> int:
        """How many parameters the checkpoint holds: a tied LM head is counted once, no rotary tables."""
        layers = sum(
            layer.count
            * (
                sum(linear.params for linear in layer.linears(self.d))
                + layer.attention.norm_params
                + self.norms_per_layer * self.norm_params
            )
            for layer in self.layers
        )
        embeddings = self.vocab * self.d * (1 if self.tied else 2) + self.n_positions * self.d
        return embeddings + layers + self.norm_params

    def active_params(self) -> int:
        """Parameters that one token's pass uses: all but the experts it does not visit."""
        idle = sum(
            layer.count * (1 - layer.ffn.top_k / layer.ffn.n_experts) * linear.params
            for layer in self.layers
            if isinstance(layer.ffn, Moe)
            for linear in layer.linears(self.d)
            if linear.name.startswith("experts_")
        )
        return self.params() - round(idle)


@dataclass(frozen=True, slots=True)
class Parallel:
    """Ranks by kind: tensor, pipeline, expert and data parallel.

    `dp` replicas of `tp * pp` devices. Experts are spread over `ep` of the `tp * dp` ranks of a stage; with
    ep = 1 every replica holds all of them, each divided by `tp`.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def n_devices(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def n_for_one_request(self) -> int:
        """Devices that work on one request at most: a replica's, and others' where experts span replicas."""
        return self.tp * self.pp * (self.dp if self.ep > 1 else 1)

    @property
    def moe_tp(self) -> int:
        """By how many ranks each expert is divided."""
        return self.tp if self.ep == 1 else self.tp * self.dp // self.ep


def check_parallel(model: ModelShape, parallel: Parallel) -> None:
    """Raises where the model cannot be divided so."""
    for name, ranks in (("tp", parallel.tp), ("pp", parallel.pp), ("ep", parallel.ep), ("dp", parallel.dp)):
        if ranks < 1:
            raise RooflineError(f"{name} must be at least 1, not {ranks}")
    if parallel.pp > model.n_layers:
        raise RooflineError(f"pp {parallel.pp} is more than the {model.n_layers} layers of {model.name}")
    if (parallel.tp * parallel.dp) % parallel.ep:
        raise RooflineError(
            f"ep {parallel.ep} does not divide tp x dp = {parallel.tp * parallel.dp};"
            " experts are spread over those ranks"
        )
    for layer in model.layers:
        for name, ranks, n, what in _divided(layer, parallel):
            if n % ranks:
                raise RooflineError(f"{name} {ranks} does not divide the {n} {what} of {model.name}")


def _divided(layer: Layer, parallel: Parallel) -> Iterator[tuple[str, int, int, str]]:
    """What ranks divide of a layer: their kind and number, how many there are, and of what."""
    tp, attention, ffn = parallel.tp, layer.attention, layer.ffn
    yield "tp", tp, attention.n_heads, "query heads"
    if isinstance(attention, Attention) and tp % attention.n_kv_heads:  # else ranks share KV heads
        yield "tp", tp, attention.n_kv_heads, "KV heads"
    if isinstance(ffn, Dense):
        yield "tp", tp, ffn.d_ff, "feed-forward columns"
    else:
        yield "ep", parallel.ep, ffn.n_experts, "experts"
        yield "tp", parallel.moe_tp, ffn.d_ff, "columns of an expert"
        yield "tp", tp, ffn.d_ff_shared, "columns of the shared experts"
