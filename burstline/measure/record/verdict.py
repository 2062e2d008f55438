"""A verdict in summary.json: the run's state with its reasons, each percentile's grade, judged targets."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Final, Self

from burstline.measure.record.typed_json import OPTIONAL
from burstline.measure.stats.figure import Absent, Figure, Result

LEAST_S: Final = 1e-5  # no smaller effect is told, whatever share of a latency it is
FLOOR_S: Final = 1e-3
SHARE: Final = 0.01
"""Errors of the instrument up to 1 ms or 1% of a percentile are not mentioned, unless above 5% of it."""
MOST_SHARE: Final = 0.05
"""Beyond this share, where that is more than 1 ms, the percentile is unreliable."""


class State(StrEnum):
    """The states of a run, worst first: the one place that orders them."""

    FAILED = "FAILED"
    CLIENT_BOUND = "CLIENT-BOUND"
    DISTURBED = "DISTURBED"
    NOT_STATIONARY = "NOT-STATIONARY"
    NOT_COMPARABLE = "NOT-COMPARABLE"
    COLD = "COLD"
    VALID = "VALID"


def worst(states: Iterable[str]) -> State:
    """The worst of several; what is no state counts as FAILED."""
    return min(map(state_of, states), key=list(State).index, default=State.VALID)


def state_of(text: str) -> State:
    """The state that a summary names; what is unknown or missing is no usable run."""
    return State(text) if text in set(State) else State.FAILED


@cache
def _reasons() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(Path(__file__).with_name("reasons.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that the reader of a run must know: a code, what happened with its size, and what to do."""

    code: str
    text: str
    advice: str

    @classmethod
    def of(cls, name: str, /, **values: object) -> Self:
        """The reason whose text and advice have this name in `reasons.toml`, with these values in them."""
        words, values = _reasons()[name], {**_reasons()["shared"], **values}
        return cls(name.partition(".")[0], words["text"].format(**values), words["advice"].format(**values))


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reasons` are why the state is not VALID, the worst first; `warnings` take nothing from it.

    `also` are the other states that have a reason, None without any.
    """

    state: State
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[Reason, ...] = ()
    also: tuple[State, ...] | None = field(default=None, metadata=OPTIONAL)

    def has(self, code: str) -> bool:
        return any(reason.code == code for reason in self.reasons)

    @property
    def is_interrupted(self) -> bool:
        return any(warning.code == "interrupted" for warning in self.warnings)

    def spoils(self, graded: "PercentileGrade | None", *, is_late: bool) -> str:
        """What makes a number of the run, `graded` so, unreliable, in words; "" where nothing does."""
        if is_late or self.has(SLOW_CLIENT):
            return TOO_LATE
        return "" if not graded or graded.grade != Grade.UNRELIABLE else HELD if graded.held else TOO_LATE


class Use(StrEnum):
    """What a command decides from a run."""

    MET = "an SLO is met"
    MISSED = "an SLO is missed"
    RANKED = "faster, slower, highest"
    SEARCHED = "where the limit is"
    CERTIFIED = "the error of the client"


DECIDES: Final[Mapping[State, frozenset[Use]]] = {
    State.FAILED: frozenset({Use.MISSED, Use.CERTIFIED}),
    State.CLIENT_BOUND: frozenset({Use.MET, Use.MISSED, Use.RANKED, Use.SEARCHED}),
    State.DISTURBED: frozenset({Use.MET}),
    State.NOT_STATIONARY: frozenset({Use.CERTIFIED}),
    State.NOT_COMPARABLE: frozenset({Use.CERTIFIED}),
    State.COLD: frozenset({Use.MET, Use.SEARCHED, Use.CERTIFIED}),
    State.VALID: frozenset(Use),
}
"""What a run with this verdict may decide: the one policy of all commands (docs/method.md says why).

A CLIENT-BOUND run decides by the percentiles that are not graded unreliable.
"""


def withheld(verdict: Verdict, use: Use, *, grows: bool = False) -> State | None:
    """The worst of the run's states that keeps it from deciding this; None where it decides.

    Where requests failed, or a queue or latency `grows` to the end, an SLO that is missed would be missed by
    more in a longer run.
    """
    states = [verdict.state, *(verdict.also or ())]
    if use == Use.MISSED and (grows or State.FAILED in states or verdict.has(QUEUE_GREW)):
        states = [state for state in states if state != State.NOT_STATIONARY]
    return next((s for s in states if use not in DECIDES[s] or verdict.has(CONTRADICTION)), None)


QUEUE_GREW: Final = "overloaded"
CONTRADICTION: Final = "contradiction"
SLOW_CLIENT: Final = "slow-client"
"""Codes of reasons: requests in flight kept growing; the run's numbers contradict each other; the client took
long to follow a reply with its next request, so that a closed loop was a lower load than asked."""


class Replies(StrEnum):
    """What an audit found: whether replies differ from the same requests sent alone."""

    SAME = "same"
    AS_ALONE = "differ as the engine does alone"
    MORE = "differ more under load"


class Grade(StrEnum):
    """`ok`; `as-sent`: late sends move it beyond the tolerance; `unreliable`: late sends moved it beyond its
    interval, or late reads may have moved it by more than 5% or by an unknown amount.
    """

    OK = "ok"
    AS_SENT = "as-sent"
    UNRELIABLE = "unreliable"


TOO_LATE, HELD = "the client was too late", "text was held on the way from the engine to here"


@dataclass(frozen=True, slots=True)
class PercentileGrade:
    """One percentile's grade. Effects are seconds by which lateness moves it, None where that is unknown.

    `as_sent_s` is the percentile counted from the send, where that differs from the one shown. `held`: not
    the client, but what held text on its way, makes it unreliable.
    """

    grade: Grade
    send_effect_s: float | None = None
    read_effect_s: float | None = None
    as_sent_s: float | None = None
    held: bool | None = field(default=None, metadata=OPTIONAL)

    @property
    def is_sent_late(self) -> bool:
        """Whether late sends, more than late reads, make it unreliable."""
        read_s, send_s = self.read_effect_s, self.send_effect_s
        return self.grade == Grade.UNRELIABLE and read_s is not None and (send_s or 0.0) > read_s


Grades = Mapping[str, Mapping[str, PercentileGrade]]
"""By metric and percentile ("ttft", "p99"); percentiles that do not exist have no grade."""


def tolerance_s(value_s: float) -> float:
    """Up to where an effect on a latency of this size is not worth a word."""
    return max(FLOOR_S, SHARE * value_s)


def is_unreliable(value_s: float, read_s: float | None) -> bool:
    """Whether an effect of late reading on a latency of this size, None if unknown, spoils it."""
    return read_s is None or read_s > max(FLOOR_S, MOST_SHARE * value_s)


def widened(figure: Figure, moved: float | None) -> Figure:
    """The number with its interval widened by what late reading may have moved it, if that matters."""
    if moved is None or isinstance(figure, Absent):
        return figure
    if moved <= max(LEAST_S, min(tolerance_s(figure.point), MOST_SHARE * figure.point)):
        return figure
    low = None if figure.low is None else max(figure.low - moved, 0.0)
    return replace(figure, low=low, high=None if figure.high is None else figure.high + moved)


@dataclass(frozen=True, slots=True)
class SloResult:
    """An SLO of the whole run (`target`, as it was written), judged; `reason` says why in words."""

    target: str
    result: Result
    reason: str
    measured: Figure
