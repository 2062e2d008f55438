"""Machines unlike those that tests run on: few ports and files, a link that drops, refused calls, odd shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from burstline.measure.record.rundir import open_run
from burstline.measure.record.verdict import State
from tests.faults.lab import REPOSITORY, counted, noted

LIMIT_S = 300
"""Ends a run that hangs: where others keep the cores busy, one of a few seconds has taken more than 60."""
LOAD = ("--requests", "20", "--prompt-tokens", "8", "--output-tokens", "4")
CAN_UNSHARE = (
    os.geteuid() == 0
    and shutil.which("ip") is not None
    and shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-n", "-m", "true"], capture_output=True, check=False).returncode == 0
)
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 60)
namespaces = pytest.mark.skipif(not CAN_UNSHARE, reason="network namespaces need root")


def burstline(folder: Path, before: str, *args: str, **env: str) -> tuple[int, str]:
    """`burstline run ARGS` in a shell, within `folder`, after the line `before`."""
    words = [sys.executable, "-P", "-m", "burstline", "run", "--out", str(folder / "out"), *args]
    ended = subprocess.run(
        ["sh", "-ec", f'{before}\nexec "$@"', "sh", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        timeout=LIMIT_S,
        check=False,
    )
    said = ended.stdout.decode()
    assert "Traceback" not in said, said
    return ended.returncode, said


def outcomes(folder: Path) -> Counter[str]:
    (run,) = (folder / "out").iterdir()
    return Counter(open_run(run).request_table.column("outcome").to_pylist())


# What a sandbox refuses: in every process of a run, for Python imports this module by its name.
REFUSING = """
import ctypes, os, socket
ENOSYS = 38

def refuses(*_, **__):
    raise OSError(ENOSYS, "refused")

setsockopt = socket.socket.setsockopt
WISHES = {(socket.IPPROTO_TCP, socket.TCP_NODELAY)} | {
    (socket.SOL_SOCKET, option) for option in (35, 37, socket.SO_SNDTIMEO, socket.SO_RCVTIMEO)
}

def set_some(sock, level, option, *value):
    return refuses() if (level, option) in WISHES else setsockopt(sock, level, option, *value)

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        return (lambda *_: -1) if name == "prctl" else super().__getattr__(name)

