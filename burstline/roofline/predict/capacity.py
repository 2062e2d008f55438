"""Memory: whether weights, KV cache and requests fit."""

import math
from dataclasses import dataclass

from burstline.roofline.device.device import Device
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.parallel import Parallel, check_parallel
from burstline.roofline.model.shapes import (
    ELEMENT_BYTES,
    DeltaNet,
    Layer,
    ModelShape,
    Quant,
    token_kv_bytes,
)

BLOCK_TOK = 16  # vLLM's default block


@dataclass(frozen=True, slots=True)
class Room:
    """How one device's memory divides. Where the engine prints its own block count, believe that instead."""

    weight_bytes: float
    usable_bytes: float
    kv_bytes: float
    kv_tok: int


def room(
    model: ModelShape,
    quant: Quant,
    parallel: Parallel,
    device: Device,
    *,
    utilisation: float = 0.9,
    reserved_bytes: float = 1.5e9,
) -> Room:
    """The KV cache that the weights leave room for, in whole blocks of 16 tokens; raises where nothing is.

    `utilisation` is the engine's share of the memory (vLLM's gpu_memory_utilization); `reserved_bytes` is a
    guess at activations and CUDA graphs.
    """
    weights = weight_bytes(model, quant, parallel)
    usable = utilisation * device.memory.capacity_bytes
    left = usable - weights - reserved_bytes
    per_tok = kv_bytes(model, quant, parallel, 1)
    if left < BLOCK_TOK * per_tok:
        raise RooflineError(
            f"{model.name} does not fit {device.name}: weights take {weights / 1e9:.1f} GB a device and"
            f" {reserved_bytes / 1e9:.1f} GB are kept for activations, but {usable / 1e9:.1f} GB are usable"
            f" ({utilisation:.0%} of {device.memory.capacity_bytes / 1e9:.1f} GB);"
            " try more devices (--tp, --pp), fewer bits (--quant) or a larger device"
        )
    return Room(weights, usable, left, BLOCK_TOK * int(left / (BLOCK_TOK * per_tok)))


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
    return ends + norm + _heaviest(model, parallel.pp, per_layer)


def _layer_bytes(model: ModelShape, layer: Layer, quant: Quant, parallel: Parallel) -> float:
    stream = ELEMENT_BYTES[quant.stream]
    norms = layer.attention.norm_params + model.norms_per_layer * model.norm_params
    linears = layer.linears(model.d, parallel.tp, parallel.moe_tp, parallel.ep)
    return norms * stream + sum(
        linear.params * quant.of(linear.name, linear.quantised).weight_bytes for linear in linears
    )


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


def largest_batch(model: ModelShape, quant: Quant, parallel: Parallel, kv_room: Room, n_tok: int) -> int:
    """How many requests of `n_tok` tokens, prompt and output, the cache holds at once."""
    blocks_tok = BLOCK_TOK * math.ceil(n_tok / BLOCK_TOK)
    one = kv_bytes(model, quant, parallel, blocks_tok) + state_bytes(model, parallel)
    return int(kv_room.kv_bytes // one)


def check_batch(
    model: ModelShape, quant: Quant, parallel: Parallel, kv_room: Room, batch: int, n_tok: int
) -> None:
    """Raises where `batch` requests of `n_tok` tokens overflow the cache, or one the model's context."""
    if model.max_context is not None and n_tok > model.max_context:
        raise RooflineError(
            f"{n_tok} tokens of prompt and output are more than the {model.max_context} of {model.name}"
        )
    most = largest_batch(model, quant, parallel, kv_room, n_tok)
    if batch > most:
        raise RooflineError(
            f"batch {batch} of {n_tok} tokens does not fit the KV cache of {kv_room.kv_tok} tokens"
            f" ({kv_room.kv_bytes / 1e9:.1f} GB): at most {most}; try a smaller batch, shorter requests,"
            " an 8-bit cache (--quant fp8-kv8) or more devices"
        )
