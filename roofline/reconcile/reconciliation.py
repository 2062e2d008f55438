"""What goes into a reconciliation of a run with the hardware, and what comes out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from roofline.device.calibration import Calibration
from roofline.device.device import Device
from roofline.model.parallel import Parallel
from roofline.model.shapes import ModelShape, Quant
from roofline.model.step import Step
from roofline.predict.bound import Limit
from roofline.predict.predict import Clock
from roofline.predict.simulate import Asked, Limits

StepPhase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, eq=False)
class StepSeen:
    """A step of an engine's log. `op_seconds` go by our op names, of all layers; what was timed together is
    joined by a plus ("rope+kv_write+attention")."""

    step: Step
    seconds: float
    op_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured: requests as served, from the first arrival to the last token.

    `steps` None: the engine keeps no log. `assumed` says what the layer above had to guess.
    """

    requests: Sequence[Asked]
    makespan_s: float
    limits: Limits
    steps: Sequence[StepSeen] | None = None
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setup:
    """What ran, on what, and what is known of it. `calibration` None: ceilings only."""

    model: ModelShape
    quant: Quant
    parallel: Parallel
    device: Device
    calibration: Calibration | None

    def clock(self) -> Clock:
        return Clock(self.model, self.quant, self.parallel, self.device, self.calibration)


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op of a phase's typical step: a row of the bound table and a point of the roofline plot.

    Seconds are of all `count` runs; `measured_s` is the median of the steps nearest the mean, at this step's
    size, None where the engine does not log the op. `achieved` and
    `predicted` are FLOP/s.
    """

    name: str
    kind: str
    count: int
    m: float
    n: float
    k: float
    flops: float
    bytes: float
    intensity: float
    ridge: float | None
    limit: Limit
    ideal_s: float
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float | None
    share: float
    predicted_flops_per_s: float
    achieved_flops_per_s: float | None
    tier: str


@dataclass(frozen=True, slots=True)
class Utilisation:
    """A share of peak or bandwidth: as measured (None: no step log), at the ceiling, and reachable."""

    measured: float | None
    ceiling: float
    reachable: float


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """All steps of one phase; "prefill" are those that compute any prompt, decodes beside it included.

    `mfu` counts causal FLOPs, `mfu_full` the rectangle, as vLLM's own counter does. `ops` are of the typical
    step: the real one nearest the mean in tokens and context.
    """

    phase: StepPhase
    n_steps: int
    mean_tok: float
    mean_requests: float
    mean_context_tok: float
    mfu: Utilisation
    mfu_full: Utilisation
    mbu: Utilisation
    limit_shares: Mapping[str, float]
    ops: tuple[OpRow, ...]


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of the waterfall; all of them sum to the makespan. Negative: faster than predicted."""

    name: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a change should do to the makespan; None where the device or the model forbids it, and why."""

    change: str
    makespan_s: float | None
    ratio: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A measured rate above a ceiling: something stated about the run cannot be true."""

    what: str
    excess: float
    tolerance: float
    causes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The answer to "how far from the metal?", plain enough for JSON."""

    sentence: str
    phases: tuple[PhaseRow, ...]
    waterfall: tuple[Bar, ...]
    predicted_s: float
    ceiling_s: float
    sensitivity: tuple[WhatIf, ...]
    assumed: tuple[str, ...]
    suspicions: tuple[Suspicion, ...]
    device: str
    tier: str
