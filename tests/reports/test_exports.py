import io
import re
from dataclasses import replace
from importlib.resources import files
from xml.etree import ElementTree as ET

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from burstline.cli import main
from burstline.loadgen.capture.files import write_json
from burstline.measure.metrics.slo import parse_slo
from burstline.measure.record import tables
from burstline.measure.record.columns import columns_of
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import open_run
from burstline.measure.record.tables import telemetry_table
from burstline.measure.record.verdict import Reason, State, Verdict
from burstline.measure.summarize import summarize
from burstline.reports.figures.drawing import VARIABLES
from burstline.reports.formats.text import markdown
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.page.digest import digest, in_short
from burstline.reports.page.files import figure_files
from tests.measure.making import conditions
from tests.reports import synthetic

TARGETS = ("ttft.p50<=1ms", "ttft.p50<=1000s", "ttft.mean<=1000s", "ttft<=10s")


@pytest.fixture(scope="module")
def targeted(tmp_path_factory):
    """A hundred and twenty requests, nine failed, held against a target each of missed, met and unknown."""
    rows = synthetic.records(n=120, n_failed=9)
    manifest = Manifest(engine="vllm", workload="burst", targets=TARGETS)
    run = RunDir.create(tmp_path_factory.mktemp("targeted"), manifest)
    run.save("records.parquet", [tables.record_table(rows)])
    run.save("telemetry.parquet", [telemetry_table(synthetic.telemetry(rows))])
    run.save_manifest(replace(run.manifest, status="complete"))
    write_json(
        run.path / "summary.json",
        summarize(
            columns_of(tables.record_table(rows)),
            **conditions(goals=tuple(map(parse_slo, TARGETS)), max_failures=0.1),
        ).to_json(),
    )
    return open_run(run.path)


@pytest.mark.drawn
def test_all_formats_are_written_where_they_were_asked(lossy, tmp_path, capsys):
    assert main(["report", str(lossy.path), "--to", str(tmp_path / "out")]) == 0
    written = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")}
    assert {"records.csv", "summary.md"} <= written
    assert {"figures/ttft-cdf.svg", "figures/ttft-cdf.png"} <= written
    assert len(capsys.readouterr().out.splitlines()) == len(written)


def test_only_the_asked_format_is_written(lossy, tmp_path):
    assert main(["report", str(lossy.path), "--to", str(tmp_path), "--format", "csv"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["records.csv"]


def test_the_csv_has_every_request_and_its_latencies(lossy, tmp_path):
    main(["report", str(lossy.path), "--to", str(tmp_path), "--format", "csv"])
    frame = pd.read_csv(tmp_path / "records.csv")
    view = view_of(lossy)
    assert len(frame) == 120
    ok = view.columns.ok
    np.testing.assert_allclose(frame["ttft_s"][ok], view.latency("ttft")[ok], rtol=1e-8)
    assert frame["ttft_s"][~ok].isna().all()
    assert list(frame["outcome"]) == view.words("outcome")


def test_markdown_says_verdict_targets_and_numbers(targeted):
    text = markdown(digest(alone(view_of(targeted))))
    assert "**! VALID, SLO MISSED**" in text
    assert "| ✕ fail | `ttft.p50<=1ms` |" in text
    assert "| ? inconclusive | `ttft.mean<=1000s` |" in text
    assert "Goodput: ttft<=10s met by 111 of 120 measured requests (92.5%)" in text
    tables_in = [block for block in text.split("\n\n") if block.startswith("|")]
    for block in tables_in:
        assert len({line.count("|") - line.count("\\|") for line in block.splitlines()}) == 1
    assert "| TTFT ↓ |" in text


def test_short_markdown_has_answer_verdict_few_latencies_and_the_command(targeted, capsys):
    assert main(["report", str(targeted.path), "--format", "markdown", "--short"]) == 0
    said = capsys.readouterr().out
    assert "**! VALID, SLO MISSED**" in said
    assert "| Latency | Unit | p50 | p90 | p99 | n |" in said
    rows = [line.split(" | ")[0] for line in said.splitlines() if line.startswith(("| T", "| E", "| I"))]
    assert rows == ["| TTFT ↓", "| TPOT ↓", "| E2E ↓"]
    whole = markdown(digest(alone(view_of(targeted))))
    assert len(said.splitlines()) < len(whole.splitlines()) * 0.7


@pytest.mark.parametrize("n_reasons", [1, 3])
def test_short_markdown_says_why_a_run_is_not_valid(n_reasons, targeted):
    """With each reason in a line of its own."""
    reasons = [
        Reason.of("drifting.fell", metric="TPOT", change=0.25, at_s=None),
        Reason.of("warm-up", what="1 s.", n=48),
        Reason.of("never-settled"),
    ][:n_reasons]
    view = view_of(targeted)
    view = replace(view, summary=replace(view.summary, verdict=Verdict(State.NOT_STATIONARY, tuple(reasons))))
    told = markdown(in_short(alone(view), view))
    lines = re.findall("^- .*", told, re.MULTILINE)
    assert [line.partition(" Next: ")[0] for line in lines] == [f"- {each.text}" for each in reasons]


@pytest.mark.parametrize(
    "flags", [["--short"], ["--short", "--format", "text"], ["--format", "markdown", "--short", "--to", "d"]]
)
def test_short_is_for_markdown_that_is_printed(flags, targeted, capsys):
    assert main(["report", str(targeted.path), *flags]) == 2
    assert "--format markdown --short" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"), [("hopeless", "**✕ FAILED**"), ("single", "even a median needs 11")]
)
def test_markdown_of_runs_with_next_to_nothing_still_says_the_verdict(name, words, request):
    assert words in markdown(digest(alone(view_of(request.getfixturevalue(name)))))


@pytest.mark.slow
def test_figures_stand_alone_in_the_colours_of_the_page(lossy):
    found = figure_files(alone(view_of(lossy)))
    assert found.keys() == {name.replace(".svg", ".png").replace(".png", end)
                            for name in found for end in (".svg", ".png")}  # fmt: skip
    for name, content in found.items():
        if name.endswith(".svg"):
            root = ET.fromstring(content)
            assert root.find("{http://www.w3.org/2000/svg}title").text
            assert b"var(--" not in content
        else:
            image = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
            assert tuple(image[0, 0]) == (0xFC, 0xFB, 0xF9)
    ecdf = np.asarray(Image.open(io.BytesIO(found["ttft-cdf.png"])).convert("RGB")).reshape(-1, 3)
    assert (np.abs(ecdf.astype(int) - [0x0B, 0x64, 0xB3]).max(axis=1) < 4).any(), "the first series' colour"


def test_figures_are_drawn_in_the_colours_of_the_light_theme():
    css = files("burstline.reports.page").joinpath("templates/page.css").read_text("utf-8")
    light = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", css[: css.index("}")]))
    assert {name: light[name] for name in VARIABLES.values()} == {name: c for c, name in VARIABLES.items()}


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing"), "--to", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err
