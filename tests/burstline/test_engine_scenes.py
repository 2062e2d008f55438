"""What engines were seen to do, played by the known-truth server, and what a run makes of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from burstline import cli
from burstline.measure.record.rundir import Run, open_run
from burstline.models.model_folder import make_model
from tests.servers.golden import GOLDEN
from tests.truth.queue import Queue
from tests.truth.rig import truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import Script


def burstline(out: Path, *words: str) -> tuple[str, str, Run]:
    """What a whole run printed, what it told meanwhile (both in one line each), and its folder."""
    argv = [sys.executable, "-m", "burstline", "run", "--out", str(out)]
    environment = os.environ | {"XDG_CACHE_HOME": str(out.with_name("cache"))}
    done = subprocess.run([*argv, *words], env=environment, capture_output=True, text=True, timeout=100)
    print(f"$ burstline run {' '.join(words)}", done.stderr, done.stdout, sep="\n")
    assert "Traceback" not in done.stderr, done.stderr
    runs = list(out.iterdir()) if out.exists() else []
    assert runs, done.stdout + done.stderr
    return " ".join(done.stdout.split()), " ".join(done.stderr.split()), open_run(runs[0])


def counts(run: Run) -> dict[str, int]:
    assert run.summary is not None
    return {name: n for name, n in run.summary.to_json()["counts"].items() if n}


@pytest.mark.slow
@pytest.mark.measures
def test_tgi_beyond_1024_tokens_serves_what_was_asked_and_its_time_is_that_of_the_last_asked_token(
    tmp_path: Path, tokenizer: Path
) -> None:
    rounds = Script(ttft_s=0.05, gaps_s=(0.001,), round_tok=1024, round_gap_s=0.6, text=" w1")
    with truth_server(setup=TruthSetup((rounds,), native="tgi", max_model_len=4096)) as truth:
        load = ("--requests", "16", "--prompt-tokens", "16", "--output-tokens", "1500")
        where = ("--engine", "tgi", "--url", truth.url, "--tokenizer", str(tokenizer))
        stdout, stderr, run = burstline(tmp_path / "runs", *where, *load)
    assert "1,500 tokens would become 2,048. The client disconnects at the requested token" in stderr
    assert counts(run) == {"planned": 16, "ok": 16}
    records = run.record_table.to_pandas()
    assert set(records["output_tok"]) == {1500}
    assert all(len(token_ns) == 1500 for token_ns in records["token_ns"])
    assert (records["beyond_tok"] >= 0).all()
    assert (records["beyond_tok"] < 548).all()  # hung up within 50 ms of the asked token
    e2e_s = [(row.token_ns[1499] - row.due_ns) / 1e9 for row in records.itertuples()]
    told = run.summary.to_json()["metrics"]["e2e"]["p50"]["point"]
    assert abs(told - min(e2e_s)) < 0.1  # the last token that the server made comes half a second later
    stalls = run.summary.to_json()["stalls"]
    gaps_s = [(row.token_ns[1024] - row.token_ns[1023]) / 1e9 for row in records.itertuples()]
    assert min(gaps_s) > 0.4, "the next round begins with token 1,025"
    assert stalls["count"]["point"] >= 16
    assert "16 ok" in stdout


@pytest.mark.slow
def test_what_a_full_tgi_refuses_is_told_before_the_load_and_called_a_refusal(
    tmp_path: Path, tokenizer: Path
) -> None:
    setup = TruthSetup((Script(ttft_s=2.0, text=" w1"),), native="tgi", max_in_flight=6)
    with truth_server(setup=setup) as truth:
        load = ("--requests", "20", "--prompt-tokens", "16", "--output-tokens", "8")
        where = ("--engine", "tgi", "--url", truth.url, "--tokenizer", str(tokenizer))
        stdout, stderr, run = burstline(tmp_path / "runs", *where, *load)
    assert "TGI admits 6 requests at once and refuses others. Pass --concurrency 6" in stderr
    assert counts(run) == {"planned": 20, "ok": 6, "refused": 14}
    assert "14 refused: overloaded" in stdout
    assert "14 refused: overloaded" in (run.path / "report.html").read_text("utf-8")
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert any("and refuses others" in note for note in manifest["server"]["notes"])


@pytest.mark.slow
def test_streams_that_end_with_a_dead_shards_error_are_told_in_the_servers_words(
    tmp_path: Path, tokenizer: Path
) -> None:
    words = "Request failed during generation: Server error: transport error"
    dies = Script(ttft_s=0.2, gaps_s=(0.02,), fault="error", fault_after_tok=20, message=words, text=" w1")
    ready = Script(text=" w1")  # the server lives until the load
    with truth_server(setup=TruthSetup((ready, dies), native="tgi")) as truth:
        load = ("--requests", "20", "--prompt-tokens", "16", "--output-tokens", "64")
        where = ("--engine", "tgi", "--url", truth.url, "--tokenizer", str(tokenizer))
        stdout, _, run = burstline(tmp_path / "runs", *where, *load)
    assert counts(run) == {"planned": 20, "error_event": 20}
    assert "20 failed inside the reply" in stdout
    assert words in stdout
    assert run.summary is not None
    assert run.summary.verdict.state == "FAILED"


# Plays text-generation-launcher: its "shard" is the known-truth server; killed, it logs what 3.3.7 logged.
LAUNCHER = """#!{python}
import subprocess, sys
port = sys.argv[sys.argv.index("--port") + 1]
shard = [sys.executable, "-P", "-m", "tests.truth", "--dialect", "tgi", "--port", port]
script = '{{"ttft_s": 0.2, "gaps_s": 0.02, "text": " w1"}}'
subprocess.run([*shard, "--script", script, "--max-model-len", "4096"], env={env!r})
lines = open({log!r}).read().splitlines()
first = next(k for k, line in enumerate(lines) if "transport error" in line)
print("\\n".join(lines[first:]), flush=True)
sys.exit(1)
"""


@pytest.mark.slow
def test_a_shard_that_is_killed_in_the_load_is_told_with_when_why_and_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "model", "tiny", formats=("safetensors",))
    launcher = tmp_path / "text-generation-launcher"
    log = str(GOLDEN / "tgi" / "server.log")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher.write_text(LAUNCHER.format(python=sys.executable, env=environment, log=log))
    launcher.chmod(0o755)
    monkeypatch.setenv("BURSTLINE_TGI_LAUNCHER", str(launcher))
    load = ("--requests", "30", "--prompt-tokens", "16", "--output-tokens", "800", "--warmup", "0")
    stdout, verdict, code = killed_in_the_load(tmp_path, "--engine", "tgi", "--model", str(model), *load)
    assert code == 5
    assert (verdict["state"], verdict["reasons"][0]["code"]) == ("FAILED", "died")
    told = r"TGI died \d+\.\d s into the load with 30 open requests, .+; Shard 0 crashed: .*transport error"
    assert re.search(told, verdict["reasons"][0]["text"])
    assert re.search(told, stdout)


LIGHTLLM = ("--engine", "lightllm", "--vocab-size", "1000", "--requests", "60", "--output-tokens", "8")


def warnings(run: Run) -> dict[str, str]:
    assert run.summary is not None
    return {each["code"]: each["text"] for each in run.summary.to_json()["verdict"]["warnings"]}


@pytest.mark.slow
def test_counters_that_are_late_are_waited_for(tmp_path: Path) -> None:
    setup = TruthSetup((Script(ttft_s=0.05),), native="lightllm", counters_late_s=0.7)
    with truth_server(setup=setup) as truth:
        _, _, run = burstline(tmp_path / "runs", "--url", truth.url, *LIGHTLLM, "--prompt-tokens", "32")
    tokens = run.summary.to_json()["conservation"]
    assert tokens["output_client_tok"]["point"] == tokens["output_server_tok"]["point"] == 480
    assert run.summary.to_json()["agreement"]["e2e_gap_s"]["point"] is not None
    assert "metrics-incomplete" not in warnings(run)


@pytest.mark.slow
def test_counters_that_lose_requests_are_called_incomplete_and_compared_with_nothing(tmp_path: Path) -> None:
    setup = TruthSetup((Script(ttft_s=0.05),), native="lightllm", counters_lost=0.2)
    with truth_server(setup=setup) as truth:
        stdout, _, run = burstline(tmp_path / "runs", "--url", truth.url, *LIGHTLLM, "--prompt-tokens", "32")
    incomplete = "The server's own metrics are incomplete: 384 of 480 generated tokens."
    assert warnings(run)["metrics-incomplete"] == incomplete
    assert incomplete in stdout
    gap = run.summary.to_json()["agreement"]["e2e_gap_s"]
    assert (gap["point"], gap["absent"]) == (None, "the server's own metrics are incomplete (48 of 60)")


@pytest.mark.slow
def test_requests_that_will_wait_in_a_hidden_queue_are_told_before_the_load(tmp_path: Path) -> None:
    setup = TruthSetup(native="lightllm", queue=Queue(8, 0.02, 0.0))
    with truth_server(setup=setup) as truth:
        _, stderr, _ = burstline(tmp_path / "runs", "--url", truth.url, *LIGHTLLM, "--prompt-tokens", "32")
    assert "LightLLM has 8 slots: other requests wait in a queue that none of its metrics shows" in stderr


@pytest.mark.slow
def test_a_rank_that_dies_unnoticed_is_told_after_the_first_stall_of_all_streams(tmp_path: Path) -> None:
    """A killed model process of LightLLM: `/health` answers 200 a minute later, and requests time out."""
    stalls = Script(ttft_s=0.1, gaps_s=(0.02,), fault="stall", fault_after_tok=5)
    setup = TruthSetup((Script(), stalls), native="lightllm")
    with truth_server(setup=setup) as truth:
        load = (*LIGHTLLM, "--prompt-tokens", "32", "--deadline-s", "25")
        _, stderr, run = burstline(tmp_path / "runs", "--url", truth.url, *load)
    told = "No token from any of 60 streams for 20 s; the server still says healthy (/health answers 200)"
    assert told in stderr
    assert run.manifest.server is not None
    assert told in run.manifest.server.notes
    assert counts(run) == {"planned": 60, "timeout": 60}
    assert told in (run.path / "report.html").read_text("utf-8")


def killed_in_the_load(tmp_path: Path, *words: str) -> tuple[str, dict[str, Any], int]:
    """What a run printed whose known-truth server was killed in the load, its verdict and its exit code."""
    out = tmp_path / "runs"
    argv = [sys.executable, "-m", "burstline", "run", "--out", str(out)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(
        [*argv, *words], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "sent," in line:
                break
        time.sleep(2.0)  # into the load, which takes 8 s and more
        for child in psutil.Process(process.pid).children(recursive=True):
            if {"burstline.servers.truth", "tests.truth"} & set(child.cmdline()):
                child.kill()
        stdout, stderr = process.communicate(timeout=100)
    print("".join(seen), stderr, stdout)
    (folder,) = out.iterdir()
    verdict = json.loads((folder / "summary.json").read_text())["verdict"]
    return " ".join(stdout.split()), verdict, process.returncode


@pytest.mark.slow
def test_a_server_that_dies_in_the_load_is_what_the_run_found(tmp_path: Path) -> None:
    load = ("--requests", "40", "--prompt-tokens", "32", "--output-tokens", "400")
    stdout, verdict, code = killed_in_the_load(tmp_path, "--engine", "truth", *load)
    assert code == 5
    assert verdict["state"] == "FAILED"
    assert verdict["reasons"][0]["code"] == "died"
    assert "Known-truth server died" in verdict["reasons"][0]["text"]
    assert "Known-truth server died" in stdout


def test_lengths_beyond_a_limit_that_was_set_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 512}')
    out = ("--out", str(tmp_path / "runs"))
    where = ("run", "--engine", "reference", "--model", str(tmp_path / "model"), *out)
    assert cli.main([*where, "--prompt-tokens", "500"]) == 2
    assert "has 564 tokens (prompt and output), but the config.json of its model allows 512" in (
        capsys.readouterr().err
    )
    assert cli.main([*where, "--prompt-tokens", "100", "--max-model-len", "128"]) == 2
    assert "has 164 tokens (prompt and output), but --max-model-len allows 128" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_every_test_that_the_page_on_engines_names_is_there() -> None:
    root = Path(__file__).parents[2]
    rows = [
        line for line in (root / "docs" / "engines.md").read_text("utf-8").splitlines() if "| `test" in line
    ]
    assert len(rows) == 13 + 9
    tests = "\n".join(file.read_text("utf-8") for file in (root / "tests").rglob("test_*.py"))
    missing = [
        name for row in rows for name in re.findall(r"`(test_\w+)`", row) if f"def {name}(" not in tests
    ]
    assert not missing
