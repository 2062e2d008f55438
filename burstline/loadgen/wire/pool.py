"""Connections to one server: opened ahead at a bounded pace, reused, replaced when the server closes them."""

import errno
import os
import socket
import ssl
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from select import epoll
from typing import Any, Final

from burstline.loadgen.wire.exchange import Exchange
from burstline.loadgen.wire.network import Network
from burstline.servers.destination import NEXT_ADDRESS_S
from burstline.servers.host.kernel import send_at_once, stamp_reads

IN: Final = 1
OUT: Final = 4
"""The values of EPOLLIN and EPOLLOUT. Other bits (an error, a hang-up) mean: read, and see."""
_RECORD_BYTES = 1 << 18


class Channel:
    """One TLS connection over two memory buffers. The owner of the socket moves the bytes."""

    __slots__ = ("_from_peer", "_tls", "_to_peer", "closed")

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._from_peer, self._to_peer = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._from_peer, self._to_peer, server_hostname=host)
        self.closed = False  # the peer has sent close_notify: no more plain text will come

    def shake(self, received: bytes) -> tuple[bool, bytes]:
        """Take the handshake as far as it goes: whether it is done, and what to send. Raises ssl.SSLError."""
        self._from_peer.write(received)
        is_done = True
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            is_done = False
        return is_done, self._to_peer.read()

    def encrypt(self, plain: bytes) -> bytes:
        self._tls.write(plain)
        return self._to_peer.read()

    def decrypted(self, received: bytes | memoryview) -> bytes:
        """All plain text that has come whole with these bytes; b"" in the middle of a record.

        `closed` says afterwards whether the peer has ended its side. Raises ssl.SSLError.
        """
        self._from_peer.write(received)
        pieces = []
        try:
            while piece := self._tls.read(_RECORD_BYTES):
                pieces.append(piece)
            self.closed = True  # nothing, and no wish for more: a read after close_notify
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.closed = True
        return b"".join(pieces)


# A quarter of the shortest listen backlog in use, hypercorn's 100: four drivers that open at once fit into
# it. What overflows a backlog waits a second for the next SYN.
_MAX_CONNECTING = 24
_CONNECT_TIMEOUT_NS = 10_000_000_000
_N_TRIES = 4
_NEXT_ADDRESS_NS = int(NEXT_ADDRESS_S * 1e9)

# A server that closes connections within a second, before any request, is asked more and more slowly.
_STILLBORN_NS = 1_000_000_000
_FIRST_PAUSE_NS = 10_000_000
_LONGEST_PAUSE_NS = 1_000_000_000
_N_STILLBORN = 5

now = time.monotonic_ns


@dataclass(slots=True, eq=False, repr=False)
class Connection:
    """A socket to the server. `connected_ns` is when it stood (TLS included), None until then.

    `place` is that of its address among the server's. `used` says that it has carried a reply before, the
    last until `free_ns`; `adopted` that it is not to the server; `unsent` is what no socket took yet.
    """

    sock: socket.socket
    tries: int
    place: int = 0
    fd: int = field(init=False)
    recvmsg_into: Any = field(init=False)
    opened_ns: int = field(default_factory=now)
    connected_ns: int | None = None
    exchange: Exchange | None = None
    tls: Channel | None = None
    unsent: memoryview | None = None
    is_open: bool = True
    used: bool = False
    free_ns: int = 0
    adopted: bool = False

    def __post_init__(self) -> None:
        self.fd = self.sock.fileno()  # kept: `fileno()` is -1 once the socket is closed
        self.recvmsg_into = self.sock.recvmsg_into
        self.sock.setblocking(False)
        send_at_once(self.sock)
        stamp_reads(self.sock)


