"""A run in the formats of other tools, read by their own code: llm-d's benchmark report, OpenMetrics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from llmd_benchmark_report.core import load_benchmark_report
from llmd_benchmark_report.native_to_br0_2 import import_vllm_benchmark
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from burstline.loadgen.record.rundir import Run, open_run
from burstline.loadgen.stats.figure import Absent, Estimate
from burstline.reports.page.files import FILES
from tests.reports import synthetic


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """1000 requests, 30 of which failed."""
    return synthetic.finished_run(tmp_path_factory.mktemp("run"), synthetic.records(n_failed=30))


@pytest.mark.slow
def test_llm_d_reads_its_report_and_makes_the_same_of_vllms_file(run: Run, tmp_path: Path) -> None:
    document = FILES["llm-d"](run)["llm-d.json"]
    report = load_benchmark_report(json.loads(document))
    (tmp_path / "vllm.json").write_bytes(FILES["vllm"](run)["vllm.json"])
    theirs = import_vllm_benchmark(str(tmp_path / "vllm.json")).results.request_performance.aggregate
    ours = report.results.request_performance.aggregate
    assert (ours.requests.total, ours.requests.failures) == (theirs.requests.total, theirs.requests.failures)
    assert ours.requests.failures == 30
    for part in ("requests", "latency", "throughput"):
        for name, expected in getattr(theirs, part):
            if expected is None or isinstance(expected, int):
                continue
            own = getattr(getattr(ours, part), name)
            assert own.units == expected.units
            for statistic, value in expected.model_dump(exclude_none=True, exclude={"units"}).items():
                assert getattr(own, statistic) == pytest.approx(value), (name, statistic)
    (engine,) = report.scenario.stack
    assert engine.standardized.tool_version == "0.11.2"
    assert report.scenario.load.standardized.input_seq_len.model_dump(exclude_none=True) == {
        "distribution": "fixed",
        "value": 512,
        "min": 512,
        "max": 512,
    }


def test_a_run_in_which_nothing_succeeded_is_a_report_too(run: Run) -> None:
    run = open_run(run.path)
    run.columns.ok[:] = False
    report = load_benchmark_report(json.loads(FILES["llm-d"](run)["llm-d.json"]))
    aggregate = report.results.request_performance.aggregate
    assert aggregate.requests.input_length is None
    assert aggregate.latency.time_to_first_token is None
    assert aggregate.throughput.request_rate.mean == 0


def test_prometheus_reads_every_number_of_the_summary(run: Run) -> None:
    run, whole = open_run(run.path), run.summary
    assert whole is not None
    bounded = replace(whole.metrics["ttft"], p50=Estimate(0.5, 0.4, 0.75, 0.95, 970, "s"))
    run.summary = replace(whole, metrics={**whole.metrics, "ttft": bounded})
    text = FILES["openmetrics"](run)["openmetrics.txt"].decode()
    samples = {
        (s.name, s.labels.get("statistic") or s.labels.get("outcome") or s.labels.get("burstline_verdict")): s
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    summary = run.summary
    assert summary is not None
    assert {s.labels["run"] for s in samples.values()} == {run.name}
    assert samples["burstline_requests", "ok"].value == 970
    states = {k[1]: s.value for k, s in samples.items() if k[0] == "burstline_verdict"}
    assert [state for state, value in states.items() if value] == [str(summary.verdict.state)]
    info = samples["burstline_run_info", None].labels
    assert (info["engine"], info["model"]) == ("vllm", "llama-2-7b")
    rows = {row.name: row.figure for row in summary.rows() if not isinstance(row.figure, Absent)}
    ends = [samples[f"burstline_ttft_seconds{end}", "p50"].value for end in ("", "_low", "_high")]
    assert ends == [0.5, 0.4, 0.75]
    assert samples["burstline_memory_server_peak_bytes", None].value > 0
    points = {k for k in samples if not k[0].endswith(("_low", "_high", "_info", "_verdict", "_requests"))}
    assert len(points) == len(rows)
