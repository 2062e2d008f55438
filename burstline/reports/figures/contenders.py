"""The figures of comparisons: how many times better one of two is, and a series of runs or pairs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.ticker import FixedLocator, MaxNLocator

from burstline.reports.blocks import Drawing, Plot, table
from burstline.reports.figures import drawing as look
from burstline.reports.figures.run_figures import head_room
from burstline.reports.figures.scatter import LETTER, LINE
from burstline.reports.number_format import number
from burstline.reports.sentences import say

ROW, ROW_NARROW, HEADING, BOTTOM = 30.0, 36.0, 26.0, 44.0
LABEL, LABEL_NARROW = 80.0, 44.0
"""The least distance between two ticks that are written, `1.1× better` or `1.1×`, CSS pixels."""
TICKS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times better the first is in one number, below 1 where the second is better.

    `low` and `high` are None without an interval. `runs` are the same ratio for each run. `decided` says that
    the difference is significant. `times` and `interval` are the ratio in words: `1.35x faster`,
    `99.2% CI [1.26, 1.45]`.
    """

    title: str
    point: float
    low: float | None
    high: float | None
    runs: tuple[float, ...]
    decided: bool
    times: str
    interval: str

    @property
    def bounds(self) -> str:
        return self.interval.partition("CI ")[2]


def forest(name: str, pair: tuple[str, str], ratios: Sequence[Ratio], finding: str, *, explain: bool) -> Plot:
    """Times better on a logarithmic axis, to the right where the first is; each run is a small dot."""
    first, second = pair
    every = [v for r in ratios for v in (r.point, r.low, r.high, *r.runs) if v and math.isfinite(v)]
    reach = max(max(abs(math.log(v)) for v in every), math.log(1.1)) * 1.15
    longest = max(len(text) for r in ratios for text in (r.times, r.bounds))

    def draw(drawing: str, width: float) -> Drawing:
        narrow = width < 600
        left, right, label, word = 190.0, 190.0, LABEL, " better"
        if narrow:
            left, right, label, word = 102.0, max(94.0, LETTER * longest + 12), LABEL_NARROW, ""
        ends = (f"← {second} better", f"{first} better →")
        is_crowded = LETTER * len("  ".join(ends)) > width - left - right
        top = HEADING + (LINE if is_crowded else 0)
        figure, (panel,) = look.canvas(width, top + (ROW_NARROW if narrow else ROW) * len(ratios) + BOTTOM)
        look.margins(figure, top=top, bottom=BOTTOM, left=left, right=right)
        panel.set_xscale("log")
        panel.set_xlim(math.exp(-reach), math.exp(reach))
        panel.set_ylim(len(ratios) - 0.5, -0.5)
        panel.grid(visible=True, axis="x")
        panel.grid(visible=False, axis="y")
        panel.axvline(1, color=look.MUTED, linewidth=1.4)
        apart = math.exp(2 * reach * label / (width - left - right))
        upward: list[float] = []
        for tick in TICKS:
            if math.log(tick) <= reach and tick >= apart * (upward[-1] if upward else 1.0):
                upward.append(tick)
        kept = [*(1 / tick for tick in reversed(upward)), 1.0, *upward]
        panel.xaxis.set_major_locator(FixedLocator(kept))
        labels = ["equal" if tick == 1 else f"{max(tick, 1 / tick):.3g}×{word}" for tick in kept]
        panel.set_xticks(kept, labels)
        panel.set_yticks(range(len(ratios)), [r.title for r in ratios])
        panel.tick_params(axis="y", labelcolor=look.INK)
        for k, ratio in enumerate(ratios):
            color = look.MUTED if not ratio.decided else look.GOOD if ratio.point > 1 else look.BAD
            if ratio.low and ratio.high:
                panel.plot([ratio.low, ratio.high], [k, k], color=color, linewidth=2.4, solid_capstyle="butt")
            panel.plot(ratio.runs, [k + 0.24] * len(ratio.runs), "o", color=look.INK, markersize=3, alpha=0.6)
            panel.plot([ratio.point], [k], "D" if ratio.decided else "o", color=color, markersize=7)
            words = ("\n" if narrow else "  ").join(filter(None, (ratio.times, ratio.bounds)))
            tone = look.INK if ratio.decided else look.MUTED
            look.write(panel, words, (1, k), (8, 0), tone, of=("axes fraction", "data"), va="center")
        for text, at, side in ((ends[0], 0.0, "left"), (ends[1], 1.0, "right")):
            above = 8 + LINE if is_crowded and not at else 8
            look.write(panel, text, (at, 1), (0, above), of="axes fraction", ha=side)
        return look.drawn(figure, drawing, panel, "")

    rows = [[r.title, r.times, r.interval or "–", "yes" if r.decided else "no"] for r in ratios]
    columns = ["Number", f"{first} is", "Interval", "Significant"]
    title, explained = f"{first} against {second}", say("figure.forest") if explain else ""
    shown = table(f"{first} compared with {second}", columns, rows, text=(0, 1, 2, 3))
    return Plot(name, title, finding, explained, look.in_both_widths(name, draw), shown)


@dataclass(frozen=True, slots=True)
class RunDot:
    """A run's value, and between which values it was expected; no ends for the first few runs."""

    name: str
    value: float
    low: float | None
    high: float | None
    is_off: bool


def history(
    name: str,
    title: str,
    unit: str,
    dots: Sequence[RunDot],
    finding: str,
    *,
    of: str = "run",
    explained: str = "figure.series",
) -> Plot:
    """The values of all runs, or of what else `of` says, over their number; `explained` is a code."""
    places = range(1, len(dots) + 1)
    band = "margin" if explained == "figure.pairs" else "expected"

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, 260)
        look.margins(figure, top=head_room(width), bottom=48)
        known = [(k, dot.low, dot.high) for k, dot in zip(places, dots, strict=True) if dot.low is not None]
        if known:
            at, low, high = zip(*known, strict=True)
            panel.fill_between(at, low, high, step="mid", color=look.MUTED, alpha=0.25, lw=0, label=band)
        panel.plot(places, [dot.value for dot in dots], "o-", color=look.SERIES[0], markersize=4, linewidth=1)
        off = [(k, dot.value) for k, dot in zip(places, dots, strict=True) if dot.is_off]
        if off:
            panel.plot(*zip(*off, strict=True), "D", color=look.BAD, markersize=7, label="outside")
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        panel.set_xlabel(of, ha="right")
        look.head(panel, f"{title} ({unit})", named=bool(known))
        return look.drawn(figure, drawing, panel)

    rows = [
        [str(k), dot.name, *("–" if v is None else number(v) for v in (dot.value, dot.low, dot.high))]
        for k, dot in zip(places, dots, strict=True)
    ]
    columns = ["Number", of.capitalize(), f"{title} ({unit})", "Expected from", "to"]
    shown = table(title, columns, rows, text=(1,))
    return Plot(name, title, finding, say(explained), look.in_both_widths(name, draw), shown)
