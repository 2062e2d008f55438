"""The search for parameters that fit measured kernels, the fit of a device's products, and its error."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from burstline.roofline.device.calibration import GemmFit, Spread
from burstline.roofline.predict.kernels import Amounts, Products, Rates, gemm_s

X = TypeVar("X")


@dataclass(frozen=True, slots=True)
class Rows(Generic[X]):
    """Measured rows: their amounts, seconds, the bytes they sweep again and again, and their split's key."""

    work: X
    seconds: Amounts
    swept_bytes: Amounts
    key: npt.NDArray[np.int64]

    def where(self, mask: npt.NDArray[np.bool_]) -> "Rows[X]":
        columns = {name: getattr(self.work, name)[mask] for name in self.work.__dataclass_fields__}  # type: ignore[attr-defined]
        return Rows(type(self.work)(**columns), self.seconds[mask], self.swept_bytes[mask], self.key[mask])

    def __len__(self) -> int:
        return len(self.seconds)


def fit_gemm(tables: Sequence[tuple[Rates, Rows[Products]]], start: GemmFit) -> GemmFit:
    """eta_c, eta_m, pad and t0 that fit all tables together; the rest stays as in `start`.

    Where a kernel quantises the inputs its launch and rate and the chain of a tile are fitted, not t0.
    """

    def at(x: Sequence[float]) -> GemmFit:
        fit = replace(start, eta_c=x[0], eta_m=x[1], pad=x[3])
        if not start.quantise_s:
            return replace(fit, t0_s=x[2] * 1e-6)
        return replace(fit, quantise_s=x[2] * 1e-6, chain_s=x[4] * 1e-9, quantise_byte_s=x[5] * 1e-9)

    def errors(x: Sequence[float]) -> Amounts:
        fit = at(x)
        return log_errors([(gemm_s(fit, rates, rows.work), rows.seconds) for rates, rows in tables])

    start_at = [start.eta_c, start.eta_m, (start.quantise_s or start.t0_s) * 1e6, start.pad]
    upper = [1.3, 30.0, 1000.0, 4.0]
    if start.quantise_s:
        start_at, upper = [*start_at, 0.6, 0.06], [*upper, 10, 3]
    return at(search(errors, start_at, upper))


def search(
    errors: Callable[[Sequence[float]], Amounts],
    start: Sequence[float],
    upper: Sequence[float],
    weight: Amounts | None = None,
) -> list[float]:
    """The parameters, each within 0 and `upper` and the first two above 0, of the least log errors."""

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


def spread_of(ratio: Amounts) -> Spread:
    """Of predicted over measured, turned round: by what to multiply a prediction."""
    low, mid, high = np.quantile(1 / ratio, [0.1, 0.5, 0.9])
    return Spread(float(low), float(mid), float(high), len(ratio))
