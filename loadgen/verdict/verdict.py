"""Whether a run can be believed, in one word, with reasons and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from loadgen.stats.estimates import Absent, Figure, early_stopping_floor

FLOOR_S: Final = 1e-3
SHARE: Final = 0.01
"""The instrument may be off by 1 ms or by 1 % of what it measures, whichever is more."""


class State(StrEnum):
    VALID = "VALID"
    INSUFFICIENT = "INSUFFICIENT"
    CLIENT_BOUND = "CLIENT-BOUND"
    NOT_COMPARABLE = "NOT-COMPARABLE"
    NOT_STATIONARY = "NOT-STATIONARY"


WORST_FIRST: Final = (State.INSUFFICIENT, State.CLIENT_BOUND, State.NOT_COMPARABLE, State.NOT_STATIONARY)
"""How states rank where several apply; VALID is none of them."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that speaks against a run, or that its reader must know: what, in figures, and what to do."""

    code: str
    text: str
    advice: str

    def to_json(self) -> dict[str, str]:
        return {"code": self.code, "text": self.text, "advice": self.advice}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reasons` are why the state is not VALID, the worst first; `warnings` take nothing from it."""

    state: State
    reasons: tuple[Reason, ...] = ()
    warnings: tuple[Reason, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "state": str(self.state),
            "reasons": [reason.to_json() for reason in self.reasons],
            "warnings": [warning.to_json() for warning in self.warnings],
        }


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a verdict rests on.

    `counts` are requests by outcome with `planned` and `ok`. `headline` holds the figures that the client
    could have spoilt, by metric and percentile ("ttft", "p99"); sending late spoils no gap between tokens.
    `send_lag_s` and `read_error_s` say by percentile how late the client was, `instrument_error_s` by metric
    and percentile how far off a server of known truth found it. `throttled_fraction` is the share of time
    in which the system kept the client from running. `max_failures` is the share of planned requests that may
    fail.
    """

    counts: Mapping[str, int]
    status: str
    headline: Mapping[str, Mapping[str, Figure]]
    send_lag_s: Mapping[str, Figure]
    read_error_s: Mapping[str, Figure]
    instrument_error_s: Mapping[str, Mapping[str, Figure]] = field(default_factory=dict)
    throttled_fraction: float | None = None
    max_failures: float = SHARE
    not_comparable: tuple[Reason, ...] = ()
    not_stationary: tuple[Reason, ...] = ()


def judge(evidence: Evidence, warnings: tuple[Reason, ...] = ()) -> Verdict:
    """The verdict: the worst state that has a reason names it, reasons of the others follow."""
    against = {
        State.INSUFFICIENT: _insufficient(evidence),
        State.CLIENT_BOUND: _client_bound(evidence),
        State.NOT_COMPARABLE: list(evidence.not_comparable),
        State.NOT_STATIONARY: list(evidence.not_stationary),
    }
    state = next((state for state in WORST_FIRST if against[state]), State.VALID)
    return Verdict(state, tuple(reason for state in WORST_FIRST for reason in against[state]), warnings)


def _insufficient(evidence: Evidence) -> list[Reason]:
    counts, floor = evidence.counts, early_stopping_floor(0.5)
    ok, planned = counts["ok"], counts["planned"]
    reasons = []
    if evidence.status == "interrupted":
        reasons.append(
            Reason(
                "cut-off",
                f"The run was cut off: {ok:,} of {planned:,} requests had succeeded.",
                "Run it again to its end.",
            )
        )
    if not ok:
        worst = max(
            (name for name in counts if name not in ("ok", "planned")), key=counts.__getitem__, default="none"
        )
        reasons.append(
            Reason(
                "no-success",
                f"None of {planned:,} requests succeeded; the most frequent outcome is {worst}.",
                "Look at the first failure in the report and at the server's log.",
            )
        )
    elif ok < floor:
        reasons.append(
            Reason(
                "too-few",
                f"{ok:,} request{'s' * (ok > 1)} succeeded; even a median needs {floor}.",
                "Ask for more with --requests.",
            )
        )
    elif evidence.status != "interrupted" and planned - ok > evidence.max_failures * planned:
        failed = planned - ok
        share, most = 100 * failed / planned, 100 * evidence.max_failures
        reasons.append(
            Reason(
                "too-many-failures",
                f"{failed:,} of {planned:,} requests failed ({share:.3g}%); at most {most:.3g}% may.",
                "Look at the first failure in the report; lower the load, or allow more with --max-failures.",
            )
        )
    return reasons


def _client_bound(evidence: Evidence) -> list[Reason]:
    waits = [name for name in evidence.headline if name not in ("itl", "icl", "tpot")]
    late = _over_tolerance(dict.fromkeys(waits, evidence.send_lag_s), evidence.headline)
    blurred = _over_tolerance(dict.fromkeys(evidence.headline, evidence.read_error_s), evidence.headline)
    erred = _over_tolerance(evidence.instrument_error_s, evidence.headline)
    reasons = []
    if late:
        advice = "Fire fewer requests at once, or from a faster or idler machine."
        reasons.append(Reason("send-lag", f"Requests left late: {late}", advice))
    if blurred:
        advice = "Run the client on a machine of its own, or on more CPUs."
        reasons.append(Reason("read-lag", f"Arrivals were stamped late: {blurred}", advice))
    if erred:
        advice = "Lower the load until the instrument's error is within its tolerance."
        reasons.append(
            Reason("instrument-error", f"On a server of known truth the client erred: {erred}", advice)
        )
    if (share := evidence.throttled_fraction) is not None and share > SHARE:
        text = f"The system kept the client from running {share:.1%} of the time."
        advice = "Stop other work on this machine, or lift the client's CPU quota."
        reasons.append(Reason("starved", text, advice))
    return reasons


def tolerance_s(value_s: float) -> float:
    """How far off a latency of this size may be."""
    return max(FLOOR_S, SHARE * value_s)


def _over_tolerance(
    lags_s: Mapping[str, Mapping[str, Figure]], headline: Mapping[str, Mapping[str, Figure]]
) -> str | None:
    """The worst lag that is more than the percentile it adds to can bear; None where all is well."""
    worst, said = 1.0, None
    for metric, lag_s in lags_s.items():
        for name, value in headline.get(metric, {}).items():
            lag = lag_s.get(name)
            if lag is None or isinstance(lag, Absent) or isinstance(value, Absent):
                continue
            allowed_s = tolerance_s(value.point)
            if lag.point / allowed_s > worst:
                worst = lag.point / allowed_s
                said = (
                    f"{lag.point * 1e3:.3g} ms at {name}, where {metric.upper()} {name} is "
                    f"{value.point * 1e3:.4g} ms and bears {allowed_s * 1e3:.3g} ms."
                )
    return said
