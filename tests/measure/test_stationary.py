import heapq
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from burstline.measure.metrics.definitions import METRICS
from burstline.measure.metrics.slo import parse_slo
from burstline.measure.metrics.steady_state import steady_part
from burstline.measure.record.columns import columns_of
from burstline.measure.record.tables import RECORDS, record_table
from burstline.measure.stats.estimates import Absent, Estimate
from burstline.measure.summarize import figures
from tests.measure.making import conditions, ok, summarized
from tests.measure.queueing import MEAN_S, N_SERVERS, queued, table
from tests.truth.queue import departures

POISSON = ("poisson", 20.0)


def reasons(records, pattern="poisson"):
    steady = steady_part(columns_of(records), pattern)
    assert steady is not None
    return [reason.code for reason in steady.reasons]


def test_a_server_with_room_is_rarely_called_unsteady():
    alarms = sum(bool(reasons(queued(load, 600, seed))) for load in (0.5, 0.7) for seed in range(50))
    assert alarms <= 5


def test_a_growing_queue_is_called_overloaded():
    assert sum("overloaded" in reasons(queued(1.3, 600, seed)) for seed in range(30)) >= 29


@pytest.mark.parametrize(
    ("n", "n_slots", "load", "arrival", "named"),
    [
        (40, 1, 1.5, "constant", (20, 20)),
        (200, 1, 1.5, "constant", (20, 20)),
        (1000, 1, 1.3, "constant", (20, 20)),
        (100, 8, 1.5, "constant", (19, 20)),
        (50, 32, 1.5, "constant", (18, 20)),
        (100, 32, 1.5, "constant", (16, 20)),
        (400, 32, 1.5, "poisson", (19, 20)),
        (200, 8, 1.5, "poisson", (18, 20)),
        (60, 1, 0.8, "poisson", (0, 1)),
        (200, 1, 0.8, "constant", (0, 0)),
        (200, 8, 0.8, "poisson", (0, 1)),
        (60, 32, 0.8, "constant", (0, 0)),
    ],
)
def test_a_queue_that_outgrows_the_server_is_named_however_few_the_requests_are(
    n, n_slots, load, arrival, named
):
    """15/s offered at a capacity of 10/s, by so many slots: the first requests find one free."""
    found = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        due_s = np.arange(n) / (10 * load)
        if arrival == "poisson":
            due_s = np.cumsum(random.exponential(0.1 / load, n))
        cv = 0.1 if n_slots == 32 else 0.3
        services_s = random.gamma(cv**-2, 0.1 * n_slots * cv**2, n)
        left_s = departures(due_s, services_s, n_slots)
        first_s = left_s - services_s + 0.01
        found += "overloaded" in reasons(table(due_s, first_s, left_s, 5), arrival)
    least, most = named
    assert least <= found <= most


def test_an_overloaded_run_is_not_stationary_and_says_what_to_do():
    verdict = summarized(queued(1.4, 600, 0), conditions(arrivals=POISSON))["verdict"]
    assert verdict["state"] == "NOT-STATIONARY"
    assert "--rate" in verdict["reasons"][0]["advice"]


def test_a_drifting_token_rate_is_found_though_no_queue_forms():
    due_s = np.linspace(0, 60, 600)
    random = np.random.default_rng(0)
    first_s = due_s + random.lognormal(-3, 0.1, 600)
    last_s = first_s + 0.1 * np.linspace(1, 1.2, 600) * random.lognormal(0, 0.05, 600)
    assert reasons(table(due_s, first_s, last_s, 5), "constant") == ["drifting"]


def test_a_latency_that_falls_is_a_warm_up_and_one_that_rises_is_throttled():
    """Of a TTFT that had fallen from 20.9 to 13.9 ms a page said to look for throttling."""
    due_s, random = np.linspace(0, 60, 600), np.random.default_rng(1)
    noise = random.lognormal(0, 0.05, 600)
    for shape, text, advice in (
        (np.linspace(1, 2, 600), r"TTFT rose by \d+% of its median", "throttling"),
        (np.linspace(2, 1, 600), r"TTFT fell by \d+% of its median", "slow beginning"),
    ):
        first_s = due_s + 0.05 * shape * noise
        steady = steady_part(columns_of(table(due_s, first_s, first_s + 0.1, 5)), "constant")
        assert steady is not None
        (reason,) = steady.reasons
        assert re.match(text, reason.text)
        assert advice in reason.advice


@pytest.mark.parametrize("slow", [30, 60])
def test_a_slow_start_is_left_out_of_the_latencies_and_shown(slow):
    due_s = np.linspace(0, 60, 600)
    random = np.random.default_rng(1)
    wait_s = random.lognormal(-3, 0.2, 600) + np.where(np.arange(600) < slow, 0.5, 0)
    summary = summarized(
        table(due_s, due_s + wait_s, due_s + wait_s + 0.1, 5),
        conditions(arrivals=("constant", 10)),
    )
    window = summary["window"]
    assert window["n_warm_up"]["point"] == pytest.approx(slow, abs=0.05 * 600)
    assert window["warm_up_s"]["point"] == pytest.approx(slow / 10, abs=3)
    assert summary["metrics"]["ttft"]["p90"]["point"] < 0.2
    assert summary["metrics"]["ttft"]["p90"]["n"] == 600 - window["n_warm_up"]["point"]
    assert summary["counts"]["planned"] == 600


