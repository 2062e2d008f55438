"""What the wire did for one request: times and bytes, not yet parsed; and captures on disk.

A file has one zstd frame per request, appended as requests end, readable after any crash. Each frame has
zstd's own checksum (XXH64 of its contents), and frames are separated by their block headers: a damaged one is
detected and does not affect the others.

A frame holds, little-endian: its length without this field (u32), the header below, the failure and the
detail (UTF-8), then by column the steps between read stamps (i64), how much earlier the kernel had each read
(i64, -1 where it did not say), by how much its first byte may have come earlier (i64, -1 where unknown) and
the lengths (u32), then the bytes. `zstd -d` reads the file as well.
"""

import mmap
import queue
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, overload

import numpy as np
import zstandard
from numpy.typing import NDArray

from burstline.loadgen.capture.files import PARTIAL
from burstline.loadgen.capture.masking import masked, masked_reply
from burstline.servers.messages import Read
from burstline.workloads.request import WorkloadError

NO_STAMP = -(2**63)
"""In a column of stamps: there is none."""

MAX_REPLY_BYTES = 1 << 28
"""The most bytes of one reply that are ever kept."""


def reply_limit_bytes(n_prompt_tok: int, n_output_tok: int) -> int:
    """The most bytes that a reply to such a request may take before its exchange ends as `too_large`.

    Generous for every dialect: 4 KiB an event, the prompt's ids or text once, the whole text so far in each
    event (SGLang's cumulative streams), and 256 KiB for heads and error pages.
    """
    wanted = (1 << 18) + 64 * n_prompt_tok + 4096 * n_output_tok + 8 * n_output_tok**2
    return min(wanted, MAX_REPLY_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Reads(Sequence[Read]):
    """The reads of one reply, kept by column: a sequence of `Read` that costs a fifth of their memory.

    `at_ns` and `kernel_ns` (NO_STAMP where the kernel gave none) are int64, one per read; `ends[i]` is the
    offset in `data` just past read i. `since_ns[i]` bounds how long before `at_ns[i]` its first byte can have
    arrived; -1 where that was not recorded.
    """

    at_ns: NDArray[np.int64]
    kernel_ns: NDArray[np.int64]
    ends: NDArray[np.int64]
    data: bytes
    since_ns: NDArray[np.int64]

    @classmethod
    def of(cls, reads: Sequence[Read]) -> "Reads":
        if isinstance(reads, Reads):
            return reads
        return cls(
            np.array([read.at_ns for read in reads], dtype=np.int64),
            np.array([NO_STAMP if r.kernel_ns is None else r.kernel_ns for r in reads], dtype=np.int64),
            np.cumsum([len(read.data) for read in reads], dtype=np.int64),
            b"".join(read.data for read in reads),
            np.full(len(reads), -1, dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.at_ns)

    @overload
    def __getitem__(self, index: int) -> Read: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Read, ...]: ...
    def __getitem__(self, index: int | slice) -> Read | tuple[Read, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        kernel_ns = int(self.kernel_ns[index])
        start = int(self.ends[index - 1]) if index else 0
        return Read(
            int(self.at_ns[index]),
            None if kernel_ns == NO_STAMP else kernel_ns,
            self.data[start : int(self.ends[index])],
        )


@dataclass(frozen=True, slots=True)
class Capture:
    """Everything seen on the wire for one planned request; nothing is parsed.

    All times are ns from the run's start on the monotonic clock, None where it never happened:
    `dispatched_ns` a slot was granted, `connected_ns` the connection stood (None where one was used again,
    negative where it was opened ahead of the run), `sent_ns` the request was fully written, `closed_ns` the
    reply ended or failed. `failure` names what broke the exchange: connect, reset, truncated, too_large,
    timeout, cancelled, not_sent, hung_up (the client had all it asked for), abandoned (it
    hung up in the middle, as planned); None where the reply is whole in
    HTTP's own terms. `detail` is the error's own text.
    """

    index: int
    due_ns: int
    dispatched_ns: int | None
    connected_ns: int | None
    sent_ns: int | None
    closed_ns: int | None
    reads: Sequence[Read]
    failure: str | None = None
    detail: str | None = None

    def in_clock(self, shift_ns: float, factor: float) -> "Capture":
        """The same on another clock, on which t ns reads `shift_ns + factor * t`.

        A due time of the plan stays; that of a closed loop is the moment of dispatch and moves with it.
        """

        def moved(at_ns: int | None) -> int | None:
            return None if at_ns is None else round(shift_ns + factor * at_ns)

        reads = Reads.of(self.reads)
        # A float64 counts nanoseconds exactly for 104 days.
        at_ns = np.rint(shift_ns + factor * reads.at_ns).astype(np.int64)
        lag_ns = reads.at_ns - reads.kernel_ns
        kernel_ns = np.where(reads.kernel_ns == NO_STAMP, NO_STAMP, at_ns - lag_ns)
        is_dispatch = self.due_ns == self.dispatched_ns
        return replace(
            self,
            due_ns=round(shift_ns + factor * self.due_ns) if is_dispatch else self.due_ns,
            dispatched_ns=moved(self.dispatched_ns),
            connected_ns=moved(self.connected_ns),
            sent_ns=moved(self.sent_ns),
            closed_ns=moved(self.closed_ns),
            reads=replace(reads, at_ns=at_ns, kernel_ns=kernel_ns),
        )


_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<4siqqqqqHII")
_MAGIC: Final = b"BLC2"
_MIN_FRAME_HEADER_BYTES = 6
_RLE_BLOCK, _RESERVED_BLOCK, _HAS_CHECKSUM = 1, 3, 4

MAX_CAPTURE_BYTES: Final = 2 * MAX_REPLY_BYTES
"""The largest capture that is read where the plan does not say how large its reply may be."""


_Make = Callable[[], Capture | None]


class CaptureWriter:
    """Appends captures to `captures/driver-<worker>.zst` from its own thread.

    The file is called `*.partial` until `close`. When writing fails (a full disk), `on_error` is called once,
    in the writing thread; what was written before stays readable, and `close` raises the error with the path
    and the space left.
    """

    def __init__(self, directory: Path, worker: int = 0, on_error: Callable[[], None] = lambda: None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"driver-{worker}.zst"
        self._partial = self._path.with_name(self._path.name + PARTIAL)
        # Unbuffered: what has been put is on its way to the disk, even if this process is killed next.
        self._file = self._partial.open("wb", buffering=0)
        self._compress = zstandard.ZstdCompressor(level=1, write_checksum=True).compress
        self._queue: queue.SimpleQueue[_Make | threading.Event | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    def put(self, capture: _Make) -> None:
        """Have a capture made and written, both in the spool's own thread; None is not written."""
        self._queue.put(capture)

    def drain(self) -> None:
        """Wait until all that was put so far is written."""
        written = threading.Event()
        self._queue.put(written)
        written.wait()

    def close(self) -> None:
        """Wait until all is written and give the file its name. Raises OSError where writing failed."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()
        if self._error is not None:
            raise self._told(self._error)
        self._partial.rename(self._path)

    def _run(self) -> None:
        while (make := self._queue.get()) is not None:
            if isinstance(make, threading.Event):
                make.set()
                continue
            if self._error is not None:
                continue
            try:
                capture = make()
                if capture is not None:
                    self._write(self._compress(packed(capture)))
            except Exception as error:  # raised by close(); the run must be stopped now
                self._error = error
                self._on_error()

    def _write(self, frame: bytes) -> None:
        rest = memoryview(frame)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _told(self, error: Exception) -> Exception:
        if not isinstance(error, OSError):
            return error
        free_bytes = shutil.disk_usage(self._path.parent).free
        return OSError(
            error.errno,
            f"cannot write captures to {self._partial}: {error.strerror}; {free_bytes:,} bytes are "
            "free there. What was captured before is kept; make room or choose another folder for runs",
        )


class DamagedCapturesError(WorkloadError):
    """A capture file is not as its driver wrote it: cut, changed, or made to harm its reader."""


OnDamage = Callable[[str], None]
"""Told where a file is damaged and how, and raises or returns; reading goes on behind the damage."""


def refuse(damage: str) -> None:
    raise DamagedCapturesError(f"{damage}; `burstline verify` says what can still be read")


def read_captures(
    directory: Path, *, max_bytes: int = MAX_CAPTURE_BYTES, on_damage: OnDamage = refuse
) -> Iterator[Capture]:
    """Every capture of a run, file by file, in the order in which requests ended.

    Files of a run that was killed (`*.partial`) are read up to their last whole frame. A capture that takes
    more than `max_bytes` unpacked counts as damage.
    """
    for path in sorted([*directory.glob("*.zst"), *directory.glob(f"*.zst{PARTIAL}")]):
        with path.open("rb") as file:
            yield from _read_file(file, path, max_bytes, on_damage)


def _read_file(file: BinaryIO, path: Path, max_bytes: int, on_damage: OnDamage) -> Iterator[Capture]:
    decompressor = zstandard.ZstdDecompressor()
    while True:
        start = file.tell()
        try:
            frame = _next_frame(file)
            if not frame:
                return
            yield unpacked(_contents(frame, decompressor, max_bytes))
            continue
        except EOFError:
            damage = f"{path} ends in the middle of a capture (byte {start:,})"
        except (ValueError, struct.error, zstandard.ZstdError) as error:
            damage = f"{path} is damaged at byte {start:,}: {error}"
        # From the next byte, not from behind the frame: its length may be what is damaged.
        goes_on = _seek_frame(file, start + 1)
        if goes_on or path.suffix != PARTIAL:
            on_damage(damage)
        if not goes_on:
            return  # of a run that was cut off: the frame that was being written


def _next_frame(file: BinaryIO) -> bytes:
    """The bytes of the next frame, b"" at the end of the file; EOFError where it is not whole.

    Walks the block headers (RFC 8878, 3.1.1) instead of unpacking: nothing is believed that a checksum or a
    limit has not covered yet.
    """
    head = file.read(_MIN_FRAME_HEADER_BYTES)
    if not head:
        return b""
    if len(head) < _MIN_FRAME_HEADER_BYTES:
        raise EOFError
    if not head.startswith(zstandard.FRAME_HEADER):
        raise ValueError(f"expected the beginning of a capture, got {head!r}")
    parts = [head, _read_exactly(file, zstandard.frame_header_size(head) - len(head))]
    is_last = False
    while not is_last:
        parts.append(_read_exactly(file, 3))
        block = int.from_bytes(parts[-1], "little")
        is_last, kind, n_bytes = bool(block & 1), block >> 1 & 3, block >> 3
        if kind == _RESERVED_BLOCK:
            raise ValueError("a block of no known kind")
        parts.append(_read_exactly(file, 1 if kind == _RLE_BLOCK else n_bytes))
    if head[4] & _HAS_CHECKSUM:
        parts.append(_read_exactly(file, 4))
    return b"".join(parts)


def _read_exactly(file: BinaryIO, n_bytes: int) -> bytes:
    data = file.read(n_bytes) if n_bytes > 0 else b""
    if len(data) < n_bytes:
        raise EOFError
    return data


def _contents(frame: bytes, decompressor: zstandard.ZstdDecompressor, max_bytes: int) -> bytes:
    """What a frame holds, without the length before it; its checksum is verified on the way."""
    n_bytes = zstandard.get_frame_parameters(frame).content_size
    if n_bytes > max_bytes:  # "unknown" is 2**64 - 1
        raise ValueError(f"a capture of {n_bytes:,} bytes, where at most {max_bytes:,} can be")
    contents = decompressor.decompress(frame)
    if len(contents) < _LENGTH.size or _LENGTH.unpack_from(contents)[0] != len(contents) - _LENGTH.size:
        raise ValueError(f"{len(contents):,} bytes, which is not the length that they begin with")
    return contents[_LENGTH.size :]


def _seek_frame(file: BinaryIO, start: int) -> bool:
    """Go to the next place at or behind `start` where a frame seems to begin; False where none does."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
        found = contents.find(zstandard.FRAME_HEADER, start)
    file.seek(max(found, 0))
    return found >= 0


def packed(capture: Capture) -> bytes:
    reads = Reads.of(capture.reads)
    moments = (capture.dispatched_ns, capture.connected_ns, capture.sent_ns, capture.closed_ns)
    failure = (capture.failure or "").encode()
    detail = masked((capture.detail or "").encode())
    header = _HEADER.pack(
        _MAGIC,
        capture.index,
        capture.due_ns,
        *(NO_STAMP if at_ns is None else at_ns for at_ns in moments),
        len(failure),
        len(detail),
        len(reads),
    )
    columns = (
        _steps(reads.at_ns),
        np.where(reads.kernel_ns == NO_STAMP, -1, reads.at_ns - reads.kernel_ns).astype("<i8", copy=False),
        reads.since_ns.astype("<i8", copy=False),
        _steps(reads.ends).astype("<u4"),
    )
    data = masked_reply(reads.data)
    contents = b"".join((header, failure, detail, *(column.tobytes() for column in columns), data))
    return _LENGTH.pack(len(contents)) + contents


def _steps(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """What `cumsum` adds up; `np.diff` takes ten times as long for the few reads of a short reply."""
    steps = ends.astype("<i8")
    steps[1:] -= ends[:-1]
    return steps


def unpacked(contents: bytes) -> Capture:
    """The capture back from a frame's contents, without the length before them. Raises ValueError."""
    magic, index, due_ns, *moments, n_failure, n_detail, n_reads = _HEADER.unpack_from(contents)
    if magic != _MAGIC:
        raise ValueError(
            f"expected a capture of schema {_MAGIC!r}, got {magic!r}; was it written by a newer version?"
        )
    details = _HEADER.size + n_failure
    columns = details + n_detail
    steps, lags, since = np.frombuffer(contents, "<i8", 3 * n_reads, columns).reshape(3, n_reads)
    ends = np.frombuffer(contents, "<u4", n_reads, columns + 24 * n_reads).cumsum(dtype=np.int64)
    data, at_ns = contents[columns + 28 * n_reads :], steps.cumsum(dtype=np.int64)
    if (ends[-1] if n_reads else 0) != len(data):
        raise ValueError("its reads do not add up to its bytes")
    failure, detail = contents[_HEADER.size : details].decode(), contents[details:columns].decode()
    reads = Reads(at_ns, np.where(lags < 0, NO_STAMP, at_ns - lags), ends, data, since)
    dispatched, connected, sent, closed = (None if m == NO_STAMP else m for m in moments)
    return Capture(index, due_ns, dispatched, connected, sent, closed, reads, failure or None, detail or None)
