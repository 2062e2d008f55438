"""Telemetry of a run: the rows of `telemetry.parquet` as arrays, their peaks and growth."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from burstline.measure.record.columns import Floats
from burstline.measure.stats.figure import Absent, Figure, measured

Series = tuple[Floats, Floats]
"""When (s from the run's start) and what, in the order of time, without what was missing."""
LEAST_READ_S = 0.5
"""Energy over less than that is noise: counters move every 20 to 100 ms."""

LATEST_S = 1.0
"""So long before the load a reading may end: the watcher reads five times a second, and at the end."""


@dataclass(frozen=True, eq=False)
class Telemetry:
    """One entry per row, in the order of time; a value that is missing is NaN, a missing note None.

    `at_ns` counts from the run's start; `length_s` is how long the load ran.
    """

    at_ns: NDArray[np.int64]
    source: NDArray[Any]
    name: NDArray[Any]
    value: Floats
    note: NDArray[Any]
    length_s: float = 0.0

    @classmethod
    def of(cls, table: pa.Table) -> Telemetry:
        """The rows of a table (see `burstline.measure.record.tables.TELEMETRY`)."""
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

    def over(self, length_s: float) -> Telemetry:
        """The same for a load that ran for `length_s`."""
        return replace(self, length_s=length_s)

    def __len__(self) -> int:
        return len(self.at_ns)

    def series(self, source: str, name: str) -> Series:
        """The values of one name; empty where it was never seen."""
        rows = self._rows.get((source, name))
        if rows is None:
            return np.empty(0), np.empty(0)
        values = self.value[rows]
        known = ~np.isnan(values)
        return self.at_ns[rows][known] / 1e9, values[known]

    def names(self, source: str, prefix: str) -> list[str]:
        """The names of a source that begin so, in the order in which they were first seen."""
        return [name for own, name in self._rows if own == source and name.startswith(prefix)]

    def devices(self) -> list[str]:
        return sorted({source for source, _ in self._rows if source.startswith("gpu") and source != "gpu"})

    def why_missing(self, source: str, name: str) -> str:
        """Why there is no such value, in the watcher's words."""
        if not len(self):
            return "the run has no telemetry"
        places = [self._rows[key] for key in ((source, name), (source, "*")) if key in self._rows]
        notes = [self.note[k] for k in sorted(np.concatenate(places).tolist())] if places else []
        return next(
            (str(note) for note in reversed(notes) if note is not None), f"not reported by the {source}"
        )

    @cached_property
    def _rows(self) -> dict[tuple[str, str], NDArray[np.int64]]:
        places: dict[tuple[str, str], list[int]] = {}
        pairs: Iterable[tuple[str, str]] = zip(self.source.tolist(), self.name.tolist(), strict=True)
        for k, pair in enumerate(pairs):
            places.setdefault(pair, []).append(k)
        return {pair: np.array(rows) for pair, rows in places.items()}

    def peak(self, source: str, name: str, unit: str) -> Figure:
        """The largest value while the load ran."""
        at_s, values = self.series(source, name)
        inside = values[(at_s >= 0) & (at_s <= self.length_s)] if len(values) else values
        values = inside if len(inside) else values
        largest = float(values.max()) if len(values) else None
        return measured(largest, unit, self.why_missing(source, name), len(values))

    def grown(self, source: str, name: str, unit: str) -> Figure:
        """How much a counter grew over the load; Absent where it fell, or was not read before and after."""
        if (np.diff(self.series(source, name)[1]) < 0).any():
            return Absent(f"{name} fell: the server started again, or several answer in turn")
        return self.change(source, name, unit)

    def change(self, source: str, name: str, unit: str) -> Figure:
        """What a gauge shows after the load less what it showed before, as `grown` has it."""
        at_s, values = self.series(source, name)
        before, after = values[at_s <= 0], values[at_s >= self.length_s]
        if not len(values):
            return Absent(self.why_missing(source, name))
        if not len(before):
            return Absent(f"{name} was first read {at_s[0]:.2g} s into the load")
        if not len(after):
            return Absent(f"{name} was last read {self.length_s - at_s[-1]:.2g} s before the load ended")
        return measured(float(after[-1] - before[-1]), unit, "", len(values))

    def restarted(self, source: str, *names: str) -> Figure:
        """When the first of these counters fell during the load, s: the process started again."""
        falls = []
        for name in names:
            at_s, values = self.series(source, name)
            falls += [float(at) for at in at_s[1:][np.diff(values) < 0] if 0 < at <= self.length_s]
        return measured(min(falls, default=None), "s", "no counter fell", len(falls))

    def grown_together(self, source: str, prefix: str) -> dict[str, float] | Absent:
        """How much each counter of this prefix grew over the load, by the rest of its name.

        They are taken from the same two readings: the last before the load and the last after it.
        """
        if not len(self):
            return Absent("the run has no telemetry")
        counters = {name: self.series(source, name) for name in self.names(source, prefix)}
        at_s = np.concatenate([times for times, _ in counters.values()]) if counters else np.empty(0)
        before, after = at_s[at_s <= 0], at_s[at_s >= self.length_s]
        if not len(before) or not len(after):
            return Absent(
                "not read before and after the load" if counters else f"not reported by the {source}"
            )
        first_s, last_s = before.max(), after.max()
        grown = {}
        for name, (times, values) in counters.items():
            first, last = values[times == first_s], values[times == last_s]
            if len(first) and len(last):
                grown[name.removeprefix(prefix)] = float(last[0] - first[0])
        return grown

    def power_w(self, source: str, start_s: float, end_s: float) -> float | None:
        """Mean power between two moments, by the energy counter, else by integrated power, W.

        None where less than half of the time, or half a second, was read, or its end was not.
        """
        at_s, joules = self.series(source, "energy_j")
        if not len(at_s):
            at_s, watts = self.series(source, "power_w")
            joules = np.concatenate([[0.0], np.cumsum(np.diff(at_s) * (watts[1:] + watts[:-1]) / 2)])
        if not len(at_s):
            return None
        first_s, last_s = max(start_s, at_s[0]), min(end_s, at_s[-1])
        if end_s - last_s > LATEST_S:  # the device was lost: it may have drawn anything since
            return None
        if last_s - first_s < max(0.5 * (end_s - max(start_s, at_s[0])), LEAST_READ_S):
            return None
        before, after = np.interp([first_s, last_s], at_s, joules)
        return float((after - before) / (last_s - first_s))

    def slowed_fraction(self, reasons: int) -> Figure | None:
        """In which share of the readings under load a GPU's clocks were held down for one of these `reasons`.

        Of the GPU with the largest share; `reasons` are bits of NVML. None where no GPU reports them.
        """
        shares = []
        for device in self.devices():
            at_s, bits = self.series(device, "throttle_reasons")
            seen = bits[(at_s >= 0) & (at_s <= self.length_s)].astype(np.int64) & reasons
            if len(seen):
                shares.append((np.count_nonzero(seen) / len(seen), len(seen)))
        return measured(max(shares)[0], "1", "", max(shares)[1]) if shares else None

    def cpu_fraction(self, name: str) -> Figure:
        """The share of the machine's CPU time that a counter of the host took."""
        _, n_cpus = self.series("host", "n_cpus")
        return self.fraction("host", name, float(n_cpus[-1]) if len(n_cpus) else 1.0)

    def throttled_fraction(self) -> Figure:
        """The share of the time in which a CPU quota stopped the client's control group, on any CPU."""
        share = self.fraction("cgroup", "throttled_s", 1.0)
        return share if isinstance(share, Absent) else replace(share, point=min(share.point, 1.0))

    def fraction(self, source: str, name: str, per_s: float) -> Figure:
        """How much a counter grew in a second of the watched time, as a share of `per_s`."""
        at_s, values = self.series(source, name)
        inside = (at_s >= 0) & (at_s <= self.length_s)
        if inside.sum() < 2:
            return Absent(
                self.why_missing(source, name) if not len(values) else "the load was too short to watch",
                "too-short" if len(values) else "unwatched",
            )
        at_s, values = at_s[inside], values[inside]
        return measured(float((values[-1] - values[0]) / (at_s[-1] - at_s[0]) / per_s), "1", "", len(values))
