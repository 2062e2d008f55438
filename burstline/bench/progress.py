"""The progress display: drawn by the main process from files and counters that other processes write."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from burstline.servers.redact import printable, without_known

if TYPE_CHECKING:  # imported where it draws: a run in a pipe draws nothing
    from rich.console import Console
    from rich.live import Live

PLAIN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a run stands. `tok`, `tok_per_s` and `memory_bytes` are None until the watcher has seen them.

    `planned_tok` are the output tokens of all requests, 0 where that is not known. `spare`: the plan has more
    than are needed; `until_s`: none starts later; `last_due_s`: then the last is due. `unsent` were given up.
    """

    planned: int
    sent: int
    first_tokens: int
    done: int
    failed: int
    elapsed_s: float
    n_bytes: int = 0
    planned_tok: int = 0
    tok: float | None = None
    tok_per_s: float | None = None
    memory_bytes: float | None = None
    spare: bool = False
    until_s: float | None = None
    unsent: int = 0
    last_due_s: float = 0.0

    @property
    def share(self) -> float:
        """How much of the load is served: by its time, its output tokens where counted, or its requests."""
        if self.until_s is not None:
            return min(self.elapsed_s / self.until_s, 1.0)
        requests = (self.done + self.failed + self.unsent) / self.planned if self.planned else 0.0
        tokens = (self.tok or 0.0) / self.planned_tok if self.planned_tok else 0.0
        return min(max(requests, tokens), 1.0)

    @property
    def left(self) -> str:
        """The time left: exact where the load ends by time, at least until the last request is due, else "".

        A closed loop goes on as it went, from a tenth on. A burst speeds up once its prompts are computed:
        before half of its requests have ended, nothing is said.
        """
        if self.until_s is not None:
            return f"{max(0.0, self.until_s - self.elapsed_s):.0f} s left"
        ended, all_sent = (self.done + self.failed + self.unsent) / self.planned, self.sent >= self.planned
        due_s = self.last_due_s - self.elapsed_s
        if not self.spare and not all_sent and due_s >= 1:
            return f"at least {due_s:.0f} s left"
        if self.spare or ended < (0.5 if all_sent else 0.1):
            return ""
        left_s = self.elapsed_s / self.share * (1 - self.share)
        if all_sent and self.tok_per_s and self.planned_tok:
            left_s = min(left_s, self.planned_tok * (1 - self.share) / self.tok_per_s)
        return f"about {left_s:.0f} s left"

    def __str__(self) -> str:
        """One line, e.g. `1000/1000 sent, 873 first tokens, 512 done, 0 failed, 812 tok/s, 21 s left`."""
        sent = f"{self.sent}" if self.spare else f"{self.sent}/{self.planned}"
        facts = [f"{sent} sent", f"{self.first_tokens} first tokens", f"{self.done} done"]
        facts.append(f"{self.failed} failed")
        facts += [f"{self.unsent} not {'needed' if self.spare else 'sent'}"] * bool(self.unsent)
        memory_gb = None if self.memory_bytes is None else self.memory_bytes / 1e9
        # The server's count is a second old: at the end it would be read as all tokens.
        tok = self.tok if self.done + self.failed < self.sent else None
        rest = {"{:,.0f} tokens": tok, "{:,.0f} tok/s": self.tok_per_s, "{:.2f} GB": memory_gb}
        facts += [form.format(n) for form, n in rest.items() if n is not None]
        return ", ".join(filter(None, [*facts, self.left]))


class Progress:
    """Says where the run is; this one is silent. `phase` opens a new part, `update` reports on the load."""

    def phase(self, text: str) -> None: ...
    def update(self, snapshot: Snapshot) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Called(Progress):
    """Calls a function with each phase as a text, and during the load with each snapshot."""

    call: Callable[[str | Snapshot], object]

    def phase(self, text: str) -> None:
        self.call(printable(without_known(text)))

    def update(self, snapshot: Snapshot) -> None:
        self.call(snapshot)


class Plain(Progress):
    """A line per phase, and one every ten seconds of load: for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_s, self._said = 0.0, set[str]()

    def phase(self, text: str) -> None:
        self._next_s = 0.0
        if text not in self._said:  # runs at one server repeat most of it
            print(text, file=self._stream, flush=True)
            self._said.add(text)

    def update(self, snapshot: Snapshot) -> None:
        if snapshot.elapsed_s >= self._next_s:
            self._next_s = snapshot.elapsed_s + PLAIN_EVERY_S
            print(f"  {snapshot}", file=self._stream, flush=True)


class Rich(Progress):
    """One live line under the phases, redrawn only when told (no thread of its own)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._said = set[str]()

    def phase(self, text: str) -> None:
        self.close()
        if text in self._said:
            return
        self._said.add(text)
        from rich.text import Text

        # Not as markup: a server's log may hold brackets.
        line = Text.assemble(("› ", "bold"), printable(without_known(text)))
        self._console.print(line, highlight=False)

    def update(self, snapshot: Snapshot) -> None:
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        line, bar = Table.grid(padding=(0, 2)), ProgressBar(total=1.0, completed=snapshot.share, width=16)
        line.add_row("  ", bar, str(snapshot))
        if self._live is None:
            self._live = Live(line, console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        self._live.update(line, refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def progress_for(quiet: bool, stream: TextIO | None = None) -> Progress:
    """The display that suits the stream (standard error): live on a terminal, plain lines elsewhere."""
    if quiet:
        return Progress()
    stream = stream or sys.stderr
    if not stream.isatty():
        return Plain(stream)
    from rich.console import Console

    return Rich(Console(file=getattr(stream, "raw", stream)))


class LiveTelemetry:
    """Follows a telemetry file as it grows; asks nothing of the processes that measure.

    None until they were seen: the server's resident memory, the tokens since the engine's first count, and
    those per second between its last two; None where none came, or fewer than the client has.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.memory_bytes: float | None = None
        self.tok: float | None = None
        self.tok_per_s: float | None = None
        self._count, self._base, self._rate, self._begun = (0, 0.0), math.nan, 0.0, 0.0

    def refresh(self, begun: int = 0) -> None:
        """Take in what was written since the last time; `begun` replies have a token at least."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            at_ns, source, name, value, *_ = json.loads(line)
            if value is not None and (source, name) == ("server", "rss_bytes"):
                self.memory_bytes = value
            elif value is not None and (source, name) == ("engine", "generation_tokens"):
                if math.isnan(self._base):
                    self._base = value
                elif at_ns > self._count[0]:
                    self._rate = (value - self._count[1]) / ((at_ns - self._count[0]) / 1e9)
                # Below what had come by the reading before, it counts replies at their ends: no live count.
                self._begun = begun if value - self._base >= self._begun else math.inf
                self._count = (at_ns, value)
        known = (self._count[1] - self._base, self._rate or None)
        self.tok, self.tok_per_s = known if known[0] >= max(begun, self._begun) else (None, None)
