"""A suite over the nodes of a Ray cluster: each run on a node of its platform, its folder brought home.

Platforms run side by side, the runs of one platform one after another: two engines at once on one node would
disturb each other. A node runs the same command that a person would type there.
"""

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from burstline.cluster.agent import PIECE_BYTES, own_folder
from burstline.cluster.placement import first_line
from burstline.servers.host.process import Server, start
from burstline.servers.launch import Launch
from burstline.servers.messages import EngineError
from burstline.suites.suite import Model, Platform, Slot, make_where_missing

POLL_S: Final = 1.0
CALL_TIMEOUT_S: Final = 15.0
PLACE_TIMEOUT_S: Final = 30.0
MAKE_TIMEOUT_S: Final = 3600.0
"""A model of 70 billion made weights is 140 GB to write."""
WORK_FOLDER: Final = Path("~/.cache/burstline/cluster")
"""Where a node keeps models that a suite has made, and what relative paths of a suite start from."""


class _NodeActor:
    """Runs one `burstline` command on its node, under a keeper that leaves nothing behind."""

    def __init__(self) -> None:
        self._folder = own_folder("burstline-run-")
        work = WORK_FOLDER.expanduser()
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        self._server: Server | None = None

    def facts(self) -> str:
        return socket.gethostname()

    def prepare(self, model: Model) -> None:
        make_where_missing(model)

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the command; `{out}` in its arguments stands for this node's own folder for runs."""
        out = str(self._folder / "out")
        words = tuple(word.replace("{out}", out) for word in argv)
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        launch = Launch((sys.executable, "-m", "burstline", *words), env={**paths, **env}, stop_grace_s=60.0)
        self._server = start(launch, self._folder / "log")

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, None while the command still runs."""
        assert self._server is not None
        end = time.monotonic() + timeout_s
        while (code := self._server.exit_code) is None and time.monotonic() < end:
            time.sleep(0.05)
        return code

    def interrupt(self) -> None:
        """Ctrl-C for the command: it ends its load and writes its report."""
        if self._server is not None and self._server.alive():
            os.kill(self._server.pid, signal.SIGINT)

    def last_words(self) -> str:
        return self._server.log()[-2000:] if self._server else ""

    def pack(self) -> int:
        """Pack what the command wrote, be it nothing; the archive's size in bytes."""
        out = self._folder / "out"
        out.mkdir(exist_ok=True)
        return Path(shutil.make_archive(str(out), "zip", out)).stat().st_size

    def piece(self, at: int) -> bytes:
        with (self._folder / "out.zip").open("rb") as archive:
            archive.seek(at)
            return archive.read(PIECE_BYTES)

    def close(self) -> None:
        if self._server is not None:
            self._server.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


class _PlatformRunner:
    def __init__(self, ray: Any, platform: Platform) -> None:
        self._ray, self.platform = ray, platform
        self._interrupted = threading.Event()

    def interrupt(self) -> None:
        """From any thread: end what runs now, and start nothing more."""
        self._interrupted.set()

    def call(self, argv: Sequence[str], env: Mapping[str, str], model: Model, out: Path) -> int:
        """The exit code of `burstline ARGV` on a node; what it wrote below `{out}` is then below `out` here.

        EngineError where no node of the platform is there, or where the node was lost.
        """
        if self._interrupted.is_set():
            raise KeyboardInterrupt
        actor = (
            self._ray.remote(_NodeActor).options(max_concurrency=3, **self.platform.ray_options()).remote()
        )
        try:
            self._get(actor.facts.remote(), PLACE_TIMEOUT_S)
            self._get(actor.prepare.remote(model), MAKE_TIMEOUT_S)
            own = {name: value.reveal() for name, value in self.platform.env.items()}
            self._get(actor.start.remote(list(argv), {**env, **own}), PLACE_TIMEOUT_S)
            told = False
            while (code := self._get(actor.wait.remote(POLL_S), CALL_TIMEOUT_S)) is None:
                if self._interrupted.is_set() and not told:
                    told = True
                    self._get(actor.interrupt.remote(), CALL_TIMEOUT_S)
            with tempfile.TemporaryFile() as file:
                for at in range(0, self._get(actor.pack.remote(), MAKE_TIMEOUT_S), PIECE_BYTES):
                    file.write(self._get(actor.piece.remote(at), 4 * CALL_TIMEOUT_S))
                file.seek(0)
                with zipfile.ZipFile(file) as archive:
                    archive.extractall(out)  # it writes no file outside, whatever a node names
            if code != 0:
                print(self._get(actor.last_words.remote(), CALL_TIMEOUT_S), file=sys.stderr)
            return int(code)
        finally:
            with contextlib.suppress(Exception):  # whatever happened, the actor goes
                self._ray.get(actor.close.remote(), timeout=90.0)
            with contextlib.suppress(Exception):
                self._ray.kill(actor)

    def _get(self, ref: Any, timeout_s: float) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref, timeout=timeout_s)
        except errors.GetTimeoutError:
            raise EngineError(
                f"no node of the cluster fits platform {self.platform.name or 'default'} ({self.platform}); "
                "`ray status` lists what the cluster has"
            ) from None
        except errors.RayError as error:
            raise EngineError(f"platform {self.platform.name}: {first_line(error)}") from None


def run_by_platform(
    ray: Any,
    slots: Sequence[Slot],
    folder: Path,
    environments: Mapping[str, Mapping[str, str]],
    carry_out: Callable[[Slot, Callable[[Sequence[str], Slot], int]], int],
) -> list[int]:
    """Carry out every slot, one thread for each platform; exit codes in the order of `slots`.

    An error ends its platform and is raised when the others have ended; so is a Ctrl-C.
    """
    groups: dict[Platform, list[int]] = {}
    for k, slot in enumerate(slots):
        groups.setdefault(slot.platform or Platform(), []).append(k)
    runners = [_PlatformRunner(ray, platform) for platform in groups]

    def work(runner: _PlatformRunner, places: Sequence[int]) -> list[tuple[int, int]]:
        def call(argv: Sequence[str], slot: Slot) -> int:
            return runner.call(argv, environments[slot.engine.name], slot.model, folder / slot.id)

        return [(k, carry_out(slots[k], call)) for k in places]

    with ThreadPoolExecutor(len(groups) or 1) as pool:
        ending = [pool.submit(work, *pair) for pair in zip(runners, groups.values(), strict=True)]
        try:
            wait(ending)
        except KeyboardInterrupt:
            for runner in runners:
                runner.interrupt()
            raise
    return [code for _, code in sorted(pair for each in ending for pair in each.result())]
