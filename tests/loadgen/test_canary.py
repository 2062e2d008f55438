"""The in-run canary: the instrument's error in this very run, at events whose sending is known."""

import os
import signal
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from burstline.loadgen.capture.capture import NO_STAMP, Capture, Reads
from burstline.loadgen.capture.drive_report import CANARY_PERIOD_S as PERIOD_S
from burstline.loadgen.capture.drive_report import CanaryReport
from burstline.loadgen.driver.canary import INDEX, REQUEST, TruthProcess, canary, due_after_s
from burstline.loadgen.driver.self_measurement import CanaryErrors
from burstline.loadgen.wire.exchange import Exchange
from burstline.loadgen.wire.wire import Wire
from burstline.measure.record.tables import record_table
from burstline.servers.host.child import Child
from burstline.servers.messages import Read
from tests.measure.making import HEAD, MS, chunk, conditions, ok, summarized
from tests.pitfalls.chain import play
from tests.truth.script import Script


def streamed(late_ns, send_ns=0):
    """Events sent every 50 ms from 1 s on, each reported so much later, and one more; the run began at 1 s.

    A send takes `send_ns`.
    """
    late_ns = [*late_ns, 0]
    sent = [1_000_000_000 + 50 * MS * k for k in range(len(late_ns))]
    before = [0, *(at + send_ns for at in sent)]
    parts = [chunk(b"data: %d %d %d\n\n" % (at, k * 1000, before[k])) for k, at in enumerate(sent)]
    parts[0] = HEAD + parts[0]
    reads = [
        Read(at + late - 1_000_000_000, None, part)
        for at, late, part in zip(sent, late_ns, parts, strict=True)
    ]
    return Capture(INDEX, 0, 0, None, 0, None, Reads.of(reads))


ROUNDING = 0.012
"""Of the histogram that errors are counted in."""


def reported(capture, t0_ns):
    errors = CanaryErrors()
    errors.add(capture, t0_ns)
    return errors.report()


def test_the_error_is_reported_minus_true_over_the_run():
    late = [30_000] * 98 + [5 * MS, 9 * MS]
    found = reported(streamed(late), 1_000_000_000)
    assert (found.n, found.max_ns) == (100, 9 * MS)
    assert found.p50_ns == pytest.approx(30_000, rel=ROUNDING)
    assert 4 * MS < found.p99_ns < 9 * MS
    assert found.cpu_s == pytest.approx(100e-6)


def test_a_report_from_within_the_send_has_no_error_and_one_from_outside_it_counts_from_its_end():
    found = reported(streamed([30_000] * 50 + [70_000] * 50 + [-5_000], send_ns=40_000), 1_000_000_000)
    assert found.p50_ns == pytest.approx(5_000, rel=ROUNDING)
    assert found.max_ns == 30_000


def canarys_summary(*found):
    """Of a run whose bounds are in order, with a driver for each of these canaries."""
    report = replace(play(Script(ttft_s=0.01, gaps_s=(0.001,)), 1).report, cpu_wait_s=None)
    reports = [replace(report, canary=each) for each in found]
    return summarized(record_table([ok(k, 0.1, [0.01]) for k in range(20)]), conditions(reports=reports))


def test_what_the_clients_own_bound_does_not_explain_is_beyond_it():
    """Every read is 30 ms late; the client says that its bytes may have come up to 25 ms before."""
    late = streamed([30 * MS] * 50)
    bounded = replace(late, reads=replace(late.reads, since_ns=np.full(len(late.reads.at_ns), 25 * MS)))
    found = reported(bounded, 1_000_000_000)
    assert found.p99_ns == pytest.approx(30 * MS, rel=ROUNDING)
    assert found.beyond_p99_ns == pytest.approx(5 * MS, rel=ROUNDING)
    honest = replace(late, reads=replace(late.reads, since_ns=np.full(len(late.reads.at_ns), 31 * MS)))
    assert reported(honest, 1_000_000_000).beyond_p99_ns == 0


def test_an_instrument_that_the_canary_contradicts_is_client_bound():
    found = CanaryReport(200, 25_000, 6 * MS, 6 * MS, 0.01, 6 * MS)
    wrong = canarys_summary(found)["verdict"]
    assert wrong["state"] == "CLIENT-BOUND"
    assert wrong["reasons"][0]["code"] == "instrument-error"
    assert "6 ms outside the client's own error bounds" in wrong["reasons"][0]["text"]
    explained = canarys_summary(replace(found, beyond_p99_ns=0))["verdict"]
    assert explained["state"] == "VALID"


