"""A run of today's schema is read as it was written; one of another schema is refused in plain words."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from burstline.cli import main
from burstline.loadgen.capture.capture import read_captures
from burstline.measure.record.decode import decoded_batches
from burstline.measure.record.manifest import SCHEMA
from burstline.measure.record.rundir import open_run
from burstline.measure.record.tables import record_table
from burstline.measure.summarize import summarize_run
from burstline.servers.registry import ENGINES

RUNS = Path(__file__).parents[1] / "golden" / "runs"
GOLDEN = sorted(RUNS.iterdir(), key=lambda path: int(path.name))


@pytest.fixture(params=GOLDEN, ids=lambda path: f"schema-{path.name}")
def stored(request) -> Path:
    return request.param


@pytest.fixture
def copied(stored, tmp_path) -> Path:
    return shutil.copytree(stored, tmp_path / "run")


def test_the_golden_run_is_of_todays_schema():
    assert [int(path.name) for path in GOLDEN] == [SCHEMA]
    assert json.loads((GOLDEN[0] / "manifest.json").read_text())["schema"] == SCHEMA


def test_a_golden_run_is_small_and_names_no_machine(stored):
    files = [path for path in stored.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000
    names = ("/tmp/", "/home/", "/root/", str(RUNS.parents[2]), *{socket.gethostname()} - {"vm", "localhost"})
    for path in files:
        assert not [name for name in names if name.encode() in path.read_bytes()], path


def test_its_captures_decode_to_the_records_beside_them(stored):
    run = open_run(stored)
    captures = read_captures(stored / "captures")
    batches = decoded_batches(captures, run.asked, ENGINES[run.manifest.engine].decode)
    again = record_table([record for batch in batches for record in batch]).sort_by("index")
    stored_table = run.record_table
    names = pq.read_schema(stored / "records.parquet").names
    assert again.select(names).equals(stored_table.select(names))


def test_the_plan_and_the_points_of_its_summary_are_what_they_were(stored):
    run = open_run(stored)
    asked = run.manifest.asked.requests
    assert run.plan.sha256 == run.manifest.plan_sha256
    assert len(run.plan.requests) == len(run.record_table.to_pandas()) == asked
    assert run.telemetry is not None
    again = summarize_run(run)
    assert again.counts == run.summary.counts
    for name in ("ttft", "tpot", "itl", "e2e"):
        then = run.summary.metrics[name].p50
        now = again.metrics[name].p50
        assert now.point == pytest.approx(then.point, rel=1e-9)
        assert now.n == then.n


def test_captures_that_were_cut_take_nothing_from_the_records(copied, capsys):
    (captures,) = (copied / "captures").glob("*.zst")
    captures.write_bytes(captures.read_bytes()[:-200])
    records = (copied / "records.parquet").read_bytes()
    assert main(["report", "--decode", str(copied)]) == 2
    assert "ends in the middle of a capture" in " ".join(capsys.readouterr().err.split())
    assert (copied / "records.parquet").read_bytes() == records


def test_a_summary_that_was_cut_is_told_by_its_name(copied, capsys):
    (copied / "summary.json").write_text('{"schema": 1,')
    assert main(["report", "--format", "text", str(copied)]) == 2
    assert "summary.json is not JSON" in " ".join(capsys.readouterr().err.split())


def test_it_is_shown_reported_and_exported(copied, tmp_path, capsys):
    assert main(["report", "--format", "text", str(copied)]) == 0
    said = capsys.readouterr().out
    assert "TTFT" in said
    assert main(["report", "--format", "json", str(copied)]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["ok"] == 64
    assert main(["report", str(copied)]) == 0
    page = (copied / "report.html").read_text()
    assert '<details class="section" id="requests"' in page
    header = page[page.index("<header>") : page.index("</header>")]
    assert all(f"<span>{fact}</span>" in header for fact in ("reference 0.1.0", "float32"))
    formats = ("csv", "markdown")
    flags = [word for name in formats for word in ("--format", name)]
    assert main(["report", str(copied), "--to", str(tmp_path / "out"), *flags]) == 0
    assert len(list((tmp_path / "out").iterdir())) == len(formats)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("RUN --format text --tp 0", "--tp changes the page, which --format does not write"),
        ("RUN --to OUT --usd-per-hour 2", "--usd-per-hour changes the page, which --to does not write"),
        ("RUN --format csv --to OUT --decode", "--decode changes the page"),
        ("RUN --format json --to OUT", "--format json is printed: --to OUT would be ignored"),
        ("RUN --to=", "--to '': expected a value"),
        ("RUN --profile /nope", "--profile /nope: No such file"),
        ("RUN --device cpu --force", "--device cpu: this CPU is not calibrated for this model: run `burst"),
    ],
)
def test_what_a_report_would_ignore_or_lacks_is_one_line(words, said, copied, capsys, monkeypatch):
    monkeypatch.setattr("burstline.machine.hardware.kept", lambda *_: None)
    before = (copied / "manifest.json").read_bytes()
    monkeypatch.chdir(copied.parent)
    assert main(["report", *(str(copied) if word == "RUN" else word for word in words.split())]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert (copied / "manifest.json").read_bytes() == before
    assert not (copied.parent / "OUT").exists()


def test_it_is_compared_with_another(stored, copied, capsys):
    manifest = json.loads((copied / "manifest.json").read_text())
    manifest["clock"]["wall_ns"] += 1  # else it is a copy
    (copied / "manifest.json").write_text(json.dumps(manifest))
    assert main(["compare", str(stored), str(copied)]) in (0, 4)  # 4: by the verdict that is stored
    assert "TTFT" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["print", "report", "write", "compare"])
@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA + 7])
def test_another_schema_is_refused_with_what_to_do(schema, verb, tmp_path, capsys):
    run = shutil.copytree(GOLDEN[-1], tmp_path / "run")
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps(manifest | {"schema": schema, "version": "9.9"}))
    more = {
        "print": ["report", "--format", "text", str(run)],
        "report": ["report", str(run)],
        "write": ["report", str(run), "--to", str(tmp_path / "out")],
        "compare": ["compare", str(run), str(GOLDEN[-1])],
    }
    assert main(more[verb]) == 2
    said = capsys.readouterr().err
    said = " ".join(said.split())
    assert f"has schema {schema}, this version reads only schema {SCHEMA}" in said
    assert "use the version that wrote it (9.9), or run it again" in said
    assert not (run / "report.html").exists()
    assert not (tmp_path / "out").exists()


ELSEWHERE = (
    {"PYTHONHASHSEED": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8"},
    {"PYTHONHASHSEED": "77", "TZ": "Pacific/Chatham", "LC_ALL": "C"},
    {
        "PYTHONHASHSEED": "5",
        "TZ": "America/Caracas",
        "LC_ALL": "POSIX",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
        "MPLBACKEND": "Qt4Agg",
        "MATPLOTLIBRC": "{folder}/matplotlibrc",
    },
)


@pytest.mark.slow
def test_page_and_exports_are_the_same_bytes_whatever_the_surroundings(tmp_path):
    made = []
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nlines.linewidth: 9\naxes.facecolor: red\n")
    for k, environment in enumerate(ELSEWHERE):
        run = shutil.copytree(GOLDEN[-1], tmp_path / str(k) / "run")
        own = {name: value.format(folder=tmp_path) for name, value in environment.items()}
        out, env = tmp_path / str(k) / "out", {**os.environ, **own}
        for argv in (
            ["report", run],
            ["report", run, "--to", out],
            ["report", "--format", "text", run],
            ["report", "--format", "json", run],
        ):
            command = [sys.executable, "-m", "burstline", *map(str, argv)]
            said = subprocess.run(command, env=env, check=True, capture_output=True).stdout
        assert json.loads(said)["counts"]["ok"] == 64
        files = sorted(path for path in [*run.rglob("*"), *out.rglob("*")] if path.is_file())
        made.append({str(path.relative_to(tmp_path / str(k))): path.read_bytes() for path in files})
    assert {"run/report.html", "run/summary.json", "out/figures/ttft-cdf.png"} <= set(made[0])
    for other in made[1:]:
        assert other.keys() == made[0].keys()
        assert [name for name in other if other[name] != made[0][name]] == []
