"""What reports are made of, besides figures (`drawing.Plot`) and tables (`tables.Table`).

Every format renders the same blocks: HTML (`page/templates/blocks.html.j2`), text and Markdown (`formats/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from loadgen.record.verdict import Reason
from reports.figures.drawing import Plot
from reports.tables import Table


@dataclass(frozen=True, slots=True)
class Heading:
    """A title; `level` is 1 for the whole, more for what is inside."""

    kind: ClassVar[str] = "heading"
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
    """A verdict with its reasons; `error` is what the instrument adds to every number, `name` what is judged
    where there are several."""

    kind: ClassVar[str] = "banner"
    state: str
    tone: str
    mark: str
    sentence: str
    reasons: tuple[Reason, ...]
    error: str = ""
    targets: tuple[TargetLine, ...] = ()
    name: str = ""


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
class Answer:
    """What the page says first: one sentence, and under it what limits it or what to look at next."""

    kind: ClassVar[str] = "answer"
    sentence: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Overview:
    """The large numbers with small figures beside them."""

    kind: ClassVar[str] = "overview"
    tiles: Tiles
    plots: tuple[Plot, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """Figures or tables side by side, explained together; a column of tables is at least `least_rem` wide."""

    kind: ClassVar[str] = "side"
    blocks: tuple[Plot | Table, ...]
    explained: str = ""
    least_rem: int = 25


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


Block = (
    Heading | Banner | Answer | Overview | Plot | Table | Tiles | Side | Command | Note | Findings | Folded
)
