import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

import burstline.measure
from burstline.measure.metrics.definitions import METRICS
from burstline.measure.record.tables import RECORDS, record_table, telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.stats.figure import Estimate, inverse
from burstline.servers.host.telemetry import Row
from burstline.servers.identity import Identity
from tests.measure.making import conditions, failed, ok, summarized

SECTIONS = {
    "schema",
    "verdict",
    "counts",
    "metrics",
    "bounds",
    "interactivity",
    "throughput",
    "window",
    "concurrency",
    "burst",
}
SECTIONS |= {"stalls", "lengths", "instrument", "memory", "conservation", "targets", "goodput"}
SECTIONS |= {"cost", "grades", "stationarity", "schedule", "agreement"}


def run_of(n_ok, n_failed=0):
    random = np.random.default_rng(3)
    good = [ok(i, 0.2 + 0.005 * i, random.gamma(4, 0.005, 7)) for i in range(n_ok)]
    return record_table([*good, *(failed(n_ok + i, planned_output_tok=8) for i in range(n_failed))])


def figures(node, path=""):
    if isinstance(node, dict):
        if "point" in node:
            yield path, node
        else:
            for key, value in node.items():
                yield from figures(value, f"{path}.{key}")


def telemetry(*rows):
    return Telemetry.of(telemetry_table([Row(*row) for row in rows]))


RUNS = {
    "all well": run_of(700),
    "some failed": run_of(100, 5),
    "none succeeded": run_of(0, 12),
    "a single request": run_of(1),
    "no request": RECORDS.empty_table(),
}


@pytest.mark.parametrize("records", RUNS.values(), ids=RUNS)
def test_every_figure_is_an_estimate_with_a_unit_or_absent_with_a_reason(records):
    summary = summarized(records)
    assert set(summary) == SECTIONS
    for path, figure in figures(summary):
        if figure["point"] is None:
            assert {"point", "absent"} <= set(figure), path
            assert figure["absent"], path
        else:
            assert {"low", "high", "level", "n", "unit"} <= set(figure), path
            assert np.isfinite(figure["point"]), path
            assert figure["unit"], path
    assert b"NaN" not in orjson.dumps(summary)


@pytest.mark.parametrize("records", RUNS.values(), ids=RUNS)
def test_outcomes_add_up_to_what_was_planned(records):
    counts = summarized(records)["counts"]
    assert counts["planned"] == len(records) == sum(n for name, n in counts.items() if name != "planned")


def test_metrics_have_all_their_percentiles_and_definitions():
    metrics = summarized(RUNS["all well"])["metrics"]
    assert set(metrics) <= set(METRICS)
    assert {"ttft", "tpot", "itl", "e2e", "ttft_service", "e2e_service", "ttfa", "icl", "ntpot"} <= set(
        metrics
    )
    names = {"p50", "p90", "p95", "p99", "mean", "std", "min", "max"}
    assert all(set(row) - {"instrument_error"} == names for row in metrics.values())
    ttft = metrics["ttft"]
    assert ttft["p50"]["point"] == pytest.approx(0.199 + 0.005 * 349.5), (
        "a burst counts from each request's own send"
    )
    assert ttft["p50"]["low"] is None
    assert "1 run" in ttft["p50"]["note"]


def test_failures_take_the_p99_and_every_mean():
    metrics = summarized(
        record_table([*(ok(i, 0.2, [0.01] * 3) for i in range(700)), *(failed(700 + i) for i in range(8))])
    )["metrics"]
    for name in ("ttft", "tpot", "e2e"):
        assert metrics[name]["p99"]["point"] is None
        assert metrics[name]["mean"]["point"] is None
        assert metrics[name]["p50"]["point"] is not None


def test_a_run_without_success_is_insufficient_and_still_complete():
    summary = summarized(RUNS["none succeeded"])
    assert summary["verdict"]["state"] == "FAILED"
    assert summary["counts"] == {"planned": 12, "ok": 0, "timeout": 12}
    assert summary["throughput"]["output_tok_per_s"]["absent"] == "no request succeeded"


def test_a_run_that_was_cut_off_says_so():
    verdict = summarized(RUNS["some failed"], conditions(status="interrupted"))["verdict"]
    assert verdict["warnings"][0]["code"] == "interrupted"


@pytest.mark.parametrize(
    ("outcome", "state"), [("cancelled", "VALID"), ("not_sent", "VALID"), ("http_500", "FAILED")]
)
def test_an_interrupted_run_is_judged_by_the_requests_that_had_ended(outcome, state):
    records = record_table(
        [*(ok(i, 0.1, [0.02]) for i in range(40)), *(failed(i, outcome) for i in range(40, 70))]
    )
    assert summarized(records, conditions(status="interrupted"))["verdict"]["state"] == state


def test_the_same_records_give_the_same_bytes():
    assert orjson.dumps(summarized(RUNS["some failed"])) == orjson.dumps(summarized(RUNS["some failed"]))


