from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.measure.metrics.server import memory
from burstline.measure.metrics.slo import parse_slo, spoilt_by
from burstline.measure.metrics.throughput import (
    ONE_RUN,
    Window,
    burst,
    concurrency,
    in_flight_steps,
    read_error,
    server_queue,
    stalls,
    throughputs,
    whole_run,
)
from burstline.measure.record.columns import columns_of
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.summary import Concurrency, Summary
from burstline.measure.record.tables import record_table, telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import State, Verdict
from burstline.measure.stats.estimates import Absent, Estimate
from burstline.measure.summarize import summarize
from burstline.measure.verdict.judge import caveats
from burstline.servers.host.telemetry import Row, missing
from tests.measure.making import MS, conditions, failed, ok


def columns(*records):
    return columns_of(record_table(records))


def rng():
    return np.random.default_rng(0)


def figures_of(section):
    return [row.figure for row in section.rows()]


def test_throughput_runs_from_the_first_request_sent_to_the_last_token():
    c = columns(ok(0, 0.1, [0.4]), ok(1, 0.2, [0.801]))
    window = whole_run(c)
    assert window is not None
    assert (window.start_s, window.end_s) == (0.001, 1.001)
    found = throughputs(c)
    assert found.output_tok_per_s.point == pytest.approx(4.0)
    assert found.input_tok_per_s.point == pytest.approx(8.0)
    assert found.total_tok_per_s.point == pytest.approx(12.0)
    assert found.requests_per_s.point == pytest.approx(2.0)
    assert {(figure.low, figure.high, figure.note) for figure in figures_of(found)} == {(None, None, ONE_RUN)}


def read_late(record, *bounds_ms):
    return replace(record, read_error_ns=[round(ms * MS) for ms in bounds_ms])


@pytest.mark.parametrize(
    ("bounds_ms", "window", "share"),
    [
        ((0, 0), None, 0.0),
        ((0, 20), None, 0.02),  # the last token may have come 20 ms of 1 s earlier
        ((20, 0), None, 0.0),  # inside, it moves no edge
        ((0, 30), Window(0.001, 0.98), 1 / 2),  # of the requests that end in the window there may be one more
        ((0, 30), Window(0.001, 0.96), 0.0),  # it was behind the edge in any case
        ((-1e-6, -1e-6), None, None),
    ],
)
def test_late_reads_move_rates_by_what_they_move_over_the_windows_edges(bounds_ms, window, share):
    c = columns(ok(0, 0.1, [0.1]), ok(1, 0.3, [0.1]), read_late(ok(2, 0.5, [0.501]), *bounds_ms))
    found = read_error(c, window or whole_run(c), 0.0)
    if share is None:
        assert isinstance(found, Absent)
    else:
        assert found.point == pytest.approx(share, abs=1e-9)


def test_rates_that_late_reads_may_have_changed_by_more_than_five_percent_decide_nothing():
    """Each percentile may be right: the window is short, and its end unknown by as much."""
    late = [read_late(ok(k, 0.2, [0.5, 0.301]), 0, 0, 60 if k == 39 else 0) for k in range(40)]
    summary = summarize(columns(*late), **conditions())
    assert summary.throughput.read_error_fraction.point == pytest.approx(0.06, abs=0.001)
    assert (summary.verdict.state, summary.verdict.reasons[0].code) == (State.CLIENT_BOUND, "read-lag")
    assert "may have changed the rates by 6%" in summary.verdict.reasons[0].text
    assert spoilt_by(parse_slo("output_tok_per_s>=10"), summary)
    assert not spoilt_by(parse_slo("ttft.p50<=1s"), summary)


def test_a_failed_request_brings_no_throughput_though_some_of_its_tokens_came():
    cut = replace(ok(1, 0.2, [0.1] * 5), outcome="reset", output_tok=None)
    alone, together = (
        throughputs(columns(*records)) for records in ([ok(0, 0.1, [0.9])], [ok(0, 0.1, [0.9]), cut])
    )
    assert together.output_tok_per_s.point == pytest.approx(alone.output_tok_per_s.point)


FAILING_LOADS = {
    "a burst": {},
    "a closed loop": {"concurrency": 4},
    "an open loop of varying rate": {"arrivals": ("steps:5x30,10x30", 5.0)},
}


