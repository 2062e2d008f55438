import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from burstline.bench import run_settings
from burstline.bench.run_settings import server_facts
from burstline.bench.server_session import Site, serving
from burstline.console.server_options import ServerOptions
from burstline.measure.record.manifest import Manifest
from burstline.servers.host import container, process
from burstline.servers.host.container import (
    Runtime,
    contained,
    find_runtime,
    launch_in_container,
)
from burstline.servers.host.ready import Startup
from burstline.servers.host.serving import ACROSS_BRIDGE
from burstline.servers.identity import Identity
from burstline.servers.launch import Image, Launch, LaunchOptions
from burstline.servers.messages import EngineError, Target
from burstline.servers.registry import ENGINES

DOCKER = Runtime("docker", "/usr/bin/docker")
PODMAN = Runtime("podman", "/usr/bin/podman")
IMAGE = Image("org/engine:v1", shm="2g", flags=("--cap-add", "SYS_NICE"))

# Behaves like docker's command where the engine's image holds the known-truth server: `run` becomes that
# server, everything that is asked is written down.
FAKE_DOCKER = """#!{python}
import json, os, sys
folder, words = {folder!r}, sys.argv[1:]
with open(folder + "/asked", "a") as file:
    file.write(json.dumps(words) + "\\n")
if words[:2] == ["image", "inspect"]:
    if not os.path.exists(folder + "/pulled"):
        sys.exit("Error: No such image: " + words[2])
    print(json.dumps([{{"Id": "sha256:1", "RepoDigests": ["org/engine@sha256:abc"]}}]))
elif words[0] == "pull":
    if "missing" in words[1]:
        sys.exit("a line\\nError response from daemon: manifest unknown")
    open(folder + "/pulled", "w").close()
elif words[0] == "run":
    port = words[words.index("-p") + 1].rpartition(":")[2]
    os.environ["PYTHONPATH"] = {root!r}
    argv = [sys.executable, "-m", "burstline.servers.truth", "--port", port, "--model", "m"]
    os.execv(sys.executable, argv)
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake docker, the only one on the PATH."""
    root = str(Path(container.__file__).parents[2])
    script = tmp_path / "bin" / "docker"
    script.parent.mkdir()
    script.write_text(FAKE_DOCKER.format(python=sys.executable, folder=str(tmp_path), root=root))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    return tmp_path


