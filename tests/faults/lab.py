"""What the scenarios share: a load over a real driver, whole commands, and the table of what was seen."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import termios
import threading
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from burstline.cli import main
from burstline.loadgen.capture.capture import Capture, read_captures
from burstline.loadgen.capture.drive_report import DriveReport
from burstline.loadgen.driver import drive
from burstline.loadgen.driver.job import Counters, Go, Job, Ready
from burstline.measure.record.decode import decoded_batches
from burstline.measure.record.record import Record
from burstline.servers.host.child import Failed
from burstline.servers.messages import target_at
from burstline.servers.redact import Secret
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request

N_PROMPT_TOK, N_OUTPUT_TOK = 4, 3
REPOSITORY = Path(__file__).parents[2]
GOLDEN_RUN = max((REPOSITORY / "tests/golden/runs").iterdir(), key=lambda path: int(path.name))
"""A run as this version writes it: the newest schema of which one is kept."""


@dataclass
class Row:
    """A line of the table."""

    fault: str
    expected: str
    seen: str
    time_s: float


TABLE: list[Row] = []


@dataclass
class Shot:
    """What a load of `n` requests brought, and what it took."""

    outcomes: Counter[str]
    records: list[Record]
    captures: list[Capture]
    report: DriveReport
    time_s: float

    @property
    def errors(self) -> list[str]:
        return [record.error for record in self.records if record.error]


def shoot(
    url: str,
    folder: Path,
    n: int = 6,
    *,
    api_key: str | None = None,
    every_ms: float = 0.0,
    n_prompt_tok: int = N_PROMPT_TOK,
    n_output_tok: int = N_OUTPUT_TOK,
    **options: object,
) -> Shot:
    """Fire `n` requests, all at once or one `every_ms`, by a driver of this process; decode its captures."""
    folder.mkdir(exist_ok=True)
    prompt = array("I", range(n_prompt_tok))
    requests = tuple(Request(k, prompt, None, n_prompt_tok, n_output_tok) for k in range(n))
    Counters.create(folder / "counters", 1).close()
    target = target_at(url, "m", Secret(api_key) if api_key else None)
    job = Job(
        requests,
        array("q", [int(k * every_ms * 1e6) for k in range(n)]),
        "vllm",
        target,
        folder / "captures",
        folder / "counters",
        **{"deadline_s": 10.0, **options},  # type: ignore[arg-type]
    )
    ours, theirs = multiprocessing.Pipe()
    began_s = time.monotonic()
    thread = threading.Thread(target=drive.run, args=(job, theirs))
    thread.start()
    message = ours.recv()
    if isinstance(message, Ready):
        ours.send(Go(time.monotonic_ns() + 5_000_000))
        message = ours.recv()
    thread.join()
    if isinstance(message, Failed):
        raise message.error
    captures = list(read_captures(job.captures))
    batches = decoded_batches(captures, list(requests), ENGINES["vllm"].decode)
    records = [record for batch in batches for record in batch]
    time_s = time.monotonic() - began_s
    return Shot(Counter(record.outcome for record in records), records, captures, message.report, time_s)


@dataclass
class Ended:
    """How a command ended: its exit code, what it printed, how long it took, and the run's folder."""

    code: int
    out: str
    time_s: float
    out_dir: Path
    peak_rss_bytes: int = 0
    orphans: list[psutil.Process] = field(default_factory=list)

    @property
    def run(self) -> Path:
        (run,) = (path for path in self.out_dir.iterdir() if path.is_dir())
        return run


class Command:
    """`burstline ARGS --out DIR` as a process; `send` signals it, `end` waits and looks around.

    `terminal` is a pseudo terminal's other end, which it controls; else its output goes to a pipe.
    """

    def __init__(
        self, out_dir: Path, *args: str, cwd: Path | None = None, terminal: int | None = None, **env: str
    ) -> None:
        out_dir.mkdir(parents=True, exist_ok=True)
        self.out_dir = out_dir
        self._mark = f"lab-{os.getpid()}-{time.monotonic_ns()}"
        environment = {**os.environ, "LAB_MARK": self._mark, "PYTHONPATH": str(REPOSITORY), **env}
        self.began_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "burstline", *args],
            stdin=terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=None if terminal is None else lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._created_s = psutil.Process(self.process.pid).create_time()

    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: int) -> None:
        if self.alive():
            os.kill(self.process.pid, number)

    def end(self, timeout_s: float = 120.0, orphan_grace_s: float = 12.0) -> Ended:
        """Wait for it, and then until nothing that it started is left."""
        peak = [0]

        def watch() -> None:
            while self.alive():
                peak[0] = max(peak[0], sum(rss for rss in map(_rss, self.family())))
                time.sleep(0.05)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            out, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for process in self.family():
                process.kill()
            out, _ = self.process.communicate()
            said = (out or b"").decode()[-3000:]
            raise AssertionError(f"still running after {timeout_s:g} s: {said}") from None
        time_s = time.monotonic() - self.began_s
        watcher.join()
        until_s = time.monotonic() + orphan_grace_s
        while (orphans := self.family()) and time.monotonic() < until_s:
            time.sleep(0.1)
        for orphan in orphans:
            orphan.kill()
        text = (out or b"").decode(errors="replace")
        return Ended(self.process.returncode, text, time_s, self.out_dir, peak[0], orphans)

    def family(self) -> list[psutil.Process]:
        """All processes that carry this command's mark in their environment; none is older than the command.

        The environment of each process of the machine, many times a second, costs as much as a short run.
        """
        found = []
        for process in psutil.process_iter():
            try:
                is_older = process.create_time() < self._created_s - 2.0  # the time of boot is rounded
                if not is_older and process.environ().get("LAB_MARK") == self._mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def burstline(out_dir: Path, *args: str, timeout_s: float = 120.0, **more: object) -> Ended:
    """`burstline run ARGS`, to its end."""
    argv = ("run", "--out", str(out_dir), *args)
    return Command(out_dir, *argv, **more).end(timeout_s)  # type: ignore[arg-type]


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["burstline.verbs.report", "burstline.reports.page.page", "tests.faults.lab"])


def verb(*args: str | Path) -> tuple[int, str]:
    """Another verb; its exit code and what it printed.

    Its process is forked from one that has imported what a report needs, which takes longer than most reports,
    and that knows of no test and no secret.
    """
    with tempfile.NamedTemporaryFile() as out:
        process = _FORKS.Process(target=_said_to, args=(out.name, list(map(str, args))))
        process.start()
        process.join(120)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"still running after 120 s: {shlex.join(map(str, args))}")
        return process.exitcode, out.read().decode(errors="replace")


def _said_to(path: str, args: list[str]) -> None:
    with Path(path).open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.exit(main(args))


def noted(fault: str, expected: str, seen: object, time_s: float) -> None:
    TABLE.append(Row(fault, expected, str(seen), time_s))


def counted(outcomes: Counter[str]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(outcomes.items()))


def files_with(folder: Path, needles: Sequence[bytes]) -> list[str]:
    """Every file under a folder that holds one of these, unpacked where it is packed."""
    import pyarrow.parquet as pq

    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.suffix == ".parquet":
            data += repr(pq.read_table(path).to_pylist()).encode()
        if ".zst" in path.suffixes:
            for capture in read_captures(path.parent):
                data += b"".join(read.data for read in capture.reads) + (capture.detail or "").encode()
        found += [f"{path.name}: {needle!r}" for needle in needles if needle in data]
    return found
