"""The page of a comparison: whether it may be made at all, then the differences, then the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from loadgen.metrics.definitions import METRICS
from loadgen.record.verdict import State
from loadgen.verdict.comparable import ALONE, COMPARABLE, UNSAID, Fact
from reports.banner import SWEEP, facts_by_name, tone_of
from reports.blocks import Banner, Block, Findings, Folded, Note, Side
from reports.compare import tradeoff
from reports.compare.answer import comparison_answer, forests, grid, limits_of
from reports.compare.comparison import HEADLINES, TITLES, Comparison, ComparisonCell
from reports.compare.digest import digest
from reports.compare.side_by_side import findings, side_by_side, spread_table
from reports.compare.significance_text import to_json as contrast_json
from reports.compare.sweeps import Sweep, sweeps_in
from reports.figures.overlay import EXPLAINED, overlay
from reports.formats.markdown import markdown
from reports.page.page import PageSection, document
from reports.tables import Cell as TableCell
from reports.tables import Table, table


def render(comparison: Comparison) -> str:
    """The whole page as one HTML document; the same runs give the same bytes."""
    several = len(comparison.cells) > 1
    ids = {id(cell): f"c{k}-" if several else "" for k, cell in enumerate(comparison.cells)}
    swept = sweeps_in(comparison.cells)
    shown = [
        section
        for k, (sweep, cells) in enumerate(swept)
        for section in _of_sweep(sweep, cells, f"t{k}-" if len(swept) > 1 else "", ids)
    ]
    alone = [cell for cell in comparison.cells if not any(cell in cells for _, cells in swept)]
    shown += [section for cell in alone for section in _sections(cell, ids[id(cell)])]
    if comparison.missing:
        notes = [Note(f"No finished run: {what}.") for what in comparison.missing]
        shown.append(PageSection("missing", "Missing", "What is missing?", notes))
    anchors = {id(cell): f"{ids[id(cell)]}numbers" for cell in alone}
    whole = grid(comparison, anchors) if not swept else None
    if whole is not None:
        shown.insert(0, PageSection("cells", "Overview", "Which is fastest where?", [whole]))
    return document(
        comparison.title,
        (*comparison.facts, *(sweep.name for sweep, _ in swept), *common_facts(comparison)),
        comparison_answer(comparison),
        banner(comparison),
        shown,
        to_json(comparison),
        "these runs",
        markdown(digest(comparison)),
    )


def common_facts(comparison: Comparison) -> list[str]:
    """Model, data type, devices and day, where all runs have the same."""
    views = [view for cell in comparison.cells for views in cell.views.values() for view in views]
    each = [facts_by_name(view) for view in views]
    names = ("model", "dtype", "devices", "date")
    common = [{facts[name].partition(",")[0] for facts in each} for name in names]
    return [values.pop() for values in common if len(values) == 1 and values != {""}]


def banner(comparison: Comparison) -> Banner:
    """The worst state of all cells, with the reasons of each."""
    states = [cell.gate.state for cell in comparison.cells]
    refused = [cell.name for cell in comparison.cells if not _is_good(cell)]
    worst = max(states, key=_severity, default=ALONE)
    worst = SWEEP if worst == ALONE and comparison.comparable else worst
    tone, mark, sentence = tone_of(worst)
    several = len(comparison.cells) > 1
    reasons = tuple(
        replace(reason, text=f"{cell.name}: {reason.text}") if several else reason
        for cell in comparison.cells
        for reason in (*cell.gate.reasons, *cell.gate.warnings)
    )
    if 0 < len(refused) < len(states):
        n = len(states) - len(refused)
        if not any(cell.gate.comparable or len(cell.labels) > 1 for cell in comparison.cells):
            sentence = f"Not usable: {'; '.join(refused)}."
            return Banner(f"{n} OF {len(states)} LOADS USABLE", "warn", "!", sentence, reasons)
        sentence = f"Not ranked: {'; '.join(refused)}. The others did the same work: their numbers compare."
        return Banner(f"{n} OF {len(states)} {COMPARABLE}", "warn", "!", sentence, reasons)
    return Banner(worst, tone, mark, sentence, reasons)


def _is_good(cell: ComparisonCell) -> bool:
    return bool(cell.gate.comparable) or cell.gate.state == ALONE


def _severity(state: str) -> int:
    """The work that differs is worst: no repeated run would help."""
    return len(_ORDER) - _ORDER.index(state) if state in _ORDER else 0


_ORDER: Final = (str(State.NOT_COMPARABLE), *(str(s) for s in State if s != State.NOT_COMPARABLE), ALONE)


def _sections(cell: ComparisonCell, prefix: str) -> Iterator[PageSection]:
    of = f"{cell.name}: " if prefix and cell.name else ""
    titles = {
        "numbers": ("Numbers", "Which is faster?" if cell.gate.comparable else "What can be said?", _numbers),
        "differences": ("Differences", "What was equal, what differs?", _differences),
        "shape": ("Shape", "How do the latencies differ?", _shape),
        "runs": ("Runs", "Which runs are these?", _runs),
    }
    for name, (short, question, blocks) in titles.items():
        in_nav = (cell.name if name == "numbers" else "") if of else short
        yield PageSection(f"{prefix}{name}", in_nav, f"{of}{question}", blocks(cell, prefix))


def _of_sweep(
    sweep: Sweep, cells: Sequence[ComparisonCell], prefix: str, ids: Mapping[int, str]
) -> Iterator[PageSection]:
    """The trade-off of a sweep, then each of its loads, folded."""
    of = f"{sweep.name}: " if prefix else ""
    anchors = {str(load): f"#{ids[id(cell)]}load" for load, cell in zip(sweep.loads, cells, strict=True)}
    question = f"{of}What does more load bring, and what does it cost?"
    yield PageSection(
        f"{prefix}tradeoff", f"{of}Trade-off", question, tradeoff.blocks(sweep, prefix, anchors)
    )
    folds = [
        Folded(
            str(load) if cell.gate.state == ALONE else f"{load}: {cell.gate.state}",
            tuple(block for section in _sections(cell, ids[id(cell)]) for block in section.blocks),
            id=anchors[str(load)][1:],
        )
        for load, cell in zip(sweep.loads, cells, strict=True)
    ]
    yield PageSection(f"{prefix}loads", f"{of}Each load", f"{of}How is it at each load?", folds)


def _numbers(cell: ComparisonCell, prefix: str) -> list[Block]:
    if cell.gate.comparable or cell.gate.state == ALONE:
        return [*forests(cell, prefix), side_by_side(cell), *_findings(cell, prefix)]
    own = side_by_side(cell)
    if cell.gate.state != State.NOT_COMPARABLE:
        return [Note(f"Not all runs are valid ({cell.gate.state}): nothing is ranked."), own]
    return [own]


def _findings(cell: ComparisonCell, prefix: str) -> list[Block]:
    """With what limited the contenders, unless this is the only cell: then the top of the page has it."""
    found = [*findings(cell), *(limits_of([cell]) if prefix else ())]
    return [Findings(tuple(found))] if found else []


def _differences(cell: ComparisonCell, _: str) -> list[Block]:
    differing = [fact for fact in cell.gate.facts if fact.agrees is False]
    unknown = [fact for fact in cell.gate.facts if fact.agrees is None]
    equal = [fact for fact in cell.gate.facts if fact.agrees]
    blocks: list[Block] = [
        _facts(differing, cell, "What differs beyond its tolerance")
        if differing
        else Note("Nothing that was checked differs beyond its tolerance.")
    ]
    if unknown:
        blocks.append(_facts(unknown, cell, "What not every engine says, and could not be checked"))
    if equal:
        blocks.append(Folded(f"{len(equal)} things are equal", (_facts(equal, cell, "What is equal"),)))
    return blocks


def _facts(facts: list[Fact], cell: ComparisonCell, caption: str) -> Table:
    rows = [
        [fact.name, *(fact.values.get(label, UNSAID) for label in cell.labels), fact.tolerance]
        for fact in facts
    ]
    columns = ["Fact", *cell.labels, "May differ by"]
    return table(caption, columns, rows, text=range(len(columns)))


def _shape(cell: ComparisonCell, prefix: str) -> list[Block]:
    wanted = (("ttft", "Time to first token"), ("tpot", "Time per output token"), ("e2e", "End to end"))
    drawn = (
        overlay(
            f"{prefix}ecdf-{metric}",
            title,
            METRICS[metric].title,
            {label: cell.latencies(label, metric) for label in cell.labels},
        )
        for metric, title in wanted
    )
    plots = tuple(plot for plot in drawn if plot is not None)
    if not plots:
        return [Note("Fewer than two contenders have successes to draw.")]
    drawing = Side(plots, EXPLAINED)
    return [drawing]


def _runs(cell: ComparisonCell, _: str) -> list[Block]:
    runs = [*((label, view) for label in cell.labels for view in cell.views[label]), *cell.left_out]
    rows = [
        (
            TableCell(label),
            TableCell(view.name, href=cell.hrefs[view.name], tone="code"),
            TableCell(f"{view.summary.verdict.state}{', left out' * ((label, view) in cell.left_out)}"),
            TableCell(f"{view.summary.counts['ok']:,} of {view.summary.counts['planned']:,}"),
        )
        for label, view in runs
    ]
    columns = ["Contender", "Run", "Verdict", "Served as asked"]
    spread = spread_table(cell)
    listing = table("Every run, with its own report", columns, rows, text=(0, 1, 2))
    return [listing] if spread is None else [listing, spread]


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison for machines: each cell's state, reasons, facts and figures."""
    return {"title": comparison.title, "comparable": comparison.comparable, "cells": [
        _cell_json(cell) for cell in comparison.cells
    ], "sweeps": [tradeoff.to_json(sweep) for sweep, _ in sweeps_in(comparison.cells)],
       "missing": list(comparison.missing)}  # fmt: skip


def _cell_json(cell: ComparisonCell) -> dict[str, Any]:
    figures = {
        headline.title: {label: cell.figure(label, headline).to_json() for label in cell.labels}
        for headline in HEADLINES
    }
    return {
        "name": cell.name,
        "state": cell.gate.state,
        "reasons": [reason.to_json() for reason in cell.gate.reasons],
        "warnings": [reason.to_json() for reason in cell.gate.warnings],
        "facts": [
            {"name": f.name, "values": dict(f.values), "agrees": f.agrees, "tolerance": f.tolerance}
            for f in cell.gate.facts
        ],
        "numbers": figures,
        "contrasts": [contrast_json(pair, each, TITLES) for pair, each in cell.contrasts.items()],
        "left_out": [view.name for _, view in cell.left_out],
        "best": {headline.title: cell.best(headline) for headline in HEADLINES},
        "runs": {label: [view.name for view in views] for label, views in cell.views.items()},
    }
