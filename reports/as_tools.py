"""The section that shows the same events under other tools' definitions."""

from __future__ import annotations

import math

from loadgen.as_tools import TOOLS, Samples, Tool
from loadgen.stats import Absent
from loadgen.vllm_block import vllm_block
from reports.blocks import Block, Command, Folded, Note
from reports.estimates import formula
from reports.numbers import number, scale_for
from reports.tables import Cell, Column, Row, Table
from reports.view import View

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
    "but Burstline leave failed requests out. Below a figure that differs from Burstline's by more than 1 % "
    "stands the factor between them."
)


def section(view: View) -> list[Block]:
    """What every tool would have printed, its definitions, and vLLM's text block to copy."""
    samples = [(tool, tool.of(view.columns)) for tool in TOOLS]
    blocks: list[Block] = [Note(EXPLAINED), _numbers(samples), Folded("Their definitions", (_definitions(),))]
    text = vllm_block(
        view.columns,
        facts={
            "concurrency": view.manifest.get("concurrency"),
            "rate_per_s": (view.manifest.get("arrivals") or {}).get("rate_per_s"),
        },
    )
    if isinstance(text, Absent):
        return [*blocks, Note(f"vLLM's text block: {text.reason}.")]
    return [*blocks, Command("As vllm bench serve prints it", text)]


def _numbers(samples: list[tuple[Tool, Samples]]) -> Table:
    ours = samples[0][1]
    titles = ["Tool", *(title for title, *_ in QUANTITIES), *(title for title, _ in RATES)]
    rows = tuple(
        Row(
            (
                Cell(tool.title, detail=tool.version),
                *(_cell(s.quantile(key, p), ours.quantile(key, p), "s") for _, key, p in QUANTITIES),
                *(_cell(getattr(s, key), getattr(ours, key), "") for _, key in RATES),
            )
        )
        for tool, s in samples
    )
    return Table(
        "This run as each tool would print it",
        tuple(Column(title, numeric=k > 0) for k, title in enumerate(titles)),
        rows,
    )


def _cell(value: float | Absent, ours: float | Absent, unit: str) -> Cell:
    if isinstance(value, Absent):
        return Cell("–", detail=value.reason)
    scale = scale_for(unit, [value])
    shown = f"{number(value / scale.divisor)} {scale.unit}".strip()
    if isinstance(ours, Absent) or not ours or not math.isfinite(ours) or abs(value / ours - 1) <= NOTABLE:
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
        for tool in TOOLS
    )
    return Table("The same words, other numbers", tuple(Column(t, numeric=False) for t in titles), rows)
