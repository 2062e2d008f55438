"""How much CI tries of what is tried many times: it must end in 90 minutes on a slow machine."""

import os
from collections.abc import Sequence
from typing import Final, TypeVar

T = TypeVar("T")
IN_CI: Final = "CI" in os.environ


def at_most(n: int, cases: Sequence[T]) -> Sequence[T]:
    """All cases; in CI `n` of them, evenly spaced from the first on."""
    return cases[:: max(1, -(-len(cases) // n))] if IN_CI else cases
