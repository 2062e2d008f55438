"""How every figure looks, and how a matplotlib figure becomes SVG that follows the page's theme.

Figures are drawn in the colours of the light theme, which `drawn` replaces by CSS variables; text stays text
and takes the page's font, ids are stable, and one unit of the viewBox is one CSS pixel at full width.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from html import escape
from textwrap import wrap
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Annotation
from matplotlib.ticker import Formatter, MaxNLocator
from matplotlib.transforms import offset_copy

from burstline.errors import tables_beside
from burstline.reports.blocks import Drawing, Hover

INK, MUTED, GRID, BAD, GOOD, PAPER = "#1b2430", "#596473", "#e6e3dc", "#b3261e", "#1a6e42", "#fcfbf9"
SERIES = ("#0b64b3", "#cc6a1c", "#0a7f63", "#8f4a8b")
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.8)), (0, (7, 2, 1.5, 2)))
"""The second cue: series k has colour SERIES[k] and line style DASHES[k]."""
TEXT = 11.5
"""The size of all text in figures, CSS pixels."""

VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", BAD: "bad", GOOD: "good", PAPER: "paper"} | {
    c: f"c{k}" for k, c in enumerate(SERIES)
}
"""The page's CSS variable of each colour."""
_NAMED = {"text": TEXT, **{name: colour for colour, name in VARIABLES.items()}}
_STYLE: dict[Any, Any] = {
    key: _NAMED.get(value, value) for key, value in tables_beside(__file__, "style.toml").items()
}


witness: ContextVar[Callable[[str, Figure], None] | None] = ContextVar("witness", default=None)
"""Sees each figure once, after it became SVG and before it is let go: how one becomes a bitmap."""


WIDE, HALF, NARROW = 960.0, 470.0, 380.0
"""How wide a figure is drawn, CSS pixels: alone on a wide screen, beside another one, on a narrow screen."""
LABEL_DROP = 22.5
"""From an x axis to its label, CSS pixels: tick, tick label and the room between."""


@contextmanager
def plain() -> Iterator[None]:
    """Draw as matplotlib comes: a user's style may ask for LaTeX, or hide what ours does not set."""
    names = [name for name in mpl.rcParamsDefault if name != "backend"]
    theirs = {name for name in names if mpl.rcParams[name] != mpl.rcParamsDefault[name]}
    with mpl.rc_context({name: mpl.rcParamsDefault[name] for name in theirs}):
        yield


@plain()
def attempt(name: str, width: float, draw: Callable[[str, float], Drawing]) -> Drawing:
    """What `draw(name, width)` makes; where it fails a note, for no measured run is lost to a figure."""
    try:
        return draw(name, width)
    except Exception as error:  # matplotlib, with fonts and files of the user's
        why = wrap(f"This figure could not be drawn: {type(error).__name__}: {error}"[:200], int(width / 8))
        lines = [f'<text y="{20 * k}">{escape(line)}</text>' for k, line in enumerate(why, 1)]
        return Drawing(name, "".join(lines), width, 20.0 * len(lines) + 10, None)


def in_both_widths(
    name: str, draw: Callable[[str, float], Drawing], *, wide: float = WIDE
) -> tuple[Drawing, Drawing]:
    """What `draw(name, width)` makes for a wide and for a narrow screen; `wide` is HALF beside another."""
    return attempt(name, wide, draw), attempt(f"{name}-narrow", NARROW, draw)


