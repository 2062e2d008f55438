"""What held text on its way to the client is named, and nothing that an engine or a late client does."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from burstline.loadgen.capture.capture import NO_STAMP, Reads
from burstline.measure.metrics.gathering import gathered
from burstline.measure.metrics.slo import parse_goal
from burstline.measure.record.columns import Columns, columns_of
from burstline.measure.record.record import Record, record_of
from burstline.measure.record.tables import record_table
from burstline.measure.record.verdict import Grade, State
from burstline.measure.stats.figure import Result
from burstline.measure.summarize import summarize
from tests.measure.making import DONE, HEAD, MS, capture, chunk, conditions, event, request
from tests.servers.golden import decode_completion

Pieces = list[tuple[float, bytes]]
"""What is written, and at how many ms."""
N_TOK = 96


def engine(ttft_ms: float = 100.0, *, every: int = 1, more: bytes = b"") -> Pieces:
    """One token each 20 ms, or one event with `every` of them; `more` comes with each event."""
    pieces = [(ttft_ms + 20 * k, chunk(event(every, text="x" * 180) + more)) for k in range(0, N_TOK, every)]
    last_ms = pieces[-1][0]
    end = chunk(event(0, text="", finish="length")) + chunk(DONE) + b"0\r\n\r\n"
    return [(5.0, HEAD), *pieces, (last_ms, end)]


def by_size(pieces: Pieces, n_bytes: int, every_ms: float = 0.0) -> Pieces:
    """Forwarded when a buffer of so many bytes is full, at most one each `every_ms`."""
    made, held, free_ms = [pieces[0]], b"", 0.0
    for at_ms, data in pieces[1:]:
        held += data
        while len(held) >= n_bytes:
            free_ms = max(at_ms, free_ms + every_ms)
            made.append((free_ms, held[:n_bytes]))
            held = held[n_bytes:]
    return [*made, (max(pieces[-1][0], free_ms + every_ms), held)]


def by_beat(pieces: Pieces, beat_ms: float) -> Pieces:
    """Forwarded at each beat."""
    beats: dict[float, bytes] = {}
    for at_ms, data in pieces[1:]:
        beat = -(-at_ms // beat_ms) * beat_ms
        beats[beat] = beats.get(beat, b"") + data
    return [pieces[0], *beats.items()]


def to_end(pieces: Pieces) -> Pieces:
    return [pieces[0], (pieces[-1][0], b"".join(data for _, data in pieces[1:]))]


def in_threes(pieces: Pieces) -> Pieces:
    """The engine writes three whole events at once."""
    rest = pieces[1:]
    return [
        pieces[0],
        *((p[-1][0], b"".join(d for _, d in p)) for k in range(0, len(rest), 3) if (p := rest[k : k + 3])),
    ]


def reply(pieces: Pieces, index: int = 0, *, slept_ms: float = 0.5, stamped: bool = True) -> Record:
    """The record of a reply whose reads came so, by a client that slept so long before each."""
    at_ns = np.array([round(ms * MS) for ms, _ in pieces], dtype=np.int64)
    reads = Reads(
        at_ns + 20_000,
        at_ns if stamped else np.full(len(at_ns), NO_STAMP),
        np.cumsum([len(data) for _, data in pieces], dtype=np.int64),
        b"".join(data for _, data in pieces),
        np.full(len(at_ns), round(slept_ms * MS)),
    )
    asked = replace(request(N_TOK), index=index)
    return record_of(asked, replace(capture(reads), index=index), decode_completion)


def many(make: Callable[[], Pieces], n: int = 20, **how: float) -> Columns:
    return columns_of(record_table([reply(make(), k, **how) for k in range(n)]))


HELD = {
    "buffers of 4 KiB": (lambda: by_size(engine(), 4096), "held-by-size"),
    "buffers of 8 KiB": (lambda: by_size(engine(), 8192), "held-by-size"),
    "full 16 KiB only": (lambda: by_size(engine(), 16384), "held-by-size"),
    "a full link": (lambda: by_size(engine(), 1448, every_ms=110), "held-by-size"),
    "all at the end": (lambda: to_end(engine()), "held-to-end"),
    "more than the reply has": (lambda: by_size(engine(), 1 << 20), "held-to-end"),
    "a beat of 50 ms": (lambda: by_beat(engine(), 50), "bunched"),
    "a beat of 200 ms": (lambda: by_beat(engine(), 200), "bunched"),
    "three whole events at once": (lambda: in_threes(engine()), "bunched"),
}


@pytest.mark.parametrize(("make", "code"), HELD.values(), ids=HELD)
def test_what_held_text_on_its_way_is_named(make: Callable[[], Pieces], code: str) -> None:
    reason = gathered(many(make))
    assert reason is not None
    assert reason.code == code
    for remedy in (
        "proxy_buffering off",
        "proxy_http_version 1.1",
        "option http-no-delay",
        "X-Accel-Buffering",
    ):
        assert remedy in reason.advice


def test_short_replies_at_once_and_longer_ones_in_buffers_are_one_finding() -> None:
    makes = [HELD["all at the end"][0], HELD["full 16 KiB only"][0]]
    reason = gathered(columns_of(record_table([reply(makes[k % 3 > 0](), k) for k in range(24)])))
    assert reason is not None
    assert reason.code == "held-by-size"


ORDINARY: dict[str, tuple[Callable[[], Pieces], dict[str, float]]] = {
    "an engine": (engine, {}),
    "after a long queue": (lambda: engine(60_000), {}),
    "one event with 8 tokens": (lambda: engine(every=8), {}),
    "one event with all tokens": (lambda: engine(every=N_TOK), {}),
    "an event without text after each": (lambda: engine(more=event(0, text="")), {}),
    "a beat of 20 ms": (lambda: by_beat(engine(), 20), {}),
    "a link that cuts each event": (lambda: by_size(engine(), 100), {}),
    "the client slept": (lambda: by_beat(engine(), 200), {"slept_ms": 195}),
    "the client slept all the time": (lambda: to_end(engine()), {"slept_ms": 1900}),
    "no kernel stamps": (lambda: by_size(engine(), 4096), {"stamped": False}),
}


@pytest.mark.parametrize(("make", "how"), ORDINARY.values(), ids=ORDINARY)
def test_what_an_engine_or_a_late_client_does_is_not(
    make: Callable[[], Pieces], how: dict[str, float]
) -> None:
    assert gathered(many(make, **how)) is None


def test_a_hundred_ordinary_runs_have_no_such_note() -> None:
    """Engines of any speed that sometimes stall and then write what they have; clients that sleep."""
    rng = np.random.default_rng(77)

    def stalling() -> Iterator[tuple[float, bytes]]:
        at_ms, ready_ms = float(rng.uniform(5, 5000)), 0.0
        gap_ms, share = float(rng.uniform(1, 100)), float(rng.uniform(0, 0.1))
        yield 4.0, HEAD
        for _ in range(N_TOK):
            at_ms += gap_ms * float(rng.uniform(0.7, 1.3))
            ready_ms = max(at_ms, ready_ms)
            yield ready_ms, chunk(event(1))
            if rng.random() < share:
                ready_ms = at_ms + 5 * gap_ms
        yield ready_ms, chunk(event(0, text="", finish="length")) + chunk(DONE) + b"0\r\n\r\n"

    def reads() -> Pieces:
        joined: dict[float, bytes] = {}
        for at_ms, data in stalling():
            joined[at_ms] = joined.get(at_ms, b"") + data
        return list(joined.items())

    for _ in range(100):
        assert gathered(many(reads, 12, slept_ms=float(rng.uniform(0.1, 1)))) is None


@pytest.mark.parametrize(("make", "spoilt"), [(HELD["all at the end"][0], True), (engine, False)])
def test_no_slo_on_tpot_is_judged_where_text_was_held(make: Callable[[], Pieces], spoilt: bool) -> None:
    targets = ("tpot.p50<=5s", "itl.p50<=5s", "e2e.p50<=500s", "attainment>=0.5", "tpot<=5s")
    summary = summarize(many(make), **conditions(goals=[parse_goal(each) for each in targets]))
    assert summary.verdict.state == State.VALID
    results = {each.target.partition("<")[0].partition(">")[0]: each for each in summary.targets}
    assert [results[name].result == Result.PASS for name in ("tpot.p50", "itl.p50", "attainment")] == [
        not spoilt
    ] * 3
    assert ("held on its way" in results["tpot.p50"].reason) == spoilt
    assert results["e2e.p50"].result == Result.PASS
    assert (summary.grades["tpot"]["p50"].grade == Grade.UNRELIABLE) == spoilt
    assert summary.grades["e2e"]["p50"].grade == Grade.OK
    assert any(each.code == "held-to-end" for each in summary.verdict.warnings) == spoilt
