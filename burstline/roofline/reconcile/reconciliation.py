"""The result of a reconciliation of a run with the hardware; every summary contains it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from burstline.errors import tables_beside
from burstline.roofline.device.calibration import HostFit
from burstline.roofline.device.device import Level, Limit
from burstline.roofline.model.ops import Phase
from burstline.roofline.model.shapes import Quant

_TEXTS: Final = tables_beside(__file__, "sentences.toml")
CAUSES: Final = tuple(_TEXTS["causes"])
EXPLANATIONS: Final[Mapping[str, str]] = _TEXTS["explanations"]
BARS: Final[Mapping[str, str]] = _TEXTS["bars"]
OTHER_STEPS: Final[Mapping[str, str]] = _TEXTS["steps"]


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op of a phase's typical step: a row of the bound table and a point of the roofline plot.

    Seconds are of all `count` runs; `measured_s` is the median of the steps nearest the mean, at this step's
    size, None where the engine does not log the op; `slow_s` their 90th percentile. `achieved` and
    `predicted` are FLOP/s. `by`: the constants that set the prediction.
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
    by: tuple[str, ...]
    slow_s: float | None = None

    @property
    def label(self) -> str:
        """Its name, with the phase where both have such an op: attention (decode)."""
        part = self.kind.partition(" ")[2]
        return f"{self.name} ({part})" if part else self.name


@dataclass(frozen=True, slots=True)
class Utilisation:
    """A share of peak or bandwidth: as measured (None: no step log), at the ceiling, and as predicted."""

    measured: float | None
    ceiling: float
    reachable: float


CLEAR: Final = 0.6
"""The share of a phase's time from which on one limit is called its bound."""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """All steps of one phase; "prefill" are those that compute any prompt, decodes in the same step included.

    "decode" are decode-only steps; of "prefill" `n_mixed` also decode.
    `seconds` is how long all of them took, as predicted where no step was measured.
    `mfu` counts causal FLOPs, `mfu_full` the rectangle, as vLLM's own counter does. `ops` are of the typical
    step: the real one nearest the mean in tokens and context.

    Of a profile, `ops` have shares of the measured step, `rest` is what else it did by name, in seconds, and
    `after_s` the time from the end of its forward pass to the next, None where none was seen.
    """

    phase: Phase
    n_steps: int
    mean_tok: float
    mean_requests: float
    mean_context_tok: float
    mfu: Utilisation
    mfu_full: Utilisation
    mbu: Utilisation
    limit_shares: Mapping[Limit, float]
    ops: tuple[OpRow, ...]
    n_mixed: int = 0
    seconds: float = 0.0
    rest: Mapping[str, float] = field(default_factory=dict)
    after_s: float | None = None

    @property
    def limit(self) -> Limit:
        return next(iter(self.limit_shares))

    @property
    def reached(self) -> float | None:
        """The speed that was measured, as a share of the speed predicted for these shapes."""
        return None if self.mfu.measured is None else self.mfu.measured / self.mfu.reachable

    def use(self, device: "DeviceFacts") -> str:
        """`memory-bound: MBU 17% of the measured bandwidth, 64% of what these shapes reach; ...`."""
        name, of, each = (
            ("MFU", "peak", self.mfu) if self.limit == "compute" else ("MBU", "bandwidth", self.mbu)
        )
        share = each.reachable if each.measured is None else each.measured
        told = f"{name} {share:.0%} of the {device.known_by} {of}"
        if self.reached is None:
            told += " predicted"
        elif self.reached > 1:
            told += ", as caches help" * (share > 1)
            told += f", {self.reached - 1:.0%} faster than predicted for these shapes"
        else:
            told += f", {self.reached:.0%} of what these shapes reach"
        largest = max(self.ops, key=lambda op: op.share)
        return f"{self._bound()}: {told}; the largest part is {largest.label} ({largest.share:.0%})"

    def _bound(self) -> str:
        """`memory-bound`, or how the time divides where no limit has most of it."""
        (limit, share), *others = self.limit_shares.items()
        if share >= CLEAR or not others:
            return f"{limit}-bound"
        return f"{limit}-bound for {share:.0%} of the time and {others[0][0]}-bound for {others[0][1]:.0%}"

    @property
    def step_s(self) -> float:
        """The typical step as measured, the sum of its parts."""
        return sum(op.measured_s or 0.0 for op in self.ops) + sum(self.rest.values())


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of the waterfall; all of them sum to the makespan. Negative: faster than predicted."""

    name: str
    seconds: float
    why: str


WAITING: Final = "waiting for requests"
"""The last bar of a run that was paced by its arrivals: idle time that no server could use."""


def largest_gap(bars: Sequence[Bar]) -> Bar:
    """The bar to look at first: the longest above the ceiling that is not for want of requests."""
    return max((bar for bar in bars[1:] if bar.name != WAITING), key=lambda bar: bar.seconds)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The predicted makespan after a change; None and a reason if the device or the model forbids it."""

    change: str
    makespan_s: float | None
    ratio: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A rate above its bound under every set-up that agrees with what is known."""

    what: str
    excess: float
    tolerance: float
    causes: tuple[str, ...]

    def said_of(self, device: "DeviceFacts") -> str:
        """That it exceeds the ceiling, in a sentence."""
        over = f"{self.what} exceeds the ceiling of {device.name} by {self.excess:.0%}"
        return f"Impossible rate: {over} (tolerance {self.tolerance:.0%})."


@dataclass(frozen=True, slots=True)
class Explained:
    """A rate above the bound of the assumed set-up, but not of every set-up: any of `by` explains it."""

    what: str
    excess: float
    by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device's ceilings in the dtype that computes, and what a good kernel of that dtype reaches."""

    id: str
    name: str
    dtype: str
    n_devices: int
    peak_flops_per_s: float
    levels: tuple[Level, ...]
    reached_flops_per_s: float | None
    reached_bytes_per_s: float | None
    measured_spread: float | None
    host: HostFit | None

    @property
    def known_by(self) -> str:
        return "specified" if self.measured_spread is None else "measured"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model and how it is stored; where its shape and the device's name come from."""

    name: str
    params: int
    quant: Quant
    config_from: str | None = None
    device_from: str | None = None


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """A run and what its hardware could do: phases, gap, what would help, what was assumed."""

    sentence: str
    phases: tuple[PhaseRow, ...]
    waterfall: tuple[Bar, ...]
    predicted_s: float
    ceiling_s: float
    sensitivity: tuple[WhatIf, ...]
    assumed: tuple[str, ...]
    suspicions: tuple[Suspicion, ...]
    explained: tuple[Explained, ...]
    device: DeviceFacts
    model: ModelFacts
    by: str


@dataclass(frozen=True, slots=True)
class Profiled:
    """An engine's profile beside the roofline: what is lost where, most first, and what to know of it."""

    sentences: tuple[str, ...]
    phases: tuple[PhaseRow, ...]
    device: DeviceFacts
    notes: tuple[str, ...]
    suspicions: tuple[Suspicion, ...] = ()


@dataclass(frozen=True, slots=True)
class NotReconciled:
    """Why a run could not be compared with its hardware; `code` is EXCEEDED or ""."""

    absent: str
    code: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self) if self.code else {"absent": self.absent}


EXCEEDED: Final = "exceeded"
"""The run was faster than what was measured of this CPU: that measurement is none."""
