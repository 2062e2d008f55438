"""The search for parameters that fit measured rows, and how far a fit is off on rows that it never saw."""

from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from roofline.device.calibration import Spread
from roofline.predict.kernels import Amounts


class Measured(Protocol):
    """Measured rows: their seconds, and the key by which they are halved."""

    @property
    def seconds(self) -> Amounts: ...
    @property
    def key(self) -> npt.NDArray[np.int64]: ...
    def where(self, mask: npt.NDArray[np.bool_]) -> Self: ...
    def __len__(self) -> int: ...


M = TypeVar("M", bound=Measured)
F = TypeVar("F")


def search(
    errors: Callable[[Sequence[float]], Amounts],
    start: Sequence[float],
    upper: Sequence[float],
    weight: Amounts | None = None,
) -> list[float]:
    """The parameters, each within 0 and `upper` and the first two above 0, of the least log errors."""
    from scipy.optimize import minimize

    def cost(x: npt.NDArray[np.float64]) -> float:
        if (x < 0).any() or (x[:2] <= 0).any() or (x > np.array(upper)).any():
            return 9.0
        e = errors(x.tolist())
        w = np.full(len(e), 1 / len(e)) if weight is None else weight
        return float((w * abs(e)).sum() + 0.3 * np.sqrt((w * e * e).sum()))

    options = {"maxfev": 800, "xatol": 1e-4, "fatol": 1e-6, "adaptive": True}
    found = minimize(cost, np.array(start, dtype=float), method="Nelder-Mead", options=options)  # type: ignore[call-overload]
    return [float(value) for value in found.x]


def log_errors(pairs: Sequence[tuple[Amounts, Amounts]]) -> Amounts:
    return np.concatenate([np.log(predicted / measured) for predicted, measured in pairs])


def held_out(rows: M, fit: Callable[[M], F], predict: Callable[[F, M], Amounts], seed: int = 0) -> Amounts:
    """Predicted over measured time of every row, from a fit to the half of the keys that it is not among."""
    keys = np.unique(rows.key)
    first = np.isin(rows.key, np.random.default_rng(seed).permutation(keys)[: len(keys) // 2])
    ratio = np.empty(len(rows))
    for half in (first, ~first):
        ratio[half] = predict(fit(rows.where(~half)), rows.where(half)) / rows.where(half).seconds
    return ratio


def spread_of(ratio: Amounts) -> Spread:
    """Of predicted over measured, turned round: by what to multiply a prediction."""
    low, mid, high = np.quantile(1 / ratio, [0.1, 0.5, 0.9])
    return Spread(float(low), float(mid), float(high), len(ratio))
