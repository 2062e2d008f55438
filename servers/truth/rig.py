"""A known-truth server at hand: `with truth_server(script) as truth: ... truth.log()`."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import orjson

from servers.host import child
from servers.messages import EngineError
from servers.truth.exchanges import Served, from_jsonl
from servers.truth.router import TruthSetup
from servers.truth.script import Script
from servers.truth.serve import serving_in_thread

_TIMEOUT_S = 30.0
_opener = build_opener(ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class TruthRig:
    """A running server: where it is, its process (ours where it runs in a thread), and its log."""

    url: str
    pid: int | None

    def log(self) -> tuple[Served, ...]:
        """The truth of every request so far, in the order of arrival."""
        return from_jsonl(self._get("/log"))

    def reset(self) -> None:
        """Forgets finished requests, remembered prompts and the queue; begins the scripts anew."""
        self._get("/reset")

    def metrics(self) -> Mapping[str, float]:
        """The server's counters by name."""
        lines = self._get("/metrics").decode().splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}

    def _get(self, path: str) -> bytes:
        with _opener.open(self.url + path, timeout=_TIMEOUT_S) as reply:
            return bytes(reply.read())


@contextmanager
def truth_server(
    script: Script | Sequence[Script] | None = None, *, setup: TruthSetup | None = None, thread: bool = False
) -> Iterator[TruthRig]:
    """A server on a free port of 127.0.0.1, gone at the end of the block or with this process.

    It runs in a process of its own, so that its interpreter's lock is apart from the client's; `thread` runs
    it here, quick to start but only for tests in which no timing matters. `script` overrides the setup's.
    """
    setup = setup or TruthSetup()
    if script is not None:
        scripts = (script,) if isinstance(script, Script) else tuple(script)
        setup = replace(setup, scripts=scripts)
    if thread:
        with serving_in_thread(setup) as server:
            yield TruthRig(server.url, None)
        return
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(orjson.dumps([asdict(each) for each in setup.scripts]))
        file.flush()
        process = subprocess.Popen(
            [*child.command("servers.truth"), *arguments(setup, Path(file.name)), "--until-eof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": child.import_path()},
            start_new_session=True,
        )
        with process:
            try:
                yield TruthRig(_announced_url(process), process.pid)
            finally:
                process.terminate()


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


def _announced_url(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline().decode()
    if "http://" not in line:
        raise EngineError(f"the known-truth server did not start: {process.stderr.read().decode()[-2000:]}")
    return line.split()[-1]