BY_BLAS = {"dot", "vdot", "inner", "matmul", "einsum", "tensordot", "corrcoef", "cov", "polyfit", "linalg"}


def test_nothing_is_summed_by_blas_whose_last_digits_go_by_the_number_of_threads():
    paths = list(Path(burstline.measure.__file__).parent.rglob("*.py"))
    assert paths
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            assert not isinstance(node, ast.MatMult), path
            assert not (isinstance(node, ast.Attribute) and node.attr in BY_BLAS), (path, node.lineno)


def test_client_and_server_must_count_the_same_tokens():
    def counted(*tokens: float) -> Telemetry:
        times_ns = (-5, 1_000_000_000, 9_000_000_000)
        return telemetry(
            *((at_ns, "engine", "generation_tokens", n) for at_ns, n in zip(times_ns, tokens, strict=True))
        )

    summary = summarized(run_of(100), conditions(telemetry=counted(1000.0, 1500.0, 1800.0)))
    assert summary["conservation"]["output_client_tok"]["point"] == 800
    assert summary["conservation"]["output_residual"]["point"] == 0
    more = counted(1000.0, 1500.0, 1900.0)
    summary = summarized(run_of(100), conditions(telemetry=more))
    assert summary["conservation"]["output_residual"]["point"] == pytest.approx(1 / 9)
    assert advice_on_tokens(summary) == "Check whether other clients use this server."
    summary = summarized(run_of(100, n_failed=12), conditions(telemetry=more))
    assert "continued requests that failed here" in advice_on_tokens(summary)


def test_a_prefix_cache_that_only_the_servers_counters_tell_is_a_warning():
    """LightLLM's streams do not say: 40,922 of 40,960 prompt tokens came from its cache, without a word."""
    rows = [(-5, "engine", "prefix_hit_tokens", 0.0), (-5, "engine", "prompt_tokens", 0.0)]
    rows += [(9_000_000_000, "engine", "prefix_hit_tokens", 40_922.0)]
    rows += [(9_000_000_000, "engine", "prompt_tokens", 40_960.0)]
    (warning,) = (
        row
        for row in summarized(run_of(100), conditions(telemetry=telemetry(*rows)))["verdict"]["warnings"]
        if row["code"] == "prefix-cache"
    )
    assert warning["text"] == "The prefix cache served 99.9% of the prompt tokens."


@pytest.mark.parametrize(("busy_s", "told"), [(0.5, []), (1.5, ["busy-machine"])])
def test_a_machine_that_others_kept_busy_is_told_beside_a_verdict_that_stands(busy_s, told):
    rows = [(0, "host", "n_cpus", 2.0)]
    rows += [(k * 1_000_000_000, "host", "others_cpu_s", k * busy_s) for k in range(2)]
    verdict = summarized(run_of(700), conditions(telemetry=telemetry(*rows)))["verdict"]
    assert verdict["state"] == "VALID"
    assert [row["code"] for row in verdict["warnings"]] == told


@pytest.mark.parametrize(("steal_s", "told"), [(0.06, []), (0.3, ["stolen-cpu"])])
def test_cpu_time_that_a_hypervisor_took_is_told(steal_s, told):
    rows = [
        (0, "host", "n_cpus", 2.0),
        (0, "host", "others_cpu_s", 0.0),
        (1_000_000_000, "host", "others_cpu_s", 0.0),
    ]
    rows += [(k * 1_000_000_000, "host", "steal_s", k * steal_s) for k in range(2)]
    verdict = summarized(run_of(700), conditions(telemetry=telemetry(*rows)))["verdict"]
    assert verdict["state"] == "VALID"
    assert [row["code"] for row in verdict["warnings"]] == told


def advice_on_tokens(summary):
    (advice,) = (row["advice"] for row in summary["verdict"]["warnings"] if row["code"] == "conservation")
    return advice


def test_counters_that_were_not_read_after_the_load_prove_nothing():
    early = telemetry(
        (-5, "engine", "generation_tokens", 1000.0), (500_000_000, "engine", "generation_tokens", 1400.0)
    )
    summary = summarized(run_of(100), conditions(telemetry=early))
    assert "before the load ended" in summary["conservation"]["output_residual"]["absent"]
    assert not summary["verdict"]["warnings"]


def test_memory_peaks_come_from_the_time_of_the_load_and_each_kind_stays_apart():
    seen = telemetry(
        (-9_000_000_000, "server", "rss_bytes", 9e9),
        (100_000_000, "server", "rss_bytes", 2e9),
        (200_000_000, "server", "rss_bytes", 3e9),
        (100_000_000, "gpu0", "memory_used_bytes", 5e9),
        (100_000_000, "gpu1", "memory_used_bytes", 6e9),
        (100_000_000, "engine", "kv_used_fraction", 0.25),
    )
    who = Identity("vllm", weight_bytes=7, kv_tok=640)
    memory = summarized(run_of(100), conditions(telemetry=seen, identity=who))["memory"]
    points = {name: memory[name]["point"] for name in memory}
    assert points["server_peak_bytes"] == 3e9
    assert points["device_peak_bytes"] == 11e9
    assert points["kv_peak_fraction"] == 0.25
    assert (points["weights_bytes"], points["kv_capacity_tok"], points["kv_capacity_bytes"]) == (7, 640, None)


