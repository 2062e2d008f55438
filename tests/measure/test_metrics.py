import numpy as np
import pytest

from burstline.measure.metrics.definitions import (
    METRICS,
    connect,
    e2e,
    e2e_service,
    icl,
    itl,
    latencies,
    tpot,
    ttft,
    ttft_service,
)
from burstline.measure.record.columns import columns_of
from burstline.measure.record.tables import record_table
from burstline.measure.stats.estimates import Absent
from burstline.measure.stats.quantiles import percentiles
from tests.measure.making import DONE, chat, event, failed, ok, recorded, request, usage


def columns(*records):
    return columns_of(record_table(records))


def per_token(samples):
    return np.repeat(samples.value, samples.weight.astype(int)).tolist()


def test_one_token_has_a_ttft_that_is_its_e2e_and_no_tpot():
    c = columns(recorded(request(1), (10, event(1, finish="length")), (10, DONE)))
    assert (ttft(c)[0], ttft_service(c)[0], e2e(c)[0], e2e_service(c)[0]) == (0.010, 0.008, 0.010, 0.008)
    assert np.isnan(tpot(c)[0])
    assert icl(c).value.size == itl(c).value.size == 0
    assert METRICS["ntpot"].of(c)[0] == 0.010


def test_no_token_is_a_failure_and_infinitely_late():
    c = columns(recorded(request(1), (10, DONE)))
    assert latencies(METRICS["ttft"], c)[0] == latencies(METRICS["tpot"], c)[0] == np.inf


def test_four_tokens_a_chunk_every_80_ms_are_20_ms_a_token():
    events = [(200 + 80 * k, event(4, finish="length" if k == 3 else None)) for k in range(4)]
    c = columns(recorded(request(16), *events))
    assert tpot(c)[0] == pytest.approx(0.240 / 12)
    assert icl(c).value == pytest.approx([0.080] * 3)
    assert per_token(itl(c)) == pytest.approx([0.020] * 12)


def test_tpot_leaves_out_the_five_tokens_that_came_first():
    c = columns(recorded(request(7), (100, event(5)), (120, event(1)), (140, event(1, finish="length"))))
    assert tpot(c)[0] == pytest.approx(0.040 / 2)


def test_tpot_is_the_familiar_formula_where_one_token_came_first():
    c = columns(ok(0, 0.2, [0.01, 0.03, 0.02]))
    assert tpot(c)[0] == pytest.approx((e2e(c)[0] - ttft(c)[0]) / (4 - 1))


def test_reasoning_opens_ttft_and_the_answer_opens_ttfa():
    events = [(100, chat(reasoning_content="hm")), (900, chat(content="yes")), (900, usage(2)), (900, DONE)]
    c = columns(recorded(request(2), *events))
    assert (ttft(c)[0], METRICS["ttfa"].of(c)[0]) == (0.1, 0.9)


def test_e2e_ends_with_the_last_token_and_not_with_usage_or_done():
    events = [(10, event()), (20, event(finish="length")), (500, usage(2)), (900, DONE)]
    assert e2e(columns(recorded(request(2), *events)))[0] == 0.020


def test_without_token_counts_ttft_stands_and_what_needs_counts_is_undefined():
    c = columns(recorded(request(2), (10, event()), (30, event(finish="length")), (30, DONE)))
    assert (ttft(c)[0], e2e(c)[0]) == (0.010, 0.030)
    assert np.isnan(tpot(c)[0])
    assert np.isnan(METRICS["ntpot"].of(c)[0])
    assert itl(c).value.size == 0
    assert icl(c).value == pytest.approx([0.020])


def test_gaps_never_run_from_one_request_into_the_next():
    c = columns(ok(0, 0.1, [0.01]), ok(1, 5.0, [0.02]))
    assert icl(c).value == pytest.approx([0.01, 0.02])
    assert icl(c).counts.tolist() == [1, 1]


def test_a_failed_request_counts_its_planned_gaps_as_infinite():
    samples = itl(columns(ok(0, 0.1, [0.01] * 3), failed(1, planned_output_tok=7)))
    assert per_token(samples) == pytest.approx([0.01] * 3 + [np.inf] * 6)


def test_half_of_all_tokens_lost_leaves_no_median_itl():
    c = columns(
        *(ok(i, 0.1, [0.01] * 15) for i in range(20)),
        *(failed(i, planned_output_tok=16) for i in range(20, 40)),
    )
    samples = itl(c)
    assert isinstance(percentiles(samples, [0.5], "s")["p50"], Absent)


def test_a_connection_opened_ahead_of_the_run_has_no_connect_time():
    assert np.isnan(connect(columns(ok(0, 0.1, [])))[0])


def test_every_metric_says_what_it_is():
    for metric in METRICS.values():
        assert all((metric.title, metric.unit, metric.formula, metric.source)), metric
