"""The trade-off of a sweep: what more load gives the operator, and what it takes from each user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.metrics.definitions import METRICS
from loadgen.stats.figure import Absent, Estimate, Figure
from reports.blocks import Block, Findings, Note, Side
from reports.compare.against_load import EXPLAINED, against_load, not_drawn
from reports.compare.sweep_load import KINDS
from reports.compare.sweep_words import slo_words, slos_words, told
from reports.compare.sweeps import Point, Sweep, reach_of
from reports.figures.drawing import HALF, NARROW, WIDE, Plot
from reports.figures.scatter import Dot, Region, ScatterCurve, scatter
from reports.number_format import Scale, interval, number, point, scale_for
from reports.slo_lines import MARKS
from reports.tables import Cell, Column, Row, Table


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
        return at.speed if self.key == "speed" else at.latency[self.key]


def costs_of(sweep: Sweep) -> tuple[Cost, Cost, Cost]:
    """The speed of the stream for one user, the wait for its first token, the wait for its last."""
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
        Cost("ttft", "ttft", "Output against the wait for the first token", ttft, "s", "lower"),
        Cost("e2e", "e2e", "Output against the wait for the whole reply", e2e, "s", "lower"),
    )


def blocks(sweep: Sweep, prefix: str, anchors: Mapping[str, str]) -> list[Block]:
    """Findings, figures, what is hollow or missing in them, and all numbers; `anchors` leads to each load."""
    wide, *beside = (_plot(sweep, cost, prefix) for cost in costs_of(sweep))
    pair = tuple(plot for plot in beside if plot is not None)
    shown: list[Block] = [Findings(tuple(told(sweep)))]
    shown += [wide] if wide else []
    shown += [Side(pair, "" if wide else _explained(sweep))] if pair else []
    against = against_load(sweep, prefix)
    shown += [Side(against, EXPLAINED)] if against else []
    shown += [Note(text) for text in _missing(sweep)]
    return [*shown, numbers(sweep, anchors)]


def _plot(sweep: Sweep, cost: Cost, prefix: str) -> Plot | None:
    known = [at for at in sweep.points if _is_drawn(at, cost)]
    if len(known) < 2:
        return None
    scale = _scale(cost, known)
    curves = [
        ScatterCurve(label, tuple(_dot(at, cost, scale) for at in sweep.of(label)))
        for label in sweep.labels
        if any(at in known for at in sweep.of(label))
    ]
    towards = "better →" if cost.better == "higher" else "← better"
    axes = (f"{cost.label} ({scale.unit}{{log}}), {towards}", output_title(sweep))
    region, name = _region(sweep, cost, scale), f"{prefix}tradeoff-{cost.key}"
    wide = WIDE if cost.key == "speed" else HALF
    drawings = (
        scatter(name, wide, curves, axes, region),
        scatter(f"{name}-narrow", NARROW, curves, axes, region),
    )
    return Plot(
        name,
        cost.title,
        _finding(sweep, cost, scale),
        _explained(sweep) if cost.key == "speed" else "",
        drawings,
        _plot_table(known, cost, scale, sweep),
    )


def output_title(sweep: Sweep) -> str:
    return f"Output ({sweep.output_unit})"


def _is_drawn(at: Point, cost: Cost) -> bool:
    return bool(_value(cost.of(at))) and isinstance(at.output, Estimate)


def _value(figure: Figure) -> float | None:
    return figure.point if isinstance(figure, Estimate) else None


def _scale(cost: Cost, points: Sequence[Point]) -> Scale:
    return scale_for(cost.unit, [_value(cost.of(at)) for at in points])


def _dot(at: Point, cost: Cost, scale: Scale) -> Dot | None:
    figure, output = cost.of(at), at.output
    if not _is_drawn(at, cost) or isinstance(figure, Absent) or isinstance(output, Absent):
        return None
    x, y = reach_of(figure, scale.divisor), reach_of(output, 1.0)
    return Dot(f"{at.load.number}", x, y, hollow=bool(at.doubts))


def _region(sweep: Sweep, cost: Cost, scale: Scale) -> Region | None:
    """Where the targets on what the axes show are met; None where no target is on them."""
    wanted = sweep.percentile[cost.metric]
    on_x = [g for g in sweep.goals if g.metric == cost.metric and g.statistic == wanted]
    on_y = [g for g in sweep.goals if g.metric == "output_tok_per_s"] if not sweep.per_device else []
    if not on_x and not on_y:
        return None
    bound = min((g.bound for g in on_x), default=None)
    x = None if bound is None else (1 / bound if cost.key == "speed" else bound) / scale.divisor
    y = max((g.bound for g in on_y), default=None)
    return Region(x, cost.better == "lower", y, " and ".join(map(slo_words, (*on_x, *on_y))))


def _finding(sweep: Sweep, cost: Cost, scale: Scale) -> str:
    """From which value to which it goes as the load grows, contender by contender."""
    said: dict[str, list[str]] = {}
    for label in sweep.labels:
        who = f" with {label}" if len(sweep.labels) > 1 else ""
        known = [(at.load, f.point) for at in sweep.of(label) if isinstance(f := cost.of(at), Estimate)]
        if known:
            first, last = (number(value / scale.divisor) for _, value in (known[0], known[-1]))
            loads = f"from {known[0][0].number} to {known[-1][0]}"
            said.setdefault(loads, []).append(f"{first} to {last} {scale.unit}{who}")
    told = "; ".join(f"{loads}: {', '.join(ends)}" for loads, ends in said.items())
    return f"{cost.label}, {told}."


def _explained(sweep: Sweep) -> str:
    """How all figures of the trade-off are read; stands under the first."""
    what = "were in flight at a time" if sweep.kind == "concurrency" else "were due each second"
    return (
        f"Each point is one load; the number beside it says how many requests {what}. Of two curves the "
        "higher one gives more output at the same cost to a user. Whiskers are 95% intervals; an arrow "
        f"marks an end without a bound. {_in_green(sweep)}{_hollow(sweep) or 'All points are reliable.'}"
    )


def _in_green(sweep: Sweep) -> str:
    return (
        "Green is where an SLO is met: a load meets it for certain only if its whole interval lies there. "
        if sweep.goals
        else ""
    )


def _hollow(sweep: Sweep) -> str:
    """Which points cannot be relied on, with their states; "" without any."""
    where: dict[str, list[str]] = {}
    for at in sweep.points:
        if at.doubts:
            where.setdefault(f"at {at.load} ({', '.join(at.doubts)})", []).append(at.label)
    told = "; ".join(f"{', '.join(labels)} {load}" for load, labels in where.items())
    return f"Hollow points cannot be relied on: {told}." if told else ""


def _plot_table(known: Sequence[Point], cost: Cost, scale: Scale, sweep: Sweep) -> Table:
    """The points from left to right."""
    rows = tuple(
        Row((
            _cell(cost.of(at), scale), _cell(at.output, Scale(1.0, "")), Cell(at.label), Cell(str(at.load)),
            Cell(", ".join(at.doubts) or "–"),
        ))
        for at in sorted(known, key=lambda at: _value(cost.of(at)) or 0.0)
    )  # fmt: skip
    columns = (
        Column(f"{cost.label} ({scale.unit})"),
        Column(output_title(sweep)),
        *(Column(title, numeric=False) for title in ("Contender", "Load", "Doubts")),
    )
    return Table(f"{cost.title}: every point, with its interval", columns, rows)


def _cell(figure: Figure, scale: Scale) -> Cell:
    return Cell(point(figure, scale), detail=interval(figure, scale))


def remarks(sweep: Sweep) -> list[str]:
    """What is hollow in the figures, and what is not in them, with the reasons."""
    return [*filter(None, [_hollow(sweep)]), *_missing(sweep)]


def _missing(sweep: Sweep) -> list[str]:
    """What is not in the figures, and why."""
    said = []
    for cost in costs_of(sweep):
        lost = [
            f"{at.label} at {at.load} ({_why_absent(cost.of(at))})"
            for at in sweep.points
            if not _is_drawn(at, cost)
        ]
        if lost:
            said.append(f"{cost.title} lacks {'; '.join(lost)}.")
    said += not_drawn(sweep)
    if said:
        said.append("Percentiles count the requests of a run's steady state, often fewer than were sent.")
    return said


def _why_absent(figure: Figure) -> str:
    return figure.reason if isinstance(figure, Absent) else "no output throughput"


def numbers(sweep: Sweep, anchors: Mapping[str, str]) -> Table:
    """Every load of every contender; loads that `anchors` knows link there."""
    costs = costs_of(sweep)
    scales = [_scale(cost, sweep.points) for cost in costs]
    columns = [
        Column(KINDS[sweep.kind][0], numeric=False),
        Column("Contender", numeric=False),
        Column(f"{output_title(sweep)} ↑"),
    ]
    columns += [
        Column(f"{cost.label} ({scale.unit}) {'↑' if cost.better == 'higher' else '↓'}")
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
            _cell(at.output, Scale(1.0, "")),
        ]
        cells += [_cell(cost.of(at), scale) for cost, scale in zip(costs, scales, strict=True)]
        cells += [_targets(at)] if sweep.goals else []
        rows.append(Row((*cells, Cell(", ".join(at.doubts) or "VALID"))))
    return Table("Every load; 95% intervals in brackets", tuple(columns), tuple(rows), sortable=True)


def _targets(at: Point) -> Cell:
    if not at.result:
        return Cell("–")
    return Cell(f"{MARKS[at.result]} {at.result}", detail=slos_words(at.missed))


def to_json(sweep: Sweep) -> dict[str, Any]:
    """The sweep for machines: every point with its figures, targets and doubts."""
    costs = costs_of(sweep)
    return {
        "name": sweep.name,
        "load": sweep.kind,
        "per_device": sweep.per_device,
        "targets": [goal.text for goal in sweep.goals],
        "found": list(told(sweep)),
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
