"""A session on a Ray cluster: its options, connecting to it, and copying files home from its nodes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import secrets
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from burstline.servers.messages import EngineError
from burstline.workloads.options import with_parts
from burstline.workloads.request import WorkloadError

PIECE_BYTES: Final = 8 << 20
"""Captures travel in pieces of this size, two at a time."""
CALL_TIMEOUT_S: Final = 15.0
HOW_TO_START: Final = "start one with `ray start --head`, or pass --ray HOST:PORT"


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where the cluster is and what each worker takes of it; `address` "auto" is the one that runs here.

    With `canary` each worker checks its own timing at a truth process on its node.
    """

    address: str = "auto"
    n_workers: int = 1
    canary: bool = True
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def bundle(self) -> dict[str, float]:
        return {"CPU": 1.0, **self.resources}


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


class NodeFolder:
    """A folder on a node, whose files come home in pieces. Base of the actors.

    The actor holds a lock on its folder. A killed actor leaves its folder unlocked: the next one on the node
    removes it, a minute later at the earliest, since a folder is made first and then locked.
    """

    def __init__(self, prefix: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock = os.open(self._folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        for left in self._folder.parent.glob(f"{prefix}*"):
            with contextlib.suppress(OSError):
                if left.stat().st_mtime > self._folder.stat().st_mtime - 60:
                    continue
                lock = os.open(left, os.O_RDONLY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left, ignore_errors=True)
                finally:
                    os.close(lock)

    def files(self, below: str) -> list[tuple[str, int]]:
        """Path within `below` and size in bytes of each file there."""
        top = self._folder / below
        paths = sorted(path for path in top.rglob("*") if path.is_file() and not path.is_symlink())
        return [(str(path.relative_to(top)), path.stat().st_size) for path in paths]

    def piece(self, path: str, at: int, n_bytes: int) -> bytes:
        with (self._folder / path).open("rb") as file:
            file.seek(at)
            return file.read(n_bytes)

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)


def fetch(ray: Any, actor: Any, below: str, into: Path) -> None:
    """Copy every file that the actor has in its folder `below` into ours; whole files only get their name."""
    into.mkdir(parents=True, exist_ok=True)
    for name, size in ray.get(actor.files.remote(below), timeout=CALL_TIMEOUT_S):
        path = into / name
        if not path.resolve().is_relative_to(into.resolve()):
            raise EngineError(f"a worker names a file outside its folder: {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        incoming = path.with_name(f"{path.name}.incoming")
        with incoming.open("wb") as file:
            for piece in _pieces(ray, actor, f"{below}/{name}", size):
                file.write(piece)
        incoming.rename(path)


def _pieces(ray: Any, actor: Any, path: str, size: int) -> Iterator[bytes]:
    ahead: deque[Any] = deque()
    for at in range(0, size, PIECE_BYTES):
        ahead.append(actor.piece.remote(path, at, min(PIECE_BYTES, size - at)))
        if len(ahead) == 2:
            yield ray.get(ahead.popleft(), timeout=4 * CALL_TIMEOUT_S)
    while ahead:
        yield ray.get(ahead.popleft(), timeout=4 * CALL_TIMEOUT_S)


@contextmanager
def ray_session(options: RayOptions) -> Iterator[Any]:
    """The connected `ray` module; on the way out nothing of ours is left on the cluster.

    WorkloadError where Ray is not installed; EngineError where no cluster answers or its versions differ.
    """
    try:
        import ray
    except ImportError:
        raise WorkloadError("--ray needs Ray: pip install 'burstline[ray]'") from None
    try:
        with _quiet_stderr():
            ray.init(
                address=options.address,
                namespace=f"burstline-{secrets.token_hex(4)}",
                runtime_env={"py_modules": [str(Path(__file__).parents[1])]},
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = "" if options.address == "auto" else f" at {options.address}"
        raise EngineError(f"no Ray cluster{where}: {first_line(error)}; {HOW_TO_START}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Ray's own errors carry a remote traceback; what went wrong is its last line.
    return (lines[-1] if lines and "Traceback" in str(error) else lines[0] if lines else repr(error))[:300]


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Ray's start-up chatter on file descriptor 2 would break the one-line error."""
    sys.stderr.flush()
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
