"""HTTP/1.1 replies: bytes in, reply and arrival times out. No sockets here (RFC 9112)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from burstline.loadgen.capture.capture import NO_STAMP, Reads
from burstline.servers.messages import EngineError, HttpReply, Read

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9][0-9][0-9])(?: |$)")
# Fifteen hex and eighteen decimal digits fit into 63 bits: no server can make us build a larger number.
_CHUNK_SIZE = re.compile(rb"0{0,64}([0-9a-fA-F]{1,15})[ \t]*(?:;|\Z)")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)
_MAX_HEAD_BYTES = 1 << 17
_MAX_INTERIM_HEADS = 64
_MAX_CHUNK_LINE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a final reply and how its body is framed.

    `body_start` is the body's first offset. `length` is its Content-Length; where that is None and the body
    is not `chunked`, the end of the connection ends it. `keep_alive`: the connection may be used again.
    """

    status: int
    headers: Mapping[str, str]
    body_start: int
    length: int | None
    chunked: bool
    keep_alive: bool


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """When each byte of a body arrived: `body_ends[i]` is how many body bytes were there after read i."""

    headers_ns: int
    reads: Reads
    body_ends: NDArray[np.int64]


def parse(reads: Sequence[Read]) -> tuple[HttpReply, Arrivals] | None:
    """The reply that `reads` carry and when its bytes arrived; None where its head never came whole.

    `complete` is False where the body is shorter than its framing says. A body that only the end of the
    connection ends counts as complete: whether that end was in order, `Capture.failure` says. Raises
    EngineError where the bytes are no HTTP/1.1, or a body is compressed though we asked for none.
    """
    columns = Reads.of(reads)
    data = columns.data
    head = read_head(data)
    if isinstance(head, int):
        return None
    _refuse_compression(head)
    if head.chunked:
        body, starts, filled, complete = _dechunk(data, head.body_start)
    else:
        body = body_of(head, data)
        starts, filled = [0, head.body_start], [0, 0, len(body)]
        complete = head.length is None or len(body) == head.length
    arrivals = Arrivals(
        int(columns.at_ns[columns.ends.searchsorted(head.body_start)]),
        columns,
        _body_ends(columns.ends, starts, filled),
    )
    return HttpReply(head.status, head.headers, body, complete), arrivals


def read_head(data: bytes | bytearray, start: int = 0) -> Head | int:
    """The first final head (not 1xx) at or behind `start`, or, while it is incomplete, where it begins.

    Pass that offset as `start` when more bytes have come: complete interim heads are then not read again.
    """
    for _ in range(_MAX_INTERIM_HEADS):
        end = data.find(b"\r\n\r\n", start)
        if end < 0:
            if not b"HTTP/".startswith(bytes(data[start : start + 5])):
                raise EngineError(f"expected an HTTP/1.1 reply, got {bytes(data[start : start + 80])!r}")
            if len(data) > _MAX_HEAD_BYTES:
                raise EngineError(
                    f"the head of the reply is longer than {_MAX_HEAD_BYTES} bytes and still open"
                )
            return start
        if end > _MAX_HEAD_BYTES:
            break
        head = _final_head(bytes(data[start:end]), start)
        if head is not None:
            return head
        start = end + 4
    raise EngineError(
        f"expected a head of at most {_MAX_HEAD_BYTES} bytes and {_MAX_INTERIM_HEADS} interim (1xx) replies"
    )


@lru_cache(maxsize=256)
def _final_head(block: bytes, start: int) -> Head | None:
    """The head that stands in `block`, which begins at `start`; None where it is interim.

    Remembered, because the replies to one load hardly differ in theirs.
    """
    status_line, *fields = block.split(b"\r\n")
    match = _STATUS_LINE.match(status_line)
    if match is None:
        raise EngineError(f"expected an HTTP/1.1 reply, got {status_line[:80]!r}; is this an HTTP port?")
    status = int(match[1])
    if status == 101:
        raise EngineError("the server switched protocols (101); expected a plain HTTP/1.1 reply")
    body_start = start + len(block) + 4
    return _head(status, fields, body_start, status_line.startswith(b"HTTP/1.0")) if status >= 200 else None


def body_of(head: Head, data: bytes) -> bytes:
    """The received part of the body after `head`, without its transfer coding."""
    if head.chunked:
        return _dechunk(data, head.body_start)[0]
    return data[head.body_start : None if head.length is None else head.body_start + head.length]


