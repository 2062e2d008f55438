"""Blocks as plain text that aligns, for a terminal, a log or a mail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from burstline.reports.blocks import (
    Answer,
    Banner,
    Block,
    Cell,
    Command,
    Findings,
    Folded,
    Heading,
    Note,
    Overview,
    Plot,
    Side,
    Table,
    Tiles,
)

RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def text(blocks: Iterable[Block]) -> str:
    """The blocks, an empty line between them; no line break at the end."""
    return "\n\n".join(filter(None, map(_block, blocks)))


def _block(block: Block) -> str:
    match block:
        case Heading():
            return block.text
        case Banner():
            return "\n".join(_banner(block))
        case Table():
            return _table(block)
        case Note():
            return block.text
        case Findings():
            return "\n".join(block.sentences)
        case Command():
            return f"{block.caption}:\n{block.text}"
        case Answer():
            return "\n".join((block.sentence, *block.details))
        case Overview():
            return _block(block.tiles)
        case Tiles():
            return "\n".join(f"{t.label}: {t.value} {t.unit} {t.detail}".rstrip() for t in block.tiles)
        case Side():
            return text(block.blocks)
        case Folded():
            return text((Heading(block.summary), *block.blocks))
        case Plot():
            return f"{block.title}: {block.finding}"


def _banner(banner: Banner) -> Iterator[str]:
    yield f"{banner.name}{banner.state}: {banner.sentence}"
    for target in banner.targets:
        why = f" ({target.reason})" if target.reason else ""
        yield f"  {target.mark} {target.result}: {target.text}, {target.measured}{why}"
    yield from (f"  - {reason.text} {reason.advice}".rstrip() for reason in banner.reasons)


def _table(table: Table) -> str:
    """Aligned columns; a numeric one whose cells have details takes two, the details on the right."""
    cells = [row.cells for row in table.rows]
    grid: list[list[str]] = [[] for _ in range(len(cells) + 1)]
    words: list[int] = []
    for k, column in enumerate(table.columns):
        if not column.numeric:
            words.append(len(grid[0]))
        split = column.numeric and any(row[k].detail for row in cells)
        grid[0] += [column.title, ""] if split else [column.title]
        for line, row in zip(grid[1:], cells, strict=True):
            shown = [_text(row[k]), row[k].detail]
            line += shown if split else [" ".join(filter(None, shown))]
    notes = [f"  {str(k).translate(RAISED)} {note}" for k, note in enumerate(table.notes, 1)]
    if not table.rows and table.remark:
        return f"{table.caption}: {table.remark}"
    return "\n".join(filter(None, [table.caption, columns(grid, words), *notes, table.remark]))


def _text(cell: Cell) -> str:
    return cell.text if cell.note is None else f"{cell.text}{str(cell.note).translate(RAISED)}"


def columns(rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Rows of cells as aligned text: the columns in `words` to the left, the others to the right."""
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            c.ljust(w) if k in words else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))
