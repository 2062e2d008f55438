"""What the wire did for one request: times and bytes, not yet parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import numpy as np
from numpy.typing import NDArray

from burstline.servers.messages import Read

NO_STAMP = -(2**63)
"""In a column of stamps: there is none."""

MAX_REPLY_BYTES = 1 << 28
"""The most bytes of one reply that are ever kept."""


def reply_limit_bytes(n_prompt_tok: int, n_output_tok: int) -> int:
    """The most bytes that a reply to such a request may take before its exchange ends as `too_large`.

    Generous for every dialect: 4 KiB an event, the prompt's ids or text once, the whole text so far in each
    event (SGLang's cumulative streams), and 256 KiB for heads and error pages.
    """
    wanted = (1 << 18) + 64 * n_prompt_tok + 4096 * n_output_tok + 8 * n_output_tok**2
    return min(wanted, MAX_REPLY_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Reads(Sequence[Read]):
    """The reads of one reply, kept by column: a sequence of `Read` that costs a fifth of their memory.

    `at_ns` and `kernel_ns` (NO_STAMP where the kernel gave none) are int64, one per read; `ends[i]` is the
    offset in `data` just past read i. `since_ns[i]` bounds how long before `at_ns[i]` its first byte can have
    arrived; -1 where that was not recorded.
    """

    at_ns: NDArray[np.int64]
    kernel_ns: NDArray[np.int64]
    ends: NDArray[np.int64]
    data: bytes
    since_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if len(self.since_ns) != len(self.at_ns):
            object.__setattr__(self, "since_ns", np.full(len(self.at_ns), -1, np.int64))

    @classmethod
    def of(cls, reads: Sequence[Read]) -> Reads:
        if isinstance(reads, Reads):
            return reads
        return cls(
            np.array([read.at_ns for read in reads], dtype=np.int64),
            np.array([NO_STAMP if r.kernel_ns is None else r.kernel_ns for r in reads], dtype=np.int64),
            np.cumsum([len(read.data) for read in reads], dtype=np.int64),
            b"".join(read.data for read in reads),
        )

    def __len__(self) -> int:
        return len(self.at_ns)

    @overload
    def __getitem__(self, index: int) -> Read: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Read, ...]: ...
    def __getitem__(self, index: int | slice) -> Read | tuple[Read, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = range(len(self))[index]
        kernel_ns = int(self.kernel_ns[index])
        start = int(self.ends[index - 1]) if index else 0
        return Read(
            int(self.at_ns[index]),
            None if kernel_ns == NO_STAMP else kernel_ns,
            self.data[start : int(self.ends[index])],
        )


@dataclass(frozen=True, slots=True)
class Capture:
    """Everything seen on the wire for one planned request; nothing is parsed.

    All times are ns from the run's start on the monotonic clock, None where it never happened:
    `dispatched_ns` a slot was granted, `connected_ns` the connection stood (None where one was used again,
    negative where it was opened ahead of the run), `sent_ns` the request was fully written, `closed_ns` the
    reply ended or failed. `failure` names what broke the exchange: connect, reset, truncated, too_large,
    timeout, cancelled, not_sent, hung_up (the client had all it asked for), abandoned (it
    hung up in the middle, as planned); None where the reply is whole in
    HTTP's own terms. `detail` is the error's own text.
    """

    index: int
    due_ns: int
    dispatched_ns: int | None
    connected_ns: int | None
    sent_ns: int | None
    closed_ns: int | None
    reads: Sequence[Read]
    failure: str | None = None
    detail: str | None = None

    def in_clock(self, shift_ns: float, factor: float) -> Capture:
        """The same on another clock, on which t ns reads `shift_ns + factor * t`.

        A due time of the plan stays; that of a closed loop is the moment of dispatch and moves with it.
        """

        def moved(at_ns: int | None) -> int | None:
            return None if at_ns is None else round(shift_ns + factor * at_ns)

        reads = Reads.of(self.reads)
        # A float64 counts nanoseconds exactly for 104 days.
        at_ns = np.rint(shift_ns + factor * reads.at_ns).astype(np.int64)
        lag_ns = reads.at_ns - reads.kernel_ns
        kernel_ns = np.where(reads.kernel_ns == NO_STAMP, NO_STAMP, at_ns - lag_ns)
        is_dispatch = self.due_ns == self.dispatched_ns
        return replace(
            self,
            due_ns=round(shift_ns + factor * self.due_ns) if is_dispatch else self.due_ns,
            dispatched_ns=moved(self.dispatched_ns),
            connected_ns=moved(self.connected_ns),
            sent_ns=moved(self.sent_ns),
            closed_ns=moved(self.closed_ns),
            reads=replace(reads, at_ns=at_ns, kernel_ns=kernel_ns),
        )
