"""A plan: every request of a run and when it is due, fixed before the first byte is sent."""

from array import array
from dataclasses import dataclass

from workloads.request import Request


@dataclass(frozen=True, slots=True)
class Plan:
    """Every request of a run. `due_ns[i]` is when `requests[i]` is due, ns from the run's start, ascending.

    `sha256` covers due times, prompts, lengths and sampling, not the salt: two plans with the same hash ask
    for the same work at the same times.
    """

    requests: tuple[Request, ...]
    due_ns: array[int]
    seed: int
    sha256: str
