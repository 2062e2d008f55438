"""How long prompts and outputs are: `512`, or `256..768` for uniform between both ends, ends included."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from workloads.request import WorkloadError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform over low..high tokens, ends included; a constant where both are equal."""

    low: int
    high: int

    def draw(self, n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return rng.integers(self.low, self.high, n, endpoint=True)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


def parse_lengths(text: str, flag: str) -> Lengths:
    """`512` or `256..768`; `flag` is named where the text is neither."""
    low, dots, high = text.partition("..")
    try:
        lengths = Lengths(int(low), int(high) if dots else int(low))
    except ValueError:
        raise WorkloadError(
            f"{flag} {text}: expected a number of tokens such as 512, or a range 256..768"
        ) from None
    if not 1 <= lengths.low <= lengths.high:
        raise WorkloadError(f"{flag} {text}: expected at least 1 token, and the lower end first")
    return lengths
