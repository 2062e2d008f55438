import errno
import os
import subprocess
import sys
from array import array
from dataclasses import replace

import orjson
import pytest

from burstline.console import exit_codes
from burstline.loadgen.capture.capture import CaptureWriter
from burstline.loadgen.capture.drive_report import DriveReport, DurationSpread
from burstline.loadgen.capture.files import write_json
from burstline.measure.record import run_writer
from burstline.measure.record.manifest import SCHEMA, Manifest, ServerFacts
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import open_run
from burstline.measure.record.summary import Summary
from burstline.measure.record.tables import record_table, telemetry_table
from burstline.measure.record.verdict import State, Verdict
from burstline.measure.summarize import summarize_run
from burstline.servers.host.telemetry import Row
from burstline.servers.identity import Identity
from burstline.workloads.plan import Plan
from burstline.workloads.request import Request, WorkloadError
from tests.measure.making import DONE, capture, event, ok, usage, wire


@pytest.fixture
def run(tmp_path):
    manifest = Manifest(engine="vllm", workload="Burst 1000x512", version="0.1", argv=("run",))
    return RunDir.create(tmp_path, manifest)


def changed(run, **facts):
    run.save_manifest(replace(run.manifest, **facts))


def plan(n=4):
    requests = tuple(Request(i, array("I", [1, 2, 3, 4]), None, 4, 2) for i in range(n))
    return Plan(requests, array("q", [0] * n), 3, "abc")


SUMMARY = Summary(counts={"planned": 4, "ok": 4}, metrics={}, verdict=Verdict(State.VALID))


def report():
    some = DurationSpread(4, 1, 2, 3)
    return DriveReport(0, 5, 4, 4, 0, {"reset": 1}, some, None, some, 9, 2, 0, 8, 99, 0.5, 1.0, 77, 4)


def test_a_run_that_is_interrupted_as_it_begins_leaves_no_folder(tmp_path, monkeypatch):
    at_writing = []

    def interrupt(path, data):
        at_writing.extend(path.parent.parent.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(run_writer, "write_json", interrupt)
    with pytest.raises(KeyboardInterrupt):
        RunDir.create(tmp_path, Manifest(engine="truth", workload="burst"))
    assert [path.suffix for path in at_writing] == [".partial"], "no folder has its name before its manifest"
    assert not list(tmp_path.iterdir())


def test_a_runs_name_says_when_what_and_which(run):
    utc, engine, *workload, digits = run.path.name.split("-")
    assert (engine, workload) == ("vllm", ["burst", "1000x512"])
    assert len(utc) == len("20261121T015522Z")
    assert utc.endswith("Z")
    assert len(digits) == 8
    int(digits, 16)


def test_a_new_run_is_running_and_knows_both_clocks(run):
    manifest = open_run(run.path).manifest
    assert (manifest.schema, manifest.status, manifest.version) == (SCHEMA, "running", "0.1")
    assert manifest.clock.wall_ns > manifest.clock.monotonic_ns > 0
    assert manifest.clock.utc.endswith("+00:00")


def test_a_run_whose_process_lives_is_refused_in_one_sentence(run):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run.save_manifest(replace(run.manifest, pid=process.pid))
        try:
            with pytest.raises(WorkloadError, match=rf"is still running \(process {process.pid}\); wait"):
                open_run(run.path)
            earlier = replace(run.manifest.clock, wall_ns=run.manifest.clock.wall_ns - 10**12)
            run.save_manifest(replace(run.manifest, clock=earlier))
            assert open_run(run.path).status == "interrupted", "another process has its number"
        finally:
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        run.save_manifest(replace(run.manifest, clock=replace(earlier, wall_ns=earlier.wall_ns + 10**12)))
        assert open_run(run.path).status == "interrupted", "it is not collected yet"


def test_everything_that_is_saved_comes_back(run):
    run.save_plan(plan())
    records = record_table([ok(i, 0.1, [0.02]) for i in range(4)])
    run.save("records.parquet", [records])
    run.save("telemetry.parquet", [telemetry_table([Row(15, "server", "rss_bytes", 4.0)], t0_ns=10)])
    changed(run, identity=Identity("vllm", version="9", raw={"a": 1}), drivers=(report(),))
    write_json(run.path / "summary.json", SUMMARY.to_json())
    run.report.write_text("<html>µ</html>", "utf-8")
    (run.path / "server.log").write_text("ready")
    run.save_manifest(replace(run.manifest, status="complete"))
    read = open_run(run.path)
    assert read.plan == plan()
    assert read.record_table == records
    assert read.record_table.to_pandas()["index"].tolist() == [0, 1, 2, 3]
    assert read.telemetry is not None
    assert read.telemetry["at_ns"].tolist() == [5]
    assert (read.status, read.summary, read.server_log, read.steps) == (
        "complete",
        SUMMARY,
        "ready",
        None,
    )
    assert read.manifest.identity == Identity("vllm", version="9", raw={"a": 1})
    assert read.manifest.drivers == (report(),)
    assert run.report.read_text(encoding="utf-8") == "<html>µ</html>"
    assert not list(run.path.glob("*.partial"))


def test_a_run_killed_half_way_is_readable_and_what_it_lacks_is_cancelled(run):
    run.save_plan(plan())
    spool = CaptureWriter(run.captures)
    reads = wire((10, event()), (20, event(finish="length")), (20, usage(2)), (20, DONE))
    for index in (2, 0):
        spool.put(lambda index=index: replace(capture(reads), index=index))
    spool.close()
    done = run.captures / "driver-0.zst"
    done.rename(run.captures / "driver-0.zst.partial")
    with (run.captures / "driver-0.zst.partial").open("ab") as file:
        file.write(b"\x28\xb5\x2f\xfd torn")
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    changed(run, pid=int(dead.stdout))
    read = open_run(run.path)
    assert read.status == "interrupted"
    assert read.record_table.to_pandas()["outcome"].tolist() == ["ok", "cancelled", "ok", "cancelled"]
    assert read.telemetry is None
    summary = summarize_run(read)
    assert summary.counts == {"planned": 4, "ok": 2, "cancelled": 2}
    assert summary.verdict.reasons[0].code == "mostly-failed"
    assert summary.verdict.warnings[0].code == "interrupted"


def test_a_run_killed_before_its_plan_says_so(run):
    with pytest.raises(WorkloadError, match=r"no plan\.parquet: the run ended before"):
        _ = open_run(run.path).plan
    with pytest.raises(WorkloadError, match=r"no plan\.parquet: the run ended before"):
        _ = open_run(run.path).record_table


@pytest.mark.parametrize("other", [SCHEMA + 1, SCHEMA - 1])
def test_another_schema_is_refused_by_name(run, other):
    changed(run, schema=other)
    with pytest.raises(WorkloadError, match=f"has schema {other}.*reads only schema {SCHEMA}"):
        open_run(run.path)


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b"{}", b'{"schema": "1"}', b'{"schema": 0}', b'{"schema": true}']
)
def test_a_manifest_that_is_none_is_the_users_to_repair(run, content):
    (run.path / "manifest.json").write_bytes(content)
    with pytest.raises(WorkloadError, match=r"manifest\.json"):
        open_run(run.path)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"pid": "7"}, "pid: expected a whole number, not '7'"),
        ({"status": "done"}, "status: expected 'running' or 'complete' or"),
        ({"argv": "run"}, "argv: expected a list, not 'run'"),
        ({"argv": [1]}, r"argv\[0\]: expected a text, not 1"),
        ({"host": {"cores": []}}, r"host\.cores: expected a whole number, not a list"),
        ({"server": {"startup_stages": [{}]}}, r"server\.startup_stages\[0\]\.name is missing"),
        ({"identity": {"engine": "x", "colour": 1}}, r"identity\.colour is not known to this version"),
        ({"drivers": [None]}, r"drivers\[0\]: expected an object, not null"),
    ],
)
def test_a_manifest_with_a_wrong_type_is_refused_in_one_line_that_names_the_place(run, facts, words):
    path = run.path / "manifest.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | facts))
    with pytest.raises(WorkloadError, match=words) as refused:
        open_run(run.path)
    assert "\n" not in str(refused.value)
    assert "manifest.json" in str(refused.value)


