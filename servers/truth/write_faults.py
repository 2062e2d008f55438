"""The same events otherwise written: with comments between, several at once, or cut into parts."""

from itertools import accumulate

from servers.truth.script import Script
from servers.truth.writes import HOLE, Write, comment, joined, to_ns


def arranged(script: Script, writes: list[Write], offsets_ns: list[int]) -> tuple[list[Write], list[int]]:
    """The writes and offsets of a streamed reply, rearranged as the script says; the headers stay first."""
    timed = list(zip(offsets_ns, writes, strict=True))
    timed = _held_back(script, timed)
    comments_ns = [to_ns(at_s) for at_s in script.comments_s]
    comments = [(at_ns, comment(script)) for at_ns in comments_ns if offsets_ns[0] <= at_ns <= offsets_ns[-1]]
    # Sorted by time alone: of equal times the headers stay first and the end of the reply last.
    timed = sorted([*timed[:1], *comments, *timed[1:]], key=lambda row: row[0])
    parts = [part for row in timed for part in _cut(script, *row)]
    return [write for _, write in parts], list(accumulate((at_ns for at_ns, _ in parts), max))


def _held_back(script: Script, timed: list[tuple[int, Write]]) -> list[tuple[int, Write]]:
    out: list[tuple[int, Write]] = []
    held: list[tuple[int, Write]] = []
    for row in timed:
        is_token = any(mark.kind == "token" for mark in row[1].marks)
        if is_token:
            held.append(row)
        if held and (not is_token or len(held) == script.events_per_write):
            out.append((held[-1][0], joined([write for _, write in held])))
            held = []
        if not is_token:
            out.append(row)
    return out


def _cut(script: Script, at_ns: int, write: Write) -> list[tuple[int, Write]]:
    n_bytes = sum(map(len, write.pieces)) + len(HOLE) * (len(write.pieces) - 1)
    is_head = any(mark.kind == "headers" for mark in write.marks)
    at = {offset % n_bytes for offset in script.split_at if abs(offset) < n_bytes and not is_head}
    if script.drip_bytes:
        at |= set(range(0, n_bytes, script.drip_bytes))
    borders = sorted({0, *at})
    if len(borders) == 1:
        return [(at_ns, write)]
    gap_ns = to_ns(script.split_gap_s)
    ends: list[int | None] = [*borders[1:], None]
    return [
        (
            at_ns + i * gap_ns,
            Write(write.pieces, write.marks if end is None else (), (begin, end), fresh=i == 0),
        )
        for i, (begin, end) in enumerate(zip(borders, ends, strict=True))
    ]
