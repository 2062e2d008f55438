"""Whole runs against real servers: whatever happens, every planned request is accounted for."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from burstline import cli
from burstline.bench import run as run_module
from burstline.loadgen.capture.files import write_json
from burstline.loadgen.driver.canary import canary
from burstline.measure.record import run_writer, rundir
from burstline.measure.record.rundir import open_run
from tests.burstline.inside import ran
from tests.truth.rig import truth_server
from tests.truth.script import Script
from tests.verdicts import done

SMALL = ("--prompt-tokens", "64", "--output-tokens", "8")
BARE = ()
BURST = ("--requests", "10", *SMALL)
LONG = ("--prompt-tokens", "32", "--output-tokens", "400", "--requests", "60")


@contextlib.contextmanager
def burstline(out: Path, *argv: str):
    """`burstline run` as a process of its own, which is over when the block is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "burstline", "run", *BARE, "--out", str(out), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"XDG_CACHE_HOME": str(out.with_name("cache"))},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finished(out: Path, *argv: str) -> tuple[int, str]:
    """The exit code of a whole run, and what it said."""
    with burstline(out, *argv) as process:
        said = "\n".join(process.communicate(timeout=100))
        return process.returncode, said


def the_run(out: Path) -> Path:
    (run,) = out.iterdir()
    return run


def counts_of(run: Path) -> dict[str, int]:
    counts = json.loads((run / "summary.json").read_text())["counts"]
    assert sum(n for name, n in counts.items() if name != "planned") == counts["planned"]
    return counts


def engine_processes(run: Path) -> list[psutil.Process]:
    """The embedded engines that write their step log into this run's folder."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "servers.reference" in (line := " ".join(process.info["cmdline"] or ())) and str(run) in line
    ]


def wait_until(true, timeout_s: float = 40.0):
    deadline = time.monotonic() + timeout_s
    while not (seen := true()):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)
    return seen


def under_load(out: Path, process: subprocess.Popen) -> Path:
    """The run's folder, once the load has been going for a moment."""
    run = wait_until(lambda: next(iter(out.glob("*/captures")), None)).parent
    wait_until(lambda: (run / "steps.jsonl").exists() and (run / "steps.jsonl").stat().st_size > 8000)
    assert process.poll() is None
    return run


def test_a_burst_at_the_embedded_engine_is_answered_and_reported(tmp_path):
    code, said = finished(tmp_path, "--engine", "reference", "--requests", "20", *SMALL)
    run = the_run(tmp_path)
    assert counts_of(run)["ok"] == 20
    assert done(code, tmp_path), said
    assert {path.name for path in run.iterdir()} == {
        "captures",
        "forecast.json",
        "manifest.json",
        "plan.parquet",
        "records.parquet",
        "report.html",
        "server.log",
        "steps.parquet",
        "summary.json",
        "telemetry.parquet",
    }
    assert str(run / "report.html") in said
    assert not engine_processes(run)
    # The device is named later; advice to calibrate would then be false.
    assert cli.main(["report", str(run), "--device", "h100-sxm5-80g", "--force"]) == 0
    why = "No forecast: device or model was not known before the load."
    assert why in (run / "report.html").read_text()
    identity = open_run(run).manifest.identity
    page = (run / "report.html").read_text()
    header = page[page.index("<header>") : page.index("</header>")]
    assert identity.version
    for fact in (f"reference {identity.version}", identity.dtype):  # its model has the engine's name
        assert f"<span>{fact}</span>" in header


@pytest.mark.usefixtures("without_page")
def test_a_run_writes_its_manifest_at_four_moments_and_reads_back_what_takes_much_memory(
    tmp_path, monkeypatch
):
    manifests, read = [], set()

    def writing(path, value):
        manifests.append((path.name, json.loads(json.dumps(value))))
        write_json(path, value)

    def reading(path, **how):
        read.add(path.name)
        return parquet(path, **how)

    def refuse(path):
        raise AssertionError(f"{path} was read back")

    parquet = rundir._parquet
    monkeypatch.setattr(run_writer, "write_json", writing)
    monkeypatch.setattr(rundir, "_parquet", reading)
    monkeypatch.setattr(rundir, "json_of", refuse)
    monkeypatch.setattr(run_writer, "json_of", refuse)
    with truth_server(Script(ttft_s=0.1, gaps_s=(0.02,))) as server:
        code, said = ran(
            tmp_path / "runs", "--engine", "truth", "--url", server.url, "--requests", 10, *SMALL
        )
    assert done(code, tmp_path / "runs"), said
    assert [name for name, _ in manifests] == ["manifest.json"] * 4
    begun, sealed, ended, concluded = (row for _, row in manifests)
    now_known = {"identity", "server", "plan_sha256", "load", "hardware"}
    assert not now_known & begun.keys()
    assert now_known <= sealed.keys()
    assert [row["status"] for row in (begun, sealed, ended)] == ["running", "running", "complete"]
    assert not sealed["drivers"]
    assert ended["drivers"]
    assert concluded == ended
    assert read == {"plan.parquet", "records.parquet"}


@pytest.mark.slow
def test_two_interrupts_half_way_still_leave_a_report_and_no_server(tmp_path):
    with burstline(tmp_path, "--engine", "reference", *LONG) as process:
        run = under_load(tmp_path, process)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert counts_of(run)["planned"] == 60
    assert (run / "report.html").exists()
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["status"] == "interrupted"
    assert "before the load" not in (manifest.get("error") or "")
    assert not engine_processes(run)


