"""A server that knows the truth for `peers.py`, and what its log says of a burst."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from peer_tools import Reported

sys.path.insert(0, str(Path(__file__).parents[2]))

from wire import build

from tests.truth.rig import truth_server
from tests.truth.script import Script


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

    def as_reported(self, n_output_tok: int, itl_per_request: bool) -> Reported:
        """What a faultless client would report, but for the way to the server and back."""
        rows = zip(self.arrived_ns, self.token_ns, strict=True)
        whole = [(at, ns) for at, ns in rows if len(ns) == n_output_tok]
        gaps = [np.diff(ns) for _, ns in whole]
        itl = [gap.mean() for gap in gaps] if itl_per_request else np.concatenate(gaps)
        ttft, e2e = ([ns[i] - at for at, ns in whole] for i in (0, -1))
        values = *np.percentile(ttft, [50]), *np.percentile(itl, [50, 99]), *np.percentile(e2e, [50, 99])
        return Reported(len(whole), *(float(ns) / 1e6 for ns in values))

    @property
    def ended_ns(self) -> int:
        """When the last token of all was sent."""
        return max(int(ns[-1]) for ns in self.token_ns if len(ns))

    @property
    def n_events(self) -> int:
        return sum(map(len, self.token_ns))

    @property
    def spread_ms(self) -> float:
        """From the burst's first byte to its last."""
        return float(self.arrived_ns.max() - self.first_ns.min()) / 1e6

    @property
    def most_in_flight(self) -> int:
        ends = np.array([ns[-1] for ns in self.token_ns if len(ns)])
        steps = np.repeat([1, -1], [len(self.arrived_ns), len(ends)])
        at = np.argsort(np.concatenate([self.arrived_ns, ends]), kind="stable")
        return int(np.cumsum(steps[at]).max())

    def late_ms(self, shape: Shape) -> float:
        """By how much the server itself sent after its script, p99."""
        rows = zip(self.arrived_ns, self.token_ns, strict=True)
        due = [at + 1000 * (shape.ttft_us + shape.gap_us * np.arange(len(ns))) for at, ns in rows]
        return float(np.percentile(np.concatenate(self.token_ns) - np.concatenate(due), 99)) / 1e6


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


@contextmanager
def python_server(shape: Shape, folder: Path) -> Serving:
    """The server that certifies, where there is no C compiler; good for 25,000 events a second."""
    script = Script(ttft_s=shape.ttft_us / 1e6, gaps_s=(shape.gap_us / 1e6,), stamp=False)
    with truth_server(script) as rig:

        def log() -> Truth:
            rows = [row for row in rig.log() if row.token_ns]
            at = np.array([(row.first_byte_ns, row.arrival_ns) for row in rows])
            return Truth(at[:, 0], at[:, 1], [np.array(row.token_ns) for row in rows])

        yield int(rig.url.rsplit(":", 1)[1]), log
