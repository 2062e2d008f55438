"""Whether a run's first requests were slower than the rest: a server that was still warming up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadgen.metrics.definitions import QUANTILES, ttft_service
from loadgen.record.columns import Columns
from loadgen.record.verdict import Reason, tolerance_s
from loadgen.stats.estimates import early_stopping_floor, label
from loadgen.stats.quantiles import quantile_of

SIZES: Final = (3, 5, 10, 20, 50, 100, 200, 500)
"""How many first requests are looked at together."""
SLOWER: Final = 0.8
"""The share of them that must be slower than nine tenths of the rest."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The first `n` requests had a median TTFT, from the send, that was `slower_s` above the rest's.

    `rest_s` is the median of the rest. `until_s` is when the last of them was due. `tail_s` is TTFT's `tail`,
    the highest percentile that the rest have, with them, `warm_tail_s` without.
    """

    n: int
    slower_s: float
    rest_s: float
    until_s: float
    tail: float
    tail_s: float
    warm_tail_s: float

    @property
    def size(self) -> str:
        return (
            f"The first {self.n} requests waited {_span(self.slower_s)} longer for their first token "
            f"than the rest ({_span(self.rest_s)} at the median)."
        )

    def counted(self) -> Reason:
        """Of a run whose figures include those requests."""
        effect = f"They move TTFT {label(self.tail)} from {_span(self.warm_tail_s)} to {_span(self.tail_s)}."
        advice = "Pass --warmup N or --warmup auto; warm-up requests do not count."
        return Reason("cold", f"{self.size} {effect}", advice)

    def left_out(self) -> Reason:
        """Of a run whose figures begin after them."""
        text = f"COLD: {self.size} No figure counts them: the run counts from its steady state."
        return Reason("cold", text, "Pass --warmup N to warm the server up before the run.")


def _span(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def cold_start(
    c: Columns, concurrency: int | None, opening: NDArray[np.bool_] | None = None
) -> ColdStart | None:
    """The largest group of first requests slower by more than the scatter of the rest; None without one.

    Less than the instrument may be off by is no difference. A burst has no first requests: all wait in one
    queue. In a closed loop the first wave is left out, whose prompts are all computed at once. Of sessions
    only the `opening` turns are alike.
    """
    use = c.ok if opening is None else c.ok & opening
    due_s = c.due_s if opening is None else c.due_s[opening]
    if concurrency is None and (not len(due_s) or not np.ptp(due_s)):
        return None
    order = np.argsort(c.sent_s[use], kind="stable")[concurrency or 0 :]
    values, due_s = ttft_service(c)[use][order], c.due_s[use][order]
    worst = None
    for n in SIZES:
        if 4 * n > len(values):
            break
        first, rest = values[:n], values[n:]
        middle, high, scatter = np.quantile(rest, [0.5, 0.9, 0.95])
        slower_s = float(np.median(first) - middle)
        if slower_s > max(scatter - middle, tolerance_s(middle)) and np.mean(first > high) >= SLOWER:
            tail = max((p for p in QUANTILES if len(rest) >= early_stopping_floor(p)), default=0.5)
            tails_s = quantile_of(values, tail), quantile_of(rest, tail)
            worst = ColdStart(n, slower_s, float(middle), float(due_s[:n].max()), tail, *tails_s)
    return worst
