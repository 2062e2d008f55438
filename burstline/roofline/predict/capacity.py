"""Memory: whether weights, KV cache and requests fit."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from burstline.errors import RooflineError
from burstline.roofline.device.device import Device
from burstline.roofline.model.shapes import (
    ELEMENT_BYTES,
    DeltaNet,
    Layer,
    ModelShape,
    Moe,
    Parallel,
    Quant,
    check_parallel,
    token_kv_bytes,
)
from burstline.roofline.predict.predict import Deployment

BLOCK_TOK = 16  # vLLM's default block
_GIB = 2.0**30
_HELD_BY_DRIVER = 0.46 * _GIB  # CUDA sees 79.19 GiB of an H100 where the driver's tool says 79.65
_OUTSIDE_TORCH = 0.25 * _GIB, 2.1 * _GIB  # on one device, and where NCCL joins several (vLLM's logs)
# Rows whose logits are kept and sorted, 16 bytes each: under 70 GiB (one log, RTX 4090), above (seven, H100).
_SAMPLED_ROWS = 512, 1024
_STEP_TOK = 8192
# Chosen around published reserves over `reserve_bytes`: seven of dense models (vLLM 0.19: 0.93 to 1.01),
# six of experts (four 0.92 to 0.98; Qwen3-235B-FP8 on vLLM 0.9 1.6, gpt-oss-120b 2.4).
_BAND = {False: (0.9, 1.1), True: (0.9, 2.4)}
Fit = Literal["yes", "no", "within the band"]


@dataclass(frozen=True, slots=True)
class Room:
    """How one device's memory divides. Where the engine prints its own block count, believe that instead.

    `kv_bytes` is what the expected reserve leaves, `kv_range_bytes` what the largest and the smallest do.
    """

    on: Deployment
    weight_bytes: float
    usable_bytes: float
    reserved_bytes: float
    kv_bytes: float
    kv_range_bytes: tuple[float, float]
    kv_tok: int

    def request_bytes(self, n_tok: int) -> float:
        return request_bytes(self.on.model, self.on.quant, self.on.parallel, n_tok)

    def fits(self, batch: int, n_tok: int) -> Fit:
        """Whether `batch` requests of `n_tok` tokens fit at once: with any reserve, with none, with some."""
        low, high = (batch * self.request_bytes(n_tok) <= left for left in self.kv_range_bytes)
        return "yes" if low else "within the band" if high else "no"

    def largest_batch(self, n_tok: int) -> int:
        """How many requests of `n_tok` tokens, prompt and output, the expected cache holds at once."""
        return int(self.kv_bytes // self.request_bytes(n_tok))

    def check(self, batch: int, n_tok: int) -> None:
        """Raises where no reserve lets `batch` requests of `n_tok` tokens fit, or one the model's context."""
        model = self.on.model
        if model.max_context is not None and n_tok > model.max_context:
            raise RooflineError(
                f"{n_tok} tokens of prompt and output are more than the {model.max_context} of {model.name}"
            )
        if self.fits(batch, n_tok) == "no":
            raise RooflineError(
                f"batch {batch} of {n_tok} tokens does not fit the KV cache of {self.kv_tok} tokens"
                f" ({self.kv_bytes / 1e9:.1f} GB): at most {self.largest_batch(n_tok)}; try a smaller batch,"
                " shorter requests, an 8-bit cache (--quant fp8-kv8) or more devices"
            )


