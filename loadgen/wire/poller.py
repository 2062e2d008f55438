"""One face for epoll and for what other systems have."""

from __future__ import annotations

import select
import selectors
from typing import Final, Protocol

IN: Final = 1
OUT: Final = 4
"""The values of EPOLLIN and EPOLLOUT. Other bits (an error, a hang-up) mean: read, and see."""


class Poller(Protocol):
    def register(self, fd: int, mask: int, /) -> None: ...
    def modify(self, fd: int, mask: int, /) -> None: ...
    def unregister(self, fd: int, /) -> None: ...
    def poll(self, timeout_s: float, max_events: int, /) -> list[tuple[int, int]]: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


def new_poller() -> Poller:
    return select.epoll() if hasattr(select, "epoll") else _Selector()


class _Selector:
    """kqueue (macOS, BSD) through the standard library."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def register(self, fd: int, mask: int) -> None:
        self._selector.register(fd, _to_selectors(mask))

    def modify(self, fd: int, mask: int) -> None:
        self._selector.modify(fd, _to_selectors(mask))

    def unregister(self, fd: int) -> None:
        self._selector.unregister(fd)

    def poll(self, timeout_s: float, max_events: int) -> list[tuple[int, int]]:
        ready = self._selector.select(timeout_s)
        return [
            (key.fd, bool(mask & selectors.EVENT_READ) * IN | bool(mask & selectors.EVENT_WRITE) * OUT)
            for key, mask in ready[:max_events]
        ]

    def fileno(self) -> int:
        return int(self._selector.fileno()) if hasattr(self._selector, "fileno") else 1 << 30

    def close(self) -> None:
        self._selector.close()


def _to_selectors(mask: int) -> int:
    return bool(mask & IN) * selectors.EVENT_READ | bool(mask & OUT) * selectors.EVENT_WRITE
