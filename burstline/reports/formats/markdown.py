"""Blocks as Markdown, for a pull request or a wiki."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from burstline.reports.blocks import (
    MARKS,
    Answer,
    Banner,
    Block,
    Cell,
    Command,
    Findings,
    Folded,
    Heading,
    Note,
    Plot,
    Side,
    Table,
)
from burstline.servers.redact import printable


def markdown(blocks: Iterable[Block]) -> str:
    """The blocks; ends with a line break."""
    return "\n\n".join(part for block in blocks for part in _parts(block) if part) + "\n"


def _parts(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield f"{'#' * block.level} {_plain(block.text)}"
        case Banner():
            yield from _banner(block)
        case Table():
            if block.rows or not block.remark:
                yield _table(block)
            yield _plain(block.remark)
            yield "\n".join(f"{k}. {_plain(note)}" for k, note in enumerate(block.notes, 1))
        case Note():
            yield _plain(block.text)
        case Findings():
            yield "\n".join(f"- {_plain(sentence)}" for sentence in block.sentences)
        case Command():
            ticks = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
            fence = f"{ticks}sh\n{block.text}\n{ticks}"
            yield f"<details><summary>{_plain(block.caption)}</summary>\n\n{fence}\n\n</details>"
        case Answer():
            yield f"**{_plain(block.sentence)}**"
            yield from map(_plain, block.details)
        case Side():
            yield from (part for inner in block.blocks for part in _parts(inner))
        case Folded():
            inner = "\n\n".join(part for each in block.blocks for part in _parts(each) if part)
            yield f"<details><summary>{_plain(block.summary)}</summary>\n\n{inner}\n\n</details>"
        case Plot():
            yield f"**{_plain(block.title)}**: {_plain(block.finding)}"


def _banner(banner: Banner) -> Iterator[str]:
    yield f"**{_plain(banner.name)}{banner.mark} {banner.state}** – {_plain(banner.sentence)}"
    yield "\n".join(f"- {_plain(reason.text)} {_plain(reason.advice)}".rstrip() for reason in banner.reasons)
    judged = [t for t in banner.targets if t.result in MARKS]
    if judged:
        rows = [[f"{t.mark} {t.result}", f"`{t.text}`", t.measured, t.reason] for t in judged]
        yield _grid([["SLO", "Asked", "Measured", "Why"], *rows], ())
    yield from (
        f"Goodput: {_plain(t.text)} {_plain(t.measured)}." for t in banner.targets if t.result not in MARKS
    )


def _table(table: Table) -> str:
    rows = [[_cell(cell) for cell in row.cells] for row in table.rows]
    numeric = [k for k, column in enumerate(table.columns) if column.numeric]
    return _grid([[column.title for column in table.columns], *rows], numeric)


def _cell(cell: Cell) -> str:
    note = "" if cell.note is None else f" ({cell.note})"
    return " ".join(filter(None, (f"{cell.text}{note}", cell.detail)))


def _grid(rows: Sequence[Sequence[str]], numeric: Sequence[int]) -> str:
    head, *body = rows
    rule = ["--:" if k in numeric else ":--" for k in range(len(head))]
    return "\n".join(f"| {' | '.join(map(_plain, row))} |" for row in (head, rule, *body))


def _plain(text: object) -> str:
    """Text that cannot end a table's cell or a line, nor bring markup: a server wrote some of it."""
    words = " ".join(printable(str(text)).split())
    return re.sub("<(?=[A-Za-z/!?])", "&lt;", words).replace("|", "\\|").replace("](", "]\\(")
