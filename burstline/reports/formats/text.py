"""Blocks as plain text that aligns, for a terminal, a log or a mail; and as Markdown, for a pull request."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import wrap

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
from burstline.reports.number_format import RAISED
from burstline.servers.redact import printable


def text(blocks: Iterable[Block], width: int | None = None, signs: Mapping[int, str] | None = None) -> str:
    """The blocks, an empty line between them; no line break at the end.

    Within a `width` sentences break, and a table goes on below with the columns that are left. `signs` are
    those to be replaced, as for `str.translate`.
    """
    shown = ((each, _block(each, width, signs or {}).translate(signs or {})) for each in blocks)
    return "\n\n".join(_wrapped(each, told, width) for each, told in shown if told)


def _wrapped(block: Block, shown: str, width: int | None) -> str:
    """Longer lines broken between words, the rest indented. A command stays whole: broken it is another."""
    if width is None or isinstance(block, Command):
        return shown
    lines = []
    for line in shown.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        own = wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += own if len(line) > width else [line]
    return "\n".join(lines)


def _block(block: Block, width: int | None, signs: Mapping[int, str]) -> str:
    match block:
        case Heading() | Note():
            return block.text
        case Banner():
            return "\n".join(_banner(block))
        case Table():
            return _table(block, width, signs)
        case Findings():
            return "\n".join(block.sentences)
        case Command():
            return f"{block.caption}:\n{block.text}"
        case Answer():
            return "\n".join((block.sentence, *block.details))
        case Side():
            return text(block.blocks, width, signs)
        case Folded():
            return text((Heading(block.summary), *block.blocks), width, signs)
        case Plot():
            return f"{block.title}: {block.finding}"


def _banner(banner: Banner) -> Iterator[str]:
    yield f"{banner.name}{banner.state}: {banner.sentence}"
    for target in banner.targets:
        why = f" ({target.reason})" if target.reason else ""
        measured = f", {target.measured}" if target.measured else ""
        yield f"  {target.mark} {target.result}: {target.text}{measured}{why}"
    yield from (f"  - {reason.text} {reason.advice}".rstrip() for reason in banner.reasons)


def _table(table: Table, width: int | None, signs: Mapping[int, str]) -> str:
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
            note = "" if row[k].note is None else str(row[k].note).translate(RAISED)
            shown = [row[k].text + note, row[k].detail]
            line += shown if split else [" ".join(filter(None, shown))]
    grid = [[cell.translate(signs) for cell in line] for line in grid]  # before they are aligned
    notes = [f"  {str(k).translate(RAISED)} {note}" for k, note in enumerate(table.notes, 1)]
    if not table.rows and table.remark:
        return f"{table.caption}: {table.remark}"
    return "\n".join(filter(None, [table.caption, _fitted(grid, words, width), *notes, table.remark]))


def _fitted(grid: Sequence[Sequence[str]], words: Sequence[int], width: int | None) -> str:
    """The columns side by side as far as they fit, the others below, each part behind the first words.

    A column without a title holds the details of the one before it, and stays with it.
    """
    if width is None:
        return columns(grid, words)
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    heads = [k for k, title in enumerate(grid[0]) if title or not k]
    units = [list(range(k, end)) for k, end in zip(heads, [*heads[1:], len(widths)], strict=True)]
    n_lead = next((n for n, unit in enumerate(units) if unit[0] not in words), 0) or 1
    lead = [k for unit in units[:n_lead] for k in unit]
    parts = [[*lead]]
    for unit in units[n_lead:]:
        if sum(widths[k] + 2 for k in (*parts[-1], *unit)) - 2 > width and len(parts[-1]) > len(lead):
            parts.append([*lead])
        parts[-1] += unit
    return "\n\n".join(
        columns([[row[k] for k in part] for row in grid], [at for at, k in enumerate(part) if k in words])
        for part in parts
    )


def columns(rows: Sequence[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Rows of cells as aligned text: the columns in `words` to the left, the others to the right."""
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        sized = enumerate(zip(row, widths, strict=True))
        return "  ".join(c.ljust(w) if k in words else c.rjust(w) for k, (c, w) in sized).rstrip()

    return "\n".join(map(line, rows))


def markdown(blocks: Iterable[Block]) -> str:
    """The blocks as Markdown; ends with a line break."""
    return "\n\n".join(part for block in blocks for part in _parts(block) if part) + "\n"


def _parts(block: Block) -> Iterator[str]:
    match block:
        case Heading():
            yield f"{'#' * block.level} {_plain(block.text)}"
        case Banner():
            yield from _markdown_banner(block)
        case Table():
            if block.rows or not block.remark:
                rows = [[_cell(cell) for cell in row.cells] for row in block.rows]
                numeric = [k for k, column in enumerate(block.columns) if column.numeric]
                yield _grid([[column.title for column in block.columns], *rows], numeric)
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


def _markdown_banner(banner: Banner) -> Iterator[str]:
    yield f"**{_plain(banner.name)}{banner.mark} {banner.state}** – {_plain(banner.sentence)}"
    yield "\n".join(f"- {_plain(reason.text)} {_plain(reason.advice)}".rstrip() for reason in banner.reasons)
    judged = [t for t in banner.targets if t.result in MARKS]
    if judged:
        rows = [[f"{t.mark} {t.result}", f"`{t.text}`", t.measured, t.reason] for t in judged]
        yield _grid([["SLO", "Asked", "Measured", "Why"], *rows], ())
    goodputs = (t for t in banner.targets if t.result not in MARKS)
    yield from (f"Goodput: {_plain(t.text)} {_plain(t.measured)}." for t in goodputs)


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