def skip_chunks(data: bytes | bytearray, at: int) -> tuple[int, bool]:
    """Walk over whole chunks from the chunk that begins at `at`.

    Returns where the first chunk that is not whole begins and False, or, when the last chunk and its trailers
    are there, the offset just past them and True.
    """
    n_bytes = len(data)
    while True:
        eol = data.find(b"\r\n", at)
        if (eol if eol >= 0 else n_bytes) - at > _MAX_CHUNK_LINE_BYTES:
            raise EngineError(f"expected the size of a chunk in hex, got {bytes(data[at : at + 40])!r}")
        if eol < 0:
            return at, False
        size = _chunk_size(bytes(data[at:eol]))
        if size == 0:
            end = data.find(b"\r\n\r\n", eol)
            return (at, False) if end < 0 else (end + 4, True)
        after = eol + 4 + size
        if after > n_bytes:
            return at, False
        at = after


def _head(status: int, fields: list[bytes], body_start: int, is_http10: bool) -> Head:
    headers: dict[str, str] = {}
    for line in fields:
        raw_name, _, raw_value = line.partition(b":")
        name, value = raw_name.decode("latin-1").lower(), raw_value.strip().decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    has_body = status not in (204, 304)  # RFC 9112, 6.3: whatever their heads say
    chunked = has_body and headers.get("transfer-encoding", "").lower().endswith("chunked")
    length = (None if chunked else _content_length(headers)) if has_body else 0
    connection = headers.get("connection", "").lower()
    keep_alive = "keep-alive" in connection if is_http10 else "close" not in connection
    return Head(status, headers, body_start, length, chunked, keep_alive and (chunked or length is not None))


def _content_length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    lengths = {part.strip(" \t") for part in text.split(",")}  # RFC 9112, 6.3: a repeated equal value is one
    if len(lengths) != 1 or not _CONTENT_LENGTH.fullmatch(digits := lengths.pop()):
        raise EngineError(f"the server sent Content-Length {text[:80]!r}; expected one number")
    return int(digits)


def _refuse_compression(head: Head) -> None:
    coding = head.headers.get("content-encoding", "identity")
    if coding.lower() not in ("identity", ""):
        raise EngineError(
            f"the server compressed its reply ({coding}) though we asked for identity; a compressed stream "
            "has no token times: switch compression off in the server or in the proxy before it"
        )


@lru_cache(maxsize=4096)
def _chunk_size(line: bytes) -> int:
    """Remembered: the chunks of one load have few different sizes."""
    match = _CHUNK_SIZE.match(line)
    if match is None:
        raise EngineError(f"expected the size of a chunk in hex, got {line[:40]!r}")
    return int(match[1], 16)


def _dechunk(data: bytes, at: int) -> tuple[bytes, list[int], list[int], bool]:
    """The body, where each piece of it begins in `data`, its length before each piece, and if it ended.

    The first piece is the head, of which nothing belongs to the body.
    """
    pieces: list[bytes] = []
    starts: list[int] = [0]
    find = data.find
    while True:
        eol = find(b"\r\n", at)
        if eol < 0:
            complete = False
            break
        size = _chunk_size(data[at:eol])
        if size == 0:
            complete = find(b"\r\n\r\n", eol) >= 0
            break
        start = eol + 2
        at = start + size
        pieces.append(data[start:at])
        starts.append(start)
        at += 2
    return b"".join(pieces), starts, [0, 0, *accumulate(map(len, pieces))], complete


def _body_ends(read_ends: NDArray[np.int64], starts: list[int], filled: list[int]) -> NDArray[np.int64]:
    """How much of the body is there after each read. `filled[k]` and `filled[k + 1]` bound piece k."""
    start, fill = np.array(starts, np.int64), np.array(filled, np.int64)
    piece = start.searchsorted(read_ends, side="right") - 1
    before = fill[piece]
    there: NDArray[np.int64] = before + np.minimum(read_ends - start[piece], fill[piece + 1] - before)
    return there


def stamps(arrivals: Arrivals, ends: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """When the bytes up to each end arrived, ascending, how much later our code had them, and the error.

    The kernel stamps a read's last segment. An event that is followed by more in its read, be it usage or
    `[DONE]`, may have come in an earlier segment, and without a kernel's stamp any event may have waited.
    """
    if not ends:
        return [], [], []
    reads = arrivals.reads
    read = arrivals.body_ends.searchsorted(ends)
    at_ns, kernel_ns = reads.at_ns[read], reads.kernel_ns[read]
    stamped = kernel_ns != NO_STAMP
    token_ns = np.maximum.accumulate(np.where(stamped, kernel_ns, at_ns))
    lag_ns = np.where(stamped, np.maximum(at_ns - kernel_ns, 0), -1)
    since_ns = reads.since_ns[read]
    error_ns = np.where(since_ns < 0, -1, np.maximum(since_ns - np.maximum(lag_ns, 0), 0))
    error_ns = np.where(stamped & (arrivals.body_ends[read] <= np.asarray(ends)), 0, error_ns)
    return token_ns.tolist(), lag_ns.tolist(), error_ns.tolist()
