"""Equal requests to a model on devices: speed, what limits each phase, what fits, and what would change it.

`facts` is the answer of `burstline bound`, ready for JSON. Times are seconds unless the key says µs.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from burstline.errors import RooflineError
from burstline.roofline.device.calibration import Calibration, Constants
from burstline.roofline.device.device import Device
from burstline.roofline.model.ops import Step
from burstline.roofline.model.shapes import ELEMENT_BYTES, QUANTS, Quant
from burstline.roofline.predict.capacity import Room, kv_bytes, room
from burstline.roofline.predict.predict import Deployment, Prediction, StepTimes, ceiling


@dataclass(frozen=True, slots=True)
class UniformBatch:
    """`batch` requests at once for each replica, equal in length, decoded to their end.

    A step computes at most `budget_tok` prompt tokens: longer prompts are cut into equal chunks.
    """

    batch: int
    n_prompt_tok: int
    n_output_tok: int
    budget_tok: int = 1 << 20

    def __post_init__(self) -> None:
        sizes = {"batch": self.batch, "prompt": self.n_prompt_tok, "output": self.n_output_tok}
        for name, value in sizes.items():
            if value < 1:
                raise RooflineError(f"{name} must be at least 1, not {value}")

    @property
    def n_tok(self) -> int:
        """Of a request, prompt and output."""
        return self.n_prompt_tok + self.n_output_tok

    @property
    def mean_context_tok(self) -> int:
        """Of a request while it decodes."""
        return self.n_prompt_tok + round(self.n_output_tok / 2)

    def steps(self, pp: int = 1) -> dict[str, tuple[Step, int]]:
        """The step of each phase and how often it runs; decode at its mean context, a micro-batch a stage."""
        at_once, n_chunks = max(1, self.budget_tok // self.n_prompt_tok), 1
        if self.n_prompt_tok > self.budget_tok:
            n_chunks = math.ceil(self.n_prompt_tok / self.budget_tok)
        chunk = math.ceil(self.n_prompt_tok / n_chunks)
        before = chunk * (n_chunks - 1) // 2  # on average; so the chunks see as many keys as whole prompts
        steps: dict[str, tuple[Step, int]] = {}
        whole, rest = divmod(self.batch, at_once)
        for name, n, n_steps in (("prefill", at_once, whole), ("last prefill", rest, 1)):
            if n and n_steps:
                steps[name if steps else "prefill"] = (Step.prefill(n, chunk, before), n_steps * n_chunks)
        if self.n_output_tok > 1:
            micro = math.ceil(self.batch / pp)
            steps["decode"] = (Step.decode(micro, self.mean_context_tok), self.n_output_tok - 1)
        return steps


def phase_bounds(
    deployment: Deployment, asked: UniformBatch, calibration: Calibration | None = None
) -> dict[str, StepTimes]:
    return {
        name: replace(deployment.predict(step, calibration), n_steps=n_steps)
        for name, (step, n_steps) in asked.steps(deployment.parallel.pp).items()
    }


def latency_s(phases: Mapping[str, StepTimes], *, ceiling: bool = False) -> float:
    """Seconds from the request to its last token, as predicted or at the ceiling."""
    return sum(p.n_steps * (p.ceiling_s if ceiling else p.predicted_s) for p in phases.values())


def latency_ends_s(phases: Mapping[str, StepTimes]) -> tuple[float, float]:
    """The same with the fastest and the slowest published kernels."""
    low, high = (sum(p.n_steps * p.ends_s[i] for p in phases.values()) for i in (0, 1))
    return low, high


MOST_TOK = 1 << 16
"""A step of more tokens is never asked for."""


def ridge_tok(deployment: Deployment) -> int | None:
    """The least number of tokens in a step whose products with weights are compute-bound, all together.

    For decode that is a batch, for prefill the prompts' length. None: not up to `MOST_TOK`.
    """

    def compute_bound(n_tok: int) -> bool:
        step_ops = deployment.ops(Step.decode(n_tok, 1))
        bounds = [ceiling(op, deployment.device) for op in step_ops if op.kind == "matmul"]
        return sum(b.compute_s for b in bounds) >= sum(b.expected_memory_s for b in bounds)

    if not compute_bound(MOST_TOK):
        return None
    return bisect_left(range(MOST_TOK), True, lo=1, key=compute_bound)


@dataclass(frozen=True, slots=True)
class Question:
    """Equal requests to a model on its devices, of whose memory the engine takes the share `utilisation`."""

    on: Deployment
    known: Calibration
    batch: UniformBatch
    utilisation: float = 0.9

    def answer(self) -> tuple[Room, dict[str, StepTimes]]:
        """The memory, and the step of each phase; RooflineError where the requests do not fit."""
        kv_room = room(self.on, utilisation=self.utilisation)
        kv_room.check(self.batch.batch, self.batch.n_tok)
        return kv_room, phase_bounds(self.on, self.batch, self.known)

    def changed(self, **changes: Any) -> "Question":
        """The same of another deployment."""
        return replace(self, on=replace(self.on, **changes))


def facts(
    question: Question, shipped: Calibration, others: Sequence[tuple[Device, Calibration]]
) -> dict[str, Any]:
    """The whole answer. `shipped` are the constants without the user's, `others` devices for what-ifs."""
    on, batch = question.on, question.batch
    kv_room, phases = question.answer()
    latency = {"ceiling": latency_s(phases, ceiling=True), "predicted": latency_s(phases)}
    n_out = batch.batch * batch.n_output_tok * on.parallel.dp
    return {
        "model": {
            "name": on.model.name,
            "params": on.model.params(),
            "active_params": on.model.active_params(),
        },
        "quant": asdict(on.quant),
        "parallel": asdict(on.parallel),
        "device": device_facts(on.device),
        "asked": asdict(batch),
        "answer": _limits(question, phases),
        "phases": {
            name: {
                **_named(phase, "n_steps", "ceiling_s", "predicted_s", "range_s", "differs", "host_s"),
                "kernels_range_s": phase.ends_s,
                "bound": phase.limit,
                "ops": [_op_facts(p, phase, on.device) for p in phase.predictions],
            }
            for name, phase in phases.items()
        },
        "what_if": list(_what_ifs(question, shipped, others)),
        "constants": list(_moved_by(question, latency["predicted"])),
        "latency_s": latency,
        "latency_range_s": latency_ends_s(phases),
        "output_tok_per_s": {by: n_out / seconds for by, seconds in latency.items()},
        "memory": {
            **_named(kv_room, "weight_bytes", "usable_bytes", "reserved_bytes"),
            **_named(kv_room, "kv_bytes", "kv_range_bytes", "kv_tok"),
            "kv_bytes_per_tok": kv_bytes(on.model, on.quant, on.parallel, 1),
            "largest_batch": kv_room.largest_batch(batch.n_tok),
            "fits": kv_room.fits(batch.batch, batch.n_tok),
            "windows": any(layer.attention.window or layer.attention.chunk for layer in on.model.layers),
        },
        "assumed": [*_assumed(question, kv_room), *_of_calibration(on.quant, question.known)],
    }


