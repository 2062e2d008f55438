"""A known-truth server for a test: `with truth_server(script) as truth: ... truth.log()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import orjson

from burstline.servers.truth import rig
from tests.truth.router import TruthSetup
from tests.truth.script import Script
from tests.truth.serve import ScriptedServer, Served, serving_in_thread


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
    with rig.truth_server(setup, "tests.truth.rig") as started:
        yield TruthRig(started.url, started.pid)


def main(home: Connection, setup: TruthSetup) -> None:
    """Play the setup in a child process."""
    rig.serve(home, ScriptedServer(setup))
