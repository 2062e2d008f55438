"""Ray's part: a child process that connects to a cluster and places one agent for each load driver.

Nothing of Ray runs in our own process: what blocks in its native code can be given up, an interrupt is heard
at any moment, and what Ray prints goes to the child's own output. An agent (`agent.py`) dials home by itself;
from then on Ray only holds what was reserved for it.
"""

import logging
import math
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from burstline import __version__
from burstline.servers.host.child import BLAS_THREADS, Child, ChildLostError, Failed, import_path
from burstline.servers.messages import EngineError
from burstline.workloads.options import with_parts
from burstline.workloads.request import WorkloadError

KNOCK_S: Final = 5.0
"""How long a cluster may take to accept a connection, and again to speak its protocol."""
IMPORT_S: Final = 60.0
CONNECT_S: Final = 10.0
"""How long Ray may take to be imported, and to connect where something answers as it does."""
HOW_TO_START: Final = "start one with `ray start --head`, or pass --ray HOST:PORT"
_HTTP2_HELLO: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What opens every gRPC connection, and so every talk with a Ray head; it answers with a frame of its own."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where the cluster is and what each worker takes of it; `address` "auto" is the one that runs here.

    `n_workers` is None for one on each node that has what a worker takes. With `canary` each worker checks
    its own timing at a truth process on its node.
    """

    address: str = "auto"
    n_workers: int | None = 1
    canary: bool = True
    resources: Mapping[str, float] = field(default_factory=dict)


def parse_ray(text: str) -> tuple[str, dict[str, float]]:
    """`HOST:PORT,client=1` as the address and what each driver reserves; WorkloadError for any other form."""
    address, parts = with_parts(text)
    try:
        resources = {name: float(number) for name, number in parts.items()}
    except ValueError:
        resources = {"": 0.0}
    if "," in address or not all(0 < amount < math.inf for amount in resources.values()):
        raise WorkloadError(f"--ray {text}: expected ADDRESS,NAME=NUMBER,..., e.g. auto,CPU=2,client=1")
    return address, resources


@dataclass(frozen=True, slots=True)
class _Placement:
    """The child's task: agents that dial the port of this machine, each with the key."""

    options: RayOptions
    most: int
    port: int
    key: bytes


def knock(address: str) -> None:
    """EngineError where no Ray head can be at `HOST:PORT`; anything else is left to Ray."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in address or not port.isdecimal():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S) as peer:
            peer.sendall(_HTTP2_HELLO)
            said = peer.recv(9)
        why = "" if said[3:4] == b"\x04" else "the service there is not a Ray head node"
    except socket.gaierror:
        why = f"there is no host {host!r}"
    except ConnectionRefusedError:
        why = "nothing listens there"
    except (TimeoutError, OverflowError):
        why = f"no answer within {KNOCK_S:g} s"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        raise EngineError(f"no Ray cluster at {address}: {why}; {HOW_TO_START}")


@contextmanager
def placed(options: RayOptions, most: int, port: int, key: bytes) -> Iterator[tuple[Child, int]]:
    """The child that holds the places, and how many agents it has sent on their way, at most `most`.

    EngineError where no cluster answers, WorkloadError where it has no room or Ray is not installed.
    """
    knock(options.address)
    with Child("burstline.cluster.placement", "Ray") as child:
        child.send(_Placement(options, most, port, key))
        try:
            child.receive(IMPORT_S)
            answer = child.receive(CONNECT_S)
        except ChildLostError as error:
            child.kill()
            raise EngineError(f"no Ray cluster at {options.address}: {error}; {HOW_TO_START}") from None
        yield child, answer


# In the child.


def main(home: Connection, task: _Placement) -> None:
    imported()
    home.send(None)
    ray = connected(task.options.address)
    bundle = {"CPU": 1.0, **task.options.resources}
    nodes = [node for node in ray.nodes() if node["Alive"]]

    def n_fit(has: Mapping[str, float]) -> int:
        return int(min(has.get(name, 0.0) // amount for name, amount in bundle.items()))

    room = [(node["NodeManagerHostname"], n_fit(node["Resources"])) for node in nodes]
    n = task.options.n_workers or min(task.most, sum(fit > 0 for _, fit in room))
    if n > sum(fit for _, fit in room) or not n:
        wanted = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
        has = ", ".join(f"{host} for {fit}" for host, fit in room)
        raise WorkloadError(
            f"the cluster has no room for {n or 'any'} workers of {wanted}; {has or 'it has no node'}; "
            "use fewer --workers or more nodes"
        )
    wants: dict[str, Any] = {"resources": {k: v for k, v in bundle.items() if k not in ("CPU", "GPU")}}
    wants |= {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_retries": 0}
    hold = ray.remote(hold_agent).options(scheduling_strategy="SPREAD", **wants)
    here = ray.util.get_node_ip_address()
    held = [hold.remote(here, task.port, task.key, task.options.canary) for _ in range(n)]
    home.send(n)
    while not home.poll(0.5):
        ended, held = ray.wait(held, timeout=0) if held else ([], [])
        for ref in ended:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:  # read while agents are awaited; later they are lost
                needs = f"each node needs Burstline {__version__} and `pip install 'ray[default]'`"
                home.send(Failed(EngineError(f"a worker could not start: {first_line(error)}; {needs}")))


@contextmanager
def ray_session(address: str) -> Iterator[Any]:
    """The connected `ray` module, in this process; on the way out nothing of ours is left on the cluster."""
    knock(address)
    ray = connected(address)
    try:
        yield ray
    finally:
        ray.shutdown()


def imported() -> Any:
    """The `ray` module; WorkloadError where it is not installed, or what it needs."""
    try:
        import ray
    except ImportError as error:
        missing = "" if error.name == "ray" else f" ({error})"
        raise WorkloadError(f"--ray needs Ray{missing}: pip install 'ray[default]'") from None
    return ray


def connected(address: str) -> Any:
    """The `ray` module, connected. EngineError where no cluster answers."""
    ray = imported()
    try:
        ray.init(
            address=address,
            namespace=f"burstline-{secrets.token_hex(4)}",
            runtime_env={"py_modules": [str(Path(__file__).parents[1])]},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = "" if address == "auto" else f" at {address}"
        # A mismatch of versions says over several lines which is where.
        why = " ".join(str(error).split())[:300] if "ersion" in str(error) else first_line(error)
        raise EngineError(f"no Ray cluster{where}: {why}; {HOW_TO_START}") from None
    return ray


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Ray's own errors carry a remote traceback; what went wrong is its last line.
    return (lines[-1] if lines and "Traceback" in str(error) else lines[0] if lines else repr(error))[:300]


# On a node.


def hold_agent(host: str, port: int, key: bytes, has_canary: bool) -> None:
    """Start an agent and wait until it ends. It outlives this process, so that Ray may fail meanwhile."""
    begin = "from burstline.cluster.agent import main; main()"
    agent = subprocess.Popen(
        (sys.executable, "-P", "-c", begin, host, str(port), str(int(has_canary))),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={BLAS_THREADS: "1"} | os.environ | {"PYTHONPATH": import_path()},
    )
    said, _ = agent.communicate(key)
    if words := said.decode(errors="replace").strip():
        raise EngineError(words.splitlines()[-1])
