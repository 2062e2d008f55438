"""Our helper processes: one way to start them, to talk to them and to end them.

A child runs `main(home, task)` of one of our modules. `home` is a `multiprocessing.connection` to its parent;
the first message on it is the task, with the secrets that the child must not write. Its end means that the
parent is gone, killed -9 included. A process that the parent forked may hold the other end open for longer:
it also checks now and then whether its parent is still the same. Messages are pickled: both ends are ours.

Every child is a session of its own, so that Ctrl-C in a terminal reaches only the parent, and runs under
`-P`: a `psutil.py` or a `servers/` in the working directory is never imported.
"""

import importlib
import math
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, Self

from burstline.servers.messages import EngineError
from burstline.servers.redact import known_secrets, learn

_OURS = Path(__file__).parents[3]
_LOOK_AROUND_MS = 2000
_LAST_BYTES = 2000
END_S = 2.0
"""How long a child may take to end once its connection has ended, and once it was killed: it may wait for a
device."""
SILENT_S = 3.0
"""How long a child may say nothing while it is at work or asked to stop: it says something each second."""
TAKE_S, GIVE_S = 60.0, 10.0
"""How long a child may take nothing of a message, which it reads after its imports, and give nothing of one
that it has begun."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""This variable sets how many threads numpy starts. The default is one per core: they spin without work."""


class ChildLostError(RuntimeError):
    """A child has ended, or did not answer in time: its name, and how."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The last message of a child: what it raised, for the parent to raise; the place is its last note."""

    error: Exception

    @classmethod
    def of(cls, error: Exception) -> Self:
        """The error itself where it can be pickled, with the trace in words: a traceback cannot."""
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 our own bytes
        except Exception:
            return cls(RuntimeError("".join(traceback.format_exception(error))))
        error.add_note(f"in process {os.getpid()}:\n{''.join(traceback.format_tb(error.__traceback__))}")
        place = traceback.extract_tb(error.__traceback__)[-1]
        error.add_note(f"{place.filename.removeprefix(f'{_OURS}/')}:{place.lineno}")
        return cls(error)


class Child(AbstractContextManager["Child", None]):
    """One of our modules in a process of its own. Leaving it as a context manager ends it."""

    def __init__(self, module: str, name: str = "", *, orphan_grace_s: float = 0.0) -> None:
        """Start it: it imports, and waits for its task, the first message.

        `orphan_grace_s` is how long it may live on when its parent has ended; with infinity it ends itself.
        """
        if sys.platform != "linux":
            raise EngineError(f"loads are sent from Linux, this is {sys.platform}: use WSL or a container")
        self.name = name or f"the process {module}"
        self.connection, theirs = Pipe()
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            limit_waits(ours, TAKE_S, GIVE_S)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 it has no name, and ends with us
        self._said, self._has_task = "", False
        fd = theirs.fileno()
        begin = f"from {__name__} import begin; begin()"
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-c", begin, module, str(fd), str(orphan_grace_s)),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={BLAS_THREADS: "1"} | os.environ | {"PYTHONPATH": import_path()},
                start_new_session=True,
                pass_fds=(fd,),
            )
        except BaseException:
            self.connection.close()
            self._output.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, minus the signal's number where one killed it; None while it runs."""
        return self._process.poll()

    def send(self, message: object) -> None:
        """Send a message; a child that has ended need not have it: the next `receive` says so.

        One that was stopped goes on, else a message that fills the connection would wait for ever.
        """
        self._process.send_signal(signal.SIGCONT)
        with suppress(OSError):
            self.connection.send(message if self._has_task else (known_secrets(), message))
        self._has_task = True

    def receive(self, timeout_s: float = 0.0) -> Any:
        """Its next message. Raises what it raised, and ChildLostError where it has ended or is late."""
        try:
            if not self.connection.poll(timeout_s):
                within = f"within {timeout_s:g} s" if timeout_s else "in time"
                raise ChildLostError(f"{self.name} did not answer {within}")
            message = self.connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):  # it is ending: the exit code says how
                self._process.wait(END_S)
            how = "closed its connection" if self.exit_code is None else self.how_it_ended()
            raise ChildLostError(f"{self.name} {how}") from None
        if isinstance(message, Failed):
            raise message.error
        return message

    def how_it_ended(self) -> str:
        """`ended with exit code 1: OSError: ...`: the last line of what it printed says why."""
        words = self.last_words().splitlines()
        return how_it_ended(self.exit_code) + (f": {words[-1]}" if words and self.exit_code else "")

    def last_words(self) -> str:
        if self._output.closed:
            return self._said
        output = self._output.fileno()
        begin = max(0, os.fstat(output).st_size - _LAST_BYTES)
        return os.pread(output, _LAST_BYTES, begin).decode(errors="replace")

    def kill(self) -> None:
        self._process.kill()

    def ask_to_end(self) -> None:
        """End the connection; one that was stopped goes on, to end."""
        self.connection.close()
        self._process.send_signal(signal.SIGCONT)

    def end(self, grace_s: float = END_S) -> int | None:
        """Ask it to end, wait, kill after the grace; its exit code. A second time does nothing."""
        self.ask_to_end()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        if self.exit_code is None:
            self.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._said = self.last_words()
        self._output.close()
        return self.exit_code

    def __exit__(self, *_: object) -> None:
        self.end()


