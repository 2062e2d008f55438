"""The reader in C (`loadgen/reader.c`), compiled on first use by the system's own compiler and kept.

Where there is no compiler, or no Linux, the reader in Python does the same at about twice the CPU per token.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from loadgen.record.files import user_cache
from loadgen.wire.poller import Poller
from loadgen.wire.pool import KERNEL_STAMPS, Connection
from loadgen.wire.reader import PythonReader, Reader
from workloads.request import WorkloadError

VARIABLE: Final = "BURSTLINE_READER"
"""`python` does without the compiler, `compiled` will not do without."""

_SOURCE = Path(__file__).with_name("reader.c")
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-O2", "-shared", "-fPIC")
_BATCH = 512


def new_reader(poller: Poller) -> Reader:
    """The compiled reader where there is one, else the one in Python."""
    found = library()
    return PythonReader(poller) if isinstance(found, str) else CompiledReader(found, poller)


def reader_name() -> str:
    """Which reader this machine's drivers will use: "compiled" or "python"."""
    return PythonReader.name if isinstance(library(), str) else CompiledReader.name


def library() -> ctypes.CDLL | str:
    """The library, or why there is none. WorkloadError where the environment asks for what there is not."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", PythonReader.name, CompiledReader.name):
        raise WorkloadError(f"{VARIABLE}={asked}: expected python or compiled")
    if asked == PythonReader.name:
        return f"{VARIABLE}={asked}"
    found = _library()
    if asked and isinstance(found, str):
        raise WorkloadError(f"{VARIABLE}={asked}, but there is no compiled reader: {found}")
    return found


@cache
def _library() -> ctypes.CDLL | str:
    if not KERNEL_STAMPS:
        return f"it needs Linux on 64 bits, this is {platform.platform()}"
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return f"no C compiler ({', '.join(_COMPILERS)}) was found"
    try:
        return _typed(_loaded(compiler, _kept_at(compiler)))
    except subprocess.CalledProcessError as error:
        return f"{compiler} failed: {error.stderr.decode(errors='replace').strip()}"
    except (OSError, RuntimeError, AttributeError, subprocess.TimeoutExpired) as error:
        return str(error)


def _kept_at(compiler: str) -> Path:
    """In the user's cache, by all that it is made from."""
    binary = Path(compiler).resolve()
    made_of = (_SOURCE.read_bytes(), str(binary), binary.stat().st_mtime_ns, _FLAGS, platform.platform())
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:32]
    return Path(user_cache(), "reader", f"{key}.so")


def _loaded(compiler: str, path: Path) -> ctypes.CDLL:
    """As it was kept; compiled where it was not, or is none. OSError where others could have put it there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid() or folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path.parent} is not this user's alone, and what lies there would be run")
    with suppress(OSError):
        return ctypes.CDLL(str(path))
    _compile(compiler, path)
    return ctypes.CDLL(str(path))


def _compile(compiler: str, path: Path) -> None:
    """Into a folder of its own first: whoever compiles at the same time puts the same file into place."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        fresh = Path(folder, path.name)
        argv = [compiler, *_FLAGS, "-o", str(fresh), str(_SOURCE)]
        subprocess.run(argv, check=True, capture_output=True, timeout=60)
        with fresh.open("rb") as written:
            os.fsync(written.fileno())  # loading half a library would kill the process
        fresh.replace(path)


class _Arena(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("n", ctypes.c_int64), ("room", ctypes.c_int64))
    at: int
    n: int

    def taken(self) -> bytes:
        """What is in it, which is then empty."""
        found = ctypes.string_at(self.at, self.n) if self.n else b""
        self.n = 0
        return found


class _Stream(ctypes.Structure):
    _fields_ = (("reads", _Arena), ("data", _Arena))
    reads: _Arena
    data: _Arena


class _State(ctypes.Structure):
    """The beginning of `reader_t`."""

    _fields_ = (
        ("poller", ctypes.c_int64),
        ("counts", ctypes.c_int64 * 5),
        ("reports", ctypes.c_int32 * (2 * _BATCH)),
    )


def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    found.reader_wait.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    found.reader_follow.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    found.reader_leave.argtypes = (ctypes.c_void_p, ctypes.c_int)
    found.reader_close.argtypes = (ctypes.c_void_p,)
    found.reader_follow.restype = ctypes.POINTER(_Stream)
    found.reader_leave.restype = found.reader_close.restype = None
    return found


class CompiledReader:
    """Reads into memory of its own, from which an exchange is brought up to date when somebody looks."""

    name = "compiled"

    def __init__(self, found: ctypes.CDLL, poller: Poller) -> None:
        self.n_reads = self.n_bytes = self.woken_ns = self.max_pass_ns = self.polled_ns = 0
        # Zeroed memory is a reader that follows nobody; its size is the library's own secret.
        self._memory = ctypes.create_string_buffer(ctypes.c_int64.in_dll(found, "reader_bytes").value)
        self._at = ctypes.addressof(self._memory)
        state = _State.from_buffer(self._memory)
        state.poller = poller.fileno()
        self._counts = memoryview(state.counts).cast("B").cast("q")
        self._reports = memoryview(state.reports).cast("B").cast("i")
        self._library = found
        self._followed: dict[int, _Stream] = {}

    def wait(self, due_ns: int, tick_ns: int) -> list[tuple[int, int]]:
        # ctypes lets go of the interpreter's lock meanwhile.
        n_reports = self._library.reader_wait(self._at, due_ns, tick_ns)
        self.n_reads, self.n_bytes, self.woken_ns, self.max_pass_ns, self.polled_ns = self._counts.tolist()
        flat = self._reports[: 2 * n_reports].tolist()
        return list(zip(flat[::2], flat[1::2], strict=True))

    def follow(self, connection: Connection) -> None:
        exchange = connection.exchange
        if connection.fd in self._followed or exchange is None:
            return
        left = exchange.max_bytes - len(exchange.data)
        stream = self._library.reader_follow(self._at, connection.fd, left)
        if not stream:
            raise MemoryError
        self._followed[connection.fd] = stream.contents

    def collect(self, connection: Connection) -> None:
        stream, exchange = self._followed.get(connection.fd), connection.exchange
        if stream is not None and exchange is not None:
            exchange.reads += stream.reads.taken()
            exchange.data += stream.data.taken()

    def leave(self, connection: Connection) -> None:
        self.collect(connection)
        if self._followed.pop(connection.fd, None) is not None:
            self._library.reader_leave(self._at, connection.fd)

    def close(self) -> None:
        self._followed.clear()
        self._library.reader_close(self._at)
