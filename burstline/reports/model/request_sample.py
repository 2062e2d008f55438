"""Which of many requests a page shows one by one: it stays small however long the run was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from burstline.measure.record.columns import Ints

ALL_UP_TO: Final = 2000
EACH: Final = 1000
"""How many are drawn evenly spaced, and how many of the slowest, where not all are."""


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """Positions among `n` records: `even` in the order of sending and `slowest` first are drawn.

    `listed` is the table: in the order of sending, all that is drawn or that the page links to.
    """

    n: int
    even: Ints
    slowest: Ints
    listed: Ints

    @property
    def all(self) -> bool:
        return len(self.listed) == self.n

    def href(self, position: int) -> str:
        """Where on the page the request is listed; "" where it is not."""
        return f"#r{position}" if self.all or position in self.listed else ""


def shown_of(sent: Ints, slowest: Ints, named: Iterable[int]) -> Shown:
    """All of a small run; of a large one EACH evenly spaced, EACH of the slowest, and those `named`.

    `sent` and `slowest` are all positions, in the order of sending and from the slowest to the fastest.
    """
    n = len(sent)
    if n <= ALL_UP_TO:
        return Shown(n, sent, slowest, sent)
    even = sent[np.linspace(0, n - 1, EACH).round().astype(np.int64)]
    kept = np.zeros(n, dtype=bool)
    kept[np.concatenate([even, slowest[:EACH], np.fromiter(named, np.int64)])] = True
    return Shown(n, even, slowest[:EACH], sent[kept[sent]])
