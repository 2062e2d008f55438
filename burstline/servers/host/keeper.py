"""The keeper of one engine: starts it, reports how it ended, and stops all of its processes.

A `Child` that `process.py` starts. It is a child subreaper: whatever an engine's process leaves orphaned,
sessions of its own included, becomes the keeper's child, so that the keeper's descendants are all of the
engine at any time.

    keeper <- KeeperTask
    keeper -> Started            or CannotStart, its last message
    keeper <- Grace              stop, at any time, within these seconds; the connection's end means the same
    keeper -> Ending             each second while it ends what is left of the engine
    keeper -> EngineEnded        the engine's first process has ended
    keeper -> AllEnded           so have all others, but for those that survive even SIGKILL

The engine's output passes through the keeper, which leaves secrets out of the log: engines print their
arguments and their environment.

Signals only set `stopping` and wake `select`: everything else happens in the one thread that waits, so that
no handler ever interrupts the reaping of a process or sees half of its state.
"""

import contextlib
import glob
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from burstline.servers.host.kernel import allowed_cores, keep_to, prctl
from burstline.servers.launch import Launch
from burstline.servers.redact import n_unfinished, redacted

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
ORPHANS_GRACE_S = 1.0
"""How long the engine's children may run after its first process has ended, before they are killed."""
KILLED_GRACE_S = 30.0
"""How long killed processes may take to end: the kernel gives back the memory of their GPUs first."""
AFTER_TIMEOUT_S = 10.0
"""How long the command may take that removes what is no process of ours: a container."""
LOG_GRACE_S = 2.0
"""How long the last of an engine's output may take to be written when all its processes have ended."""
LINE_BYTES = 1 << 16
LINE_S = 0.2
"""An unfinished line of output is written after this many bytes or this long."""
POLL_S = 0.05
WATCH_PERIOD_S = 1.0
"""How often the keeper looks around though nothing has woken it, and says that it still ends the engine."""


@dataclass(frozen=True, slots=True)
class KeeperTask:
    """What to start, in which environment; its output goes to `log`, without secrets."""

    launch: Launch
    env: Mapping[str, str]
    log: Path


STARTED, CANNOT_START, ENDING, ENDED, ALL_ENDED = "started", "cannot start", "ending", "ended", "all ended"
"""Messages to the parent, each with a value: the engine's first process; why its command cannot be run; none,
while it is ended; its exit code (minus the signal that killed it); the processes that survived SIGKILL."""
Message = tuple[str, Any]