class Pool:
    """Keeps as many connections free or on their way as the wire wants.

    `idle` are free now, last used last. A connect that fails is tried again at the next ticks, over the
    server's other addresses too; the address that has answered comes first from then on. `failure` is why the
    latest failed for good, None once one has stood again. `refusals` are those that failed for good since
    they were last looked at: when the last try began, and why it failed. `n_stillborn` counts how often in a
    row connections were closed unused soon after they stood.

    Invariants: `by_fd` holds every open connection, `idle` and `_connecting` are disjoint parts of it. A
    descriptor is closed only by `sweep`, at the end of a pass: the kernel hands out the lowest free number,
    so one closed at once could be a new connection's while the poller's events for the old one still wait.
    """

    def __init__(
        self,
        poller: epoll,
        addresses: Sequence[tuple[int, Any]],
        tls: ssl.SSLContext | None,
        host: str,
        network: Network,
    ) -> None:
        self.by_fd: dict[int, Connection] = {}
        self.idle: dict[Connection, None] = {}
        self.connect_ns = array("q")
        self.failure: str | None = None
        self.refusals: list[tuple[int, str]] = []
        self._poller, self._addresses, self._tls, self._host = poller, addresses, tls, host
        self._best: int | None = None  # of the addresses, the first that has answered
        self._network = network
        self._connecting: dict[Connection, None] = {}
        self._retries: list[int] = []
        self._closing: list[socket.socket] = []
        self._n_wanted = 0
        self.n_stillborn = 0
        self._pause_until_ns = 0

    def adopt(self, sock: socket.socket) -> Connection:
        """A connection that stands already, read like any other and never idle: the canary's."""
        connection = Connection(sock, 0, connected_ns=now(), adopted=True)
        self.by_fd[connection.fd] = connection
        self._poller.register(connection.fd, IN)
        return connection

    def want(self, n_free: int) -> None:
        """From now on `n_free` connections shall be free, or on their way."""
        self._n_wanted = n_free
        if self.n_stillborn and now() < self._pause_until_ns:
            return  # `tick` asks again
        missing = n_free - len(self.idle) - len(self._connecting) - len(self._retries)
        for _ in range(min(missing, _MAX_CONNECTING - len(self._connecting))):
            if not self.open():
                break

    @property
    def is_settled(self) -> bool:
        """Whether all that was wanted stands, or cannot."""
        hopeless = self.failure is not None or self.n_stillborn >= _N_STILLBORN
        enough = hopeless or len(self.idle) >= self._n_wanted
        return enough and not self._connecting and not self._retries

    def advance(self, connection: Connection) -> bool:
        """Take a connection that is being opened one step further; True once it stands (and is idle)."""
        try:
            if not self._handshake(connection):
                return False
        except (OSError, ssl.SSLError) as error:
            self._miss(connection, error)
            return False
        connection.connected_ns = now()
        self.connect_ns.append(connection.connected_ns - connection.opened_ns)
        if self._network.is_remote:
            self._network.watch(connection.sock)
        del self._connecting[connection]
        self.idle[connection] = None
        self.failure = None
        self._best = connection.place if self._best is None else self._best
        self.want(self._n_wanted)
        return True

    def note_unused(self, connection: Connection) -> None:
        """A connection was closed while idle: wait before the next where it had stood for hardly a second."""
        at = now()
        born_ns = connection.connected_ns
        if connection.used or born_ns is None or at - born_ns > _STILLBORN_NS or at < self._pause_until_ns:
            return
        self._pause_until_ns = at + min(_FIRST_PAUSE_NS << min(self.n_stillborn, 10), _LONGEST_PAUSE_NS)
        self.n_stillborn += 1

    def drop(self, connection: Connection) -> None:
        """Close it: at once for the poller, at the end of the pass for the kernel (see the invariants)."""
        # The flag first: callers further up this pass hold the connection and look at it before they write.
        connection.is_open = False
        del self.by_fd[connection.fd]
        self.idle.pop(connection, None)
        self._connecting.pop(connection, None)
        self._poller.unregister(connection.fd)
        self._note_network(connection)
        self._closing.append(connection.sock)

    def sweep(self) -> None:
        for sock in self._closing:
            sock.close()
        self._closing.clear()

    def tick(self, at_ns: int) -> None:
        """Try again what failed, give up what takes too long."""
        self.sweep()
        for each in list(self._connecting):  # an address that has never answered is passed over soon, once
            passes_soon = 1 < len(self._addresses) > each.tries and each.place != self._best
            if at_ns - each.opened_ns > (_NEXT_ADDRESS_NS if passes_soon else _CONNECT_TIMEOUT_NS):
                self._miss(each, TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        # Out of the list first: a try that fails at once enters it again, or empties it.
        n = max(0, _MAX_CONNECTING - len(self._connecting))
        again, self._retries = self._retries[:n], self._retries[n:]
        for tries in again:
            self.open(tries)
        if self.n_stillborn:
            self.want(self._n_wanted)

    def close(self) -> None:
        for connection in self.by_fd.values():
            self._note_network(connection)
            connection.sock.close()
        self.sweep()

    def _note_network(self, connection: Connection) -> None:
        if connection.connected_ns is not None and not connection.adopted:
            self._network.leave(connection.sock)

    def open(self, tries: int = 0) -> bool:
        """Begin to open a connection after so many tries; False where that fails at once."""
        place = ((self._best or 0) + tries) % len(self._addresses)
        family, address = self._addresses[place]
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # out of file descriptors, as a rule
            self.failure = f"cannot open a socket: {error}"
            return False
        connection = Connection(sock, tries, place)
        self.by_fd[connection.fd] = connection
        self._connecting[connection] = None
        # Before the connect: on the loopback it may stand, or be refused, before `connect_ex` returns.
        self._poller.register(connection.fd, OUT)
        if (code := sock.connect_ex(address)) not in (0, errno.EINPROGRESS):
            self._miss(connection, OSError(code, os.strerror(code)))
            return False
        return True

    def _handshake(self, connection: Connection) -> bool:
        sock, received = connection.sock, b""
        if connection.tls is not None:
            received = sock.recv(1 << 16)
            if not received:
                raise ConnectionResetError(errno.ECONNRESET, "closed during the TLS handshake")
        else:
            if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            self._poller.modify(connection.fd, IN)
            if self._tls is None:
                return True
            connection.tls = Channel(self._tls, self._host)
        is_done, data = connection.tls.shake(received)
        sock.send(data)  # a few hundred bytes into an empty send buffer: taken whole
        return is_done

    def _miss(self, connection: Connection, error: OSError | ssl.SSLError) -> None:
        tries, n = connection.tries + 1, len(self._addresses)
        self.drop(connection)
        twice = self._best is None and n > 1  # the second time with more patience
        if tries < (n * (1 + twice) if isinstance(error, TimeoutError | ssl.SSLError) else _N_TRIES):
            self._retries.append(tries)
            return
        host, port = self._addresses[connection.place][1][:2]
        self.failure = f"cannot connect to {host}:{port}: {error.strerror or error}"
        self.refusals.append((connection.opened_ns, self.failure))
        if all(each.connected_ns is None or each.adopted for each in self.by_fd.values()):
            self._retries.clear()  # none stands: the rest would fail too, and requests wait for an answer
