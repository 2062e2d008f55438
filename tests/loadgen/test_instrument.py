from dataclasses import replace

import pytest

from loadgen.metrics.telemetry_query import Watched
from loadgen.record.columns import columns_of
from loadgen.record.tables import record_table
from loadgen.record.telemetry import Telemetry
from loadgen.stats.estimates import Absent
from loadgen.verdict.instrument import instrument, read_error_s
from tests.loadgen.making import MS, ok


def columns(*records):
    return columns_of(record_table(records))


def stamped(ns_ms, lag_ms):
    record = ok(0, 0.1, [0.01] * (len(ns_ms) - 1))
    return replace(
        record, token_ns=[t * MS for t in ns_ms], read_lag_ns=[-1 if x is None else x * MS for x in lag_ms]
    )


def test_an_event_alone_in_its_read_has_the_kernels_own_time():
    assert read_error_s(columns(stamped([100, 110, 120], [3, 50, 0])), 1.0).tolist() == [0, 0, 0]


def test_events_that_share_a_read_may_have_come_any_time_since_the_read_before():
    # Read at 105 (stamp 100, 5 late); the next holds two events and is stamped 140: 35 ms are not known.
    error_s = read_error_s(columns(stamped([100, 140, 140], [5, 0, 0])), 1.0)
    assert error_s == pytest.approx([0, 0.035, 0.035])


def test_no_event_waited_longer_than_the_longest_pass():
    assert read_error_s(columns(stamped([100, 140, 140], [0, 0, 0])), 0.004) == pytest.approx(
        [0, 0.004, 0.004]
    )


def test_without_kernel_stamps_the_longest_pass_bounds_every_event():
    assert read_error_s(columns(stamped([100, 110], [None, None])), 0.002) == pytest.approx([0.002, 0.002])


def test_the_first_events_of_two_requests_at_one_moment_do_not_share_a_read():
    two = [stamped([100], [0]), replace(stamped([100], [0]), index=1)]
    assert read_error_s(columns(*two), 1.0).tolist() == [0, 0]


def test_lateness_counts_from_due_in_an_open_loop_and_from_dispatch_in_a_closed_one():
    record = replace(ok(0, 0.1, []), dispatched_ns=900_000, sent_ns=1_000_000)
    watched = Watched(Telemetry.empty(), 1.0)
    by_due = instrument(columns(record), (), watched, closed_loop=False)
    by_dispatch = instrument(columns(record), (), watched, closed_loop=True)
    assert by_due.send_lag_p50_s.point == pytest.approx(1e-3)
    assert by_dispatch.send_lag_p50_s.point == pytest.approx(1e-4)


def test_the_peak_is_the_most_events_within_any_second():
    times_ms = [[0, 700, 1600, 1650, 1690, 2650], [1700]]
    records = [replace(stamped(ms, [0] * len(ms)), index=i) for i, ms in enumerate(times_ms)]
    found = instrument(columns(*records), (), Watched(Telemetry.empty(), 1.0), closed_loop=False)
    assert found.peak_events_per_s.point == 4  # from 1600 ms, or from 1650: 2650 is outside


def test_what_nobody_stamped_reported_or_watched_is_absent_with_its_reason():
    found = instrument(
        columns(stamped([100], [None])), (), Watched(Telemetry.empty(), 1.0), closed_loop=False
    )
    for name in ("read_lag_p99_s", "client_cpu_s", "client_peak_bytes", "others_cpu_fraction", "max_pass_s"):
        assert isinstance(found.figure(name), Absent)
        assert found.figure(name).reason
    assert found.kernel_stamps.point == 0
