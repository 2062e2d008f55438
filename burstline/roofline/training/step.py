"""One training step on a cluster: how long it takes, what bounds each product, what a device keeps.

Forward is the ops of a prefill with all its logits. Backward runs two products for each one, attention's
backward pass and twice the elementwise bytes. Nothing here is fitted to a training run.

Activations are counted as arXiv 2205.05198 counts them: what the backward pass of each operation needs. For
GPT (dropout, GELU, separate attention) the sum is that paper's formula, to the byte.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from burstline.roofline.device.calibration import Calibration
from burstline.roofline.device.device import Device, collective_s
from burstline.roofline.model.ops import Op, Step, matmul, ops
from burstline.roofline.model.shapes import ELEMENT_BYTES, Attention, Dense, Layer, ModelShape, Parallel
from burstline.roofline.predict.predict import Prediction, predict_step
from burstline.roofline.training.recipe import Recipe, Recompute, Transfer

Pass = Literal["forward", "backward", "recompute"]
FUSED_BACKWARD = 2.5  # FlashAttention computes the scores again: five products where forward has two
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


def layer_activation_bytes(recipe: Recipe, layer: Layer, recompute: Recompute) -> float:
    """Bytes that one layer keeps of a micro-batch until its backward pass."""
    attention, ffn, kernels, tp, d = layer.attention, layer.ffn, recipe.kernels, recipe.tp, recipe.model.d
    assert isinstance(attention, Attention)
    assert isinstance(ffn, Dense)
    rows = recipe.n_seq_tok * recipe.micro_batch
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
        scores = (2 * _E + 1 if kernels.dropout else _E) * attention.n_heads * recipe.n_seq_tok
    return rows * (whole / (tp if recipe.sequence_parallel else 1) + (divided + scores) / tp)


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

    chunks = recipe.virtual_stages
    in_flight = min(pp, recipe.n_micro) * (1 + (pp - 1) / (pp * chunks) if chunks > 1 else 1)
    kept_layers = sum(
        layer.count * layer_activation_bytes(recipe, layer, recipe.recompute) for layer in model.layers
    )
    working = 0.0
    if recipe.recompute == "full":  # one layer at a time is computed again
        working = max(layer_activation_bytes(recipe, layer, "none") for layer in model.layers)
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


@dataclass(frozen=True, slots=True)
class Work:
    """One op of a micro-batch's way through the whole model, timed; `factor` scales what backward repeats."""

    during: Pass
    prediction: Prediction
    factor: float = 1.0

    @property
    def op(self) -> Op:
        return self.prediction.op

    @property
    def seconds(self) -> float:
        return self.prediction.seconds * self.factor


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """One step. `work` is of one micro-batch over all stages; the seconds are of the whole step.

    `compute_s` and `tensor_s` (collectives of tensor parallelism) are the slowest stage's; `exposed_s` is
    what other communication adds, `hidden_s` what of it runs behind computing; `host_s` what launching adds.
    """

    recipe: Recipe
    work: tuple[Work, ...]
    compute_s: float
    tensor_s: float
    bubble_s: float
    exposed_s: float
    hidden_s: float
    optimizer_s: float
    host_s: float
    memory: TrainingMemory

    @property
    def parts_s(self) -> dict[str, float]:
        return {
            "compute": self.compute_s,
            "tensor-parallel collectives": self.tensor_s,
            "pipeline bubble": self.bubble_s,
            "other communication, exposed": self.exposed_s,
            "optimizer": self.optimizer_s,
            "host": self.host_s,
        }

    @property
    def seconds(self) -> float:
        return sum(self.parts_s.values())

    @property
    def tok_per_s(self) -> float:
        return self.recipe.n_seq * self.recipe.n_seq_tok / self.seconds

    @property
    def model_flops(self) -> float:
        """What the step needs at least, nothing computed twice: attention three times as much as forward, and
        each product forward and backward, where a frozen one has no weight gradient."""
        once = sum(
            each.op.count * each.op.flops * (3 if each.op.kind == "attention" else 1)
            for each in self.work
            if (each.op.kind == "attention" and each.during == "forward")
            or (each.op.kind == "matmul" and each.during != "recompute")
        )
        return once * self.recipe.tp * self.recipe.n_micro * self.recipe.sharding.n_ranks

    @property
    def flops_per_s(self) -> float:
        """Of one device."""
        return self.model_flops / self.seconds / self.recipe.n_devices

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the device's dense peak for the layers' products."""
        dtype = self.recipe.products or self.recipe.dtype
        return self.flops_per_s / self.recipe.device.peak_flops_per_s(dtype)

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.recipe.device)


def training_step(recipe: Recipe, calibration: Calibration | None) -> TrainingStep:
    """Time one step; without a calibration each op takes its ceiling."""
    forward = list(_forward(recipe))
    passes: list[tuple[Pass, list[tuple[Op, float]]]] = [
        ("forward", [(op, 1.0) for op in forward]),
        ("recompute", [(op, 1.0) for op in forward if _is_recomputed(recipe, op)]),
        ("backward", [pair for op in forward for pair in _backward(recipe, op)]),
    ]
    work = tuple(
        Work(during, prediction, factor * _slower(recipe, prediction.op))
        for during, pairs in passes
        if pairs
        for prediction, (_, factor) in zip(
            predict_step([op for op, _ in pairs], recipe.device, calibration), pairs, strict=True
        )
    )
    compute_s, tensor_s = (_slowest_stage_s(recipe, work, collective=c) for c in (False, True))
    in_layers_s = sum(each.seconds for each in work if each.op.name not in _AT_THE_ENDS)
    bubble_s = (recipe.pp - 1) / recipe.virtual_stages * in_layers_s / recipe.pp
    exposed_s, hidden_s = _communication_s(recipe, work)
    return TrainingStep(
        recipe,
        work,
        compute_s * recipe.n_micro,
        tensor_s * recipe.n_micro,
        bubble_s,
        exposed_s,
        hidden_s,
        _optimizer_s(recipe),
        recipe.host_layer_s * math.ceil(recipe.model.n_layers / recipe.pp) * recipe.n_micro,
        training_memory(recipe),
    )


_AT_THE_ENDS = ("embedding", "final_norm", "lm_head", "lm_head.dx", "lm_head.dw", "loss")
# Bytes a second at which a host updates the states of all its devices: set on one published run, of ZeRO-2
# with offload on three MI210 (8.5 s a step).
_HOST_MEMORY = 25e9


def _forward(recipe: Recipe) -> Iterator[Op]:
    """Today's ops of a prefill that wants every logit, without what only serving does."""
    step = Step.of([(recipe.n_seq_tok,) * 3] * recipe.micro_batch)
    split = recipe.tp if recipe.sequence_parallel else 1
    for op in ops(recipe.model, recipe.quant, Parallel(tp=recipe.tp), step):
        if op.name in ("kv_write", "all_gather"):  # no cache; the loss is computed on split logits
            continue
        if op.name == "lm_head":  # a cast to fp32 and a softmax, each read and written
            yield _pass(recipe, "loss", 1, op.m * op.n, 14)
        if op.name == "norm":
            yield replace(op, m=op.m / split, activation_bytes=op.activation_bytes / split)
            if recipe.kernels.dropout:  # read, write, and a mask of a byte
                yield _pass(recipe, "dropout", op.count, op.m / split * op.n, 5)
        elif op.kind == "attention" and not recipe.kernels.fused:
            yield from _separate_attention(recipe, op)
        elif op.kind == "collective" and recipe.wires:
            n_elements = op.link_bytes / ELEMENT_BYTES[recipe.dtype]
            yield replace(op, link_bytes=n_elements * _wire_bytes(recipe))
            yield _pass(recipe, "wires", op.count, n_elements, 2 * (_E + _wire_bytes(recipe)))
        else:
            yield op
            if op.kind == "matmul" and recipe.adapter_rank and op.name != "lm_head":
                yield from _adapters(recipe, op)


