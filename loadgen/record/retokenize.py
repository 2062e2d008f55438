"""Replies whose tokens the server did not count, with their text, for a tokenizer to count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from loadgen.record.capture import Capture
from loadgen.record.capture_store import read_captures
from loadgen.record.record import Decode
from loadgen.wire import http1
from servers.engine import EngineError, Reply
from servers.protocol.replies import understood

GLANCE: Final = 32
"""A server that counted so many replies, and left none uncounted, counts: the others need no look."""


def uncounted(captures: Path, decode: Decode) -> Iterator[tuple[int, str]]:
    """The index and the text of each reply without a token count, in the order in which they ended.

    Where a server counts, a reply that was cut off before its count may be left out.
    """
    n_counted = n_found = 0
    for capture in read_captures(captures):
        reply = _reply(capture, decode)
        if reply is None:
            continue
        if reply.text is not None:
            n_found += 1
            yield capture.index, reply.text
        elif reply.n_output_ids is not None or reply.n_output_usage is not None:
            n_counted += 1
            if n_counted == GLANCE and not n_found:
                return


def _reply(capture: Capture, decode: Decode) -> Reply | None:
    try:
        parsed = http1.parse(capture.reads)
    except EngineError:
        return None
    return understood(decode, parsed[0]) if parsed else None
