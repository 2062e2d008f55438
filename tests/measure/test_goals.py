import functools
import math
import re
from dataclasses import replace

import pytest

from burstline.bench.conclusion import of_summary
from burstline.console import exit_codes
from burstline.measure.metrics.slo import judge_slos, missed, parse_slo, spoilt_by, state_decides
from burstline.measure.record.columns import columns_of
from burstline.measure.record.summary import Goodput, MetricFigures, Summary, Throughput
from burstline.measure.record.tables import record_table
from burstline.measure.record.verdict import (
    Grade,
    PercentileGrade,
    Reason,
    Result,
    SloResult,
    State,
    Verdict,
)
from burstline.measure.stats.estimates import Absent, Estimate
from burstline.workloads.request import WorkloadError
from tests.measure.making import conditions, failed, ok, summarized

VALID = Verdict(State.VALID)


@pytest.mark.parametrize(
    ("text", "metric", "statistic", "bound"),
    [
        ("ttft.p99<=2s", "ttft", "p99", 2.0),
        (" tpot.p90 <= 50 ms ", "tpot", "p90", 0.05),
        ("itl.mean<=400us", "itl", "mean", 4e-4),
        ("ttft<=1.5s", "ttft", None, 1.5),
        ("output_tok_per_s>=1e3", "output_tok_per_s", None, 1000.0),
        ("attainment>=99%", "attainment", None, 0.99),
        ("server_peak_bytes<=8GiB", "server_peak_bytes", None, 8 * 2**30),
    ],
)
def test_a_goal_says_metric_statistic_and_bound_in_stored_units(text, metric, statistic, bound):
    goal = parse_slo(text)
    assert (goal.metric, goal.statistic) == (metric, statistic)
    assert goal.bound == pytest.approx(bound)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ttft.p99", "in quotes"),
        ("=2s", "in quotes"),
        ("latency.p99<=2s", "no metric 'latency'.*ttft, tpot, itl"),
        ("ttft.p75<=2s", "p50, p90, p95, p99, mean"),
        ("ttft.p99<=2", "unit ''.*s, ms"),
        ("ttft.p99<=2GB", "unit 'GB'"),
        ("ttft.p99>=2s", "better lower, expected <="),
        ("requests_per_s<=2", "better higher, expected >="),
        ("requests_per_s.p99>=2", "one number a run"),
        ("itl<=20ms", "itl.p99"),
        ("tpot.p50<=0s", "above 0"),
        ("ttft.p99<=1e400s", "finite"),
    ],
)
def test_a_goal_that_cannot_be_held_is_refused_with_what_is_known(text, words):
    with pytest.raises(WorkloadError, match=words):
        parse_slo(text)


@pytest.mark.parametrize("text", ["ttft<200", "ttft.p99<2s", "attainment>95%", "tpot=20ms", "ttft<=2s<=3s"])
def test_each_form_of_a_goal_that_a_refusal_names_is_one(text):
    """`ttft<200` was told to be METRIC.PERCENTILE<=VALUE UNIT: only a unit and "=" were missing."""
    with pytest.raises(WorkloadError) as refused:
        parse_slo(text)
    forms = re.findall(r"(METRIC\S*[<>]=VALUE UNIT)", str(refused.value))
    assert len(forms) == 2
    assert ">= where more is better" in str(refused.value)
    for form in forms:
        words = {"METRIC": "ttft", "PERCENTILE": "p99", "VALUE": "2", " UNIT": "s"}
        goal = parse_slo(functools.reduce(lambda each, word: each.replace(word, words[word]), words, form))
        assert goal.bound == 2.0


def result_of(text, figure, c=None, verdict=VALID, graded=None):
    return judged_of(text, figure, c, verdict, graded).result


def judged_of(text, figure, c=None, verdict=VALID, graded=None, planned=100):
    goal = parse_slo(text)
    metrics = {goal.metric: MetricFigures(**{goal.statistic: figure})} if goal.statistic else {}
    whole = {goal.metric: figure} if goal.statistic is None else {}
    summary = Summary(
        counts={"planned": planned},
        metrics=metrics,
        verdict=verdict,
        throughput=Throughput(**whole),
        grades=graded or {},
    )
    (judged,) = judge_slos([goal], summary, c if c is not None else COLUMNS)
    return judged


def between(low, high, point=1.0):
    return Estimate(point, low, high, 0.95, 100, "s")


COLUMNS = columns_of(record_table([ok(i, 0.1, [0.01] * 3) for i in range(20)]))


@pytest.mark.parametrize(
    ("low", "high", "result"),
    [
        (0.5, 1.0, "pass"),
        (0.5, 1.01, "inconclusive"),
        (1.0, 2.0, "inconclusive"),
        (1.01, 2.0, "fail"),
        (0.5, None, "inconclusive"),
        (1.5, None, "fail"),
        (None, 0.9, "pass"),
    ],
)
def test_the_interval_decides_not_the_point(low, high, result):
    assert result_of("ttft.p99<=1s", between(low, high)) == result


