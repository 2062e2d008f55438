"""The targets of a run as the banner and the terminal show them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reports.number_format import count, interval, number, point, scale_for

MARKS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}


@dataclass(frozen=True, slots=True)
class TargetLine:
    """One target: what was asked, what was measured with its interval, what that makes of it, and why."""

    mark: str
    result: str
    text: str
    measured: str
    reason: str


def target_lines(summary: Mapping[str, Any]) -> tuple[TargetLine, ...]:
    """Every target in the order asked, then the share of requests that met all criteria."""
    lines = tuple(
        TargetLine(
            MARKS[row["result"]],
            row["result"],
            row["target"],
            with_interval(row["measured"]),
            "" if row["result"] == "pass" else row["reason"],
        )
        for row in summary.get("targets", ())
    )
    return (*lines, *_goodput_line(summary.get("goodput", {})))


def with_interval(estimate: Mapping[str, Any]) -> str:
    """`1.23 s [1.20, 1.31]`, a dash where there is no number."""
    if estimate["point"] is None:
        return "–"
    scale = scale_for(estimate["unit"], [estimate["point"]])
    return " ".join(part for part in (point(estimate, scale), scale.unit, interval(estimate, scale)) if part)


def _goodput_line(goodput: Mapping[str, Any]) -> Iterator[TargetLine]:
    share, rate = goodput.get("attainment", {}), goodput.get("requests_per_s", {})
    if share.get("point") is None:
        return
    met, n = share["point"] * share["n"], share["n"]
    per_s = f", {with_interval(rate)}" if rate.get("point") is not None else ""
    measured = f"met by {count(met)} of {n:,} requests ({number(share['point'] * 100)} %){per_s}"
    yield TargetLine("→", "goodput", " and ".join(goodput["criteria"]), measured, "")
