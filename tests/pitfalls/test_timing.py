"""Pitfalls 8 to 11, 21 and 22: late clocks, hidden queues, slow readers, starved clients."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np
import pytest
from scipy import stats as sps

import burstline.loadgen.wire.clock
from burstline.loadgen.driver.job import Stop
from burstline.measure.metrics.definitions import METRICS, latencies
from burstline.measure.metrics.slo import parse_slo
from burstline.measure.record.columns import seconds_or_nan
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.load import load_of
from burstline.workloads.spec import LoadSpec
from tests.measure.making import conditions, summarized
from tests.pitfalls.chain import Played, fired, play, requests
from tests.pitfalls.on_pids import Fired
from tests.pitfalls.on_pids import fired as fired_load
from tests.truth.rig import truth_server
from tests.truth.script import Script
from tests.workloads.open_requests import in_flight

S = 1_000_000_000


@pytest.mark.slow
@pytest.mark.measures
def test_08_a_server_that_stands_still_for_6_s_makes_600_requests_late_uniformly() -> None:
    """Some are late by less than 100 ms; a closed loop of 8 would have seen 8 slow ones."""
    ttft_s, closed_s = _while_it_stands_still()
    slow_s = ttft_s[ttft_s > 0.1]
    assert abs(len(slow_s) - 590) < 30
    assert sps.kstest(slow_s, "uniform", args=(0, 6)).statistic < 0.05
    assert (closed_s > 0.9).sum() <= 8


@pytest.mark.bench
def test_08_strictly_those_600_are_late_by_0_to_6_s_and_no_others_are() -> None:
    ttft_s, closed_s = _while_it_stands_still()
    slow_s = ttft_s[ttft_s > 0.05]
    assert abs(len(slow_s) - 600) < 20
    assert sps.kstest(slow_s, "uniform", args=(0, 6)).statistic < 0.05
    assert (closed_s > 0.9).sum() <= 8


def _while_it_stands_still() -> tuple[np.ndarray, np.ndarray]:
    """TTFT, s: of 100 requests a second for 10 s, 6 of which the server is stopped; of a closed loop."""
    script = Script(ttft_s=0.002, gaps_s=(0.001,))

    def stop_for_6_s(pid: int) -> None:
        time.sleep(2)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        os.kill(pid, signal.SIGCONT)

    with truth_server(script) as truth:
        due_s = (np.arange(1000) / 100).tolist()
        played = fired(truth, requests(1000, 2), due_s, meanwhile=lambda conn: stop_for_6_s(truth.pid))
        truth.reset()
        closed = fired(truth, requests(20_000, 2), concurrency=8, meanwhile=_stops(truth.pid, 0.3, 1.0, 0.3))
    return latencies(METRICS["ttft"], played.columns), closed.columns.first_s - closed.columns.sent_s


def _stops(pid: int, before_s: float, stopped_s: float, after_s: float):
    def meanwhile(conn: Connection) -> None:
        time.sleep(before_s)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(stopped_s)
        os.kill(pid, signal.SIGCONT)
        time.sleep(after_s)
        conn.send(Stop())

    return meanwhile


def test_09_an_open_loop_keeps_no_queue_of_its_own() -> None:
    """500 at once are at the server at once: no connection limit, no pool holds any back.

    They take a tenth of a second. The server waits far longer, so that no stall of the machine decides.
    """
    played = play(Script(ttft_s=3.0, gaps_s=(0.0,)), 500, n_output_tok=2)
    arrivals_ns = sorted(row.arrival_ns for row in played.served)
    assert max(arrivals_ns) < min(row.token_ns[0] for row in played.served)
    _, n = in_flight(
        [row.arrival_ns for row in played.served], [row.ended_ns or np.inf for row in played.served]
    )
    assert n.max() == 500


@pytest.mark.measures
def test_09_a_closed_loop_says_how_many_and_counts_from_each_requests_turn() -> None:
    played = play(Script(ttft_s=0.05, gaps_s=(0.0,)), 60, n_output_tok=2, concurrency=10)
    starts = [row.arrival_ns for row in played.served]
    _, n = in_flight(starts, [row.token_ns[-1] for row in played.served])
    assert n.max() <= 10
    # A request's turn is when the server gets it: half a wave is 25 ms.
    waited_ns = [
        played.truth(r.index).arrival_ns - played.report.t0_ns - r.dispatched_ns for r in played.records
    ]
    # The kernel stamps arrivals by another clock, whose offset from ours is known to some microseconds.
    assert min(waited_ns) >= -50_000
    assert np.median(waited_ns) < 0.025 * S
    assert all(record.due_ns == record.dispatched_ns for record in played.records)
    # The sixth wave waited 250 ms for its turn; that is the load's doing and no latency of the server's.
    assert max(record.dispatched_ns for record in played.records) > 0.24 * S
    ttft_s = latencies(METRICS["ttft"], played.columns)
    truth_s = [(played.truth(i).token_ns[0] - played.truth(i).arrival_ns) / S for i in range(60)]
    assert np.median(ttft_s) == pytest.approx(np.median(truth_s), rel=0.2)


@pytest.mark.measures
def test_10_a_reader_that_comes_late_reports_when_the_bytes_came_and_how_late_it_was() -> None:
    """The driver's process is kept from reading: the kernel's stamps still tell when each event arrived."""
    script = Script(ttft_s=0.05, gaps_s=(0.03,))
    with truth_server(script) as truth:
        played = fired(truth, requests(4, 12), meanwhile=lambda conn: _hog(0.4))
    for i in range(4):
        sent_ns, got_ns = played.sent_ns(i), played.records[i].token_ns
        assert all(got >= sent for got, sent in zip(got_ns, sent_ns, strict=True))
        # At least half of the events are known to a tenth of the gap, however late they were read.
        assert np.median(np.subtract(got_ns, sent_ns)) < 3_000_000


def _hog(seconds: float) -> None:
    """Holds the interpreter's lock as long as one may."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(200_000))


