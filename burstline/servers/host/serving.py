"""The processes of this machine that serve at a URL: those below our keeper, or those that listen there."""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

import psutil

from burstline.servers.destination import addresses_of
from burstline.servers.messages import EngineError

FORWARDERS: Final = (
    *("docker-proxy", "docker", "podman", "com.docker.backend", "gvproxy", "kubectl", "ssh", "sshd", "socat"),
    *("rootlesskit", "rootlessport", "slirp4netns", "pasta", "passt", "nginx", "haproxy", "envoy", "caddy"),
)
"""Programs that pass requests on, by name; others show it by a connection to somewhere else."""


@dataclass(frozen=True, slots=True)
class ServingProcesses:
    """The server: all below `keeper_pid`, or those that are `listening` and what belongs to them.

    To these belong their launcher, the descendants of all, and whose process group one of them leads; but
    not `client_pid` and what is below it, which measure. `unknown` says why no process can be named.
    """

    keeper_pid: int | None = None
    listening: frozenset[int] = frozenset()
    client_pid: int = 0
    unknown: str = ""

    @classmethod
    def at(cls, *urls: str) -> Self:
        """Those behind URLs of this machine, as the calling process sees them."""
        try:
            listening = frozenset(pid for url in urls for pid in _listening_at(url))
        except (EngineError, LookupError, psutil.Error) as why:
            return cls(unknown=f"the server is not watched: {why}")
        return cls(listening=listening, client_pid=os.getpid())

    def pids(self) -> set[int]:
        if self.keeper_pid is not None:
            return _below(self.keeper_pid) - {self.keeper_pid}
        ours, family = _below(self.client_pid), set[int]()
        for pid in self.listening & set(psutil.pids()):
            top = self._launcher(pid)
            below = _below(top)
            family |= below - (ours - {top}) if self.client_pid in below else below
        return family | {pid for pid in psutil.pids() if _group(pid) in family} - ours

    def _launcher(self, pid: int) -> int:
        """The topmost process of its group that started it and is no shell: TGI's has shards beside it."""
        group = _group(pid)
        with suppress(psutil.Error):
            above = {self.client_pid, *(each.pid for each in psutil.Process(self.client_pid).parents())}
            for parent in psutil.Process(pid).parents():
                if parent.pid in above or _group(parent.pid) != group or parent.name().endswith("sh"):
                    break
                pid = parent.pid
        return pid

    def peer(self) -> str:
        """To whom else these processes have a connection that they opened, now; "" where to nobody.

        A relay has one for each stream, or one for all. The connections of a server are to its own processes.
        """
        pids, own = self.pids(), []
        with suppress(psutil.Error, OSError):  # it may have ended meanwhile
            own = [each for each in psutil.net_connections("tcp") if each.pid in pids]
        listeners = [each for each in own if each.status == psutil.CONN_LISTEN]
        if self.listening - {each.pid for each in listeners}:  # one ends: it had accepted what is left
            return ""
        ports = {_plain(each.laddr)[1] for each in listeners}
        inside = {_plain(each.laddr) for each in own}
        for each in own:
            opened = each.status == psutil.CONN_ESTABLISHED and _plain(each.laddr)[1] not in ports
            if opened and _plain(each.raddr) not in inside:
                return "{}:{}".format(*_plain(each.raddr))
        return ""


ACROSS_BRIDGE: Final = (
    "The server runs in another container: requests cross the bridge between it and the client"
)
UNKNOWN: Final = ServingProcesses(unknown="the server is not watched: its processes are not known")


def _listening_at(url: str) -> set[int]:
    """Who listens there. LookupError, EngineError or psutil.Error with the reason where that is not known."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    places = {address[0] for _, address in addresses_of(parts.hostname or "", port)}
    if not places & {each.address for rows in psutil.net_if_addrs().values() for each in rows}:
        if (first := first_of_container(url)) is None:
            raise LookupError("it is on another machine")
        return {first}
    listeners = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    there = [(each.pid, ip) for each in listeners for ip, at in [_plain(each.laddr)] if at == port]
    exact = {pid for pid, ip in there if ip in places}
    found = exact or {pid for pid, ip in there if ip_address(ip).is_unspecified}
    pids = {pid for pid in found if pid is not None}
    if not pids or len(pids) < len(found):
        who = "another user's process" if found else "no process that can be seen here"
        raise LookupError(f"{who} listens at port {port}")
    for pid in pids:
        if (name := psutil.Process(pid).name()) in FORWARDERS:
            raise LookupError(f"{name} (process {pid}) passes its requests on")
    return pids


def first_of_container(url: str) -> int | None:
    """The first process of the container with the URL's one IPv4 address; None where it cannot be seen.

    It can where containers share a namespace of processes, in which the first of each has no parent. An
    address of our own is not another container's.
    """
    parts = urlsplit(url)
    try:
        (_, (address, *_)), *others = addresses_of(parts.hostname or "", parts.port or 80)
    except EngineError:
        return None
    local = re.compile(rf"\|-- {re.escape(address)}\n\s+/32 host LOCAL")

    def has_address(pid: int) -> bool:
        with suppress(OSError):
            return local.search(Path(f"/proc/{pid}/net/fib_trie").read_text()) is not None
        return False

    if others or has_address(os.getpid()):
        return None
    firsts = (each.pid for each in psutil.process_iter(["ppid"]) if each.info["ppid"] == 0)
    return next(filter(has_address, firsts), None)


def _plain(address: Any) -> tuple[str, int]:
    """IPv4 is written in two ways, plain and within IPv6."""
    return address[0].removeprefix("::ffff:"), address[1]


def _below(pid: int) -> set[int]:
    with suppress(psutil.Error):
        return {pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))}
    return set()


def _group(pid: int) -> int | None:
    with suppress(OSError):
        return os.getpgid(pid)
    return None