def _limits(question: Question, phases: Mapping[str, StepTimes]) -> dict[str, Any]:
    """The limit of each phase, and the tokens per step from which its products are compute-bound."""
    decode = phases["decode"].predictions if "decode" in phases else ()
    attention = {p.bound.limit for p in decode if p.op.kind == "attention"}
    return {
        "limits": {name: phase.limit for name, phase in phases.items()},
        "ridge_tok": ridge_tok(question.on),
        "attention_memory_bound": attention == {"memory"},
        "context_tok": question.batch.mean_context_tok,
    }


def _what_ifs(
    question: Question, shipped: Calibration, others: Sequence[tuple[Device, Calibration]]
) -> Iterator[dict[str, Any]]:
    """The same requests with one thing changed: constants, how numbers are stored, ranks, the device."""
    on, batch = question.on, question.batch
    changes = [("as asked", question)]
    if question.known != shipped:
        changes.append(("constants as shipped", replace(question, known=shipped)))
    changes.extend(
        (f"{name} weights", question.changed(quant=QUANTS[name]))
        for name in ("fp8-static", "fp8-static-kv8", "int4", "nvfp4-kv8")
        if QUANTS[name] != on.quant and on.quant.stream in ("bf16", "fp16")
    )
    tp = 2 * on.parallel.tp
    changes.append((f"TP {tp}", question.changed(parallel=replace(on.parallel, tp=tp))))
    changes.extend(
        (device.name, replace(question.changed(device=device), known=known)) for device, known in others
    )
    for change, changed in changes:
        try:
            kv_room, phases = changed.answer()
        except RooflineError as error:
            yield {"change": change, "impossible": str(error)}
        else:
            seconds = latency_s(phases)
            yield {
                "change": change,
                "latency_s": seconds,
                "latency_range_s": latency_ends_s(phases),
                "differs": [each for phase in phases.values() for each in phase.differs],
                "output_tok_per_s": batch.batch * batch.n_output_tok * changed.on.parallel.dp / seconds,
                "largest_batch": kv_room.largest_batch(batch.n_tok),
            }


