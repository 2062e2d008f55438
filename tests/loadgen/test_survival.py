import dataclasses

import numpy as np
import pytest

from loadgen.metrics.summary import NONE_CUT_OFF, survival
from loadgen.record.columns import columns_of
from loadgen.record.tables import record_table
from loadgen.stats.estimates import Absent, Estimate
from loadgen.stats.kaplan_meier import curve
from tests.loadgen.making import failed, ok


def test_the_curve_by_hand():
    """Ends at 1 and 3, one lost sight of at 2, of four."""
    found = curve(np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, True, False]))
    assert found.moments.tolist() == [1.0, 3.0]
    assert found.running == pytest.approx([3 / 4, 3 / 4 * 1 / 2])


def test_with_nobody_cut_off_it_is_the_plain_distribution():
    values = np.random.default_rng(0).exponential(size=200)
    found = curve(values, np.ones(200, dtype=bool))
    assert found.running == pytest.approx(1 - np.arange(1, 201) / 200)
    assert found.quantile(0.5) == np.sort(values)[99]


def test_the_interval_holds_the_median_of_19_in_20_though_a_third_was_cut_off():
    rng = np.random.default_rng(1)
    covered = naive_high = 0
    for _ in range(1000):
        latency, patience = rng.exponential(size=150), rng.uniform(0, 3, 150)
        ended = latency <= patience
        low, high = curve(np.minimum(latency, patience), ended).interval(0.5)
        covered += low <= np.log(2) <= high
        naive_high += np.median(latency[ended]) < np.log(2)
    assert 0.93 <= covered / 1000 <= 0.97
    assert naive_high / 1000 > 0.95, "those that ended are the fast ones"


def given_up(index, after_s, outcome="timeout"):
    return dataclasses.replace(failed(index, outcome), sent_ns=0, closed_ns=round(after_s * 1e9))


def test_what_was_cut_off_counts_for_as_long_as_it_ran_and_other_failures_for_ever():
    """60 end after 1 s, 20 after 3 s; 10 were given up after 2 s and 10 met an error."""
    records = [ok(k, 1.0, []) for k in range(60)] + [ok(k, 0.5, [2.5]) for k in range(60, 80)]
    records += [given_up(k, 2) for k in range(80, 90)] + [
        given_up(k, 0.005, "http_500") for k in range(90, 100)
    ]
    found = survival(columns_of(record_table(records)))["e2e"]
    assert isinstance(found.p50, Estimate)
    assert (found.p50.point, found.p50.n) == (0.999, 100)
    # 40 run on after 1 s, 30 of them after 2 s, and 20 of those end at 3 s: 0.4 / 3 of all never do.
    assert found.p90 == Absent("13.4% had not ended when they were cut off")


def test_who_waited_in_vain_for_a_connection_waited_too_and_who_never_set_out_did_not():
    waited = [dataclasses.replace(given_up(k, 5), sent_ns=None) for k in range(40)]
    stayed = [failed(k, "not_sent") for k in range(40, 60)]
    refused = [failed(60, "connect")]
    found = survival(
        columns_of(record_table([*waited, *stayed, *refused, *(ok(k, 1.0, []) for k in range(61, 90))]))
    )
    assert found["e2e"].p50 == Absent("58.6% had not ended when they were cut off")


def test_a_first_token_that_came_before_the_cut_is_known():
    cut = dataclasses.replace(ok(0, 0.2, [5.0]), outcome="cancelled")
    found = survival(columns_of(record_table([cut, *(ok(k, 0.2, [0.1]) for k in range(1, 20))])))
    assert found["ttft"].p50.point == 0.199
    assert found["e2e"].p50.point == pytest.approx(0.299)


def test_without_a_cut_there_is_nothing_to_say():
    assert survival(columns_of(record_table([ok(0, 1.0, [])])))["e2e"].p50 is NONE_CUT_OFF
