"""What a sweep found, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from loadgen.stats.figure import Estimate
from reports.compare.sweeps import Point, Sweep
from reports.number_format import number

KNEE: Final = 0.9
"""The share of peak throughput that counts as reaching it."""


def told(sweep: Sweep) -> Iterator[str]:
    """One sentence or two a contender: what more load brings it, and how far it goes within the targets."""
    if sweep.goals:
        yield f"SLOs: {' and '.join(goal.text for goal in sweep.goals)}."
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
        return f"{gain}, and still rises."
    return f"{gain}; it reaches 90% of peak throughput at {bend.load}."


def _within(points: Sequence[Point], unit: str) -> str:
    good = [at for at in points if at.result == "pass" and not at.doubts]
    if not good:
        open_still = any(at.result != "fail" for at in points)
        return f"No load {'surely ' if open_still else ''}meets all SLOs."
    best = max(good, key=lambda at: at.output_point)
    beyond = next((at for at in points if at.load > best.load and at not in good), None)
    why = f"; {beyond.load} {_why_not(beyond)}" if beyond else ""
    return f"Best load meeting all SLOs: {best.load} ({number(best.output_point)} {unit}){why}."


def _why_not(at: Point) -> str:
    if at.missed:
        return f"misses {' and '.join(at.missed)}"
    return f"is not reliable ({', '.join(at.doubts)})" if at.doubts else "is inconclusive"