def _adapters(recipe: Recipe, op: Op) -> Iterator[Op]:
    quant = recipe.stream
    if ELEMENT_BYTES[recipe.frozen] < 2:
        yield _pass(recipe, "unpack", op.count, op.n * op.k, ELEMENT_BYTES[recipe.frozen] + 2)
    yield matmul("adapter", op.m, recipe.adapter_rank, int(op.k), quant, count=op.count)
    yield matmul("adapter", op.m, int(op.n), recipe.adapter_rank, quant, count=op.count)


def _separate_attention(recipe: Recipe, op: Op) -> Iterator[Op]:
    """Scores, softmax, dropout and values, each through memory, over the whole square."""
    quant, n_tok = recipe.stream, recipe.n_seq_tok
    squares = recipe.micro_batch * op.n_heads
    rows = squares * n_tok
    head_dim = int(op.k)
    yield matmul("attention.scores", rows, n_tok, head_dim, quant, count=op.count, groups=squares)
    yield _pass(recipe, "attention.softmax", op.count, rows * n_tok, recipe.kernels.softmax[0])
    if recipe.kernels.dropout:
        yield _pass(recipe, "attention.dropout", op.count, rows * n_tok, 5)
    yield matmul("attention.values", rows, head_dim, n_tok, quant, count=op.count, groups=squares)


