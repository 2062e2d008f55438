"""Files written whole or not at all, and a clear error for a full disk."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import orjson

TRACES: Final = "profile"
"""The folder of the traces that the engine's profiler wrote, one file for each rank."""

PARTIAL = ".partial"


def write_json(path: Path, value: Any) -> None:
    """Write JSON, indented, whole or not at all. NaN and infinity become null."""
    write_bytes(path, orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    with disk_errors(path), renamed(path) as partial, partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def renamed(path: Path) -> Iterator[Path]:
    """A file or folder `*.partial` to make, given its name when the block ends well and removed otherwise.

    A file that is already there is removed first: in a folder of others it may be a link to a file of ours.
    """
    partial = path.with_name(path.name + PARTIAL)
    partial.unlink(missing_ok=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full disk, or a file too large, into an OSError that says so: the path, the bytes free."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        why = "a file may not be so large (ulimit -f)" if error.errno == errno.EFBIG else "the disk is full"
        room = next(folder for folder in path.parents if folder.exists())
        free_bytes = shutil.disk_usage(room).free
        raise OSError(
            error.errno,
            f"{why}: cannot write {path}, {free_bytes:,} bytes are free there; "
            "make room or choose another folder with --out",
        ) from error
