"""What a sweep found, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from loadgen.stats.figure import Estimate
from reports.compare.sweeps import Point, Sweep
from reports.number_format import number

KNEE: Final = 0.9
"""The share of peak throughput that counts as reaching it."""


def best_loads(sweep: Sweep) -> str:
    """`Best load meeting all SLOs: vllm: 8 req/s (1,200 tok/s); tgi: none.`, or who gives most."""
    if not sweep.goals:
        most = [(max(known, key=lambda at: at.output_point), label)
                for label in sweep.labels
                if (known := [at for at in sweep.of(label) if isinstance(at.output, Estimate)])]  # fmt: skip
        parts = [f"{label} {number(at.output_point)} {sweep.output_unit} at {at.load}" for at, label in most]
        return f"Highest output: {'; '.join(parts)}." if parts else ""
    parts = []
    for label in sweep.labels:
        best = best_within(sweep.of(label))
        load = f"{best.load} ({number(best.output_point)} {sweep.output_unit})" if best else "none"
        parts.append(f"{label}: {load}")
    return f"Best load meeting all SLOs: {'; '.join(parts)}."


def best_within(points: Sequence[Point]) -> Point | None:
    """The point of highest output that meets every SLO for certain."""
    good = [at for at in points if at.result == "pass" and not at.doubts]
    return max(good, key=lambda at: at.output_point) if good else None


def told(sweep: Sweep) -> Iterator[str]:
    """One sentence or two a contender: what more load brings it, and how far it goes within the SLOs."""
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
    best = best_within(points)
    if best is None:
        open_still = any(at.result != "fail" for at in points)
        return f"No load {'surely ' if open_still else ''}meets all SLOs."
    beyond = next((at for at in points if at.load > best.load and not _is_good(at)), None)
    why = f"; {beyond.load} {_why_not(beyond)}" if beyond else ""
    return f"Best load meeting all SLOs: {best.load} ({number(best.output_point)} {unit}){why}."


def _is_good(at: Point) -> bool:
    return at.result == "pass" and not at.doubts


def _why_not(at: Point) -> str:
    if at.missed:
        return f"misses {' and '.join(at.missed)}"
    return f"is not reliable ({', '.join(at.doubts)})" if at.doubts else "is inconclusive"