@pytest.mark.parametrize("pattern", ["burst", "ramp", "steps", None])
def test_only_an_open_loop_at_one_rate_is_asked_to_be_steady(pattern):
    assert steady_part(columns_of(queued(1.3, 200, 0)), pattern) is None


def test_few_requests_have_no_trend_and_say_so():
    steady = steady_part(columns_of(queued(0.5, 40, 0)), "poisson")
    assert steady is not None
    assert all(isinstance(row.figure, Absent) for row in steady.figures.rows())


def coverage(truth, n_runs):
    hits = 0
    for seed in range(n_runs):
        c = columns_of(queued(0.7, 2000, seed, tokens=2))
        steady = steady_part(c, "poisson")
        figure = figures(METRICS["ttft"], c, steady).mean
        assert isinstance(figure, Estimate)
        hits += figure.low <= truth <= (figure.high or np.inf)
    return hits / n_runs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_at_a_queue_is_covered_from_its_records_on():
    """Eight servers, warm-up cut and all."""
    many = columns_of(queued(0.7, 400_000, 99, tokens=2))
    truth = float((many.first_s - many.due_s).mean())
    covered = coverage(truth, 1500)
    print(f"coverage of the mean TTFT at 70% load: {covered:.0%}")
    assert covered >= 0.87


def test_throughput_in_the_window_is_the_rate_that_was_offered():
    summary = summarized(queued(0.7, 2000, 5), conditions(arrivals=POISSON))
    offered = 0.7 * N_SERVERS / MEAN_S
    rate = summary["throughput"]["requests_per_s"]
    assert rate["low"] < offered < rate["high"]
    assert rate["note"].endswith("blocks of time")
    assert summary["throughput"]["output_tok_per_s"]["point"] == pytest.approx(5 * rate["point"], rel=0.02)


def test_a_closed_loops_throughput_has_blocks_of_time_and_a_short_one_a_plain_reading():
    summaries = (summarized(queued(0.7, n, 5), conditions(concurrency=8)) for n in (2000, 5))
    long, short = (summary["throughput"]["output_tok_per_s"] for summary in summaries)
    assert long["low"] < long["point"] < long["high"]
    assert short["point"] is not None
    assert short["level"] is None


@pytest.mark.parametrize(("n", "known"), [(40, True), (10, False)])
def test_a_run_shorter_than_three_blocks_gets_no_interval_and_one_shorter_than_a_block_no_rate(n, known):
    rate = summarized(queued(0.5, n, 0), conditions(arrivals=POISSON))["throughput"]["requests_per_s"]
    assert (rate["point"] is not None) == known
    assert rate.get("low") is None
    assert "3 blocks" in (rate["note"] if known else rate["absent"])


def test_the_schedule_that_was_kept_stands_beside_the_plan():
    kept = summarized(queued(0.5, 2000, 3), conditions(arrivals=POISSON))["schedule"]
    assert kept["rate_error"]["point"] == pytest.approx(0, abs=1e-6)
    assert kept["gap_cv"]["point"] == pytest.approx(1, abs=0.1)


def test_estimates_stay_estimates():
    steady = steady_part(columns_of(queued(0.7, 400, 1)), "poisson")
    assert steady is not None
    assert all(isinstance(row.figure, Estimate) for row in steady.figures.rows())


def test_goodput_and_throughput_share_a_window():
    """Where every request is good, goodput is throughput: of a whole burst, and within a steady window."""
    goals = (parse_slo("ttft<=1000s"),)
    burst = summarized(
        table(np.zeros(40), np.full(40, 0.05), np.linspace(0.1, 2, 40), 5), conditions(goals=goals)
    )
    assert burst["goodput"]["requests_per_s"]["point"] == burst["throughput"]["requests_per_s"]["point"]
    assert burst["goodput"]["tok_per_s"]["point"] == burst["throughput"]["output_tok_per_s"]["point"]
    at_s = np.arange(600) / 20
    records = table(at_s, at_s + 0.05, at_s + 0.1, 5)
    steady = summarized(records, conditions(arrivals=("constant", 20.0), duration_s=30.0, goals=goals))
    for rates in (steady["goodput"], steady["throughput"]):
        assert rates["requests_per_s"]["point"] == pytest.approx(20, rel=0.01)
    # None missed, at a rate without error: of more requests some may.
    assert steady["throughput"]["requests_per_s"]["low"] == pytest.approx(20, rel=0.01)
    good = steady["goodput"]["requests_per_s"]
    assert good["low"] / good["point"] == pytest.approx(steady["goodput"]["attainment"]["low"], rel=0.01)
    assert good["low"] < 0.995 * good["point"]


