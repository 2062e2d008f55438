"""How far a fit is off on rows that it never saw."""

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from burstline.roofline.predict.kernels import Amounts


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


def held_out(rows: M, fit: Callable[[M], F], predict: Callable[[F, M], Amounts], seed: int = 0) -> Amounts:
    """Predicted over measured time of every row, from a fit to the half of the keys that it is not among."""
    keys = np.unique(rows.key)
    first = np.isin(rows.key, np.random.default_rng(seed).permutation(keys)[: len(keys) // 2])
    ratio = np.empty(len(rows))
    for half in (first, ~first):
        ratio[half] = predict(fit(rows.where(~half)), rows.where(half)) / rows.where(half).seconds
    return ratio
