from dataclasses import replace

import pytest

from burstline.measure.metrics.instrument import instrument
from burstline.measure.record.columns import columns_of
from burstline.measure.record.tables import record_table, telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.stats.estimates import Absent
from burstline.servers.host.telemetry import Row
from tests.measure.making import MS, ok


def columns(*records):
    return columns_of(record_table(records))


def stamped(ns_ms, lag_ms):
    record = ok(0, 0.1, [0.01] * (len(ns_ms) - 1))
    return replace(
        record, token_ns=[t * MS for t in ns_ms], read_lag_ns=[-1 if x is None else x * MS for x in lag_ms]
    )


@pytest.mark.parametrize("closed_loop", [False, True])
def test_lateness_counts_from_due_also_where_a_turn_waited_for_the_client(closed_loop):
    """A turn of a session in a closed loop is due when its pause ends, before the client dispatches it."""
    record = replace(ok(0, 0.1, []), dispatched_ns=900_000, sent_ns=1_000_000)
    found = instrument(columns(record), (), Telemetry({}, []), closed_loop=closed_loop, n_cores=2)
    assert found.send_lag_p50_s.point == pytest.approx(1e-3)


def test_an_event_that_others_follow_in_its_read_may_have_waited_since_the_read_before():
    """The first two of three came with the third, whose stamp is exact: 23.9 ms for 97 ms is no lateness."""
    record = replace(stamped([100, 100, 100], [24, 24, 24]), read_error_ns=[73 * MS, 50 * MS, 0])
    found = instrument(columns(record), (), Telemetry({}, []), closed_loop=False, n_cores=2)
    assert (found.read_lag_max_s.point, found.read_lag_p50_s.point) == pytest.approx((0.097, 0.074))
    unknown = replace(stamped([100, 100], [24, None]), read_error_ns=[-1, 5 * MS])
    found = instrument(columns(unknown), (), Telemetry({}, []), closed_loop=False, n_cores=2)
    assert (found.read_lag_max_s.point, found.read_lag_max_s.n) == (pytest.approx(0.024), 1)


def test_the_peak_is_the_most_events_within_any_second():
    times_ms = [[0, 700, 1600, 1650, 1690, 2650], [1700]]
    records = [replace(stamped(ms, [0] * len(ms)), index=i) for i, ms in enumerate(times_ms)]
    found = instrument(columns(*records), (), Telemetry({}, []), closed_loop=False, n_cores=2)
    assert found.peak_events_per_s.point == 4  # from 1600 ms, or from 1650: 2650 is outside


def test_what_nobody_stamped_reported_or_watched_is_absent_with_its_reason():
    found = instrument(columns(stamped([100], [None])), (), Telemetry({}, []), closed_loop=False, n_cores=2)
    for name in ("read_lag_p99_s", "client_cpu_s", "client_peak_bytes", "others_cpu_fraction", "max_pass_s"):
        assert isinstance(found.figure(name), Absent)
        assert found.figure(name).reason
    assert found.kernel_stamps.point == 0


def quota(*throttled_s):
    """Readings a second apart, the first a second before the load of ten."""
    rows = [Row((k - 1) * 1000 * MS, "cgroup", "throttled_s", value) for k, value in enumerate(throttled_s)]
    return Telemetry.of(telemetry_table(rows)).over(10.0).throttled_fraction()


def test_what_a_quota_took_counts_within_the_load():
    assert quota(0.0, 5.0, 5.0, 5.4, 5.8, 5.8).point == pytest.approx(0.8 / 4.0)  # of 4 s between readings


def test_a_client_that_a_quota_stopped_on_several_cpus_was_stopped_all_the_time_at_most():
    assert quota(0.0, 0.0, 2.0, 4.0).point == 1.0


def test_a_client_without_a_quota_was_never_watched_for_one():
    assert isinstance(Telemetry({}, []).throttled_fraction(), Absent)


def watched_cpu(values, *, started=False, n_events=5000, note=None):
    """Of a load of ten seconds; the readings are a second apart, from its start."""
    rows = [Row(k * 1000 * MS, "server", "cpu_s", value) for k, value in enumerate(values)]
    rows += [Row(0, "server", "*", None, note)] if note else []
    found = Telemetry.of(telemetry_table(rows or [Row(0, "host", "n_cpus", 2.0)])).over(10.0)
    c = columns(stamped([100 + k for k in range(n_events)], [0] * n_events))
    return instrument(c, (), found, closed_loop=False, n_cores=2, started=started).server_cpu_s


def test_what_uses_no_cpu_while_events_come_is_no_server():
    assert watched_cpu([7.0 + k / 2 for k in range(11)]).point == pytest.approx(5.0)
    forwarder = watched_cpu([7.0 + k / 1000 for k in range(11)])
    assert (forwarder.code, "5,000 events: it passes them on" in forwarder.reason) == ("unwatched", True)
    assert watched_cpu([7.0] * 11, started=True).point == 0, "what we started is the server"
    assert watched_cpu([7.0]).code == "too-short"
    unseen = watched_cpu([], note="the server is not watched: ssh (process 7) passes its requests on")
    assert (unseen.code, unseen.reason.partition(": ")[0]) == ("unwatched", "the server is not watched")
