"""What a client printed beside what was true."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.ticker import LogLocator

from burstline.measure.verdict.certificate import Reading, title_of
from burstline.reports.blocks import Drawing, Plot, table
from burstline.reports.figures import drawing as look
from burstline.reports.sentences import say


def against_truth(times: Sequence[Reading], finding: str) -> Plot:
    """One line a time that was printed, in the order given, in ms."""
    places, off = range(len(times)), [each.is_off for each in times]
    true, printed = [1e3 * each.true for each in times], [1e3 * (each.printed or 0.0) for each in times]

    def draw(drawing: str, width: float) -> Drawing:
        figure, (panel,) = look.canvas(width, 88 + 20 * len(times))
        look.margins(figure, top=40, bottom=48, left=84)
        panel.set_xscale("log")
        panel.set_ylim(len(times) - 0.5, -0.5)
        panel.set_yticks(places, [title_of(each.name) for each in times])
        panel.tick_params(axis="y", labelcolor=look.INK)
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
        panel.xaxis.set_major_formatter(look.LogTicks())
        for k, is_off in enumerate(off):
            color, mark = (look.BAD, "D") if is_off else (look.SERIES[0], "o")
            panel.plot([true[k], printed[k]], [k, k], color=color if is_off else look.MUTED, linewidth=1.4)
            panel.plot(true[k], k, "o", color=look.MUTED, fillstyle="none", markersize=9)
            panel.plot(printed[k], k, mark, color=color, markersize=5)
        look.head(panel, "○ true  ● printed  ◆ printed, and off (ms)", named=False)
        return replace(look.drawn(figure, drawing, panel), hover=None)

    cells = [
        [title_of(each.name), f"{true[k]:,.2f}", f"{printed[k]:,.2f}", "yes" if each.is_off else "no"]
        for k, each in enumerate(times)
    ]
    columns = ("Number", "True (ms)", "Printed (ms)", "Off")
    shown = table("Printed and true times", columns, cells, text=(0, 3))
    drawings, explained = look.in_both_widths("printed", draw), say("figure.against-truth")
    return Plot("printed", "Printed against true", finding, explained, drawings, shown)
