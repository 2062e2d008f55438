"""What replies wait for: a queue with a textbook answer, and a prefix cache that remembers every prompt."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapreplace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from burstline.servers.truth.replies import Prompt
from burstline.workloads.prompts import rng
from burstline.workloads.request import WorkloadError

_BLOCK = 4096


def departures(arrivals_s: ArrayLike, services_s: ArrayLike, n_servers: int = 1) -> NDArray[np.float64]:
    """When each customer leaves: arrivals ascending, one service time each, any unit.

    Lindley's recursion for one server, D_k = max(A_k, D_{k-1}) + S_k, unrolled as
    D_k = B_k + max_{j<=k}(A_j - B_{j-1}) with B the sum of services; for more, each customer takes the server
    that is free first (Kiefer & Wolfowitz 1955).
    """
    arrivals = np.asarray(arrivals_s, dtype=np.float64)
    services = np.asarray(services_s, dtype=np.float64)
    if n_servers == 1:
        busy = np.cumsum(services)
        return np.asarray(busy + np.maximum.accumulate(arrivals - (busy - services)))
    free = [-np.inf] * n_servers
    left = np.empty(len(arrivals))
    for k, (arrival, service) in enumerate(zip(arrivals.tolist(), services.tolist(), strict=True)):
        left[k] = max(arrival, free[0]) + service
        heapreplace(free, left[k])
    return left


def service_times(mean_s: float, cv: float, seed: int) -> Iterator[float]:
    """Service times without end: gamma of this mean and coefficient of variation.

    cv 1 is exponential (M/M/c), 0 constant (M/D/c), anything else M/G/c.
    """
    draws = rng(seed, "truth.service")
    while True:
        if cv == 0:
            yield from [mean_s] * _BLOCK
        else:
            yield from draws.gamma(cv**-2, mean_s * cv**2, _BLOCK).tolist()


@dataclass(slots=True)
class Queue:
    """The same recursion one arrival at a time, in ns; arrivals are served in the order they are admitted."""

    n_servers: int
    mean_s: float
    cv: float = 1.0
    seed: int = 0
    _free_ns: list[int] = field(init=False)
    _services_s: Iterator[float] = field(init=False)
    _starts_ns: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        if self.n_servers < 1 or self.mean_s <= 0 or self.cv < 0:
            raise WorkloadError(
                f"queue of {self.n_servers} servers, mean service {self.mean_s} s, cv {self.cv}: "
                "expected at least 1, above 0, and 0 or more"
            )
        self.reset()

    def __reduce__(self) -> tuple[type["Queue"], tuple[int, float, float, int]]:
        """A copy in another process begins empty."""
        return Queue, (self.n_servers, self.mean_s, self.cv, self.seed)

    def reset(self) -> None:
        """Empties the queue and starts the service times anew."""
        self._free_ns = [0] * self.n_servers
        self._services_s = service_times(self.mean_s, self.cv, self.seed)
        self._starts_ns = deque()

    def admit(self, arrival_ns: int) -> tuple[int, int]:
        """When this arrival's service starts, and when it departs."""
        start_ns = max(arrival_ns, self._free_ns[0])
        departure_ns = start_ns + round(next(self._services_s) * 1e9)
        heapreplace(self._free_ns, departure_ns)
        self._starts_ns.append(start_ns)
        return start_ns, departure_ns

    def waiting(self, now_ns: int) -> int:
        """How many have arrived and not started: they start in the order in which they came."""
        while self._starts_ns and self._starts_ns[0] <= now_ns:
            self._starts_ns.popleft()
        return len(self._starts_ns)


BLOCK_TOK = 16


@dataclass(slots=True)
class PrefixCache:
    """Remembers every whole block of 16 tokens (or words of a text) with all that stood before it.

    Like a real one (vLLM hashes blocks so) it never serves a whole prompt: some of it stays to be computed.
    """

    _seen: set[int] = field(default_factory=set)

    def reset(self) -> None:
        self._seen.clear()

    def look_up(self, prompt: Prompt) -> int:
        """How many of the prompt's first tokens were seen before, a multiple of 16; then remembers it all."""
        tokens = prompt.split() if isinstance(prompt, str) else prompt
        n_cached_tok = 0
        hit = True
        chain = 0
        for begin in range(0, len(tokens) - BLOCK_TOK, BLOCK_TOK):
            chain = hash((chain, tuple(tokens[begin : begin + BLOCK_TOK])))
            hit = hit and chain in self._seen
            n_cached_tok += BLOCK_TOK * hit
            self._seen.add(chain)
        return n_cached_tok
