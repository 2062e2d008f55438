"""A run or a comparison in other formats, as the bytes of files, and the page's figures alone."""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Final

import numpy as np
import orjson
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure

from burstline.measure.metrics.definitions import METRICS
from burstline.measure.metrics.sessions import turns_of
from burstline.measure.record.rundir import Run
from burstline.reports.blocks import Block, Folded, Plot, Side
from burstline.reports.figures.drawing import PAPER, VARIABLES, witness
from burstline.reports.formats.text import markdown, text
from burstline.reports.model.comparison import Comparison, alone, view_of
from burstline.reports.page.digest import comparison_json, digest
from burstline.reports.page.page import page_over, render

DOTS_PER_INCH = 144
"""Twice the size on the page: sharp on today's screens."""


FILES: Final[Mapping[str, Callable[[Run], dict[str, bytes]]]] = {
    "csv": lambda run: {"records.csv": records_csv(run)},
    "markdown": lambda run: {"summary.md": markdown(digest(alone(view_of(run)))).encode()},
    "figures": lambda run: {
        f"figures/{name}": content for name, content in figure_files(alone(view_of(run))).items()
    },
}
"""By format, what makes its files of a run: their contents by name."""


def written(shape: str, comparison: Comparison) -> str:
    """A comparison as a page, as Markdown, as JSON or as text."""
    if shape == "html":
        return render(comparison)
    if shape == "json":
        options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        return orjson.dumps(comparison_json(comparison), option=options).decode()
    return markdown(digest(comparison)) if shape == "markdown" else text(digest(comparison), 120)


def write_all(comparison: Comparison, folder: Path) -> Path:
    """Page, Markdown and JSON of a comparison; where the page is."""
    for name, shape in (("report.html", "html"), ("report.md", "markdown"), ("comparison.json", "json")):
        (folder / name).write_text(written(shape, comparison), "utf-8")
    return folder / "report.html"


def figure_files(comparison: Comparison) -> dict[str, bytes]:
    """Every figure of the page by file name, `ttft-cdf.svg` and `ttft-cdf.png`; wide ones only."""
    bitmaps: dict[str, bytes] = {}
    seen = witness.set(lambda name, figure: bitmaps.update({name: _png(figure)}))
    try:
        page = page_over(comparison)
        plots = [*page.pictures, *(p for section in page.sections for p in plots_in(section.blocks))]
    finally:
        witness.reset(seen)
    found: dict[str, bytes] = {}
    for plot in plots:
        found[f"{plot.id}.svg"] = standalone_svg(plot).encode()
        if plot.drawings[0].name in bitmaps:
            found[f"{plot.id}.png"] = bitmaps[plot.drawings[0].name]
    return found


def plots_in(blocks: Iterable[Block]) -> Iterator[Plot]:
    """All figures among blocks, those in folds and side by side too."""
    for block in blocks:
        if isinstance(block, Plot):
            yield block
        elif isinstance(block, Side | Folded):
            yield from plots_in(block.blocks)


def standalone_svg(plot: Plot) -> str:
    """The wide drawing as a document: colours written out, on the page's paper, title and description."""
    drawing = plot.drawings[0]
    width, height = f"{drawing.width:g}", f"{drawing.height:g}"
    colours = {name: colour for colour, name in VARIABLES.items()}
    body = re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], drawing.body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(plot.title)}</title>\n<desc>{escape(plot.finding)}</desc>\n"
        f'<rect width="100%" height="100%" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )


def _png(figure: Figure) -> bytes:
    for panel in figure.axes:
        panel.set_facecolor("none")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DOTS_PER_INCH, facecolor=PAPER, metadata={"Software": None})
    return out.getvalue()


def request_frame(run: Run) -> pd.DataFrame:
    """Every plain field of the records, and each request's latencies in seconds; NaN where undefined.

    Of sessions also each request's session, from 0, and the place of its turn there, from 1.
    """
    c = run.columns
    frame = run.request_table.to_pandas(integer_object_nulls=True)
    latencies = {
        f"{name}_s": np.where(c.ok, metric.of(c), np.nan)
        for name, metric in METRICS.items()
        if metric.of is not None
    }
    if (turns := turns_of(run)) is not None:
        frame.insert(1, "session", turns.session)
        frame.insert(2, "turn", turns.depth + 1)
    whole: pd.DataFrame = pd.concat([frame, pd.DataFrame(latencies)], axis=1)
    return whole


def records_csv(run: Run) -> bytes:
    """The frame of the requests as CSV; what is undefined is empty."""
    frame = request_frame(run)
    for name in (field.name for field in run.request_table.schema if pa.types.is_string(field.type)):
        frame[name] = frame[name].map(_no_formula)
    text: str = frame.to_csv(index=False, float_format="%.9g")
    return text.encode()


def _no_formula(value: object) -> object:
    """Text that a spreadsheet would run begins with an apostrophe instead: a server wrote some of it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
