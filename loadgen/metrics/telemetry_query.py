"""Telemetry read for a summary: peaks, and how much counters grew while the load ran."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from loadgen.record.telemetry import Series, Telemetry
from loadgen.stats.estimates import Absent, Figure, measured


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """The watcher's rows, at_ns from the run's start; `length_s` is how long the load ran."""

    rows: Telemetry
    length_s: float

    def series(self, source: str, name: str) -> Series:
        """When (s) and what, in the order of time, without what was missing; empty where never seen."""
        return self.rows.series(source, name)

    def why_missing(self, source: str, name: str) -> str:
        """The watcher's own words on why there is no such value."""
        return self.rows.why_missing(source, name)

    def peak(self, source: str, name: str, unit: str) -> Figure:
        """The largest value while the load ran."""
        at_s, values = self.series(source, name)
        inside = values[(at_s >= 0) & (at_s <= self.length_s)] if len(values) else values
        values = inside if len(inside) else values
        largest = float(values.max()) if len(values) else None
        return measured(largest, unit, self.why_missing(source, name), len(values))

    def grown(self, source: str, name: str, unit: str) -> Figure:
        """How much a counter grew over the load; Absent where it was not read both before and after."""
        at_s, values = self.series(source, name)
        before, after = values[at_s <= 0], values[at_s >= self.length_s]
        if not len(values):
            return Absent(self.why_missing(source, name))
        if not len(before):
            return Absent(f"{name} was first read {at_s[0]:.2g} s into the load")
        if not len(after):
            return Absent(f"{name} was last read {self.length_s - at_s[-1]:.2g} s before the load ended")
        return measured(float(after[-1] - before[-1]), unit, "", len(values))

    def grown_together(self, source: str, prefix: str) -> dict[str, float] | Absent:
        """How much each counter of this prefix grew over the load, by the rest of its name.

        They are taken from the same two readings: the last before the load and the last after it.
        """
        if not len(self.rows):
            return Absent("nothing was watched on this run")
        counters = {name: self.series(source, name) for name in self.rows.names(source, prefix)}
        at_s = np.concatenate([times for times, _ in counters.values()]) if counters else np.empty(0)
        before, after = at_s[at_s <= 0], at_s[at_s >= self.length_s]
        if not len(before) or not len(after):
            none = f"{source} gave no {prefix.rstrip('_')}"
            return Absent("it was not read before and after" if counters else none)
        first_s, last_s = before.max(), after.max()
        grown = {}
        for name, (times, values) in counters.items():
            first, last = values[times == first_s], values[times == last_s]
            if len(first) and len(last):
                grown[name.removeprefix(prefix)] = float(last[0] - first[0])
        return grown

    def time_fraction(self, source: str, name: str) -> Figure:
        """The share of the watched time that a counter of seconds took."""
        return self._fraction(source, name, 1.0)

    def cpu_fraction(self, name: str) -> Figure:
        """The share of the machine's CPU time that a counter of the host took."""
        _, n_cpus = self.series("host", "n_cpus")
        return self._fraction("host", name, float(n_cpus[-1]) if len(n_cpus) else 1.0)

    def throttled_fraction(self) -> Figure:
        """The share of a CPU that a quota took from the client; Absent where others share the quota."""
        _, alone = self.series("cgroup", "alone")
        if len(alone) and not alone.min():
            return Absent("the control group holds more than the client")
        _, n_cpus = self.series("host", "n_cpus")
        return self._fraction("cgroup", "throttled_s", float(n_cpus[-1]) if len(n_cpus) else 1.0)

    def devices(self) -> list[str]:
        """The GPUs that were seen: gpu0, gpu1, ..."""
        return self.rows.devices()

    def _fraction(self, source: str, name: str, per_s: float) -> Figure:
        at_s, values = self.series(source, name)
        inside = (at_s >= 0) & (at_s <= self.length_s)
        if inside.sum() < 2:
            return Absent(
                self.why_missing(source, name) if not len(values) else "the load was too short to watch"
            )
        at_s, values = at_s[inside], values[inside]
        return measured(float((values[-1] - values[0]) / (at_s[-1] - at_s[0]) / per_s), "1", "", len(values))
