"""Certifying: clients that lie by construction are caught, bad commands are refused, ours is run whole."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import orjson
import psutil
import pytest

from burstline import cli
from burstline.bench import certification
from burstline.bench.certification import SCRIPTS, parse_reads, setup_of
from burstline.bench.load_options import checked
from burstline.loadgen.record.typed_json import from_json
from burstline.loadgen.verdict.certificate import Certificate
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LoadSpec

LIAR = Path(__file__).with_name("liar.py")
READS = ("ttft.p50=$.ttft.median:ms", "e2e.p50=e2e_s:s", "ok=counts.0", "failed=counts.1")


def certified(lie: str, out: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> Certificate:
    command = f"{sys.executable} {LIAR} {{url}} {{requests}} {{output_tokens}} {{out}} {lie}"
    reads = (word for read in READS for word in ("--reads", read))
    load = ("--requests", "10", "--prompt-tokens", "8", "--output-tokens", "32")
    ended = cli.main(["certify", *load, "--client", command, *reads, "--out", str(out), "--json", *argv])
    assert ended in (0, 4)  # 4: with findings
    found = from_json(Certificate, orjson.loads(capsys.readouterr().out))
    assert from_json(Certificate, orjson.loads((out / "certificate.json").read_bytes())) == found
    return found


def error_s(found: Certificate, name: str) -> float:
    (each,) = (reading for reading in found.readings if reading.name == name)
    assert each.printed is not None
    return each.printed - each.true


@pytest.mark.measures
def test_a_client_that_adds_20_ms_is_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = certified("adds", tmp_path, capsys)
    assert 0.0199 < error_s(found, "ttft.p50") < 0.1
    assert error_s(found, "e2e.p50") < error_s(found, "ttft.p50") + 0.05
    assert any(finding.startswith("TTFT p50: printed 2") for finding in found.findings)
    assert (found.offered.n, found.offered.n_ok, found.printed_ok) == (10, 10, 10)
    assert (found.offered.n_connections, found.offered.n_as_ids, found.offered.prompt_tok) == (
        10,
        10,
        (8, 8, 8),
    )
    assert found.offered.n_distinct == 1, "all its prompts are the same"
    assert found.cost.before_s is not None
    assert found.cost.before_s > 0
    assert "| TTFT p50 | ms |" in (tmp_path / "certificate.md").read_text()


def test_a_client_that_drops_failures_is_caught_and_one_that_counts_them_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hides = "The server failed 1 request; the tool printed 0."
    found = certified("drops", tmp_path / "drops", capsys, "--script", "failing")
    assert hides in found.findings
    assert (found.offered.n_ok, found.offered.n_failed, found.printed_failed) == (9, 1, 0)
    honest = certified("honest", tmp_path / "honest", capsys, "--script", "failing")
    assert hides not in honest.findings
    assert honest.printed_failed == 1


@pytest.mark.slow
@pytest.mark.measures
def test_a_client_that_opens_late_is_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = certified("late", tmp_path, capsys)
    assert found.offered.spread_s is not None
    assert 0.35 < found.offered.spread_s < 1
    assert any("The burst took" in finding for finding in found.findings)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--client", "{uri}"], "no value for {uri}; there are url, model"),
        (["--client", "'"], "is no command line"),
        (["--client", "/nowhere/at-all {url}"], "/nowhere/at-all cannot be started"),
        (["--client", f"{sys.executable} -c raise(SystemExit(3))"], "ended with exit code 3"),
        (["--client", "x", "--reads", "ttft=a"], "expected NAME=PLACE"),
        (["--client", f"{sys.executable} --version", "--reads", "ttft.p50=a"], "0 JSON files in"),
        (["--client", "x", "--sessions", "3"], "--sessions would be ignored"),
        (["--client", "x", "--temperature", "1"], "--temperature would be ignored"),
        (["--reads", "ttft.p50=a"], "--reads is for --client"),
        (["--audit", "50%"], "drop --audit, and audit a run"),
        (["--concurrency", "2", "--arrival", "poisson"], "closed loop"),
    ],
)
def test_what_cannot_be_certified_is_refused_in_a_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    load = [] if "--sessions" in argv else ["--requests", "3"]
    assert cli.main(["certify", *load, *argv]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_client_that_does_not_end_is_killed_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(certification, "START_S", 1.0)
    spawn = "import subprocess as s, sys; p = s.Popen(['sleep', '600']); print(p.pid, flush=True); "
    spawn += "p.wait(); p = s.Popen(['sleep', '60']); p.wait()"
    client = shlex.join([sys.executable, "-c", spawn])
    load = ("--requests", "3", "--prompt-tokens", "8", "--output-tokens", "4", "--out", str(tmp_path))
    assert cli.main(["certify", *load, "--client", client]) == 2
    assert "the client has not ended after" in capsys.readouterr().err
    pid = int((tmp_path / "tool.log").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_our_own_run_has_a_limit_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(certification, "OUR_START_S", -4.0)  # of 4 s in all
    assert cli.main(["certify", "--requests", "3", "--prompt-tokens", "8", "--output-tokens", "4"]) == 2
    assert "the client has not ended after 0 s" in capsys.readouterr().err


def test_a_place_that_the_file_lacks_is_named() -> None:
    with pytest.raises(WorkloadError, match="expected NAME=PLACE"):
        parse_reads(["itl.p98=x"])
    assert parse_reads(["itl.p99=a.b:us"]) == {"itl.p99": "a.b:us"}


def test_every_script_is_one_that_the_server_plays() -> None:
    load = checked(LoadSpec(requests=1000))
    setups = {script: setup_of(script, load) for script in SCRIPTS}
    assert len(set(map(repr, setups.values()))) == len(SCRIPTS)
    assert setups["fixed"].scripts[0].gaps_s == (0.05,), "1000 streams share 20,000 events a second"
    failing = [each.status != 200 or each.cut_after_tok is not None for each in setups["failing"].scripts]
    assert (sum(failing), len(failing), setups["failing"].cycle) == (2, 20, True)


@pytest.mark.slow
@pytest.mark.measures
def test_burstline_itself_is_within_its_tolerance_of_the_truth(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, once: its times miss by less than a millisecond where nothing else is busy."""
    argv = ["--requests", "50", "--prompt-tokens", "64", "--output-tokens", "16", "--json"]
    assert cli.main(["certify", *argv]) in (0, 4)  # 4: with findings
    found = from_json(Certificate, json.loads(capsys.readouterr().out))
    assert (found.offered.n, found.offered.n_before, found.printed_ok, found.printed_failed) == (50, 1, 50, 0)
    assert found.offered.prompt_tok == (64, 64, 64)
    for name in ("ttft.p50", "tpot.p50", "itl.p50", "e2e.p50"):
        assert abs(error_s(found, name)) < 1e-3
    assert found.cost.pss_bytes is not None
    assert found.cost.cpu_s > 0.1