def test_what_a_later_version_adds_to_a_manifest_is_kept(run):
    path = run.path / "manifest.json"
    path.write_bytes(orjson.dumps(orjson.loads(path.read_bytes()) | {"moon": {"phase": "full"}}))
    later = open_run(run.path)
    changed(later, pid=3)
    assert later.manifest.unknown == {"moon": {"phase": "full"}}
    assert orjson.loads(path.read_bytes())["moon"] == {"phase": "full"}


def test_a_pid_that_no_system_has_is_a_run_that_was_interrupted(run):
    changed(run, pid=2**40)
    assert open_run(run.path).status == "interrupted"


def test_a_folder_that_is_no_run_is_called_so(tmp_path):
    with pytest.raises(WorkloadError, match="is not a run: it has no manifest"):
        open_run(tmp_path)
    with pytest.raises(WorkloadError, match="is not a run: no such folder"):
        open_run(tmp_path / "nowhere")


def test_records_cut_short_are_an_error_that_names_the_file(run):
    (run.path / "records.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(WorkloadError, match=r"records\.parquet cannot be read"):
        _ = open_run(run.path).record_table


def test_an_engine_that_is_not_known_here_is_named(run):
    run.save_plan(plan())
    changed(run, engine="nosuch")
    with pytest.raises(WorkloadError, match="engine 'nosuch'; known are"):
        _ = open_run(run.path).record_table


def test_no_secret_reaches_the_manifest(run):
    raw = {
        "headers": "authorization: Bearer s3cret-f",
        "eos_token": "</s>",
        "max_tokens": 5,
        "tokenizer": "t",
        "api_key": "s3cret-d",
    }
    changed(
        run,
        argv=("run", "--api-key", "s3cret-a", "--url=https://me:s3cret-b@host/v1", "--api-key=s3cret-c"),
        server=ServerFacts(url="http://host", env={"HF_TOKEN": "s3cret-e", "PATH": "/bin"}),
        identity=Identity("vllm", raw=raw),
    )
    assert "s3cret" not in (run.path / "manifest.json").read_text()
    manifest = run.manifest
    assert manifest.identity.raw["eos_token"] == "</s>"
    assert manifest.identity.raw["max_tokens"] == 5
    assert manifest.identity.raw["tokenizer"] == "t"
    assert manifest.server.env["PATH"] == "/bin"
    assert manifest.server.url == "http://host"


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EFBIG, r"a file may not be so large \(ulimit -f\)"),
    ],
)
def test_a_full_disk_is_told_with_path_and_room_and_leaves_the_old_file(tmp_path, monkeypatch, number, why):
    path = tmp_path / "summary.json"
    write_json(path, {"old": 1})

    def full(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=why + r": cannot write .*summary\.json, [\d,]+ bytes are free") as told:
        write_json(path, {"new": 2})
    assert exit_codes.of_error(told.value) == exit_codes.USAGE
    assert orjson.loads(path.read_bytes()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_another_error_of_the_disk_is_left_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "no" / "such.json", {})
