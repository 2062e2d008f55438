"""Operating-system limits of one driver, and its resource use."""

import gc
import os
import resource
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from burstline.workloads.request import WorkloadError

_SWITCH_INTERVAL_S = 50e-6
_N_OWN_FDS, _N_OWN_PORTS = 64, 16


def ensure_sockets(n_connections: int) -> None:
    """Let so many sockets be open at once; WorkloadError where the hard limit is too low.

    It is raised, too, where this machine lacks what every load needs: its list of processes, its own address.
    """
    if not Path("/proc/self/stat").exists():
        mount = "mount -t proc proc /proc"
        raise WorkloadError(f"/proc is empty; expected the kernel's list of processes: {mount}")
    try:
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))
    except OSError as error:
        up = "a loopback device that is up: ip link set lo up"
        raise WorkloadError(f"127.0.0.1 cannot be reached ({error.strerror}); expected {up}") from None
    need = n_connections + _N_OWN_FDS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        raise WorkloadError(
            f"{n_connections:,} requests at once need {need:,} open files, this process may have {hard:,}; "
            f"raise the limit (ulimit -Hn {need}; LimitNOFILE= of a unit; --ulimit nofile= of a container) "
            f"or send fewer at once, at most {max(0, hard - _N_OWN_FDS):,} (--requests, --concurrency)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (need if hard == resource.RLIM_INFINITY else hard, hard))


_TIME_WAIT, _LISTEN = "06", "0A"  # include/net/tcp_states.h
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def ensure_ports(n_connections: int, port: int = 0, proc: Path = Path("/proc")) -> None:
    """Raise WorkloadError where so many connections to one remote port need more local ports than are free.

    A port is held by a listener, by a connection to the same port of any host, and by one that has ended, in
    TIME_WAIT, unless net.ipv4.tcp_tw_reuse (1: all, 2: on the loopback) gives it away again.
    """
    settings, tables = proc / "sys/net/ipv4", (proc / "net/tcp", proc / "net/tcp6")
    try:
        first, last = map(int, (settings / "ip_local_port_range").read_text().split())
        reused = {"1": ("",), "2": _LOOPBACK}.get((settings / "tcp_tw_reuse").read_text().strip(), ())
        lines = [line for each in tables if each.exists() for line in each.read_text().splitlines()]
    except (OSError, ValueError):  # no Linux, or a sandbox that hides it
        return
    n_free = last - first + 1 - _N_OWN_PORTS
    for local, peer, state in (line.split()[1:4] for line in lines):
        if state == _LISTEN:
            n_free -= first <= int(local[-4:], 16) <= last
        elif peer.endswith(f":{port:04X}"):
            n_free -= not (state == _TIME_WAIT and peer.startswith(reused))
    if n_connections > n_free:
        raise WorkloadError(
            f"{n_connections:,} connections to one server need as many local ports, {max(0, n_free):,} are "
            f"free (net.ipv4.ip_local_port_range is {first} to {last}, less what others or TIME_WAIT hold); "
            "widen the range, or send fewer at once (--requests, --concurrency)"
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources used by this process so far; subtract two readings to get the use in between."""

    wall_s: float
    cpu_s: float
    n_involuntary: int

    @classmethod
    def now(cls) -> "Usage":
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.monotonic(), used.ru_utime + used.ru_stime, used.ru_nivcsw)

    def __sub__(self, other: "Usage") -> "Usage":
        wall_s, cpu_s = self.wall_s - other.wall_s, self.cpu_s - other.cpu_s
        return Usage(wall_s, cpu_s, self.n_involuntary - other.n_involuntary)


class CpuClock:
    """What the kernel says of the thread that made it; zeros where it says nothing."""

    def __init__(self) -> None:
        self._fd = -1
        with suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> tuple[int, int]:
        """How long it has been ready to run without a CPU, ns, and how often it was given one."""
        if self._fd < 0:
            return 0, 0
        _, waited_ns, n_slices = os.pread(self._fd, 64, 0).split()
        return int(waited_ns), int(n_slices)

    def close(self) -> float | None:
        """The time without a CPU in seconds, None where the kernel does not say; asked no more."""
        waited_ns, n_slices = self.read()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        return waited_ns / 1e9 if n_slices else None


def peak_rss_bytes() -> int:
    """The most memory this process has held. On Linux ru_maxrss would count the parent's before exec."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection, and the interpreter's lock changes hands at once when the wire wants it."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        sys.setswitchinterval(interval_s)
