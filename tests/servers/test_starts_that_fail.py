"""Every way a start can fail, for every engine: one clear line, an exit code, nothing left running."""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from burstline import cli
from burstline.bench import server_session
from burstline.bench.server_session import Say, serving
from burstline.console import exit_codes
from burstline.console.server_options import ServerOptions
from burstline.servers.engine import Engine
from burstline.servers.engines import transformers_serve
from burstline.servers.host import installation
from burstline.servers.host.installation import Installation
from burstline.servers.host.process import Server
from burstline.servers.host.ready import Startup, wait_ready
from burstline.servers.messages import EngineError, Target
from burstline.servers.registry import ENGINES
from tests.servers.golden import GOLDEN

# Stands in for every engine's command and interpreter: does what FAKE_ENGINE says, whatever it is told.
FAKE = """#!{python}
import os, signal, subprocess, sys, time
if os.environ["FAKE_ENGINE"] == "hears no SIGTERM":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(open(os.environ["FAKE_LOG"]).read(), flush=True)
if os.environ["FAKE_ENGINE"] == "dies":
    sys.exit(3)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open(os.environ["FAKE_PIDS"], "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""

LOGS = {
    "vllm": ((GOLDEN / "vllm" / "failed_kv_too_large.log").read_text(), "Available memory on node 0"),
    "tgi": (
        json.dumps(
            {
                "level": "ERROR",
                "fields": {"message": "Shard error\nRuntimeError: Not enough memory to handle"},
            }
        )
        + "\nError: ShardCannotStart",
        "RuntimeError: Not enough memory to handle",
    ),
    "lightllm": (
        "ERROR check max len infer fail, you can try: 1. less\n",
        "check max len infer fail, you can try",
    ),
    "sglang": ("RuntimeError: Not enough memory. Please try\nkilled\n", "RuntimeError: Not enough memory"),
    "trtllm": ("RuntimeError: No GPU devices found on the node\n", "No GPU devices found on the node"),
    "llamacpp": (
        "llama_model_load: error: failed to open x.gguf: no such file\nmain: exiting",
        "failed to open x.gguf",
    ),
    "transformers": (
        "Traceback\nOSError: Error no file named model.safetensors found\n",
        "no file named model",
    ),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 10}')
    (folder / "model.gguf").touch()
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One executable that every adapter takes for its engine; the folder where it tells its pids."""
    script = tmp_path / "engine"
    script.write_text(FAKE.format(python=sys.executable))
    script.chmod(0o755)
    named = dict.fromkeys(("vllm", "lightllm", "sglang", "transformers", *transformers_serve._NEEDS), "1")
    here = Installation(str(script), named, tmp_path)
    monkeypatch.setattr(installation, "find_installation", lambda *_: here)
    for name in ("BURSTLINE_TGI_LAUNCHER", "BURSTLINE_LLAMA_SERVER", "BURSTLINE_TRTLLM_SERVE"):
        monkeypatch.setenv(name, str(script))
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))
    yield tmp_path
    if (tmp_path / "pids").exists():
        pids = map(int, (tmp_path / "pids").read_text().split())
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


def start(name: str, model: Path, run_dir: Path, say: Say = lambda note: None) -> None:
    with serving(ENGINES[name], ServerOptions(engine=name, model=str(model)), run_dir, say):
        raise AssertionError("it cannot have started")