def _pass(recipe: Recipe, name: str, count: int, n_elements: float, bytes_each: float) -> Op:
    return Op(
        name, "elementwise", count, recipe.dtype, m=n_elements, n=1, activation_bytes=n_elements * bytes_each
    )


def _is_recomputed(recipe: Recipe, op: Op) -> bool:
    if recipe.recompute == "selective":
        return op.name.startswith("attention.")
    return recipe.recompute == "full" and op.name not in _AT_THE_ENDS


def _slower(recipe: Recipe, op: Op) -> float:
    """How many times as long as its prediction an op takes with the recipe's kernels."""
    if op.kind == "attention":
        return recipe.kernels.attention
    is_pass = op.kind == "elementwise" and not op.name.startswith("attention.")
    return recipe.kernels.passes if is_pass else 1.0


def _backward(recipe: Recipe, op: Op) -> Iterator[tuple[Op, float]]:
    if op.kind == "attention":
        yield op, FUSED_BACKWARD
    elif op.kind == "collective" or op.name in ("unpack", "loss", "wires"):
        yield op, 1.0
    elif op.name == "attention.softmax":
        yield op, recipe.kernels.softmax[1] / recipe.kernels.softmax[0]
    elif op.kind == "elementwise":
        yield op, 2.0
    else:
        quant = recipe.stream if op.dtype == recipe.dtype else recipe.quant
        product = partial(matmul, quant=quant, count=op.count, groups=op.groups)
        yield product(f"{op.name}.dx", op.m * op.groups, int(op.k), int(op.n)), 1.0
        is_frozen = recipe.adapter_rank and op.name != "adapter" and not op.name.startswith("attention.")
        if not is_frozen:
            yield product(f"{op.name}.dw", op.k * op.groups, int(op.n), int(op.m)), 1.0


def _slowest_stage_s(recipe: Recipe, work: tuple[Work, ...], *, collective: bool) -> float:
    """Seconds of one micro-batch there: a share of the layers, and the head or the embedding."""
    chosen = [each for each in work if (each.op.kind == "collective") == collective]
    ends = sum(each.seconds for each in chosen if each.op.name in _AT_THE_ENDS)
    layers_s = sum(each.seconds for each in chosen) - ends
    largest = math.ceil(recipe.model.n_layers / recipe.pp) / recipe.model.n_layers
    return largest * layers_s + ends


