"""`burstline compare`: like with like, no ranking without equal work; engines that cheat are found out."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from burstline import cli
from burstline.compare import labels_of
from servers.truth.desk import House
from servers.truth.rig import TruthRig, truth_server
from servers.truth.script import Script


@pytest.fixture
def two_runs(burst_run, tmp_path):
    """Two copies of one run; `change(which, **facts)` lays facts over a manifest."""
    folders = []
    for name in ("first", "second"):
        shutil.copytree(burst_run.path, folder := tmp_path / name)
        folders.append(folder)

    def change(which: int, **facts) -> None:
        manifest = folders[which] / "manifest.json"
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **facts}))

    return folders, change


def compare(capsys, folders, *flags: str) -> tuple[int, str, str]:
    code = cli.main(["compare", *map(str, folders), *flags])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_equal_work_is_ranked_and_equal_numbers_are_not(two_runs, capsys):
    folders, change = two_runs
    change(1, engine="reference")
    code, out, _ = compare(capsys, folders)
    assert code == 0
    assert "COMPARABLE: The engines did the same work" in out
    assert "★" not in out


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"title": "another load"}, "The workload differs"),
        ({"seed": 7}, "The seed differs"),
        ({"server": {"model": "/models/other"}}, "The model differs"),
        ({"devices": [{"name": "H100"}]}, "1 x H100 in second"),
        ({"host": {"cpu": "another"}}, "The CPU differs"),
    ],
)
def test_runs_that_were_not_made_alike_are_refused_until_told_otherwise(two_runs, capsys, facts, words):
    folders, change = two_runs
    change(1, **facts)
    code, _, err = compare(capsys, folders)
    assert code == 2
    assert words in err
    assert "--anyway" in err
    code, out, _ = compare(capsys, folders, "--anyway")
    assert code == 4
    assert "NOT-COMPARABLE" in out
    assert words in out


def test_a_reader_who_leaves_does_not_make_an_inconclusive_comparison_a_clean_one(two_runs, monkeypatch):
    folders, change = two_runs
    change(1, seed=7)
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as gone:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", gone)
        assert cli.main(["compare", *map(str, folders), "--anyway"]) == 4


def test_one_run_alone_is_refused(two_runs, capsys):
    folders, _ = two_runs
    assert compare(capsys, folders[:1])[0] == 2


def test_a_comparison_is_written_as_a_page_as_markdown_and_as_json(two_runs, tmp_path, capsys):
    folders, change = two_runs
    change(1, engine="reference")
    for shape in ("html", "markdown", "json"):
        code, _, _ = compare(capsys, folders, "--format", shape, "--out", str(tmp_path / shape))
        assert code == 0
    page = (tmp_path / "html").read_text()
    assert "first/report.html" in page
    ids = set(re.findall(r' id="([^"]+)"', page))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= ids
    assert not re.search(r'(?:src|href)="https?://', page)
    assert "| Number | Unit | vllm | reference |" in (tmp_path / "markdown").read_text()
    (cell,) = orjson.loads((tmp_path / "json").read_bytes())["cells"]
    assert cell["numbers"]["TTFT p50"]["vllm"]["unit"] == "s"


def test_the_same_runs_give_the_same_page(two_runs, tmp_path, capsys):
    folders, change = two_runs
    change(1, engine="reference")
    for name in "ab":
        compare(capsys, folders, "--format", "html", "--out", str(tmp_path / name))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_contenders_are_named_by_engine_and_by_a_letter_only_where_command_lines_differ():
    def manifest(engine: str, *argv: str) -> dict:
        return {"engine": engine, "server": {"argv": ["x", *argv]}}

    plain, again = (manifest("vllm", "--port", port) for port in ("1", "2"))
    other = manifest("vllm", "--port", "3", "--enforce-eager")
    assert labels_of([plain, again, manifest("tgi")]) == ["vllm", "vllm", "tgi"]
    assert labels_of([plain, other, again]) == ["vllm A", "vllm B", "vllm A"]


# ---- engines that cheat, live: each is run beside an honest one and found out


def fired(server: TruthRig, out: Path, *, salt: str = "5eed") -> Path:
    """The run that 80 requests of 64 -> 8 tokens at the server left behind."""
    load = ("--requests", "80", "--prompt-tokens", "64", "--output-tokens", "8", "--salt", salt)
    where = ("--engine", "truth", "--url", server.url, "--out", str(out), "--no-certify", "-q")
    done = subprocess.run(
        [sys.executable, "-m", "burstline", "run", *where, *load],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode in (0, 4), done.stderr
    return max(out.iterdir(), key=lambda run: run.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    with truth_server() as server:
        return fired(server, tmp_path_factory.mktemp("honest"))


def verdict(capsys, *runs: Path) -> tuple[int, dict]:
    code = cli.main(["compare", *map(str, runs), "--format", "json"])
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    return code, cell


def codes(cell: dict) -> set[str]:
    return {reason["code"] for reason in cell["reasons"]}


@pytest.mark.slow
def test_an_engine_that_serves_from_its_cache_is_found_out(honest, tmp_path, capsys):
    with truth_server(house=House(prefix_cache=True)) as server:
        fired(server, tmp_path)
        cheat = fired(server, tmp_path)
    code, cell = verdict(capsys, honest, cheat)
    assert (code, cell["state"]) == (4, "NOT-COMPARABLE")
    assert "cache-truth" in codes(cell)
    assert not any(cell["best"].values())


@pytest.mark.slow
def test_an_engine_that_stops_early_is_found_out(honest, tmp_path, capsys):
    with truth_server(Script(n_tok=5, finish="stop")) as server:
        cheat = fired(server, tmp_path)
    code, cell = verdict(capsys, honest, cheat)
    assert (code, cell["state"]) == (4, "NOT-COMPARABLE")
    assert {"output-tokens", "finish-reasons"} <= codes(cell)
    assert "failures" not in codes(cell)


@pytest.mark.slow
def test_an_engine_that_refuses_load_is_found_out_and_no_faster_for_it(honest, tmp_path, capsys):
    with truth_server(house=House(max_in_flight=60)) as server:
        cheat = fired(server, tmp_path)
    code, cell = verdict(capsys, honest, cheat)
    assert (code, cell["state"]) == (4, "NOT-COMPARABLE")
    (refusal,) = [reason for reason in cell["reasons"] if reason["code"] == "failures"]
    assert "http_503" in refusal["text"]
    assert ttft(honest, "p90")["point"] is not None
    assert ttft(cheat, "p50")["point"] >= 0.2
    assert "infinitely late" in ttft(cheat, "p90")["absent"]


def ttft(run: Path, p: str) -> dict:
    return json.loads((run / "summary.json").read_text())["metrics"]["ttft"][p]
