"""The processes behind a loopback URL, with real servers, launchers, relays and forwarders."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from burstline.servers.host.process import free_port
from burstline.servers.host.serving import ServingProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who listens")

SERVER = """
import socket, sys
listener = socket.create_server((HOST, int(sys.argv[1])), family=FAMILY)
print("up", flush=True)
held = []
while True:
    held.append(listener.accept()[0])
"""
PLAIN = SERVER.replace("HOST", "'127.0.0.1'").replace("FAMILY", "socket.AF_INET")
ANYWHERE = SERVER.replace("HOST", "'::'").replace("FAMILY", "socket.AF_INET6, dualstack_ipv6=True")
LAUNCHER = """
import subprocess, sys
shard = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
router = subprocess.Popen([sys.executable, "-c", SERVER, sys.argv[1]])
print(shard.pid, router.pid, flush=True)
router.wait()
"""
RELAY = """
import socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
held = []
while True:
    held.append((listener.accept()[0], socket.create_connection(("127.0.0.1", int(sys.argv[2])))))
"""
NAMED = """
import ctypes
ctypes.CDLL(None).prctl(15, b"docker-proxy", 0, 0, 0)
"""
WORKER = """
import socket, subprocess, sys
inner = socket.create_server(("127.0.0.1", 0))
code = "import socket, time; s = socket.create_connection(('127.0.0.1', %d)); time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", code % inner.getsockname()[1]])
held_by_it = inner.accept()
inner.close()
"""
ENDING = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("up", flush=True)
held = listener.accept()
listener.close()
print("closed", flush=True)
time.sleep(600)
"""
ORPHAN = """
import os, sys, time
if not os.fork():
    if os.fork():
        os._exit(0)
    time.sleep(600)
os.wait()
"""


@contextmanager
def running(code: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process in a session of its own that says one line; it ends with all below it."""
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("code", [PLAIN, ANYWHERE])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_process_that_listens_is_the_server_and_no_other_is(code: str, host: str) -> None:
    port = free_port()
    with (
        running(code, port) as (server, _),
        running("import sys; print('busy', flush=True); sys.stdin.read()"),
    ):
        found = ServingProcesses.at(f"http://{host}:{port}/v1")
        assert (found.pids(), found.unknown) == ({server.pid}, "")
        assert found.peer() == ""
        with socket.create_connection(("127.0.0.1", port)):
            assert found.peer() == "", "a client's connection is no server's own"
    assert found.pids() == set(), "it has ended"


def test_a_launcher_and_what_it_started_beside_the_listener_belong_to_the_server() -> None:
    port = free_port()
    code = LAUNCHER.replace("SERVER", repr(PLAIN))
    with running(code, port) as (launcher, line):
        family = {launcher.pid, *map(int, line.split())}
        router = psutil.Process(int(line.split()[1]))
        while not router.net_connections("tcp"):
            pass
        assert ServingProcesses.at(url(port)).pids() == family


def test_whose_group_the_server_leads_belongs_to_it_though_its_parent_ended() -> None:
    port = free_port()
    with running(ORPHAN + PLAIN, port) as (server, _):
        mine = {pid for pid in psutil.pids() if os.getpgid(pid) == server.pid}
        try:
            assert len(mine) == 2
            assert ServingProcesses.at(url(port)).pids() == mine
        finally:
            for pid in mine - {server.pid}:
                os.kill(pid, 9)


def test_a_server_within_the_client_is_its_process_alone() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        running("import sys; print('below', flush=True); sys.stdin.read()"),
    ):
        assert ServingProcesses.at(url(listener.getsockname()[1])).pids() == {os.getpid()}


def test_a_relay_is_known_by_its_connection_and_a_worker_of_the_server_is_none() -> None:
    port, relay_port = free_port(), free_port()
    with running(WORKER + PLAIN, port), running(RELAY, relay_port, port):
        found, relay = ServingProcesses.at(url(port)), ServingProcesses.at(url(relay_port))
        assert relay.peer() == "", "nothing is sent yet"
        with socket.create_connection(("127.0.0.1", relay_port)):
            while not relay.peer():
                pass
            assert relay.peer() == f"127.0.0.1:{port}"
            assert found.peer() == ""
        assert len(found.pids()) == 2


def test_what_a_server_that_ends_had_accepted_is_no_upstream() -> None:
    """Killed, it no longer listens while its connections are still closing: one was taken for an upstream."""
    port = free_port()
    with running(ENDING, port) as (server, _):
        found = ServingProcesses.at(url(port))
        with socket.create_connection(("127.0.0.1", port)):
            assert server.stdout is not None
            server.stdout.readline()
            assert found.pids() == {server.pid}
            assert found.peer() == ""


def test_a_forwarder_is_known_by_its_name() -> None:
    port = free_port()
    with running(NAMED + PLAIN, port) as (forwarder, _):
        found = ServingProcesses.at(url(port))
    named = f"docker-proxy (process {forwarder.pid}) passes its requests on"
    assert (found.unknown, found.pids()) == (f"the server is not watched: {named}", set())


def test_what_cannot_be_seen_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "the server is not watched: "
    port = free_port()
    nobody = ServingProcesses.at(url(port)).unknown
    assert nobody == f"{said}no process that can be seen here listens at port {port}"
    assert ServingProcesses.at("http://192.0.2.1:80").unknown == f"{said}it is on another machine"
    row = SimpleNamespace(pid=None, status=psutil.CONN_LISTEN, laddr=("127.0.0.1", port), raddr=())
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [row])
    assert ServingProcesses.at(url(port)).unknown == f"{said}another user's process listens at port {port}"
