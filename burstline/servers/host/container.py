"""Servers in containers: a launch turned into one of docker's or podman's.

The model's folder and the run's folder are mounted where they are, so that a command means the same inside
and outside. Ports are published on the loopback alone. The command stays in the foreground, under the
keeper: its end ends the container, and what would survive a kill is removed by name.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from burstline.servers.engine import Engine
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import EngineError

ANYWHERE = "0.0.0.0"  # noqa: S104
"""What a server inside a container listens on, where its loopback is its own."""
SECRETS = ("HF_TOKEN",)
"""Handed in by name: their values stand in no command line."""
GPU_DEVICE = Path("/dev/nvidiactl")
ASK_TIMEOUT_S = 30.0
INITS = frozenset({"docker-init", "tini", "catatonit", "podman-init"})
_GPUS = {"docker": ("--gpus", "all"), "podman": ("--device", "nvidia.com/gpu=all")}


@dataclass(frozen=True, slots=True)
class Runtime:
    """The command that runs containers: docker's, or podman's, which takes the same arguments."""

    name: str
    path: str


def find_runtime() -> Runtime:
    """The first of docker and podman that works; EngineError where none does."""
    found = [Runtime(name, path) for name in ("docker", "podman") if (path := shutil.which(name))]
    if not found:
        raise EngineError("--container: neither docker nor podman is installed; install one, or drop it")
    complaints = []
    for runtime in found:
        done = _ask(runtime, "version")
        if done.returncode == 0:
            return runtime
        complaints.append(f"{runtime.name}: {_last_line(done.stderr)}")
    raise EngineError("--container: " + "; ".join(complaints) + "; start the daemon, or drop --container")


def launch_in_container(
    engine: Engine,
    options: LaunchOptions,
    wanted: str,
    say: Callable[[str], None],
    runtime: Runtime,
    environment: Mapping[str, str] | None = None,
) -> Launch:
    """The launch of an engine in its image, or in the image `wanted` where that is not "".

    `environment` is laid over the launch's own. An image that is not here is pulled first. Raises EngineError
    where there is none.
    """
    image = _chosen(engine, wanted)
    digest = digest_of(runtime, image.name)
    if digest is None:
        say(f"Pulling {image.name}, which may take minutes")
        done = subprocess.run([runtime.path, "pull", image.name], capture_output=True, text=True)
        digest = digest_of(runtime, image.name)
        if digest is None:
            raise EngineError(f"{runtime.name} pull {image.name}: {_last_line(done.stderr)}")
    model = str(Path(options.model).resolve()) if Path(options.model).exists() else options.model
    run_dir = options.run_dir.resolve()
    inside = replace(options, host=ANYWHERE, image=image.name, model=model, run_dir=run_dir)
    name = f"burstline-{os.getpid()}-{options.port}"
    launch = engine.launch(inside)
    launch = replace(launch, env={**launch.env, **(environment or {})})
    launch = contained(launch, image, inside, name, runtime, options.host)
    return replace(launch, image=image.name, image_digest=digest)


def contained(
    launch: Launch, image: Image, options: LaunchOptions, name: str, runtime: Runtime, host: str = "127.0.0.1"
) -> Launch:
    """The same launch as a `run` of its image, which knows how to remove itself; published at `host`."""
    argv = (
        *(runtime.path, "run", "--rm", "--init", "--name", name, "--label", "burstline"),
        *("-p", f"{host}:{options.port}:{options.port}", "--shm-size", image.shm),
        # Not to an image for CPUs, and not where this machine has none.
        *(_GPUS[runtime.name] if "cpu" not in image.name and GPU_DEVICE.exists() else ()),
        *_mounts(options),
        *(word for secret in SECRETS if secret in os.environ for word in ("-e", secret)),
        *(word for pair in launch.env.items() for word in ("-e", "=".join(pair))),
        *image.flags,
        image.name,
        *launch.argv,
    )
    # What a killed engine leaves in there goes with the container.
    return replace(launch, argv=argv, env={}, after=(runtime.path, "rm", "-f", name), leftovers=())


def digest_of(runtime: Runtime, image: str) -> str | None:
    """What exactly an image is: its repository's digest, or its own id where it was built here.

    None where this machine does not have it.
    """
    done = _ask(runtime, "image", "inspect", image)
    if done.returncode != 0:
        return None
    facts = json.loads(done.stdout)[0]
    return str(next(iter(facts.get("RepoDigests") or ()), facts["Id"]))


def engine_pid(runtime: Runtime, name: str) -> int | None:
    """The container's first process, whose descendants are the engine; None where it cannot be seen.

    Where the runtime lives in another machine (Docker Desktop's, say), its pids mean nothing here.
    """
    done = _ask(runtime, "inspect", "--format", "{{.State.Pid}}", name)
    if done.returncode != 0:
        return None
    try:
        pid = int(done.stdout)
        return pid if pid and psutil.Process(pid).name() in INITS else None
    except (ValueError, psutil.Error):
        return None


def _chosen(engine: Engine, wanted: str) -> Image:
    if engine.image is not None:
        return replace(engine.image, name=wanted) if wanted else engine.image
    if wanted:
        return Image(wanted)
    raise EngineError(f"{engine.title} has no container image of its own; name one: --container IMAGE")


def _mounts(options: LaunchOptions) -> Sequence[str]:
    run_dir = ("-v", f"{options.run_dir}:{options.run_dir}")
    model = Path(options.model)
    if options.model and model.exists():
        # Folders of the Hub's cache are links into another one.
        linked = {entry.resolve().parent for entry in model.iterdir()} if model.is_dir() else {model.parent}
        folders = sorted(map(str, linked | {model}))
        return (*run_dir, *(word for folder in folders for word in ("-v", f"{folder}:{folder}:ro")))
    cache = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return (*run_dir, "-v", f"{cache}:{cache}", "-e", f"HF_HOME={cache}")


def _ask(runtime: Runtime, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [runtime.path, *words]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer within {ASK_TIMEOUT_S:g} s")


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
