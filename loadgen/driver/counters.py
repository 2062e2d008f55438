"""Progress counters in a mapped file: written by one driver, read by any process, without a lock."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

NAMES: Final = ("prepared", "connected", "sent", "begun", "done", "failed", "reads", "bytes")
"""Requests built, connections open, requests written, replies whose body has begun, replies whole and
failed, reads, bytes read."""

_ROW_BYTES = 8 * len(NAMES)


class Counters:
    """One row of eight int64 per driver, in the order of NAMES. Close it, or use it in a `with`."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path, n_workers: int) -> Counters:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(_ROW_BYTES * n_workers))
        return cls(path)

    def row(self, worker: int) -> memoryview:
        """The eight cells of one driver, to be written by it alone."""
        return self._cells[worker * len(NAMES) : (worker + 1) * len(NAMES)]

    def totals(self) -> Mapping[str, int]:
        """Every counter by name, summed over all drivers."""
        return {name: sum(self._cells[i :: len(NAMES)]) for i, name in enumerate(NAMES)}

    def close(self) -> None:
        self._cells.release()
        with suppress(BufferError):  # a row is still referenced: the map is freed with it
            self._map.close()

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
