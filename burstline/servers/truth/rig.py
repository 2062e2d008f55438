"""Starts a known-truth server: `with truth_server(setup) as truth: ... truth.log()`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from burstline.servers.host.child import Child, ChildLostError
from burstline.servers.host.ready import send
from burstline.servers.messages import Call, EngineError, Target
from burstline.servers.truth.router import Router, TruthSetup
from burstline.servers.truth.serve import Served, TruthServer, from_jsonl, prepare_process

_TIMEOUT_S, _MOST_BYTES = 10.0, 1 << 30  # its log holds every prompt and the moment of every event


@dataclass(frozen=True, slots=True)
class TruthRig:
    """A running server: where it is, its process (None: this one, in a thread), and its log."""

    url: str
    pid: int | None = None

    def log(self) -> tuple[Served, ...]:
        return from_jsonl(self.get("/log").splitlines())

    def reset(self) -> None:
        self.get("/reset")

    def metrics(self) -> Mapping[str, float]:
        lines = self.get("/metrics").decode().splitlines()
        return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}

    def get(self, path: str) -> bytes:
        """The body at a path; ChildLostError where nothing answers."""
        try:
            return send(Target(self.url, ""), Call("GET", path, headers=()), _TIMEOUT_S, _MOST_BYTES).body
        except EngineError as error:
            raise ChildLostError(f"the known-truth server is lost: {error}") from None


@contextmanager
def truth_server(setup: TruthSetup, module: str = __name__) -> Iterator[TruthRig]:
    """A server that plays this on a free port of 127.0.0.1, ended with the block or with this process.

    The module's `main` runs it, in a process of its own, so that its interpreter's lock is apart from the
    client's.
    """
    with Child(module, "the known-truth server") as child:
        child.send(setup)
        try:
            url = child.receive(_TIMEOUT_S)
        except ChildLostError as error:
            raise EngineError(f"the known-truth server did not start: {error}") from None
        yield TruthRig(url, child.pid)


def main(home: Connection, setup: TruthSetup) -> None:
    serve(home, TruthServer(Router(setup)))


def serve(home: Connection, server: TruthServer) -> None:
    server.stop_at_end_of(home.fileno())
    prepare_process()
    home.send(server.url)
    server.run()