def test_a_target_far_away_is_decided_where_the_interval_has_no_end():
    open_above = Estimate(0.0025, 0.001, None, 0.95, 369, "s", "1 run")
    assert result_of("tpot.p90<=50ms", open_above) == Result.PASS
    assert result_of("tpot.p90<=4ms", open_above) == Result.INCONCLUSIVE


@pytest.mark.parametrize(
    ("text", "figure", "planned", "many"),
    [
        ("ttft.p90<=1s", between(0.7, 1.1, 0.9), 100, "about 400 requests"),
        ("ttft.p90<=1s", between(0.7, 1.1, 0.9), 200, "about 800 requests"),  # 100 of them behind a warm-up
        ("itl.p90<=1s", replace(between(0.7, 1.1, 0.9), n=6400), 100, "about 400 requests"),  # of tokens
        ("output_tok_per_s>=1", between(0.7, 1.3, 1.1), 100, "about 1,600 requests"),
        ("ttft.p90<=1s", between(0.7, 1.001, 0.9), 120, "about 130 requests"),  # never as few as it had
        ("ttft.p90<=1s", between(0.7, 1.1, 0.9999), 100, "no realistic number"),
    ],
)
def test_an_undecided_target_says_how_many_planned_requests_would_decide(text, figure, planned, many):
    undecided = judged_of(text, figure, planned=planned)
    assert (undecided.result, undecided.reason) == (
        Result.INCONCLUSIVE,
        f"the interval contains the limit: {many} would decide it",
    )


@pytest.mark.parametrize(
    ("low", "high", "result"), [(10, 20, "pass"), (9.9, 20, "inconclusive"), (1, 9.9, "fail")]
)
def test_a_throughput_must_stay_above_its_bound(low, high, result):
    assert result_of("output_tok_per_s>=10", between(low, high)) == result


def test_an_absent_number_tells_nothing_unless_failures_are_why():
    few = Absent("p99 needs 662 samples")
    assert result_of("ttft.p99<=1s", few) == Result.INCONCLUSIVE
    half_failed = columns_of(
        record_table([*(ok(i, 0.1, []) for i in range(10)), *map(failed, range(10, 20))])
    )
    assert result_of("ttft.p99<=1s", few, half_failed) == Result.FAIL


def test_a_percentile_that_is_not_known_misses_what_a_lower_one_misses():
    goal, few = parse_slo("ttft.p99<=1ms"), Absent("p99 needs 662 samples")
    for median, result in (
        (between(0.016, 0.017, 0.0165), "fail"),
        (between(5e-4, 2e-3, 1e-3), "inconclusive"),
    ):
        summary = Summary(counts={}, metrics={"ttft": MetricFigures(p50=median, p99=few)}, verdict=VALID)
        assert judge_slos([goal], summary, COLUMNS)[0].result == result


@pytest.mark.parametrize(
    ("state", "code", "results"),
    [
        (State.CLIENT_BOUND, "read-lag", ("pass", "fail")),
        (State.DISTURBED, "busy-machine", ("pass", "inconclusive")),
        (State.NOT_STATIONARY, "drifting", ("inconclusive", "inconclusive")),
        (State.NOT_STATIONARY, "overloaded", ("inconclusive", "fail")),
        (State.NOT_COMPARABLE, "beats-the-ceiling", ("inconclusive", "inconclusive")),
        (State.COLD, "cold", ("pass", "inconclusive")),
        (State.FAILED, "mostly-failed", ("inconclusive", "fail")),
        (State.FAILED, "contradiction", ("inconclusive", "inconclusive")),
    ],
)
def test_a_run_that_cannot_be_believed_passes_nothing(state, code, results):
    verdict = Verdict(state, (Reason(code, "", ""),))
    found = [result_of("ttft.p50<=1s", between(*ends), verdict=verdict) for ends in ((0.5, 0.9), (2, 3))]
    assert tuple(found) == results


def test_a_latency_beyond_its_slo_in_a_growing_queue_misses_it_however_long_the_run():
    grew = Verdict(State.NOT_STATIONARY, (Reason("overloaded", "", ""),))
    open_above = Estimate(5.9, 0.0, None, 0.95, 225, "s", "1 run")
    judged = judged_of("ttft.p90<=100ms", open_above, verdict=grew)
    assert (judged.result, judged.reason) == (
        Result.FAIL,
        "the queue kept growing: a longer run misses it by more",
    )
    below = judged_of("ttft.p90<=10s", open_above, verdict=grew)
    assert (below.result, below.reason) == (
        Result.INCONCLUSIVE,
        "the queue kept growing: a longer run may miss it",
    )
    assert judged_of("tpot.p90<=4s", open_above, verdict=grew).result == Result.INCONCLUSIVE
    assert judged_of("ttft.p90<=4s", open_above).result == Result.INCONCLUSIVE


