"""One line of the accuracy table: a goal, the errors in and out of sample, and whether they are enough."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from burstline.roofline.predict.kernels import Amounts


@dataclass(frozen=True, slots=True)
class Check:
    """`in_sample`: judged on data whose constants were set on it; `out_of_sample`: on data that set nothing.

    `met` judges the column that the goal is about; None where there is no goal to meet. `known` says why a
    goal is missed today: it is shown, and does not fail the run.
    """

    goal: str
    what: str
    target: str
    data: str
    in_sample: str = ""
    out_of_sample: str = ""
    peer: str = ""
    met: bool | None = None
    known: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: "-"}[self.met]


def errors(ratio: Amounts) -> str:
    """Median and 90th percentile of the absolute error, and its median with sign, in percent."""
    error = 100 * abs(ratio - 1)
    signed = 100 * (float(np.median(ratio)) - 1)
    return f"{np.median(error):.1f} / {np.quantile(error, 0.9):.1f}, bias {signed:+.1f} (n={len(ratio):,})"


def within(ratio: Amounts, median: float, p90: float | None = None) -> bool:
    """Whether the errors are at most so many percent."""
    error = 100 * abs(ratio - 1)
    return bool(np.median(error) <= median and (p90 is None or np.quantile(error, 0.9) <= p90))


def table(checks: Sequence[Check]) -> str:
    """All checks as columns of text; what needs more words stands below."""
    header = ["Goal", "", "What", "In sample, %", "Out of sample, %", "At most", "Peer", "Data"]
    rows = [
        [c.goal, c.verdict, c.what, c.in_sample, c.out_of_sample, c.target, c.peer, c.data] for c in checks
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, ["-" * width for width in widths], *rows]
    ]
    notes: dict[str, list[str]] = {}
    for c in checks:
        for text in filter(None, (c.known, c.note)):
            notes.setdefault(text, []).append(f"{c.goal} {c.what}")
    more = {text: f" and {len(of) - 1} more" if len(of) > 1 else "" for text, of in notes.items()}
    return "\n".join([*lines, "", *(f"{of[0]}{more[text]}: {text}" for text, of in notes.items())])
