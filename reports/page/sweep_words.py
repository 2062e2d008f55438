"""The results of a sweep in sentences, and the table of all its loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from burstline.loadgen.metrics.definitions import METRICS
from burstline.loadgen.metrics.slo import WHOLE_RUN, Goal, parse_goal
from burstline.loadgen.stats.figure import Absent, Estimate, Figure, inverse
from burstline.reports.blocks import MARKS, Cell, Column, Row, Table
from burstline.reports.model.sweep_load import KINDS
from burstline.reports.model.sweeps import AGAINST, Point, Sweep
from burstline.reports.number_format import ARROWS, Scale, interval, number, point, scale_for
from burstline.reports.sentences import say

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
        return say("sweep.none", labels=", ".join(without)) if sweep.goals else ""
    first, *others = known
    parts = [f"{first.label} {_told(first, sweep)}"]
    for at in others:
        times = first.output_point / at.output_point if at.output_point else 0.0
        parts.append(f"{number(times)}x {at.label}'s {_told(at, sweep)}" if times else _told(at, sweep))
    what = say("sweep.best") if sweep.goals else _of_which_loads(sweep, known)
    lacking = f"; {' and '.join(without)} at no load" if without and sweep.goals else ""
    return f"{what}: {', '.join(parts)}{lacking}."


def _of_which_loads(sweep: Sweep, best: Sequence[Point]) -> str:
    """The highest output, and of which loads where a load that does not count gave more."""
    beyond = [at for own in best for at in sweep.of(own.label) if at.output_point > own.output_point]
    if not beyond:
        return say("sweep.highest")
    return say("sweep.highest-kept-up" if all(at.overloaded for at in beyond) else "sweep.highest-reliable")


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


def findings_of(sweep: Sweep) -> Iterator[str]:
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


@dataclass(frozen=True, slots=True)
class Cost:
    """What load takes from a user: the metric and percentile it is told by, and in which way it is better."""

    key: str
    metric: str
    title: str
    label: str
    unit: str
    better: str

    def of(self, at: Point) -> Figure:
        figure = at.latency[self.metric]
        return inverse(figure, self.unit) if self.better == "higher" else figure

    def is_drawn(self, at: Point) -> bool:
        """Whether both its value and the output are known."""
        figure = self.of(at)
        return isinstance(figure, Estimate) and bool(figure.point) and isinstance(at.output, Estimate)

    def scale(self, points: Iterable[Point]) -> Scale:
        figures = (self.of(at) for at in points)
        return scale_for(self.unit, [f.point for f in figures if isinstance(f, Estimate)])


def costs_of(sweep: Sweep) -> tuple[Cost, ...]:
    """The speed of the stream for one user, without and with its waits, and the waits."""
    p = sweep.percentile
    slow = "" if p["tpot"] == "p50" else f" at TPOT {p['tpot']}"
    ttft, e2e = (f"{METRICS[name].title} {p[name]}" for name in ("ttft", "e2e"))
    return (
        Cost(
            "speed",
            "tpot",
            "Output against speed for each user",
            f"Speed for a user{slow}",
            "tok/s",
            "higher",
        ),
        Cost(
            "interactivity",
            "ntpot",
            "Output against interactivity",
            f"Interactivity {p['ntpot']}, for each user",
            "tok/s",
            "higher",
        ),
        Cost("ttft", "ttft", "Output against the wait for the first token", ttft, "s", "lower"),
        Cost("e2e", "e2e", "Output against the wait for the whole reply", e2e, "s", "lower"),
    )


def hollow(sweep: Sweep) -> str:
    """Which points cannot be relied on, with their states; "" without any."""
    where: dict[str, list[str]] = {}
    for at in sweep.points:
        if at.doubts:
            where.setdefault(f"at {at.load} ({', '.join(at.doubts)})", []).append(at.label)
    points = "; ".join(f"{', '.join(labels)} {load}" for load, labels in where.items())
    return say("sweep.hollow", points=points) if points else ""


def _not_drawn(sweep: Sweep) -> list[str]:
    """Percentiles that no point has, with the reason of the first."""
    for p in AGAINST:
        figures = [at.percentiles["e2e"][p] for at in sweep.points]
        reasons = [figure.reason for figure in figures if isinstance(figure, Absent)]
        if reasons and len(reasons) == len(figures):
            at = sweep.points[0]
            return [say("sweep.not-drawn", p=p, reason=reasons[0], label=at.label, load=at.load)]
    return []


def figure_cell(figure: Figure, scale: Scale) -> Cell:
    return Cell(point(figure, scale), detail=interval(figure, scale))


def remarks(sweep: Sweep) -> list[str]:
    """What is hollow in the figures, and what is not in them, with the reasons."""
    return [*filter(None, [hollow(sweep)]), *missing(sweep)]


def missing(sweep: Sweep) -> list[str]:
    """What is not in the figures, and why."""
    lines = []
    for cost in costs_of(sweep):
        figures = [(at, cost.of(at)) for at in sweep.points if not cost.is_drawn(at)]
        points = [
            f"{at.label} at {at.load} ({f.reason if isinstance(f, Absent) else 'no output throughput'})"
            for at, f in figures
        ]
        if points:
            lines.append(say("sweep.lacks", title=cost.title, points="; ".join(points)))
    lines += _not_drawn(sweep)
    return [*lines, say("sweep.steady")] if lines else []


def all_loads(sweep: Sweep, anchors: Mapping[str, str]) -> Table:
    """Every load of every contender; loads that `anchors` knows link there."""
    costs = costs_of(sweep)
    scales = [cost.scale(sweep.points) for cost in costs]
    columns = [
        Column(KINDS[sweep.kind][0], numeric=False),
        Column("Contender", numeric=False),
        Column(f"{sweep.output_title} ↑"),
    ]
    columns += [
        Column(f"{cost.label} ({scale.unit}) {ARROWS[cost.better]}")
        for cost, scale in zip(costs, scales, strict=True)
    ]
    columns += [Column("SLOs", numeric=False)] if sweep.goals else []
    columns += [Column("Verdict", numeric=False)]
    rows = []
    for at in sorted(sweep.points, key=lambda at: at.load):
        load = str(at.load)
        cells = [
            Cell(at.load.number, href=anchors.get(load, "")),
            Cell(at.label),
            figure_cell(at.output, Scale(1.0, "")),
        ]
        cells += [figure_cell(cost.of(at), scale) for cost, scale in zip(costs, scales, strict=True)]
        if sweep.goals:
            result = f"{MARKS[at.result]} {at.result}" if at.result else "–"
            cells.append(Cell(result, detail=slos_words(at.missed)))
        rows.append(Row((*cells, Cell(", ".join(at.doubts) or "VALID"))))
    return Table("Every load; 95% intervals in brackets", tuple(columns), tuple(rows), sortable=True)


def sweep_json(sweep: Sweep) -> dict[str, Any]:
    """The sweep for machines: every point with its figures, targets and doubts."""
    costs = costs_of(sweep)
    return {
        "name": sweep.name,
        "load": sweep.kind,
        "per_device": sweep.per_device,
        "targets": [goal.text for goal in sweep.goals],
        "found": list(findings_of(sweep)),
        "points": [
            {
                "contender": at.label,
                "load": at.load.value,
                "output_tok_per_s": at.output.to_json(),
                "percentiles": {
                    metric: {p: figure.to_json() for p, figure in figures.items()}
                    for metric, figures in at.percentiles.items()
                },
                **{cost.label: cost.of(at).to_json() for cost in costs},
                "targets": at.result or None,
                "doubts": list(at.doubts),
            }
            for at in sweep.points
        ],
    }
