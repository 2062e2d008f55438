"""A container daemon for tests: the machine's own, or one that is started here and gone afterwards.

One is started only where BURSTLINE_DOCKERD=1 says so. It needs root, `dockerd` and, where no registry can be
reached, what `scripts/container-base.sh` makes: BURSTLINE_CONTAINER_BASE names its folder.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

BASE = "python:3.11-slim-bookworm"
MAKE_BASE = Path(__file__).parents[1] / "scripts/container-base.sh"
COMPOSES = {"2": ("docker", "compose"), "1.29": ("docker-compose",)}


class NoDaemonError(RuntimeError):
    """Why containers cannot be tried here."""


@contextmanager
def container_daemon() -> Iterator[Mapping[str, str]]:
    """The environment in which `docker` and `docker compose` reach a daemon that has the base image."""
    if shutil.which("docker") is None:
        raise NoDaemonError("docker is not installed")
    if answers(os.environ):
        yield with_plugin(os.environ)
        return
    if os.environ.get("BURSTLINE_DOCKERD") != "1":
        raise NoDaemonError("no container daemon answers; BURSTLINE_DOCKERD=1 lets this test start one")
    if os.geteuid() != 0 or shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        raise NoDaemonError("starting a daemon needs root and dockerd")
    with tempfile.TemporaryDirectory(prefix="burstline-docker-") as folder, _started(Path(folder)) as env:
        yield _with_base(env, Path(folder))


def with_plugin(env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which the base's compose is docker's plugin, where there is a base."""
    base = env.get("BURSTLINE_CONTAINER_BASE")
    return {**env, "DOCKER_CONFIG": f"{base}/config"} if base else dict(env)


def compose(version: str = "", env: Mapping[str, str] = os.environ) -> list[str] | None:
    """The command of compose, of any version where none is named; None where it is not installed."""
    for words in (COMPOSES[version],) if version else COMPOSES.values():
        if shutil.which(words[0]):
            known = subprocess.run([*words, "version"], env=with_plugin(env), capture_output=True)
            if known.returncode == 0:
                return list(words)
    return None


def answers(env: Mapping[str, str]) -> bool:
    return subprocess.run(["docker", "info"], env=env, capture_output=True, check=False).returncode == 0


@contextmanager
def _started(folder: Path) -> Iterator[dict[str, str]]:
    socket = f"unix://{folder}/docker.sock"
    roots = ("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "-p", f"{folder}/pid")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    with (folder / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", *roots, "-H", socket],
            env={**os.environ, "PATH": path},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        env = {**os.environ, "DOCKER_HOST": socket}
        deadline = time.monotonic() + 60
        while not answers(env):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise NoDaemonError((folder / "dockerd.log").read_text().strip().splitlines()[-1])
            time.sleep(0.5)
        yield env
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)


def _with_base(env: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The base image: of the folder that is kept, or pulled, or made here."""
    if "BURSTLINE_CONTAINER_BASE" not in env:
        if not subprocess.run(["docker", "pull", "-q", BASE], env=env, capture_output=True).returncode:
            return dict(env)
        env = {**env, "BURSTLINE_CONTAINER_BASE": f"{folder}/base"}
        made = subprocess.run(["sh", str(MAKE_BASE), f"{folder}/base"], capture_output=True, text=True)
        if made.returncode != 0:
            raise NoDaemonError(f"{MAKE_BASE.name} failed: {made.stderr[-300:]}")
    tar = f"{env['BURSTLINE_CONTAINER_BASE']}/base.tar"
    subprocess.run(["docker", "import", tar, BASE], env=env, check=True, capture_output=True)
    return with_plugin(env)
