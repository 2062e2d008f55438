"""A run's summary as plain text that aligns, for a terminal, a log or a mail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from loadgen.record.rundir import Run
from reports.estimate_tables import HEADLINE, QUANTILES, leaves, scale_of, title_of
from reports.number_format import interval, point, scale_for
from reports.page.page import banner
from reports.run_view import summary_of

GROUPS = (
    ("Throughput", "throughput"),
    ("Memory", "memory"),
    ("Burst", "burst"),
    ("Instrument", "instrument"),
)
"""The summary's groups as `show` prints them: heading, key."""


def show(run: Run) -> str:
    """The verdict, every headline number with its interval, memory, outcomes; ends without a line break."""
    summary = summary_of(run)
    parts = [
        f"{run.name}\n{_verdict(summary)}",
        _latencies(summary),
        _metal(summary),
        *_groups(summary),
        _outcomes(summary),
    ]
    return "\n\n".join(part for part in parts if part)


def headline(run: Run) -> str:
    """The verdict and the few numbers people ask for first; ends without a line break."""
    summary = summary_of(run)
    return "\n".join(part for part in (_verdict(summary), _latencies(summary), _outcomes(summary)) if part)


def columns(rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Rows of cells as aligned text: the columns in `words` to the left, the others to the right."""
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            c.ljust(w) if k in words else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))


def _verdict(summary: Mapping[str, Any]) -> str:
    said = banner(summary)
    reasons = (f"  - {reason['text']} {reason.get('advice', '')}".rstrip() for reason in said.reasons)
    targets = (
        f"  {t.mark} {t.result}: {t.text}, {t.measured}{t.reason and f' ({t.reason})'}" for t in said.targets
    )
    return "\n".join([f"{said.state}: {said.sentence}", *targets, *reasons])


def _metal(summary: Mapping[str, Any]) -> str:
    """How far from the hardware, in one sentence; "" where the run was never held against it."""
    found = summary.get("roofline")
    if found is None:
        return ""
    return f"Hardware: {found['absent'] if 'absent' in found else found['sentence']}"


def _latencies(summary: Mapping[str, Any]) -> str:
    metrics = {key: row for key, row in summary.get("metrics", {}).items() if key in HEADLINE}
    shown = [p for p in QUANTILES if any(p in row for row in metrics.values())]
    rows = [["Latency", *(cell for p in shown for cell in (p, "")), ""]]
    absent: dict[str, list[str]] = {}
    for key, row in metrics.items():
        known = [row[p] for p in shown if p in row and row[p]["point"] is not None]
        scale = scale_for(known[0]["unit"] if known else "", [estimate["point"] for estimate in known])
        cells = [title_of(key)]
        for p in shown:
            estimate = row.get(p, {"point": None})
            cells += [point(estimate, scale), interval(estimate, scale)]
            if estimate["point"] is None and estimate.get("absent"):
                absent.setdefault(estimate["absent"], []).append(f"{title_of(key)} {p}")
        rows.append([*cells, scale.unit])
    reasons = (f"  {', '.join(which)}: {reason}" for reason, which in absent.items())
    return "\n".join([columns(rows, words=(0, len(rows[0]) - 1)), *reasons]) if metrics else ""


def _groups(summary: Mapping[str, Any]) -> Iterator[str]:
    for heading, key in GROUPS:
        rows = [_row(name, estimate) for name, estimate in leaves(summary.get(key, {}))]
        if rows:
            yield f"{heading}\n{columns(rows, words=(0, 2, 3))}"


def _row(name: str, estimate: Mapping[str, Any]) -> list[str]:
    if estimate["point"] is None:
        return [f"  {title_of(name)}", "–", "", str(estimate.get("absent", "not provided"))]
    scale = scale_of(name, estimate)
    return [f"  {title_of(name)}", point(estimate, scale), scale.unit, interval(estimate, scale)]


_OUTCOMES = {"refused": "refused: overloaded", "error_event": "failed inside the reply"}
"""Outcomes whose name says too little in a terminal."""


def _outcomes(summary: Mapping[str, Any]) -> str:
    counts = {name: n for name, n in summary.get("counts", {}).items() if n and name != "planned"}
    planned = summary.get("counts", {}).get("planned", sum(counts.values()))
    told = ", ".join(f"{n:,} {_OUTCOMES.get(name, name)}" for name, n in counts.items())
    return f"Of {planned:,} requests: {told}" if told else ""
