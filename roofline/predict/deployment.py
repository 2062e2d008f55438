"""A model on devices, asked for prompts of one length: each phase's ops, their bounds and predictions."""

from collections.abc import Mapping
from dataclasses import dataclass

from burstline.roofline.device.calibration import Calibration, generic, load_calibration, with_host
from burstline.roofline.device.device import Device, Limit
from burstline.roofline.errors import RooflineError
from burstline.roofline.model.shapes import ELEMENT_BYTES, Quant
from burstline.roofline.model.step import Step
from burstline.roofline.predict.bound import Bound, StepLimit, ceiling, ceilings, classify, classify_step
from burstline.roofline.predict.predict import Clock, Deployment, Prediction, host_seconds, step_seconds


@dataclass(frozen=True, slots=True)
class UniformBatch:
    """`batch` requests at once for each replica, equal in length, decoded to their end."""

    batch: int
    n_prompt_tok: int
    n_output_tok: int

    def __post_init__(self) -> None:
        sizes = {"batch": self.batch, "prompt": self.n_prompt_tok, "output": self.n_output_tok}
        for name, value in sizes.items():
            if value < 1:
                raise RooflineError(f"{name} must be at least 1, not {value}")

    def steps(self) -> dict[str, tuple[Step, int]]:
        """The step of each phase and how often it runs; decode at its mean context."""
        steps = {"prefill": (Step.prefill(self.batch, self.n_prompt_tok), 1)}
        if self.n_output_tok > 1:
            mean_context = self.n_prompt_tok + round(self.n_output_tok / 2)
            steps["decode"] = (Step.decode(self.batch, mean_context), self.n_output_tok - 1)
        return steps


@dataclass(frozen=True, slots=True)
class Line:
    """One op of a phase: its bound, and its prediction by each tier."""

    bound: Bound
    predictions: Mapping[str, Prediction]

    @property
    def seconds(self) -> float:
        """The last tier's prediction, the ceiling where there is none."""
        return [self.bound.seconds, *(p.seconds for p in self.predictions.values())][-1]

    @property
    def limit(self) -> Limit:
        """What limits the op, launches counted where a tier knows what they cost."""
        by_tier = [classify(self.bound, p.floor_s, p.seconds) for p in self.predictions.values()]
        return [self.bound.limit, *by_tier][-1]


@dataclass(frozen=True, slots=True)
class PhaseBound:
    """One step of a phase, on one device. `n_steps` is how often the request runs it; `host_s` by tier."""

    lines: tuple[Line, ...]
    n_steps: int
    host_s: Mapping[str, float]

    @property
    def ceiling_s(self) -> float:
        return sum(line.bound.seconds for line in self.lines)

    def predicted_s(self, tier: str) -> float:
        return step_seconds((line.predictions[tier] for line in self.lines), self.host_s[tier])

    def range_s(self, tier: str) -> tuple[float, float]:
        """Between which four of five measured cases lie, if all ops err together."""
        ops_s = [line.predictions[tier] for line in self.lines]
        return sum(p.low_s for p in ops_s) + self.host_s[tier], sum(p.high_s for p in ops_s) + self.host_s[
            tier
        ]

    def limit(self) -> StepLimit:
        """The class of ops that takes most of the step, or the host, by the last tier where there is any."""
        host_s = [0.0, *self.host_s.values()][-1]
        return classify_step(((line.limit, line.seconds) for line in self.lines), host_s)


def calibrations_of(device: Device, stack: str = "default") -> dict[str, Calibration]:
    """The shipped ways to predict for a device by tier, the most trusted last: generic, its own fit.

    Each with the host of the same serving stack.
    """
    own = load_calibration(device)
    known = {"generic": generic(device)}
    if own.name != "generic":
        known["device fit" if own.tier > 1 else "fit of its generation"] = own
    return {tier: with_host(calibration, stack) for tier, calibration in known.items()}


def phase_bounds(
    deployment: Deployment,
    asked: UniformBatch,
    calibrations: Mapping[str, Calibration] | None = None,
) -> dict[str, PhaseBound]:
    """Each phase of `asked`, op by op; `calibrations` by tier, the most trusted last."""
    tiers = calibrations or {}
    phases = {}
    for name, (step, n_steps) in asked.steps().items():
        by_tier = {tier: deployment.predict(step, known) for tier, known in tiers.items()}
        lines = tuple(
            Line(bound, {tier: predictions[i] for tier, predictions in by_tier.items()})
            for i, bound in enumerate(ceilings(deployment.ops(step), deployment.device))
        )
        host_s = {tier: host_seconds(step, by_tier[tier], known) for tier, known in tiers.items()}
        phases[name] = PhaseBound(lines, n_steps, host_s)
    return phases


def latency_s(phases: Mapping[str, PhaseBound], tier: str | None = None) -> float:
    """Seconds from the request to its last token; the ceiling where `tier` is None."""
    return sum(
        phase.n_steps * (phase.ceiling_s if tier is None else phase.predicted_s(tier))
        for phase in phases.values()
    )


def host_sentence(calibration: Calibration) -> str:
    """How much time predictions add for the serving stack's host, in a sentence."""
    if calibration.host:
        return f"host time: {calibration.host}, {calibration.host.source}"
    return "host time is not included in predictions: it was not measured"


def unmeasured(quant: Quant, calibration: Calibration) -> list[str]:
    """Which products in `quant` no table of measured kernels covers, and what is taken instead."""
    kernel, notes = quant.kernel, []
    taken = calibration.measured_kernel(kernel) or "bf16"
    # Vendors state equal peaks for fp16 and bf16; fp8's parameters were tested on fp4.
    if taken != kernel and kernel not in ("fp16", "fp4"):
        notes.append(
            f"no table of {kernel} products: predicted with {taken}'s parameters at {kernel}'s peak, untested"
        )
    experts = quant.expert_kernel
    covered = quant.experts_only and calibration.measured_kernel(experts) == experts
    if ELEMENT_BYTES[quant.weights] < ELEMENT_BYTES[quant.activations] and not covered:
        notes.append(
            f"no table of products with {quant.weights} weights: predicted as {quant.activations}"
            " with fewer bytes, untested"
        )
    return notes


MOST_TOK = 1 << 16
"""A step of more tokens is never asked for."""


def ridge_tok(deployment: Deployment) -> int | None:
    """The least number of tokens in a step whose products with weights are compute-bound, all together.

    For decode that is a batch, for prefill the prompts' length. None: not up to `MOST_TOK`.
    """

    def compute_bound(n_tok: int) -> bool:
        bounds = [
            ceiling(op, deployment.device)
            for op in deployment.ops(Step.decode(n_tok, 1))
            if op.kind == "matmul"
        ]
        return sum(b.compute_s for b in bounds) >= sum(b.memory_s for b in bounds)

    if not compute_bound(MOST_TOK):
        return None
    low, high = 0, MOST_TOK
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if compute_bound(middle) else (middle, high)
    return high


def decode_curve(
    deployment: Deployment, n_context_tok: int, calibration: Calibration | None, most: int
) -> list[tuple[int, float]]:
    """(batch, seconds of a decode step) for batches of powers of two up to `most`; ceilings without one."""
    clock = Clock(deployment, calibration)
    batches = [1 << e for e in range(max(1, most).bit_length())]
    return [(n, clock(Step.decode(n, n_context_tok))) for n in batches]
