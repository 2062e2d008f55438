"""The network to a server by the kernel's data: TCP round trips, and when sent bytes left. Only on Linux."""

import socket
import struct
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from burstline.loadgen.capture.drive_report import NetworkReport
from burstline.loadgen.wire.exchange import Exchange

ERR: Final = 8
"""EPOLLERR: the socket has an error, or a transmit stamp waits in its error queue."""

# include/uapi/linux/net_tstamp.h and include/uapi/asm-generic/socket.h; the socket module has no names.
_SO_TIMESTAMPING = 37
_TX_SOFTWARE, _SOFTWARE, _OPT_ID, _OPT_TSONLY = 1 << 1, 1 << 4, 1 << 7, 1 << 11
_FLAGS = _TX_SOFTWARE | _SOFTWARE | _OPT_ID | _OPT_TSONLY
_ORIGIN_TIMESTAMPING, _SENT = 4, 0
_TIMESPEC, _EXTENDED_ERROR = struct.Struct("qq"), struct.Struct("IBBBBII")
_STAMP_BYTES = 512

# struct tcp_info, include/uapi/linux/tcp.h: offsets of tcpi_rtt, tcpi_total_retrans and tcpi_min_rtt.
_INFO_BYTES, _RTT, _RETRANSMITS, _MIN_RTT = 256, 68, 100, 148
_UINT32 = struct.Struct("I")


def is_remote(addresses: Sequence[tuple[int, Any]]) -> bool:
    """Whether packets to any of these addresses leave this host's loopback."""
    hosts = [str(address[0]) for _, address in addresses]
    return any(not h.startswith("127.") and h != "::1" for h in hosts)


class Network:
    """Asks the kernel for TCP's view of closing sockets and, beyond the loopback, for transmit stamps."""

    def __init__(self, *, is_remote: bool = True) -> None:
        self.is_remote = is_remote
        self._least_rtt_us, self._rtt_us = array("q"), array("q")
        self._retransmits = 0

    def watch(self, sock: socket.socket) -> None:
        """Have the kernel stamp when bytes leave; the socket is connected."""
        with suppress(OSError):  # a kernel without transmit stamps
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, _FLAGS)

    def leave(self, sock: socket.socket) -> None:
        """Keep what TCP knows of a connection that stood; before it is closed."""
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return
        if len(info) < _MIN_RTT + _UINT32.size:
            return
        rtt_us, retransmits, least_us = (
            _UINT32.unpack_from(info, at)[0] for at in (_RTT, _RETRANSMITS, _MIN_RTT)
        )
        self._retransmits += retransmits
        if 0 < least_us < 2**32 - 1:
            self._least_rtt_us.append(least_us)
            self._rtt_us.append(rtt_us)

    def read_stamps(self, sock: socket.socket, exchange: Exchange | None) -> None:
        """Empty the socket's error queue; the latest stamps are of the request's last byte."""
        while True:
            try:
                _, ancillary, _, _ = sock.recvmsg(0, _STAMP_BYTES, socket.MSG_ERRQUEUE)
            except OSError:  # empty, or the connection is broken: who reads it will see
                return
            stamp_ns, kind = 0, None
            for _, type_, data in ancillary:
                if type_ == _SO_TIMESTAMPING:
                    seconds, ns = _TIMESPEC.unpack_from(data)
                    stamp_ns = seconds * 1_000_000_000 + ns
                elif len(data) >= _EXTENDED_ERROR.size:
                    _, origin, _, _, _, info, _ = _EXTENDED_ERROR.unpack_from(data)
                    kind = info if origin == _ORIGIN_TIMESTAMPING else kind
            if exchange is not None and stamp_ns and kind == _SENT:
                exchange.left = stamp_ns, time.monotonic_ns()

    def report(self) -> NetworkReport | None:
        """Round trips and retransmissions of all connections; None without one, or of a sound loopback."""
        if not self._rtt_us or not (self.is_remote or self._retransmits):
            return None
        p99_ns = int(np.quantile(self._rtt_us, 0.99) * 1000)
        least_ns = int(np.median(self._least_rtt_us) * 1000)
        return NetworkReport(len(self._rtt_us), least_ns, p99_ns, self._retransmits)
