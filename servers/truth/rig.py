"""Starts a known-truth server: `with truth_server([script]) as truth: ... truth.log()`."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from urllib.request import ProxyHandler, build_opener

import orjson

from servers.host import child
from servers.messages import EngineError
from servers.truth.exchanges import Served, from_jsonl
from servers.truth.script import Script

_TIMEOUT_S = 30.0
_opener = build_opener(ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class TruthRig:
    """A running server: where it is, its process (None: this one, in a thread), and its log."""

    url: str
    pid: int | None = None

    def log(self) -> tuple[Served, ...]:
        """The truth of every request so far, in the order of arrival."""
        return from_jsonl(self.get("/log"))

    def reset(self) -> None:
        """Forget finished requests and begin the scripts anew."""
        self.get("/reset")

    def metrics(self) -> Mapping[str, float]:
        """The server's counters by name."""
        lines = self.get("/metrics").decode().splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}

    def get(self, path: str) -> bytes:
        """The body at a path."""
        with _opener.open(self.url + path, timeout=_TIMEOUT_S) as reply:
            return bytes(reply.read())


@contextmanager
def truth_server(scripts: Sequence[Script]) -> Iterator[TruthRig]:
    """A server that plays these scripts on a free port of 127.0.0.1; see `started`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(orjson.dumps([asdict(script) for script in scripts]))
        file.flush()
        with started("servers.truth", "--port", "0", "--script", f"@{file.name}") as rig:
            yield rig


@contextmanager
def started(module: str, *arguments: str) -> Iterator[TruthRig]:
    """The server that this module runs, ended with the block or with this process.

    Its process is its own, so that its interpreter's lock is apart from the client's.
    """
    process = subprocess.Popen(
        [*child.command(module), *arguments, "--until-eof"],
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


def _announced_url(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline().decode()
    if "http://" not in line:
        raise EngineError(f"the known-truth server did not start: {process.stderr.read().decode()[-2000:]}")
    return line.split()[-1]
