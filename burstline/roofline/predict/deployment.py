"""A model on devices with prompts of one length: the ops of each phase, their bounds and predictions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from burstline.errors import RooflineError
from burstline.roofline.device.calibration import Calibration
from burstline.roofline.model.step import Step
from burstline.roofline.predict.bound import ceiling
from burstline.roofline.predict.predict import Clock, Deployment, StepTimes


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
    """Each phase of `asked`, op by op."""
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


def host_sentence(calibration: Calibration) -> str:
    """How much time predictions add for the serving stack's host, in a sentence."""
    if calibration.host:
        return f"host time: {calibration.host}, {calibration.host.source}"
    return "host time is not included in predictions: it was not measured"


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
        return sum(b.compute_s for b in bounds) >= sum(b.expected_memory_s for b in bounds)

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
