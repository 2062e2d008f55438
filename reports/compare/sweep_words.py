"""The results of a sweep in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from loadgen.metrics.definitions import METRICS
from loadgen.metrics.slo import WHOLE_RUN, Goal, parse_goal
from loadgen.stats.figure import Estimate
from reports.compare.sweeps import Point, Sweep
from reports.number_format import number

KNEE: Final = 0.9
"""The share of peak throughput that counts as reaching it."""
OF_A_RUN: Final[Mapping[str, str]] = {
    "goodput_per_s": "Goodput",
    "attainment": "Share of requests that meet their SLOs",
    "drain_s": "Time to drain",
    "server_peak_bytes": "Server memory",
    "device_peak_bytes": "GPU memory",
}
UNITS: Final[Mapping[str, str]] = {"tok/s": " tok/s", "1/s": " req/s"}


def slo_words(goal: Goal) -> str:
    """`TTFT p90 ≤ 150 ms` of `ttft.p90<=150ms`."""
    title = OF_A_RUN.get(goal.metric) or METRICS[goal.metric].title
    written = re.fullmatch(r"([\d.eE+-]*\d\.?)(.*)", goal.text.partition(goal.op)[2])
    value, unit = written.groups() if written else ("", "")
    unit = f" {unit}" if unit and unit != "%" else unit
    if not unit and goal.metric in WHOLE_RUN:
        unit = UNITS.get(WHOLE_RUN[goal.metric][2], "")
    sign = "≤" if goal.op == "<=" else "≥"
    return f"{' '.join(filter(None, (title, goal.statistic)))} {sign} {value}{unit}"


def slos_words(texts: Iterable[str]) -> str:
    """SLOs as they were written, in words."""
    return " and ".join(slo_words(parse_goal(text)) for text in texts)


def best_loads(sweep: Sweep) -> str:
    """`Most output that meets all SLOs for certain: vllm 90 tok/s with 8/s, 1.5x tgi's 60 tok/s with 4/s.`

    Without SLOs the highest output of the reliable loads; the contender that gives most stands first.
    """
    best = {
        label: best_within(points) if sweep.goals else _highest(points)
        for label in sweep.labels
        if (points := sweep.of(label))
    }
    known = sorted((at for at in best.values() if at), key=lambda at: -at.output_point)
    without = [label for label, at in best.items() if at is None]
    if not known:
        return f"No load meets all SLOs for certain: {', '.join(without)}." if sweep.goals else ""
    first, *others = known
    parts = [f"{first.label} {_told(first, sweep)}"]
    for at in others:
        times = first.output_point / at.output_point if at.output_point else 0.0
        parts.append(f"{number(times)}x {at.label}'s {_told(at, sweep)}" if times else _told(at, sweep))
    what = "Most output that meets all SLOs for certain" if sweep.goals else _of_which_loads(sweep, known)
    lacking = f"; {' and '.join(without)} at no load" if without and sweep.goals else ""
    return f"{what}: {', '.join(parts)}{lacking}."


def _of_which_loads(sweep: Sweep, best: Sequence[Point]) -> str:
    """The highest output, and of which loads where a load that does not count gave more."""
    beyond = [at for own in best for at in sweep.of(own.label) if at.output_point > own.output_point]
    if not beyond:
        return "Highest output"
    if all(at.overloaded for at in beyond):
        return "Highest output of the loads that the server kept up with"
    return "Highest output of the reliable loads"


def limits(sweep: Sweep) -> str:
    """What limits each contender, in one sentence: the first SLO that it misses, or the load that it did not
    keep up with, or where its output levels off."""
    parts = [part for label in sweep.labels if (part := _limit(label, sweep))]
    return f"Limit: {'; '.join(parts)}." if parts else ""


def _limit(label: str, sweep: Sweep) -> str:
    points = sweep.of(label)
    for at in points:
        if at.missed:
            return f"{label} first misses {slos_words(at.missed)} with {at.load}"
        if at.overloaded:
            return f"{label} did not keep up with {at.load}, requests in flight kept growing"
    if sweep.goals:
        best = best_within(points)
        beyond = (at for at in points if not _is_good(at) and (best is None or at.load > best.load))
        least = next(beyond, None)
        if least is None:
            return f"{label} meets all SLOs up to {points[-1].load}"
        return f"no reliable load of {label} misses an SLO, but {least.load} {_why_not(least, reasons=False)}"
    reliable = [at for at in points if isinstance(at.output, Estimate) and not at.doubts]
    bend = knee(reliable)
    if bend is None:
        return ""
    if bend is reliable[-1]:
        return f"{label} reached none, its output still rises with {bend.load}" * (bend is points[-1])
    return f"{label} reaches {KNEE:.0%} of peak throughput with {bend.load}"


def _told(at: Point, sweep: Sweep) -> str:
    return f"{number(at.output_point)} {sweep.output_unit} with {at.load}"


def _highest(points: Sequence[Point]) -> Point | None:
    """Of the points that can be relied on, or of all where none can."""
    known = [at for at in points if isinstance(at.output, Estimate)]
    reliable = [at for at in known if not at.doubts]
    return max(reliable or known, key=lambda at: at.output_point, default=None)


def best_within(points: Sequence[Point]) -> Point | None:
    """The point of highest output that meets every SLO for certain."""
    good = [at for at in points if at.result == "pass" and not at.doubts]
    return max(good, key=lambda at: at.output_point) if good else None


def told(sweep: Sweep) -> Iterator[str]:
    """One sentence or two a contender: what more load brings it, and how far it goes within the SLOs."""
    if sweep.goals:
        yield f"SLOs: {slos_words(goal.text for goal in sweep.goals)}."
    for label in sweep.labels:
        points = sweep.of(label)
        unit = sweep.output_unit
        sentences = (_gain(label, points, unit), _within(points, unit) if sweep.goals else "")
        if any(sentences):
            yield " ".join(filter(None, sentences))


def knee(points: Sequence[Point]) -> Point | None:
    """The lowest load that reaches 90% of peak throughput; None with fewer than two known points."""
    known = [(at, at.output.point) for at in points if isinstance(at.output, Estimate)]
    if len(known) < 2:
        return None
    most = max(output for _, output in known)
    return next(at for at, output in known if output >= KNEE * most)


def _gain(label: str, points: Sequence[Point], unit: str) -> str:
    known = [at for at in points if isinstance(at.output, Estimate) and not at.doubts]
    bend = knee(known)
    if bend is None:
        return ""
    first, last = (number(at.output_point) for at in (known[0], known[-1]))
    gain = f"{label} gives {first} {unit} at {known[0].load} and {last} at {known[-1].load}"
    if bend is known[-1]:
        is_last = bend is points[-1]
        return f"{gain}{', and still rises' if is_last else '; no higher load is reliable'}."
    return f"{gain}; it reaches 90% of peak throughput at {bend.load}."


def _within(points: Sequence[Point], unit: str) -> str:
    best = best_within(points)
    if best is None:
        open_still = any(at.result != "fail" for at in points)
        return f"No load {'surely ' if open_still else ''}meets all SLOs."
    beyond = next((at for at in points if at.load > best.load and not _is_good(at)), None)
    why = f"; {beyond.load} {_why_not(beyond)}" if beyond else ""
    return f"Best load meeting all SLOs: {best.load} ({number(best.output_point)} {unit}){why}."


def _is_good(at: Point) -> bool:
    return at.result == "pass" and not at.doubts


def _why_not(at: Point, *, reasons: bool = True) -> str:
    if at.missed:
        return f"misses {slos_words(at.missed)}"
    if at.doubts:
        return f"is not reliable ({', '.join(at.doubts)})"
    if not at.unsure:
        return "was not judged"
    why = (f"{slos_words([target])}{f' ({reason})' * reasons}" for target, reason in at.unsure)
    return f"is inconclusive in {' and '.join(why)}"
