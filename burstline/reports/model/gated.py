"""A candidate against its baseline, judged after each pair of runs; or the newest of a series of runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from burstline.measure.record.rundir import Run
from burstline.measure.record.verdict import Reason, State, Use, withheld
from burstline.measure.stats.estimates import Absent, Estimate, Floats
from burstline.measure.stats.limit_search import MOST_LOST
from burstline.measure.stats.significance import LEAST_SERIES, Answer, Look, look, series
from burstline.reports.model.comparison import HEADLINES, Case, Headline, Member, case_of, view_of
from burstline.reports.model.contenders import differing_factors, settled_in

NUMBERS: Final[Mapping[str, Headline]] = {".".join(each.path[1:]): each for each in HEADLINES}
"""The numbers that can be judged, as the command names them: `e2e.p50`, `output_tok_per_s`."""
BASELINE, CANDIDATE = "baseline", "candidate"
NONE_COUNTS: Final = "none-counts"
"""Code of the reason that no round counted."""


class GateOutcome(StrEnum):
    SAME = "SAME"
    BETTER = "BETTER"
    WORSE = "WORSE"
    UNDECIDED = "UNDECIDED"


@dataclass(frozen=True, slots=True)
class Rule:
    """The numbers that are judged, the relative difference that is still the same, and the most values.

    `most` counts pairs, or the candidate's runs against a stored baseline. With `anyway` disturbed runs and
    differences of the work count as they are.
    """

    numbers: tuple[Headline, ...]
    margin: float
    most: int
    anyway: bool = False


@dataclass(frozen=True, slots=True)
class Number:
    """One number that is judged: the last look at it, None where nothing is known.

    `ratios` are the candidate's number over the baseline's in each pair, or over the mean of stored
    baselines. `series` are the looks at all runs of a series, None for the first few. Both are in the order
    of time.
    """

    headline: Headline
    look: Look | None = None
    series: tuple[Look | None, ...] = ()
    ratios: tuple[float, ...] = ()

    @property
    def outcome(self) -> GateOutcome:
        return _outcome(self.headline, self.look)

    @property
    def first_bad(self) -> int | None:
        """The place of the first run of the series that is worse than those before it."""
        outcomes = [_outcome(self.headline, look) for look in self.series]
        return outcomes.index(GateOutcome.WORSE) if GateOutcome.WORSE in outcomes else None


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """What the runs so far decide, by number and in all; `reasons` are why some or all do not count.

    `n_values` counts the pairs (runs of the candidate, of a series) that do. `case` compares two contenders,
    `runs` are those of a series that count. `is_paired`: no baseline was stored before.
    """

    rule: Rule
    outcome: GateOutcome
    numbers: tuple[Number, ...]
    reasons: tuple[Reason, ...]
    n_values: int
    case: Case | None = None
    runs: tuple[Run, ...] = ()
    is_paired: bool = True

    @property
    def is_over(self) -> bool:
        """Whether more runs would not help: it is decided, the two did different work, or no run counts."""
        is_refused = self.case is not None and not self.case.gate.comparable
        lost = any(reason.code == NONE_COUNTS for reason in self.reasons)
        return is_refused or lost or self.outcome != GateOutcome.UNDECIDED

    @property
    def known(self) -> list[tuple[Number, Look]]:
        return [(number, number.look) for number in self.numbers if number.look is not None]


def judge_pairs(members: Sequence[Member], rule: Rule) -> Judged:
    """Judge all runs of both; runs of one `repeat` are a pair, baselines without one are stored.

    A pair with a run that cannot be used does not count.
    """
    whys = [(member, _unusable(member.run, rule)) for member in members]
    reasons = _left_out([(f"{member.run.name} ({member.label})", why) for member, why in whys])
    lost = {member.repeat for member, why in whys if why} - {None}
    kept = [member for member, why in whys if why is None and member.repeat not in lost]
    baseline, candidate = ([each.run for each in kept if each.label == who] for who in (BASELINE, CANDIDATE))
    n, unknown = len(candidate) if baseline else 0, tuple(map(Number, rule.numbers))
    verdicts = [(member.label, view_of(member.run).summary.verdict) for member in members]
    failed = {who for who, each in verdicts if each.state == State.FAILED and not withheld(each, Use.MISSED)}
    if failed == {CANDIDATE}:
        return Judged(rule, GateOutcome.WORSE, unknown, reasons, n)
    rounds = {member.repeat for member in members} - {None}
    if not n and len(rounds) >= MOST_LOST:
        text = f"None of the first {len(rounds)} rounds counts, so the gate stopped."
        reasons = (*reasons, Reason(NONE_COUNTS, text, ""))
    if not n:
        return Judged(rule, GateOutcome.UNDECIDED, unknown, reasons, n)
    case = compared(kept, rule)
    if not case.gate.comparable:
        return Judged(rule, GateOutcome.UNDECIDED, unknown, (*case.gate.reasons, *reasons), n, case)
    numbers, is_paired = [], all(member.repeat is not None for member in members)
    for headline in rule.numbers:
        values, stored = _logs(candidate, headline), _logs(baseline, headline)
        if is_paired:
            values, stored = values - stored, stored[:0]
        found = look(values, stored, margin=rule.margin, most=rule.most, n_numbers=len(rule.numbers))
        ratios = np.exp(values if is_paired else values - stored.mean())
        numbers.append(Number(headline, found, ratios=tuple(ratios.tolist())))
    counted = tuple(each for each in case.gate.warnings if each.code == "verdict")
    return Judged(rule, _worst(numbers), tuple(numbers), (*reasons, *counted), n, case, is_paired=is_paired)


def compared(members: Sequence[Member], rule: Rule) -> Case:
    """The two contenders, whose settings may differ."""
    differing = differing_factors([each.run for each in members])
    return case_of("", members, varied=settled_in(differing, ()), anyway=rule.anyway)


def judge_series(runs: Sequence[Run], rule: Rule, candidates: Sequence[Run] = ()) -> Judged:
    """Judge the newest of runs of one engine, model and load by the older ones; others are left out.

    `candidates` were named to be judged: they come last, however old they are.
    """
    named = {run.path.resolve() for run in candidates}
    runs = [*(run for run in runs if run.path.resolve() not in named), *candidates]
    runs.sort(
        key=lambda run: (run.path.resolve() in named, run.manifest.clock.utc if run.manifest.clock else "")
    )
    unlike = "another engine, model or load than the newest run's"
    whys = [unlike if _kind(run) != _kind(runs[-1]) else _unusable(run, rule) for run in runs]
    reasons = _left_out([(run.name, why) for run, why in zip(runs, whys, strict=True)])
    kept = [run for run, why in zip(runs, whys, strict=True) if why is None]
    if len(kept) <= LEAST_SERIES:
        text = f"{len(kept)} runs can be used; {LEAST_SERIES} before the newest are needed."
        reasons = (*reasons, Reason("few-runs", text, "Name a folder with more runs."))
    numbers = []
    for headline in rule.numbers:
        looks = series(
            _logs(kept, headline),
            margin=rule.margin,
            n_numbers=len(rule.numbers),
            lower_is_better=headline.better == "lower",
        )
        numbers.append(Number(headline, looks[-1] if whys[-1] is None else None, tuple(looks)))
    return Judged(rule, _worst(numbers), tuple(numbers), reasons, len(kept), runs=tuple(kept))


def _left_out(found: Sequence[tuple[str, str | None]]) -> tuple[Reason, ...]:
    """One reason for all runs that do not count, with the first of them; `found` names why each does not."""
    unusable = [f"{name}: {why}" for name, why in found if why]
    if not unusable:
        return ()
    text = f"{len(unusable)} of {len(found)} runs do not count. {unusable[0]}."
    advice = "The runs' own reports say what to do; --anyway counts disturbed ones."
    return (Reason("left-out", text, advice),)


def _kind(run: Run) -> tuple[str | None, ...]:
    identity = run.manifest.identity
    return (run.manifest.engine, identity.model if identity else None, run.manifest.title)


def _unusable(run: Run, rule: Rule) -> str | None:
    """Why a run does not count, None where it does."""
    view = view_of(run)
    state = withheld(view.summary.verdict, Use.RANKED)
    if state and not (rule.anyway and state != State.FAILED):
        texts = (each.text for each in view.summary.verdict.reasons)
        return " ".join([f"it is {state}.", *texts]).rstrip(".")
    for headline in rule.numbers:
        figure = view.summary.figure(*headline.path)
        if isinstance(figure, Absent):
            return f"it has no {headline.title}: {figure.reason}"
        if not 0 < figure.point < math.inf:
            return f"its {headline.title} is {figure.point:g}"
        if by := view.summary.spoilt_by(*headline.path):
            return f"{by}: its {headline.title} is unreliable"
    return None


def _logs(runs: Sequence[Run], headline: Headline) -> Floats:
    """The logarithm of the number in each run; all can be used."""
    figures = [view_of(run).summary.figure(*headline.path) for run in runs]
    return np.log([figure.point for figure in figures if isinstance(figure, Estimate)])


def _outcome(headline: Headline, found: Look | None) -> GateOutcome:
    if found is None or found.answer == Answer.INCONCLUSIVE:
        return GateOutcome.UNDECIDED
    if found.answer == Answer.SAME:
        return GateOutcome.SAME
    is_better = (found.ratio.point > 1) == (headline.better == "higher")
    return GateOutcome.BETTER if is_better else GateOutcome.WORSE


def _worst(numbers: Sequence[Number]) -> GateOutcome:
    """One worse number decides; else all must be decided."""
    order = (GateOutcome.WORSE, GateOutcome.UNDECIDED, GateOutcome.BETTER, GateOutcome.SAME)
    return min((number.outcome for number in numbers), key=order.index)
