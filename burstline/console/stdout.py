"""Output that survives a closed pipe: `burstline compare ... | head` keeps its exit code.

All that a person reads passes here, and here text loses what could steer a terminal and every known secret.
"""

import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, TextIO

import orjson

from burstline.servers.redact import printable, without_known

_PLAIN = "→ -> ← <- ↑ ^ ↓ v ± +- × x µ u – - − - ⁻ ^- … ... ≤ <= ≥ >= ∞ inf ✓ + ✕ x ★ * · - › >"
_RAISED = {raised: f"[{k}]" for k, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
SIGNS: Final = str.maketrans(dict(re.findall(r"(\S) (\S+)", _PLAIN)) | _RAISED | {"\u00a0": " "})
"""What stands for our signs where the terminal's encoding lacks some of them."""


class _Outlet:
    """A text stream; once it cannot be written (its reader or its terminal has gone, its disk is full) all
    that is written goes nowhere, without an error: a run needs no terminal.

    A character that the terminal's encoding lacks, or that would steer it, is written as its escape, one of
    ours as `signs` says. `raw` is the same stream for a display that draws with control sequences of its own.
    `lost` is why a reader who is still there lacks a part: a full disk.
    """

    def __init__(self, stream: TextIO, *, raw: bool = False) -> None:
        self._stream = stream
        self._is_raw = raw
        self.lost: OSError | None = None
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        ours, encoding = "".join(map(chr, SIGNS)), stream.encoding or "utf-8"
        self.signs = {} if ours.encode(encoding, "ignore").decode(encoding) == ours else SIGNS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def raw(self) -> "_Outlet":
        return _Outlet(self._stream, raw=True)

    def write(self, text: str) -> int:
        if not self._is_raw:
            text = printable(without_known(text))
        try:
            return self._stream.write(text.translate(self.signs))
        except OSError as error:
            self._seal(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._seal(error)

    def _seal(self, error: OSError) -> None:
        if error.errno not in (errno.EPIPE, errno.EIO):
            self.lost = error
        # What the stream still holds would raise again when Python ends, and make that the exit code.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def json_text(value: Any) -> str:
    """Indented JSON that every encoding has the letters for; NaN and infinity become null."""
    return json.dumps(orjson.loads(orjson.dumps(value)), indent=2)


@contextlib.contextmanager
def outlets() -> Iterator[_Outlet]:
    """Within it standard output, which it gives, and standard error are outlets; flushed at its end.

    Python has None for one that was closed before it began (`>&-`): then it leads nowhere.
    """
    before = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = own = [_Outlet(stream or nowhere) for stream in before]
        try:
            yield own[0]
        finally:
            for stream in own:
                stream.flush()
            sys.stdout, sys.stderr = before
