"""What a watcher saw beside a run, by source and name: the rows of `telemetry.parquet` as arrays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

    from loadgen.record.columns import Floats


class Series(NamedTuple):
    """When (s from the run's start) and what, in the order of time, without what was missing."""

    at_s: Floats
    values: Floats


_EMPTY = Series(np.empty(0), np.empty(0))


@dataclass(frozen=True, eq=False)
class Telemetry:
    """One entry per row, in the order of time; a value that is missing is NaN, a missing note None."""

    at_ns: NDArray[np.int64]
    source: NDArray[Any]
    name: NDArray[Any]
    value: Floats
    note: NDArray[Any]

    @classmethod
    def of(cls, table: pa.Table) -> Telemetry:
        """The rows of a table (see `loadgen.record.tables.TELEMETRY`)."""
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        return cls(
            columns["at_ns"].astype(np.int64),
            columns["source"].astype(object),
            columns["name"].astype(object),
            columns["value"].astype(np.float64),
            columns["note"].astype(object),
        )

    @classmethod
    def empty(cls) -> Telemetry:
        """Of a run on which nothing was watched."""
        nothing = np.empty(0, object)
        return cls(np.empty(0, np.int64), nothing, nothing, np.empty(0), nothing)

    def __len__(self) -> int:
        return len(self.at_ns)

    def series(self, source: str, name: str) -> Series:
        """The values of one name; empty where it was never seen."""
        rows = self._rows.get((source, name))
        if rows is None:
            return _EMPTY
        values = self.value[rows]
        known = ~np.isnan(values)
        return Series(self.at_ns[rows][known] / 1e9, values[known])

    def names(self, source: str, prefix: str) -> list[str]:
        """The names of a source that begin so, in the order in which they were first seen."""
        return [name for own, name in self._rows if own == source and name.startswith(prefix)]

    def devices(self) -> list[str]:
        """The GPUs that were seen: gpu0, gpu1, ..."""
        return sorted({source for source, _ in self._rows if source.startswith("gpu") and source != "gpu"})

    def why_missing(self, source: str, name: str) -> str:
        """The watcher's own words on why there is no such value."""
        if not len(self):
            return "nothing was watched on this run"
        places = [self._rows[key] for key in ((source, name), (source, "*")) if key in self._rows]
        notes = [self.note[k] for k in sorted(np.concatenate(places).tolist())] if places else []
        return next((str(note) for note in reversed(notes) if note is not None), f"{source} gave no {name}")

    @cached_property
    def _rows(self) -> dict[tuple[str, str], NDArray[np.int64]]:
        """Where the rows of each source and name are."""
        places: dict[tuple[str, str], list[int]] = {}
        pairs: Iterable[tuple[str, str]] = zip(self.source.tolist(), self.name.tolist(), strict=True)
        for k, pair in enumerate(pairs):
            places.setdefault(pair, []).append(k)
        return {pair: np.array(rows) for pair, rows in places.items()}
