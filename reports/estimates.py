"""The summary's estimates as tables, and the glossary of what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from loadgen.metrics import METRICS
from reports.numbers import Scale, interval, is_estimate, point, scale_for
from reports.series import Floats
from reports.tables import Cell, Column, Row, Table, table

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
ARROWS = {"lower": "↓", "higher": "↑"}
"""Which way is better, as shown after a metric's name."""

Node = Mapping[str, Any]


def title_of(key: str) -> str:
    """The metric's title; a key without a definition is shown in words."""
    return METRICS[key].title if key in METRICS else key.replace("_", " ")


def named(key: str) -> Cell:
    """The metric's name with its better-direction arrow, linked to its definition."""
    if key not in METRICS:
        return Cell(title_of(key))
    arrow = ARROWS.get(METRICS[key].better, "")
    return Cell(f"{METRICS[key].title} {arrow}".strip(), href=f"#def-{key}")


def headline_table(metrics: Mapping[str, Node]) -> Table:
    """One row a metric, one column a quantile, each number over its interval."""
    columns = [p for p in (*QUANTILES, "mean") if any(p in row for row in metrics.values())]
    rows = [Row((*_headline_cells(key, row, columns),), id=f"row-{key}") for key, row in metrics.items()]
    titles = ["Latency", "Unit", *columns, "n"]
    return Table(
        "Latency over all planned requests, a failed one counting as infinitely late; 95 % intervals below",
        tuple(Column(title, k > 1) for k, title in enumerate(titles)),
        tuple(rows),
    )


def _headline_cells(key: str, row: Node, columns: list[str]) -> Iterator[Cell]:
    present = [row[p] for p in columns if p in row]
    unit = next((e["unit"] for e in present if e.get("unit")), "")
    scale = scale_for(unit, [e["point"] for e in present])
    yield named(key)
    yield Cell(scale.unit)
    for p in columns:
        yield _value(row[p], scale, f"#ev-{key}-{p}") if p in row else Cell("–")
    yield Cell(f"{max((e.get('n', 0) for e in present), default=0):,}")


def _value(estimate: Node, scale: Scale, href: str = "") -> Cell:
    if estimate["point"] is None:
        return Cell("–", detail=estimate.get("absent", "not provided"), tone="reason")
    return Cell(point(estimate, scale), detail=interval(estimate, scale), href=href)


def group_table(caption: str, group: Node) -> Table:
    """A group of the summary, one estimate a row; nested groups are flattened with their names in front."""
    rows = []
    for key, estimate in leaves(group):
        if estimate["point"] is None:
            rows.append([named(key), Cell("not provided", detail=estimate.get("absent", ""), tone="reason"), "", "", ""])
            continue
        scale = scale_for(estimate["unit"], [estimate["point"]])
        n = f"{estimate['n']:,}" if estimate.get("n", 1) > 1 else ""
        rows.append([named(key), point(estimate, scale), scale.unit, interval(estimate, scale), n])
    return table(caption, ["What", "Value", "Unit", "95 % interval", "n"], rows, text=(0, 2))


def leaves(group: Node, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every estimate of a group with its dotted name, in the summary's order; plain values are not estimates."""
    for key, value in group.items():
        if is_estimate(value):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")


def nearest(values: Floats, p: float, k: int = 2) -> list[int]:
    """The positions of the k values at and just beyond the quantile, failed ones (+inf) left out."""
    order = np.argsort(values, kind="stable")
    order = order[~np.isnan(values[order])]
    start = max(math.ceil(p * len(order)) - 1, 0)
    return [int(i) for i in order[start : start + k] if math.isfinite(values[i])]


def glossary_table() -> Table:
    """Every metric's name, unit, formula and source."""
    rows = [
        Row(
            (
                Cell(metric.title),
                Cell(metric.unit),
                Cell({"lower": "↓ lower", "higher": "↑ higher"}.get(metric.better, "–")),
                Cell(metric.formula, tone="wrap"),
                Cell(metric.source, tone="wrap"),
            ),
            id=f"def-{key}",
        )
        for key, metric in METRICS.items()
    ]
    columns = ("Metric", "Unit", "Better", "How it is made", "Source")
    return Table("What every number means", tuple(Column(c, numeric=False) for c in columns), tuple(rows))