@pytest.mark.usefixtures("without_page")
def test_a_wrong_url_is_the_servers_fault_and_nothing_was_sent(tmp_path, capsys):
    where = ("--engine", "vllm", "--url", "http://127.0.0.1:9", "--out", str(tmp_path))
    assert cli.main(["run", *where, "--requests", "12", *SMALL]) == 5
    said = capsys.readouterr().err
    assert "127.0.0.1:9" in said
    assert "Expected a running vLLM" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_sigterm_is_an_interrupt(tmp_path):
    with burstline(tmp_path, "--engine", "reference", *LONG) as process:
        run = under_load(tmp_path, process)
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert counts_of(run)["planned"] == 60
    assert not engine_processes(run)


@pytest.mark.slow
def test_a_server_killed_in_the_middle_is_the_servers_fault(tmp_path):
    with burstline(tmp_path, "--engine", "reference", *LONG) as process:
        run = under_load(tmp_path, process)
        for engine in engine_processes(run):
            engine.kill()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 5
    assert re.search(r"reference engine died [\d.]+ s into the load.*, killed by signal 9", said), said
    counts = counts_of(run)
    assert counts["planned"] == 60
    assert counts["ok"] < 60


@pytest.mark.slow
def test_a_killed_burstline_leaves_a_readable_run_and_no_server(tmp_path):
    with burstline(tmp_path, "--engine", "reference", *LONG) as process:
        run = under_load(tmp_path, process)
        assert engine_processes(run)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not engine_processes(run))
    shown = subprocess.run(
        [sys.executable, "-m", "burstline", "report", "--format", "text", str(run)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert "60" in shown.stdout


@pytest.mark.slow
def test_errors_of_some_requests_are_outcomes_of_those_requests(tmp_path):
    good, bad = Script(), Script(status=500)
    with truth_server([good, good, bad] * 10) as server:
        finished(tmp_path, "--engine", "truth", "--url", server.url, "--requests", "30", *SMALL)
    counts = counts_of(the_run(tmp_path))
    assert (counts["ok"], counts["http_500"]) == (20, 10)


@pytest.mark.slow
def test_replies_that_nobody_counted_are_counted_by_a_tokenizer_and_again_from_the_files(tmp_path):
    vocabulary = {"?": 0, "tok": 1} | {f"w{i}": i + 2 for i in range(98)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "runs"
    silent = Script(usage="off", ttft_s=0.01, gaps_s=(0.001,), tok_per_event=(3, 2))
    with truth_server([silent]) as server:
        flags = ("--tokenizer", str(tmp_path), "--requests", "20", *SMALL)
        code, said = finished(out, "--engine", "openai", "--url", server.url, *flags)
    run = open_run(the_run(out))
    assert done(code, out), said
    assert set(run.record_table.column("output_tok").to_pylist()) == {8}
    assert set(run.record_table.column("output_source").to_pylist()) == {"tokenizer"}
    assert run.decoded == run.record_table
    assert "a tokenizer, from the text" in (run.path / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_a_server_that_hangs_cannot_hold_up_the_report(tmp_path):
    with truth_server([Script(fault="stall")]) as server:
        flags = ("--deadline-s", "2", "--requests", "10", *SMALL)
        code, _ = finished(tmp_path, "--engine", "truth", "--url", server.url, *flags)
    assert code == 4
    assert counts_of(the_run(tmp_path))["timeout"] == 10


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_says_so(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine does not let us mount")
    try:
        code, said = finished(disk, "--engine", "reference", "--requests", "400", "--prompt-tokens", "512")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert code == 2
    assert "bytes are free" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_every_run_has_a_canary_but_one_that_was_told_not_to(tmp_path, monkeypatch):
    started = []

    def watched():
        started.append(True)
        return canary()

    monkeypatch.setattr(run_module, "canary", watched)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with truth_server(Script(ttft_s=1.0, gaps_s=(0.02,))) as server:
        where = ("--engine", "truth", "--url", server.url, "--requests", "10", "--output-tokens", "10")
        for name, *flags in (("with",), ("without", "--no-canary")):
            out = ("--out", str(tmp_path / name))
            code = cli.main(["run", *BARE, "-q", *where, "--prompt-tokens", "8", *out, *flags])
            assert done(code, tmp_path / name)
    assert started == [True]
    (client, bare) = (open_run(the_run(tmp_path / name)).summary.instrument for name in ("with", "without"))
    assert client.canary_p99_s.n >= 10
    assert bare.canary_p99_s.code == "no-canary"


@pytest.mark.slow
def test_a_run_needs_no_terminal(tmp_path):
    """Its terminal goes away in mid-load."""
    load = ("--requests", "45", "--rate", "30", "--prompt-tokens", "8", "--output-tokens", "4")
    argv = [sys.executable, "-m", "burstline", "run", "--engine", "truth", *load, "--out", str(tmp_path)]
    ours, theirs = os.openpty()
    with subprocess.Popen(argv, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)
        while not list(tmp_path.glob("*/counters")):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.7)
        os.close(ours)
        code = process.wait(60)
    assert done(code, tmp_path)
    run = open_run(the_run(tmp_path))
    assert run.status == "complete"
    assert len(run.record_table.to_pandas()) == 45
    assert (run.path / "report.html").exists()