class Keeper:
    """One engine's processes and the order to stop them."""

    def __init__(self, task: KeeperTask, home: Connection) -> None:
        self._task, self._home = task, home
        self.code: int | None = None
        self.stopping = False
        self._seen: dict[int, psutil.Process] = {}
        self._signalled = _wake_on_signals(self._stop)
        with task.log.open("ab", buffering=0) as log:
            self.root = _start(task)
            arguments = (self.root, os.dup(log.fileno()))
            self._log = threading.Thread(target=_keep_log, args=arguments, daemon=True)
            self._log.start()

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def watch(self) -> None:
        """Until the engine's first process ends, the parent says stop, or the parent is gone."""
        parent = os.getppid()
        while self.code is None and not self.stopping:
            readable = select.select([self._home.fileno(), self._signalled], [], [], WATCH_PERIOD_S)[0]
            if self._signalled in readable:
                os.read(self._signalled, 4096)
            # A killed parent closes the connection, unless a child of its own still holds the other end.
            self.stopping = self.stopping or self._home.fileno() in readable or os.getppid() != parent
            self._reap()

    def end(self) -> tuple[int, ...]:
        """Ends every process: asked first, killed after the grace. The pids that even that did not end."""
        if self.code is None:
            os.kill(self.root.pid, signal.SIGTERM)
            grace_s = self._task.launch.stop_grace_s
            with contextlib.suppress(OSError, EOFError):  # the parent is gone
                grace_s = self._home.recv() if self._home.poll() else grace_s
            self._wait(lambda: self.code is not None, grace_s)
        # An engine that ended by itself has told its children to end: they get a moment to obey.
        if self.code is not None:
            self._wait(lambda: not self._look(), ORPHANS_GRACE_S)
        if self._task.launch.after:
            with contextlib.suppress(OSError):
                after = subprocess.Popen(
                    self._task.launch.after, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                self._wait(lambda: after.poll() is not None, AFTER_TIMEOUT_S)
        self._wait(self._killed_all, KILLED_GRACE_S)
        self._log.join(LOG_GRACE_S)
        _remove_leftovers(self._task)
        return tuple(process.pid for process in self._look())

    def _killed_all(self) -> bool:
        alive = self._look()
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return not alive

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        until_s, tell_s = time.monotonic() + timeout_s, 0.0
        while not done() and (now_s := time.monotonic()) < until_s:
            if now_s >= tell_s:
                say(self._home, (ENDING, None))
                tell_s = now_s + WATCH_PERIOD_S
            time.sleep(POLL_S)
            self._reap()

    def _reap(self) -> None:
        """Collects the ended: the engine's first process with its code, and orphans that came to us."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.root.pid:
                    # Told to Popen as well: it would wait for a pid that may be another process's by now.
                    self.code = self.root.returncode = os.waitstatus_to_exitcode(ended[1])
                    # Who hears of the end looks into the log for its cause. Children may hold the pipe open.
                    self._log.join(2 * LINE_S)
                    say(self._home, (ENDED, self.code))

    def _look(self) -> list[psutil.Process]:
        """All processes of the engine that have not been reaped.

        A zombie may be a process whose main thread has ended while others hold the port and the memory.
        """
        # psutil compares start times as well: a pid that the system has given away again is not signalled.
        for process in psutil.Process().children(recursive=True):
            self._seen.setdefault(process.pid, process)
        self._seen = {pid: process for pid, process in self._seen.items() if process.is_running()}
        return list(self._seen.values())


def _remove_leftovers(task: KeeperTask) -> None:
    launch = task.launch
    names = {""}
    if launch.leftover_id:
        names = set(re.findall(launch.leftover_id, task.log.read_text("utf-8", errors="replace")))
    for pattern, name in product(launch.leftovers, names):
        for path in glob.glob(pattern.format(id=name)):  # noqa: PTH207
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108


def _wake_on_signals(stop: Callable[..., None]) -> int:
    """A descriptor that turns readable at every signal; those that mean the end call `stop` as well."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)  # a full pipe must not block a signal handler; it wakes all the same
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    return readable


def _start(task: KeeperTask) -> subprocess.Popen[bytes]:
    n_cores = task.launch.n_cores

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # should the keeper itself be killed
        if n_cores is not None:
            keep_to(0, allowed_cores()[:n_cores])

    return subprocess.Popen(
        task.launch.argv,
        env=task.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=prepare,
    )


def _keep_log(process: subprocess.Popen[bytes], log: int) -> None:
    """Write what the engine prints, without secrets, which may come in several reads."""
    assert process.stdout is not None
    output = process.stdout.fileno()
    line, read = b"", b"\n"
    while read:
        is_late = line and not select.select([output], [], [], LINE_S)[0]
        if not is_late:
            read = os.read(output, LINE_BYTES)
            line += read
        end = line.rfind(b"\n") + 1 if read else len(line)
        if is_late or len(line) - end > LINE_BYTES:
            end = len(line) - n_unfinished(line)
        with contextlib.suppress(OSError):  # where the disk is full, the engine goes on without its log
            lines = line[:end].decode("utf-8", "surrogateescape").splitlines(keepends=True)
            os.write(log, "".join(map(redacted, lines)).encode("utf-8", "surrogateescape"))
        line = line[end:]


def say(home: Connection, message: Message) -> None:
    """Send a message to the parent, who may be gone."""
    with contextlib.suppress(OSError):
        home.send(message)


def main(home: Connection, task: KeeperTask) -> None:
    """Keep the engine until all of its processes have ended."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        keeper = Keeper(task, home)
    except OSError as error:
        say(home, (CANNOT_START, f"{error.strerror}: {error.filename or task.launch.argv[0]}"))
        return
    say(home, (STARTED, keeper.root.pid))
    keeper.watch()
    say(home, (ALL_ENDED, keeper.end()))