def test_a_missing_source_is_absent_in_its_own_words():
    row = (0, "engine", "*", None, "the engine has no metrics")
    memory = summarized(run_of(100), conditions(telemetry=telemetry(row)))["memory"]
    assert memory["kv_peak_fraction"]["absent"] == "the engine has no metrics"


def test_prompts_counted_otherwise_than_planned_are_reported():
    table = record_table([replace(ok(i, 0.2, [0.01]), prompt_tok=5) for i in range(20)])
    summary = summarized(table)
    assert summary["lengths"]["prompt_mismatches"]["point"] == 20
    assert "prompt-length" in {warning["code"] for warning in summary["verdict"]["warnings"]}


def test_tokens_spread_over_chunks_are_never_passed_off_as_measured():
    summary = summarized(record_table([replace(ok(i, 0.2, [0.01]), split="spread") for i in range(20)]))
    assert summary["lengths"]["splits"] == {"spread": 20}
    assert "chunks" in {warning["code"] for warning in summary["verdict"]["warnings"]}


@pytest.mark.parametrize("is_burst", [True, False])
def test_replies_without_text_have_an_e2e_and_rates_and_nothing_else(is_burst: bool) -> None:
    rows = [replace(ok(i, 0.2, []), split="no-text", token_n=[8], output_tok=8) for i in range(40)]
    summary = summarized(record_table([replace(row, due_ns=0) for row in rows] if is_burst else rows))
    metrics, rates = summary["metrics"], summary["throughput"]
    assert metrics["e2e"]["p50"]["point"] is not None
    assert [metrics[name]["p50"]["point"] for name in ("ttft", "tpot", "itl")] == [None] * 3
    assert rates["output_tok_per_s"]["point"] == pytest.approx(8 * rates["requests_per_s"]["point"])


def test_a_server_that_works_on_for_clients_that_have_gone_is_named():
    table = record_table(
        [*(ok(i, 0.2, [0.01]) for i in range(20)), *(failed(i, "abandoned") for i in (20, 21))]
    )
    held = telemetry(
        (-5, "engine", "running", 1.0), (-5, "engine", "kv_used_fraction", 0.1),
        (900_000_000, "engine", "running", 3.0), (900_000_000, "engine", "kv_used_fraction", 0.4),
    )  # fmt: skip
    summary = summarized(table, conditions(telemetry=held))
    assert summary["counts"] == {"planned": 22, "ok": 20, "abandoned": 2}
    assert summary["metrics"]["ttft"]["mean"]["n"] == 20
    (warning,) = [w for w in summary["verdict"]["warnings"] if w["code"].startswith("abandoned")]
    assert warning["code"] == "abandoned-not-freed"
    assert (
        "after the load the server still had 2 requests in flight and 30.0% of its KV cache in use"
        in warning["text"]
    )


def test_abandoned_requests_do_not_count_against_the_failures_that_are_allowed():
    abandoned = [failed(i, "abandoned") for i in range(100, 150)]
    served = [ok(i, 0.2, [0.01]) for i in range(100)]
    assert summarized(record_table([*served, *abandoned]))["verdict"]["state"] == "VALID"
    lost = [failed(i, "timeout") for i in range(150, 160)]
    reasons = summarized(record_table([*served, *abandoned, *lost]))["verdict"]["reasons"]
    assert reasons[0]["text"].startswith("10 of 160 requests failed (6.25%): 10 timed out")


def test_interactivity_is_the_inverse_of_the_time_per_token_and_its_tail_the_slow_end():
    summary = summarized(RUNS["all well"])
    for p in ("p50", "p99"):
        assert summary["interactivity"][p]["point"] == 1 / summary["metrics"]["ntpot"][p]["point"]
        assert summary["interactivity"][p]["unit"] == "tok/s"
    assert summary["interactivity"]["p99"]["point"] < summary["interactivity"]["p50"]["point"]
    lost = summarized(RUNS["some failed"])["interactivity"]
    assert lost["p99"]["point"] is None


def test_the_interval_of_an_inverse_is_turned_round():
    found = inverse(Estimate(0.02, 0.01, None, 0.95, 9, "s"), "tok/s")
    assert (found.point, found.low, found.high, found.unit) == (50, 0, 100, "tok/s")
    assert inverse(Estimate(0.02, None, None, None, 9, "s"), "tok/s").low is None
