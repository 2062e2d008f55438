"""The results of a sweep in sentences, and the table of all its loads."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from burstline.measure.metrics.definitions import METRICS
from burstline.measure.metrics.slo import WHOLE_RUN, Slo, parse_slo
from burstline.measure.record.verdict import State
from burstline.measure.stats.figure import Absent, Estimate, Figure, inverse
from burstline.reports.blocks import MARKS, Cell, Table, table
from burstline.reports.model.comparison import OUTPUT
from burstline.reports.model.sweep_load import KINDS
from burstline.reports.model.sweeps import Point, Sweep
from burstline.reports.number_format import ARROWS, Scale, in_brackets, number, point, scale_for
from burstline.reports.page.estimate_tables import figure_cell
from burstline.reports.sentences import OF_A_RUN, say

KNEE: Final = 0.9
"""The share of peak throughput that counts as reaching it."""
UNITS: Final[Mapping[str, str]] = {"tok/s": " tok/s", "1/s": " req/s"}


def slo_words(slo: Slo) -> str:
    """`TTFT p90 ≤ 150 ms` of `ttft.p90<=150ms`."""
    title = OF_A_RUN.get(slo.metric) or METRICS[slo.metric].title
    written = re.fullmatch(r"([\d.eE+-]*\d\.?)(.*)", slo.text.partition(slo.op)[2])
    value, unit = written.groups() if written else ("", "")
    unit = f" {unit}" if unit and unit != "%" else unit
    if not unit and slo.metric in WHOLE_RUN:
        unit = UNITS.get(WHOLE_RUN[slo.metric][2], "")
    sign = "≤" if slo.op == "<=" else "≥"
    return f"{' '.join(filter(None, (title, slo.statistic)))} {sign} {value}{unit}"


def slos_words(texts: Iterable[str]) -> str:
    """SLOs as they were written, in words."""
    return " and ".join(slo_words(parse_slo(text)) for text in texts)


def best_loads(sweep: Sweep) -> str:
    """`Highest output that meets all SLOs: 90 tok/s at 8 req/s with vllm, 1.5x that of tgi (...).`

    Without SLOs the highest output of the reliable loads; the contender that gives most stands first. Where
    two have no load in common, no ratio is told.
    """
    if all(at.doubts for at in sweep.points):
        return say("sweep.unreliable", why="; ".join({", ".join(at.doubts): 0 for at in sweep.points}))
    known = best_points(sweep)
    without = [label for label in sweep.labels if label not in {at.label for at in known}]
    without = [label for label in without if sweep.slos or all(at.doubts for at in sweep.of(label))]
    if not known:
        return say("sweep.none", labels=" or ".join(without)) if sweep.slos else ""
    first, *others = known
    loads = {at.load for at in sweep.of(first.label)}
    parts = [f"{_told(first, sweep)} with {first.label}"]
    for at in others:
        is_like = at.output_point and any(own.load in loads for own in sweep.of(at.label))
        times = f"{number(first.output_point / at.output_point)}x that of " if is_like else ""
        parts.append(f"{times}{at.label} ({_told(at, sweep)})")
    what = say("sweep.best") if sweep.slos else _of_which_loads(sweep, known)
    lacking = f"; {' and '.join(without)} at no {'' if sweep.slos else 'reliable '}load" if without else ""
    return f"{what}: {', '.join(parts)}{lacking}."


def best_points(sweep: Sweep) -> list[Point]:
    """The best point of each contender that has one, most output first."""
    best = (best_within(own) if sweep.slos else _highest(own) for own in map(sweep.of, sweep.labels))
    return sorted(filter(None, best), key=lambda at: -at.output_point)


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
    return f"{'. '.join(parts)}." if parts else ""


def next_loads(sweep: Sweep, looser: str) -> str:
    """What to run next, `looser` SLOs if they are out of reach of the lowest load; one load is reliable."""
    top = sweep.loads[-1]
    if not sweep.slos:
        ends = (knee([at for at in sweep.of(label) if not at.doubts]) for label in sweep.labels)
        rising = any(bend is not None and bend.load == top for bend in ends)
        return say("sweep.next-rising", load=top) if rising else say("sweep.next-slo")
    if best := best_points(sweep):
        if best[0].load == top:
            return say("sweep.next-higher", load=top)
        return say("sweep.next-limit", between=", ".join(_between(at, sweep) for at in best))
    if not any(at.missed for at in sweep.points if at.load == sweep.loads[0]):
        return say("sweep.next-longer")
    least = sweep.kind == "concurrency" and sweep.loads[0].value <= 1
    return looser or say("highest.change" if least else "highest.lower")


def _between(best: Point, sweep: Sweep) -> str:
    """`vllm between concurrency 16 and 32`."""
    higher = next((load for load in sweep.loads if load > best.load), None)
    if higher is None:
        return f"{best.label} above {best.load}"
    return f"{best.label} between {KINDS[sweep.kind][1].format(f'{best.load.number} and {higher.number}')}"


def _limit(label: str, sweep: Sweep) -> str:
    points = sweep.of(label)
    for at in points:
        if at.missed:
            return f"{label} first misses {slos_words(at.missed)} at {at.load}"
        if at.overloaded:
            return f"{label} did not keep up with {at.load}: requests in flight kept growing"
    if all(at.doubts for at in points):
        met = [at for at in points if at.result == "pass"]
        doubtful = f"; the unreliable numbers meet the SLOs at {_loads(met)}" if met else ""
        return f"The limit of {label} is unknown, as no load is reliable{doubtful}"
    if sweep.slos:
        best = best_within(points)
        beyond = (at for at in points if not _is_good(at) and (best is None or at.load > best.load))
        if (least := next(beyond, None)) is None:
            return f"{label} meets all SLOs up to {points[-1].load}"
        kept = f"meets all SLOs at {best.load}" if best else "misses no SLO at a reliable load"
        spoilt = [at.label for at in sweep.points if at.load == least.load and State.FAILED in at.doubts]
        if label not in spoilt and spoilt and not least.missed:
            alone = f"{label} {kept}. At {least.load}, {' and '.join(spoilt)} failed, and {label}"
            if least.result == "pass":
                return f"{alone} meets all SLOs"
            slos = slos_words(target for target, _ in least.unsure)
            return f"{alone} is undecided: its 95% intervals reach across {slos}"
        return f"{label} {kept}; {least.load} {_why_not(least)}"
    reliable = [at for at in points if isinstance(at.output, Estimate) and not at.doubts]
    bend = knee(reliable)
    if bend is None:
        return ""
    if bend is reliable[-1]:
        return f"{label} was not at its limit, its output still rises at {bend.load}" * (bend is points[-1])
    return f"{label} reaches {KNEE:.0%} of peak throughput at {bend.load}"


def _loads(points: Sequence[Point]) -> str:
    """`concurrency 1, 4, 16`."""
    return KINDS[points[0].load.kind][1].format(", ".join(at.load.number for at in points))


def _told(at: Point, sweep: Sweep) -> str:
    return f"{point(at.output, Scale(1.0, 'tok/s'))} {sweep.output_unit} at {at.load}"


def _highest(points: Sequence[Point]) -> Point | None:
    """Of the points that can be relied on."""
    known = (at for at in points if isinstance(at.output, Estimate) and not at.doubts)
    return max(known, key=lambda at: at.output_point, default=None)


def best_within(points: Sequence[Point]) -> Point | None:
    """The point of highest output that meets every SLO for certain."""
    return max(filter(_is_good, points), key=lambda at: at.output_point, default=None)


def knee(points: Sequence[Point]) -> Point | None:
    """The lowest load that reaches 90% of peak throughput; None with fewer than two known points."""
    known = [(at, at.output.point) for at in points if isinstance(at.output, Estimate)]
    if len(known) < 2:
        return None
    most = max(output for _, output in known)
    return next(at for at, output in known if output >= KNEE * most)


def _is_good(at: Point) -> bool:
    return at.result == "pass" and not at.doubts


def _why_not(at: Point) -> str:
    if at.missed:
        return f"misses {slos_words(at.missed)}"
    if at.doubts:
        return f"is not reliable ({', '.join(at.doubts)})"
    why = (f"{slos_words([target])} ({reason})" for target, reason in at.unsure)
    return f"is inconclusive for {' and '.join(why)}" if at.unsure else "was not judged"


@dataclass(frozen=True, slots=True)
class Cost:
    """What load takes from a user: the metric and percentile it is told by, and in which way it is better."""

    key: str
    metric: str
    title: str
    label: str
    unit: str
    better: str

    def path(self, at: Point, sweep: Sweep) -> str:
        """The key of its number at a load."""
        way = "1/" if self.better == "higher" else ""
        return f"{at.load}/{at.label}:{way}metrics.{self.metric}.{sweep.percentile[self.metric]}"

    def of(self, at: Point) -> Figure:
        figure = at.latency[self.metric]
        return inverse(figure, self.unit) if self.better == "higher" else figure

    def is_drawn(self, at: Point) -> bool:
        figure = self.of(at)
        return isinstance(figure, Estimate) and bool(figure.point) and isinstance(at.output, Estimate)

    def scale(self, points: Iterable[Point]) -> Scale:
        figures = (self.of(at) for at in points)
        return scale_for(self.unit, [f.point for f in figures if isinstance(f, Estimate)])


def output_key(at: Point, sweep: Sweep) -> str:
    return f"{at.load}/{at.label}:{'.'.join(OUTPUT.path)}{' per GPU' if sweep.per_device else ''}"


def costs_of(sweep: Sweep) -> tuple[Cost, ...]:
    """The speed of the stream for one user, without and with its waits, and the waits."""
    p = sweep.percentile
    slow = "" if p["tpot"] == "p50" else f" at TPOT {p['tpot']}"
    ttft, e2e = (f"{METRICS[name].title} {p[name]}" for name in ("ttft", "e2e"))
    speed = f"Speed for a user{slow}"
    return (
        Cost("speed", "tpot", "Output against speed for each user", speed, "tok/s", "higher"),
        Cost("ttft", "ttft", "Wait for the first token against the load", ttft, "s", "lower"),
        Cost("e2e", "e2e", "Wait for the whole reply against the load", e2e, "s", "lower"),
    )


def hollow(sweep: Sweep) -> str:
    """Which points cannot be relied on, with their states; "" without any."""
    where: dict[tuple[str, str], list[Point]] = {}
    for at in sweep.points:
        if at.doubts:
            where.setdefault((at.label, ", ".join(at.doubts)), []).append(at)
    points = "; ".join(f"{label} at {_loads(own)} ({doubts})" for (label, doubts), own in where.items())
    return say("sweep.hollow", points=points) if points else ""


def remarks(sweep: Sweep) -> list[str]:
    """The SLOs, what is hollow in the figures, and what is not in them, with the reasons."""
    lines = [f"SLOs: {slos_words(slo.text for slo in sweep.slos)}."] if sweep.slos else []
    lines += filter(None, [hollow(sweep)])
    for cost in costs_of(sweep):
        figures = [(at, cost.of(at)) for at in sweep.points if not cost.is_drawn(at)]
        points = [
            f"{at.label} at {at.load} ({f.reason if isinstance(f, Absent) else 'no output throughput'})"
            for at, f in figures
        ]
        if points:
            lines.append(say("sweep.lacks", title=cost.title, points="; ".join(points)))
    return lines


def all_loads(sweep: Sweep, anchors: Mapping[str, str]) -> Table:
    """Every load of every contender; loads that `anchors` knows link there."""
    costs = [(cost, cost.scale(sweep.points)) for cost in costs_of(sweep)]
    columns = [KINDS[sweep.kind][0], "Contender", f"{sweep.output_title} ↑"]
    columns += [f"{cost.label} ({scale.unit}) {ARROWS[cost.better]}" for cost, scale in costs]
    words = (0, 1, len(columns), len(columns) + 1)
    columns += ["SLOs", "Reliable?"] if sweep.slos else ["Reliable?"]
    rows = []
    for at in sorted(sweep.points, key=lambda at: at.load):
        load = str(at.load)
        output = figure_cell(at.output, Scale(1.0, "tok/s"), output_key(at, sweep))
        cells = [Cell(at.load.number, href=anchors.get(load, "")), Cell(at.label), output]
        cells += [figure_cell(cost.of(at), scale, cost.path(at, sweep)) for cost, scale in costs]
        if sweep.slos:
            result = f"{MARKS[at.result]} {at.result}" if at.result else "–"
            cells.append(Cell(result, detail=slos_words(at.missed)))
        rows.append([*cells, Cell(", ".join(at.doubts) or "yes")])
    figures = [figure for at in sweep.points for figure in (at.output, *(cost.of(at) for cost, _ in costs))]
    return table(f"Every load{in_brackets(figures)}", columns, rows, text=words, sortable=True)


def sweep_json(sweep: Sweep) -> dict[str, Any]:
    """The sweep for machines: every point with its figures, targets and doubts."""
    costs = costs_of(sweep)
    return {
        "name": sweep.name,
        "load": sweep.kind,
        "per_device": sweep.per_device,
        "targets": [slo.text for slo in sweep.slos],
        "points": [
            {
                "contender": at.label,
                "load": at.load.value,
                "output_tok_per_s": at.output.to_json(),
                **{cost.label: cost.of(at).to_json() for cost in costs},
                "targets": at.result or None,
                "doubts": list(at.doubts),
            }
            for at in sweep.points
        ],
    }
