"""The distributions of several contenders on one pair of axes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from loadgen.record.columns import Floats
from reports.figures.drawing import DASHES, SERIES, Plot, canvas, drawn, head, margins
from reports.figures.ecdf import TABLED, fit_x, nines, tail_axis, tail_ranks, value_at
from reports.number_format import Scale, scale_for
from reports.tables import Table, table

EXPLAINED = (
    "Of two curves the one further left is faster at that share of the requests; curves that cross are "
    "faster for some and slower for others. All runs of a contender are drawn as one, a curve ends below the "
    "top where requests failed, and no curve says how much another run would differ."
)


def overlay(name: str, title: str, label: str, series: Mapping[str, Floats]) -> Plot | None:
    """The share of each contender's requests at or below each latency; None where no two have successes.

    +inf is a failed request, NaN is left out. One contender has one colour and dash through the whole page.
    """
    kept = {who: np.sort(values[~np.isnan(values)]) for who, values in series.items()}
    shown = {who: values for who, values in kept.items() if np.isfinite(values).sum() >= 2}
    if len(shown) < 2:
        return None
    scale = scale_for("s", [float(v) for values in shown.values() for v in values[np.isfinite(values)]])
    figure, (panel,) = canvas(310, 310)
    top = float(nines(1 - 0.4 / max(20, *map(len, shown.values()))))
    ends = []
    for k, (who, values) in enumerate(kept.items()):
        if who not in shown:
            continue
        ranks = tail_ranks(len(values), int(np.isfinite(values).sum()))
        x = values[ranks - 1] / scale.divisor
        heights = np.minimum(nines((ranks - 0.5) / len(values)), top)
        colour, dash = SERIES[k % 4], DASHES[(k + k // 4) % 4]
        panel.plot(
            np.r_[x[0], x], np.r_[0, heights], drawstyle="steps-post", label=who, color=colour, linestyle=dash
        )
        ends += [float(x[0]), float(x[-1])]
    fit_x(panel, np.sort(ends))
    tail_axis(panel, top)
    panel.set_xlabel(f"{label} ({scale.unit})", loc="right")
    head(panel, "")
    margins(figure, top=30, bottom=44, left=48, right=12)
    finding = _finding(label, shown, scale)
    drawings = (drawn(figure, name, panel),)
    return Plot(name, title, finding, "", drawings, _table(title, label, kept, scale))


def _finding(label: str, shown: Mapping[str, Floats], scale: Scale) -> str:
    said = "; ".join(f"{who} {value_at(values, 0.5, scale)} {scale.unit}" for who, values in shown.items())
    return f"{label} within which half of the requests were served: {said}."


def _table(title: str, label: str, series: Mapping[str, Floats], scale: Scale) -> Table:
    rows = [[f"{p * 100:g}%", *(value_at(values, p, scale) for values in series.values())] for p in TABLED]
    columns = ["Requests at or below", *(f"{who} ({scale.unit})" for who in series)]
    return table(f"{title}: {label} at or below which that share of all planned requests was", columns, rows)
