"""The watcher's newest readings, for the display of a run that goes on."""

from __future__ import annotations

import json
from pathlib import Path

Key = tuple[str, str]


class Live:
    """Follows a telemetry file as it grows; asks nothing of the processes that measure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._latest: dict[Key, tuple[int, float]] = {}
        self._rate: float | None = None

    def refresh(self) -> None:
        """Take in what was written since the last time; a line that is not whole yet waits."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        for line in whole.splitlines():
            at_ns, source, name, value, *_ = json.loads(line)
            if value is not None:
                self._take((source, name), at_ns, value)

    @property
    def memory_bytes(self) -> float | None:
        """The server's resident memory, None until it was seen."""
        seen = self._latest.get(("server", "rss_bytes"))
        return None if seen is None else seen[1]

    @property
    def tok_per_s(self) -> float | None:
        """Generated tokens per second between the engine's last two counts; None where it does not count."""
        return self._rate

    def _take(self, key: Key, at_ns: int, value: float) -> None:
        before = self._latest.get(key)
        self._latest[key] = at_ns, value
        if key == ("engine", "generation_tokens") and before is not None and at_ns > before[0]:
            self._rate = (value - before[1]) / ((at_ns - before[0]) / 1e9)
