"""Server-sent events: where each event of a body ends and what data it carries. Pure framing.

The grammar is the WHATWG's (https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6),
with one leniency: an event that the end of the body cuts short of its blank line is still handed out,
because servers exist that never send the last one.
"""

import re
from itertools import accumulate

_LINE_END = re.compile(rb"\r\n|\n|\r")


def events(body: bytes) -> tuple[list[bytes], list[int]]:
    """The data of every event in the body, and the offset just past the blank line that ends each.

    Comments, and events without data, are no events. The data of several `data:` lines is joined by newlines.
    """
    return _plain_events(body) or _any_events(body)


def _plain_events(body: bytes) -> tuple[list[bytes], list[int]] | None:
    """The same for what nearly every server sends, at a fraction of the cost; None where it is not that.

    That is: one `data:` line an event, `\\n` for a line's end, a blank line after each event.
    """
    lines = body.split(b"\n")
    if lines.pop() or len(lines) % 2 or any(lines[1::2]) or b"\r" in body:
        return None
    lines = lines[::2]
    payloads = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    if len(payloads) != len(lines):
        return None
    return payloads, list(accumulate(len(line) + 2 for line in lines))


def _any_events(body: bytes) -> tuple[list[bytes], list[int]]:
    payloads: list[bytes] = []
    ends: list[int] = []
    data: list[bytes] = []
    begin = 3 if body.startswith(b"\xef\xbb\xbf") else 0
    while begin < len(body):
        line_end = _LINE_END.search(body, begin)
        line = body[begin : line_end.start()] if line_end else body[begin:]
        begin = line_end.end() if line_end else len(body)
        if line == b"data" or line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        if data and (not line or begin == len(body)):
            payloads.append(b"\n".join(data))
            ends.append(begin)
            data = []
    return payloads, ends
