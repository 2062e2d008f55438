"""Our own modules as processes beside us, on a leash: they end when we do, however we end.

The leash is the child's standard input. One line of JSON tells it what to do, further lines are commands,
and its end means that the parent is gone, killed -9 included.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_OURS = Path(__file__).resolve().parents[2]


def spawn(module: str, task: Mapping[str, object]) -> subprocess.Popen[bytes]:
    """Starts `python -m module` in its own session, so that a Ctrl-C in our terminal does not reach it."""
    if os.name != "posix":
        raise NotImplementedError(
            f"servers are started and watched on Linux and macOS, this is {sys.platform}: "
            "start the server yourself and attach to it, or use WSL"
        )
    paths = [str(_OURS), os.environ.get("PYTHONPATH", "")]
    child = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        start_new_session=True,
    )
    tell(child, json.dumps(task))
    return child


def tell(child: subprocess.Popen[bytes], line: str) -> None:
    """Sends one line; one who has gone already need not hear it."""
    assert child.stdin is not None
    try:
        child.stdin.write(line.encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass


def first_line(descriptor: int) -> bytes:
    """The child's task, read byte by byte, so that `select` on the descriptor sees all that comes after."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            sys.exit("this process is started by burstline, with its task on standard input")
        line += byte
    return line
