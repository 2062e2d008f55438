"""One workload at several loads: what each engine gives and what its users wait for, point by point."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from loadgen.metrics.definitions import METRICS
from loadgen.metrics.slo import Goal, parse_goal
from loadgen.record.manifest import Manifest, ServerFacts
from loadgen.record.verdict import Result, State
from loadgen.stats.figure import Absent, Estimate, Figure
from reports.compare.comparison import ComparisonCell, Headline
from reports.compare.sweep_load import SweepLoad, load_of, work_asked
from reports.figures.scatter import Reach
from reports.run_view import View
from roofline.reconcile.reconciliation import Reconciliation

PERCENTILES: Final = ("p99", "p95", "p90", "p50")
AGAINST: Final = ("p50", "p90", "p99")
"""The percentiles that are shown against the load."""
OUTPUT: Final = Headline("Output", ("throughput", "output_tok_per_s"), "higher")


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One contender at one load. `output` is per device where `Sweep.per_device`.

    `speed` is the tokens per second that the median user sees, 1 / TPOT; `percentiles` are those of AGAINST
    by metric. `result` is the worst of all its runs' targets, "" without any; `missed` are targets that a run
    missed, `unsure` those that are inconclusive, each with the reason. `doubts` are the states other than
    VALID of its runs and of the comparison at its load. `overloaded`: requests in flight kept growing.
    """

    label: str
    load: SweepLoad
    output: Figure
    speed: Figure
    latency: Mapping[str, Figure]
    percentiles: Mapping[str, Mapping[str, Figure]]
    result: str
    missed: tuple[str, ...]
    unsure: tuple[tuple[str, str], ...]
    doubts: tuple[str, ...]
    overloaded: bool

    @property
    def output_point(self) -> float:
        """The output, 0 where it is not known."""
        return self.output.point if isinstance(self.output, Estimate) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Points in the order of contender and load; `percentile` says which one of each latency they hold."""

    name: str
    kind: str
    loads: tuple[SweepLoad, ...]
    labels: tuple[str, ...]
    points: tuple[Point, ...]
    per_device: bool
    percentile: Mapping[str, str]
    goals: tuple[Goal, ...]

    @property
    def output_unit(self) -> str:
        return "tok/s per GPU" if self.per_device else "tok/s"

    def of(self, label: str) -> list[Point]:
        return [point for point in self.points if point.label == label]


def reach_of(figure: Estimate, divisor: float) -> Reach:
    """Without a level a figure has no interval; with one, an end that is missing has no bound."""
    low, high = figure.low, figure.high
    beyond = (-math.inf, math.inf) if figure.level else (figure.point, figure.point)
    ends = (beyond[0] if low is None else low, figure.point, beyond[1] if high is None else high)
    return Reach(*(end / divisor for end in ends))


def sweeps_in(cells: Sequence[ComparisonCell]) -> list[tuple[Sweep, list[ComparisonCell]]]:
    """Every sweep among the cells, with its cells in the order of load."""
    groups: dict[tuple[object, ...], list[tuple[SweepLoad, ComparisonCell]]] = {}
    for cell in cells:
        manifests = [view.manifest for views in cell.views.values() for view in views]
        works = {(work_asked(m), load_of(m)) for m in manifests}
        work, load = works.pop() if len(works) == 1 else (None, None)
        if work is not None and load is not None:
            groups.setdefault((work, _model(manifests[0])), []).append((load, cell))
    swept = [sorted(g, key=lambda pair: pair[0]) for g in groups.values() if len({load for load, _ in g}) > 1]
    named = len({_model(_views(group[0][1])[0].manifest) for group in swept}) > 1
    return [(_sweep(group, named=named), [cell for _, cell in group]) for group in swept]


def _sweep(group: Sequence[tuple[SweepLoad, ComparisonCell]], *, named: bool) -> Sweep:
    cells = [cell for _, cell in group]
    labels = tuple(dict.fromkeys(label for cell in cells for label in cell.labels))
    views = [view for cell in cells for view in _views(cell)]
    goals = tuple(parse_goal(text) for text in dict.fromkeys(t for v in views for t in _targets(v)))
    percentile = {name: _percentile(name, cells, goals) for name in ("tpot", "ttft", "e2e")}
    counts = [_n_devices(view) for view in views]
    per_device = None not in counts
    points = tuple(
        _point(label, load, cell, percentile, per_device)
        for label in labels
        for load, cell in group
        if label in cell.labels
    )
    asked = views[0].manifest.asked
    name = f"{asked.get('prompt_tokens')} → {asked.get('output_tokens')} tokens"
    model = f"{_model(views[0].manifest)}, " if named else ""
    return Sweep(
        name=f"{model}{name}",
        kind=group[0][0].kind,
        loads=tuple(load for load, _ in group),
        labels=labels,
        points=points,
        per_device=per_device,
        percentile=percentile,
        goals=goals,
    )


def _percentile(metric: str, cells: Sequence[ComparisonCell], goals: Sequence[Goal]) -> str:
    """A target's; else of TPOT the median, of the others the highest that most points have."""
    wanted = [g.statistic for g in goals if g.metric == metric and g.statistic in PERCENTILES]
    if wanted:
        return str(wanted[0])
    if metric == "tpot":
        return "p50"
    return max(PERCENTILES, key=lambda p: sum(_known(cell, metric, p) for cell in cells))