def _communication_s(recipe: Recipe, work: tuple[Work, ...]) -> tuple[float, float]:
    """Seconds exposed and hidden in a step: of weights and gradients, and between stages."""
    device, sharding = recipe.device, recipe.sharding
    exposed = hidden = 0.0
    params, n_layers = first_stage(recipe.model, recipe.pp)
    trained = _trained_params(recipe)
    windows = {
        "forward": sum(each.seconds for each in work if each.during == "forward") / recipe.pp,
        "backward": sum(each.seconds for each in work if each.during != "forward") / recipe.pp,
    }
    transfers = [
        # After a step only what was trained is gathered; for use, all weights are.
        (replace(each, bytes_=gather_bytes(recipe)), params / recipe.tp)
        if each.kind == "all_gather" and each.when != "step"
        else (each, trained / recipe.tp)
        for each in sharding.transfers(recomputed=recipe.recompute == "full")
    ]
    # Where the host keeps the weights, each rank fetches its share before it is gathered.
    fetch_s = 1 / device.host_link_bytes_per_s if recipe.offload == "all" else 0.0
    for when, times in (("forward", recipe.n_micro), ("backward", recipe.n_micro), ("step", 1)):
        seconds = sum(
            replace(each, stride=each.stride * recipe.tp).seconds(
                n_params, device.links, n_layers, flat=sharding.flat
            )
            + (each.kind == "all_gather" and when != "step")
            * (fetch_s * each.bytes_ * n_params / each.n_ranks)
            for each, n_params in transfers
            if each.when == when
        )
        # Behind computing, but for the first or last layer's; at a step's end, behind the last backward pass.
        window = windows["forward" if when == "forward" else "backward"]
        behind = recipe.overlap * min(window, seconds * (1 - 1 / n_layers))
        narrowing_s = sum(_narrowing_s(recipe, each, n) for each, n in transfers if each.when == when)
        exposed += times * (seconds - behind + narrowing_s)
        hidden += times * behind
    if recipe.pp > 1:
        rows = recipe.micro_batch * recipe.n_seq_tok * recipe.model.d / recipe.tp
        sent = rows * _wire_bytes(recipe)
        send_s, _ = collective_s("send", sent, 2 * recipe.tp * sharding.n_ranks, device.links)
        send_s += 2 * (_E * rows + sent) / device.bytes_per_s * bool(recipe.wires)
        exposed += 2 * recipe.n_micro * recipe.virtual_stages * send_s
    return exposed, hidden


def _narrowing_s(recipe: Recipe, transfer: Transfer, n_params: float) -> float:
    """A rank narrows what it sends and widens what it has received, in a pass over it each; of weights it
    sends its own share."""
    sharding, gathers = recipe.sharding, transfer.kind == "all_gather"
    sent = sharding.gather_bytes if gathers else sharding.reduce_bytes
    passed = n_params * transfer.bytes_ / sent * (1 + (1 / transfer.n_ranks if gathers else 1))
    return passed * (_E + sent) / recipe.device.bytes_per_s if sent < _E else 0.0


def _wire_bytes(recipe: Recipe) -> float:
    return ELEMENT_BYTES[recipe.wires or recipe.dtype]


def _trained_params(recipe: Recipe) -> float:
    """Parameters of a stage that have gradients: its adapters' where the rest is frozen."""
    if recipe.adapter_rank:
        return recipe.adapter_params / recipe.pp
    return first_stage(recipe.model, recipe.pp)[0]


def _optimizer_s(recipe: Recipe) -> float:
    """Adam over what one rank keeps of the states, in its memory or, over the host's link, in the host's.

    It reads and writes states, reads gradients, writes weights; without fp32 weights it reads those, too.
    """
    states = recipe.sharding.optimizer
    kept = _trained_params(recipe) / recipe.tp / states.degree
    moved = 2 * states.bytes_ + (4 if states.bytes_ >= 12 else 6)
    if recipe.offload == "none":
        return kept * moved / recipe.device.bytes_per_s
    in_node = max((link.n_devices for link in recipe.device.links if link.scope != "network"), default=1)
    host_s = moved * min(recipe.n_devices, in_node) / _HOST_MEMORY
    return kept * (2 * ELEMENT_BYTES[recipe.dtype] / recipe.device.host_link_bytes_per_s + host_s)
