"""Grades: what late sends and late reads did to each percentile, and only to that."""

import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from burstline.measure import summarize as summarize_module
from burstline.measure.metrics.slo import parse_slo
from burstline.measure.record.columns import columns_of
from burstline.measure.record.summary import Summary
from burstline.measure.record.tables import RECORDS, record_table
from burstline.measure.record.verdict import Grade, State
from burstline.measure.stats.figure import measured
from burstline.measure.verdict.grades import grades
from burstline.measure.verdict.judge import judge
from tests.measure.making import conditions, failed, judged, ok, summarized

N = 800
MS = 1_000_000


def records(*, ttft_s=0.15, late_s=0.0, gap_s=0.01, spacing_s=0.01, error_s=0.0):
    """N requests `spacing_s` apart with 4 tokens each; lateness and read errors are of each or of all."""
    late, error = (np.broadcast_to(value, N) for value in (late_s, error_s))
    rows = []
    for k in range(N):
        due = round(k * spacing_s * 1e9)
        sent = due + round(float(late[k]) * 1e9)
        row = ok(k, sent / 1e9 + ttft_s, [gap_s] * 3)
        errors = [round(float(error[k]) * 1e9)] * len(row.token_ns)
        rows.append(
            replace(
                row,
                due_ns=due,
                dispatched_ns=due,
                sent_ns=sent,
                closed_ns=row.token_ns[-1],
                read_error_ns=errors,
            )
        )
    return record_table(rows)


def graded(**how):
    return grades(columns_of(records(**how)))


