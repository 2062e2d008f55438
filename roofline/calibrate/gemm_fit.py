"""Measured kernels as rows, and the fit of a device's products to them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from roofline.calibrate.search import log_errors, search
from roofline.device.calibration import GemmFit
from roofline.predict.kernels import Amounts, Products, Rates, gemm_s

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
