"""Writes as a script of the tests frames them: line ends, comments, cuts, bytes that are held back."""

from dataclasses import dataclass
from itertools import accumulate

import orjson

from burstline.servers.truth.replies import HOLE, HOLE_NUMBER, Json, Mark, Write, head, joined, to_ns
from tests.truth.script import Script


@dataclass(frozen=True, slots=True)
class CutWrite(Write):
    """The part of a write that `cut` names.

    `fresh` is False for a later part: it keeps the stamp that its first part took.
    """

    cut: tuple[int, int | None] = (0, None)
    fresh: bool = True


NOTHING = Write((b"",))
"""Gives the end of a reply a due time of its own."""


def json_event(script: Script, payload: Json, seq: int, mark: Mark, *, space: bool) -> Write:
    """An event with its stamp's hole and its number, unless the script wants the engine's own bytes."""
    if script.stamp:
        payload = payload | {"sent_ns": HOLE_NUMBER, "seq": seq}
    return data_event(script, orjson.dumps(payload), mark, space=space)


def data_event(script: Script, data: bytes, mark: Mark, *, space: bool) -> Write:
    """An event with these bytes as its data; `space` is the dialect's own habit after the colon."""
    field = b"data: " if (space if script.space is None else script.space) else b"data:"
    return Write(tuple(_framed(script, field + data).split(HOLE)), (mark,))


def comment(script: Script) -> Write:
    """A keep-alive, which is no event to who reads the stream."""
    return Write((_framed(script, script.beat.encode()),), (Mark("comment"),))


def end_of_body(script: Script) -> Write:
    """The last chunk; nothing where the connection's end says so."""
    return Write((b"0\r\n\r\n",)) if script.chunked else NOTHING


def stream_head(script: Script) -> Write:
    """The head of a stream, stamped like an event."""
    coding = "transfer-encoding: chunked" if script.chunked else "connection: close"
    lines = ["content-type: text/event-stream; charset=utf-8", coding]
    if script.stamp:
        lines.append(f"x-burstline-sent-ns: {HOLE_NUMBER}")
    return Write(tuple(head(script.opens, *lines).split(HOLE)), (Mark("headers"),))


def _framed(script: Script, line: bytes) -> bytes:
    block = line + (b"\r\n\r\n" if script.crlf else b"\n\n")
    return b"%x\r\n%b\r\n" % (len(block), block) if script.chunked else block


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
            CutWrite(write.pieces, write.marks if end is None else (), (begin, end), fresh=i == 0),
        )
        for i, (begin, end) in enumerate(zip(borders, ends, strict=True))
    ]
