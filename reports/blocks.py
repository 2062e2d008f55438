"""What a section of the page is made of, besides figures (`drawing.Plot`) and tables (`tables.Table`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from reports.figures.drawing import Plot
from reports.tables import Table


@dataclass(frozen=True, slots=True)
class Tile:
    """One large number: its name, its value in `unit`, and a line under it."""

    label: str
    value: str
    unit: str
    detail: str


@dataclass(frozen=True, slots=True)
class Tiles:
    """Large numbers in a row."""

    kind: ClassVar[str] = "tiles"
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """Figures or tables of one kind side by side, explained together."""

    kind: ClassVar[str] = "side"
    blocks: tuple[Plot | Table, ...]
    explained: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """Something to copy; `aligned` text keeps its lines, others may be broken."""

    kind: ClassVar[str] = "command"
    caption: str
    text: str
    aligned: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence, mostly on why something is not here."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found, a sentence each."""

    kind: ClassVar[str] = "findings"
    sentences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Folded:
    """Blocks that a reader unfolds; `id` is where links to it lead."""

    kind: ClassVar[str] = "folded"
    summary: str
    blocks: tuple[Block, ...]
    id: str = ""


Block = Plot | Table | Tiles | Side | Command | Note | Findings | Folded
