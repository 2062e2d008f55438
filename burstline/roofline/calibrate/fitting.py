"""The search for constants that fit measured kernels, and how far they are off."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from burstline.roofline.device.calibration import Constants, Spread
from burstline.roofline.predict.kernels import Amounts


def fitted(
    start: Constants,
    limits: Mapping[str, tuple[float, float]],
    tables: Sequence[tuple[Callable[[Constants], Amounts], Amounts]],
) -> Constants:
    """`start` with those constants that `limits` names, each within its limits, of the least errors.

    `tables`: how the seconds of rows are predicted, and the seconds measured; each table weighs the same. The
    objective is the mean absolute log error plus 0.3 of its root mean square.
    """
    names = list(limits)
    low, high = np.array([limits[name] for name in names]).T
    weight = np.concatenate([np.full(len(seconds), 1 / len(seconds) / len(tables)) for _, seconds in tables])

    def at(x: npt.NDArray[np.float64]) -> Constants:
        return replace(start, **dict(zip(names, (low + x * (high - low)).tolist(), strict=True)))

    def cost(x: npt.NDArray[np.float64]) -> float:
        if (x < 0).any() or (x > 1).any():
            return 9.0
        e = np.concatenate([np.log(predict(at(x)) / seconds) for predict, seconds in tables])
        return float((weight * abs(e)).sum() + 0.3 * np.sqrt((weight * e * e).sum()))

    begin = np.clip((np.array([getattr(start, name) for name in names]) - low) / (high - low), 0.01, 0.99)
    options = {"maxfev": 800, "xatol": 1e-4, "fatol": 1e-6, "adaptive": True}
    return at(minimize(cost, begin, method="Nelder-Mead", options=options).x)  # type: ignore[call-overload]


def spread_of(ratio: Amounts) -> Spread:
    """Of predicted over measured, turned round: by what to multiply a prediction."""
    low, high = np.quantile(1 / ratio, [0.1, 0.9])
    return Spread(float(low), float(high))
