"""Waiting for what a process does by itself."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(true: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """What `true` says, once it says something."""
    deadline = time.monotonic() + timeout_s
    while not (seen := true()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
    return seen
