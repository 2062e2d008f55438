"""What a keeper waits for when it ends an engine, and how it writes an engine's log."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burstline.servers import redact
from burstline.servers.host import keeper
from burstline.servers.launch import Launch

NEVER = threading.Event()


def test_what_never_ends_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in the kernel, a log that another process holds open, a command that hangs."""
    for name in ("ORPHANS_GRACE_S", "AFTER_TIMEOUT_S", "KILLED_GRACE_S", "LOG_GRACE_S"):
        monkeypatch.setattr(keeper, name, 0.1)
    immortal: Any = SimpleNamespace(pid=7, kill=lambda: None)
    monkeypatch.setattr(keeper.Keeper, "_look", lambda _: [immortal])
    monkeypatch.setattr(keeper.Keeper, "_reap", lambda _: None)
    ours, theirs = Pipe()
    each = object.__new__(keeper.Keeper)
    each.code, each._home = 0, theirs
    each._log = threading.Thread(target=NEVER.wait, daemon=True)
    each._log.start()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: SimpleNamespace(poll=lambda: None))
    each._task = keeper.KeeperTask(Launch(("x",), after=("hangs",)), {}, tmp_path / "log")
    assert each.end() == (7,)
    assert ours.recv() == (keeper.ENDING, None)
    ours.close()
    theirs.close()


def test_the_last_of_an_engines_output_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper.Keeper, "_look", lambda _: [])
    written = threading.Event()
    each = object.__new__(keeper.Keeper)
    each.code, each._log = 0, threading.Timer(0.2, written.set)
    each._log.start()
    each._task = keeper.KeeperTask(Launch(("x",)), {}, tmp_path / "log")
    assert each.end() == ()
    assert written.is_set()


@contextmanager
def kept(log: Path, say: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output is being kept in `log`; killed at the end."""
    with (
        log.open("wb", buffering=0) as file,
        subprocess.Popen([sys.executable, "-c", say], stdout=subprocess.PIPE) as process,
    ):
        thread = threading.Thread(target=keeper._keep_log, args=(process, file.fileno()), daemon=True)
        thread.start()
        try:
            yield process
        finally:
            process.kill()
            thread.join(20)


SAY = "import sys, time\nfor part in {}:\n    print(part, end='', flush=True)\n    time.sleep({})\n"


def contents(path: Path, n_bytes: int) -> bytes:
    limit_s = time.monotonic() + 20
    while not path.exists() or path.stat().st_size < n_bytes:
        assert time.monotonic() < limit_s
        time.sleep(0.02)
    return path.read_bytes()


@pytest.mark.usefixtures("fresh")
def test_a_line_that_never_ends_is_written_and_its_secret_masked_over_the_border_of_two_reads(
    tmp_path: Path,
) -> None:
    redact.learn("SECRETKEY12345678")
    first = "x" * (keeper.LINE_BYTES - 5) + "-SECRET"
    with kept(tmp_path / "log", SAY.format(f"[{first!r}, 'KEY12345678 tail']", 0.1)) as process:
        assert process.wait(20) == 0
        written = contents(tmp_path / "log", len(first) + 8)
    assert written[keeper.LINE_BYTES - 5 :] == b"-(removed) tail"


def test_a_line_that_never_ends_is_not_kept_in_memory(tmp_path: Path) -> None:
    with kept(tmp_path / "log", SAY.format("['x' * 4096] * 2000", 0.01)) as process:
        assert contents(tmp_path / "log", 1)
        assert process.poll() is None


def test_a_line_that_waits_for_its_end_is_written(tmp_path: Path) -> None:
    with kept(tmp_path / "log", SAY.format("['loading ...']", 600)) as process:
        assert contents(tmp_path / "log", 1) == b"loading ..."
        assert process.poll() is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full disk")
def test_a_full_disk_costs_an_engine_its_log_and_holds_it_up_no_more() -> None:
    say = SAY.format(r"['many words\n' * 1000] * 20", 0)
    with kept(Path("/dev/full"), say) as process:
        assert process.wait(20) == 0
