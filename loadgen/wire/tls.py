"""TLS without a socket: ciphertext in, plain text out, so that the wire keeps its stamps under https."""

from __future__ import annotations

import ssl

_RECORD_BYTES = 1 << 18


class Channel:
    """One TLS connection over two memory buffers. Whoever owns the socket moves the bytes."""

    __slots__ = ("_from_peer", "_tls", "_to_peer", "closed", "standing")

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._from_peer, self._to_peer = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._from_peer, self._to_peer, server_hostname=host)
        self.standing = False
        self.closed = False  # the peer has sent close_notify: no more plain text will come

    def shake(self) -> bool:
        """Take the handshake as far as it goes; True once it is done. Raises ssl.SSLError."""
        try:
            self._tls.do_handshake()
            self.standing = True
        except ssl.SSLWantReadError:
            pass
        return self.standing

    def outgoing(self) -> bytes:
        """What has to be sent to the peer now."""
        return self._to_peer.read()

    def encrypt(self, plain: bytes) -> bytes:
        self._tls.write(plain)
        return self._to_peer.read()

    def feed(self, received: memoryview) -> None:
        self._from_peer.write(received)

    def decrypt(self) -> bytes:
        """All plain text that has come whole; b"" while a record is still open. Raises ssl.SSLError.

        `closed` says afterwards whether the peer has ended its side.
        """
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
