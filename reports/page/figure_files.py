"""The page's figures as files of their own: SVG and PNG in the light theme, without the page's style."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from functools import cache
from html import escape
from importlib.resources import files

import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from burstline.reports.blocks import Block, Drawing, Folded, Overview, Plot, Side
from burstline.reports.figures.drawing import VARIABLES, witness
from burstline.reports.model.comparison import Comparison
from burstline.reports.page.page import page_sections

DOTS_PER_INCH = 144
"""Twice the size on the page: sharp on today's screens."""


def figure_files(comparison: Comparison) -> dict[str, bytes]:
    """Every figure of the page by file name, `ecdf-ttft.svg` and `ecdf-ttft.png`; wide ones only."""
    bitmaps: dict[str, bytes] = {}
    seen = witness.set(lambda name, figure: bitmaps.update({name: _png(figure)}))
    try:
        plots = [plot for section in page_sections(comparison) for plot in plots_in(section.blocks())]
    finally:
        witness.reset(seen)
    found: dict[str, bytes] = {}
    for plot in plots:
        drawing = plot.drawings[0]
        found[f"{plot.id}.svg"] = standalone_svg(plot, drawing).encode()
        if drawing.name in bitmaps:
            found[f"{plot.id}.png"] = bitmaps[drawing.name]
    return found


def plots_in(blocks: Iterable[Block]) -> Iterator[Plot]:
    """All figures among blocks, those in folds and side by side too."""
    for block in blocks:
        if isinstance(block, Plot):
            yield block
        elif isinstance(block, Overview):
            yield from block.plots
        elif isinstance(block, Side | Folded):
            yield from plots_in(block.blocks)


def standalone_svg(plot: Plot, drawing: Drawing) -> str:
    """The drawing as a document: colours written out, on the page's paper, with title and description."""
    width, height = f"{drawing.width:g}", f"{drawing.height:g}"
    body = re.sub(r"var\(--(\w+)\)", lambda found: theme()[found[1]], drawing.body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(plot.title)}</title>\n<desc>{escape(plot.finding)}</desc>\n"
        f'<rect width="100%" height="100%" fill="{theme()["paper"]}"/>\n{body}\n</svg>\n'
    )


@cache
def theme() -> dict[str, str]:
    """The page's colours in its light theme, by the name of their CSS variable."""
    css = files("burstline.reports.page").joinpath("templates/page.css").read_text("utf-8")
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", css[: css.index("}")]))


def _png(figure: Figure) -> bytes:
    for artist in figure.findobj():
        _recolour(artist)
    for panel in figure.axes:
        panel.set_facecolor("none")
    out = io.BytesIO()
    figure.savefig(
        out, format="png", dpi=DOTS_PER_INCH, facecolor=theme()["paper"], metadata={"Software": None}
    )
    return out.getvalue()


_COLOURED = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def _recolour(artist: Artist) -> None:
    """Gives an artist drawn in sentinel colours those of the theme."""
    for name in _COLOURED:
        get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
        if get is None or put is None:
            continue
        colour = get()
        if isinstance(colour, np.ndarray) and colour.ndim == 2:
            put([_real(row) for row in colour.tolist()])
        elif isinstance(colour, np.ndarray):
            put(_real(colour.tolist()))
        elif isinstance(colour, str | tuple) and colour not in ("none", "auto"):
            put(_real(colour))


def _real(colour: object) -> tuple[float, ...] | str:
    """The theme's colour for a sentinel, its opacity kept; any other as it is."""
    variable = VARIABLES.get(to_hex(colour))  # type: ignore[arg-type]
    if variable is None:
        return colour if isinstance(colour, str) else tuple(colour)  # type: ignore[arg-type]
    red, green, blue = (int(theme()[variable][k : k + 2], 16) / 255 for k in (1, 3, 5))
    opacity = colour[3] if isinstance(colour, list | tuple) and len(colour) == 4 else 1.0
    return (red, green, blue, opacity)
