"""The latencies of a sweep against its load: p50, p90 and p99 of every contender."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from loadgen.metrics.definitions import METRICS
from loadgen.stats.figure import Absent, Estimate
from reports.compare.sweep_load import KINDS, SweepLoad
from reports.compare.sweeps import AGAINST, Sweep, reach_of
from reports.figures.drawing import Plot
from reports.figures.load_curves import LoadPanel, LoadPoint, load_curves
from reports.number_format import Scale, interval, number, point, scale_for
from reports.tables import Cell, Column, Row, Table

EXPLAINED: Final = (
    "One panel for each percentile over the load, lower is better. Whiskers are 95% intervals, with an arrow "
    "where there is no bound. Hollow points cannot be relied on, a cross at the top is a percentile that "
    "failed requests make infinite, and a dashed green line is an SLO."
)
WIDTH: Final = 310.0


def against_load(sweep: Sweep, prefix: str) -> tuple[Plot, ...]:
    """A figure for each latency of which two points or more are known."""
    plots = (_plot(sweep, metric, prefix) for metric in ("ttft", "tpot", "e2e"))
    return tuple(plot for plot in plots if plot is not None)


def not_drawn(sweep: Sweep) -> list[str]:
    """Percentiles that no point has, with the reason of the first."""
    for p in AGAINST:
        figures = [at.percentiles["e2e"][p] for at in sweep.points]
        reasons = [figure.reason for figure in figures if isinstance(figure, Absent)]
        if reasons and len(reasons) == len(figures):
            at = sweep.points[0]
            return [f"{p} is not drawn against the load: {reasons[0]} ({at.label}, {at.load})."]
    return []


def _plot(sweep: Sweep, metric: str, prefix: str) -> Plot | None:
    points = {p: _points(sweep, metric, p) for p in AGAINST}
    shown = [p for p in AGAINST if len(points[p]) > 1]
    if not shown:
        return None
    scale = scale_for("s", [figure.point for p in shown for figure in points[p].values()])
    title = METRICS[metric].title
    panels = [_panel(sweep, metric, p, scale) for p in shown]
    first = shown[0]
    return Plot(
        f"{prefix}load-{metric}",
        f"{title} against load",
        f"{title} {first} from least to most load: {'; '.join(_ends(sweep, metric, first, scale))}.",
        "",
        (load_curves(f"{prefix}load-{metric}", WIDTH, panels, KINDS[sweep.kind][0].lower()),),
        _table(sweep, metric, shown, scale),
    )


def _points(sweep: Sweep, metric: str, p: str) -> dict[tuple[str, float], Estimate]:
    """The known ones by contender and load."""
    figures = (((at.label, at.load.value), at.percentiles[metric][p]) for at in sweep.points)
    return {key: figure for key, figure in figures if isinstance(figure, Estimate)}


def _panel(sweep: Sweep, metric: str, p: str, scale: Scale) -> LoadPanel:
    known = _points(sweep, metric, p)

    def line(label: str) -> Iterator[LoadPoint]:
        for at in sweep.of(label):
            if (label, at.load.value) in known:
                reach = reach_of(known[label, at.load.value], scale.divisor)
                yield LoadPoint(at.load.value, reach, hollow=bool(at.doubts))

    bounds = [g.bound / scale.divisor for g in sweep.goals if (g.metric, g.statistic) == (metric, p)]
    return LoadPanel(
        f"{METRICS[metric].title} {p} ({scale.unit})",
        [(label, list(line(label))) for label in sweep.labels],
        min(bounds, default=None),
    )


def _ends(sweep: Sweep, metric: str, p: str, scale: Scale) -> Iterator[str]:
    known = _points(sweep, metric, p)
    for label in sweep.labels:
        loads = [load for who, load in known if who == label]
        if loads:
            ends = (known[label, load].point / scale.divisor for load in (min(loads), max(loads)))
            first, last = map(number, ends)
            yield f"{label} {first} to {last} {scale.unit}"


def _table(sweep: Sweep, metric: str, shown: list[str], scale: Scale) -> Table:
    """One row a load, one column for each percentile of each contender."""
    several = len(sweep.labels) > 1
    titles = [f"{p} {label}" if several else p for p in shown for label in sweep.labels]
    at_load = {(at.label, at.load): at for at in sweep.points}

    def cell(label: str, p: str, load: SweepLoad) -> Cell:
        at = at_load.get((label, load))
        if at is None:
            return Cell("–")
        figure = at.percentiles[metric][p]
        return Cell(point(figure, scale), detail=interval(figure, scale))

    rows = tuple(
        Row((Cell(load.number), *(cell(label, p, load) for p in shown for label in sweep.labels)))
        for load in sweep.loads
    )
    columns = (Column(KINDS[sweep.kind][0]), *(Column(f"{title} ({scale.unit})") for title in titles))
    return Table(f"{METRICS[metric].title} against load, with 95% intervals", columns, rows)