def test_the_window_is_the_duration_that_was_asked_for():
    """--rate 4 --duration-s 15: the last of 60 requests is due before the 15 s are over."""
    due_s = np.arange(60) / 4
    records = table(due_s, due_s + 0.05, due_s + 0.1, 5)
    summary = summarized(records, conditions(arrivals=("constant", 4.0), duration_s=15.0))
    assert summary["window"]["end_s"]["point"] == 15.0
    assert summary["throughput"]["requests_per_s"]["point"] == pytest.approx(60 / 15, rel=0.02)


def test_what_an_interrupt_left_unsent_is_outside_the_window_and_not_infinitely_late():
    due_s = np.arange(600) / 20
    rows = table(due_s, due_s + 0.05, due_s + 0.1, 5).to_pylist()
    for row in rows[324:]:
        row.update(outcome="not_sent", sent_ns=None, closed_ns=None, token_ns=[], token_n=[])
        row.update(read_lag_ns=[], read_error_ns=[])
    records = pa.Table.from_pylist(rows, schema=RECORDS)
    context = conditions(arrivals=("constant", 20.0), status="interrupted", duration_s=30.0)
    summary = summarized(records, context)
    assert summary["counts"] == {"planned": 600, "ok": 324, "not_sent": 276}
    assert summary["metrics"]["ttft"]["p90"]["point"] == pytest.approx(0.05, abs=1e-6)
    assert summary["verdict"]["state"] == "VALID"
    assert summary["verdict"]["warnings"][0]["code"] == "interrupted"


def loop(c: int, n: int, seed: int = 0):
    """A closed loop of `c` slots whose replies take 0.3 to 3 s, and what a server in it brings a second."""
    random = np.random.default_rng(seed)
    slots, rows = [0.0] * c, []
    for _ in range(n):
        sent_s = heapq.heappop(slots)
        stay_s = float(random.uniform(0.3, 3.0))
        heapq.heappush(slots, sent_s + stay_s)
        rows.append((sent_s, stay_s))
    return rows


@pytest.mark.parametrize(("c", "n"), [(8, 400), (32, 160), pytest.param(64, 1000, marks=pytest.mark.slow)])
def test_a_closed_loops_rates_are_those_of_the_server_whoever_sent_the_requests_when(c, n):
    """A full loop of C ends C requests in each mean stay: throughput is C / E[stay], by Little."""
    ratios = []
    for seed in range(20):
        rows = loop(c, n, seed)
        records = [
            replace(
                ok(i, sent_s + stay_s / 2, [stay_s / 2]),
                due_ns=round(sent_s * 1e9),
                dispatched_ns=round(sent_s * 1e9),
                sent_ns=round(sent_s * 1e9) + 1,
            )
            for i, (sent_s, stay_s) in enumerate(rows)
        ]
        context = conditions(concurrency=c, goals=(parse_slo("ttft<=1000s"),))
        summary = summarized(record_table(records), context)
        rates, good = summary["throughput"], summary["goodput"]
        ratios.append(rates["requests_per_s"]["point"] * 1.65 / c)
        assert rates["output_tok_per_s"]["point"] == pytest.approx(
            2 * rates["requests_per_s"]["point"], rel=0.15
        )
        assert good["requests_per_s"]["point"] == pytest.approx(rates["requests_per_s"]["point"])
        assert good["tok_per_s"]["point"] == pytest.approx(rates["output_tok_per_s"]["point"])
        assert summary["concurrency"]["mean"]["point"] == pytest.approx(c, rel=1e-3)
    assert np.mean(ratios) == pytest.approx(1, abs=0.02)


def held(rate_per_s, length_s, seed, low_s=5.0, high_s=15.0):
    """Poisson arrivals at a server without a queue, whose replies stay this long."""
    random = np.random.default_rng(seed)
    due_s = np.cumsum(random.exponential(1 / rate_per_s, int(rate_per_s * length_s)))
    stays_s = random.uniform(low_s, high_s, len(due_s))
    return record_table(
        [
            replace(
                ok(i, due + 0.1, [stay_s]),
                due_ns=round(due * 1e9),
                dispatched_ns=round(due * 1e9),
                sent_ns=round(due * 1e9) + 1,
            )
            for i, (due, stay_s) in enumerate(zip(due_s, stays_s, strict=True))
        ]
    )


@pytest.mark.slow
def test_a_load_that_is_held_is_not_overloaded_while_it_fills_up():
    runs = [held(10, 60, seed) for seed in range(30)]
    assert sum(bool(reasons(run)) for run in runs) <= 1
    some = [
        summarized(run, conditions(arrivals=POISSON))["throughput"]["requests_per_s"] for run in runs[:10]
    ]
    assert np.mean([rate["point"] for rate in some]) == pytest.approx(10, rel=0.03)
