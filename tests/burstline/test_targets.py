"""`burstline run --slo`: what was asked, what came of it, and the exit code a CI sees."""

import json

import pytest

from burstline.cli import main
from tests.truth.rig import truth_server
from tests.truth.script import Script

LOAD = ("--requests", "70", "--prompt-tokens", "8", "--output-tokens", "4", "-q")


@pytest.fixture(scope="module")
def url():
    with truth_server(Script(ttft_s=0.3, gaps_s=(0.01,))) as server:
        yield server.url


def run(url, out, *targets):
    flags = [word for target in targets for word in ("--slo", target)]
    code = main(["run", "--engine", "truth", "--url", url, "--out", str(out), *LOAD, *flags])
    (path,) = out.iterdir()
    return code, path, json.loads((path / "summary.json").read_text())


def test_a_target_missed_is_exit_code_3_and_stands_on_the_page(url, tmp_path, capsys):
    asked = ("ttft.p90<=100ms", "ttft.p90<=60s", "ttft<=60s")
    code, path, summary = run(url, tmp_path, *asked)
    # On a busy machine the client may be too late to judge, and that must be said then.
    wanted = [target["result"] for target in summary["targets"]]
    if summary["verdict"]["state"] == "VALID":
        assert wanted == ["fail", "pass"]
    assert code == (3 if "fail" in wanted else 4 if "inconclusive" in wanted else 0)
    assert summary["goodput"]["attainment"]["point"] == 1.0
    assert json.loads((path / "manifest.json").read_text())["targets"] == list(asked)
    assert f"{wanted[0]}: ttft.p90<=100ms" in capsys.readouterr().out
    page = (path / "report.html").read_text()
    assert "ttft.p90&lt;=100ms" in page
    assert "Goodput: ttft&lt;=60s" in page


@pytest.mark.slow
def test_a_target_nobody_can_judge_is_exit_code_4(url, tmp_path):
    code, _, summary = run(url, tmp_path, "ttft.p99<=60s")
    assert code == 4
    (target,) = summary["targets"]
    assert target["result"] == "inconclusive"


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--slo", "speed>=9000", "no metric 'speed'"),
        ("--tokenizer", "nowhere", "--tokenizer nowhere is not a folder"),
        ("--tokenizer", "/", "--tokenizer / is not a folder with a tokenizer.json"),
        ("--vocab-size", "10", "--vocab-size 10: expected at least 16"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(flag, value, words, tmp_path, capsys):
    assert main(["run", "--engine", "reference", "--out", str(tmp_path / "runs"), flag, value]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()
