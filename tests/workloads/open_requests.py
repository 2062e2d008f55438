"""How many requests are open at each instant."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def in_flight(
    start_s: Sequence[float], end_s: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """How many requests were open over time: the instants of change, ascending, and the count from each on.

    `end_s[i]` ends `start_s[i]`; inf where it never ended. A request that ends as another starts never counts
    together with it.
    """
    starts, ends = np.asarray(start_s, dtype=np.float64), np.asarray(end_s, dtype=np.float64)
    ends = ends[np.isfinite(ends)]
    instants = np.unique(np.concatenate((starts, ends)))
    begun = np.searchsorted(np.sort(starts), instants, side="right")
    ended = np.searchsorted(np.sort(ends), instants, side="right")
    return instants, begun - ended
