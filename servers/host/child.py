"""Our own modules as processes beside us, on a leash: they end when we do, however we end.

The leash is the child's standard input: one line of JSON tells it what to do, further lines are commands,
and its end means that the parent is gone, killed -9 included. A process that the parent forked may hold the
input open for longer, so the child looks at times who its parent is, too.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from servers.engine import EngineError

_OURS = Path(__file__).resolve().parents[2]


def spawn(module: str, task: Mapping[str, object]) -> subprocess.Popen[bytes]:
    """Starts `python -m module` in its own session, so that a Ctrl-C in our terminal does not reach it."""
    if os.name != "posix":
        raise EngineError(
            f"servers are started and watched on Linux and macOS, this is {sys.platform}: "
            "use WSL, or start the server yourself and attach to it"
        )
    paths = [str(_OURS), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
    )
    tell(child, task)
    return child


def tell(child: subprocess.Popen[bytes], what: Mapping[str, object]) -> None:
    """Sends one JSON object; a child that has gone already need not hear it."""
    assert child.stdin is not None
    unsent = json.dumps(what).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while unsent:
            unsent = unsent[os.write(child.stdin.fileno(), unsent) :]


def next_line(descriptor: int) -> bytes:
    """In the child: one line of its input, b"" at its end; byte by byte, so that `select` sees the rest."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return b""
        line += byte
    return line
