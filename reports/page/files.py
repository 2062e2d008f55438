"""A run or a comparison in other formats, as the bytes of files.

What draws or writes tables is imported where it is asked for: a text must not wait for it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import orjson
import pyarrow.parquet as pq

from burstline.loadgen.record.rundir import Run
from burstline.reports.formats.csv import records_csv
from burstline.reports.formats.junit import junit
from burstline.reports.formats.markdown import markdown
from burstline.reports.formats.text import text
from burstline.reports.formats.trace_events import trace_json
from burstline.reports.formats.vllm_bench import vllm_result
from burstline.reports.model.comparison import Comparison, alone, view_of
from burstline.reports.page.comparison_json import comparison_json
from burstline.reports.page.digest import digest
from burstline.reports.page.figure_files import figure_files
from burstline.reports.page.page import render


def _parquet(run: Run) -> dict[str, bytes]:
    out = io.BytesIO()
    pq.write_table(run.record_table, out, compression="zstd")
    return {"records.parquet": out.getvalue()}


def _csv(run: Run) -> dict[str, bytes]:
    return {"records.csv": records_csv(run)}


def _figures(run: Run) -> dict[str, bytes]:
    return {f"figures/{name}": content for name, content in figure_files(alone(view_of(run))).items()}


FILES: Final[Mapping[str, Callable[[Run], dict[str, bytes]]]] = {
    "parquet": _parquet,
    "csv": _csv,
    "markdown": lambda run: {"summary.md": markdown(digest(alone(view_of(run)))).encode()},
    "junit": lambda run: {"junit.xml": junit(view_of(run)).encode()},
    "trace": lambda run: {"trace.json": trace_json(view_of(run))},
    "figures": _figures,
    "vllm": lambda run: {"vllm.json": orjson.dumps(vllm_result(run))},
}
"""By format, what makes its files of a run: their contents by name."""


def written(shape: str, comparison: Comparison) -> str:
    """A comparison as a page, as Markdown, as JSON or as text."""
    if shape == "html":
        return render(comparison)
    if shape == "json":
        return (
            json.dumps(orjson.loads(orjson.dumps(comparison_json(comparison))), indent=2) + "\n"
        )  # NaN is null
    return {"markdown": markdown, "text": text}[shape](digest(comparison))


def write_all(comparison: Comparison, folder: Path) -> Path:
    """Page, Markdown and JSON of a comparison; where the page is."""
    for name, shape in (("report.html", "html"), ("report.md", "markdown"), ("comparison.json", "json")):
        (folder / name).write_text(written(shape, comparison), "utf-8")
    return folder / "report.html"
