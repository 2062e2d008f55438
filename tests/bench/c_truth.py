"""The known-truth server in C, and what its log says of a burst."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from wire import build


@dataclass(frozen=True, slots=True)
class Shape:
    """The load: so many streams of so many tokens, and the server's script for each."""

    n_streams: int
    n_prompt_tok: int
    n_output_tok: int
    ttft_us: int
    gap_us: int


@dataclass(frozen=True, slots=True)
class Truth:
    """What the server did, one row per request: ns on the monotonic clock."""

    first_ns: np.ndarray
    arrived_ns: np.ndarray
    token_ns: list[np.ndarray]

    def last(self, n: int) -> Truth:
        """The burst alone, without the tool's probes and warm-ups before it."""
        chosen = np.argsort(self.arrived_ns, kind="stable")[-n:]
        return Truth(self.first_ns[chosen], self.arrived_ns[chosen], [self.token_ns[i] for i in chosen])

    def answered_s_before(self, n: int) -> float:
        """How long answering took, of all requests before the last `n`: a tool's own, one after another."""
        before = np.argsort(self.arrived_ns, kind="stable")[:-n]
        took_ns = [self.token_ns[i][-1] - self.arrived_ns[i] for i in before if len(self.token_ns[i])]
        return float(sum(took_ns)) / 1e9

    @property
    def ended_ns(self) -> int:
        """When the last token of all was sent."""
        return max(int(ns[-1]) for ns in self.token_ns if len(ns))

    @property
    def spread_ms(self) -> float:
        """From the burst's first byte to its last."""
        return float(self.arrived_ns.max() - self.first_ns.min()) / 1e6


Serving = Iterator[tuple[int, Callable[[], Truth]]]


@contextmanager
def c_server(shape: Shape, folder: Path) -> Serving:
    """The server in C: its port, and its log, which ends it."""
    n = shape.n_output_tok
    words = ["0", str(n), str(shape.ttft_us), str(shape.gap_us), folder / "log", str(shape.n_prompt_tok)]
    with subprocess.Popen([build("truth"), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:

        def log() -> Truth:
            process.communicate()
            rows = np.fromfile(folder / "log", np.int64).reshape(-1, 3 + n)
            return Truth(rows[:, 0], rows[:, 1], [row[3 : 3 + row[2]] for row in rows])

        yield int(process.stdout.readline()), log
        process.stdin.close()