BY_SEND, BY_READ, AT_ALL = {"send_effect_s": 0.02, "read_effect_s": 0.0}, {"read_effect_s": 0.02}, {}
HELD_BACK = {"read_effect_s": 0.001, "held": True}


@pytest.mark.parametrize(
    ("value_s", "effect", "is_spoilt"),
    [
        (0.0107, BY_SEND, False),
        (0.079, BY_SEND, False),
        (0.081, BY_SEND, True),
        (0.11, BY_SEND, True),
        (0.121, BY_SEND, False),
        (0.081, BY_READ, True),
        (0.079, BY_READ, False),
        (0.079, AT_ALL, True),
        (0.01, HELD_BACK, True),
    ],
)
@pytest.mark.parametrize("p", ["p50", "p90", "p99"])
def test_a_late_client_spoils_a_share_only_where_requests_can_change_sides(p, value_s, effect, is_spoilt):
    """All were within 16.3 ms of the due time, the bound was 100 ms: 1.3 ms of lateness changed no side."""
    graded = {"ttft": {p: PercentileGrade(Grade.UNRELIABLE, **effect)}}
    metrics = {"ttft": MetricFigures(**{p: between(0.005, 0.2, value_s)})}
    summary = Summary(
        counts={}, metrics=metrics, verdict=VALID, grades=graded, goodput=Goodput(criteria=("ttft<=100ms",))
    )
    of_it = is_spoilt and p != "p99"
    assert bool(spoilt_by(parse_slo("attainment>=95%"), summary)) == of_it
    assert spoilt_by(parse_slo(f"ttft.{p}<=100ms"), summary), "the percentile itself is unreliable"
    slow = replace(summary, verdict=Verdict(State.CLIENT_BOUND, (Reason("slow-client", "", ""),)))
    assert spoilt_by(parse_slo("attainment>=95%"), slow), "the load was another one"


def mixed():
    fast = [ok(i, 0.1, [0.01] * 3) for i in range(70)]
    slow = [ok(70 + i, 3.0, [0.01] * 3) for i in range(20)]
    return record_table([*fast, *slow, *(failed(90 + i) for i in range(10))])


def test_goodput_counts_what_meets_every_criterion_over_all_that_was_planned():
    goals = tuple(map(parse_slo, ("ttft<=1s", "tpot<=20ms", "attainment>=90%")))
    summary = summarized(mixed(), conditions(goals=goals))
    goodput, (target,) = summary["goodput"], summary["targets"]
    assert goodput["criteria"] == ["ttft<=1s", "tpot<=20ms"]
    assert goodput["attainment"]["point"] == pytest.approx(0.7)
    assert goodput["requests_per_s"]["point"] == pytest.approx(70 / (3.03 - 0.001))
    assert goodput["tok_per_s"]["point"] == pytest.approx(280 / (3.03 - 0.001))
    assert (target["target"], target["result"]) == ("attainment>=90%", "fail")
    assert of_summary(Summary.from_json(summary)) == exit_codes.TARGET_MISSED


@pytest.mark.parametrize(
    ("n", "share", "result"),
    [(3, 1.0, "inconclusive"), (300, 1.0, "inconclusive"), (400, 1.0, "pass"), (3, 0.0, "fail")],
)
def test_a_share_of_a_few_requests_decides_no_more_than_chance_allows(n, share, result):
    """With three of three, the true share may be 29%; 369 of 369 exclude less than 99% (Clopper, Pearson)."""
    rows = [ok(k, 0.1 if k < share * n else 3.0, [0.01] * 3) for k in range(n)]
    goals = tuple(map(parse_slo, ("ttft<=1s", "attainment>=99%")))
    (target,) = summarized(record_table(rows), conditions(goals=goals))["targets"]
    assert (target["target"], target["result"]) == ("attainment>=99%", result)


@pytest.mark.parametrize(
    ("latency_s", "result"), [(0.4, "pass"), (0.9, "inconclusive"), (1.5, "inconclusive"), (2.5, "fail")]
)
def test_a_share_of_one_burst_is_as_uncertain_as_the_latencies_behind_it(latency_s, result):
    """Identical bursts differ by a quarter: all 400 at 0.9 s of 1 s say nothing of the next burst."""
    goals = tuple(map(parse_slo, ("ttft<=1s", "attainment>=99%")))
    rows = [ok(k, latency_s, [0.01] * 3) for k in range(400)]
    (target,) = summarized(record_table(rows), conditions(goals=goals))["targets"]
    assert target["result"] == result


