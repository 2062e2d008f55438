"""The summary's estimates as tables, and the glossary of what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from loadgen.columns import Floats
from loadgen.metrics import METRICS
from reports.numbers import Scale, interval, is_estimate, point, scale_for
from reports.tables import Cell, Column, Row, Table

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
ARROWS = {"lower": "↓", "higher": "↑"}
"""Which way is better, as shown after a metric's name."""

HEADLINE = ("ttft", "tpot", "itl", "e2e")
"""The latencies of the headline table; the others are folded away."""
ACRONYMS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "kv": "KV",
    "rss": "RSS",
    "pss": "PSS",
    "cpu": "CPU",
    "gpu": "GPU",
    "fifo": "FIFO",
    "tok": "tokens",
}

Node = Mapping[str, Any]


def title_of(key: str) -> str:
    """The metric's title; a key without a definition is shown in words, the unit at its end left out."""
    if key in METRICS:
        return METRICS[key].title
    words = key.replace(".", " ").replace("_per_s", "/s").split("_")
    if len(words) > 1 and words[-1] in ("s", "bytes", "fraction"):
        words.pop()
    shown = " ".join(ACRONYMS.get(word, word) for word in " ".join(words).split())
    return shown[:1].upper() + shown[1:]


def is_per_request(key: str) -> bool:
    """Whether the metric has one value per request."""
    return key in METRICS and METRICS[key].of is not None


def named(key: str) -> Cell:
    """The metric's name with its better-direction arrow, linked to its definition."""
    if key not in METRICS:
        return Cell(title_of(key))
    arrow = ARROWS.get(METRICS[key].better, "")
    return Cell(f"{METRICS[key].title} {arrow}".strip(), href=f"#def-{key}")


def latency_table(caption: str, metrics: Mapping[str, Node]) -> Table:
    """One row a metric, one column a quantile, each number over its interval."""
    columns = [p for p in (*QUANTILES, "mean") if any(p in row for row in metrics.values())]
    rows = tuple(Row(tuple(_latency_cells(key, row, columns))) for key, row in metrics.items())
    return Table(
        caption,
        tuple(Column(title, k > 1) for k, title in enumerate(["Latency", "Unit", *columns, "n"])),
        rows,
    )


def _latency_cells(key: str, row: Node, columns: list[str]) -> Iterator[Cell]:
    present = [row[p] for p in columns if p in row]
    known = [estimate for estimate in present if estimate["point"] is not None]
    scale = scale_for(known[0]["unit"] if known else "", [estimate["point"] for estimate in known])
    yield named(key)
    yield Cell(scale.unit)
    reasons = {estimate.get("absent") for estimate in present}
    if not known and len(reasons) == 1:
        # One reason for the whole row is said once.
        yield Cell("–", detail=reasons.pop() or "", tone="reason")
        yield from [Cell("–")] * len(columns)
        return
    for p in columns:
        yield _value(row[p], scale, f"#ev-{key}-{p}" if key in HEADLINE else "") if p in row else Cell("–")
    yield Cell(f"{max((estimate['n'] for estimate in known), default=0):,}")


def _value(estimate: Node, scale: Scale, href: str = "") -> Cell:
    if estimate["point"] is None:
        return Cell("–", detail=estimate.get("absent", "not provided"), tone="reason")
    return Cell(point(estimate, scale), detail=interval(estimate, scale), href=href)


def group_table(caption: str, group: Node) -> Table:
    """A group of the summary, one estimate a row; nested groups are flattened with their names in front."""
    rows = [Row(tuple(_group_cells(key, estimate))) for key, estimate in leaves(group)]
    return Table(
        caption, (Column("What", numeric=False), Column("Value"), Column("Unit", numeric=False)), tuple(rows)
    )


def _group_cells(key: str, estimate: Node) -> Iterator[Cell]:
    yield named(key)
    if estimate["point"] is None:
        yield Cell("–", detail=estimate.get("absent", "not provided"), tone="reason")
        yield Cell("")
        return
    scale = scale_for(estimate["unit"], [estimate["point"]])
    yield _value(estimate, scale)
    yield Cell(scale.unit)


def leaves(group: Node, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Every estimate of a group with its dotted name, in the summary's order; plain values are left out."""
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
