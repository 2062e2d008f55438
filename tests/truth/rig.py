"""A known-truth server for a test: `with truth_server(script) as truth: ... truth.log()`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import orjson

from servers.truth import rig
from tests.truth.router import TruthSetup
from tests.truth.script import Script
from tests.truth.serve import Served, serving_in_thread


class TruthRig(rig.TruthRig):
    """A running server. `reset` also forgets remembered prompts and the queue."""

    def log(self) -> tuple[Served, ...]:
        """The truth of every request so far, in the order of arrival."""
        return tuple(Served(**orjson.loads(line)) for line in self.get("/log").splitlines())


@contextmanager
def truth_server(
    script: Script | Sequence[Script] | None = None, *, setup: TruthSetup | None = None, thread: bool = False
) -> Iterator[TruthRig]:
    """A server on a free port of 127.0.0.1, gone at the end of the block or with this process.

    It runs in a process of its own; `thread` runs it here, quick to start but only for tests in which no
    timing matters. `script` overrides the setup's.
    """
    setup = setup or TruthSetup()
    if script is not None:
        setup = replace(setup, scripts=(script,) if isinstance(script, Script) else tuple(script))
    if thread:
        with serving_in_thread(setup) as server:
            yield TruthRig(server.url)
        return
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(orjson.dumps([asdict(each) for each in setup.scripts]))
        file.flush()
        with rig.started("tests.truth", *arguments(setup, Path(file.name))) as started:
            yield TruthRig(started.url, started.pid)


def arguments(setup: TruthSetup, scripts: Path) -> list[str]:
    """The command line of a server with this setup, its scripts lying in a file, on a free port."""
    words = ["--port", "0", "--script", f"@{scripts}", "--dialect", setup.native, "--model", setup.model]
    if setup.queue:
        queue = setup.queue
        words += ["--queue-servers", str(queue.n_servers), "--service-s", str(queue.mean_s)]
        words += ["--service-cv", str(queue.cv), "--seed", str(queue.seed)]
    if setup.prefix_cache:
        words.append("--prefix-cache")
    words += ["--max-model-len", str(setup.max_model_len)]
    words += ["--counters-late-s", str(setup.counters_late_s), "--counters-lost", str(setup.counters_lost)]
    if setup.max_in_flight is not None:
        words += ["--max-in-flight", str(setup.max_in_flight), "--shed-status", str(setup.shed_status)]
    return words
