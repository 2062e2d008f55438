"""How long prompts and outputs are: a number, a range, a distribution, or lengths recorded in a file.

    512                       exactly
    256..768                  uniform, both ends included
    normal:512,128            mean and standard deviation; between 1 and the mean + 6 deviations
    lognormal:512,400         likewise, of the lengths themselves; up to the quantile 1 - 1e-6
    zipf:1.2,16..4096         P(length) proportional to (length - 15)^-1.2
    file:lengths.csv          rows of recorded lengths, drawn with replacement

A range after normal or lognormal (`normal:512,128,64..2048`) sets the ends. Nothing is clipped to an end: the
distribution is conditioned on lying between them.
"""

import math
import re
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burstline.workloads.prompts import rng
from burstline.workloads.request import WorkloadError
from burstline.workloads.rows import csv_rows, names_in, number_in

Ints = NDArray[np.int64]

EXPECTED = (
    "a number such as 512, 256..768, normal:512,128, lognormal:512,400, zipf:1.2,16..4096 or file:F.csv"
)
MAX_TOK = 1 << 24


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution over whole numbers of tokens from `low` to `high`, both included.

    `pmf[k]` is the probability of `low + k`; None: uniform. `rows` are recorded lengths, `path` their file.
    `text` is what the user typed.
    """

    low: int
    high: int
    text: str = ""
    pmf: NDArray[np.float64] | None = field(default=None, compare=False)
    rows: Ints | None = field(default=None, compare=False)
    path: str | None = None

    def draw(self, n: int, rng: np.random.Generator) -> Ints:
        if self.rows is not None:
            return self.rows[rng.integers(0, len(self.rows), n)]
        if self.pmf is None:
            return rng.integers(self.low, self.high, n, endpoint=True)

        return self.low + np.searchsorted(np.cumsum(self.pmf), rng.random(n), side="right").clip(
            max=len(self.pmf) - 1
        ).astype(np.int64)

    def __str__(self) -> str:
        if self.text:
            return self.text
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


def draw_both(prompt: Lengths, output: Lengths, n: int, seed: int) -> tuple[Ints, Ints]:
    """Prompt and output lengths of n requests; of one file they come from the same rows, so correlated."""
    if prompt.path is not None and prompt.path == output.path:
        return tuple(lengths.draw(n, rng(seed, "length rows")) for lengths in (prompt, output))  # type: ignore[return-value]
    return prompt.draw(n, rng(seed, "prompt lengths")), output.draw(n, rng(seed, "output lengths"))


def parse_seconds(text: str, flag: str) -> Lengths:
    """A distribution of times, typed in seconds like a distribution of lengths: in whole milliseconds."""
    try:
        if text.startswith(("zipf:", "file:")):
            raise WorkloadError(text)
        scaled = re.sub(r"\d+(?:\.\d+)?|(?<!\.)\.\d+", lambda number: f"{float(number[0]) * 1e3:.0f}", text)
        return replace(parse_lengths(scaled, flag, least=0), text=text)
    except WorkloadError:
        raise WorkloadError(f"{flag} {text}: expected seconds such as 2, 0.5..3, normal:2,1") from None


def parse_lengths(text: str, flag: str, least: int = 1) -> Lengths:
    """The distribution that `text` describes; WorkloadError, naming `flag`, where it describes none."""
    law, colon, rest = text.partition(":")
    try:
        if colon and law == "file":
            return _recorded(rest, flag)
        if colon:
            return _distribution(law, rest, text)
        low, high = _range(text)
    except (ValueError, OverflowError) as error:
        if isinstance(error, WorkloadError):
            raise
        raise WorkloadError(f"{flag} {text}: expected {EXPECTED}") from None
    if not least <= low <= high:
        unit = "turn" if flag == "--turns" else "token"
        raise WorkloadError(f"{flag} {text}: expected at least 1 {unit}, and the lower end first")
    if high > MAX_TOK:
        raise WorkloadError(f"{flag} {text}: expected at most {MAX_TOK:,} tokens")
    return Lengths(low, high)


def _range(text: str) -> tuple[int, int]:
    low, dots, high = text.partition("..")
    return int(low), int(high) if dots else int(low)


def _distribution(law: str, rest: str, text: str) -> Lengths:
    words = rest.split(",")
    ends = _range(words.pop()) if ".." in words[-1] else None
    numbers = [float(word) for word in words]
    if not all(math.isfinite(number) and number > 0 for number in numbers) or (ends and ends[1] > MAX_TOK):
        raise ValueError(text)

    if law == "zipf":
        (exponent,) = numbers
        if ends is None:
            raise ValueError(text)
        return _checked(*ends, np.arange(1, ends[1] - ends[0] + 2, dtype=np.float64) ** -exponent, text)
    from scipy import stats as sps  # here: half a second that few runs need

    mean, deviation = numbers
    continuous: Any
    if law == "normal":
        continuous = sps.norm(mean, deviation)
        low, high = ends or (1, round(mean + 6 * deviation))
    elif law == "lognormal":
        sigma = math.sqrt(math.log1p((deviation / mean) ** 2))
        continuous = sps.lognorm(sigma, scale=mean / math.exp(sigma**2 / 2))
        low, high = ends or (1, math.ceil(continuous.ppf(1 - 1e-6)))
    else:
        raise ValueError(text)
    if high - low > MAX_TOK:
        raise ValueError(text)
    return _checked(low, high, np.diff(continuous.cdf(np.arange(low, high + 2) - 0.5)), text)


def _checked(low: int, high: int, weights: NDArray[np.float64], text: str) -> Lengths:
    total = weights.sum() if len(weights) else 0.0
    if not 1 <= low <= high or not total > 0:
        raise ValueError(text)
    return Lengths(low, high, text, weights / total)


def _recorded(name: str, flag: str) -> Lengths:
    """A CSV with a header: column `prompt_tokens` or `output_tokens`, as the flag says, else its only one."""
    path, wanted, found = Path(name), flag.lstrip("-").replace("-", "_"), array("q")
    expected = f"expected a whole number of tokens from 1 to {MAX_TOK}"
    for number, row in csv_rows(path, flag):
        column = wanted if wanted in row else next(iter(row))
        if column != wanted and len(row) > 1:
            what = f"{flag} file:{name} has columns {names_in(row)}"
            raise WorkloadError(f"{what}; expected one named {wanted}")
        value = number_in(row[column])
        if not value.is_integer() or not 1 <= value <= MAX_TOK:
            what = f"{flag} file:{name} row {number}: {column} is {row[column]!r:.60}"
            raise WorkloadError(f"{what}; {expected}")
        found.append(int(value))
    if not found:
        raise WorkloadError(f"{flag} file:{name} row 2: {expected}")
    rows = np.array(found, np.int64)
    return Lengths(int(rows.min()), int(rows.max()), f"file:{path.name}", None, rows, str(path.resolve()))