def _known(cell: ComparisonCell, metric: str, p: str) -> int:
    return sum(isinstance(cell.figure(label, _headline(metric, p)), Estimate) for label in cell.labels)


def _headline(metric: str, p: str) -> Headline:
    return Headline(f"{METRICS[metric].title} {p}", ("metrics", metric, p), "lower")


def _point(
    label: str, load: SweepLoad, cell: ComparisonCell, percentile: Mapping[str, str], per_device: bool
) -> Point:
    views = cell.views[label]
    judged = [row for view in views for row in view.summary.targets]
    results = {row.result for row in judged}
    n = (_n_devices(views[0]) or 1) if per_device else 1
    return Point(
        label=label,
        load=load,
        output=_each(cell.figure(label, OUTPUT), lambda value: value / n),
        speed=_speed(cell.figure(label, _headline("tpot", percentile["tpot"]))),
        latency={m: cell.figure(label, _headline(m, percentile[m])) for m in ("ttft", "e2e")},
        percentiles={
            m: {p: cell.figure(label, _headline(m, p)) for p in AGAINST} for m in ("ttft", "tpot", "e2e")
        },
        result=next((r for r in (Result.FAIL, Result.INCONCLUSIVE, Result.PASS) if r in results), ""),
        missed=tuple(dict.fromkeys(row.target for row in judged if row.result == Result.FAIL)),
        unsure=tuple(dict.fromkeys((r.target, r.reason) for r in judged if r.result == Result.INCONCLUSIVE)),
        doubts=tuple(_doubts(cell, views)),
        overloaded=any(r.code == "overloaded" for view in views for r in view.summary.verdict.reasons),
    )


def _doubts(cell: ComparisonCell, views: Sequence[View]) -> Iterator[str]:
    states = [str(view.summary.verdict.state) for view in views]
    if cell.gate.state == State.NOT_COMPARABLE:
        states.append(str(State.NOT_COMPARABLE))
    yield from dict.fromkeys(state for state in states if state != State.VALID)


def _speed(tpot: Figure) -> Figure:
    """Tokens per second for one user: the inverse of the time per token, its interval turned round."""
    turned = _each(tpot, lambda value: 1 / value if value else math.inf)
    if isinstance(turned, Absent):
        return turned
    return replace(turned, low=turned.high, high=turned.low, unit="tok/s")


def _each(figure: Figure, of: Callable[[float], float]) -> Figure:
    """The figure with its point and both ends put through `of`."""
    if isinstance(figure, Absent):
        return figure
    low, high = (None if end is None else of(end) for end in (figure.low, figure.high))
    return replace(figure, point=of(figure.point), low=low, high=high)


def _n_devices(view: View) -> int | None:
    """Over how many GPUs the engine was spread; None without GPUs, or where that is not stated."""
    devices = view.manifest.devices
    roofline = view.summary.roofline
    on_cpu = isinstance(roofline, Reconciliation) and roofline.device.id.startswith("cpu")
    if not devices or on_cpu:
        return None
    identity = view.manifest.identity
    return (identity.tensor_parallel_size if identity else None) or (1 if len(devices) == 1 else None)


def _model(manifest: Manifest) -> str:
    return (manifest.server or ServerFacts()).model_name


def _views(cell: ComparisonCell) -> list[View]:
    return [view for views in cell.views.values() for view in views]


def _targets(view: View) -> list[str]:
    """The targets of whole runs; criteria for single requests are no bound on a percentile."""
    return [row.target for row in view.summary.targets]