@pytest.mark.slow
@pytest.mark.measures
def test_11_a_starved_client_is_found_out_however_little_cpu_it_uses() -> None:
    """A CPU quota by hand: the driver may run 5 ms out of 25, whatever CPU is free.

    Tokens come every 5 ms, so that several share a read; their stamps are off, and by no more than is said.
    So no gap between tokens can be relied on, and no run that has an SLO on them.
    """
    done = threading.Event()

    def squeeze(pids: list[int]) -> None:
        threading.Thread(target=_squeeze, args=(pids, done), daemon=True).start()

    try:
        found = fired_load(load_of(WISH), Script(ttft_s=0.05, gaps_s=(0.005,)), squeeze)
    finally:
        done.set()
    goals = (parse_slo("itl.p99<=10ms"),)
    summary = summarized(found.columns, conditions(reports=found.reports, goals=goals))
    assert {each["grade"] for each in summary["grades"]["itl"].values()} == {"unreliable"}
    # Beside other tests it is their work, too, that may have kept the client waiting.
    assert summary["verdict"]["state"] in ("CLIENT-BOUND", "DISTURBED"), summary["verdict"]
    assert {reason["code"] for reason in summary["verdict"]["reasons"]} & {"read-lag", "cpu-wait"}
    c, sent_s = found.columns, _sent_s(found)
    assert np.mean(c.event_s - sent_s > 0.004) > 0.3  # the stamps are really off
    # The server hands a token to the kernel between its stamp and its next one, of whatever reply.
    stamps_s = np.sort(np.concatenate([served.event_ns for served in found.served])) / 1e9
    stamps_s = np.append(stamps_s - found.reports[0].t0_ns / 1e9, np.inf)
    next_s = stamps_s[np.searchsorted(stamps_s, sent_s + 1e-9, side="right")]
    assert np.mean(c.event_s - seconds_or_nan(c.event_error_ns) > next_s) < 0.001


@pytest.mark.slow
@pytest.mark.measures
def test_11_busy_neighbours_are_noticed() -> None:
    """Twelve processes beside the client that want all of its CPU."""
    busy: list[subprocess.Popen[bytes]] = []

    def crowd(pids: list[int]) -> None:
        cores = os.sched_getaffinity(pids[0])
        for _ in range(12):
            # Each in a session of its own: Linux shares the CPU between sessions first (autogroup).
            spin = [sys.executable, "-c", "while True: pass"]
            busy.append(subprocess.Popen(spin, start_new_session=True))
            os.sched_setaffinity(busy[-1].pid, cores)

    try:
        verdict = _verdict(fired_load(load_of(WISH), SCRIPT, crowd))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert verdict["state"] in ("CLIENT-BOUND", "DISTURBED"), verdict


WISH = LoadSpec(
    requests=100, prompt_tokens="16", output_tokens="64", arrival=parse_arrival("poisson"), rate=50
)
SCRIPT = Script(ttft_s=0.05, gaps_s=(0.01,))
"""A TTFT of 50 ms bears a lateness of 1 ms."""


def _sent_s(found: Fired) -> np.ndarray:
    """When the server handed each token to the kernel, as the client lists them."""
    [t0_ns] = {report.t0_ns for report in found.reports}
    token_ns = {
        served.index: np.asarray(served.event_ns)[np.asarray(served.event_tok) > 0] for served in found.served
    }
    return np.concatenate([token_ns[i] for i in found.columns.table["index"].to_pylist()]) / 1e9 - t0_ns / 1e9


def _squeeze(pids: list[int], done: threading.Event) -> None:
    while not done.wait(0.005):
        with suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


def _verdict(fired: Fired) -> dict:
    return summarized(fired.columns, conditions(reports=fired.reports))["verdict"]


@pytest.mark.measures
def test_21_a_step_of_the_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_REALTIME goes an hour forwards, then two back, while streams are read."""
    real = time.clock_gettime_ns
    began: list[float] = []  # when the load began, however long getting ready took

    def stepped(clock: int) -> int:
        since_s = time.monotonic() - began[0] if began else 0.0
        step_s = 0 if since_s < 0.2 else 3600 if since_s < 0.45 else -3600
        return real(clock) + (step_s * S if clock == time.CLOCK_REALTIME else 0)

    class Time:
        monotonic_ns = staticmethod(time.monotonic_ns)
        clock_gettime_ns = staticmethod(stepped)
        CLOCK_REALTIME = time.CLOCK_REALTIME

    monkeypatch.setattr(burstline.loadgen.wire.clock, "time", Time)
    script = Script(ttft_s=0.1, gaps_s=(0.05,))
    played = play(script, 4, n_output_tok=14, meanwhile=lambda conn: began.append(time.monotonic()))
    assert played.report.n_clock_steps == 2
    assert_told_as_sent(played)


def assert_told_as_sent(played: Played) -> None:
    """Every token's time lies between its own sending and that of the one after the next."""
    for i, record in enumerate(played.records):
        assert record.outcome == "ok"
        sent_ns = played.sent_ns(i)
        assert all(got >= sent for got, sent in zip(record.token_ns, sent_ns, strict=True))
        assert all(got < later for got, later in zip(record.token_ns, sent_ns[2:], strict=False))


def test_22_no_garbage_is_collected_while_the_load_runs() -> None:
    seen = []
    play(Script(ttft_s=0.1, gaps_s=(0.01,)), 2, meanwhile=lambda conn: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled()
