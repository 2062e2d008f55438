"""Parse HTTP requests from a buffer, with the kernel's arrival timestamps."""

import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from burstline.servers.host.wishes import SO_TIMESTAMPNS

_MAX_HEAD_BYTES = 1 << 16
_SLACK_NS = 20_000
"""How far two readings of the two clocks may miss each other."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One whole HTTP request. Header names are lower case; `arrival_ns` is when its last byte was there. The
    connection ends with the reply where the client does not `keep_alive`."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    arrival_ns: int
    keep_alive: bool = True


def take_call(inbox: bytearray, arrival_ns: int) -> HttpRequest | None:
    """Takes one whole request off the inbox; None where it is not whole yet, ValueError where it is none."""
    head_end = inbox.find(b"\r\n\r\n")
    if head_end < 0:
        if len(inbox) > _MAX_HEAD_BYTES:
            raise ValueError("the request's head is too long")
        return None
    request_line, *lines = bytes(inbox[:head_end]).split(b"\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    if b"transfer-encoding" in headers:
        raise ValueError("chunked requests are not served; send a Content-Length")
    body_begin = head_end + 4
    body_end = body_begin + int(headers.get(b"content-length", b"0"))
    if len(inbox) < body_end:
        return None
    method, path, version = request_line.decode("latin-1").split(" ")
    connection = headers.get(b"connection", b"").lower()
    keep_alive = connection == b"keep-alive" if version == "HTTP/1.0" else b"close" not in connection
    body = bytes(inbox[body_begin:body_end])
    call = HttpRequest(method, path.partition("?")[0], headers, body, arrival_ns, keep_alive)
    del inbox[:body_end]
    return call


def kernel_ns_of(ancillary: list[tuple[int, int, bytes]], now_ns: int) -> int | None:
    """The kernel's receive stamp on the monotonic clock; None where there is none that can be believed."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) == 16:
            seconds, ns = int.from_bytes(data[:8], sys.byteorder), int.from_bytes(data[8:], sys.byteorder)
            offset_ns = _realtime_offset_ns()
            kernel_ns = seconds * 1_000_000_000 + ns - offset_ns
            # A lag out of this range is a step of the wall clock, not a delay.
            lag_ns = now_ns - kernel_ns
            return min(kernel_ns, now_ns) if -_SLACK_NS <= lag_ns < 60_000_000_000 else None
    return None


def _realtime_offset_ns() -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC now; read again where the scheduler came between the readings."""
    for _ in range(4):
        before_ns = time.monotonic_ns()
        real_ns = time.clock_gettime_ns(time.CLOCK_REALTIME)
        after_ns = time.monotonic_ns()
        if after_ns - before_ns < _SLACK_NS:
            break
    return real_ns - (before_ns + after_ns) // 2
