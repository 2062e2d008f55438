"""How long the instrument itself took, kept in constant memory however long the run."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from loadgen.record.drive_report import DurationSpread

_PER_DECADE = 100
_N_DECADES = 12
_BATCH = 4096
"""So many are counted at a time: one call of NumPy costs as much as counting a hundred."""


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
        """What was counted; None where nothing was."""
        self._count()
        n = int(self._counts.sum())
        if not n:
            return None
        ranks = np.searchsorted(np.cumsum(self._counts), [0.5 * n, 0.99 * n], side="left")
        p50, p99 = (min(int(10 ** ((r + 0.5) / _PER_DECADE)) if r else 0, self._max_ns) for r in ranks)
        return DurationSpread(n, p50, p99, self._max_ns)
