"""Real engines on a CPU that fail: killed in the load, broken checkpoints, missing programs, long requests.

Each test prints what a user reads. An engine whose environment variable names no installation is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from burstline.models.model_folder import make_model
from tests.servers.lives import VARIABLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CORES = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler", "llamacpp": "llama-server"}
"""What the process that computes calls itself."""
CAUSES = {
    "vllm": "incomplete metadata, file not fully covered",
    "sglang": "incomplete metadata, file not fully covered",
    "llamacpp": "data is not within the file bounds",
}
EAGER = {"vllm": ("--cuda-graphs=0",), "sglang": (), "llamacpp": ()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_model(folder, "tiny", formats=("safetensors", "gguf"), dtype="float32")


@pytest.fixture(params=["vllm", pytest.param("sglang", marks=pytest.mark.thorough), "llamacpp"])
def name(request: pytest.FixtureRequest) -> str:
    if VARIABLES[request.param] not in os.environ:
        pytest.skip(f"{VARIABLES[request.param]} names no installation")
    return str(request.param)


def command(out: Path, name: str, model: Path, *flags: str) -> list[str]:
    fast = ("--no-canary", "--warmup", "0")
    run = (sys.executable, "-m", "burstline", "run", *fast, "--out", str(out))
    return [*run, "--engine", name, "--model", str(model), *EAGER[name], *flags]


def ended(argv: list[str], **env: str) -> tuple[int, str, str]:
    """Exit code, standard output and the last line of standard error; printed for the reader."""
    began_s = time.monotonic()
    done = subprocess.run(argv, env=os.environ | env, capture_output=True, text=True, timeout=600)
    print(f"\n$ {' '.join(argv[2:])}\n{done.stdout}{done.stderr}[exit {done.returncode}, "
          f"{time.monotonic() - began_s:.1f} s]")  # fmt: skip
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def left_of(out: Path) -> list[str]:
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(out) in line]


def test_an_engine_whose_computing_process_is_killed_in_the_load_is_what_the_run_found(
    name: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    argv = command(out, name, model, "--requests", "24", "--prompt-tokens", "32", "--output-tokens", "800")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if " sent," in line:
                break
        time.sleep(1.5)  # the load has begun, and lasts for some seconds
        killed_s = time.monotonic()
        assert kill(process.pid, CORES[name]), "".join(seen)
        stdout, stderr = process.communicate(timeout=300)
    print(f"\n$ {' '.join(argv[2:])}\n{''.join(seen)}--- kill -9 {CORES[name]}\n{stderr}{stdout}"
          f"[exit {process.returncode}, {time.monotonic() - killed_s:.1f} s after the kill]")  # fmt: skip
    assert process.returncode == 5
    verdict = verdict_in(out)
    assert verdict["state"] == "FAILED"
    assert verdict["reasons"][0]["code"] == "died"
    assert " died " in stdout + stderr
    assert not left_of(out)


def kill(parent: int, title: str) -> bool:
    """SIGKILL for the processes below `parent` that call themselves so."""
    found = False
    for child in psutil.Process(parent).children(recursive=True):
        words = " ".join([child.name(), *child.cmdline()[:1]])
        if title in words or title[:15] == child.name():
            child.kill()
            found = True
    return found


def verdict_in(out: Path) -> Mapping[str, object]:
    (folder,) = out.iterdir()
    return dict(json.loads((folder / "summary.json").read_text())["verdict"])


def test_a_broken_checkpoint_is_one_line_with_its_cause(name: str, model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        data = file.read_bytes()
        is_weights = file.suffix in (".safetensors", ".gguf")
        (broken / file.name).write_bytes(data[: len(data) // 2] if is_weights else data)
    out = tmp_path / "runs"
    code, _, stderr = ended(command(out, name, broken, "--requests", "4"))
    assert code == 5
    cause, where = [line for line in stderr.splitlines() if line.strip()][-2:]
    assert CAUSES[name] in cause
    assert where.startswith("Its whole log: ")
    assert not left_of(out)


def test_a_start_without_a_program_that_it_needs_is_told_by_that_program(
    name: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    argv = command(out, name, model, "--requests", "4")
    if name == "llamacpp":
        env, words = {VARIABLES[name]: "/nowhere/llama-server"}, "/nowhere/llama-server"
    else:
        env, words = {VARIABLES[name]: sys.executable}, "is not installed"
    code, _, stderr = ended(argv, **env)
    assert code == 5
    assert words in stderr
    assert not left_of(out)


@pytest.mark.thorough
def test_vllm_without_a_compiler_for_its_model_is_told(model: Path, tmp_path: Path) -> None:
    """It compiles its model two minutes after its start."""
    if VARIABLES["vllm"] not in os.environ:
        pytest.skip(f"{VARIABLES['vllm']} names no installation")
    out = tmp_path / "runs"
    argv = command(out, "vllm", model, "--requests", "4")
    argv.remove("--cuda-graphs=0")
    code, _, stderr = ended(argv, CXX="/nowhere/c++", VLLM_CACHE_ROOT=str(tmp_path / "cache"))
    assert code == 5
    assert "C++ compiler" in stderr
    assert not left_of(out)


def test_requests_beyond_the_limit_are_refused_before_anything_starts(
    name: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    load = ("--requests", "4", "--prompt-tokens", "300", "--output-tokens", "8", "--max-model-len", "256")
    code, _, stderr = ended(command(out, name, model, *load))
    assert code == 2
    assert "has 308 tokens (prompt and output), but --max-model-len allows 256" in stderr
    assert not out.exists()