def asked(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


def options(tmp_path: Path, model: str = "org/model") -> LaunchOptions:
    return LaunchOptions(model, "0.0.0.0", 8001, "m", tmp_path)


def pairs(argv: tuple[str, ...], flag: str) -> list[str]:
    return [argv[i + 1] for i, word in enumerate(argv) if word == flag]


def test_a_launch_becomes_a_run_of_its_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/cache")
    inner = Launch(("--model", "org/model"), {"A": "b=c"}, stop_grace_s=7, notes=("n",))
    launch = contained(inner, IMAGE, options(tmp_path), "burstline-1-8001", DOCKER)
    assert launch.argv[:7] == (
        *("/usr/bin/docker", "run", "--rm", "--init", "--name", "burstline-1-8001", "--label"),
    )
    assert launch.argv[-5:] == ("--cap-add", "SYS_NICE", "org/engine:v1", "--model", "org/model")
    assert pairs(launch.argv, "-p") == ["127.0.0.1:8001:8001"]
    assert pairs(launch.argv, "--shm-size") == ["2g"]
    assert pairs(launch.argv, "-v") == [f"{tmp_path}:{tmp_path}", "/cache:/cache"]
    assert pairs(launch.argv, "-e") == ["HF_HOME=/cache", "HF_TOKEN", "A=b=c"]
    assert not any("hf_secret" in word for word in launch.argv)
    assert launch.after == ("/usr/bin/docker", "rm", "-f", "burstline-1-8001")
    assert (launch.env, launch.stop_grace_s, launch.notes) == ({}, 7, ("n",))


def test_a_model_folder_is_mounted_where_it_is_with_all_that_it_links_to(tmp_path: Path) -> None:
    blobs, model = tmp_path / "blobs", tmp_path / "model"
    blobs.mkdir()
    model.mkdir()
    (blobs / "weights").touch()
    (model / "weights").symlink_to(blobs / "weights")
    launch = contained(Launch(()), IMAGE, options(Path("/run"), str(model)), "n", DOCKER)
    assert pairs(launch.argv, "-v") == ["/run:/run", f"{blobs}:{blobs}:ro", f"{model}:{model}:ro"]


@pytest.mark.parametrize(
    ("runtime", "image", "gpus"),
    [
        (DOCKER, "org/engine:v1", ("--gpus", "all")),
        (PODMAN, "org/engine:v1", ("--device", "nvidia.com/gpu=all")),
        (DOCKER, "org/engine-cpu:v1", ()),
    ],
)
def test_gpus_are_handed_in_where_there_are_some_and_the_image_is_not_for_cpus(
    runtime: Runtime, image: str, gpus: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "nvidiactl"
    device.touch()
    monkeypatch.setattr(container, "GPU_DEVICE", device)
    argv = contained(Launch(()), Image(image), options(tmp_path), "n", runtime).argv
    assert [word for word in argv if word in ("--gpus", "all", "--device", "nvidia.com/gpu=all")] == list(
        gpus
    )
    device.unlink()
    assert "--gpus" not in contained(Launch(()), Image(image), options(tmp_path), "n", runtime).argv


@pytest.mark.parametrize("name", sorted(name for name, engine in ENGINES.items() if engine.image))
def test_every_image_is_pinned_and_its_command_needs_no_installation_here(
    name: str, docker: Path, tmp_path: Path
) -> None:
    engine = ENGINES[name]
    assert engine.image is not None
    tag = engine.image.name.rpartition(":")[2]
    assert tag not in ("latest", "main", engine.image.name)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"vocab_size": 10}')
    (model / "model.gguf").touch()
    here = LaunchOptions(str(model), "127.0.0.1", 8001, "m", tmp_path)
    launch = launch_in_container(engine, here, "", lambda note: None, find_runtime())
    command = launch.argv[launch.argv.index(engine.image.name) + 1 :]
    assert "0.0.0.0" in command
    assert "8001" in command
    assert sys.executable not in command
    assert (launch.image, launch.image_digest) == (engine.image.name, "org/engine@sha256:abc")


def test_an_engine_in_a_container_serves_and_is_removed_by_name(docker: Path, tmp_path: Path) -> None:
    said: list[str] = []
    where = ServerOptions(engine="vllm", model="org/model", container="")
    with serving(ENGINES["vllm"], where, tmp_path, said.append) as site:
        assert site.launch is not None
        assert site.launch.image_digest == "org/engine@sha256:abc"
        assert site.server is not None
        port = int(site.target.url.rpartition(":")[2])
    assert any("Pulling vllm/vllm-openai:v0.33.0" in line for line in said)
    verbs = [words[0] for words in asked(docker)]
    assert verbs.count("run") == 1
    assert asked(docker)[-1] == ["rm", "-f", f"burstline-{os.getpid()}-{port}"]
    process.require_free_port("127.0.0.1", port)


PARENT = """
import sys, time
from pathlib import Path
from burstline.servers.launch import Launch
from burstline.servers.host import process
folder = Path(sys.argv[1])
touch = "import sys, pathlib; pathlib.Path(sys.argv[1]).touch()"
after = (sys.executable, "-c", touch, str(folder / "removed"))
launch = Launch((sys.executable, "-c", "import time; time.sleep(600)"), after=after, stop_grace_s=2)
process.start(launch, folder / "log")
print("up", flush=True)
time.sleep(600)
"""


def test_the_container_is_removed_though_its_owner_is_killed(tmp_path: Path) -> None:
    root = str(Path(container.__file__).parents[2])
    argv = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": root}) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        owner.kill()
    deadline = time.monotonic() + 20
    while not (tmp_path / "removed").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_image_that_cannot_be_pulled_is_one_clear_line(docker: Path, tmp_path: Path) -> None:
    where = ServerOptions(engine="vllm", model="org/model", container="org/missing:v1")
    failure = pytest.raises(EngineError, match=r"docker pull org/missing:v1: Error .*manifest unknown$")
    with failure, serving(ENGINES["vllm"], where, tmp_path, lambda note: None):
        pass


def test_without_a_runtime_or_its_daemon_the_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="neither docker nor podman is installed"):
        find_runtime()
    script = tmp_path / "podman"
    script.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('x\\nno daemon here')\n")
    script.chmod(0o755)
    with pytest.raises(EngineError, match="podman: no daemon here; start the daemon"):
        find_runtime()