@pytest.mark.parametrize("short_first", [True, False])
def test_a_canary_of_few_events_hides_no_other_drivers(short_first):
    """However wrong the few were."""
    long = CanaryReport(200, 25_000, MS, MS, 0.01, 0)
    short = CanaryReport(5, 9 * MS, 9 * MS, 9 * MS, 0.01, 9 * MS)
    both = (short, long) if short_first else (long, short)
    assert canarys_summary(*both)["instrument"]["canary_p99_s"]["point"] == pytest.approx(0.001)


def test_the_columns_error_is_what_late_reading_can_have_moved():
    rows = [replace(ok(k, 0.1, [0.01] * 3), read_error_ns=[4 * MS] * 4) for k in range(1000)]
    summary = summarized(record_table(rows))
    for name in ("ttft", "e2e", "itl", "tpot"):
        moved = [each["read_effect_s"] for each in summary["grades"][name].values()]
        assert summary["metrics"][name]["instrument_error"]["point"] == max(moved)
    assert summary["metrics"]["ttft"]["instrument_error"]["point"] == pytest.approx(0.004)
    graded = set(summary["grades"])
    assert {name for name, row in summary["metrics"].items() if "instrument_error" in row} <= graded


def test_no_error_is_reported_as_none():
    assert reported(streamed([0] * 99 + [30_000]), 1_000_000_000).p50_ns == 0


def test_events_before_the_run_and_a_run_too_short_say_nothing():
    too_short = reported(streamed([1000] * 9), 1_000_000_000)
    assert too_short.n == 9
    assert reported(replace(streamed([1000] * 100), reads=()), 0).n == 0
    client = canarys_summary(too_short)["instrument"]
    assert client["canary_p99_s"]["absent"] == "not measured: the run was too short"
    assert canarys_summary(too_short)["verdict"]["state"] == "VALID"


def test_a_kernels_stamp_takes_the_drivers_own_lag_out():
    late = streamed([40 * MS] * 20)
    stamps = late.reads.at_ns - 40 * MS + 10_000
    stamps[-1] = late.reads.at_ns[-1]
    stamped = replace(late, reads=replace(late.reads, kernel_ns=stamps))
    assert reported(stamped, 1_000_000_000).p99_ns == pytest.approx(10_000, rel=ROUNDING)
    assert (late.reads.kernel_ns == NO_STAMP).all()


def test_the_wire_reads_a_truth_process_beside_its_load():
    ended = []
    wire = Wire([], ended.extend)
    exchange = Exchange(INDEX)
    exchange.payload = REQUEST
    wire.start()
    with canary() as server:
        assert server.pid > 0
        t0_ns = time.monotonic_ns()
        wire.watch_canary(exchange, server.port, lambda _: None)
        limit_s = time.monotonic() + 40
        while len(exchange.data) < 1200 and time.monotonic() < limit_s:
            time.sleep(0.1)
        wire.close()
    assert ended == [], "it is no request of the plan"
    report = reported(exchange.capture(t0_ns, wire.offsets), t0_ns)
    assert report.n >= 10
    assert report.p50_ns < 1_000_000_000


def test_a_canary_that_is_lost_at_its_start_holds_up_no_load():
    wire, asked = Wire([], lambda ended: None), Exchange(INDEX)
    asked.payload = REQUEST
    wire.start()
    with canary() as server:
        os.kill(server.pid, signal.SIGKILL)
        wire.watch_canary(asked, server.port, lambda _: None)
        opened = threading.Event()
        wire.when_open(opened.set)
        assert opened.wait(20)
        wire.close()
    assert wire.error is None
    assert not asked.data


