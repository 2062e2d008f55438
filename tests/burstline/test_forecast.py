"""A forecast in a run's folder: made before the run, scored after it."""

from dataclasses import replace

import pytest

from burstline.bench.conclusion import write_report
from burstline.cli import main
from burstline.machine.hardware import note_hardware
from burstline.machine.hints import Hints, Stated
from burstline.machine.roofline import forecast_load, read_forecast, write_forecast
from burstline.measure.record import tables
from burstline.measure.record.manifest import GpuFacts, LoadFacts, Manifest, ServerFacts
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import open_run
from burstline.roofline.predict.forecast import Forecast, NoForecast, Score
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Shape, make_plan
from burstline.workloads.prompts import ASSUMED
from burstline.workloads.spec import HangUps, LoadSpec
from tests.reports import synthetic
from tests.reports.synthetic import ON_VLLM

N = 60
HINTS = Hints("h100-sxm5-80g", "llama-2-7b", Stated(tp=1, draft_tokens=0))
PLAN = make_plan(Shape(Lengths(512, 512), Lengths(16, 16)), [0.0] * N, ASSUMED, 0)


@pytest.fixture
def run(tmp_path):
    """A burst at a server that says its limits, on an H100, before its first request."""
    manifest = Manifest(
        engine="vllm", workload="burst", devices=(GpuFacts("NVIDIA H100 80GB HBM3"),), identity=ON_VLLM,
        server=ServerFacts(url="http://127.0.0.1:8000", model="served"), plan_sha256=PLAN.sha256,
        load=LoadFacts(expected_cached_fraction=0.0), asked=LoadSpec(requests=N, output_tokens="16"),
    )  # fmt: skip
    folder = RunDir.create(tmp_path, manifest)
    note_hardware(folder, HINTS)
    folder.save_manifest()
    return open_run(folder.path)


def served(run):
    run.save_plan(PLAN)
    run.save("records.parquet", [tables.record_table(synthetic.records(n=N, output_tok=16))])
    run.save_manifest(replace(run.manifest, status="complete"))
    return write_report(run)


def forecast_of(run):
    said = []
    write_forecast(run, PLAN, said.append)
    return read_forecast(open_run(run.path)), said


@pytest.mark.usefixtures("without_page")
def test_a_forecast_is_made_before_the_run_and_scored_after_it_by_how_much(run):
    forecast, said = forecast_of(run)
    assert isinstance(forecast, Forecast)
    assert said[0].startswith("Forecast: E2E p50 ")
    summary = served(run)
    score = summary.forecast
    assert isinstance(score, Score)
    for name, measured in score.measured.items():
        assert measured == summary.figure(*name.split(".")).point
        predicted = forecast.figures[name]
        assert score.ratio(name) == pytest.approx(measured / predicted.point)
        assert score.inside(name) == (predicted.low <= measured <= predicted.high)
    assert summary.roofline.predicted_s == forecast.makespan_s, "the page repeats the one prediction"


def test_the_page_and_the_terminal_show_the_score(run, capsys):
    forecast_of(run)
    served(run)
    assert "The forecast, made before the first request" in run.report.read_text()
    assert main(["report", str(run.path), "--format", "text"]) == 0
    assert "Forecast, 80% intervals, measured against predicted" in capsys.readouterr().out


def test_another_device_named_afterwards_does_not_take_the_prediction_for_its_own(run):
    forecast_of(run)
    run.save_plan(PLAN)
    forecast, opened = read_forecast(open_run(run.path)), open_run(run.path)
    assert forecast_load(forecast, opened) is not None
    note_hardware(run, replace(HINTS, device="h200-sxm-141g"))
    assert forecast_load(forecast, run) is None


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"hardware": None}, "the hardware is not known"),
        ({"load": LoadFacts(expected_cached_fraction=None)}, "sessions"),
        ({"load": LoadFacts(expected_cached_fraction=0.5)}, "share prefixes"),
        ({"asked": LoadSpec(cancel_share=HangUps(0.2))}, "abandoned"),
    ],
)
def test_what_cannot_be_forecast_is_said_once_with_its_reason(run, facts, why):
    manifest = replace(run.manifest, **facts)
    (run.path / "manifest.json").unlink()
    run = RunDir.create(run.path.parent, manifest)
    (run.path / "device.toml").write_bytes(next(run.path.parent.glob("*/device.toml")).read_bytes())
    forecast, said = forecast_of(run)
    assert isinstance(forecast, NoForecast)
    assert len(said) == 1
    assert why in said[0]


@pytest.mark.parametrize(("rate", "forecast_is"), [(5.0, Forecast), (2000.0, NoForecast)])
def test_the_first_requests_of_an_overload_do_not_tell_of_its_end(run, rate, forecast_is):
    """A page held the E2E of the first 200 of 2,400 requests against that of the last 1,200."""
    asked = LoadSpec(requests=400, rate=rate, output_tokens="16")
    run.save_manifest(replace(run.manifest, asked=asked))
    plan = make_plan(Shape(Lengths(512, 512), Lengths(16, 16)), [k / rate for k in range(400)], ASSUMED, 0)
    said = []
    write_forecast(open_run(run.path), plan, said.append)
    assert isinstance(read_forecast(open_run(run.path)), forecast_is)
    assert ("faster than they are served" in said[0]) == (forecast_is is NoForecast)
