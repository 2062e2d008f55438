"""A Ray cluster on one machine: raylets in network namespaces of their own, one with a shifted clock.

    10.97.0.1  head      10.97.0.2  one      10.97.0.3  two (monotonic clock 1,000 s ahead)

All hang on a bridge; each namespace has its own loopback and 10.97.0.0/24, nothing else. The bridge has a
namespace too: where Docker was started, the machine's own firewall drops what bridges forward.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
NET = "10.97.0"
SHIFT_S = 1000


def can_make_namespaces() -> bool:
    """Whether this machine lets us make network and time namespaces, and has Ray."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    probe = ["unshare", "-T", "--monotonic", "5", "--fork", "true"]
    with contextlib.suppress(ImportError):
        import ray  # noqa: F401

        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return False


@dataclass
class Lab:
    """`hosts[k]` is a namespace with the address NET.(k+1); `raylets` are process groups that we started.

    `hub` is the bridge's namespace.
    """

    hosts: tuple[str, ...]
    folder: Path
    hub: str
    raylets: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def address(self, host: str) -> str:
        return f"{NET}.{self.hosts.index(host) + 1}"

    def command(self, host: str, argv: list[str]) -> list[str]:
        return ["ip", "netns", "exec", host, *argv]

    def env(self) -> dict[str, str]:
        quiet = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",  # a token in the home of who runs the tests would else be asked for
            "RAY_DISABLE_DOCKER_CPU_WARNING": "1",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        return {**os.environ, **quiet}

    def run(self, host: str, argv: list[str], timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(host, argv),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.env(),
            check=False,
        )

    def start_raylet(self, host: str, resources: Mapping[str, float], *, shifted: bool = False) -> None:
        """`ray start --block` in the host's namespace, as a process group of its own."""
        ray = str(Path(sys.executable).with_name("ray"))
        head = host == self.hosts[0]
        where = ["--head", "--port", "6380"] if head else ["--address", f"{NET}.1:6380"]
        amounts = "{" + ", ".join(f'"{name}": {amount:g}' for name, amount in resources.items()) + "}"
        argv = [ray, "start", *where, "--node-ip-address", self.address(host), "--num-cpus", "2"]
        argv += (
            ["--num-gpus", "0", "--resources", amounts, "--include-dashboard", "false"]
            if head
            else ["--num-gpus", "0", "--resources", amounts]
        )
        argv += ["--object-store-memory", "200000000", "--disable-usage-stats", "--block"]
        if head:
            argv += ["--temp-dir", str(self.folder / "ray")]
        if shifted:
            argv = ["unshare", "-T", "--monotonic", str(SHIFT_S), "--fork", *argv]
        with (self.folder / f"{host}.log").open("wb") as log:
            self.raylets[host] = subprocess.Popen(
                self.command(host, argv), env=self.env(), stdout=log, stderr=log, start_new_session=True
            )

    def wait_for_nodes(self, n: int, timeout_s: float = 300) -> None:
        code = (
            f"import ray; ray.init('{NET}.1:6380', logging_level='ERROR'); "
            "print(sum(node['Alive'] for node in ray.nodes()))"
        )
        end = time.monotonic() + timeout_s
        said = ""
        while time.monotonic() < end:
            done = self.run(self.hosts[0], [sys.executable, "-c", code], timeout_s)
            said = done.stdout + done.stderr
            if done.stdout.strip().endswith(str(n)):
                return
            time.sleep(1)
        raise AssertionError(f"no {n} Ray nodes within {timeout_s} s: {said[-500:]}")

    def unplug(self, host: str) -> None:
        """Take the host's link down: nothing it sends arrives any more."""
        sh(f"ip -n {self.hub} link set {host}v down")

    def pids(self) -> set[int]:
        return {pid for host in self.hosts for pid in _pids_in(host)}

    def kill_raylet(self, host: str) -> None:
        process = self.raylets.pop(host)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=10)
        for pid in _pids_in(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _pids_in(host: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False)
    return [int(pid) for pid in done.stdout.split()]


@contextmanager
def lab(
    folder: Path, n_hosts: int = 3, tag: str = "bl", late_ms: Mapping[int, float] = MappingProxyType({})
) -> Iterator[Lab]:
    """The namespaces, without raylets; everything in them is ended on the way out.

    What host k sends is `late_ms[k]` late, what it receives is not. The names hold our pid, because a
    run that was killed leaves its namespaces behind.
    """
    tag = f"{tag}{os.getpid()}n"
    hosts = tuple(f"{tag}{k}" for k in range(n_hosts))
    hub, bridge = f"{tag}hub", f"{tag}br"
    sh(f"ip netns add {hub}")
    sh(f"ip -n {hub} link add {bridge} type bridge")
    sh(f"ip -n {hub} link set {bridge} up")
    made = Lab(hosts, folder, hub)
    relays: list[subprocess.Popen[str]] = []
    try:
        for k, host in enumerate(hosts):
            sh(f"ip netns add {host}")
            if k in late_ms:
                relays.append(_relay(host, late_ms[k], hub, bridge))
            else:
                sh(f"ip link add {host}v netns {hub} type veth peer name eth0 netns {host}")
                sh(f"ip -n {hub} link set {host}v master {bridge} up")
            sh(f"ip -n {host} addr add {NET}.{k + 1}/24 dev eth0")
            sh(f"ip -n {host} link set eth0 up")
            sh(f"ip -n {host} link set lo up")
        yield made
    finally:
        for host in list(made.raylets):
            made.kill_raylet(host)
        for relay in relays:
            relay.communicate(timeout=10)
        for host in hosts:
            for pid in _pids_in(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            # The namespace goes when its last process has; its link must not wait for that.
            for command in (f"ip -n {hub} link del {host}v", f"ip netns del {host}"):
                subprocess.run(command.split(), capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", hub], capture_output=True, check=False)


def _relay(host: str, late_ms: float, hub: str, bridge: str) -> subprocess.Popen[str]:
    relay = subprocess.Popen(
        [
            *("ip", "netns", "exec", hub, sys.executable),
            *(str(Path(__file__).with_name("relay.py")), host, str(late_ms), bridge),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert relay.stdout is not None
    assert relay.stdout.readline().strip() == "ready"
    return relay


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