def canvas(width: float, height: float, n_rows: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure of `width` x `height` CSS pixels with `n_rows` panels on one shared x axis."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        panels = figure.subplots(n_rows, sharex=True, squeeze=False)[:, 0]
    for panel in panels:
        # Labels that stand where they are put: each one that finds its place by itself measures all tick
        # labels again, twice for each axis.
        below = offset_copy(panel.transAxes, fig=figure, y=-LABEL_DROP, units="dots")
        panel.xaxis.set_label_coords(1, 0, transform=below)
        panel.yaxis.set_label_coords(0, 0.5)
        panel.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        panel.yaxis.set_major_formatter(_Ticks())
        panel.xaxis.set_major_formatter(_Ticks())
    for panel in panels[:-1]:
        panel.xaxis.set_visible(False)  # its ticks are those of the last panel, and each takes 1 ms
    return figure, list(panels)


class _Ticks(Formatter):
    """The numbers along an axis: thousands separators, and as many decimals in each as any of them needs."""

    def format_ticks(self, values: Iterable[float]) -> list[str]:
        ticks = list(values)
        decimals = max((len(f"{t:.6f}".rstrip("0").partition(".")[2]) for t in ticks), default=0)
        return [f"{tick:,.{decimals}f}".replace("-", "−") for tick in ticks]

    def __call__(self, value: float, pos: int | None = None) -> str:
        del pos
        return self.format_ticks([value])[0]


class LogTicks(_Ticks):
    """Each number with its own decimals: 0.05, 0.1, 1, 20."""

    def format_ticks(self, values: Iterable[float]) -> list[str]:
        return [f"{value:,.6f}".rstrip("0").rstrip(".") for value in values]


def head(panel: Axes, title: str, *, named: bool = True) -> Legend | None:
    """The panel's title and, where its series are `named`, their names in one line at its right end.

    On a narrow screen the names stand below the title.
    """
    narrow = named and panel.figure.bbox.width < WIDE
    with mpl.rc_context(_STYLE):
        panel.set_title(title, color=INK, loc="left", pad=24 if narrow else 9, y=1.0)
        if not named:
            return None
        n_lines = len(panel.get_legend_handles_labels()[0])
        # In pixels: a share of the height would lift the names into the title above a high panel.
        above = offset_copy(panel.transAxes, fig=panel.get_figure(root=True), y=4, units="dots")
        return panel.legend(
            loc="lower right", bbox_to_anchor=(1, 1), bbox_transform=above, ncols=max(n_lines, 1),
            columnspacing=1.4,
        )  # fmt: skip


def names_above(panel: Axes, n_columns: int = 1) -> None:
    """The names of the panel's series above it, one below the other or in columns: some are long."""
    above = offset_copy(panel.transAxes, fig=panel.get_figure(root=True), y=6, units="dots")
    with mpl.rc_context(_STYLE):
        panel.legend(
            loc="lower left", bbox_to_anchor=(0, 1), bbox_transform=above, ncols=n_columns,
            labelspacing=0.3, columnspacing=1.0, handlelength=2.2 if n_columns == 1 else 1.0,
        )  # fmt: skip


def write(
    panel: Axes,
    text: str,
    at: tuple[float, float],
    offset: tuple[float, float],
    color: str = MUTED,
    *,
    of: Any = "data",
    **style: Any,
) -> Annotation:
    """Text so many CSS pixels off a place; `of` says what the place's coordinates are of."""
    style |= {"xycoords": of, "textcoords": "offset points", "color": color, "fontsize": TEXT}
    return panel.annotate(text, at, offset, **style)


def margins(figure: Figure, top: float, bottom: float, left: float = 58, right: float = 16) -> None:
    """The room around the panels in CSS pixels."""
    width, height = figure.get_size_inches() * 72
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)


def drawn(figure: Figure, name: str, panel: Axes, axis: str = "x") -> Drawing:
    """The figure as SVG, its ids beginning with `name`; values are read off along the panel's `axis`, if any.

    The same data give the same bytes.
    """
    for axes in figure.axes:
        axes.minorticks_off()  # a logarithmic scale brings its own, with labels that lie on ours
    out = io.StringIO()
    with mpl.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    body = text[text.index("</metadata>") + len("</metadata>") : text.rindex("</svg>")]
    body = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = _scoped_ids(body, name)
    body = re.sub(r"<!--.*?-->|\n\s*", "", body, flags=re.DOTALL)
    # Coordinates stand in tags; a number in a text stays as it is. A level line in a path is an H.
    short = partial(re.sub, r"-?\d+\.\d{4,}", lambda at: f"{float(at[0]):.2f}".rstrip("0").rstrip("."))
    body = re.sub(r"<[^>]+>", lambda tag: short(tag[0]), body)
    body = re.sub(r"( [\d.-]+) L ([\d.-]+)\1(?= )", r"\1 H \2", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var(--{variable})")
    width, height = figure.get_size_inches() * 72
    if (see := witness.get()) is not None:
        see(name, figure)
    return Drawing(name, body, float(width), float(height), _hover(panel, axis, float(height)))


def _hover(panel: Axes, axis: str, height: float) -> Hover | None:
    if not axis:
        return None
    (x0, y0), (x1, y1) = panel.transData.transform([*zip(panel.get_xlim(), panel.get_ylim(), strict=True)])
    if axis == "x":
        kind = "log" if panel.get_xscale() == "log" else "x"
        return Hover(kind, round(x0, 1), round(x1, 1), *panel.get_xlim())
    return Hover("y", round(height - y0, 1), round(height - y1, 1), *panel.get_ylim())


def _scoped_ids(body: str, name: str) -> str:
    """Ids that something refers to carry the figure's name, the others go: a page holds several figures."""
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', body))

    def scoped(found: re.Match[str]) -> str:
        return f' id="{name}-{found[1]}"' if found[1] in used else ""

    body = re.sub(r' id="([^"]+)"', scoped, body)
    return re.sub(r'(href="|url\()#', rf"\1#{name}-", body)