socket.socket.setsockopt = set_some
os.sched_getaffinity = os.sched_setaffinity = os.setpriority = os.nice = refuses
ctypes.CDLL = Library
"""


@pytest.mark.slow
def test_a_run_needs_no_call_that_only_makes_it_better(tmp_path: Path) -> None:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub/sitecustomize.py").write_text(REFUSING)
    path = os.pathsep.join([str(tmp_path / "stub"), str(REPOSITORY)])
    code, said = burstline(tmp_path, "", "--engine", "truth", *LOAD, PYTHONPATH=path)
    noted("refused: time stamps, TCP_NODELAY, affinity, prctl, nice", "20 ok", f"exit {code}", 0)
    assert code in (0, 4), said
    assert outcomes(tmp_path) == Counter(ok=20)


@pytest.mark.slow
def test_a_run_needs_nothing_of_its_surroundings(tmp_path: Path) -> None:
    """A notebook's backend, a user's style, an ASCII terminal, a dead proxy, one core, foreign folders."""
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    for name in ("servers", "reports", "loadgen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    proxies = {f"{scheme}_PROXY": "http://127.0.0.1:9" for scheme in ("HTTP", "HTTPS", "ALL")}
    odd = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONIOENCODING": "ascii", **proxies}
    pinned = "taskset -pc 0 $$ >/dev/null" if shutil.which("taskset") else ""
    code, said = burstline(tmp_path, pinned, "--engine", "truth", *LOAD, **odd)
    noted("hostile surroundings", "20 ok, in ASCII", f"exit {code}", 0)
    assert code in (0, 4), said
    assert outcomes(tmp_path) == Counter(ok=20)
    assert said.isascii()
    assert "\\u" not in said
    assert "\\x" not in said
    (run,) = (tmp_path / "out").iterdir()
    assert "could not be drawn" not in (run / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_a_hard_limit_of_open_files_names_the_largest_burst_and_that_one_runs(tmp_path: Path) -> None:
    load = ("--engine", "truth", "--prompt-tokens", "8", "--output-tokens", "2")
    code, said = burstline(tmp_path, "ulimit -n 1024", *load, "--requests", "1000")
    assert (code, len(said.splitlines())) == (2, 1), said
    assert "at most 960 (" in said
    code, said = burstline(tmp_path, "ulimit -n 1024", *load, "--requests", "960")
    noted("a hard limit of 1,024 open files", "960 ok", f"exit {code}", 0)
    assert code in (0, 4), said
    assert outcomes(tmp_path) == Counter(ok=960)


@pytest.mark.slow
def test_a_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    load = ("--engine", "truth", "--prompt-tokens", "8", "--output-tokens", "2", "--requests", "1100")
    code, said = burstline(tmp_path, "ulimit -Sn 1024", *load)
    assert code in (0, 4), said
    assert outcomes(tmp_path) == Counter(ok=1100)


@namespaces
@pytest.mark.slow
@pytest.mark.parametrize(("n", "expected"), [(85, 2), (80, 0)])
def test_local_ports_are_enough_or_the_run_is_refused(n: int, expected: int, tmp_path: Path) -> None:
    few = "ip link set lo up; echo 40000 40099 >/proc/sys/net/ipv4/ip_local_port_range"
    again = f'[ -n "$INSIDE" ] || INSIDE=1 exec unshare -n sh -ec \'{few}\nexec "$@"\' sh "$@"'
    load = ("--engine", "truth", "--prompt-tokens", "8", "--output-tokens", "2")
    code, said = burstline(tmp_path, again, *load, "--requests", str(n))
    noted(f"{n} requests and 100 local ports", f"exit {expected}", f"exit {code}", 0)
    if expected == 2:
        assert (code, len(said.splitlines())) == (2, 1), said
        assert "84 are free (net.ipv4.ip_local_port_range is 40000 to 40099, " in said
        return
    assert code in (0, 4), said
    assert outcomes(tmp_path) == Counter(ok=n)


@namespaces
@pytest.mark.parametrize("where", [("--engine", "truth"), ("--url", "http://10.77.0.2:18500")], ids=" ".join)
@pytest.mark.parametrize(
    ("without", "told"),
    [
        ("unshare -n", "127.0.0.1 cannot be reached (Network is unreachable); expected a loopback device"),
        (
            "unshare -m sh -ec 'mount -t tmpfs none /proc; \"$@\"' sh",
            "/proc is empty; expected the kernel's list",
        ),
    ],
    ids=["loopback", "processes"],
)
def test_what_every_load_needs_is_missed_before_it(
    without: str, told: str, where: tuple[str, str], tmp_path: Path
) -> None:
    began_s = time.monotonic()
    code, said = burstline(
        tmp_path, f'[ -n "$INSIDE" ] || INSIDE=1 exec {without} "$0" -ec \'exec "$@"\' sh "$@"', *where, *LOAD
    )
    noted(f"a machine without {without}", "exit 2, one line", f"exit {code}", time.monotonic() - began_s)
    assert (code, len(said.splitlines())) == (2, 1), said
    assert told in said
    assert not (tmp_path / "out").exists()


@pytest.fixture
def other_machine() -> Iterator[tuple[str, str]]:
    """A namespace behind a link, with a healthy server at 10.77.0.2:18500; ours has the link's other end."""
    here, there = f"bl{os.getpid()}a", f"bl{os.getpid()}b"
    inside = [
        f"ip netns add {here}",
        f"ip netns add {there}",
        f"ip link add v0 netns {here} type veth peer name v0 netns {there}",
        *(f"ip -n {name} link set {device} up" for name in (here, there) for device in ("lo", "v0")),
        f"ip -n {here} addr add 10.77.0.1/24 dev v0",
        f"ip -n {there} addr add 10.77.0.2/24 dev v0",
    ]
    server = [sys.executable, "-P", "-m", "burstline.servers.truth", "--host", "10.77.0.2", "--port", "18500"]
    try:
        for line in inside:
            subprocess.run(line.split(), check=True)
        with subprocess.Popen(
            ["ip", "netns", "exec", there, *server],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.DEVNULL,
        ) as running:
            try:
                yield here, there
            finally:
                running.terminate()
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@namespaces
@pytest.mark.slow
def test_a_link_that_drops_costs_only_the_requests_of_that_time(
    other_machine: tuple[str, str], tmp_path: Path
) -> None:
    here, _ = other_machine
    begun = "until ls out/*/plan.parquet >/dev/null 2>&1; do sleep 0.2; done; sleep 3"
    drop = f"({begun}; ip -n {here} link set v0 down; sleep 3; ip -n {here} link set v0 up) >/dev/null 2>&1 &"
    load = ("--rate", "30", "--duration-s", "12", "--prompt-tokens", "8", "--output-tokens", "64")
    inside = f'{drop}\n[ -n "$INSIDE" ] || INSIDE=1 exec ip netns exec {here} "$@"'
    began_s = time.monotonic()
    _, said = burstline(tmp_path, inside, "--url", "http://10.77.0.2:18500", *load)
    (path,) = (tmp_path / "out").iterdir()
    run, seen = open_run(path), outcomes(tmp_path)
    noted("the link is away for 3 s", "some connect, the rest ok", counted(seen), time.monotonic() - began_s)
    assert set(seen) <= {"ok", "connect"}, said
    assert seen["ok"] > 180
    assert run.request_table.column("outcome").to_pylist()[-1] == "ok"
    assert "died" not in said
    assert run.manifest.status == "complete"
    if seen["connect"]:
        assert run.summary.verdict.state == State.FAILED
        assert "Network is unreachable" in said


