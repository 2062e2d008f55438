"""Known secrets in a reply as it came over the wire: overwritten, so that it decodes as before.

A server may quote the key that it was sent. Text of the same length takes its place in the values of headers,
in the strings that are values of JSON, and in plain text. Names, numbers, framing and times stay.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator

from burstline.servers.redact import known_in

_HEAD_END = b"\r\n\r\n"
_HEADER = re.compile(rb"^[^:\r\n]+:([^\r\n]*)", re.MULTILINE)
_CHUNKED = re.compile(rb"^transfer-encoding:[^\r\n]*\bchunked\b", re.MULTILINE | re.IGNORECASE)
_OF_JSON = re.compile(rb"^content-type:[^\r\n]*(?:json|event-stream)", re.MULTILINE | re.IGNORECASE)
_CHUNK = re.compile(rb"[ \t]*([0-9A-Fa-f]{1,16})[^\r\n]{0,65536}\r?\n")
_STRING = re.compile(rb'"((?:[^"\\\n]|\\.)*+)(?:"(\s*:)?)?')
_BARE = re.compile(rb"[-+.\deE]+|true|false|null")
"""What JSON holds outside its strings, apart from its signs."""
_LINE_OF_JSON = re.compile(
    rb"^(?:data:)?[ \t]*((?:[{}\[\]\",]|(?:[-+.\deE]+|true|false|null)[ \t]*[,\]}]*[ \t]*\r?$)[^\n]*)",
    re.MULTILINE,
)
"""A line of JSON, also one of an event's."""


def masked(data: bytes) -> bytes:
    """Raw bytes with known values overwritten by as many asterisks."""
    out = bytearray(data)
    for first, end in known_in(data):
        out[first:end] = b"*" * (end - first)
    return bytes(out)


def masked_reply(data: bytes) -> bytes:
    """The bytes of one reply, head and body, without the values that were learned."""
    if next(known_in(data), None) is None:
        return data
    out = bytearray(data)
    head_end = data.find(_HEAD_END)
    head = data if head_end < 0 else data[: head_end + 2]
    for header in _HEADER.finditer(head):
        out[header.start(1) : header.end(1)] = masked(header[1])
    if head_end >= 0:
        _mask_body(out, head, head_end + len(_HEAD_END))
    return bytes(out)


def _mask_body(out: bytearray, head: bytes, start: int) -> None:
    parts = list(_chunks(out, start)) if _CHUNKED.search(head) else [(start, len(out))]
    body = b"".join(out[first:end] for first, end in parts)
    kept = list(_kept(body)) if _OF_JSON.search(head) else []
    masked = bytearray(body)
    for first, end in known_in(body):
        before = bisect_left(kept, (end,)) - 1  # the last that begins before the end
        if before < 0 or kept[before][1] <= first:
            masked[first:end] = b"*" * (end - first)
    at = 0
    for first, end in parts:
        out[first:end] = masked[at : at + end - first]
        at += end - first


def _chunks(data: bytearray, start: int) -> Iterator[tuple[int, int]]:
    """Where the contents of each chunk stand; what is no chunk is taken for contents."""
    while start < len(data):
        head = _CHUNK.match(data, start)
        if head is None:
            yield start, len(data)
            return
        end = min(head.end() + int(head[1], 16), len(data))
        yield head.end(), end
        start = end + 2  # the line's end behind it


def _kept(body: bytes) -> Iterator[tuple[int, int]]:
    """Where a known value would be no text: in names and, outside strings, in numbers and literals."""
    for line in _LINE_OF_JSON.finditer(body):
        at = line.start(1)
        for string in _STRING.finditer(body, at, line.end()):
            yield from (bare.span() for bare in _BARE.finditer(body, at, string.start()))
            if string[2]:
                yield string.span(1)
            at = string.end()
        yield from (bare.span() for bare in _BARE.finditer(body, at, line.end()))
