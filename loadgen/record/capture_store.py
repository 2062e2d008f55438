"""Captures on disk: one zstd frame per request, appended as requests end, readable after any crash.

A frame holds, little-endian: its length without this field (u32), the header below, the failure and the
detail (UTF-8), then by column the steps between read stamps (i64), how much earlier the kernel had each read
(i64, -1 where it did not say) and the lengths (u32), then the bytes. `zstd -d` reads the file as well.
"""

from __future__ import annotations

import queue
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import zstandard

from loadgen.record.capture import NO_STAMP, Capture, Reads

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<4siqqqqqHII")
_MAGIC: Final = b"BLC1"
_PARTIAL = ".partial"


class Spool:
    """Appends captures to `captures/driver-<worker>.zst` from a thread of its own.

    The file is called `*.partial` until `close`. When writing fails (a full disk), `on_error` is called once,
    in the writing thread; what was written before stays readable, and `close` raises the error with the path
    and the space left.
    """

    def __init__(self, directory: Path, worker: int = 0, on_error: Callable[[], None] = lambda: None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"driver-{worker}.zst"
        self._partial = self._path.with_name(self._path.name + _PARTIAL)
        # Unbuffered: what has been put is on its way to the disk, whoever kills us next.
        self._file = self._partial.open("wb", buffering=0)
        self._compress = zstandard.ZstdCompressor(level=1).compress
        self._queue: queue.SimpleQueue[Callable[[], Capture] | threading.Event | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="spool", daemon=True)
        self._thread.start()

    def put(self, capture: Callable[[], Capture]) -> None:
        """Have a capture made and written, both in the spool's own thread."""
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
                self._write(self._compress(packed(make())))
            except Exception as error:  # told by close(); the run must be stopped now
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


def read_captures(directory: Path) -> Iterator[Capture]:
    """Every capture of a run, file by file, in the order in which requests ended.

    Files of a run that was killed (`*.partial`) are read up to their last whole frame.
    """
    for path in sorted([*directory.glob("*.zst"), *directory.glob(f"*.zst{_PARTIAL}")]):
        with path.open("rb") as file:
            yield from _read_file(file)


def packed(capture: Capture) -> bytes:
    """The capture as the contents of one frame."""
    reads = Reads.of(capture.reads)
    failure = (capture.failure or "").encode()
    detail = (capture.detail or "").encode()
    header = _HEADER.pack(
        _MAGIC,
        capture.index,
        capture.due_ns,
        *map(_or_no_stamp, (capture.dispatched_ns, capture.connected_ns, capture.sent_ns, capture.closed_ns)),
        len(failure),
        len(detail),
        len(reads),
    )
    columns = (
        np.diff(reads.at_ns, prepend=0).astype("<i8", copy=False),
        np.where(reads.kernel_ns == NO_STAMP, -1, reads.at_ns - reads.kernel_ns).astype("<i8", copy=False),
        np.diff(reads.ends, prepend=0).astype("<u4"),
    )
    contents = b"".join((header, failure, detail, *(column.tobytes() for column in columns), reads.data))
    return _LENGTH.pack(len(contents)) + contents


def unpacked(contents: bytes) -> Capture:
    """The capture back from a frame's contents, without the length before them."""
    magic, index, due_ns, *moments, n_failure, n_detail, n_reads = _HEADER.unpack_from(contents)
    if magic != _MAGIC:
        raise ValueError(
            f"expected a capture of schema {_MAGIC!r}, got {magic!r}; was it written by a newer version?"
        )
    at = _HEADER.size
    failure = contents[at : at + n_failure].decode()
    at += n_failure
    detail = contents[at : at + n_detail].decode()
    at += n_detail
    steps = np.frombuffer(contents, "<i8", n_reads, at)
    lags = np.frombuffer(contents, "<i8", n_reads, at + 8 * n_reads)
    lengths = np.frombuffer(contents, "<u4", n_reads, at + 16 * n_reads)
    at_ns = steps.cumsum(dtype=np.int64)
    reads = Reads(
        at_ns,
        np.where(lags < 0, NO_STAMP, at_ns - lags),
        lengths.cumsum(dtype=np.int64),
        contents[at + 20 * n_reads :],
    )
    dispatched, connected, sent, closed = (None if m == NO_STAMP else m for m in moments)
    return Capture(index, due_ns, dispatched, connected, sent, closed, reads, failure or None, detail or None)


def _read_file(file: BinaryIO) -> Iterator[Capture]:
    with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as stream:
        while True:
            try:
                (n_bytes,) = _LENGTH.unpack(stream.read(_LENGTH.size))
                contents = stream.read(n_bytes)
            except (struct.error, zstandard.ZstdError):
                return  # the end, or a frame that a crash tore
            if len(contents) < n_bytes:
                return
            yield unpacked(contents)


def _or_no_stamp(moment_ns: int | None) -> int:
    return NO_STAMP if moment_ns is None else moment_ns
