"""A driver's measurements of itself, in constant memory: a histogram of durations, the canary's errors."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burstline.loadgen.capture import http1
from burstline.loadgen.capture.capture import Capture
from burstline.loadgen.capture.drive_report import CanaryReport, DurationSpread

_PER_DECADE = 100
_N_DECADES = 12
_BATCH = 4096
"""Durations counted per call of NumPy: a call costs as much as counting a hundred."""


class DurationHistogram:
    """Durations by size, 100 bins a decade from 1 ns to 1,000 s; the first one holds zeros."""

    def __init__(self) -> None:
        self._counts = np.zeros(_PER_DECADE * _N_DECADES, dtype=np.int64)
        self._max_ns = 0
        self._new: list[NDArray[np.float64]] = []
        self._n_new = 0

    def add(self, durations_ns: ArrayLike) -> None:
        """Count durations; negative ones count as zero."""
        values = np.array(durations_ns, dtype=np.float64, ndmin=1)
        if values.size:
            self._new.append(values)
            self._n_new += values.size
        if self._n_new >= _BATCH:
            self._count()

    def _count(self) -> None:
        if self._new:
            values = np.maximum(np.concatenate(self._new), 1.0)
            bins = (np.log10(values) * _PER_DECADE).astype(np.int64)
            last = len(self._counts) - 1
            self._counts += np.bincount(np.minimum(bins, last), minlength=last + 1)
            self._max_ns = max(self._max_ns, int(values.max()))
            self._new, self._n_new = [], 0

    def spread(self) -> DurationSpread | None:
        """Median, p99 and maximum; None without durations."""
        self._count()
        n = int(self._counts.sum())
        if not n:
            return None
        ranks = np.searchsorted(np.cumsum(self._counts), [0.5 * n, 0.99 * n], side="left")
        p50, p99 = (min(int(10 ** ((r + 0.5) / _PER_DECADE)) if r else 0, self._max_ns) for r in ranks)
        return DurationSpread(n, p50, p99, self._max_ns)


class CanaryErrors:
    """The errors of the canary's events, counted part by part of its stream: none of it is kept."""

    def __init__(self) -> None:
        self._errors, self._beyond, self._cpu_ns = DurationHistogram(), DurationHistogram(), 0

    def add(self, capture: Capture, t0_ns: int) -> None:
        """Count the events from the run's start on, except the last one, whose send time is unknown."""
        parsed = http1.parse(capture.reads)
        if parsed is None:
            return
        http, arrivals = parsed
        lines = http.body.split(b"\n\n")[:-1]
        if not lines:
            return
        ends = np.cumsum([len(line) + 2 for line in lines])
        sent = np.array([[int(word) for word in line.split()[1:4]] for line in lines], dtype=np.int64)
        at_ns, _, bound_ns = (
            np.array(column, dtype=np.int64)[:-1] for column in http1.stamps(arrivals, ends.tolist())
        )
        true_ns, sent_ns = sent[:-1, 0] - t0_ns, sent[1:, 2] - t0_ns
        error_ns = np.maximum(true_ns - at_ns, at_ns - sent_ns)
        beyond_ns = np.maximum(true_ns - at_ns, at_ns - np.maximum(bound_ns, 0) - sent_ns)
        self._errors.add(error_ns[true_ns >= 0])
        self._beyond.add(beyond_ns[true_ns >= 0])
        self._cpu_ns = int(sent[-1, 1])

    def report(self) -> CanaryReport:
        """The errors so far; none in a run that was too short."""
        spread, beyond = self._errors.spread(), self._beyond.spread()
        if spread is None or beyond is None:
            return CanaryReport(0, 0, 0, 0, 0.0, 0)
        cpu_s = self._cpu_ns / 1e9
        return CanaryReport(spread.n, spread.p50_ns, spread.p99_ns, spread.max_ns, cpu_s, beyond.p99_ns)
