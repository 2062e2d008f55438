"""The state of one request in flight."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import zstandard

from burstline.loadgen.capture.capture import MAX_REPLY_BYTES, Capture, Reads
from burstline.loadgen.capture.http1 import Head, read_head, skip_chunks
from burstline.loadgen.wire.clock import Offsets

READ = struct.Struct("q16sqq")
"""One read: our stamp, the kernel's (`struct timespec`, zeros where there is none), the number of bytes, and
the latest moment before which they had not come."""
MID_STREAM = b"\n\n\r\n"
"""Where an event stream stands after nearly every read: an event's blank line, the chunk's line end."""
_BLANK_LINES = (b"\n\n", b"\r\n\r\n")
"""What ends an event. An LF stream has the second only behind its last chunk, a CR LF one never the first."""
_LAST_CHUNK = b"\n\n\r\n0\r\n\r\n"
NEVER: Final = 2**63 - 1
"""More than any count of bytes or ns."""


@dataclass(slots=True, eq=False, repr=False)
class Exchange:
    """One request and what came back: a row for each read (see `READ`) and the bytes themselves.

    Once `data` is larger than `cut_at`, `cut` moves all but the reply's head to `parts`, compressed, or hands
    it to `on_part`. `n_cut` counts those bytes.

    `due_ns` counts from the run's start; every other time is absolute monotonic ns, None where it has not
    happened. Until it has ended, only the wire's thread may touch it; after that, only who gets it back.
    `left` is the kernel's: when the last byte of a request to a remote server left this host, on the wall
    clock, and when we read that stamp.
    `walked` is how far the framing has been read: the open head, later the first chunk that is incomplete.
    With `hang_up_at` the client ends the exchange after that many events, or tokens if `n_tokens` counts
    those that it has brought, and `failure` says why by `hang_up_as`. `counted` are the events and tokens of
    the latest look, `look_at` the events of the next, `n_tok_cut` the tokens that were handed to `on_part`.
    """

    index: int = 0
    due_ns: int = 0
    max_bytes: int = MAX_REPLY_BYTES
    cut_at: int = NEVER
    may_cut: bool = True
    n_cut: int = 0
    parts: list[tuple[int, bytes]] = field(default_factory=list)
    on_part: "Callable[[Exchange], None] | None" = None
    payload: bytes = b""
    dispatched_ns: int | None = None
    connected_ns: int | None = None
    writing_ns: int = 0
    sent_ns: int | None = None
    left: tuple[int, int] | None = None
    closed_ns: int | None = None
    failure: str | None = None
    detail: str | None = None
    resent: bool = False
    hang_up_at: int | None = None
    hang_up_as: str = "hung_up"
    n_tokens: "Callable[[Exchange], int] | None" = None
    n_tok_cut: int = 0
    counted: tuple[int, int] = (0, 0)
    look_at: int = 1
    n_blocks: int = 0
    walked_blocks: int = 0
    blank_line: bytes | None = None
    reads: bytearray = field(default_factory=bytearray)
    data: bytearray = field(default_factory=bytearray)
    head: Head | None = None
    begun: bool = False
    walked: int = 0
    mid_stream: bytes | tuple[()] = ()  # no bytes end with an empty tuple

    @property
    def n_bytes(self) -> int:
        return self.n_cut + len(self.data)

    @property
    def last_read_ns(self) -> int:
        """When the latest bytes came."""
        return int(READ.unpack_from(self.reads, len(self.reads) - READ.size)[0])

    def has_said_enough(self) -> bool:
        """Whether as many events, or tokens, have come as the client waits for.

        Tokens are counted when they may be enough, should the next events bring as many as the latest did.
        """
        if self.hang_up_at is None or self.head is None:
            return False
        self._count_events()
        if self.n_tokens is None:
            return self.n_blocks >= self.hang_up_at
        if self.n_blocks < self.look_at:
            return False
        n_tok = self.n_tok_cut + self.n_tokens(self)
        events, tokens = self.n_blocks - self.counted[0], n_tok - self.counted[1]
        ahead = (self.hang_up_at - n_tok) / max(1.0, tokens / max(1, events)) if n_tok else 1
        self.counted, self.look_at = (self.n_blocks, n_tok), self.n_blocks + max(1, int(ahead))
        return n_tok >= self.hang_up_at

    def _count_events(self) -> None:
        """Count the events that have ended, but for comments; bytes behind the last are looked at again."""
        assert self.head is not None
        begin = max(self.walked_blocks, self.head.body_start)
        if self.blank_line is None:
            self.blank_line = next((line for line in _BLANK_LINES if line in self.data[begin:]), None)
        if (line := self.blank_line) is None:
            return
        last = self.data.rfind(line, begin)
        if last >= 0:
            end = last + len(line)
            self.n_blocks += self.data.count(line, begin) - self.data.count(b"\n:", begin - 1, end)
            self.walked_blocks = end

    def is_whole(self) -> bool:
        """Whether the end of the message has come, by Content-Length or by the last chunk.

        Looks at the last bytes where that decides, and walks each chunk once where it does not. Raises
        EngineError where the bytes are no HTTP.
        """
        head = self.head
        if head is None:
            found = read_head(self.data, self.walked)
            if isinstance(found, int):
                self.walked = found
                return False
            head = self.head = found
            self.walked = head.body_start
        if not self.begun and len(self.data) > head.body_start:
            self.begun = True
            if head.chunked:
                self.mid_stream = MID_STREAM
        if head.length is not None:
            return len(self.data) - head.body_start >= head.length
        if not head.chunked:
            return False
        if self.data.endswith(_LAST_CHUNK):
            self.walked = len(self.data)
            return True
        self._put_together()
        self.walked, whole = skip_chunks(self.data, self.walked)
        return whole

    def is_whole_at_eof(self) -> bool:
        """The same, once the connection has ended."""
        if not self.data or (not self.is_whole() and self.head is None):
            return False
        head = self.head
        return self.is_whole() or (head is not None and head.length is None and not head.chunked)

    def is_exact(self) -> bool:
        """Whether no byte follows the end of the message: else the connection cannot be used again."""
        head = self.head
        if head is None or not head.keep_alive:
            return False
        end = self.walked if head.length is None else head.body_start + head.length
        return end == len(self.data)

    def cut(self, compress: Callable[[bytearray], bytes]) -> None:
        """Put away what has come so far and go on behind the same head.

        A chunk has ended here, to all appearances. Should that ever matter, all is put together again.
        """
        assert self.head is not None
        if self.hang_up_at is not None:
            self._count_events()  # they are put away
        reads, data, start = self.reads, self.data, self.head.body_start
        if self.on_part is not None:
            self.n_tok_cut += self.n_tokens(self) if self.n_tokens else 0
            part = Exchange(self.index, self.due_ns)
            part.reads, part.data, part.sent_ns = reads, data, self.sent_ns
            self.on_part(part)
        else:
            rows, body = (reads[READ.size :], data[start:]) if self.parts else (reads, data)
            # A copy: zstandard cuts its result short in place, and memory behind it would stay unused.
            packed = bytes(memoryview(compress(rows + body)))
            self.parts.append((len(rows), packed))
        at_ns, stamp, _, since_ns = READ.unpack_from(reads)
        self.reads = bytearray(READ.pack(at_ns, stamp, start, since_ns))
        self.data = data[:start]
        self.n_cut += len(data) - start
        self.walked = self.walked_blocks = start

    def _put_together(self) -> None:
        """Take back what was put away, for good: who walks over chunks needs them all."""
        if self.parts:
            reads, data = self.whole()
            self.reads, self.data, self.parts = bytearray(reads), bytearray(data), []
            self.n_cut = self.n_blocks = self.walked_blocks = 0
            self.may_cut = False

    def whole(self) -> tuple[bytes, bytes]:
        """All `reads` and `data`, those of the parts too."""
        if self.head is None or not self.parts:
            return bytes(self.reads), bytes(self.data)
        parts = [(n, zstandard.decompress(packed)) for n, packed in self.parts]
        reads, data = self.reads[READ.size :], self.data[self.head.body_start :]
        return (
            b"".join((*(part[:n] for n, part in parts), reads)),
            b"".join((*(part[n:] for n, part in parts), data)),
        )

    def capture(self, t0_ns: int, offsets: Offsets) -> Capture:
        """What is kept of it, with every time counted from `t0_ns`."""
        stamps, data = self.whole()
        rows = np.frombuffer(stamps, dtype=np.int64).reshape(-1, 5)
        at_ns = rows[:, 0]
        kernel_ns = offsets.monotonic(rows[:, 1:3].tobytes(), at_ns)
        # What a read brought came after what the read before it brought, and after the moment that the reader
        # knows for its pass. Not after that read: we may have been stopped between it and our stamp.
        came_ns = np.where(kernel_ns > 0, kernel_ns, at_ns)
        before_ns = np.empty_like(came_ns)
        before_ns[:1], before_ns[1:] = self.sent_ns or 0, came_ns[:-1]
        since_ns = at_ns - np.maximum(before_ns, rows[:, 4])
        reads = Reads(
            at_ns - t0_ns,
            np.where(kernel_ns > 0, kernel_ns - t0_ns, kernel_ns),
            rows[:, 3].cumsum(),
            data,
            np.maximum(since_ns, 0),
        )

        # A long request is in our send buffer at once, but leaves as fast as the network takes it.
        written_ns, left_ns = self.sent_ns, offsets.moment(self.left)
        if written_ns is not None and left_ns is not None:
            written_ns = max(written_ns, left_ns)
        # Where we lost the CPU between send and stamp, the reply may be older: count from the write's start.
        if written_ns is not None and len(came_ns) and came_ns[0] <= written_ns:
            written_ns = min(self.writing_ns or written_ns, int(came_ns[0]))
        closed_ns = self.closed_ns
        if len(came_ns) and closed_ns == at_ns[-1]:  # a whole reply was over when its last bytes had come
            closed_ns = int(came_ns[-1])

        def since(moment_ns: int | None) -> int | None:
            return None if moment_ns is None else moment_ns - t0_ns

        return Capture(
            self.index,
            self.due_ns,
            since(self.dispatched_ns),
            since(self.connected_ns),
            since(written_ns),
            since(closed_ns),
            reads,
            self.failure,
            self.detail,
        )
