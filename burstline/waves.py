"""When a load has filled, and the whole waves in which a closed loop ends; measured and forecast alike."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FILLED: Final = 0.95
"""The quantile of E2E after which an open loop has filled (tests/measure/test_stationary.py)."""


def whole_waves(begun_s: Floats, over_s: Floats, concurrency: int) -> tuple[float, float] | None:
    """From when until when a closed loop of C is full, in whole waves of C ends; None where there is none.

    From the C-th end to the last k x C later that came before the last begin. What is alike ends in waves,
    and the last begin cuts one somewhere.
    """
    ends_s = np.sort(over_s)
    n_waves = int(np.searchsorted(ends_s, begun_s.max(initial=-np.inf), side="right")) // concurrency
    first, last = concurrency - 1, n_waves * concurrency - 1
    return None if n_waves < 2 else (float(ends_s[first]), float(ends_s[last]))
