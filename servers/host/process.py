"""A server as a local process: started under a keeper, asked how it is, stopped with all that it started."""

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from servers.host import child
from servers.launch import Launch
from servers.messages import EngineError
from servers.redact import known_secrets, printable

KEEPER_GRACE_S = 60.0
"""What a keeper may need to kill what would not end and to clean up, beyond the engine's own grace."""
LAST_BYTES = 4096
"""How much of a log's end is read to find its last line."""


class Server:
    """A running engine that we started. Leaving it as a context manager stops it."""

    def __init__(self, keeper: subprocess.Popen[bytes], launch: Launch, log_path: Path) -> None:
        self.launch = launch
        self.log_path = log_path
        self._keeper = keeper
        self._unread = b""
        self._facts: dict[str, Any] = {}
        self._hear(until="pid", timeout_s=60.0)
        if "pid" not in self._facts:
            self._close()
            why = self._facts.get("failed", "its keeper ended at once")
            raise EngineError(f"cannot start {launch.argv[0]}: {why}")

    @property
    def pid(self) -> int:
        """The engine's first process."""
        return int(self._facts["pid"])

    @property
    def keeper_pid(self) -> int:
        """The process whose descendants are all of the engine, and nothing else."""
        return self._keeper.pid

    @property
    def exit_code(self) -> int | None:
        """The engine's own exit code, minus the signal's number where one killed it; None while it runs."""
        self._hear(until="code", timeout_s=0.0)
        code = self._facts.get("code")
        return None if code is None else int(code)

    def alive(self) -> bool:
        """True while the engine's first process runs."""
        return self.exit_code is None and self._keeper.poll() is None

    def log(self) -> str:
        """All that the engine has printed so far."""
        return self.log_path.read_text("utf-8", errors="replace")

    def last_line(self) -> str:
        """The last line that the engine has printed, "" where it has printed none."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")

    def stop(self) -> int | None:
        """Ends the whole process tree and returns the engine's exit code; a second time does nothing.

        Raises EngineError where a process survived even SIGKILL.
        """
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            child.tell(self._keeper, {"stop": True})
            self._hear(until="survivors", timeout_s=self.launch.stop_grace_s + KEEPER_GRACE_S)
            self._close()
        if survivors := self._facts.get("survivors", []):
            raise EngineError(f"the server's processes {survivors} survived SIGKILL and may hold its port")
        return self.exit_code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _hear(self, *, until: str, timeout_s: float) -> None:
        """Takes in what the keeper has said, waiting for the fact `until` at most so long."""
        deadline = time.monotonic() + timeout_s
        out = self._keeper.stdout
        while out is not None and not out.closed and until not in self._facts:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([out], [], [], left_s)[0]:
                return
            heard = os.read(out.fileno(), 65536)
            if not heard:
                return
            *lines, self._unread = (self._unread + heard).split(b"\n")
            for line in lines:
                self._facts |= json.loads(line)

    def _close(self) -> None:
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._keeper.wait(5.0)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()


def threads_for_server() -> int | None:
    """How many threads leave the client a core on a machine of 2 to 4; None on any other machine.

    An engine that takes every core spins on all of them between its steps, and its front end competes with
    the client for the rest: the client then reads late.
    """
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return n - 1 if 2 <= n <= 4 else None


def start(launch: Launch, log_path: Path) -> Server:
    """Starts the server; its output goes to `log_path`. EngineError where its command cannot be run."""
    is_ours = tuple(launch.argv[1:3]) == child.command("")[1:3]
    ours = {"PYTHONPATH": child.import_path()} if is_ours else {}
    task = {
        "argv": launch.argv,
        "env": {**os.environ, "PATH": _path_of(launch), **ours, **launch.env},
        "n_cores": launch.n_cores,
        "log": str(log_path),
        "stop_grace_s": launch.stop_grace_s,
        "after": launch.after,
        "leftovers": launch.leftovers,
        "leftover_id": launch.leftover_id,
        "secrets": known_secrets(),
    }
    return Server(child.spawn("servers.host.keeper", task), launch, log_path)


def _path_of(launch: Launch) -> str:
    """Our PATH behind the folder of the engine's own scripts: engines run their commands by bare name."""
    folder = launch.scripts or (Path(launch.argv[0]).parent if os.sep in launch.argv[0] else None)
    paths = [str(folder)] if folder is not None else []
    return os.pathsep.join([*paths, *filter(None, [os.environ.get("PATH")])])


OUR_PORTS: Final = range(18_000, 30_000)
"""Below those that systems give to outgoing connections: none of them takes a port before its server does."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port without a listener at this moment."""
    return free_ports(1, host)[0]


def free_ports(n: int, host: str = "127.0.0.1", *, but: int | None = None) -> list[int]:
    """Different TCP ports without a listener at this moment, none of them `but`."""
    found: list[int] = []
    begin = int.from_bytes(os.urandom(4), "big")
    for k in range(len(OUR_PORTS)):
        port = OUR_PORTS[(begin + k) % len(OUR_PORTS)]
        with contextlib.suppress(OSError):
            socket.create_server((host, port)).close()
            found += [port] if port != but else []
        if len(found) == n:
            break
    return found


def require_free_port(host: str, port: int) -> None:
    """EngineError if there is no such port or it is taken, naming by whom where that can be known."""
    if not 0 < port < 65536:
        raise EngineError(f"there is no port {port}; expected 1 to 65535")
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise EngineError(
            f"port {port} on {host} cannot be used: {error.strerror}{_holder(port)}. "
            "Stop that process, choose another port, or attach to the server that is there"
        ) from error


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if local and local.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f", held by pid {connection.pid} ({command:.120})"
    return ""
