"""The offset of a worker's clock: within its stated bound, whatever the network does."""

import socket
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.loadgen.capture.drive_report import MAX_DRIFT, ClockError, ClockExchange, ClockMap, Offset
from burstline.loadgen.driver import clock_offset
from burstline.loadgen.driver.clock_offset import ClockAnswers, ClockClient

delays = st.lists(
    st.tuples(st.integers(1_000, 50_000_000), st.integers(1_000, 50_000_000)), min_size=1, max_size=40
)


def theirs(clock, ours_ns):
    """Our time as the worker's clock shows it."""
    return ours_ns + round(clock._offset_ns(ours_ns))


def volley(offset_ns, ways, at_ns=0, drift=0.0):
    """Exchanges at a clock that is `offset_ns` ahead at our time 0 and runs faster by `drift`."""
    theirs = lambda ours: ours + offset_ns + round(drift * ours)  # noqa: E731
    exchanges, t = [], at_ns
    for out, back in ways:
        t2 = t + out
        t4 = t2 + 500 + back
        exchanges.append(ClockExchange(t, theirs(t2), theirs(t2 + 500), t4))
        t = t4 + 1000
    return exchanges


@given(offset=st.integers(-(10**15), 10**15), ways=delays)
def test_the_true_offset_is_within_the_bound_however_unequal_the_ways_are(offset, ways):
    measured = Offset.of(volley(offset, ways))
    assert abs(measured.ns - offset) <= measured.bound_ns
    assert measured.bound_ns <= measured.rtt_ns / 2 + 1 + 4e9 * MAX_DRIFT


@given(
    offset=st.integers(-(10**15), 10**15),
    ppm=st.floats(-100, 100),
    ways=delays,
    seconds=st.integers(5, 3600),
    share=st.floats(0, 1),
)
def test_a_steady_drift_is_taken_out(offset, ppm, ways, seconds, share):
    drift, end = ppm / 1e6, seconds * 10**9
    ways = [(out // 1000 + 1, back // 1000 + 1) for out, back in ways]  # short against the drift
    clock = ClockMap.of(
        Offset.of(volley(offset, ways, 0, drift)), Offset.of(volley(offset, ways, end, drift))
    )
    at = round(share * end)
    true = at + offset + round(drift * at)
    assert abs(theirs(clock, at) - true) <= clock.bound_ns + 5_000
    t0_theirs = theirs(clock, 10**6)
    shift, factor = clock.since_start(10**6, t0_theirs)
    assert abs(shift + factor * (true - t0_theirs) - (at - 10**6)) <= 2 * clock.bound_ns + 5_000


def test_a_clock_that_was_set_during_the_volley_is_an_error():
    before, after = volley(0, [(1000, 1000)]), volley(10**9, [(1000, 1000)], at_ns=10_000)
    with pytest.raises(ClockError, match="the clock moved"):
        Offset.of(before + after)


def test_a_clock_that_does_not_drift_evenly_widens_the_bound():
    flat = [(1000, 1000)] * 4
    ends = Offset.of(volley(0, flat)), Offset.of(volley(0, flat, 10**10))
    middle = Offset.of(volley(3_000_000, flat, 5 * 10**9))
    assert ClockMap.of(*ends, [middle]).bound_ns >= 2_990_000
    assert ClockMap.of(*ends).bound_ns <= 2_100


def line() -> tuple[socket.socket, socket.socket]:
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        ours = socket.create_connection(door.getsockname())
        return ours, door.accept()[0]


def test_the_same_clock_is_not_apart_by_more_than_the_bound(monkeypatch):
    monkeypatch.setattr(clock_offset, "TIMEOUT_S", 20.0)  # so that a busy machine loses no answer
    ours, theirs = line()
    answers, client = ClockAnswers(theirs), ClockClient(ours)
    try:
        offset = client.offset()
        assert abs(offset.ns) <= offset.bound_ns
        assert offset.n == 64
        assert answers.silent_s() < 5
    finally:
        client.close()
        answers.close()


def test_silence_is_known_where_only_the_way_back_is_cut():
    """Questions come and are answered, but none of them confirms an answer."""
    ours, theirs = line()
    answers = ClockAnswers(theirs)
    try:
        time.sleep(0.05)
        for number in range(1, 20):
            ours.sendall(struct.pack("<QQ", number, 0))
        time.sleep(0.05)
        assert answers.silent_s() >= 0.1
        for number in range(20, 4000):  # each confirms the answer to the one before it
            ours.sendall(struct.pack("<QQ", number, number - 1))
            time.sleep(0.01)
            if answers.silent_s() < 0.1:
                return
        pytest.fail("answers were confirmed, and it is silent all the same")
    finally:
        ours.close()
        answers.close()


def test_a_clock_that_falls_silent_is_an_error_after_a_few_questions(monkeypatch):
    monkeypatch.setattr(clock_offset, "TIMEOUT_S", 0.01)
    ours, theirs = line()  # nobody answers
    client = ClockClient(ours)
    try:
        with pytest.raises(ClockError, match="no exchange was answered"):
            client.offset()
        assert len(theirs.recv(1 << 16)) == clock_offset.GIVE_UP_AFTER * struct.calcsize("<QQ")
    finally:
        client.close()
        theirs.close()
