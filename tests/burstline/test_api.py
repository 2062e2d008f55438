"""`burstline.load`, as a notebook uses it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import burstline
from burstline import cli
from burstline.measure.record.rundir import open_run
from burstline.workloads.request import WorkloadError
from tests.truth.rig import truth_server
from tests.truth.script import Script

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/runs/4"


def test_the_name_itself_imports_nothing_heavy() -> None:
    program = (
        "import importlib, sys; old = set(sys.modules); import burstline; print(*set(sys.modules) - old)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["burstline"]


def test_a_run_is_tables_and_typed_values() -> None:
    run = burstline.load(GOLDEN)
    summary = open_run(GOLDEN).summary
    assert summary is not None
    assert run.summary == summary
    assert run.verdict == summary.verdict
    document = summary.to_json()
    for name, row in run.numbers.iterrows():
        value = document
        for key in str(name).split("."):
            value = value[key]
        assert value["point"] == (None if np.isnan(row.point) else row.point)
    assert "TTFT" not in run.numbers.loc["metrics.ttft.p95", "absent"]
    assert run.numbers.loc["throughput.requests_per_s", "unit"] == "1/s"
    requests = run.requests
    assert len(requests) == summary.counts["planned"]
    assert requests.ttft_s.notna().sum() == summary.counts["ok"]
    ok = requests.dropna(subset="ttft_s")
    assert (ok.e2e_s >= ok.ttft_s).all()
    assert {"at_ns", "source", "name", "value"} <= set(run.telemetry.columns)
    assert len(run.telemetry) > 0


def test_a_file_of_the_run_names_it_and_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    assert burstline.load(str(GOLDEN / "records.parquet")).path == GOLDEN
    with pytest.raises(WorkloadError, match="not a run"):
        burstline.load(tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        burstline.lode  # noqa: B018


def test_a_run_is_what_the_command_makes_and_progress_is_heard(tmp_path: Path) -> None:
    heard: list[str | burstline.Snapshot] = []
    load = {"requests": 6, "prompt_tokens": 16, "output_tokens": "3", "arrival": "poisson", "rate": 50}
    with truth_server(Script(), thread=True) as truth:
        run = burstline.run(
            engine="truth", url=truth.url, slo=["ttft.p50<=60s"], out=tmp_path, progress=heard.append, **load
        )
    assert run.path.parent == tmp_path
    assert run.summary.counts == {"planned": 6, "ok": 6}
    assert [target.target for target in run.summary.targets] == ["ttft.p50<=60s"]
    manifest = open_run(run.path).manifest
    flags = (
        f"burstline run --engine truth --url {truth.url} --requests 6 --prompt-tokens 16 --output-tokens 3"
    )
    assert shlex.join(manifest.argv).startswith(flags)
    assert manifest.asked.rate == 50
    assert f"--salt {manifest.asked.salt}" in (manifest.repeat or "")
    assert "Waiting until the server has generated a token" in heard
    assert any(isinstance(each, burstline.Snapshot) and "6 sent" in str(each) for each in heard)
    assert (run.path / "report.html").is_file()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"requsts": 5}, "burstline.run: unknown key 'requsts'; did you mean requests?"),
        ({"requests": "many"}, "burstline.run: requests must be a whole number, not str 'many'"),
        ({"engine": "reference", "concurrency": 4, "rate": 3.0}, "--rate 3 would be ignored"),
        ({"arrival": "sometimes"}, "sometimes"),
        ({"engine_args": "--x"}, "engine_args must be a list of strings, e.g. ['--flag', '4'], not '--x'"),
        ({"out": 5}, "burstline.run: out must be a folder, not int 5"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(
    options: dict[str, str | float], words: str, tmp_path: Path
) -> None:
    with pytest.raises(burstline.WorkloadError, match=re.escape(words)):
        burstline.run(**{"out": tmp_path, **options})
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_start_raises_and_the_run_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(burstline.EngineError, match="unrecognized arguments: --no-such-flag"):
        burstline.run(engine="reference", engine_args=["--no-such-flag"], requests=2, out=tmp_path)
    (kept,) = tmp_path.iterdir()
    assert burstline.load(kept).requests.outcome.tolist() == ["not_sent"] * 2
    assert f"Nothing was measured: {kept}" in (said := capsys.readouterr().err)
    assert "captures" not in said


def test_the_bound_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    found = burstline.bound("llama-3.1-8b", "h100-sxm5-80g", batch=32, tp=2)
    argv = ["bound", "--model", "llama-3.1-8b", "--device", "h100-sxm5-80g", "--batch", "32", "--tp", "2"]
    assert cli.main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.document))
    assert cli.main(argv) == 0
    assert capsys.readouterr().out == f"{found}\n"
    assert found.latency_s["ceiling"] < found.latency_s["predicted"]
    decode = found.ops[found.ops.phase == "decode"]
    assert decode.ideal_us.sum() > 0
    assert set(decode.bound) <= {"memory", "compute", "communication", "latency"}
    with pytest.raises(burstline.RooflineError, match="--utilisation 2"):
        burstline.bound("llama-3.1-8b", "h100-sxm5-80g", utilisation=2)
    with pytest.raises(burstline.WorkloadError, match="did you mean batch"):
        burstline.bound("llama-3.1-8b", "h100-sxm5-80g", btch=2)


@pytest.mark.slow
def test_runs_are_compared_and_a_limit_is_searched_as_the_commands_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = {"engine": "truth", "requests": 60, "prompt_tokens": 16, "output_tokens": "3", "calibrate": False}
    with truth_server(Script(), thread=True) as truth:
        runs = [burstline.run(url=truth.url, out=tmp_path / "runs", **load) for _ in range(2)]
        found = burstline.limit(
            engine="truth", url=truth.url, concurrency=4, prompt_tokens=16, output_tokens="3",
            slo=["e2e.p50<=60s"], budget_s=10, out=tmp_path / "search", calibrate=False,
        )  # fmt: skip
    compared = burstline.compare(*runs)
    capsys.readouterr()
    code = cli.main(["compare", *(str(run.path) for run in runs)])
    assert capsys.readouterr().out == f"{compared}\n"
    assert compared.comparable == (code == 0)
    assert len(compared.document["cells"]) == 1
    assert found.state in ("open", "confirmed")
    assert all((tmp_path / "search" / name / "report.html").is_file() for name in found.runs)
    assert found.found.high is None  # no load misses an SLO of a minute
    with pytest.raises(burstline.WorkloadError, match="name two or more"):
        burstline.compare(runs[0])
    with pytest.raises(burstline.WorkloadError, match="probes last as long as they must; drop --requests"):
        burstline.limit(engine="truth", slo=["e2e.p50<=60s"], requests=5)


@pytest.mark.slow
def test_a_figure_is_the_reports_own() -> None:
    run = burstline.load(GOLDEN)
    figure = run.figure("ttft_cdf")
    assert figure.svg.startswith("<svg")
    assert figure.png.startswith(b"\x89PNG")
    with pytest.raises(WorkloadError, match=r"has no figure 'ttft'; it has .*ttft_cdf"):
        run.figure("ttft")


@pytest.mark.slow
def test_the_how_to_runs_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "docs/howto/python.md").read_text("utf-8")
    sends, _, plots, logs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    def python(program: str, *argv: str | Path) -> str:
        argv = (sys.executable, "-c", program, *argv)
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            argv, cwd=tmp_path, env=env, check=True, timeout=200, capture_output=True, text=True
        ).stdout

    told = python(sends)
    runs = list((tmp_path / "runs/rates").iterdir())
    assert [run.name in told for run in runs] == [True, True]
    assert "60/60 sent" in told
    assert "Decode of llama-3.1-8b on H100-SXM5-80G is memory-bound" in told
    python(plots, *runs)
    assert (tmp_path / "ttft.png").stat().st_size > 5000
    heard: list[object] = []
    tool = SimpleNamespace(
        log_metrics=heard.append,
        set_tag=lambda *tag: heard.append(tag),
        log_artifact=heard.append,
        log=heard.append,
        Html=Path,
    )
    space: dict[str, Any] = {}
    exec(logs, space)
    space["log"](GOLDEN, mlflow=tool)
    space["log"](runs[0], wandb=tool)
    summary = burstline.load(GOLDEN).summary
    assert heard[0]["metrics.ttft.p50"] == summary.metrics["ttft"].p50.point  # type: ignore
    assert heard[1] == ("verdict", str(summary.verdict.state))