@namespaces
@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.skipif(shutil.which("tc") is None, reason="tc is not installed")
def test_a_narrow_link_is_named_and_no_slo_on_tpot_is_judged(
    other_machine: tuple[str, str], tmp_path: Path
) -> None:
    here, there = other_machine
    narrow = f"ip netns exec {there} tc qdisc add dev v0 root tbf rate 4mbit burst 16kb latency 4s"
    inside = f'[ -n "$INSIDE" ] || {{ {narrow}; INSIDE=1 exec ip netns exec {here} "$@"; }}'
    load = ("--requests", "100", "--prompt-tokens", "8", "--output-tokens", "64", "--slo", "tpot.p50<=5s")
    began_s = time.monotonic()
    code, said = burstline(tmp_path, inside, "--url", "http://10.77.0.2:18500", *load)
    noted("a link of 4 Mbit/s", "a full link is named", f"exit {code}", time.monotonic() - began_s)
    assert outcomes(tmp_path) == Counter(ok=100), said
    assert "a link is full" in said
    (run,) = (tmp_path / "out").iterdir()
    (target,) = open_run(run).summary.targets
    assert "held on the way" in target.reason, said


@namespaces
@pytest.mark.slow
def test_a_name_whose_first_address_is_silent_is_reached_at_its_second(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n2001:db8::99 dual.example\n10.77.0.1 dual.example\n")
    made = "\n".join(
        [
            f"mount --bind {hosts} /etc/hosts",
            "ip link set lo up",
            "ip link add d0 type veth peer name d1",
            "ip link set d0 up",
            "ip link set d1 up",
            "ip addr add 2001:db8::1/64 dev d0 nodad",
            "ip addr add 10.77.0.1/24 dev d0",
            "ip neigh add 2001:db8::99 lladdr 02:00:00:00:00:99 dev d0",
            f"{sys.executable} -P -m burstline.servers.truth --host 10.77.0.1 --port 18500 >/dev/null &",
            "trap 'kill $!' EXIT",
        ]
    )
    again = f'[ -n "$INSIDE" ] || INSIDE=1 exec unshare -n -m sh -ec \'{made.replace(chr(39), chr(34))}\n"$@"\' sh "$@"'
    code, said = burstline(tmp_path, again, "--url", "http://dual.example:18500", *LOAD)
    noted("the first of two addresses is silent", "20 ok", f"exit {code}", 0)
    assert code in (0, 4), said
    assert outcomes(tmp_path) == Counter(ok=20)
