"""What reports are made of: headings, banners, numbers, tables, figures.

Every format renders the same blocks: HTML (`page/templates/blocks.html.j2`), text and Markdown (`formats/`).
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from burstline.measure.record.verdict import Reason

MARKS = {"pass": "✓", "fail": "✕", "inconclusive": "?"}
"""The mark of each result of an SLO."""
LATENCIES = "latencies"
"""The table with the numbers of the figure of percentiles, by id."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: `text`, the number of the table's note on it, a smaller line under it, where it links to.

    `key` is the place in summary.json of the number that it shows, of several runs behind the case and the
    contender; numbers of one key are equal everywhere. `unit` is that of a number with a key.
    """

    text: str
    detail: str = ""
    href: str = ""
    note: int | None = None
    tone: str = ""
    key: str = ""
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; text columns align left, numbers right."""

    title: str
    numeric: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One row; the first cell is its header, `id` is where links to it lead."""

    cells: tuple[Cell, ...]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with its caption; `sortable` lets a reader with JavaScript sort it by any column.

    `notes` stand below the table, numbered from 1: what several cells say, said once. `remark` is a sentence
    about the table as a whole.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    sortable: bool = False
    id: str = ""
    notes: tuple[str, ...] = ()
    remark: str = ""


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Row | Iterable[str | Cell]],
    *,
    text: Container[int] = (0,),
    **more: Any,
) -> Table:
    """A table of plain cells; `text` are the indices of the columns of words, `more` are its other fields."""
    return Table(
        caption,
        tuple(Column(title, k not in text) for k, title in enumerate(columns)),
        tuple(
            row if isinstance(row, Row) else Row(tuple(c if isinstance(c, Cell) else Cell(c) for c in row))
            for row in rows
        ),
        **more,
    )


@dataclass(frozen=True, slots=True)
class Hover:
    """Where an axis lies in the SVG, for reading values off the figure's own table.

    `start` and `end` are viewBox units, `first` and `last` the values there. `axis` is "x", whose values
    stand in the first column of the figure's table, "log" where it is logarithmic, or "y", which counts
    the table's rows, or from 1 the figure's own `rows`.
    """

    axis: str
    start: float
    end: float
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Drawing:
    """What stands inside an <svg> element whose viewBox is "0 0 width height"; `name` begins all its ids.

    `hover` is None where no axis can be read off the table, as a log one.
    """

    name: str
    body: str
    width: float
    height: float
    hover: Hover | None


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure of the page: what it shows, its result in words, how to read it, and its table.

    `drawings` is one for every screen, or one for a wide and one for a narrow screen. `table` is the id of a
    table elsewhere on the page where the figure has none of its own; `rows` are the requests in it that stand
    along the figure's y axis, from 1.
    """

    id: str
    title: str
    finding: str
    explained: str
    drawings: tuple[Drawing, ...]
    table: Table | str
    rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Heading:
    """A title; `level` is 1 for the whole, more for what is inside."""

    text: str
    level: int = 2


@dataclass(frozen=True, slots=True)
class TargetLine:
    """One SLO: what was asked, what was measured with its interval, what that makes of it, and why."""

    mark: str
    result: str
    text: str
    measured: str
    reason: str


@dataclass(frozen=True, slots=True)
class Banner:
    """A verdict with its reasons; `name` is what is judged where there are several."""

    state: str
    tone: str
    mark: str
    sentence: str
    reasons: tuple[Reason, ...]
    targets: tuple[TargetLine, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tile:
    """A question and its short answer, with a line of `detail`."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the page says first: one sentence, and under it what limits it or what to look at next."""

    sentence: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """Figures or tables side by side, explained together."""

    blocks: tuple[Plot | Table, ...]
    explained: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """Something to copy; `aligned` text keeps its lines, others may be broken."""

    caption: str
    text: str
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence, mostly on why something is not here."""

    text: str


@dataclass(frozen=True, slots=True)
class Findings:
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """Blocks that a reader unfolds; `id` is where links to it lead."""

    summary: str
    blocks: "tuple[Block, ...]"
    id: str = ""


Block = Heading | Banner | Answer | Plot | Table | Side | Command | Note | Findings | Folded
