"""The flags of other load generators that we answer, against those tools themselves.

    pytest -m thorough tests/burstline/test_coming_from.py

Downloads their wheels alone, without what they depend on; vLLM is the one that BURSTLINE_VLLM_PYTHON names.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from burstline.wording import others

OTHERS = others()["flags"]
pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]
PEERS = "guidellm==0.5.0", "aiperf==0.13.0", "genai-perf==0.0.16", "inference-perf==0.7.0"
FLAG = re.compile(r"""["']--([a-z][a-z0-9_-]+)""")


def flags_in(sources: list[str]) -> set[str]:
    return {flag.replace("_", "-") for text in sources for flag in FLAG.findall(text)}


def test_every_flag_that_we_answer_is_one_of_theirs(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    wheels = tmp_path / "wheels"
    pip = [str(tmp_path / "env/bin/pip"), "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--ignore-requires-python", "-d", str(wheels), *PEERS], check=True)
    found: dict[str, set[str]] = {}
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".py")]
            found[path.name] = flags_in([wheel.read(name).decode("utf-8", "replace") for name in names])
    if python := os.environ.get("BURSTLINE_VLLM_PYTHON"):
        where = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
        done = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
        folder = Path(done.stdout.split()[-1]) / "benchmarks"
        found["vllm"] = flags_in([each.read_text("utf-8") for each in folder.rglob("*.py")])
    assert len(found) >= len(PEERS)
    print({name: len(flags) for name, flags in found.items()})
    unknown = set(OTHERS) - set().union(*found.values())
    assert not unknown if "vllm" in found else len(unknown) < len(OTHERS) / 2
