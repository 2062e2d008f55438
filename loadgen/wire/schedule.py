"""Who is to be sent when. No clock: every method is told the time, counted from the run's start."""

from __future__ import annotations

import heapq
from collections import deque

from loadgen.wire.exchange import Exchange


class Schedule:
    """Parked requests in order of due time, first parked first where that is equal.

    `soon` holds those due within `ahead_ns`, for whom a connection has to be ready: (due, order, exchange).
    """

    def __init__(self, ahead_ns: int) -> None:
        self.soon: deque[tuple[int, int, Exchange]] = deque()
        self._later: list[tuple[int, int, Exchange]] = []
        self._ahead_ns = ahead_ns
        self._n_added = 0

    def add(self, exchange: Exchange) -> None:
        self._n_added += 1
        heapq.heappush(self._later, (exchange.due_ns, self._n_added, exchange))

    def look_ahead(self, since_start_ns: int) -> None:
        """Move to `soon` what has come within reach."""
        later, soon = self._later, self.soon
        horizon_ns = max(since_start_ns, 0) + self._ahead_ns
        while later and later[0][0] <= horizon_ns:
            entry = heapq.heappop(later)
            soon.append(entry)
            if len(soon) > 1 and entry < soon[-2]:  # parked late, due early
                in_order = sorted(soon)
                soon.clear()  # in place: the wire may be in the middle of it
                soon.extend(in_order)

    def next_ns(self, may_send: bool) -> int | None:
        """When there is next something to do, None for never: a connection to open or a request to send."""
        due_ns = [self._later[0][0] - self._ahead_ns] if self._later else []
        if may_send and self.soon:
            due_ns.append(self.soon[0][0])
        return min(due_ns, default=None)

    def clear(self) -> list[Exchange]:
        """Everything parked, in order, which is then parked no more."""
        parked = [entry[2] for entry in sorted([*self.soon, *self._later])]
        self.soon.clear()
        self._later.clear()
        return parked
