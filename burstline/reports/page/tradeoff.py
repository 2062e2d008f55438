"""The trade-off of a sweep: what more load gives the operator, and what it takes from each user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from burstline.measure.stats.figure import Absent, Estimate
from burstline.reports.blocks import Block, Cell, Findings, Numbers, Plot, Side, Table, table
from burstline.reports.figures.drawing import HALF, WIDE, in_both_widths
from burstline.reports.figures.scatter import Dot, Region, ScatterCurve, scatter
from burstline.reports.model.sweep_load import load_range
from burstline.reports.model.sweeps import Point, Sweep
from burstline.reports.number_format import Scale, point, reach_of
from burstline.reports.page.estimate_tables import figure_cell
from burstline.reports.page.sweep_words import Cost, all_loads, costs_of, output_key, remarks, slo_words


def blocks(sweep: Sweep, prefix: str, anchors: Mapping[str, str]) -> list[Block]:
    """What is hollow or missing, the figures, and all numbers; `anchors` leads to each load."""
    wide, *beside = (_plot(sweep, cost, prefix) for cost in costs_of(sweep))
    pair = tuple(plot for plot in beside if plot is not None)
    shown: list[Block] = [Findings(tuple(remarks(sweep)))]
    shown += [wide] if wide else []
    shown += [Side(pair, "" if wide else _explained(sweep))] if pair else []
    return [*shown, all_loads(sweep, anchors)]


def _plot(sweep: Sweep, cost: Cost, prefix: str) -> Plot | None:
    known = [at for at in sweep.points if cost.is_drawn(at)]
    if len(known) < 2:
        return None
    scale = cost.scale(known)
    curves = [
        ScatterCurve(label, tuple(_dot(at, cost, scale) for at in sweep.of(label)))
        for label in sweep.labels
        if any(at in known for at in sweep.of(label))
    ]
    towards = "better →" if cost.better == "higher" else "← better"
    axes = (f"{cost.label} ({scale.unit}{{log}}), {towards}", sweep.output_title)
    region, name = _region(sweep, cost, scale), f"{prefix}tradeoff-{cost.key}"
    wide = WIDE if cost.key == "speed" else HALF
    drawings = in_both_widths(name, partial(scatter, curves=curves, axes=axes, region=region), wide=wide)
    finding, numbers = _finding(sweep, cost, scale)
    explained = _explained(sweep) if cost.key == "speed" else ""
    rows = _plot_table(known, cost, scale, sweep)
    return Plot(name, cost.title, finding, explained, drawings, rows, numbers=numbers)


def _dot(at: Point, cost: Cost, scale: Scale) -> Dot | None:
    figure, output = cost.of(at), at.output
    if not cost.is_drawn(at) or isinstance(figure, Absent) or isinstance(output, Absent):
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
    x = None if bound is None else (1 / bound if cost.better == "higher" else bound) / scale.divisor
    y = max((g.bound for g in on_y), default=None)
    return Region(x, cost.better == "lower", y, " and ".join(map(slo_words, (*on_x, *on_y))))


def _finding(sweep: Sweep, cost: Cost, scale: Scale) -> tuple[str, Numbers]:
    """From which value to which it goes as the load grows, contender by contender, and these values."""
    said: dict[str, list[tuple[str, Numbers]]] = {}
    for label in sweep.labels:
        who = f" with {label}" if len(sweep.labels) > 1 else ""
        known = [at for at in sweep.of(label) if isinstance(cost.of(at), Estimate)]
        if known:
            texts = (f"{point(cost.of(at), scale)} {scale.unit}" for at in (known[0], known[-1]))
            ends = tuple(zip((cost.path(at, sweep) for at in (known[0], known[-1])), texts, strict=True))
            loads = f"from {load_range(known[0].load, known[-1].load)}"
            said.setdefault(loads, []).append((f"{' to '.join(text for _, text in ends)}{who}", ends))
    told = "; ".join(f"{loads}: {', '.join(text for text, _ in own)}" for loads, own in said.items())
    return f"{cost.label}, {told}.", tuple(each for own in said.values() for _, ends in own for each in ends)


def _explained(sweep: Sweep) -> str:
    """How all figures of the trade-off are read; stands under the first."""
    what = "the concurrency" if sweep.kind == "concurrency" else "the requests per second"
    green = "Green is where an SLO is met: a load passes only if its whole interval lies there. "
    return (
        f"Each point is one load; its number is {what}. Of two curves the higher one gives more output at "
        "the same latency. Whiskers are 95% intervals; an arrow marks an open end. "
        f"{green if sweep.goals else ''}Hollow points are not reliable."
    )


def _plot_table(known: Sequence[Point], cost: Cost, scale: Scale, sweep: Sweep) -> Table:
    """The points from left to right."""
    by_cost = sorted(
        (figure.point, k) for k, at in enumerate(known) if isinstance(figure := cost.of(at), Estimate)
    )
    rows: list[list[str | Cell]] = [
        [
            figure_cell(cost.of(at), scale, cost.path(at, sweep)),
            figure_cell(at.output, Scale(1.0, "tok/s"), output_key(at, sweep)),
            at.label,
            str(at.load),
            ", ".join(at.doubts) or "–",
        ]
        for at in (known[k] for _, k in by_cost)
    ]
    columns = [f"{cost.label} ({scale.unit})", sweep.output_title, "Contender", "Load", "Doubts"]
    return table(f"{cost.title}: every point, with its interval", columns, rows, text=(2, 3, 4))