@pytest.mark.parametrize("name", LOGS)
def test_an_engine_that_dies_is_told_with_its_own_root_cause_and_exit_code(
    name: str, fake: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, words = LOGS[name]
    (fake / "says").write_text(log)
    monkeypatch.setenv("FAKE_LOG", str(fake / "says"))
    monkeypatch.setenv("FAKE_ENGINE", "dies")
    with pytest.raises(EngineError) as failure:
        start(name, model, fake)
    first, where = str(failure.value).splitlines()
    assert first.startswith(f"{ENGINES[name].title} ended with exit code 3 before it was ready: ")
    assert words in first
    assert where == f"Its whole log: {fake / 'server.log'}"


def test_an_engine_that_is_never_ready_is_told_with_its_last_line_and_ended(
    fake: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake / "says").write_text("Loading weights: 3 of 99")
    monkeypatch.setenv("FAKE_LOG", str(fake / "says"))
    monkeypatch.setenv("FAKE_ENGINE", "hangs")
    monkeypatch.setattr("burstline.bench.server_session.wait_ready", impatient)
    said = r"not ready after 0\.5 s while loading weights: .*its log ends: Loading weights: 3 of 99"
    with pytest.raises(EngineError, match=said):
        start("tgi", model, fake)


def impatient(engine: Engine, server: Server, target: Target, *, timeout_s: float, **more: Any) -> Startup:
    """It waits half a second from when the engine has said all that it says."""
    assert timeout_s >= 600  # engines take minutes
    n_bytes, until_s = Path(os.environ["FAKE_LOG"]).stat().st_size, time.monotonic() + 40
    while not server.log_path.exists() or server.log_path.stat().st_size < n_bytes:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return wait_ready(engine, server, target, timeout_s=0.5, **more)


@pytest.mark.parametrize("name", LOGS)
@pytest.mark.parametrize("is_ready", [False, True])
def test_only_an_engine_that_was_ready_is_given_the_time_to_finish_requests(
    name: str, fake: Path, model: Path, monkeypatch: pytest.MonkeyPatch, *, is_ready: bool
) -> None:
    """One that loads may not hear SIGTERM for minutes: it is killed soon, and the terminal says so."""
    (fake / "says").write_text("Loading weights: 3 of 99")
    monkeypatch.setenv("FAKE_LOG", str(fake / "says"))
    monkeypatch.setenv("FAKE_ENGINE", "hangs" if is_ready else "hears no SIGTERM")
    monkeypatch.setattr(server_session, "STARTING_GRACE_S", 0.6)
    monkeypatch.setattr(server_session, "SLOW_STOP_S", 0.0)
    granted, said, stop = [], list[str](), Server.stop

    def interrupted(*_: object, **how: object) -> Startup:
        until_s = time.monotonic() + 40
        while not (fake / "pids").exists():
            assert time.monotonic() < until_s
            time.sleep(0.01)
        if not (is_ready and how):
            raise KeyboardInterrupt
        return Startup(0.0)

    monkeypatch.setattr(server_session, "wait_ready", interrupted)
    monkeypatch.setattr(server_session, "identified", interrupted)
    monkeypatch.setattr(Server, "stop", lambda server: granted.append(server.grace_s) or stop(server))
    with pytest.raises(KeyboardInterrupt):
        start(name, model, fake, said.append)
    assert f"Stopping {ENGINES[name].title}, which may take up to {granted[0]:.0f} s" in said
    assert granted[0] >= 15 if is_ready else granted[0] == 0.6


def test_a_start_that_has_failed_in_a_launcher_that_hangs_is_told_at_once_with_its_cause(
    fake: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightLLM 1.2, recorded: the launcher waits for ever for a child, its timeout is 20 minutes."""
    monkeypatch.setenv("FAKE_LOG", str(GOLDEN / "lightllm" / "logs" / "hypercorn_missing.log"))
    monkeypatch.setenv("FAKE_ENGINE", "hangs")
    with pytest.raises(EngineError) as failure:
        start("lightllm", model, fake)
    first, where = str(failure.value).splitlines()
    cause = "FileNotFoundError: [Errno 2] No such file or directory: 'hypercorn'"
    assert first.startswith(f"LightLLM cannot start: {cause}")
    assert where == f"Its whole log: {fake / 'server.log'}"


@pytest.mark.slow
def test_a_cause_is_told_on_a_time_out_too(fake: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's launcher logs and hangs."""
    (fake / "says").write_text(LOGS["sglang"][0])
    monkeypatch.setenv("FAKE_LOG", str(fake / "says"))
    monkeypatch.setenv("FAKE_ENGINE", "hangs")
    monkeypatch.setattr("burstline.bench.server_session.wait_ready", impatient)
    with pytest.raises(EngineError, match="Not enough memory"):
        start("sglang", model, fake)


@pytest.mark.parametrize(
    ("name", "log", "cause"),
    [
        ("lightllm", "lightllm/logs/start_ok.log", None),
        ("lightllm", "lightllm/logs/burst1000_metrics_dropped.log", None),
        (
            "lightllm",
            "lightllm/logs/no_weights_hangs.log",
            "AssertionError: can only support pytorch tensor and safetensors format",
        ),
        (
            "lightllm",
            "lightllm/logs/kv_too_small_hangs.log",
            "AssertionError: max_total_token_num must be >= max_seq_length, got",
        ),
        ("tgi", "tgi/server.log", "transport error"),
        ("vllm", "vllm/start.log", None),
        ("vllm", "vllm/no_compiler_hangs.log", "No working C"),
    ],
)
def test_only_a_log_that_condemns_its_start_does_so(name: str, log: str, cause: str | None) -> None:
    doomed = ENGINES[name].doomed((GOLDEN / log).read_text(errors="replace"))
    assert doomed is None if cause is None else cause in (doomed or "")


def test_a_good_start_is_not_condemned_before_its_end() -> None:
    lines = (GOLDEN / "tgi" / "server.log").read_text().splitlines()
    ready = next(k for k, line in enumerate(lines) if '"message":"Connected"' in line)
    assert ENGINES["tgi"].doomed("\n".join(lines[: ready + 1])) is None


def test_a_program_of_the_engines_own_environment_is_on_its_path(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LightLLM runs `hypercorn` by bare name; the interpreter's folder is not on the user's PATH."""
    scripts = tmp_path / "env" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "python").write_text("#!/bin/sh\nhypercorn\n")
    (scripts / "hypercorn").write_text("#!/bin/sh\necho hypercorn runs >&2; exit 7\n")
    for command in scripts.iterdir():
        command.chmod(0o755)
    here = Installation(str(scripts / "python"), {"lightllm": "1"}, scripts)
    monkeypatch.setattr(installation, "find_installation", lambda *_: here)
    with pytest.raises(EngineError, match="ended with exit code 7 before it was ready: hypercorn runs"):
        start("lightllm", model, tmp_path)


def test_a_wait_tells_the_stage_and_its_age_and_never_raw_json() -> None:
    from burstline.servers.host.ready import stage_of
    from burstline.servers.introspection import log_message

    lines = (GOLDEN / "tgi" / "server.log").read_text().splitlines()
    loading = next(k for k, line in enumerate(lines) if "Warming up model" in line)
    assert stage_of(ENGINES["tgi"], "\n".join(lines[: loading + 1])) == "warming up"
    assert log_message(lines[4]) == "Starting check and download process for /srv/models/chat"
    assert "{" not in log_message(lines[0])[:1]
    lightllm = (GOLDEN / "lightllm" / "logs" / "start_ok.log").read_text().splitlines()
    assert stage_of(ENGINES["lightllm"], "\n".join(lightllm[:56])) == "loading weights"
    assert stage_of(ENGINES["lightllm"], "\n".join(lightllm[:66])) == "warming up"
    disabled = "Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup."
    assert stage_of(ENGINES["vllm"], disabled) is None
    settings = "args: loading weights=auto " + "x=1 " * 100
    assert stage_of(ENGINES["lightllm"], "\n".join([*lightllm[:66], settings])) == "warming up"
    assert log_message(lightllm[16]) == "ShmPortArgs alloc metric_port=43165"


ULIMIT = "starting; its log ends: Found ulimit of 20000 and failed to automatically ..."


@pytest.mark.parametrize(
    ("log", "told"),
    [
        pytest.param("", "nothing in its log yet", marks=pytest.mark.slow),
        (
            "Preparing the model\nx.py:3: UserWarning: no AMX\n  warnings.warn(\n\n",
            "starting; its log ends: Preparing the model",
        ),
        ("Found ulimit of 20000 and failed to automatically increase with error\n", ULIMIT),
    ],
)
def test_a_wait_tells_no_refused_connection_and_no_line_of_source(
    log: str, told: str, fake: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake / "says").write_text(log)
    monkeypatch.setenv("FAKE_LOG", str(fake / "says"))
    monkeypatch.setenv("FAKE_ENGINE", "hangs")
    monkeypatch.setattr(
        "burstline.bench.server_session._every", lambda _, __, say: lambda at_s, state: say(state)
    )
    monkeypatch.setattr("burstline.bench.server_session.wait_ready", impatient)
    seen: list[str] = []
    with pytest.raises(EngineError, match="not ready"):
        start("tgi", model, fake, seen.append)
    assert [each for each in seen if not each.startswith("Stopping ")][-1] == told


def test_a_taken_port_is_found_before_anything_is_started(fake: Path, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = ServerOptions(engine="vllm", model=str(model), port=port)
        failure = pytest.raises(EngineError, match=rf"port {port} .*held by pid {os.getpid()}")
        with failure, serving(ENGINES["vllm"], where, fake, lambda note: None):
            pass
    assert not (fake / "pids").exists()


@pytest.mark.parametrize("name", LOGS)
def test_an_engine_that_is_not_installed_is_one_line_with_how_to_get_it_and_exit_code_5(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "find_installation", lambda *_: None)
    for variable in [name for name in os.environ if name.startswith("BURSTLINE_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", "")
    assert cli.main(["serve", name, "--model", str(model)]) == exit_codes.ENGINE_FAILED
    (said,) = capsys.readouterr().err.splitlines()
    assert "is not installed" in said
    assert ENGINES[name].how_to_get in said


def test_a_model_that_is_not_there_is_a_users_slip_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "vllm", "--model", str(tmp_path / "nowhere")]) == exit_codes.USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert "is not a folder; expected a Hugging Face model folder, or a name" in said


@pytest.mark.parametrize(("slow_s", "is_told"), [(100.0, False), (0.1, True)])
def test_a_stop_that_takes_long_is_told_with_its_limit(
    slow_s: float, monkeypatch: pytest.MonkeyPatch, *, is_told: bool
) -> None:
    """TGI lets open streams finish for up to 90 s after SIGTERM."""

    class Slow:
        grace_s = 100.0

        def stop(self) -> None:
            until_s = time.monotonic() + 40
            while is_told and not told and time.monotonic() < until_s:
                time.sleep(0.01)

    monkeypatch.setattr(server_session, "SLOW_STOP_S", slow_s)
    told: list[str] = []
    with server_session._slow_stop_told(ENGINES["tgi"], Slow(), told.append):  # type: ignore[arg-type]
        assert told == []
    assert told == (["Stopping TGI, which may take up to 100 s"] if is_told else [])
