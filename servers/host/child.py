"""Our own processes beside us: modules on a leash, which end when we do, however we end, and forked helpers.

The leash is the child's standard input: one line of JSON tells it what to do, further lines are commands,
and its end means that the parent is gone, killed -9 included. A process that the parent forked may hold the
input open for longer, so the child also checks now and then whether its parent is still the same.

Every child is a session of its own, so that Ctrl-C in a terminal reaches only the parent, and runs under
`-P`: a `psutil.py` or a `servers/` in the working directory is never imported.
"""

import contextlib
import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, NoReturn

_OURS = Path(__file__).resolve().parents[2]
_LOOK_AROUND_S = 2.0
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""This variable sets how many threads numpy starts. The default is one per core: they spin without work."""


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
        from servers.messages import EngineError

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
        env={BLAS_THREADS: "1"} | os.environ | {"PYTHONPATH": import_path()},
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


def can_fork() -> bool:
    """Whether a copy of this process can work: no other thread holds a lock that the copy would wait for."""
    return sys.platform == "linux" and threading.active_count() == 1


class Forked:
    """A copy of this process that writes to a pipe, which is read from `stdout`, and ends; see `can_fork`.

    It imports nothing anew. Of open files it has standard ones and those to `keep`: others wait for the end
    of the rest. Ctrl-C in a terminal does not reach it.
    """

    stdin = stderr = None

    def __init__(self, work: Callable[[IO[bytes]], None], keep: Sequence[int] = ()) -> None:
        receive, send = os.pipe()
        with warnings.catch_warnings():
            # Python 3.12 warns of threads. Those that are left belong to OpenBLAS and Arrow, are idle, and
            # are replaced after a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self.pid = os.fork()
            except OSError:
                os.close(receive)
                os.close(send)
                raise
        if self.pid == 0:
            try:
                os.setsid()
                gc.freeze()  # what is not collected stays shared, and closes no file
                for low, high in pairwise([2, *sorted((send, *keep)), os.sysconf("SC_OPEN_MAX")]):
                    os.closerange(low + 1, high)
                with os.fdopen(send, "wb") as pipe:
                    work(pipe)
            finally:
                os._exit(0)
        os.close(send)
        self.stdout: IO[bytes] = os.fdopen(receive, "rb")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. No timeout: it ends as soon as its pipe has been read or closed."""
        del timeout
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def end(child: subprocess.Popen[bytes] | Forked, grace_s: float) -> int:
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


def end_now(code: int = 0) -> NoReturn:
    """End this process, whose work is done and kept: Python would take 60 ms, for which the parent waits."""
    sys.stdout.flush()
    os._exit(code)


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
