import pytest

from loadgen.stats.estimates import Absent, Estimate
from loadgen.verdict.verdict import Evidence, Reason, State, judge


def at(value_s):
    return Estimate(value_s, None, None, None, 1, "s")


def evidence(**changes):
    facts = {
        "counts": {"planned": 1000, "ok": 1000},
        "status": "complete",
        "headline": {"ttft": {"p50": at(1.0), "p99": at(2.0)}, "itl": {"p50": at(0.02), "p99": at(0.05)}},
        "send_lag_s": {"p50": at(0.005), "p99": at(0.01)},
        "read_error_s": {"p50": at(0.0), "p99": at(0.0005)},
    }
    return Evidence(**{**facts, **changes})


CASES = {
    "all is well": ({}, State.VALID, []),
    "sent a hair later than 1 % of TTFT": (
        {"send_lag_s": {"p50": at(0.0101)}},
        State.CLIENT_BOUND,
        ["send-lag"],
    ),
    "sent exactly 1 % late": ({"send_lag_s": {"p50": at(0.01)}}, State.VALID, []),
    "sent late, which no gap feels": (
        {"send_lag_s": {"p99": at(0.019)}, "headline": {"itl": {"p99": at(0.01)}}},
        State.VALID,
        [],
    ),
    "1 ms is always borne": (
        {"read_error_s": {"p99": at(0.001)}, "headline": {"itl": {"p99": at(0.001)}}},
        State.VALID,
        [],
    ),
    "stamped late": ({"read_error_s": {"p99": at(0.002)}}, State.CLIENT_BOUND, ["read-lag"]),
    "the truth server objects": (
        {"instrument_error_s": {"itl": {"p50": at(0.02)}}},
        State.CLIENT_BOUND,
        ["instrument-error"],
    ),
    "throttled": ({"throttled_fraction": 0.02}, State.CLIENT_BOUND, ["starved"]),
    "no success": ({"counts": {"planned": 9, "ok": 0, "connect": 9}}, State.INSUFFICIENT, ["no-success"]),
    "ten successes": ({"counts": {"planned": 10, "ok": 10}}, State.INSUFFICIENT, ["too-few"]),
    "one in a hundred failed": ({"counts": {"planned": 200, "ok": 198, "reset": 2}}, State.VALID, []),
    "more failed": (
        {"counts": {"planned": 200, "ok": 197, "reset": 3}},
        State.INSUFFICIENT,
        ["too-many-failures"],
    ),
    "as many failed as may": (
        {"counts": {"planned": 200, "ok": 150, "reset": 50}, "max_failures": 0.25},
        State.VALID,
        [],
    ),
    "one failed and none may": (
        {"counts": {"planned": 200, "ok": 199, "reset": 1}, "max_failures": 0.0},
        State.INSUFFICIENT,
        ["too-many-failures"],
    ),
    "cut off": ({"status": "interrupted"}, State.INSUFFICIENT, ["cut-off"]),
    "two states at once": (
        {"status": "interrupted", "throttled_fraction": 0.5},
        State.INSUFFICIENT,
        ["cut-off", "starved"],
    ),
    "not comparable": ({"not_comparable": (Reason("eos", "x", "y"),)}, State.NOT_COMPARABLE, ["eos"]),
    "not stationary": ({"not_stationary": (Reason("trend", "x", "y"),)}, State.NOT_STATIONARY, ["trend"]),
    "a lag nobody knows": ({"read_error_s": {"p99": Absent("no stamps")}}, State.VALID, []),
}


@pytest.mark.parametrize(("changes", "state", "codes"), CASES.values(), ids=CASES)
def test_each_case_has_its_state_and_reasons(changes, state, codes):
    verdict = judge(evidence(**changes))
    assert (verdict.state, [reason.code for reason in verdict.reasons]) == (state, codes)
    assert all(reason.text and reason.advice for reason in verdict.reasons)


def test_a_reason_names_the_worst_lag_and_what_it_spoils():
    (reason,) = judge(evidence(send_lag_s={"p50": at(0.02), "p99": at(0.3)})).reasons
    assert "300 ms at p99" in reason.text
    assert "TTFT p99 is 2000 ms and bears 20 ms" in reason.text


def test_warnings_take_nothing_from_a_verdict():
    verdict = judge(evidence(), (Reason("failures", "1 failed", "look"),))
    assert verdict.to_json() == {
        "state": "VALID",
        "reasons": [],
        "warnings": [{"code": "failures", "text": "1 failed", "advice": "look"}],
    }
