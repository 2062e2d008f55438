"""What one device keeps while it trains: weights, gradients, optimizer states, activations, logits.

Activations are counted as arXiv 2205.05198 counts them: what the backward pass of each operation needs. For
GPT (dropout, GELU, separate attention) the sum is that paper's formula, to the byte.
"""

import math
from dataclasses import dataclass

from burstline.roofline.device.device import Device
from burstline.roofline.model.shapes import ELEMENT_BYTES, Attention, Dense, Layer, ModelShape
from burstline.roofline.training.recipe import FUSED, Kernels, Recipe, Recompute

_E = 2  # bytes of an activation: bf16 or fp16
_BUFFERS = 1.5e9  # the framework's context, workspaces, and buffers of collectives


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of the device that holds most: the first stage, at the peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.activations + self.logits + self.buffers

    def fits(self, device: Device) -> bool:
        return self.total <= device.memory.capacity_bytes


def layer_activation_bytes(
    layer: Layer,
    d: int,
    n_seq_tok: int,
    batch: int,
    tp: int = 1,
    *,
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
    kernels: Kernels = FUSED,
) -> float:
    """Bytes that one layer keeps of `batch` sequences of `n_seq_tok` tokens until its backward pass."""
    attention, ffn = layer.attention, layer.ffn
    assert isinstance(attention, Attention)
    assert isinstance(ffn, Dense)
    rows = n_seq_tok * batch
    if recompute == "full":
        return rows * _E * d  # the layer's input
    # Inputs of two norms, of the products in, of the feed-forward block; masks of two dropouts, a byte each.
    whole = 4 * _E * d + (2 * d if kernels.dropout else 0)
    heads = attention.n_heads * attention.head_dim
    divided = 2 * _E * (heads + attention.n_kv_heads * attention.head_dim)  # queries, outputs, keys, values
    divided += (3 if ffn.gated else 2) * _E * ffn.d_ff
    scores = 0.0
    if kernels.fused:
        scores = 4.0 * attention.n_heads  # one fp32 sum for each row of the softmax
    elif recompute == "none":
        scores = (2 * _E + 1 if kernels.dropout else _E) * attention.n_heads * n_seq_tok
    return rows * (whole / (tp if sequence_parallel else 1) + (divided + scores) / tp)


def first_stage(model: ModelShape, pp: int) -> tuple[float, int]:
    """Parameters and layers of the first of `pp` stages.

    The last stage's head costs as much as some layers: stages are divided so that they cost the same.
    """
    in_layer = (model.params() - _outside_layers(model)) / model.n_layers
    if pp == 1:
        return model.params(), model.n_layers
    n_layers = min(model.n_layers, math.ceil((model.n_layers + model.vocab * model.d / in_layer) / pp))
    return in_layer * n_layers + _outside_layers(model, pp), n_layers


def _outside_layers(model: ModelShape, pp: int = 1) -> int:
    """Parameters of the embedding; of the head and the last norm too, where there is one stage."""
    embedding = model.vocab * model.d
    ends = embedding * (1 if model.tied else 2) + model.norm_params if pp == 1 else embedding
    return ends + model.n_positions * model.d


def stored_bytes(recipe: Recipe) -> float:
    """Of a frozen weight, on average: the embedding and the head keep 16 bits, as QLoRA's do."""
    outside = _outside_layers(recipe.model, recipe.pp) / first_stage(recipe.model, recipe.pp)[0]
    return 2 * outside + ELEMENT_BYTES[recipe.frozen] * (1 - outside)


def gather_bytes(recipe: Recipe) -> float:
    """Bytes on the wire of a weight that is gathered for use: a frozen one is sent as it is stored."""
    sent = recipe.sharding.gather_bytes
    return min(sent, stored_bytes(recipe)) if recipe.adapter_rank else sent


def training_memory(recipe: Recipe) -> TrainingMemory:
    """Of the micro-batches of a step, at most as many as there are stages are in flight."""
    model, sharding, tp, pp = recipe.model, recipe.sharding, recipe.tp, recipe.pp
    params, n_layers = first_stage(model, pp)
    params /= tp
    kept = sharding.kept_bytes()
    weights, trained = kept["weights"], 1.0
    if recipe.adapter_rank:
        weights = stored_bytes(recipe) / sharding.weights.degree
        trained = recipe.adapter_params / model.params()

    def layer_bytes(layer: Layer, recompute: Recompute) -> float:
        return layer_activation_bytes(
            layer,
            model.d,
            recipe.n_seq_tok,
            recipe.micro_batch,
            tp,
            recompute=recompute,
            sequence_parallel=recipe.sequence_parallel,
            kernels=recipe.kernels,
        )

    chunks = recipe.virtual_stages
    in_flight = min(pp, recipe.n_micro) * (1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1)
    kept_layers = sum(layer.count * layer_bytes(layer, recipe.recompute) for layer in model.layers)
    working = 0.0
    if recipe.recompute == "full":  # one layer at a time is computed again
        working = max(layer_bytes(layer, "none") for layer in model.layers)
    if sharding.weights.degree > 1:  # two layers are gathered: one in use, the next on its way
        working += 2 * gather_bytes(recipe) * params / n_layers
    rows = recipe.n_seq_tok * recipe.micro_batch
    on_device = trained if recipe.offload == "none" else 0.0
    return TrainingMemory(
        weights=0.0 if recipe.offload == "all" else params * weights,
        gradients=params * on_device * kept["gradients"],
        optimizer=params * on_device * kept["optimizer"],
        activations=(kept_layers * n_layers / model.n_layers * in_flight + working) * recipe.kernels.reserved,
        logits=recipe.kernels.logits * rows * model.vocab / tp if pp == 1 else 0.0,
        buffers=_BUFFERS,
    )
