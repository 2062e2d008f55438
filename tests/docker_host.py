"""A container daemon for tests: the machine's own, or one that is started here and gone afterwards.

One is started only where BURSTLINE_DOCKERD=1 says so: it needs root, `dockerd`, and `debootstrap` where no
registry can be reached (`apt-get install docker.io docker-compose iptables debootstrap`).
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

BASE = "python:3.11-slim-bookworm"
DEBIAN = "bookworm"


class NoDaemonError(RuntimeError):
    """Why containers cannot be tried here."""


@contextmanager
def container_daemon() -> Iterator[Mapping[str, str]]:
    """The environment in which `docker` and `docker-compose` reach a daemon that has the base image."""
    if shutil.which("docker") is None or compose() is None:
        raise NoDaemonError("docker or docker-compose is not installed")
    if answers(os.environ):
        yield os.environ
        return
    if os.environ.get("BURSTLINE_DOCKERD") != "1":
        raise NoDaemonError("no container daemon answers; BURSTLINE_DOCKERD=1 lets this test start one")
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        raise NoDaemonError("starting a daemon needs root and dockerd")
    with tempfile.TemporaryDirectory(prefix="burstline-docker-") as folder, _started(Path(folder)) as env:
        _ensure_base(env, Path(folder))
        yield env


def compose() -> list[str] | None:
    """The plugin's command where it is there, else docker-compose, else None."""
    docker = shutil.which("docker")
    if docker and not subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


def answers(env: Mapping[str, str]) -> bool:
    return subprocess.run(["docker", "info"], env=env, capture_output=True, check=False).returncode == 0


@contextmanager
def _started(folder: Path) -> Iterator[dict[str, str]]:
    socket = f"unix://{folder}/docker.sock"
    roots = ("--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "-p", f"{folder}/pid")
    with (folder / "dockerd.log").open("wb") as log:
        daemon = subprocess.Popen(
            ["dockerd", *roots, "-H", socket], stdout=log, stderr=log, start_new_session=True
        )
    try:
        env = {**os.environ, "DOCKER_HOST": socket}
        deadline = time.monotonic() + 60
        while not answers(env):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise NoDaemonError((folder / "dockerd.log").read_text()[-500:])
            time.sleep(0.5)
        yield env
    finally:
        daemon.terminate()
        daemon.wait(timeout=60)


def _ensure_base(env: Mapping[str, str], folder: Path) -> None:
    """The base image: pulled, or made of Debian's packages from where this machine has its own."""
    if (
        subprocess.run(["docker", "pull", "-q", BASE], env=env, capture_output=True, check=False).returncode
        == 0
    ):
        return
    if shutil.which("debootstrap") is None:
        raise NoDaemonError(f"{BASE} cannot be pulled, and there is no debootstrap to make it")
    packages = "python3,python3-pip,python3-venv,ca-certificates"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={packages}", DEBIAN, f"{folder}/base", _mirror()],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        raise NoDaemonError(f"debootstrap failed: {made.stdout.decode()[-300:]}")
    with subprocess.Popen(["tar", "-C", f"{folder}/base", "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(
            ["docker", "import", "-", BASE], stdin=tar.stdout, env=env, check=True, capture_output=True
        )
    shutil.rmtree(folder / "base")


def _mirror() -> str:
    """Where apt takes Debian itself from on this machine."""
    files = [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]
    text = "\n".join(file.read_text() for file in files if file.is_file())
    found = re.search(r"^(?:deb |URIs: *)(\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
    if found is None:
        raise NoDaemonError("apt's sources name no Debian mirror")
    return found[1]