def limit_waits(peer: socket.socket, take_s: float, give_s: float) -> None:
    """A send or a read that the other side holds up for longer raises OSError; for sockets that block."""
    for option, limit_s in ((socket.SO_SNDTIMEO, take_s), (socket.SO_RCVTIMEO, give_s)):
        limit = struct.pack("ll", *divmod(round(limit_s * 1e6), 1_000_000))
        with suppress(OSError):  # a sandbox may refuse
            peer.setsockopt(socket.SOL_SOCKET, option, limit)


def how_it_ended(exit_code: int | None) -> str:
    """`ended with exit code 3`, or `was killed by signal 15 (SIGTERM)`."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    names = {number.value: number.name for number in signal.Signals}
    cause = "often: out of memory" if exit_code == -signal.SIGKILL else names.get(-exit_code, "unknown")
    return f"was killed by signal {-exit_code} ({cause})"


def command(module: str) -> tuple[str, ...]:
    """The command line that runs one of our modules, whatever lies in the working directory."""
    return (sys.executable, "-P", "-m", module)


def import_path() -> str:
    """The PYTHONPATH under which our modules are found: where we are, then what the user has set."""
    return os.pathsep.join([str(_OURS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])


# In the child.


def begin() -> NoReturn:
    """Run the module of the command line. Its exit code is what its `main` returns, 0 for None."""
    module, fd, orphan_grace_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    home = Connection(fd)
    _end_with_parent(fd, orphan_grace_s)
    try:
        code = _run(module, home)
    except Exception as error:
        code = 1
        with suppress(OSError):  # the parent is gone
            home.send(Failed.of(error))
    sys.stdout.flush()
    os._exit(code)  # its work is done and kept: Python would take 60 ms, for which the parent waits


def _run(module: str, home: Connection) -> int:
    main = importlib.import_module(module).main
    try:
        secrets, task = home.recv()
    except EOFError:  # it was started and never needed
        return 0
    learn(*secrets)
    return main(home, task) or 0


def _end_with_parent(fd: int, grace_s: float) -> None:
    """From now on end this process, the grace after its parent has ended or has closed the connection."""
    if math.isinf(grace_s):
        return
    parent = os.getppid()
    ends = select.poll()
    ends.register(os.dup(fd), 0)  # its end alone; a copy, because the module may close its own

    def hold() -> None:
        while os.getppid() == parent and not ends.poll(_LOOK_AROUND_MS):
            pass
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=hold, name="leash", daemon=True).start()
