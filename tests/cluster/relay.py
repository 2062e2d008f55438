"""Carries Ethernet frames between two TAP devices, those in one direction late: a slow link without `netem`.

    python relay.py NAMESPACE DELAY_MS BRIDGE

Makes a TAP on the bridge and one, `eth0`, in the namespace; what the namespace sends is DELAY_MS late.
Prints "ready"; runs until its standard input ends.
"""

import contextlib
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return fd


def main() -> None:
    namespace, delay_ms, bridge = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    outside, inside = tap(f"{namespace}o"), tap(f"{namespace}i")
    for command in (
        f"ip link set {namespace}o master {bridge} up",
        f"ip link set {namespace}i netns {namespace} name eth0",
    ):
        subprocess.run(command.split(), check=True)
    with contextlib.suppress(OSError):  # it sleeps nearly always; a busy machine must not add to the delay
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    late: list[tuple[float, int, bytes]] = []
    n = 0
    while True:
        timeout = max(0.0, late[0][0] - time.monotonic()) if late else 0.5
        readable = select.select([outside, inside, sys.stdin], [], [], timeout)[0]
        if sys.stdin in readable:
            return
        for source in readable:
            while True:
                try:
                    frame = os.read(source, 65536)
                except (BlockingIOError, OSError):
                    break
                if source == inside:
                    n += 1
                    heapq.heappush(late, (time.monotonic() + delay_ms / 1e3, n, frame))
                else:
                    _write(inside, frame)
        while late and late[0][0] <= time.monotonic():
            _write(outside, heapq.heappop(late)[2])


def _write(fd: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a link that is down loses frames
        os.write(fd, frame)


if __name__ == "__main__":
    main()