def test_a_canary_that_ended_at_once_is_no_error():
    with (
        Child("burstline.loadgen.driver.canary") as child,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        child.kill()
        while child.exit_code is None:
            time.sleep(0.01)
        TruthProcess(child, listener).leave_to_server(0)


def test_a_canary_that_was_lost_leaves_the_client_unchecked_and_is_told():
    lost = CanaryReport(20, 1000, 1000, 1000, 0.01, 0)
    rows = record_table([ok(k, k * 0.1, [0.01]) for k in range(20)])
    report = replace(play(Script(ttft_s=0.01, gaps_s=(0.001,)), 12).report, canary=lost)
    found = summarized(rows, conditions(reports=[report]))
    assert found["instrument"]["canary_p99_s"]["code"] == "canary-lost"
    assert "canary-lost" in [each["code"] for each in found["verdict"]["warnings"]]
    whole = summarized(rows, conditions(reports=[replace(report, canary=replace(lost, n=60))]))
    assert "canary-lost" not in [each["code"] for each in whole["verdict"]["warnings"]]


def test_a_long_stream_comes_in_parts_of_which_each_event_but_the_last_counts():
    n, parts = 6000, []
    events = [b"data: %d %d %d\n\n" % (time.monotonic_ns(), k, time.monotonic_ns()) for k in range(n)]
    wire, asked = Wire([], lambda ended: None), Exchange(INDEX)
    asked.payload = REQUEST
    asked.max_bytes = 1 << 17  # as much as a reply may be: a canary may say more
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire.start()
        wire.watch_canary(asked, server.getsockname()[1], parts.append)
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(HEAD)
            for k in range(0, n, 300):  # slower than the wire looks at how much there is
                connection.sendall(b"".join(map(chunk, events[k : k + 300])))
                time.sleep(0.06)
            limit_s = time.monotonic() + 20
            while wire.reader.n_bytes < len(HEAD) + sum(len(chunk(event)) for event in events):
                assert time.monotonic() < limit_s
                time.sleep(0.01)
            wire.close()
    assert len(parts) >= 3
    errors = CanaryErrors()
    for part in parts:
        errors.add(part.capture(0, wire.offsets), 0)
    n_said = sum(len(part.data) > len(HEAD) for part in parts)
    assert errors.report().n == n - n_said
    assert max(len(part.data) for part in parts) < 1 << 18
    assert asked.n_bytes == wire.reader.n_bytes


def test_the_canarys_gaps_are_of_many_sizes():
    gaps_s = np.diff([due_after_s(k) for k in range(1, 2000)])
    assert 0.5 * PERIOD_S <= gaps_s.min() < 0.6 * PERIOD_S < 1.4 * PERIOD_S < gaps_s.max() <= 1.5 * PERIOD_S
    assert len(set(np.round(gaps_s * 1000).tolist())) > 15
    assert gaps_s.mean() == pytest.approx(PERIOD_S, rel=1e-3)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux alone keeps processes to cores")
def test_the_truth_process_leaves_the_server_its_cores_where_others_are_left():
    cores = sorted(os.sched_getaffinity(0))
    with canary() as server:
        server.leave_to_server(len(cores))
        assert sorted(os.sched_getaffinity(server.pid)) == cores, "none is left: it shares them"
        server.leave_to_server(len(cores) - 1)
        assert sorted(os.sched_getaffinity(server.pid)) == cores[-1:]


def test_the_summary_says_what_the_canary_found_and_what_it_cost():
    played = play(Script(ttft_s=0.01, gaps_s=(0.001,)), 12)
    report = replace(played.report, canary=CanaryReport(200, 25_000, 70_000, 90_000, 0.01, 0), wall_s=10.0)
    rows = record_table([ok(k, 0.1, [0.01]) for k in range(20)])
    client = summarized(rows, conditions(reports=[report]))["instrument"]
    assert client["canary_p99_s"]["point"] == pytest.approx(70e-6)
    assert client["canary_p99_s"]["n"] == 200
    assert 0 < client["canary_cpu_fraction"]["point"] <= 0.001
    worse = replace(report, canary=CanaryReport(300, 20_000, 80_000, 85_000, 0.01, 0))
    assert summarized(rows, conditions(reports=[report, worse]))["instrument"]["canary_p99_s"]["n"] == 300
    none = summarized(rows, conditions())["instrument"]
    assert none["canary_p99_s"]["code"] == "no-canary"
    assert np.isfinite(client["canary_p50_s"]["point"])


@pytest.mark.slow
@pytest.mark.measures
def test_the_canary_uses_less_than_one_percent_of_two_cores():
    """By its CPU time per event and their period: what a core needs to sleep, stamp and send."""
    wire, exchange = Wire([], lambda ended: None), Exchange(INDEX)
    exchange.payload = REQUEST
    wire.start()
    with canary() as server:
        t0_ns = time.monotonic_ns()
        wire.watch_canary(exchange, server.port, lambda _: None)
        time.sleep(3)
        wire.close()
        lasted_s = (time.monotonic_ns() - t0_ns) / 1e9
    report = reported(exchange.capture(t0_ns, wire.offsets), t0_ns)
    assert report.n > 100
    assert 0 < report.cpu_s / lasted_s < 2 * 0.01
