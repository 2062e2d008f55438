"""The targets of a run as the banner and the terminal show them."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.record.summary import Goodput, Summary
from loadgen.stats.figure import Absent, Estimate
from reports.blocks import TargetLine
from reports.number_format import count, number, with_interval

MARKS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}


def target_lines(summary: Summary) -> tuple[TargetLine, ...]:
    """Every target in the order asked, then the share of requests that met all criteria."""
    lines = tuple(
        TargetLine(
            MARKS[row.result],
            row.result,
            row.target,
            with_interval(row.measured),
            "" if row.result == "pass" else row.reason,
        )
        for row in summary.targets
    )
    return (*lines, *_goodput_line(summary.goodput))


def _goodput_line(goodput: Goodput) -> Iterator[TargetLine]:
    share, rate = goodput.attainment, goodput.requests_per_s
    if isinstance(share, Absent):
        return
    per_s = f", {with_interval(rate)}" if isinstance(rate, Estimate) else ""
    met = (
        f"met by {count(share.point * share.n)} of {share.n:,} requests ({number(share.point * 100)}%){per_s}"
    )
    yield TargetLine("→", "goodput", " and ".join(goodput.criteria), met, "")
