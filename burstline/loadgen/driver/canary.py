"""The in-run canary: a truth process streams stamped events to the driver for the whole run.

What the driver reports of them minus what was true is the instrument's error under this load, on this
machine, now. The truth process is a child (`burstline.servers.host.child`).
"""

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Final

from burstline.loadgen.capture.drive_report import CANARY_PERIOD_S
from burstline.servers.host.child import Child
from burstline.servers.host.kernel import allowed_cores, keep_to, send_at_once

REQUEST: Final = b"GET /canary HTTP/1.1\r\nhost: canary\r\n\r\n"
INDEX: Final = -1
"""The index of the canary's exchange, which is none of the plan's requests."""
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_GOLDEN: Final = 0.6180339887498949


class TruthProcess:
    """The process that streams the truth at `port` of the loopback; it starts while its starter goes on.

    The starter listens there: one that is lost leaves a connection without events, and no load waits for it.
    """

    def __init__(self, child: Child, listener: socket.socket) -> None:
        self.pid = child.pid
        self.port: int = listener.getsockname()[1]
        child.send(None)  # its task is to accept one connection
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(child.connection.fileno())) as home:
            socket.send_fds(home, [b"!"], [listener.fileno()])

    def leave_to_server(self, n_cores: int) -> None:
        """Run on none of the first `n_cores` cores, those of the server, where others are left."""
        keep_to(self.pid, allowed_cores()[n_cores:])


@contextlib.contextmanager
def canary() -> Iterator[TruthProcess]:
    with (
        Child("burstline.loadgen.driver.canary", "the canary") as child,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        yield TruthProcess(child, listener)


def due_after_s(k: int) -> float:
    """When event `k` is due, from the begin of the stream: gaps take every size from 0.5 to 1.5 periods, so
    that no timer of a server is in step.

    The square is why: multiples of the golden ratio alone make gaps of two sizes.
    """
    return CANARY_PERIOD_S * (k - 0.5 * (k * k * _GOLDEN % 1.0))


def main(home: Connection, _: None) -> None:
    """Serve one connection: an event each CANARY_PERIOD_S that names its own sending and the CPU time so far.

    Its third number is when the send of the event before had returned: by then the kernel had stamped it.
    """
    with socket.socket(fileno=os.dup(home.fileno())) as starter:
        listener = socket.recv_fds(starter, 1, 1)[1][0]
    with socket.socket(fileno=listener) as server:
        connection = server.accept()[0]
    with connection, contextlib.suppress(OSError):
        send_at_once(connection)
        connection.recv(4096)
        connection.sendall(_HEAD)
        begin_s, began_cpu_ns, sent_ns = time.monotonic(), time.process_time_ns(), 0
        for k in itertools.count(1):
            time.sleep(max(0.0, begin_s + due_after_s(k) - time.monotonic()))
            cpu_ns = time.process_time_ns() - began_cpu_ns
            event = b"data: %d %d %d\n\n" % (time.monotonic_ns(), cpu_ns, sent_ns)
            connection.sendall(b"%x\r\n%s\r\n" % (len(event), event))
            sent_ns = time.monotonic_ns()
