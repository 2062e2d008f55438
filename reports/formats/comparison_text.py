"""A comparison as text for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.stats.estimates import Absent
from loadgen.verdict.comparable import ALONE
from loadgen.verdict.verdict import State
from reports.compare.comparison import Cell, Comparison
from reports.compare.page import SENTENCES, banner
from reports.compare.side_by_side import findings, side_by_side
from reports.compare.sweep_words import told
from reports.compare.sweeps import sweeps_in
from reports.compare.tradeoff import numbers, remarks
from reports.formats.text import columns
from reports.page.page import STATES
from reports.tables import Table


def text(comparison: Comparison) -> str:
    """Every cell: its state, why, its numbers where they may stand side by side; no line break at the end."""
    parts = [comparison.title]
    for sweep, _ in sweeps_in(comparison.cells):
        parts.append("\n".join([*told(sweep), *remarks(sweep)]))
        parts.append(columns(_rows(numbers(sweep, {})), words=(0, 1)))
    for cell in _told_of(comparison):
        parts.append("\n".join([_state(cell), *_reasons(cell, "  - ")]))
        if _may_rank(cell):
            table = side_by_side(cell)
            parts += ["\n".join(findings(cell)), columns(_rows(table), words=(0, 1)), "\n".join(table.notes)]
        elif cell.gate.state == State.NOT_COMPARABLE and isinstance(cell.matched, Absent):
            parts.append(f"No estimate over matched work either: {cell.matched.reason}.")
    parts += [f"No finished run: {what}." for what in comparison.missing]
    return "\n\n".join(filter(None, parts))


def markdown(comparison: Comparison) -> str:
    """The same for a pull request or a wiki; ends with a line break."""
    said = banner(comparison)
    parts = [f"## {comparison.title}", f"**{said.state}**: {said.sentence}"]
    for sweep, _ in sweeps_in(comparison.cells):
        parts.append("\n".join(f"- {sentence}" for sentence in (*told(sweep), *remarks(sweep))))
        parts.append(_markdown_table(_rows(numbers(sweep, {}))))
    for cell in _told_of(comparison):
        if len(comparison.cells) > 1:
            parts.append(f"### {cell.name}: {cell.gate.state}")
        parts.append("\n".join(_reasons(cell, "- ")))
        if _may_rank(cell):
            table = side_by_side(cell)
            parts.append("\n".join(f"- {sentence}" for sentence in findings(cell)))
            parts += [_markdown_table(_rows(table)), " ".join(table.notes)]
    parts += [f"No finished run: {what}." for what in comparison.missing]
    return "\n\n".join(part for part in parts if part) + "\n"


def _told_of(comparison: Comparison) -> list[Cell]:
    """All cells, but for those of a sweep with nothing to compare: all that they hold is the sweep's."""
    swept = [cell for _, cells in sweeps_in(comparison.cells) for cell in cells]
    return [cell for cell in comparison.cells if cell not in swept or cell.gate.state != ALONE]


def _may_rank(cell: Cell) -> bool:
    return cell.gate.comparable or cell.gate.state == ALONE


def _state(cell: Cell) -> str:
    state = cell.gate.state
    sentence = (SENTENCES.get(state) or STATES.get(state, ("", "", "See the reasons.")))[2]
    name = f"{cell.name}: " if cell.name else ""
    return f"{name}{state}: {sentence}"


def _reasons(cell: Cell, bullet: str) -> list[str]:
    return [
        f"{bullet}{reason.text} {reason.advice}".rstrip()
        for reason in (*cell.gate.reasons, *cell.gate.warnings)
    ]


def _rows(of: Table) -> list[list[str]]:
    heads = [column.title for column in of.columns]
    return [
        heads,
        *([" ".join(filter(None, (cell.text, cell.detail))) for cell in row.cells] for row in of.rows),
    ]


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    heads, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    rule = ["---", "---", *["--:"] * (len(heads) - 2)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *body))