def read_late(*, after_s=0.0004, share=0.8):
    """Of that share the end was read 40 ms late and with all that follows it, of the others at once."""
    rows = []
    for k in range(N):
        row = replace(ok(k, k * 0.01 + 0.1, [0.01] * 3), due_ns=k * 10 * MS, sent_ns=k * 10 * MS)
        late = k % 100 < 100 * share
        errors, lags = ([40 * MS] * 4, [2 * MS] * 4) if late else ([0] * 4, [MS // 10] * 4)
        closed_ns = row.token_ns[-1] + (0 if late else round(after_s * 1e9))
        rows.append(replace(row, read_error_ns=errors, read_lag_ns=lags, closed_ns=closed_ns))
    return grades(columns_of(record_table(rows)))


def test_a_reply_that_ends_as_those_read_in_time_had_its_last_token_no_sooner():
    """What follows the last token in a late read takes as long as elsewhere; the first stays unknown."""
    found = read_late()
    assert found["e2e"]["p50"].read_effect_s == pytest.approx(0.0004)
    assert found["e2e"]["p50"].grade == Grade.OK
    assert found["ttft"]["p50"].grade == Grade.UNRELIABLE
    assert read_late(after_s=0.03)["e2e"]["p50"].read_effect_s == pytest.approx(0.03)
    assert read_late(after_s=2.0)["e2e"]["p50"].read_effect_s == pytest.approx(0.04)
    assert read_late(share=0.99)["e2e"]["p50"].read_effect_s == pytest.approx(0.04), "8 of 800 say too little"


def late_now_and_then(ms, share=0.02):
    return np.where(np.arange(N) % round(1 / share) == 0, ms / 1e3, 0.0)


def test_1_a_few_late_sends_of_an_open_loop_leave_every_percentile_as_it_is():
    """Their lag has a p99 of 1.63 ms; TTFT p99 is moved by what it is moved, 1%."""
    found = graded(late_s=late_now_and_then(1.4))
    assert {each.grade for row in found.values() for each in row.values()} == {Grade.OK}
    assert found["ttft"]["p99"].send_effect_s == pytest.approx(1.4e-3)
    assert found["ttft"]["p50"].send_effect_s == pytest.approx(0, abs=1e-9)


def test_a_lag_is_no_effect():
    """Every second request leaves 40 ms late; the p99 is made by others, whose reply took 500 ms."""
    late_s = np.where(np.arange(N) % 2 == 0, 0.04, 0.0)
    rows = records(late_s=late_s).to_pylist()
    for k, row in enumerate(rows):
        if k % 20 == 1:
            row["token_ns"] = [at + 500 * MS for at in row["token_ns"]]
    found = grades(columns_of(pa.Table.from_pylist(rows, schema=RECORDS)))["ttft"]["p99"]
    assert found.send_effect_s == pytest.approx(0, abs=1e-9)
    assert found.grade == Grade.OK


def test_late_sends_beyond_the_tolerance_grade_what_they_move_and_nothing_else():
    found = graded(late_s=late_now_and_then(40))
    assert found["ttft"]["p99"].grade == Grade.AS_SENT
    assert found["ttft"]["p99"].as_sent_s == pytest.approx(0.15)
    assert found["ttft"]["p50"].grade == Grade.OK
    assert {each.grade for name in ("tpot", "itl") for each in found[name].values()} == {Grade.OK}


def test_2_a_burst_counts_from_each_send_and_its_spread_condemns_nothing():
    """1000 sends take 10 ms whatever the client is written in; TTFT is 50 ms."""
    burst = records(ttft_s=0.05, late_s=np.linspace(0, 0.0104, N), spacing_s=0.0)
    summary = summarized(burst, conditions())
    assert summary["metrics"]["ttft"]["p99"]["point"] == pytest.approx(0.05)
    assert summary["verdict"]["state"] == "VALID"
    assert summary["grades"]["ttft"]["p99"]["grade"] == "as-sent"
    assert summary["instrument"]["send_spread_s"]["point"] == pytest.approx(0.0104)


def stood_still(*, share=1.0, ttft_s=0.1, n_s=16, rate=10.0, from_s=6.0, for_s=4.0):
    """An open loop whose client sends what is due while it stands still at the end of that time."""
    due_s = np.arange(int(n_s * rate)) / rate
    late_s = np.where((due_s >= from_s) & (due_s < from_s + for_s), from_s + for_s - due_s, 0.0)
    late_s[np.arange(len(due_s)) % round(1 / share) != 0] = 0.0
    rows = []
    for k, (due, late) in enumerate(zip(due_s.tolist(), late_s.tolist(), strict=True)):
        row = ok(k, due + late + ttft_s * (1 + 0.05 * (k % 7)), [0.01] * 3)
        ns = {"due_ns": round(due * 1e9), "dispatched_ns": round((due + late) * 1e9)}
        rows.append(replace(row, sent_ns=round((due + late) * 1e9) + 1000, closed_ns=row.token_ns[-1], **ns))
    return record_table(rows)


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["the client", "one of two drivers"])
def test_a_client_that_stood_still_is_client_bound(share):
    """4 s of 16: TTFT p90 is far from 0.1 s by its own lateness; a p99 needs more requests."""
    open_loop = conditions(arrivals=("constant", 10.0))
    summary = summarized(stood_still(share=share), open_loop)
    assert summary["verdict"]["state"] == "CLIENT-BOUND"
    (reason,) = summary["verdict"]["reasons"]
    assert reason["code"] == "send-lag"
    assert re.match(
        r"The client sent requests late, which changed (TTFT|E2E) p\d+ by [1-4]\.\d+ s", reason["text"]
    )
    assert "TTFT p90" in reason["text"]
    assert summary["grades"]["tpot"]["p50"]["grade"] == "ok"
    target = {"ttft.p90<=1s": "inconclusive", "tpot.p50<=1s": "pass", "attainment>=90%": "inconclusive"}
    goals = [parse_slo(text) for text in ("ttft<=1s", *target)]
    given = conditions(arrivals=("constant", 10.0), goals=goals)
    targets = summarized(stood_still(share=share), given)["targets"]
    assert {row["target"]: row["result"] for row in targets} == target
    assert summarized(stood_still(for_s=0.0), open_loop)["verdict"]["state"] == "VALID"


def test_late_sends_within_the_interval_condemn_nothing():
    """2 ms of 150, where the interval reaches 3% to both sides."""
    ttft_s = np.random.default_rng(1).lognormal(np.log(0.15), 0.3, N)
    rows = records(late_s=0.002).to_pylist()
    for row, own_s in zip(rows, ttft_s, strict=True):
        row["token_ns"] = [at + round((own_s - 0.15) * 1e9) for at in row["token_ns"]]
    table = pa.Table.from_pylist(rows, schema=RECORDS)
    summary = summarized(table, conditions(arrivals=("constant", 100.0)))
    assert summary["grades"]["ttft"]["p50"]["grade"] == "as-sent"
    assert summary["verdict"]["state"] == "VALID"


def test_an_error_of_the_client_above_the_figure_itself_is_never_valid():
    """`TTFT p50 103 ms ± 3.85 s`: the canary of a driver that was stopped says so, no percentile does."""
    open_loop = conditions(arrivals=("constant", 100.0))
    summary = Summary.from_json(summarized(records(), open_loop))
    off = replace(summary.metrics["ttft"], instrument_error=measured(3.85, "s", ""))
    summary = replace(summary, metrics={**summary.metrics, "ttft": off})
    verdict = judge(summary, open_loop["manifest"])
    assert verdict.state == State.CLIENT_BOUND
    assert verdict.reasons[0].text == "The client's error, 3.85 s, is larger than TTFT p50, 150 ms."


@pytest.mark.parametrize(("late_s", "state"), [(0.0, "VALID"), (0.001, "VALID"), (1.0, "CLIENT-BOUND")])
def test_a_closed_loop_whose_replies_lie_unread_is_not_the_load_that_was_asked(late_s, state):
    """Eight users; the client stands still for a second now and then, so that each waits to be sent again."""
    rows = []
    for k in range(160):
        wave = k // 8
        row = ok(k, wave * 0.3 + (wave // 5) * late_s + 0.1 + 0.001 * (k % 8), [0.05] * 3)
        late = late_s if wave % 5 == 4 else 0.0
        start = round((wave * 0.3 + (wave // 5) * late_s) * 1e9)
        rows.append(
            replace(
                row, due_ns=start, dispatched_ns=start, sent_ns=start + 1000,
                closed_ns=row.token_ns[-1] + round(late * 1e9), read_lag_ns=[0, 0, 0, round(late * 1e9)],
            )
        )  # fmt: skip
    summary = summarized(record_table(rows), conditions(concurrency=8))
    assert summary["verdict"]["state"] == state
    if state == "CLIENT-BOUND":
        assert summary["instrument"]["unread_fraction"]["point"] > 0.3
        assert [reason["code"] for reason in summary["verdict"]["reasons"]] == ["slow-client"]
        goals = [parse_slo(text) for text in ("requests_per_s>=1", "ttft.p50<=10s")]
        targets = summarized(record_table(rows), conditions(concurrency=8, goals=goals))["targets"]
        assert [row["result"] for row in targets] == ["inconclusive"] * 2, "of another load"


def test_3_events_that_share_a_segment_are_bounded_by_their_own_read():
    """A pass of 9 ms elsewhere in the run says nothing of them."""
    assert summarized(records(error_s=24e-6), conditions())["verdict"]["state"] == "VALID"


def test_reads_that_may_be_9_ms_late_make_the_gaps_unreliable():
    found = graded(error_s=0.009)
    assert found["itl"]["p50"].grade == Grade.UNRELIABLE
    assert found["ttft"]["p50"].grade == Grade.UNRELIABLE
    assert found["itl"]["p50"].read_effect_s == pytest.approx(0.009)
    assert summarized(records(error_s=0.009), conditions())["verdict"]["state"] == "CLIENT-BOUND"


def test_late_reads_of_a_few_requests_spoil_the_tail_and_not_the_median():
    found = graded(error_s=late_now_and_then(9))
    assert found["ttft"]["p50"].grade == Grade.OK
    summary = summarized(records(error_s=late_now_and_then(9), gap_s=0.5), conditions())
    assert summary["grades"]["tpot"]["p50"]["grade"] == "ok"


def test_a_time_per_token_over_a_long_reply_hardly_feels_its_ends():
    assert graded(error_s=0.009, gap_s=0.4)["tpot"]["p50"].grade == Grade.OK


def unknown_of(k):
    row = ok(k, 0.1, [0.01] * 3)
    return replace(row, read_error_ns=[-1] * 4)


def test_errors_that_were_not_recorded_are_unknown_and_make_a_percentile_unreliable():
    found = grades(columns_of(record_table([unknown_of(k) for k in range(N)])))
    for name in ("ttft", "tpot", "itl", "e2e"):
        assert found[name]["p50"].read_effect_s is None
        assert found[name]["p50"].grade == Grade.UNRELIABLE
    summary = summarized(record_table([unknown_of(k) for k in range(N)]), conditions())
    assert summary["verdict"]["state"] == "CLIENT-BOUND"
    assert summary["verdict"]["reasons"][0]["code"] == "read-unknown"


def test_a_few_errors_that_were_not_recorded_spoil_no_median():
    rows = [unknown_of(k) if k % 100 < 2 else ok(k, 0.1 + k / 1e4, [0.01] * 3) for k in range(N)]
    rows = [row if -1 in row.read_error_ns else replace(row, read_error_ns=[0] * 4) for row in rows]
    found = grades(columns_of(record_table(rows)))
    assert found["ttft"]["p50"].grade == found["e2e"]["p50"].grade == found["itl"]["p50"].grade == Grade.OK
    assert found["itl"]["p99"].grade == Grade.UNRELIABLE


@pytest.mark.parametrize(
    ("error_s", "grade", "wider"), [(0.0011, "ok", 0.0), (0.007, "ok", 0.007), (0.008, "unreliable", 0.008)]
)
def test_up_to_1_percent_nothing_is_said_up_to_5_the_interval_is_widened(error_s, grade, wider):
    """TTFT of 150 ms: 1% are 1.5 ms, 5% are 7.5."""

    def p50(error_s):
        table = records(error_s=error_s)
        context = conditions(arrivals=("poisson", 100.0))
        return (found := summarized(table, context))["metrics"]["ttft"]["p50"], found["grades"]["ttft"]["p50"]

    (exact, _), (shown, graded) = p50(0.0), p50(error_s)
    assert graded["grade"] == grade
    assert exact["low"] - shown["low"] == pytest.approx(wider)
    assert shown["high"] - exact["high"] == pytest.approx(wider)


@pytest.mark.parametrize(("error_s", "wider"), [(0.0014, 0.0), (0.0018, 0.0006)])
def test_more_than_5_percent_widen_the_interval_of_a_few_milliseconds_too(error_s, wider):
    """TPOT of 10 ms over three tokens: 5% are 0.5 ms, below the tolerance of 1 ms."""

    def p50(error_s):
        found = summarized(records(error_s=error_s), conditions(arrivals=("poisson", 100.0)))
        return found["metrics"]["tpot"]["p50"], found["grades"]["tpot"]["p50"]["grade"]

    (exact, _), (shown, grade) = p50(0.0), p50(error_s)
    assert grade == "ok"
    assert exact["low"] - shown["low"] == pytest.approx(wider, abs=1e-9)
    assert shown["high"] - exact["high"] == pytest.approx(wider, abs=1e-9)


def test_what_the_canary_found_beyond_the_bounds_adds_to_every_event():
    table = records(error_s=0.002)
    assert grades(columns_of(table), 0.05)["ttft"]["p50"].read_effect_s == pytest.approx(0.052)
    assert grades(columns_of(table), 0.06)["tpot"]["p50"].read_effect_s == pytest.approx(0.062 / 3, rel=0.01)


def test_the_tokens_of_a_reply_share_what_the_canary_was_off_by(monkeypatch):
    off = measured(0.06, "s", "")
    own = summarize_module.instrument
    monkeypatch.setattr(
        summarize_module, "instrument", lambda *a, **k: replace(own(*a, **k), canary_p99_s=off)
    )
    metrics = Summary.from_json(summarized(records(), conditions(arrivals=("constant", 100.0)))).metrics
    errors = {name: metrics[name].instrument_error.point for name in ("ttft", "tpot", "itl")}
    assert errors == pytest.approx({"ttft": 0.06, "tpot": 0.02, "itl": 0.06})


def test_requests_that_failed_are_moved_by_nothing():
    table = record_table([*(ok(k, 0.1, [0.01] * 3) for k in range(95)), *(failed(k) for k in range(95, 100))])
    assert grades(columns_of(table))["tpot"]["p90"].read_effect_s == 0


def test_percentiles_that_do_not_exist_have_no_grade():
    few = record_table([ok(k, 0.1, [0.01]) for k in range(20)])
    assert set(grades(columns_of(few))["ttft"]) == {"p50"}


SEVEN = {
    "open loop, a lag p99 of 1.6 ms at 150 ms": ({"late_s": late_now_and_then(1.4)}, {}, "ok", State.VALID),
    "a burst that is sent within 10.4 ms": (
        {"ttft_s": 0.05, "late_s": np.linspace(0, 0.0104, N), "spacing_s": 0.0},
        {},
        "as-sent",
        State.VALID,
    ),
    "two events in a segment, stamps off by 24 us": ({"error_s": 24e-6}, {}, "ok", State.VALID),
    "an open loop sent 40 ms late": (
        {"late_s": late_now_and_then(40)},
        {},
        "as-sent",
        State.VALID,
    ),
    "reads that may be 9 ms late": ({"error_s": 0.009}, {}, "unreliable", State.CLIENT_BOUND),
    "others take 80% of the server's machine": (
        {},
        {"others_cpu_fraction": 0.8, "server_here": True},
        "ok",
        State.DISTURBED,
    ),
    "a CPU quota stops the client": ({}, {"throttled_fraction": 0.2}, "ok", State.DISTURBED),
}


@pytest.mark.parametrize(("load", "machine", "grade", "state"), SEVEN.values(), ids=SEVEN)
def test_each_of_the_seven_cases_has_its_grade_and_its_verdict(load, machine, grade, state):
    found = graded(**load)
    verdict = judged({"planned": N, "ok": N}, found, **machine)
    assert (found["ttft"]["p99"].grade, verdict.state) == (grade, state)
    if grade == "as-sent":
        assert {each.grade for each in found["tpot"].values()} == {Grade.OK}