@pytest.mark.parametrize("load", FAILING_LOADS.values(), ids=FAILING_LOADS)
@pytest.mark.parametrize("outcome", ["timeout", "reset", "http_500"])
def test_failures_are_a_part_of_the_load_and_of_its_end(load, outcome):
    """Two successes end within 0.5 s, two failures within 4 s of the first send: 0.5/s, and not 4/s."""
    spread = MS if load else 0
    good = [replace(ok(k, 0.1, [0.401]), due_ns=k * spread) for k in range(2)]
    bad = [replace(failed(k, outcome), sent_ns=MS, due_ns=k * spread) for k in range(2, 4)]
    bad = [replace(each, closed_ns=round(at * 1e9) + MS) for each, at in zip(bad, (2, 4), strict=True)]
    summary = summarize(columns(*good, *bad), **conditions(**load))
    assert summary.window.start_s.point == 0.001
    assert summary.window.end_s.point == pytest.approx(4.001)
    assert summary.throughput.requests_per_s.point == pytest.approx(2 / 4)
    assert summary.throughput.output_tok_per_s.point == pytest.approx(4 / 4)
    if not load:
        assert summary.burst.drain_s.point == pytest.approx(4.001)


def test_throughput_is_absent_where_tokens_were_never_counted():
    found = throughputs(columns(replace(ok(0, 0.1, [0.4]), output_tok=None), ok(1, 0.1, [0.4])))
    assert isinstance(found.output_tok_per_s, Absent)
    assert isinstance(found.requests_per_s, Estimate)


def test_without_a_success_nothing_is_a_rate():
    found = throughputs(columns(failed(0)))
    assert all(isinstance(figure, Absent) for figure in figures_of(found))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), min_size=1, max_size=40))
def test_the_sweep_line_counts_what_is_in_flight(spans):
    start_s, took_s = (np.array(column, dtype=float) for column in zip(*spans, strict=True))
    end_s = start_s + took_s
    at_s, in_flight = in_flight_steps(start_s, end_s)
    for moment in np.arange(0, 100) + 0.5:
        by_hand = ((start_s <= moment) & (moment < end_s)).sum()
        k = np.searchsorted(at_s, moment, side="right") - 1
        assert (in_flight[k] if k >= 0 else 0) == by_hand


