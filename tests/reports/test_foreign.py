"""Recorded results of other tools, 12 requests each at a server of 200 ms and 10 ms a token, beside a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burstline.cli import main
from burstline.measure.verdict.certificate import Printed
from burstline.reports.model.foreign import TOOLS as ROWS
from burstline.reports.model.foreign import foreign_results, parse_reads, read_number
from burstline.workloads.request import WorkloadError

GOLDEN = Path(__file__).parents[1] / "golden"
TOOLS = ("aiperf", "guidellm", "vllm")
FILES = [str(GOLDEN / f"other_tools/{tool}.json") for tool in TOOLS]
RUN = str(GOLDEN / "runs/4")


def planned(found: Printed) -> int | None:
    """How many requests there were, as far as the tool says so."""
    return None if found.n_ok is None or found.n_failed is None else found.n_ok + found.n_failed


@pytest.mark.parametrize("tool", TOOLS)
def test_each_number_stands_where_ours_means_the_nearest(tool: str) -> None:
    (found,) = foreign_results(GOLDEN / f"other_tools/{tool}.json")
    assert (found.n_ok, planned(found)) == (12, 12)
    assert 0.2 < found.numbers["metrics.ttft.p50"] < 0.26
    assert 0.27 < found.numbers["metrics.e2e.p50"] < 0.34
    if tool == "vllm":
        assert found.numbers["metrics.itl.p50"] == pytest.approx(0.0117, rel=0.01)
    else:  # of each request the mean: the gaps as they were sent
        assert found.numbers["metrics.tpot.p50"] == pytest.approx(0.01, rel=0.05)
    per_request = found.numbers["throughput.output_tok_per_s"] / found.numbers["throughput.requests_per_s"]
    assert per_request == pytest.approx(8)
    assert found.figure("memory", "server_peak_bytes").to_json()["point"] is None


TREND = {"avg": 1.0, "min": 1.0, "med": 210.0, "max": 400.0, "p(90)": 300.0, "p(95)": 310.0}
K6 = {
    "http_req_waiting": TREND,
    "http_req_duration": TREND | {"p(99)": 390.0},
    "http_reqs": {"count": 20, "rate": 12.5},
    "http_req_failed": {"value": 0.1, "passes": 2, "fails": 18},
}
NVIDIA = {"avg": 1.0, "p50": 210.0, "p90": 300.0, "p99": 390.0}
LATENCY = {"mean": 0.2, "median": 0.21, "p90": 0.3, "p99": 0.39}
SGLANG = {
    f"{p}_{metric}_ms": ms
    for metric in ("ttft", "tpot", "itl", "e2e_latency")
    for p, ms in (("median", 210.0), ("p90", 300.0), ("p99", 390.0))
}
RATES = {"output_throughput": 100.0, "request_throughput": 12.5, "total_input_tokens": 640, "duration": 2.0}
BY_SOURCE = {
    "SGLang bench_serving": (RATES | SGLANG | {"completed": 18, "request_rate": float("inf")}, None),
    "genai-perf": (
        dict.fromkeys(("time_to_first_token", "inter_token_latency", "request_latency"), NVIDIA)
        | {"request_throughput": {"avg": 12.5}, "request_count": {"avg": 18.0}, "input_config": {}},
        None,
    ),
    "inference-perf": (
        {
            "load_summary": {"count": 20},
            "successes": {
                "count": 18,
                "latency": {
                    "request_latency": LATENCY,
                    "time_to_first_token": LATENCY,
                    "time_per_output_token": None,
                    "inter_token_latency": LATENCY,
                },
                "throughput": {
                    "output_tokens_per_sec": 100.0,
                    "input_tokens_per_sec": 320.0,
                    "requests_per_sec": 12.5,
                },
            },
            "failures": {"count": 2},
        },
        20,
    ),
    "k6": ({"root_group": {}, "metrics": K6}, 20),
}
"""What tools write that were not run here, by their sources and documentation."""


@pytest.mark.parametrize("tool", BY_SOURCE)
def test_a_tool_that_is_known_by_its_source_alone_is_read_too(tool: str, tmp_path: Path) -> None:
    document, n_planned = BY_SOURCE[tool]
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document))
    (found,) = foreign_results(file)
    assert (found.tool, found.n_ok, planned(found)) == (tool, 18, n_planned)
    assert found.numbers["metrics.e2e.p50"] == pytest.approx(0.21)
    assert found.numbers["metrics.e2e.p99"] == pytest.approx(0.39)
    assert found.numbers[f"metrics.{'ttfb' if tool == 'k6' else 'ttft'}.p90"] == pytest.approx(0.3)
    assert found.numbers["throughput.requests_per_s"] == 12.5
    assert "metrics.tpot.p50" in found.numbers or tool in ("inference-perf", "k6")
    assert "e2e" in found.defines or tool == "inference-perf"
    file.write_text(json.dumps({"metrics": {k: {"values": v} for k, v in K6.items()}, "root_group": {}}))
    assert foreign_results(file)[0].numbers["metrics.e2e.p90"] == 0.3, "of handleSummary"


def stats(*values: float) -> dict[str, object]:
    """Of guidellm: zeros where no request has such a number."""
    whole = (
        {"p50": values[0], "p90": values[0], "p99": values[0]}
        if values
        else {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    )
    return {"successful": {"count": len(values), "mean": sum(values), "percentiles": whole}}


def guidellm(requests: list[dict[str, float]], tpot_ms: float | None, incomplete: int) -> dict[str, object]:
    seen = [] if tpot_ms is None else [tpot_ms] * 8
    keys = ("time_to_first_token_ms", "inter_token_latency_ms")
    metrics = {key: stats(*seen) for key in keys} | {"request_latency": stats(*[0.3] * 24)}
    rates = ("output_tokens_per_second", "prompt_tokens_per_second", "requests_per_second")
    metrics |= {key: stats(10.0) for key in rates}
    metrics["request_totals"] = {
        "successful": 24,
        "errored": 0,
        "incomplete": incomplete,
        "total": 24 + incomplete,
    }
    return {
        "metadata": {"guidellm_version": "0.8.1"},
        "benchmarks": [{"metrics": metrics, "requests": {"successful": requests}}],
    }


AIPERF = dict.fromkeys(("time_to_first_token", "inter_token_latency", "request_latency"), NVIDIA) | {
    "aiperf_version": "0.13.0", "request_count": {"avg": 18.0}, "total_osl": {"avg": 1024.0}
}  # fmt: skip
FAST_AND_SLOW = [{"inter_token_latency_ms": ms} for ms in (5.0, 10.0, 15.0)]


def written(path: Path, *documents: object) -> Path:
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return path


@pytest.mark.parametrize(
    ("document", "n_planned", "tpot_ms", "says", "not_says"),
    [
        (guidellm([], 9.0, 8), 24, 9.0, "counts once for each gap", "tokenizer"),
        (guidellm(FAST_AND_SLOW, 9.0, 0), 24, 10.0, "the mean of each request", "for each gap"),
        (guidellm([{"inter_token_latency_ms": 0.0}], None, 0), 24, None, "wall clock", "tokenizer"),
        (AIPERF, 18, 210.0, "Its own tokenizer counts tokens.", "the server"),
        (AIPERF | {"total_usage_completion_tokens": {"avg": 512.0}}, 18, 210.0,
         "It counted 1,024 output tokens, the server 512.", "differ"),
        (AIPERF | {"total_usage_completion_tokens": {"avg": 1024.0}}, 18, 210.0, "Its own", "the server"),
        (BY_SOURCE["inference-perf"][0], 20, None, "Its own tokenizer counts tokens.", "server"),
    ],
)  # fmt: skip
def test_a_number_is_read_by_what_it_means(
    document: object, n_planned: int, tpot_ms: float | None, says: str, not_says: str, tmp_path: Path
) -> None:
    """Requests that were cut are no failures, zeros of no request no latency; who counted tokens is said."""
    (found,) = foreign_results(written(tmp_path / "x.json", document))
    assert planned(found) == n_planned
    assert found.numbers.get("metrics.tpot.p50") == (tpot_ms and pytest.approx(tpot_ms / 1e3))
    assert ("metrics.ttft.p50" in found.numbers) == (tpot_ms is not None or "load_summary" in str(document))
    assert says in str(found.defines)
    assert not_says not in str(found.defines)


def test_runs_that_sglang_appended_to_one_file_are_one_result_each(tmp_path: Path) -> None:
    first = BY_SOURCE["SGLang bench_serving"][0]
    found = foreign_results(written(tmp_path / "x.jsonl", first, first | {"completed": 7}, first))
    assert [each.n_ok for each in found] == [18, 7, 18]
    assert [Path(each.name).name for each in found] == ["x 1", "x 2", "x 3"]
    with pytest.raises(WorkloadError, match="no result that is known"):
        foreign_results(written(tmp_path / "x.jsonl", first, {"a": 1}))


def test_they_are_shown_beside_a_run_and_never_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", RUN, *FILES]) == 4
    text = capsys.readouterr().out
    assert "NOT-COMPARABLE: Results of other tools are shown but not ranked" in text
    for tool, name in zip(TOOLS, ("aiperf 0.13.0", "guidellm 0.8.1", "vllm bench serve"), strict=True):
        assert f"{tool}: the measurement error of {name} is unknown" in text
    assert " COMPARABLE" not in text
    assert "\u2605" not in text
    assert main(["compare", RUN, *FILES, "--format", "json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["comparable"] is False
    assert [each["tool"].split()[0] for each in document["others"]] == ["aiperf", "guidellm", "vllm"]
    assert document["others"][2]["numbers"]["metrics.ttft.p50"] == pytest.approx(0.21907, rel=1e-3)


def test_the_page_has_them_in_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", RUN, FILES[1], "--format", "html"]) == 4
    page = capsys.readouterr().out
    assert "What did other tools report?" in page
    assert "12 of 12 requests succeeded" in page


def test_what_no_known_tool_wrote_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "x.json"
    for text, words in (
        ("{}", "no result that is known"),
        ("[1", "no result that is known"),
        ("", "no result that is known"),
        ("[]", "no result that is known"),
        ('{"values": 5}', "no result that is known"),
        ('{"metadata": {"guidellm_version": 1}, "benchmarks": 5}', "no result that is known"),
        ('{"metadata": {"guidellm_version": 1}, "benchmarks": [{}]}', "none of its numbers"),
    ):
        other.write_text(text)
        with pytest.raises(WorkloadError, match=words):
            foreign_results(other)
    assert main(["compare", FILES[0], FILES[1]]) == 2
    assert "name at least one run of Burstline" in capsys.readouterr().err


STATS = {"mean": 0.2, "p50": 0.21, "p90": 0.3, "p99": 0.39}
NEW = {
    "servebench": (
        {
            "environment": {"servebench_version": "1.1.3"},
            "levels": [
                {
                    "summary": dict.fromkeys(("ttft", "tpot", "itl", "e2e"), STATS)
                    | {"completed": 18, "failed": 2, "output_throughput": 100.0, "request_throughput": 12.5}
                }
            ],
        },
        {},
    ),
    "evalscope": (
        {
            "Success Requests": 18,
            "Total Requests": 20,
            "Req Throughput (req/s)": 12.5,
            "Avg TTFT (ms)": 200.0,
        },
        {
            "benchmark_percentile.json": [
                {"Percentiles": f"{p}%", "TTFT (ms)": s * 1e3, "Latency (s)": s}
                for p, s in ((50, 0.21), (90, 0.3), (99, 0.39))
            ]
        },
    ),
    "genai-bench": (
        {
            "_time_unit": "ms",
            "aggregated_metrics": {
                "num_completed_requests": 18,
                "num_error_requests": 2,
                "requests_per_second": 12.5,
                "stats": {key: {k: v * 1e3 for k, v in STATS.items()} for key in ("ttft", "e2e_latency")},
            },
        },
        {},
    ),
    "llmeter": (
        {"total_requests": 20, "failed_requests": 2, "requests_per_minute": 750.0}
        | {f"{m}-{p}": v for m in ("time_to_first_token", "time_to_last_token") for p, v in STATS.items()}
        | {"time_to_first_token-average": 0.2},
        {},
    ),
}
"""What five more tools write, by their sources."""


@pytest.mark.parametrize("tool", NEW)
def test_a_tool_is_a_row_of_the_table(tool: str, tmp_path: Path) -> None:
    document, others = NEW[tool]
    for name, content in others.items():
        (tmp_path / name).write_text(json.dumps(content))
    file = tmp_path / str(ROWS[tool].get("file", "x.json"))
    file.write_text(json.dumps(document))
    (found,) = foreign_results(file)
    assert (found.tool.split()[0], found.n_ok, planned(found), found.whole) == (tool, 18, 20, True)
    assert found.numbers["metrics.ttft.mean"] == pytest.approx(0.2)
    for p, value in (("p50", 0.21), ("p90", 0.3), ("p99", 0.39)):
        assert found.numbers[f"metrics.ttft.{p}"] == pytest.approx(value)
        assert found.numbers[f"metrics.e2e.{p}"] == pytest.approx(value)
    assert found.numbers["throughput.requests_per_s"] == pytest.approx(12.5)


def test_means_alone_without_a_count_are_a_result_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"e2e_ttft": {"mean": 210.0}, "tg_throughput": {"mean": 100.0}}
    file = tmp_path / "benchy.json"
    file.write_text(json.dumps({"version": "0.4.0", "benchmarks": [run]}))
    (found,) = foreign_results(file)
    assert (found.tool, found.n_ok, planned(found)) == ("llama-benchy", None, None)
    assert found.numbers["metrics.ttft.mean"] == pytest.approx(0.21)
    assert main(["compare", RUN, str(file)]) == 4
    assert "It prints means" in capsys.readouterr().out


def test_a_file_of_a_part_is_none_of_the_whole_run_and_whose_tokens_it_counts_is_said(tmp_path: Path) -> None:
    document = dict(BY_SOURCE["inference-perf"][0])
    document["successes"] = document["successes"] | {"token_count_mismatches": 5}  # type: ignore[operator]
    for name in ("stage_0_lifecycle_metrics.json", "summary_lifecycle_metrics.json"):
        (tmp_path / name).write_text(json.dumps(document))
    (part,), (whole,) = (foreign_results(path) for path in sorted(tmp_path.iterdir()))
    assert (part.whole, whole.whole) == (False, True)
    assert "Its own tokenizer counts tokens" in str(whole.defines)
    assert "The server counted other tokens in 5 replies." in str(whole.defines)
    assert "ttft" not in whole.defines, "its clients differ in where they begin"


DOCUMENT = {
    "ttft": {"p50": 0.2, "p99.9": 0.4, "unit": "ms", "none": None},
    "all": [0.1, 0.2, 0.6],
    "rows": [{"p": "50%", "ttft": "12.3 ms"}, {"p": "99%", "ttft": "1.5s"}],
    "n": 90,
    "minutes": 1.5,
}


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("ttft.p50", "$.ttft.p50:s", 0.2),
        ("ttft.p99.9", "ttft.p99.9:s", 0.4),
        ("ttft.p99.9", "ttft.p99.9:@ttft.unit", 0.0004),
        ("ttft.p50", "all:s", 0.2),
        ("ttft.mean", "all:s", 0.3),
        ("ttft.max", "all:s", 0.6),
        ("ttft.p50", "rows.50%.ttft", 0.0123),
        ("ttft.p99", "rows.1.ttft", 1.5),
        ("throughput.requests_per_s", "n:min", 1.5),
        ("throughput.requests_per_s", "n:/minutes", 60.0),
        ("ok", "n", 90.0),
        ("e2e.p50", "lines.jsonl#e2e:ms", 0.002),
    ],
)
def test_a_place_may_be_any_of_these(name: str, place: str, value: float, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"e2e": 1}\n{"e2e": 2}\n\n{"e2e": 3}\n')
    assert parse_reads([f"{name}={place}"]) == {name: place}
    assert read_number(name, place, DOCUMENT, tmp_path) == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("ttft.p99", "ttft.p99", "there is no p99 of ttft.p99; it has p50, p99.9, unit, none"),
        ("ttft.p50", "ttft", "is no number but dict"),
        ("ttft.p50", "ttft.none", "is no number but NoneType"),
        ("ok", "all", "is no number but list"),
        ("ttft.p50", "y.json#a", "0 files are called y.json"),
        ("ttft.p50", "x.json#a", "x.json is no JSON file"),
    ],
)
def test_a_place_that_is_not_there_is_named_with_what_is(
    name: str, place: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "x.json").write_text("hello")
    with pytest.raises(WorkloadError) as caught:
        read_number(name, place, DOCUMENT, tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("itl.p=x", "expected NAME="),
        ("median=x", "expected NAME="),
        ("itl.p99", "expected NAME="),
        ("itl.p99=x.json#", "expected NAME="),
        ("throughput.requests_per_s=x:ms", "has no unit ms; expected min"),
        ("ok=x:s", "has no unit s; expected none"),
    ],
)
def test_what_is_no_reading_is_refused_before_the_load(word: str, words: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_reads([word])
    assert words in str(caught.value)