def _moved_by(question: Question, base_s: float) -> Iterator[dict[str, Any]]:
    """Each constant that matters here: its value, and how the latency moves where it is 10% larger."""
    known = question.known
    for slot in fields(Constants):
        value = getattr(known.constants, slot.name)
        more = known.changed({slot.name: 1.1 * value})
        change = latency_s(phase_bounds(question.on, question.batch, more)) / base_s - 1
        if abs(change) >= 0.0005:
            own = slot.name in known.own
            yield {"name": slot.name, "value": value, "own": own, "change_at_10_percent_more": change}


def device_facts(device: Device) -> dict[str, Any]:
    return {
        **_named(device, "id", "name"),
        "peak_flops_per_s": dict(device.peaks),
        "bytes_per_s": device.bytes_per_s,
        "capacity_bytes": device.memory.capacity_bytes,
        **_named(device, "source", "assurance"),
    }


def _op_facts(p: Prediction, phase: StepTimes, device: Device) -> dict[str, Any]:
    op, total = p.op, sum(other.seconds for other in phase.predictions)
    return {
        "op": op.name,
        **_named(op, "kind", "m", "n", "k", "groups", "count"),
        "flops": op.count * op.flops,
        "bytes": op.count * (op.bytes or op.link_bytes),
        "intensity": op.intensity,
        "ridge": device.ridge(op.dtype) if op.flops else None,
        "bound": p.limit,
        "level": p.bound.level,
        "ideal_us": p.bound.seconds * 1e6,
        "predicted_us": p.seconds * 1e6,
        "by": p.by,
        "share": p.seconds / total if total else 0.0,
    }


def _named(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _assumed(question: Question, kv_room: Room) -> list[str]:
    device, parallel, batch = question.on.device, question.on.parallel, question.batch
    kept = f"{kv_room.reserved_bytes / 1e9:.1f} GB"
    said = [
        f"peaks and bandwidths are dense datasheet figures ({device.source}; {device.assurance})",
        "every request has the same length; decode is shown at its mean context",
        "the ceiling charges products, attention and cache writes; other passes are assumed to be fused",
        f"engines take {question.utilisation:.0%} of the memory, {kept} of it for activations and NCCL",
        "what they keep follows vocabulary, experts and ranks, as in vLLM 0.19 on H100",
    ]
    if batch.batch * batch.n_prompt_tok > batch.budget_tok:
        said.append(f"prompts are computed {batch.budget_tok:,} tokens a step, then all decode")
    elif batch.batch > 1:
        said.append("the whole batch is prefilled at once, then decodes together")
    if parallel.pp > 1:
        said.append("each pipeline stage decodes a micro-batch; prompts pass one at a time")
    if parallel.tp * parallel.ep > 1:
        said.append("the ceiling's links are ideal: no latency, the full bandwidth of one direction")
    return said


def _of_calibration(quant: Quant, known: Calibration) -> Iterator[str]:
    yield from known.sentences()
    if quant.held != 1:
        said = f"the weight files hold {quant.held:.0%} of the bytes that config.json says ({quant.weights})"
        yield f"{said}: bytes are as in the files, products as config.json says"
    if ELEMENT_BYTES[quant.weights] < ELEMENT_BYTES[quant.activations]:
        yield f"{quant.weights} weights count as fewer bytes of {quant.activations} products, untested"
