"""Our own modules as processes beside us, on a leash: they end when we do, however we end.

The leash is the child's standard input: one line of JSON tells it what to do, further lines are commands,
and its end means that the parent is gone, killed -9 included. A process that the parent forked may hold the
input open for longer, so the child also checks now and then whether its parent is still the same.

Every child is a session of its own, so that Ctrl-C in a terminal reaches only the parent, and runs under
`-P`: a `psutil.py` or a `servers/` in the working directory is never imported.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from servers.engine import EngineError

_OURS = Path(__file__).resolve().parents[2]
_LOOK_AROUND_S = 2.0


def command(module: str) -> tuple[str, ...]:
    """The command line that runs one of our modules, whatever lies in the working directory."""
    return (sys.executable, "-P", "-m", module)


def import_path() -> str:
    """The PYTHONPATH under which `command` finds our modules: where we are, then what the user has set."""
    theirs = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(_OURS), *filter(None, theirs)])


def spawn(
    module: str,
    task: Mapping[str, object] | None = None,
    *,
    pass_fds: Sequence[int] = (),
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start one of our modules; its standard output is a pipe. Without a task it imports and waits."""
    if os.name != "posix":
        raise EngineError(
            f"servers are started and watched on Linux and macOS, this is {sys.platform}: "
            "use WSL, or start the server yourself and attach to it"
        )
    child = subprocess.Popen(
        command(module),
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=os.environ | {"PYTHONPATH": import_path()},
        start_new_session=True,
        pass_fds=pass_fds,
    )
    if task is not None:
        tell(child, task)
    return child


def tell(child: subprocess.Popen[bytes], what: Mapping[str, object]) -> None:
    """Sends one JSON object; a child that has gone already need not hear it."""
    assert child.stdin is not None
    unsent = json.dumps(what).encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while unsent:
            unsent = unsent[os.write(child.stdin.fileno(), unsent) :]


def end(child: subprocess.Popen[bytes], grace_s: float) -> int:
    """Let go of the leash, wait, kill after the grace; the exit code."""
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    try:
        return child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


# In the child.


def next_line(descriptor: int) -> bytes:
    """One line of the input, b"" at its end; byte by byte, so that `select` sees the rest."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return b""
        line += byte
    return line


def end_now() -> NoReturn:
    """End this process, whose work is done and kept: Python would take 60 ms, for which the parent waits."""
    sys.stdout.flush()
    os._exit(0)


def end_with_parent(grace_s: float = 0.0, sleep: Callable[[float], None] = time.sleep) -> None:
    """From now on end this process, after the grace, when its standard input or its parent has ended.

    For children that take no further commands.
    """
    parent = os.getppid()

    def hold() -> None:
        with contextlib.suppress(OSError):
            while os.getppid() == parent:
                if select.select([0], [], [], _LOOK_AROUND_S)[0] and not os.read(0, 4096):
                    break
        sleep(grace_s)
        os._exit(1)

    threading.Thread(target=hold, name="leash", daemon=True).start()
