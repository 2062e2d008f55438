"""How an engine is started."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from burstline.servers.identity import Identity


@dataclass(frozen=True, slots=True)
class Image:
    """An engine's container image, pinned, and what its container needs besides a port and the model.

    `shm` is the size of its shared memory, `flags` are further ones of `docker run`.
    """

    name: str
    shm: str = "16g"
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class LaunchOptions:
    """The user's options for a server that Burstline starts. `model` is a folder or a name the engine knows.

    `n_concurrent` is how many requests will be there at once, `n_request_tok` how many tokens the longest
    has, prompt and answer together; None where unknown. With `image` the command is to run inside that
    image, which has the model and `run_dir` at the same paths. With `profile_dir`
    its profiler is to be there, off, and to write there.
    """

    model: str
    host: str
    port: int
    served_name: str
    run_dir: Path
    python: str | None = None
    extra_args: tuple[str, ...] = ()
    n_concurrent: int | None = None
    n_request_tok: int | None = None
    image: str | None = None
    profile_dir: Path | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Launch:
    """How to start a server as a local process.

    `env` is laid over ours. `ready_timeout_s` bounds the start, `stop_grace_s` is how long it may take from
    SIGTERM to its end before what is left of its process tree is killed; `after` is a command to run then.
    `leftovers` are globs of what a killed engine leaves in shared memory and the like, where `{id}` stands
    for what the pattern `leftover_id` finds in the log: the engine's own name for itself.
    `n_cores` keeps all of the server's processes to the first `n_cores` cores; None: they may use each.
    `scripts` is the folder of the environment's commands, put first on the PATH; None: where `argv[0]` lies.
    `notes` tells the user what the adapter decided by itself. `served_name` is what the engine
    calls the model where it does not take our name for it, `version` that of the installed package, `fixed`
    what the command settles and the server never says of itself. In a container, `image` and `image_digest`
    say which.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 600.0
    stop_grace_s: float = 30.0
    step_log: Path | None = None
    n_cores: int | None = None
    scripts: Path | None = None
    notes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    leftover_id: str | None = None
    served_name: str | None = None
    version: str | None = None
    fixed: Identity | None = None
    image: str | None = None
    image_digest: str | None = None


@dataclass(frozen=True, slots=True)
class StartStage:
    """One stage of a start, e.g. "loading weights", and when the log first named it, s from the start."""

    name: str
    begin_s: float
