"""A server as a local process: started under a keeper, monitored, and stopped with all its children."""

import contextlib
import math
import os
import signal
import socket
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from burstline.servers.host.child import SILENT_S, Child, ChildLostError, command, how_it_ended, import_path
from burstline.servers.host.interrupt import uninterrupted
from burstline.servers.host.keeper import ALL_ENDED, CANNOT_START, ENDED, STARTED, KeeperTask, Message
from burstline.servers.launch import Launch
from burstline.servers.messages import EngineError
from burstline.servers.redact import printable

START_S = 10.0
"""How long a keeper may take to start the engine's first process."""


class Server(contextlib.AbstractContextManager["Server", None]):
    """A running engine that we started. Leaving it as a context manager stops it."""

    def __init__(self, launch: Launch, env: Mapping[str, str], log_path: Path) -> None:
        self.launch = launch
        self.log_path = log_path
        self.grace_s = launch.stop_grace_s
        self._code: int | None = None
        self._survivors: tuple[int, ...] | None = None
        # The keeper ends the engine before itself, also when we are killed.
        self._keeper = Child("burstline.servers.host.keeper", "the keeper", orphan_grace_s=math.inf)
        try:
            self._keeper.send(KeeperTask(launch, env, log_path))
            kind, value = self._keeper.receive(START_S)
        except ChildLostError as error:
            kind, value = CANNOT_START, str(error)
        except BaseException:  # an interrupt: a keeper that stands still would outlive us
            self._keeper.end()
            raise
        if kind != STARTED:
            self._keeper.end()
            raise EngineError(f"cannot start {launch.argv[0]}: {value}")
        self.pid: int = value
        """The engine's first process."""

    @property
    def keeper_pid(self) -> int:
        """The process whose descendants are all of the engine, and nothing else."""
        return self._keeper.pid

    @property
    def exit_code(self) -> int | None:
        """The engine's own exit code, minus the signal's number where one killed it; None while it runs."""
        if self._code is None:
            self._next(0.0)
        return self._code

    def how_it_ended(self) -> str:
        """How the engine's first process ended, or the keeper, without whom that is not known."""
        lost = f"its keeper {self._keeper.how_it_ended()}"
        return lost if self.exit_code is None else how_it_ended(self.exit_code)

    def alive(self) -> bool:
        return self.exit_code is None and self._keeper.exit_code is None

    def log(self) -> str:
        return self.log_path.read_text("utf-8", errors="replace")

    def last_line(self) -> str:
        """The last line that the engine has printed, "" where it has printed none."""
        lines = self.log().splitlines()
        return next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")

    def stop(self) -> int | None:
        """Ends the whole process tree and returns the engine's exit code; a second time does nothing.

        Raises EngineError where a process survived even SIGKILL.
        """
        if not self._keeper.connection.closed:
            self._keeper.send(self.grace_s)
            while self._survivors is None and self._next(SILENT_S):
                pass
            if self._survivors is None:
                self._end_without_keeper()
            self._keeper.end()
        if self._survivors:
            raise EngineError(
                f"the server's processes {list(self._survivors)} survived SIGKILL and may hold its port"
            )
        return self._code

    def _end_without_keeper(self) -> None:
        """The keeper was killed, or hangs: kill its descendants and the engine's session."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.keeper_pid).children(recursive=True):
                each.kill()
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == self.pid:
                    os.kill(pid, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _next(self, timeout_s: float) -> Message | None:
        """The keeper's next message, noted; None where none comes in time, or the keeper is gone."""
        keeper = self._keeper
        if keeper.connection.closed or not keeper.connection.poll(timeout_s):
            return None
        with uninterrupted():  # a message that was read half, or not noted, would be lost
            try:
                kind, value = keeper.receive()
            except Exception:  # it is lost, or what it failed of: either way no more comes from it
                return None
            if kind == ENDED:
                self._code = value
            elif kind == ALL_ENDED:
                self._survivors = value
            return kind, value


def start(launch: Launch, log_path: Path) -> Server:
    """Starts the server; its output goes to `log_path`. EngineError where its command cannot be run."""
    is_ours = tuple(launch.argv[1:3]) == command("")[1:3]
    ours = {"PYTHONPATH": import_path()} if is_ours else {}
    # Engines run their commands by bare name: the folder of their own scripts is first.
    scripts = launch.scripts or (Path(launch.argv[0]).parent if os.sep in launch.argv[0] else "")
    path = os.pathsep.join(filter(None, [str(scripts), os.environ.get("PATH")]))
    return Server(launch, {**os.environ, "PATH": path, **ours, **launch.env}, log_path)


OUR_PORTS: Final = range(18_000, 30_000)
"""Below those that systems give to outgoing connections: none of them takes a port before its server does."""


def free_port(host: str = "127.0.0.1", *, but: Container[int] = ()) -> int:
    """A TCP port without a listener at this moment, none of `but`."""
    begin = int.from_bytes(os.urandom(4), "big")
    family, (ip, _, *rest) = _address(host)
    for k in range(len(OUR_PORTS)):
        port = OUR_PORTS[(begin + k) % len(OUR_PORTS)]
        with contextlib.suppress(OSError):
            if port not in but:
                socket.create_server((ip, port, *rest), family=family).close()
                return port
    raise EngineError(f"no port of {host} from {OUR_PORTS.start} to {OUR_PORTS.stop - 1} is free")


def require_host(host: str) -> None:
    """EngineError if this machine has no such address to listen on."""
    try:
        if not host.strip():
            raise OSError(0, "it is empty")
        family, address = _address(host)
        with socket.socket(family) as listener:
            listener.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise EngineError(
            f"no server can listen there: {why}; expected an address of this machine, such as 127.0.0.1, or "
            "0.0.0.0 for all of them"
        ) from error


def _address(host: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The family and address of the host, looked up once; an IPv4 one where it has both."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = min(found, key=lambda row: row[0] != socket.AF_INET)
    return family, address


def require_free_port(host: str, port: int) -> None:
    """EngineError if there is no such port or it is taken, naming by whom where that can be known."""
    if not 0 < port < 65536:
        raise EngineError(f"there is no port {port}; expected 1 to 65535")
    try:
        family, (ip, _, *rest) = _address(host)
        socket.create_server((ip, port, *rest), family=family).close()
    except OSError as error:
        raise EngineError(
            f"port {port} on {host} cannot be used: {error.strerror}{_holder(port)}. "
            "Stop that process, choose another port, or attach to that server"
        ) from error


def _holder(port: int) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if local and local.port == port and connection.status == psutil.CONN_LISTEN and connection.pid:
                words = " ".join(psutil.Process(connection.pid).cmdline())
                return f", held by pid {connection.pid} ({words:.120})"
    return ""
