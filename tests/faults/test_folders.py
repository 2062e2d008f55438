"""Run folders of others: damaged, cut, swapped, or made to harm whoever opens them."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from burstline.cli import main
from burstline.measure.record.rundir import open_run
from tests.faults.lab import GOLDEN_RUN, noted

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose summary and page are this version's own."""
    run = shutil.copytree(GOLDEN_RUN, tmp_path_factory.mktemp("golden") / "run")
    assert main(["report", "--decode", str(run)]) == 0
    return run


@pytest.fixture
def copied(fresh: Path, tmp_path: Path) -> Path:
    return shutil.copytree(fresh, tmp_path / "run")


def cut(name: str, share: float = 0.5) -> Damage:
    def damage(run: Path) -> None:
        path = run / name
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return damage


def flipped(name: str) -> Damage:
    """One bit in the middle."""

    def damage(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[len(data) // 2] ^= 8
        (run / name).write_bytes(data)

    return damage


def rewritten(name: str, change: Callable[[pa.Table], pa.Table]) -> Damage:
    def damage(run: Path) -> None:
        table = change(pq.read_table(run / name))
        pq.write_table(table, run / name)

    return damage


def edited(name: str, change: Callable[[dict], object]) -> Damage:
    def damage(run: Path) -> None:
        value = json.loads((run / name).read_text())
        changed = change(value)
        (run / name).write_text(json.dumps(value if changed is None else changed))

    return damage


def replaced(name: str, data: bytes) -> Damage:
    return lambda run: (run / name).write_bytes(data) and None  # type: ignore[func-returns-value]


def a_pipe(name: str) -> Damage:
    def damage(run: Path) -> None:
        (run / name).unlink()
        os.mkfifo(run / name)

    return damage


def with_column(table: pa.Table, name: str, values: list[object], kind: pa.DataType) -> pa.Table:
    at = table.schema.get_field_index(name)
    return table.set_column(at, name, pa.array(values, kind))


DAMAGES: dict[str, Damage] = {
    "half of records.parquet's rows": rewritten("records.parquet", lambda t: t.slice(0, len(t) // 2)),
    "records.parquet cut": cut("records.parquet"),
    "records.parquet is text": replaced("records.parquet", b"not a table"),
    "records.parquet is empty": replaced("records.parquet", b""),
    "records of other types": rewritten(
        "records.parquet", lambda t: with_column(t, "due_ns", ["x"] * len(t), pa.string())
    ),
    "another plan": rewritten(
        "plan.parquet", lambda t: t.replace_schema_metadata({"seed": "0", "sha256": "0" * 64})
    ),
    "plan without metadata": rewritten("plan.parquet", lambda t: t.replace_schema_metadata(None)),
    "plan cut": cut("plan.parquet"),
    "telemetry of other types": rewritten(
        "telemetry.parquet", lambda t: with_column(t, "value", ["x"] * len(t), pa.string())
    ),
    "telemetry cut": cut("telemetry.parquet"),
    "summary is a list": replaced("summary.json", b"[]"),
    "summary cut": cut("summary.json"),
    "summary without metrics": edited(
        "summary.json", lambda s: {"schema": s["schema"], "verdict": s["verdict"]}
    ),
    "summary whose verdict is text": edited("summary.json", lambda s: s.update(verdict="VALID")),
    "summary with counts of text": edited(
        "summary.json", lambda s: s.update(counts={"planned": "x", "ok": []})
    ),
    "manifest cut": cut("manifest.json"),
    "manifest is null": replaced("manifest.json", b"null"),
    "manifest of the wrong types": edited("manifest.json", lambda m: m.update(drivers="none")),
    "schema -1": edited("manifest.json", lambda m: m.update(schema=-1)),
    "schema 1e9": edited("manifest.json", lambda m: m.update(schema=10**9)),
    "device.toml is binary": replaced("device.toml", b"\xff\xfe\x00"),
    "steps cut": cut("steps.parquet"),
    "records.parquet is a pipe": a_pipe("records.parquet"),
    "summary.json is a pipe": a_pipe("summary.json"),
    "no plan": lambda run: (run / "plan.parquet").unlink(),
}


@pytest.mark.parametrize("verb", ["report", "verify"])
@pytest.mark.parametrize("name", ["manifest.json", "device.toml", "forecast.json"])
def test_a_file_that_is_too_long_is_refused_before_it_is_read(
    name: str, verb: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (copied / name).open("ab") as file:
        os.truncate(file.fileno(), 1 << 40)  # reading it would need a tebibyte of memory
    assert main([verb, str(copied)]) in (2, 4)  # 4: `verify` names what does not follow
    said = capsys.readouterr()
    assert "over 64 MB" in said.out + said.err
    assert len(said.err.strip().splitlines()) <= 1, said.err


@pytest.mark.parametrize("name", ["summary.json", "report.html"])
def test_what_is_too_long_and_can_be_made_again_is_made_again(
    name: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(copied / name, 1 << 40)
    assert main(["verify", str(copied)]) == 4
    assert f"BAD  {name} follows" in capsys.readouterr().out
    assert main(["report", str(copied)]) == 0
    assert (copied / name).stat().st_size < 64 << 20


def test_of_a_log_that_is_too_long_the_end_is_read(copied: Path) -> None:
    with (copied / "server.log").open("ab") as log:
        os.truncate(log.fileno(), 1 << 40)
        log.write(b"the last line\n")
    assert open_run(copied).server_log.endswith("\0the last line\n")


@pytest.mark.parametrize("name", DAMAGES)
def test_show_tells_a_damaged_folder_in_one_line(
    name: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[name](copied)
    began_s = time.monotonic()
    code = main(["report", "--format", "text", str(copied)])
    said = capsys.readouterr()
    noted(f"show: {name}", "no traceback, 0 or 2", code, time.monotonic() - began_s)
    assert code in (0, 2), said.err
    assert "Traceback" not in said.err
    assert len(said.err.strip().splitlines()) <= 1, said.err


def test_damaged_records_are_made_again_from_the_captures(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = open_run(copied).record_table
    DAMAGES["half of records.parquet's rows"](copied)
    assert main(["report", "--format", "text", str(copied)]) == 2
    assert "has 32 rows, but 64 requests were planned" in capsys.readouterr().err
    assert main(["report", "--decode", str(copied)]) == 0
    assert open_run(copied).record_table.equals(whole)


def test_our_own_error_is_not_called_damage(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("a slip of ours")

    monkeypatch.setattr("burstline.reports.page.page.render", fail)
    assert main(["report", str(copied)]) == 1
    said = capsys.readouterr().err
    assert "RuntimeError: a slip of ours" in said
    assert "damaged" not in said


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_every_verb_tells_a_damaged_folder_in_one_line(
    name: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[name](copied)
    began_s = time.monotonic()
    codes = {}
    for verb, *more in (
        ("report", "--format", "text"),
        ("report",),
        ("report", "--to", str(tmp_path / "to"), "--format", "csv"),
        ("verify",),
    ):
        writes = verb == "report" and not more
        fresh = shutil.copytree(copied, tmp_path / verb, copy_function=_copy) if writes else copied
        codes[verb] = main([verb, str(fresh), *more])
        said = capsys.readouterr()
        assert "Traceback" not in said.err, (verb, said.err[-3000:])
        if codes[verb] not in (0, 4):  # 4: `verify` names what does not follow
            assert codes[verb] == 2, (verb, codes[verb], said.err)
            assert len(said.err.strip().splitlines()) <= 3, said.err
    noted(f"folder: {name}", "no traceback, 0, 2 or 4", codes, time.monotonic() - began_s)
    assert codes["verify"] != 0


def _copy(source: str, target: str) -> str:
    if not Path(source).is_file():
        os.mkfifo(target)
        return target
    return shutil.copy2(source, target)


def test_a_link_in_a_folder_of_others_is_never_written_through(copied: Path, tmp_path: Path) -> None:
    mine, to = tmp_path / "mine", tmp_path / "to"
    mine.write_text("mine")
    to.mkdir()
    links = [
        copied / name for name in ("report.html.partial", "records.parquet.partial", "summary.json.partial")
    ]
    for link in (*links, to / "records.csv", to / "records.csv.partial"):
        link.symlink_to(mine)
    (copied / "report.html").unlink()
    (copied / "report.html").symlink_to(mine)
    began_s = time.monotonic()
    assert main(["report", "--decode", str(copied)]) == 0
    assert main(["report", str(copied), "--to", str(to), "--format", "csv"]) == 0
    seen = mine.read_text()[:20]
    noted("links in a folder of others", "not written through", seen, time.monotonic() - began_s)
    assert seen == "mine"
    assert not any(path.is_symlink() for path in (*links, copied / "report.html", to / "records.csv"))


def test_verify_says_that_all_follows_from_the_captures(
    fresh: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(fresh)]) == 0
    assert "Records, summary and page follow from the captures." in capsys.readouterr().out


def test_verify_names_what_was_changed_by_hand(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((copied / "summary.json").read_text())
    summary["metrics"]["ttft"]["p50"]["point"] *= 0.9
    (copied / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    assert main(["verify", str(copied)]) == 4
    said = capsys.readouterr().out
    assert "BAD  summary.json follows from the records" in said
    assert "ok   records follow from the captures" in said


def test_verify_names_the_captures_that_were_changed_and_reads_the_rest(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flipped("captures/driver-0.zst")(copied)
    assert main(["verify", str(copied)]) == 4
    said = capsys.readouterr().out
    assert "BAD  captures (63 can be read)" in said
    assert re.search(r"driver-0\.zst .*byte [\d,]+", said)  # where, whichever part of a frame was hit


@pytest.mark.slow
def test_a_capture_bomb_is_refused_small_and_fast(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(512 << 20))
    (copied / "captures" / "driver-0.zst").write_bytes(bomb)
    began_s = time.monotonic()
    assert main(["report", "--decode", str(copied)]) == 2
    time_s = time.monotonic() - began_s
    noted(f"a capture bomb of {len(bomb):,} bytes", "refused unread", "refused", time_s)
    assert "where at most" in capsys.readouterr().err


def test_a_run_killed_before_its_plan_is_shown_in_one_line(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plan.parquet", "records.parquet", "summary.json", "report.html"):
        (copied / name).unlink()
    shutil.rmtree(copied / "captures")
    assert main(["report", "--format", "text", str(copied)]) == 0
    assert "before its requests were planned" in capsys.readouterr().out
