"""What a sweep found, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from loadgen.stats.figure import Estimate
from reports.compare.sweeps import Point, Sweep
from reports.number_format import number

KNEE: Final = 0.9
"""What share of a contender's most output counts as enough of it."""


def told(sweep: Sweep) -> Iterator[str]:
    """One sentence or two a contender: what more load brings it, and how far it goes within the targets."""
    if sweep.goals:
        yield f"The targets: {' and '.join(goal.text for goal in sweep.goals)}."
    for label in sweep.labels:
        points = sweep.of(label)
        said = (_gain(label, points, sweep.output_unit), _within(points) if sweep.goals else "")
        if any(said):
            yield " ".join(filter(None, said))


def knee(points: Sequence[Point]) -> Point | None:
    """The least load that gives 90 % of the contender's most; None with fewer than two known points."""
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
    said = f"{label} gives {first} {unit} at {known[0].load} and {last} at {known[-1].load}"
    if bend is known[-1]:
        return f"{said}, where it still rises."
    return f"{said}; {bend.load} is enough for 90 % of its most."


def _within(points: Sequence[Point]) -> str:
    good = [at for at in points if at.result == "pass" and not at.doubts]
    if not good:
        open_still = any(at.result != "fail" for at in points)
        return f"It meets the targets at none of these loads{' for certain' if open_still else ''}."
    best = max(good, key=lambda at: at.output_point)
    beyond = next((at for at in points if at.load > best.load and at not in good), None)
    why = f"; {beyond.load} {_why_not(beyond)}" if beyond else ""
    return f"Within the targets {best.load} gives most, {number(best.output_point)}{why}."


def _why_not(at: Point) -> str:
    if at.missed:
        return f"misses {' and '.join(at.missed)}"
    return f"cannot be relied on ({', '.join(at.doubts)})" if at.doubts else "leaves it open"
