"""Telemetry of a run: the rows of `telemetry.parquet` as arrays, their peaks and growth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from burstline.measure.record.columns import Floats
from burstline.measure.stats.figure import Absent, Figure, known, measured

Series = tuple[Floats, Floats]
"""When (s from the run's start) and what, in the order of time, without what was missing."""
LEAST_READ_S = 0.5
"""Energy over less than that is noise: counters move every 20 to 100 ms."""

LATEST_S = 1.0
"""So long before the load a reading may end: the watcher reads five times a second, and at the end."""


@dataclass(frozen=True, slots=True, eq=False)
class Telemetry:
    """The values by source and name, and the `notes` on what is missing, all in the order of time.

    `length_s` is how long the load ran.
    """

    values: Mapping[tuple[str, str], Series]
    notes: Sequence[tuple[tuple[str, str], str]]
    length_s: float = 0.0

    @classmethod
    def of(cls, table: pa.Table) -> "Telemetry":
        """The rows of a table (see `burstline.measure.record.tables.TELEMETRY`)."""
        rows: dict[tuple[str, str], list[int]] = {}
        pairs = list(zip(table.column("source").to_pylist(), table.column("name").to_pylist(), strict=True))
        for k, pair in enumerate(pairs):
            rows.setdefault(pair, []).append(k)
        at_s, value = (table.column(name).to_numpy().astype(np.float64) for name in ("at_ns", "value"))
        at_s /= 1e9
        known = {pair: np.array(own)[~np.isnan(value[own])] for pair, own in rows.items()}
        notes = zip(pairs, table.column("note").to_pylist(), strict=True)
        return cls(
            {pair: (at_s[own], value[own]) for pair, own in known.items()},
            [(pair, note) for pair, note in notes if note is not None],
        )

    def over(self, length_s: float) -> "Telemetry":
        """The same for a load that ran for `length_s`."""
        return replace(self, length_s=length_s)

    def series(self, source: str, name: str) -> Series:
        """The values of one name; empty where it was never seen."""
        return self.values.get((source, name), (np.empty(0), np.empty(0)))

    def during(self, source: str, name: str) -> Series:
        """Those while the load ran."""
        at_s, values = self.series(source, name)
        inside = (at_s >= 0) & (at_s <= self.length_s)
        return at_s[inside], values[inside]

    def names(self, source: str, prefix: str) -> list[str]:
        """The names of a source that begin so, in the order in which they were first seen."""
        return [name for own, name in self.values if own == source and name.startswith(prefix)]

    def devices(self) -> list[str]:
        return sorted({source for source, _ in self.values if source.startswith("gpu") and source != "gpu"})

    def absent(self, source: str, name: str) -> Absent:
        """Why there is no such value, or too few under load: in the watcher's words, else its length."""
        if not self.values:
            return Absent("the run has no telemetry", "unwatched")
        places = ((source, name), (source, "*"))
        notes = [note for pair, note in self.notes if pair in places]
        if not notes and len(self.series(source, name)[1]):
            return Absent("the load was too short to watch", "too-short")
        return Absent(notes[-1] if notes else f"not reported by the {source}", "unwatched")

    def peak(self, source: str, name: str, unit: str) -> Figure:
        """The largest value while the load ran, of all values where none came meanwhile."""
        values = self.during(source, name)[1]
        values = values if len(values) else self.series(source, name)[1]
        largest = float(values.max()) if len(values) else None
        return measured(largest, unit, self.absent(source, name).reason, len(values))

    def most(self, gauge: str, unit: str) -> Figure:
        """The engine's `gauge` at its peak; Absent where it is 0, and no reading met a request that ran."""
        peaks = [self.peak("engine", name, unit) for name in (gauge, "running")]
        missed = all(known(peak) == 0 for peak in peaks)
        return Absent("no reading of its gauge met a request") if missed else peaks[0]

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
            return self.absent(source, name)
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
        if not self.values:
            return Absent("the run has no telemetry")
        counters = {name: self.series(source, name) for name in self.names(source, prefix)}
        at_s = np.concatenate([times for times, _ in counters.values()]) if counters else np.empty(0)
        before, after = at_s[at_s <= 0], at_s[at_s >= self.length_s]
        if not len(before) or not len(after):
            why = "not read before and after the load" if counters else f"not reported by the {source}"
            return Absent(why)
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
        # Of a device that was lost before the end: it may have drawn anything since.
        if end_s - last_s > LATEST_S or last_s - first_s < max(0.5 * (end_s - first_s), LEAST_READ_S):
            return None
        before, after = np.interp([first_s, last_s], at_s, joules)
        return float((after - before) / (last_s - first_s))

    def slowed_fraction(self, reasons: int) -> Figure | None:
        """In which share of the readings under load a GPU's clocks were held down for one of these `reasons`.

        Of the GPU with the largest share; `reasons` are bits of NVML. None where no GPU reports them.
        """
        shares = []
        for device in self.devices():
            seen = self.during(device, "throttle_reasons")[1].astype(np.int64) & reasons
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
        at_s, values = self.during(source, name)
        if len(values) < 2:
            return self.absent(source, name)
        return measured(float((values[-1] - values[0]) / (at_s[-1] - at_s[0]) / per_s), "1", "", len(values))
