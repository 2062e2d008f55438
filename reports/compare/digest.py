"""A comparison in short, as blocks: what the terminal and a pull request show."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.verdict.comparable import ALONE
from reports.banner import tone_of
from reports.blocks import Banner, Block, Findings, Heading, Note
from reports.compare.answer import comparison_answer
from reports.compare.comparison import Comparison, ComparisonCell
from reports.compare.side_by_side import findings, side_by_side, spread_table
from reports.compare.sweep_words import told
from reports.compare.sweeps import sweeps_in
from reports.compare.tradeoff import numbers, remarks


def digest(comparison: Comparison) -> list[Block]:
    """Every cell: its state, why, and its numbers; where it is refused without ratios and ranking."""
    blocks: list[Block] = [Heading(comparison.title), comparison_answer(comparison)]
    swept = sweeps_in(comparison.cells)
    for sweep, _ in swept:
        blocks += [Findings((*told(sweep), *remarks(sweep))), numbers(sweep, {})]
    in_a_sweep = [cell for _, cells in swept for cell in cells]
    for cell in comparison.cells:
        # All that a lone contender's cell holds is in its sweep.
        if cell not in in_a_sweep or cell.gate.state != ALONE:
            blocks += _cell(cell)
    return [*blocks, *(Note(f"No finished run: {what}.") for what in comparison.missing)]


def _cell(cell: ComparisonCell) -> Iterator[Block]:
    state = cell.gate.state
    name = f"{cell.name}: " if cell.name else ""
    yield Banner(state, *tone_of(state), (*cell.gate.reasons, *cell.gate.warnings), name=name)
    yield Findings(tuple(findings(cell)))
    yield side_by_side(cell)
    if (spread := spread_table(cell)) is not None:
        yield spread
