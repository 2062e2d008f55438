"""Tables as the page and the terminal print them; the first cell of a row names it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: `text`, the number of the table's note on it, a smaller line under it, where it links to."""

    text: str
    detail: str = ""
    href: str = ""
    note: int | None = None
    tone: str = ""


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

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    sortable: bool = False
    id: str = ""
    notes: tuple[str, ...] = ()
    remark: str = ""


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Sequence[str | Cell]], *, text: Sequence[int] = (0,)
) -> Table:
    """A table of plain cells; `text` are the indices of the columns that hold words."""
    return Table(
        caption,
        tuple(Column(title, k not in text) for k, title in enumerate(columns)),
        tuple(Row(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row)) for row in rows),
    )
