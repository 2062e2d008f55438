"""What a client printed beside what was true."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.ticker import LogLocator

from burstline.reports.blocks import Drawing, Plot, table
from burstline.reports.figures import drawing as look
from burstline.reports.sentences import say


@dataclass(frozen=True, slots=True)
class Told:
    """A time in ms as it was and as it was printed, and whether that is off."""

    name: str
    true: float
    printed: float
    is_off: bool


def against_truth(rows: Sequence[Told], finding: str) -> Plot:
    """One line a number, in the order given."""

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, 88 + 20 * len(rows))
        look.margins(figure, top=40, bottom=48, left=84)
        panel.set_xscale("log")
        panel.set_ylim(len(rows) - 0.5, -0.5)
        places = range(len(rows))
        panel.set_yticks(places, [row.name for row in rows])
        panel.tick_params(axis="y", labelcolor=look.INK)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
        panel.xaxis.set_major_formatter(look.LogTicks())
        for k, row in enumerate(rows):
            panel.plot(
                [row.true, row.printed], [k, k], color=look.BAD if row.is_off else look.MUTED, linewidth=1.4
            )
        panel.plot([row.true for row in rows], places, "o", color=look.MUTED, fillstyle="none", markersize=9)
        for is_off, mark, color in ((False, "o", look.SERIES[0]), (True, "D", look.BAD)):
            some = [(row.printed, k) for k, row in enumerate(rows) if row.is_off == is_off]
            if some:
                panel.plot(*zip(*some, strict=True), mark, color=color, markersize=5)
        look.head(panel, "Printed and true (ms)", named=False)
        return replace(look.drawn(figure, drawing, panel), hover=None)

    cells = [
        [row.name, f"{row.true:,.2f}", f"{row.printed:,.2f}", "yes" if row.is_off else "no"] for row in rows
    ]
    columns = ("Number", "True (ms)", "Printed (ms)", "Off")
    shown = table("Printed and true times", columns, cells, text=(0, 3))
    drawings, explained = look.in_both_widths("printed", draw), say("figure.against-truth")
    return Plot("printed", "Printed against true", finding, explained, drawings, shown)