def reserve_bytes(model: ModelShape, parallel: Parallel, device: Device) -> float:
    """What an engine keeps beside weights and cache: CUDA and NCCL, the sampler's logits, experts' inputs."""
    moes = [layer.ffn for layer in model.layers if isinstance(layer.ffn, Moe)]
    wide = max((moe.top_k * (2 * moe.d_ff // parallel.moe_tp + model.d) for moe in moes), default=0)
    inner, rows = 2.0 * _STEP_TOK * wide, _SAMPLED_ROWS[device.memory.capacity_bytes >= 70 * _GIB]
    return _OUTSIDE_TORCH[parallel.n_devices > 1] + 16.0 * rows * model.vocab + inner


def room(on: Deployment, *, utilisation: float = 0.9) -> Room:
    """The KV cache that the weights leave room for, in whole blocks of 16 tokens.

    `utilisation` is the engine's share of the memory (vLLM's gpu_memory_utilization). Raises where not even
    the smallest reserve leaves a block.
    """
    model, quant, parallel, device = on.model, on.quant, on.parallel, on.device
    weights = weight_bytes(model, quant, parallel)
    usable = utilisation * (device.memory.capacity_bytes - _HELD_BY_DRIVER * (device.vendor == "nvidia"))
    reserved = reserve_bytes(model, parallel, device)
    has_experts = any(isinstance(layer.ffn, Moe) for layer in model.layers)
    low, high = (max(0.0, usable - weights - share * reserved) for share in reversed(_BAND[has_experts]))
    block = BLOCK_TOK * kv_bytes(model, quant, parallel, 1)
    if high < block:
        raise RooflineError(
            f"{model.name} does not fit {device.name}: weights take {weights / 1e9:.1f} GB a device and"
            f" {reserved / 1e9:.1f} GB are kept for activations, but {usable / 1e9:.1f} GB are usable"
            f" ({utilisation:.0%} of {device.memory.capacity_bytes / 1e9:.1f} GB);"
            " try more devices (--tp, --pp), fewer bits (--quant) or a larger device"
        )
    left = max(0.0, usable - weights - reserved)
    return Room(on, weights, usable, reserved, left, (low, high), BLOCK_TOK * int(left / block))


def weight_bytes(model: ModelShape, quant: Quant, parallel: Parallel) -> float:
    """The fullest device's weights: with pipeline stages, the heaviest layers and the larger end."""
    check_parallel(model, parallel)
    stream = ELEMENT_BYTES[quant.stream]
    per_layer = [_layer_bytes(model, layer, quant, parallel) for layer in model.layers]
    embedding = (math.ceil(model.vocab / parallel.tp) + model.n_positions) * model.d * stream
    head = 0.0 if model.tied else math.ceil(model.vocab / parallel.tp) * model.d * stream
    if parallel.pp > 1:
        head = embedding if model.tied else head  # the last stage needs a copy of its own
        ends = max(embedding, head)
    else:
        ends = embedding + head
    norm = model.norm_params * stream
    return ends + norm + model.vision_params * stream + _heaviest(model, parallel.pp, per_layer)


def _layer_bytes(model: ModelShape, layer: Layer, quant: Quant, parallel: Parallel) -> float:
    stream = ELEMENT_BYTES[quant.stream]
    norms = layer.attention.norm_params + model.norms_per_layer * model.norm_params
    linears = layer.linears(model.d, parallel.tp, parallel.moe_tp, parallel.ep)
    sizes = {each.name: each.params * quant.of(each.name, each.quantised).weight_bytes for each in linears}
    if isinstance(layer.ffn, Moe) and quant.experts_only:  # MXFP4 kernels want whole tiles of 256 columns
        columns = layer.ffn.d_ff / parallel.moe_tp
        for name in ("experts_gate_up", "experts_down"):
            sizes[name] *= 256 * math.ceil(columns / 256) / columns
    return norms * stream + sum(sizes.values())


def _heaviest(model: ModelShape, pp: int, by_kind: list[float]) -> float:
    """The most that neighbouring layers of one of `pp` stages weigh; `by_kind`: one of each of `layers`."""
    n = math.ceil(model.n_layers / pp)
    order = model.order or [kind for kind, layer in enumerate(model.layers) for _ in range(layer.count)]
    weights = [by_kind[kind] for kind in order]
    return max(sum(weights[first : first + n]) for first in range(len(weights) - n + 1))


def kv_bytes(model: ModelShape, quant: Quant, parallel: Parallel, n_tok: int) -> float:
    """What the cache of one request of `n_tok` tokens takes on the fullest device; windows keep no more."""
    per_layer = [
        token_kv_bytes(layer.attention, parallel.tp, quant.kv)
        * min(n_tok, layer.attention.window or layer.attention.chunk or n_tok)
        for layer in model.layers
    ]
    return _heaviest(model, parallel.pp, per_layer)


def state_bytes(model: ModelShape, parallel: Parallel) -> float:
    """What one request keeps on the fullest device however long it is: linear attention's states, in fp32."""
    kinds = [layer.attention for layer in model.layers]
    per_layer = [4.0 * of.state_elements(parallel.tp) if isinstance(of, DeltaNet) else 0.0 for of in kinds]
    return _heaviest(model, parallel.pp, per_layer)


def request_bytes(model: ModelShape, quant: Quant, parallel: Parallel, n_tok: int) -> float:
    """What one request of `n_tok` tokens takes of the cache, whose blocks hold as many layers of each kind.

    vLLM divides layers into groups as large as the rarest kind and pads the last group of each; a window
    keeps what a step adds besides. Linear attention's state is on top.
    """
    held = state_bytes(model, parallel)
    blocks_tok = BLOCK_TOK * math.ceil(n_tok / BLOCK_TOK)
    kinds = Counter[tuple[float, int | None]]()
    for layer in model.layers:
        per_tok = token_kv_bytes(layer.attention, parallel.tp, quant.kv)
        if per_tok:
            kinds[per_tok, layer.attention.window or layer.attention.chunk] += layer.count
    if len(kinds) < 2 or parallel.pp > 1:
        return held + kv_bytes(model, quant, parallel, blocks_tok)
    size = min(kinds.values())
    return held + sum(
        math.ceil(n / size) * size * per_tok * min(blocks_tok, (window or blocks_tok) - 1 + _STEP_TOK)
        for (per_tok, window), n in kinds.items()
    )
