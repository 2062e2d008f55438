"""Whether a run's first requests were slower than the rest: a server that was still warming up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from loadgen.metrics.definitions import ttft_service
from loadgen.record.columns import Columns

SIZES: Final = (3, 5, 10, 20, 50, 100, 200, 500)
"""How many first requests are looked at together."""
SLOWER: Final = 0.8
"""The share of them that must be slower than nine tenths of the rest."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The first `n` requests had a median TTFT (from the send) that was `slower_s` above the rest's."""

    n: int
    slower_s: float
    rest_s: float


def cold_start(c: Columns, concurrency: int | None) -> ColdStart | None:
    """The largest group of first requests slower by more than the scatter of the rest; None without one.

    A burst has no first requests: all wait in one queue. In a closed loop the first wave is left out, whose
    prompts are all computed at once.
    """
    order = np.argsort(c.sent_s[c.ok], kind="stable")
    if concurrency is None and (not len(c) or not np.ptp(c.due_s)):
        return None
    values = ttft_service(c)[c.ok][order][concurrency or 0 :]
    worst = None
    for n in SIZES:
        if 4 * n > len(values):
            break
        first, rest = values[:n], values[n:]
        middle, high, scatter = np.quantile(rest, [0.5, 0.9, 0.95])
        slower_s = float(np.median(first) - middle)
        if slower_s > scatter - middle and np.mean(first > high) >= SLOWER:
            worst = ColdStart(n, slower_s, float(middle))
    return worst
