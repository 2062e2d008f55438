"""A model on devices, asked for prompts of one length: each phase's ops, their bounds and predictions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roofline.bound import Bound, Limit, StepLimit, ceilings, classify, classify_step
from roofline.device import Device
from roofline.errors import RooflineError
from roofline.model import ModelShape, Quant
from roofline.ops import Op, Step, ops
from roofline.parallel import Parallel


@dataclass(frozen=True, slots=True)
class Tier:
    """A way to predict: seconds of all `count` runs of an op, and how many of those are launches."""

    name: str
    seconds: Callable[[Op, Device], float]
    floor_s: Callable[[Op, Device], float]


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine's worth of a model: `parallel.n_devices` of one kind of device."""

    model: ModelShape
    quant: Quant
    parallel: Parallel
    device: Device


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked: `batch` requests at once for each replica, equal in length, decoded to their end."""

    batch: int
    n_prompt_tok: int
    n_output_tok: int

    def __post_init__(self) -> None:
        for name, value in (
            ("batch", self.batch),
            ("prompt", self.n_prompt_tok),
            ("output", self.n_output_tok),
        ):
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
    """One op of a phase: its bound, what limits it once launches count, and seconds by calibration tier."""

    bound: Bound
    limit: Limit
    predicted_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        """The last tier's prediction, the ceiling where there is none."""
        return [self.bound.seconds, *self.predicted_s.values()][-1]


@dataclass(frozen=True, slots=True)
class PhaseBound:
    """One step of a phase, on one device. `n_steps` is how often the request runs it."""

    lines: tuple[Line, ...]
    n_steps: int

    @property
    def ceiling_s(self) -> float:
        return sum(line.bound.seconds for line in self.lines)

    def predicted_s(self, tier: str) -> float:
        return sum(line.predicted_s[tier] for line in self.lines)

    def limit(self) -> StepLimit:
        """The class of ops that takes most of the step, by the last tier where there is any."""
        return classify_step((line.limit, line.seconds) for line in self.lines)


def phase_bounds(
    deployment: Deployment, asked: Asked, tiers: Sequence[Tier] = (), *, expert_share: float = 1.0
) -> dict[str, PhaseBound]:
    """Each phase of `asked`, op by op; the most trusted of the `tiers` last."""
    phases = {}
    for name, (step, n_steps) in asked.steps().items():
        found = ops(deployment.model, deployment.quant, deployment.parallel, step, expert_share=expert_share)
        bounds = ceilings(found, deployment.device)
        phases[name] = PhaseBound(tuple(_line(bound, deployment.device, tiers) for bound in bounds), n_steps)
    return phases


def _line(bound: Bound, device: Device, tiers: Sequence[Tier]) -> Line:
    floor_s = tiers[-1].floor_s(bound.op, device) if tiers else 0.0
    predicted_s = {tier.name: tier.seconds(bound.op, device) for tier in tiers}
    return Line(bound, classify(bound, floor_s), predicted_s)


def latency_s(phases: Mapping[str, PhaseBound], tier: str | None = None) -> float:
    """Seconds from the request to its last token; the ceiling where `tier` is None."""
    return sum(
        phase.n_steps * (phase.ceiling_s if tier is None else phase.predicted_s(tier))
        for phase in phases.values()
    )
