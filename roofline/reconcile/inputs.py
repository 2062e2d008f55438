"""What goes into a reconciliation of a run with the hardware."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from roofline.device.calibration import Calibration
from roofline.model.step import Step
from roofline.predict.predict import Clock, Deployment
from roofline.predict.simulate import Asked, Limits

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StepSeen:
    """A step of an engine's log. `op_seconds` go by our op names, of all layers; what was timed together is
    joined by a plus ("rope+kv_write+attention")."""

    step: Step
    seconds: float
    op_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What was measured: requests as served, from the first arrival to the last token.

    `first_s` and `last_s` are each request's first and last token on the clock of `Asked.due_s`, None where
    they are not known. `steps` None: they are not known either; `logged`: the engine itself wrote them down.
    `assumed` says what the layer above had to guess. `paced`: arrivals of an open loop, not the server,
    decided how long it took, so that time without a step is no loss.
    """

    requests: Sequence[Asked]
    makespan_s: float
    limits: Limits
    steps: Sequence[StepSeen] | None = None
    logged: bool = True
    first_s: Floats | None = None
    last_s: Floats | None = None
    assumed: tuple[str, ...] = ()
    paced: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """Which parts of a set-up are certain: the engine or a person states them. The others are assumptions.

    Where `devices` is False, up to `at_most` may serve the model together (None: any number) and up to
    `one_request` may work on one request. `weights` covers the dtype of the products' inputs too.
    """

    devices: bool = True
    weights: bool = True
    kv: bool = True
    speculation: bool = True
    at_most: int | None = None
    one_request: int = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """What ran, on what, and what is known of it. `calibration` None: ceilings only.

    `draft_tok`: tokens that speculative decoding proposes in each step.
    """

    deployment: Deployment
    calibration: Calibration | None
    known: Known = Known()
    draft_tok: int = 0

    def clock(self) -> Clock:
        return Clock(self.deployment, self.calibration)
