"""The section that shows the same events under other tools' definitions."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.metrics.other_tools import OURS, TOOLS, Definitions, ToolFigures, vllm_block
from loadgen.metrics.summary_types import Summary
from loadgen.stats.estimates import Absent, label
from reports.blocks import Block, Command, Folded, Note
from reports.estimate_tables import formula
from reports.number_format import count, number, scale_for
from reports.run_view import View
from reports.tables import Cell, Column, Row, Table

QUANTITIES = (
    ("TTFT p50", "ttft", 0.5),
    ("TTFT p99", "ttft", 0.99),
    ("“TPOT” p50", "tpot", 0.5),
    ("“ITL” p50", "itl", 0.5),
    ("“ITL” p99", "itl", 0.99),
    ("E2E p50", "e2e", 0.5),
)
RATES = (("Output tok/s", "output_tok_per_s"), ("Requests/s", "requests_per_s"))
NOTABLE = 0.01
"""A figure that differs from ours by more is marked with by how much."""
EXPLAINED = (
    "The same events under each tool's own definitions, as points: none of them gives an interval, and all "
    "but Burstline leave failed requests out. Below a figure that differs from Burstline's by more than 1% "
    "stands the factor between them. They print a percentile of any number of requests; Burstline's is a "
    "dash where there are too few."
)


def section(view: View) -> list[Block]:
    """What every tool would have printed, its definitions, and vLLM's text block to copy."""
    blocks: list[Block] = [Note(EXPLAINED), _numbers(view), Folded("Their definitions", (_definitions(),))]
    arrivals = view.manifest.arrivals
    text = vllm_block(
        view.columns,
        concurrency=view.manifest.concurrency,
        rate_per_s=arrivals.rate_per_s if arrivals else None,
    )
    if isinstance(text, Absent):
        return [*blocks, Note(f"vLLM's text block: {text.reason}.")]
    return [*blocks, Command("As vllm bench serve prints it", text, aligned=True), Note(_peaks(view))]


def _peaks(view: View) -> str:
    """Why its peak of concurrency differs from ours."""
    told = "Its peaks are of whole seconds: all requests that ran at any time within one count as concurrent"
    most = view.summary.concurrency.max
    return (
        f"{told}." if isinstance(most, Absent) else f"{told}. In flight at once: at most {count(most.point)}."
    )


Value = float | Absent


def _numbers(view: View) -> Table:
    ours = _ours(view.summary)
    notes: list[str] = []
    rows = [_row(OURS, ours, ours, notes)]
    rows += [_row(tool, _theirs(of(view.columns)), ours, notes) for tool, of in TOOLS]
    titles = ["Tool", *(title for title, *_ in QUANTITIES), *(title for title, _ in RATES)]
    columns = tuple(Column(title, numeric=k > 0) for k, title in enumerate(titles))
    return Table("This run as each tool would print it", columns, tuple(rows), notes=tuple(notes))


def _ours(summary: Summary) -> list[Value]:
    figures = [summary.figure("metrics", key, label(p)) for _, key, p in QUANTITIES]
    figures += [summary.figure("throughput", key) for _, key in RATES]
    return [figure if isinstance(figure, Absent) else figure.point for figure in figures]


def _theirs(samples: ToolFigures) -> list[Value]:
    return [samples.quantile(key, p) for _, key, p in QUANTITIES] + [
        getattr(samples, key) for _, key in RATES
    ]


def _row(tool: Definitions, values: Sequence[Value], ours: Sequence[Value], notes: list[str]) -> Row:
    units = ["s"] * len(QUANTITIES) + [""] * len(RATES)
    cells = (_cell(*each, notes) for each in zip(values, ours, units, strict=True))
    return Row((Cell(tool.title, detail=tool.version), *cells))


def _cell(value: Value, ours: Value, unit: str, notes: list[str]) -> Cell:
    if isinstance(value, Absent):
        if value.reason not in notes:
            notes.append(value.reason)
        return Cell("–", note=notes.index(value.reason) + 1)
    scale = scale_for(unit, [value])
    shown = f"{number(value / scale.divisor)} {scale.unit}".strip()
    if isinstance(ours, Absent) or not ours or abs(value / ours - 1) <= NOTABLE:
        return Cell(shown)
    return Cell(shown, detail=f"{number(value / ours)} × ours", tone="differs")


def _definitions() -> Table:
    titles = ("Tool", "Clock starts", "TTFT ends at", "“TPOT”", "“ITL”", "E2E ends at", "Throughput over")
    rows = tuple(
        Row(
            (
                Cell(tool.title, detail=tool.version),
                *(
                    Cell(formula(words))
                    for words in (tool.t0, tool.ttft, tool.tpot, tool.itl, tool.e2e, tool.window)
                ),
            )
        )
        for tool in (OURS, *(tool for tool, _ in TOOLS))
    )
    return Table("The same words, other numbers", tuple(Column(t, numeric=False) for t in titles), rows)