def test_a_single_token_has_no_tpot_to_miss():
    c = columns_of(record_table([ok(0, 0.1, []), ok(1, 0.1, [0.5])]))
    assert missed(c, [parse_slo("tpot<=100ms")]).tolist() == [0.0, 5.0]
    assert missed(columns_of(record_table([failed(0)])), [parse_slo("tpot<=100ms")]).tolist() == [math.inf]


def test_an_slo_on_what_was_not_measured_is_neither_met_nor_missed():
    """The server counted no tokens: what a token took is not known, so it meets no criterion for it."""
    rows = [replace(ok(k, 0.1, [0.02] * 3), output_tok=None) for k in range(30)]
    goals = tuple(map(parse_slo, ("tpot<=1s", "attainment>=90%")))
    summary = summarized(record_table(rows), conditions(goals=goals))
    assert summary["goodput"]["attainment"] == {
        "point": None, "absent": "the server did not count its tokens", "code": "not-counted"
    }  # fmt: skip
    assert [row["result"] for row in summary["targets"]] == ["inconclusive"]


@pytest.mark.parametrize(
    ("grade", "as_sent_s", "result"),
    [("unreliable", None, "inconclusive"), ("as-sent", 0.8, "pass"), ("as-sent", 1.2, "inconclusive")],
)
def test_a_target_follows_the_grade_of_its_own_percentile(grade, as_sent_s, result):
    graded = {"ttft": {"p50": PercentileGrade(Grade(grade), 0.0, 0.0, as_sent_s)}}
    assert result_of("ttft.p50<=1s", between(0.5, 0.9), graded=graded) == result
    assert result_of("ttft.p90<=1s", between(0.5, 0.9), graded=graded) == "pass"


def reading(point):
    return Estimate(point, None, None, None, 100, "s", "1 run")


@pytest.mark.parametrize(
    ("target", "point", "result"),
    [
        ("ttft.p50<=1s", 0.4, "pass"),
        ("ttft.p50<=1s", 0.6, "inconclusive"),
        ("ttft.p50<=1s", 1.6, "inconclusive"),
        ("ttft.p50<=1s", 2.5, "fail"),
        ("output_tok_per_s>=10", 21, "pass"),
        ("output_tok_per_s>=10", 11, "inconclusive"),
        ("output_tok_per_s>=10", 4, "fail"),
    ],
)
def test_one_run_decides_only_by_a_margin_that_no_noise_between_runs_explains(target, point, result):
    assert result_of(target, reading(point)) == result


@pytest.mark.parametrize(
    ("target", "point", "said"),
    [
        ("ttft.p90<=40ms", 0.0277, "one run meets it by 31%"),
        ("ttft.p90<=40ms", 0.06, "one run misses it by 50%"),
        ("output_tok_per_s>=10", 12.5, "one run meets it by 25%"),
        ("output_tok_per_s>=10", 7.5, "one run misses it by 25%"),
    ],
)
def test_a_margin_is_in_percent_of_the_bound(target, point, said):
    assert judged_of(target, reading(point)).reason == f"{said}; another run may not (use --repeats 3)"


@pytest.mark.parametrize(("verb", "advice"), [("run", " (use --repeats 3)"), ("limit", "")])
def test_a_probe_of_a_search_which_takes_no_repeats_is_not_advised_to_repeat(verb, advice):
    given = conditions(goals=[parse_slo("ttft.p50<=150ms")])
    given["manifest"] = replace(given["manifest"], argv=("burstline", verb, "--rate", "4"))
    (told,) = summarized(COLUMNS, given)["targets"]
    assert told["reason"] == f"one run meets it by 34%; another run may not{advice}"


def test_targets_decide_unless_the_run_failed():
    met = (SloResult("x", Result.PASS, "", between(1, 2)),)
    for state, targets, decides in (
        (State.CLIENT_BOUND, met, False),
        (State.FAILED, met, True),
        (State.CLIENT_BOUND, (), True),
        (State.VALID, (), False),
    ):
        summary = Summary(counts={}, metrics={}, verdict=Verdict(state), targets=targets)
        assert state_decides(summary) == decides


@pytest.mark.parametrize(
    ("results", "state", "code"),
    [
        ([], "VALID", 0),
        (["pass"], "VALID", 0),
        (["pass", "fail", "inconclusive"], "VALID", 3),
        (["pass", "inconclusive"], "VALID", 4),
        (["pass"], "FAILED", 4),
        (["pass"], "CLIENT-BOUND", 0),
        ([], "CLIENT-BOUND", 4),
        ([], "DISTURBED", 4),
    ],
)
def test_exit_codes_follow_the_targets_then_the_verdict(results, state, code):
    targets = tuple(SloResult("x", Result(result), "", between(1, 2)) for result in results)
    summary = Summary(counts={}, metrics={}, verdict=Verdict(State(state)), targets=targets)
    assert of_summary(summary) == code