def test_a_runtime_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "ASK_TIMEOUT_S", 0.2)
    monkeypatch.setenv("PATH", str(tmp_path))
    script = tmp_path / "docker"
    script.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    script.chmod(0o755)
    with pytest.raises(EngineError, match=r"docker: no answer within 0\.2 s; start the daemon"):
        find_runtime()


def test_an_engine_without_an_image_wants_one_named(docker: Path, tmp_path: Path) -> None:
    where = ServerOptions(engine="transformers", model="org/model", container="")
    failure = pytest.raises(EngineError, match="name one: --container IMAGE")
    with failure, serving(ENGINES["transformers"], where, tmp_path, lambda note: None):
        pass


ELSEWHERE = """
ip link set lo up
ip address add 10.213.0.7/32 dev lo
echo ready
sleep 60 & sleep 60
"""


ASK = """
import psutil
from burstline.servers.host.serving import ServingProcesses, first_of_container
first = first_of_container("http://10.213.0.7:8000")
print(first and psutil.Process(first).name(), first_of_container("http://10.213.0.8:1"), first_of_container("http://127.0.0.1:1"))
print(first in ServingProcesses.at("http://10.213.0.7:8000").pids())
"""


def test_a_server_in_another_container_is_found_by_its_address() -> None:
    """In a namespace of processes that both share, as `pid: service:...` makes it."""
    with contextlib.ExitStack() as started:

        def start(*argv: str) -> psutil.Popen:
            process = started.enter_context(psutil.Popen(argv, stdout=subprocess.PIPE, text=True))

            def end() -> None:
                for each in (*process.children(recursive=True), process):
                    with contextlib.suppress(psutil.NoSuchProcess):  # its first process takes all with it
                        each.kill()

            started.callback(end)
            return process

        holder = start("unshare", "--pid", "--fork", "--mount-proc", "sh", "-c", "echo ready; exec sleep 60")
        if holder.stdout.readline() != "ready\n":
            pytest.skip("this user may not make a namespace of processes")
        join = ("nsenter", "--target", str(holder.children()[0].pid), "--pid", "--mount")
        server = start(*join, "unshare", "--net", "sh", "-ec", ELSEWHERE)
        assert server.stdout.readline() == "ready\n"
        asked = subprocess.run([*join, sys.executable, "-c", ASK], capture_output=True, text=True)
        assert asked.stdout == "sh None None\nTrue\n", asked.stderr


def test_the_page_knows_a_server_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments without secrets, the image that compose names, and that the load crosses a bridge."""
    monkeypatch.setenv("BURSTLINE_SERVER_IMAGE", "org/engine:v1")
    monkeypatch.setenv("BURSTLINE_SERVER_DIGEST", "org/engine@sha256:abc")
    argv = [sys.executable, "-c", "import time; time.sleep(60)", "--api-key", "sk-of-the-server"]
    engine = ENGINES["vllm"]
    with subprocess.Popen(argv) as server:
        try:
            while not Path(f"/proc/{server.pid}/cmdline").read_bytes():  # shown a moment after exec
                time.sleep(0.01)
            parts = (engine, Target("http://127.0.0.1:1", "m"), Identity("vllm"), None, None, Startup(0.0))
            monkeypatch.setattr(run_settings, "first_of_container", lambda _: server.pid)
            facts = server_facts(Site(*parts, engine.capabilities), None)
            monkeypatch.setattr(run_settings, "first_of_container", lambda _: None)
            unseen = server_facts(Site(*parts, engine.capabilities), None)
        finally:
            server.kill()
    assert facts.argv is not None
    assert facts.argv[1:4] == ("-c", "import time; time.sleep(60)", "--api-key")
    assert "sk-of-the-server" not in str(facts)
    assert (facts.image, facts.image_digest) == ("org/engine:v1", "org/engine@sha256:abc")
    assert facts.notes == (ACROSS_BRIDGE,)
    assert (unseen.argv, unseen.notes) == (None, ())
    here = Manifest(engine="vllm", workload="burst", server=facts)
    elsewhere = Manifest(engine="vllm", workload="burst", server=replace(unseen, url="http://other:1"))
    assert (here.server_here, here.on_this_machine) == (True, True)
    assert (elsewhere.server_here, elsewhere.on_this_machine) == (False, False)
