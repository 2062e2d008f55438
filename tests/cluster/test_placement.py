"""A wrong address of a cluster is refused at once, with what is wrong."""

import socket
import threading
import time

import pytest

from burstline.cluster.placement import knock, parse_ray
from burstline.servers.messages import EngineError
from burstline.workloads.request import WorkloadError


def answering(said: bytes) -> str:
    """The address of a server that says this to whoever connects."""
    door = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        peer, _ = door.accept()
        with door, peer:
            peer.recv(100)
            peer.sendall(said)

    threading.Thread(target=answer, daemon=True).start()
    return f"127.0.0.1:{door.getsockname()[1]}"


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return f"127.0.0.1:{door.getsockname()[1]}"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (closed_port, "nothing listens there"),
        (lambda: answering(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "the service there is not a Ray head node"),
        (lambda: answering(b""), "the service there is not a Ray head node"),
        (lambda: "no-such-host.invalid:6379", "there is no host"),
    ],
)
def test_what_is_no_cluster_is_known_before_ray_is_asked(address, why):
    began = time.monotonic()
    with pytest.raises(EngineError, match=rf"no Ray cluster at .*({why}).*ray start --head"):
        knock(address())
    assert time.monotonic() - began < 10


def test_a_grpc_server_and_addresses_without_a_port_are_left_to_ray():
    knock(answering(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))))
    knock("auto")
    knock("ray://somewhere:10001")


@pytest.mark.parametrize("text", ["auto,tpu", "a,b", "auto,CPU=0", "auto,CPU=nan"])
def test_what_workers_reserve_is_a_number_each(text):
    with pytest.raises(WorkloadError, match="expected ADDRESS,NAME=NUMBER"):
        parse_ray(text)
