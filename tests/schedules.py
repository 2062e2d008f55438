"""How well a schedule was kept: achieved times compared with the planned distribution, for tests.

Times are seconds, ascending, from any origin. None stands wherever there are too few times to say.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def dispersion(at_s: ArrayLike, window_s: float) -> float | None:
    """Variance over mean of the counts in consecutive windows: 1 for Poisson at every window, 0 for constant.

    Only whole windows between the first and the last time count, begun half a mean gap before the first: so
    a constant schedule's times lie well inside, not on an edge where the last bit decides. None with fewer
    than two.
    """
    times = np.asarray(at_s, dtype=np.float64)
    span_s = times[-1] - times[0] if times.size else 0.0
    n_windows = int(span_s // window_s)
    if n_windows < 2:
        return None
    edges = times[0] - span_s / (times.size - 1) / 2 + window_s * np.arange(n_windows + 1)
    counts = np.diff(np.searchsorted(times, edges))
    return float(counts.var(ddof=1) / counts.mean())


def gap_ks(at_s: ArrayLike, rate_per_s: float, burstiness: float = 1.0) -> float | None:
    """Kolmogorov-Smirnov distance between the gaps and the asked gamma law (burstiness 1: exponential).

    0..1, the largest vertical distance of the two distribution functions; it exceeds 1.36 / sqrt(n) in 5 %
    of schedules that do follow the law.
    """
    gaps = np.sort(np.diff(np.asarray(at_s, dtype=np.float64)))
    if gaps.size < 2:
        return None
    from scipy.special import gammainc  # here: an import of 0.1 s, for gaps drawn by a law alone

    law = gammainc(burstiness, gaps * rate_per_s * burstiness)
    steps = np.arange(gaps.size + 1) / gaps.size
    return float(max((steps[1:] - law).max(), (law - steps[:-1]).max()))


def mean_in_flight(start_s: Sequence[float], end_s: Sequence[float], low_s: float, high_s: float) -> float:
    """The time average of the open requests over [low_s, high_s): Little's L."""
    starts = np.clip(np.asarray(start_s, dtype=np.float64), low_s, high_s)
    ends = np.clip(np.asarray(end_s, dtype=np.float64), low_s, high_s)
    return float((ends - starts).sum() / (high_s - low_s))
