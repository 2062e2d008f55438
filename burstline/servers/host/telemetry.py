"""Telemetry: values sampled during a run, as rows in a file that remains readable after a crash."""

import errno
import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One sampled value. `at_ns` is on the monotonic clock, absolute until it is rebased to a run's start.

    Names carry their unit; those in `_s` are counters of seconds since the watcher began (CPU time, stolen
    time, waiting), unless they say otherwise. `value` is None where the source gave none, and
    `note` says why.
    """

    at_ns: int
    source: str
    name: str
    value: float | None
    note: str | None = None


def rows_of(source: str, values: Mapping[str, float], at_ns: int | None = None) -> list[Row]:
    """The values of one source at one moment, now unless `at_ns` is given."""
    at_ns = time.monotonic_ns() if at_ns is None else at_ns
    return [Row(at_ns, source, name, value) for name, value in values.items()]


def missing(source: str, why: str) -> Row:
    """The row that says a source is missing."""
    return Row(time.monotonic_ns(), source, "*", None, why)


def as_lines(rows: Iterable[Row]) -> bytes:
    """The rows as JSON lists, one a line: to be appended in one write."""
    return "".join(json.dumps(astuple(row)) + "\n" for row in rows).encode()


class LineFile:
    """A file of lines that grows, from any thread. Each call is one write: a kill loses no whole line.

    A disk that is full costs the lines of that moment and no other; `failure` is the first error.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._lock = threading.Lock()
        self.failure: str | None = None

    def write(self, lines: bytes) -> None:
        with self._lock:
            try:
                n_written = os.write(self._file, lines)
                if n_written < len(lines):  # the rest found no room: a line that is cut would spoil the next
                    os.ftruncate(self._file, os.fstat(self._file).st_size - n_written)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self.failure = self.failure or error.strerror

    def close(self) -> None:
        os.close(self._file)


def load_telemetry(path: Path) -> list[Row]:
    """All rows that were written, in the order of writing; a last line that a kill cut off is left out.

    So are the readings of a server that turned out to be none.
    """
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    rows = [Row(*json.loads(line)) for line in whole.splitlines()]
    is_none = any((row.source, row.name) == ("server", "*") for row in rows)
    return [row for row in rows if not is_none or row.source != "server" or row.value is None]
