"""A figure: an estimate with its interval, n and unit, or absent with the reason. No heavy imports."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Self


class Result(StrEnum):
    """What became of a test against a bound."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its uncertainty: the true value lies in [low, high] with probability `level`.

    A bound is None where none exists, `note` then says why; `level` is None for a plain reading, which has
    no interval at all. `n` is how many observations stand behind it.
    """

    point: float
    low: float | None
    high: float | None
    level: float | None
    n: int
    unit: str
    note: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "note" or value is not None}


@dataclass(frozen=True, slots=True)
class Absent:
    """No number, and why: a sentence for people, and a short stable `code` for programs to branch on."""

    reason: str
    code: str = "not-available"

    def to_json(self) -> dict[str, Any]:
        return {"point": None, "absent": self.reason, "code": self.code}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """ValueError where the row is no absence."""
        if not isinstance(row, Mapping) or not isinstance(row.get("absent"), str):
            raise ValueError('expected {"absent": "why"}')
        return cls(row["absent"], str(row["code"])) if "code" in row else cls(row["absent"])


Figure = Estimate | Absent


def inverse(figure: Figure, unit: str) -> Figure:
    """1 / a figure above 0, in `unit`, with its interval turned round."""
    if isinstance(figure, Absent):
        return figure
    if not figure.point > 0:
        return Absent("it takes no time", "not-positive")
    low, high = 1 / figure.high if figure.high else None, 1 / figure.low if figure.low else None
    if figure.level is not None:
        low = low or 0.0
    return replace(figure, point=1 / figure.point, low=low, high=high, unit=unit)


def measured(value: float | None, unit: str, absent: str, n: int = 1) -> Figure:
    """A plain reading; Absent with the reason `absent` where it is None, NaN or infinite."""
    if value is None or not math.isfinite(value):
        return Absent(absent)
    return Estimate(float(value), None, None, None, n, unit)


def noted(figure: Figure, note: str) -> Figure:
    return figure if isinstance(figure, Absent) else replace(figure, note=note)


def known(figure: Figure | None) -> float | None:
    return figure.point if isinstance(figure, Estimate) else None
