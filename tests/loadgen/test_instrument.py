from dataclasses import replace

import pytest

from loadgen.record.columns import columns_of
from loadgen.record.tables import record_table
from loadgen.record.telemetry import Telemetry, Watched
from loadgen.stats.estimates import Absent
from loadgen.verdict.instrument import instrument
from tests.loadgen.making import MS, ok


def columns(*records):
    return columns_of(record_table(records))


def stamped(ns_ms, lag_ms):
    record = ok(0, 0.1, [0.01] * (len(ns_ms) - 1))
    return replace(
        record, token_ns=[t * MS for t in ns_ms], read_lag_ns=[-1 if x is None else x * MS for x in lag_ms]
    )


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