def test_an_end_makes_room_before_a_start_at_the_same_moment():
    _, in_flight = in_flight_steps(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    assert in_flight.max() == 1


def test_concurrency_of_two_that_overlap_by_half():
    first = replace(ok(0, 0.1, []), sent_ns=0, closed_ns=2_000_000_000)
    second = replace(ok(1, 0.1, []), sent_ns=1_000_000_000, closed_ns=3_000_000_000)
    found = concurrency(columns(first, second), Window(0.0, 3.0))
    assert (found.mean.point, found.max.point) == (pytest.approx(4 / 3), 2)


def test_a_stall_is_longer_than_200_ms_and_than_five_median_gaps():
    found = stalls(columns(ok(0, 0.1, [0.02] * 9 + [0.3]), ok(1, 0.1, [0.02] * 10)))
    assert [found.figure(name).point for name in ("count", "request_fraction", "threshold_s")] == [
        1,
        0.5,
        0.2,
    ]
    assert found.total_s.point == pytest.approx(0.3)
    slow = stalls(columns(ok(0, 0.1, [0.1] * 9 + [0.3])))
    assert (slow.count.point, slow.threshold_s.point) == (0, pytest.approx(0.5))


def test_ttft_grows_along_the_queue_by_the_time_one_prefill_takes():
    c = columns(*(ok(i, 0.5 + 0.02 * i, []) for i in range(100)))
    found = burst(c)
    assert found.ttft_slope_s_per_request.point == pytest.approx(0.02)
    assert found.prefill_requests_per_s.point == pytest.approx(50)
    assert found.prefill_tok_per_s.point == pytest.approx(200)
    assert found.first_wave_s.point == pytest.approx(0.5)
    assert found.drain_s.point == pytest.approx(0.5 + 0.02 * 99)


def test_a_reply_that_came_at_once_does_not_bend_the_slope():
    """Its first token came with its last: that says nothing of when it was admitted."""
    streamed = [ok(i, 0.5 + 0.02 * i, [0.1] * 9) for i in range(60)]
    found = burst(columns(*streamed, ok(60, 9.0, [], [10])))
    assert found.ttft_slope_s_per_request.point == pytest.approx(0.02)


def test_a_burst_that_was_cut_off_never_drained():
    records = [ok(i, 0.5, []) for i in range(20)]
    cut = replace(records[0], outcome="cancelled")
    assert burst(columns(*records[1:], cut)).drain_s.code == "not-drained"


def test_the_servers_queue_counts_while_the_load_ran():
    rows = [Row(at * MS, "engine", "waiting", n) for at, n in ((-5, 9.0), (0, 4.0), (500, 2.0), (1500, 9.0))]
    rows += [Row(at * MS, "engine", "running", n) for at, n in ((0, 3.0), (500, 2.0))]
    found = server_queue(Telemetry.of(telemetry_table(rows)).over(1.0))
    assert {name: figure.point for name, figure in found.items()} == {
        "server_running_max": 3,
        "server_waiting_max": 4,
        "server_waiting_mean": 3,
        "server_full_fraction": 0.5,
    }
    unknown = server_queue(Telemetry({}, []))
    assert unknown.pop("server_full_fraction") is None
    assert all(isinstance(figure, Absent) for figure in unknown.values())


def test_what_waited_on_average_is_the_servers_own_sum_where_it_has_one():
    """Four readings said 7.8; 64 requests waited 0.367 s each in 3.755 s, which is 6.3."""
    rows = [
        Row(at * MS, "engine", "waiting", n) for at, n in ((-5, 0.0), (500, 9.0), (1500, 6.6), (4000, 0.0))
    ]
    sums = [Row(at * MS, "engine", "queue_sum", s) for at, s in ((-5, 2.0), (500, 9.0), (4000, 25.49))]
    by_gauge, by_sum = (
        server_queue(Telemetry.of(telemetry_table(own)).over(3.755))["server_waiting_mean"]
        for own in (rows, rows + sums)
    )
    assert (by_gauge.point, by_gauge.note) == (pytest.approx(7.8), "the mean of 2 readings of its gauge")
    assert (by_sum.point, by_sum.note) == (pytest.approx(6.26, abs=0.01), None)


def test_a_gauge_that_met_no_request_does_not_say_that_none_ran():
    """The server of 80 short requests, read between them each time, "ran at most 0"."""
    names = ("running", "waiting", "kv_used_fraction")
    rows = [Row(at * MS, "engine", name, 0.0) for at in (0, 500) for name in names]
    watched = Telemetry.of(telemetry_table(rows)).over(1.0)
    found = {**server_queue(watched), "kv_peak_fraction": memory(watched, [], None).kv_peak_fraction}
    for name in ("server_running_max", "server_waiting_max", "kv_peak_fraction"):
        assert found[name] == Absent("no reading of its gauge met a request"), name
    assert found["server_waiting_mean"].point == 0


@pytest.mark.parametrize(
    ("running", "waiting", "waited_s", "most"),
    [
        (16, 54, 20, 54),
        (16, 0, 0, 0),
        (16, 20, 20, 20),
        (0, 0, 20, "no reading of its gauge met a request"),
        (0, 5, 20, "the readings of its gauge missed the longest queue"),
        (16, 0, 20, "the readings of its gauge missed the longest queue"),
        (16, 19, 20, "the readings of its gauge missed the longest queue"),
        (16, None, 20, "not reported by the engine"),
    ],
)
def test_no_more_wait_on_average_than_at_most(running, waiting, waited_s, most):
    """The mean is of the server's own sum of waits: what its few readings met cannot be less."""
    gauges = {"running": running, "waiting": waiting}
    rows = [Row(500 * MS, "engine", name, n) for name, n in gauges.items() if n is not None]
    rows += [Row(at * MS, "engine", "queue_sum", s) for at, s in ((-5, 1.0), (1000, 1.0 + waited_s))]
    found = server_queue(Telemetry.of(telemetry_table(rows)).over(1.0))
    shown = found["server_waiting_max"]
    assert (shown.reason if isinstance(shown, Absent) else shown.point) == most
    assert found["server_waiting_mean"].point == waited_s


GONE = "GET http://127.0.0.1:8103/metrics: [Errno 111] Connection refused"


@pytest.mark.parametrize(
    ("read_ms", "complaint", "absent"),
    [
        ([-700, 300], None, Absent("the load was too short to watch", "too-short")),
        ([-700, 300], GONE, Absent(GONE, "unwatched")),
        ([-700], GONE, Absent(GONE, "unwatched")),
        ([], GONE, Absent(GONE, "unwatched")),
        ([], None, Absent("not reported by the engine", "unwatched")),
        ([-700, 300, 600], GONE, None),
    ],
)
def test_a_server_that_died_was_not_too_short_to_watch(read_ms, complaint, absent):
    """Killed 1.8 s into a load of 10 s: its queue was read once, then its metrics were gone."""
    rows = [Row(at * MS, "engine", name, 1.0) for at in read_ms for name in ("running", "waiting")]
    rows += [missing("engine", complaint)] if complaint else []
    rows += [Row(0, "host", "busy_s", 1.0)]
    watched = Telemetry.of(telemetry_table(rows)).over(10.0)
    for shown in (server_queue(watched)["server_waiting_mean"], watched.fraction("engine", "waiting", 1.0)):
        assert shown == absent if absent else isinstance(shown, Estimate)


def test_the_plateau_lies_between_a_tenth_and_nine_tenths_of_the_first_tokens():
    c = columns(*(ok(i, 0.01 * (i + 1), []) for i in range(101)))
    # First tokens from 0.01 to 1.01 s, one each 10 ms: 81 of them between 0.11 and 0.91 s.
    assert burst(c).plateau_tok_per_s.point == pytest.approx(81 / 0.8, rel=0.02)


def test_tokens_of_a_failed_request_are_no_part_of_the_plateau():
    good = [ok(i, 0.01 * (i + 1), []) for i in range(101)]
    cut = replace(ok(101, 0.4, [0.001] * 50), outcome="reset")
    alone, together = (burst(columns(*records)).plateau_tok_per_s for records in (good, [*good, cut]))
    assert together == alone


def test_what_is_no_burst_has_no_burst_figures():
    spread = [replace(ok(i, 1.0, []), due_ns=i * 10_000_000) for i in range(20)]
    assert all(isinstance(figure, Absent) for figure in figures_of(burst(columns(*spread))))


@pytest.mark.parametrize("behind_s", [0.0, 0.1, 0.3, 1.0])
def test_the_time_behind_the_last_token_is_known(behind_s):
    """Each is sent at 1 ms, and has its last token at 1 s."""
    rows = [replace(ok(k, 0.5, [0.5]), closed_ns=round((1 + behind_s) * 1e9)) for k in range(4)]
    rows.append(replace(failed(4), sent_ns=0, closed_ns=9 * 10**9))
    share = concurrency(columns(*rows), Window(0.0, 3.0)).open_after_fraction
    assert share.point == pytest.approx(behind_s / (0.999 + behind_s))
    summary = Summary(counts={"ok": 4, "planned": 4}, metrics={}, verdict=Verdict(State.VALID))
    summary = replace(summary, concurrency=Concurrency(open_after_fraction=share))
    assert any(
        each.code == "left-open" for each in caveats(summary, Manifest(engine="vllm", workload="burst"))
    ) == (behind_s > 0.05)


def served(n, slots, prefill_s, decode_s, at_once=None):
    """The records of n requests at so many slots; `at_once` users, None: all are sent at 0."""
    rng, free_s, ends_s, rows = np.random.default_rng(n), [0.0] * slots, [], []
    for k in range(n):
        sent_s = 0.0 if at_once is None or k < at_once else sorted(ends_s)[k - at_once]
        slot = free_s.index(min(free_s))
        first_s = max(sent_s, free_s[slot]) + prefill_s * rng.uniform(0.8, 1.2)
        free_s[slot] = first_s + decode_s * rng.uniform(0.8, 1.2)
        ends_s.append(free_s[slot])
        times = {"due_ns": sent_s, "sent_ns": sent_s, "dispatched_ns": sent_s, "closed_ns": ends_s[-1]}
        row = replace(ok(k, 1.0, [1.0]), token_ns=[round(at * 1e9) for at in (first_s, ends_s[-1])])
        rows.append(replace(row, **{name: round(at * 1e9) for name, at in times.items()}))
    return columns(*rows)


STREAMS = {
    "one at a time": (served(16, 1, 0.05, 0.5), 1),
    "one at a time, closed loop": (served(32, 1, 0.05, 0.5, 4), 1),
    "five of forty": (served(40, 5, 0.05, 0.5), 5),
    "five of sixteen users": (served(64, 5, 0.02, 0.5, 16), 5),
    "32 of 100": (served(100, 32, 0.005, 0.5), 32),
    "a place for each": (served(16, 16, 0.05, 0.5), None),
    "a place for each user": (served(64, 8, 0.05, 0.5, 8), None),
    "half of the time is prefill": (served(200, 8, 0.3, 0.3, 8), None),
    "half of the time is prefill, of many": (served(2000, 200, 0.3, 0.3, 200), None),
}


@pytest.mark.parametrize(("c", "most"), STREAMS.values(), ids=STREAMS)
def test_the_replies_show_how_many_stream_at_once(c, most):
    """R41, R47: where no gauge of a queue is there."""
    found = concurrency(c, Window(0.0, 1e4)).streaming_max
    assert (found and found.point) == most
