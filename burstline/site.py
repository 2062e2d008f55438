"""Where the load goes: an engine that we start and stop, or a server that somebody else runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from servers.engine import Engine, EngineError, Identity, Launch, LaunchOptions, Target
from servers.host.process import Server, free_port, require_free_port, start
from servers.host.ready import getter, wait_ready
from servers.registry import ENGINES
from workloads.request import WorkloadError

ATTACH_TIMEOUT_S = 15.0
HOST = "127.0.0.1"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Site:
    """A server that has generated a token. `server` is None where we did not start it."""

    engine: Engine
    target: Target
    identity: Identity
    server: Server | None
    launch: Launch | None
    ready_s: float


@dataclass(frozen=True, slots=True)
class Where:
    """What the user said about the server: which engine, at which URL or started how."""

    engine: str | None = None
    url: str | None = None
    model: str | None = None
    python: str | None = None
    port: int | None = None
    api_key: str | None = None
    engine_args: tuple[str, ...] = ()


def choose_engine(where: Where) -> Engine:
    """The engine named; else what answers at the URL; else vLLM where it is installed and a model named."""
    if where.engine is not None:
        if where.engine not in ENGINES:
            known = ", ".join(ENGINES)
            raise WorkloadError(f"unknown engine {where.engine!r}; expected one of: {known}")
        return ENGINES[where.engine]
    if where.url is not None:
        return ENGINES[_dialect_at(where.url, where.api_key)]
    if where.model is not None and _is_installed("vllm", where):
        return ENGINES["vllm"]
    return ENGINES["reference"]


def check_where(where: Where) -> None:
    """A bad URL or model folder is the user's slip, and found before anything is started."""
    if where.url is not None:
        parts = urlsplit(where.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WorkloadError(f"--url {where.url}: expected something like http://127.0.0.1:8000")
        return
    if where.model is None:
        return
    folder = Path(where.model)
    looks_like_path = where.model.startswith((".", "/", "~")) or folder.exists()
    if looks_like_path and not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise WorkloadError(f"--model {where.model} {what}; expected a Hugging Face model folder, or a name")


@contextmanager
def serving(engine: Engine, where: Where, run_dir: Path, say: Say) -> Iterator[Site]:
    """A server that is ready; one that we started is ended, with all its descendants, on the way out."""
    if where.url is not None:
        yield _attached(engine, where)
        return
    port = where.port or free_port(HOST)
    require_free_port(HOST, port)
    model = where.model or ""
    served_name = Path(model).name or engine.name
    target = Target(f"http://{HOST}:{port}", served_name)
    launch = engine.launch(
        LaunchOptions(model, HOST, port, served_name, run_dir, where.python, where.engine_args)
    )
    for note in launch.notes:
        say(note)
    with start(launch, run_dir / "server.log") as server:
        ready_s = wait_ready(
            engine, server, target, timeout_s=launch.ready_timeout_s, progress=_every(10.0, say)
        )
        identity = engine.identify(getter(target), server.log())
        yield Site(engine, target, identity, server, launch, ready_s)


def _attached(engine: Engine, where: Where) -> Site:
    assert where.url is not None
    target = Target(where.url.rstrip("/"), where.model or "", where.api_key)
    if not target.model:
        identity = engine.identify(getter(target), "")
        target = Target(target.url, _served_name(identity) or "default", where.api_key)
    ready_s = wait_ready(engine, None, target, timeout_s=ATTACH_TIMEOUT_S)
    return Site(engine, target, engine.identify(getter(target), ""), None, None, ready_s)


def _served_name(identity: Identity) -> str | None:
    """The name to ask for: what /v1/models lists, which is not always the model's own name or folder."""
    models = identity.raw.get("models")
    listed = models.get("data") if isinstance(models, dict) else None
    first = listed[0].get("id") if isinstance(listed, list) and listed else None
    return str(first) if first else identity.model


def _dialect_at(url: str, api_key: str | None) -> str:
    """The engine whose dialect a server speaks, by its own words; "openai" where it has none."""
    get = getter(Target(url.rstrip("/"), "", api_key), timeout_s=5.0)
    try:
        metrics = get("/metrics").body
        models = get("/v1/models").body
    except EngineError:
        return "openai"
    if b'"owned_by":"burstline"' in models.replace(b" ", b""):
        return "reference"
    return "vllm" if b"vllm:" in metrics else "openai"


def _is_installed(name: str, where: Where) -> bool:
    try:
        ENGINES[name].launch(
            LaunchOptions(where.model or "", HOST, 1, name, Path(), where.python, where.engine_args)
        )
    except EngineError:
        return False
    return True


def _every(period_s: float, say: Say) -> Callable[[float, str], None]:
    """Progress of a start, told once a period: engines take minutes, and a person wants to see why."""
    next_s = time.monotonic() + period_s

    def told(waited_s: float, state: str) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s += period_s
            say(f"  {waited_s:.0f} s: {state[:160]}")

    return told
