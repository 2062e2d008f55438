from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.measure.record import tables
from burstline.measure.record.columns import Columns, columns_of
from burstline.measure.record.telemetry import Telemetry
from burstline.reports.figures import run_figures
from burstline.reports.model.comparison import sending_order
from burstline.reports.page import sections
from burstline.servers.host.telemetry import Row
from tests.reports import synthetic


@pytest.fixture(scope="module")
def columns() -> Columns:
    return columns_of(tables.record_table(synthetic.records(n=60, n_failed=5)))


@given(st.floats(1e-3, 1e5))
def test_bins_are_round_and_few_and_the_last_ends_with_the_run(end_s):
    edges = run_figures.bin_edges(end_s)
    assert len(edges) - 1 <= 200
    assert edges[-1] == end_s
    assert 0 < edges[-1] - edges[-2] <= edges[1] * (1 + 1e-6)
    assert f"{edges[1]:.0e}"[0] in "125"


def test_a_rate_in_the_last_bin_is_over_what_of_it_the_run_lasted():
    """581 tokens in the last 2.35 s of a run are 248 tok/s, not 58."""
    edges = run_figures.bin_edges(42.345, 8)
    assert edges.tolist() == [0, 10, 20, 30, 40, 42.345]
    record = replace(synthetic.records(n=1)[0], token_ns=(1_000_000_000, 41_000_000_000), token_n=(1, 581))
    c = columns_of(tables.record_table([record]))
    assert run_figures.tokens_per_s(c, edges)[-1] == pytest.approx(581 / 2.345)


@pytest.mark.parametrize(("end_s", "last"), [(10.05, [9.5, 10.05]), (10.4, [10.0, 10.4])])
def test_a_rest_of_fewer_than_three_steps_is_no_bin_of_its_own(end_s, last):
    """A token in its 50 ms would be a peak of twice the rate."""
    token_ns = tuple(range(int(end_s * 1e9), 0, -100_000_000))[::-1]
    record = synthetic.records(n=1)[0]
    record = replace(record, token_ns=token_ns, token_n=(1,) * len(token_ns), closed_ns=token_ns[-1])
    c = columns_of(tables.record_table([record]))
    edges = sections._edges(SimpleNamespace(columns=c))
    assert edges[-2:].tolist() == last
    assert run_figures.tokens_per_s(c, edges).max() < 13


def test_tokens_per_second_add_up_to_all_tokens(columns):
    edges = run_figures.bin_edges(float(np.nanmax(columns.closed_s)))
    assert (run_figures.tokens_per_s(columns, edges) * np.diff(edges)).sum() == pytest.approx(55 * 64)


def test_in_flight_is_the_most_at_once_in_each_bin(columns):
    edges = run_figures.bin_edges(float(np.nanmax(columns.closed_s)))
    most = run_figures.in_flight(columns, edges)
    instants = np.concatenate([columns.sent_s, edges[:-1]])
    at_once = [((columns.sent_s <= t) & (columns.closed_s > t)).sum() for t in instants]
    bins = np.searchsorted(edges, instants, "right") - 1
    expected = [max(n for n, b in zip(at_once, bins, strict=True) if b == k) for k in range(len(most))]
    assert most.tolist() == expected


def test_a_level_is_shown_in_the_bin_in_which_it_was_read_and_in_no_other():
    """A gauge is read once a second: carried over bins of 0.2 s, 3 requests ran where 1 was in flight."""
    rows = [
        Row(-10, "engine", "running", 7.0),
        Row(1_000_000_000, "engine", "running", 3.0),
        Row(3_100_000_000, "engine", "running", 5.0),
        Row(3_900_000_000, "engine", "running", 4.0),
        Row(5_100_000_000, "engine", "running", 8.0),
        Row(0, "server", "running", 9.0),
    ]
    found = run_figures.level(Telemetry.of(tables.telemetry_table(rows)), "engine", "running", np.arange(6.0))
    np.testing.assert_array_equal(found, [np.nan, 3.0, np.nan, 5.0, np.nan])


def test_what_was_never_sent_comes_last_in_the_order_of_sending():
    rows = synthetic.records(n=3)
    table = tables.record_table([replace(rows[0], sent_ns=None), rows[1], rows[2]])
    assert sending_order(columns_of(table)).tolist() == [1, 2, 0]


def test_a_step_is_a_gap_such_that_half_of_the_time_between_tokens_is_in_longer_ones(burst):
    c = burst.columns
    gaps = np.diff(c.event_s)[c.follows[1:]]
    step_s = run_figures.step(c)
    assert 5 * np.median(gaps) < step_s < gaps.max(), "the long steps of prefill, not the short ones after it"
    assert gaps[gaps <= step_s].sum() == pytest.approx(gaps.sum() / 2, rel=0.02)
