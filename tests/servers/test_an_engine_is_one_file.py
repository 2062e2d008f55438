"""The engine of `docs/howto/add-an-engine.md`, one module outside the packages: started, recognised, run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from burstline.servers.registry import ENGINES, register
from burstline.workloads.request import WorkloadError
from tests.verdicts import done

TOY = Path(__file__).parents[2] / "docs/howto/toy_engine.py"


def burstline(folder: Path, *words: str, modules: str = "a_toy_engine") -> tuple[int, str]:
    environment = os.environ | {
        "BURSTLINE_ENGINES": modules,
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    argv = [sys.executable, "-m", "burstline", *words]
    ended = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=100)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "a_toy_engine.py").write_bytes(TOY.read_bytes())
    return tmp_path


@pytest.mark.slow
def test_a_burst_runs_at_an_engine_that_is_one_module_and_nothing_else(toy: Path) -> None:
    load = ("--requests", "24", "--prompt-tokens", "64", "--output-tokens", "6")
    code, text = burstline(toy, "run", "--engine", "toy", *load, "--out", str(toy / "runs"))
    assert done(code, toy / "runs"), text
    (run,) = (toy / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["counts"]["ok"] == summary["counts"]["planned"] == 24
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["engine"] == "toy"
    assert "Toy" in (run / "report.html").read_text()


def test_an_installed_package_brings_its_engine_by_an_entry_point(toy: Path) -> None:
    facts = toy / "toy_engine-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 0.1\n")
    points = facts / "entry_points.txt"
    points.write_text("[burstline.engines]\ntoy = a_toy_engine:Toy\n")
    assert "toy " in burstline(toy, "engines", modules="")[1]
    points.write_text("[burstline.engines]\ntoy = a_toy_engine:Nothing\n")
    code, text = burstline(toy, "run", "--engine", "toy", "--out", str(toy / "runs"), modules="")
    assert code == 5
    assert "burstline.engines: toy = a_toy_engine:Nothing cannot be loaded" in text


def test_its_own_sign_tells_it_at_a_url(toy: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(toy / "a_toy_engine.py"), str(port)], cwd=Path.cwd())
    try:
        for _ in range(1000):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.01)
        _, text = burstline(toy, "engines", "--ports", str(port))
    finally:
        server.terminate()
        server.wait()
    (row,) = [line for line in text.splitlines() if line.startswith("toy ")]
    assert row.split()[:3] == ["toy", "0.1", f"http://127.0.0.1:{port}"]


def test_a_module_that_is_no_engine_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="BURSTLINE_ENGINES=json: json is no module with an ENGINE"):
        register("json")
    assert "json" not in ENGINES
    code, text = burstline(tmp_path, "engines", modules="json")
    assert (code, text.count("\n")) == (2, 1)
