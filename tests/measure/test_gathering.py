"""What held text on its way to the client is named, and nothing that an engine or a late client does."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

from burstline.loadgen.capture.capture import NO_STAMP, Reads
from burstline.measure.metrics.slo import parse_slo
from burstline.measure.record.columns import Columns, columns_of
from burstline.measure.record.record import NO_TEXT, Record, record_of
from burstline.measure.record.tables import record_table
from burstline.measure.record.verdict import Grade, State
from burstline.measure.stats.figure import Result
from burstline.measure.summarize import summarize
from burstline.measure.verdict import buffering
from burstline.measure.verdict.buffering import gathered
from tests.measure.making import DONE, HEAD, MS, capture, chunk, conditions, event, request
from tests.servers.golden import decode_completion

Pieces = list[tuple[float, bytes]]
"""What is written, and at how many ms."""
Make = Callable[[int], Pieces]
"""A reply of so many tokens."""
N_TOK = 96


def engine(
    n_tok: int = N_TOK, ttft_ms: float = 100.0, *, every: int = 1, more: bytes = b"", gap_ms: float = 20.0
) -> Pieces:
    """One token each `gap_ms`, or one event with `every` of them; `more` comes with each event."""
    token = chunk(event(every, text="x" * 180) + more)
    pieces = [(ttft_ms + gap_ms * k, token) for k in range(0, n_tok, every)]
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


def by_timer(pieces: Pieces, hold_ms: float) -> Pieces:
    """Forwarded so long after the first that waits, and at the reply's end."""
    made, held, until_ms = [pieces[0]], b"", math.inf
    for at_ms, data in pieces[1:]:
        if at_ms > until_ms:
            made.append((until_ms, held))
            held, until_ms = b"", math.inf
        held, until_ms = held + data, min(until_ms, at_ms + hold_ms)
    return [*made, (pieces[-1][0], held)]


def to_end(pieces: Pieces) -> Pieces:
    return [pieces[0], (pieces[-1][0], b"".join(data for _, data in pieces[1:]))]


def by_acknowledgement(pieces: Pieces, ack_ms: float) -> Pieces:
    """Nagle's algorithm: forwarded at once, or when what was sent before is acknowledged, so much later."""
    made, held, free_ms = [pieces[0]], b"", 0.0
    for at_ms, data in pieces[1:]:
        if held and free_ms <= at_ms:
            made.append((free_ms, held))
            held, free_ms = b"", free_ms + ack_ms
        if held or at_ms < free_ms:
            held += data
        else:
            made.append((at_ms, data))
            free_ms = at_ms + ack_ms
    return [*made, (free_ms, held)] if held else made


def in_groups(pieces: Pieces, *sizes: int, after: bytes = b"") -> Pieces:
    """The engine writes so many whole events at once, in turns, and `after` them an event of no token."""
    made, rest, turns = [pieces[0]], pieces[1:], cycle(sizes)
    while rest:
        now, rest = rest[: (n := next(turns))], rest[n:]
        made.append((now[-1][0], b"".join(data for _, data in now) + after * bool(rest)))
    return made


def in_one_event(share: float, first_share: float = 1.0, n: int = 20) -> Columns:
    """Replies of which so many have so much of their text in their first event, after all the time."""
    replies = []
    for k in range(n):
        pieces = engine(20)
        if k < n * share:
            head, *rest = pieces
            n_first = round(20 * first_share)
            first = (rest[-1][0], chunk(event(n_first, text="x" * 99)))
            pieces = [head, first, *((at + 500, data) for at, data in rest[n_first:])]
        replies.append(reply(pieces, k, n_tok=20))
    return columns_of(record_table(replies))


@pytest.mark.parametrize(
    ("share", "first_share", "said"),
    [
        (1.0, 1.0, "20 of 20 replies came in one event: their TTFT is of all text."),
        (
            0.2,
            1.0,
            "4 of 20 replies came in one event: their TTFT is of all text; without them TTFT p50 is 98 ms",
        ),
        (0.2, 0.95, "4 of 20 replies came in one event"),
        (0.2, 0.5, ""),
        (0.0, 1.0, ""),
    ],
)
def test_replies_in_one_event_are_counted(share: float, first_share: float, said: str) -> None:
    summary = summarize(in_one_event(share, first_share), **conditions())
    told = {each.code: each.text for each in summary.verdict.warnings}
    assert told.get("in-one-event", "").startswith(said)
    assert ("in-one-event" in told) == bool(said)


@pytest.mark.parametrize(("n", "printed"), [(13, []), (20, ["p50"]), (79, ["p50"]), (81, ["p50", "p90"])])
def test_the_rest_of_them_has_only_the_percentiles_that_so_few_settle(n: int, printed: list[str]) -> None:
    """A fifth came in one event: 10, 16, 63 and 64 are left."""
    (told,) = (
        each.text for each in summarize(in_one_event(0.2, n=n), **conditions()).verdict.warnings
        if each.code == "in-one-event"
    )  # fmt: skip
    assert re.findall(r"p\d+", told) == printed


def test_a_counted_reply_without_text_is_not_one_that_came_in_one_event() -> None:
    silent = [
        replace(reply(engine(20), k, n_tok=20), split=NO_TEXT, token_ns=[MS], token_n=[20]) for k in (0, 1)
    ]
    shown = [reply(engine(20), k, n_tok=20) for k in range(2, 20)]
    assert buffering.in_one_event(columns_of(record_table([*silent, *shown]))) is None
    one = reply(engine(20, every=20), 20, n_tok=20)
    reason = buffering.in_one_event(columns_of(record_table([*silent, *shown, one])))
    assert reason is not None
    assert reason.text.startswith("1 of 19 replies came in one event")


SILENT = event(0, text="")


def reply(
    pieces: Pieces, index: int = 0, *, n_tok: int = N_TOK, slept_ms: float = 0.5, stamped: bool = True
) -> Record:
    """The record of a reply whose reads came so, by a client that slept so long before each."""
    at_ns = np.array([round(ms * MS) for ms, _ in pieces], dtype=np.int64)
    reads = Reads(
        at_ns + 20_000,
        at_ns if stamped else np.full(len(at_ns), NO_STAMP),
        np.cumsum([len(data) for _, data in pieces], dtype=np.int64),
        b"".join(data for _, data in pieces),
        np.full(len(at_ns), round(slept_ms * MS)),
    )
    asked = replace(request(n_tok), index=index)
    return record_of(asked, replace(capture(reads), index=index), decode_completion)


def many(make: Make, n: int = 20, *, longer: int = 8, **how: float) -> Columns:
    """Replies, each `longer` than the one before by so many tokens, or again as the first after ten."""
    lengths = [N_TOK + longer * (k % 10) for k in range(n)]
    return columns_of(
        record_table([reply(make(n_tok), k, n_tok=n_tok, **how) for k, n_tok in enumerate(lengths)])
    )


HELD: dict[str, tuple[Make, str]] = {
    "buffers of 4 KiB": (lambda n: by_size(engine(n), 4096), "held-by-size"),
    "buffers of 8 KiB": (lambda n: by_size(engine(n), 8192), "held-by-size"),
    "full 16 KiB only": (lambda n: by_size(engine(n), 16384), "held-by-size"),
    "a full link": (lambda n: by_size(engine(n), 1448, every_ms=110), "held-by-size"),
    "all at the end": (lambda n: to_end(engine(n)), "held-to-end"),
    "more than the reply has": (lambda n: by_size(engine(n), 1 << 20), "held-to-end"),
    "a timer of 45 ms": (lambda n: by_timer(engine(n), 45), "held-by-time"),
    "a timer of 205 ms": (lambda n: by_timer(engine(n), 205), "held-by-time"),
    "a timer of 50 ms, a faster engine": (lambda n: by_timer(engine(n, gap_ms=17), 50), "held-by-time"),
    "a beat of 50 ms": (lambda n: by_beat(engine(n), 50), "bunched"),
    "a beat of 200 ms": (lambda n: by_beat(engine(n), 200), "bunched"),
    "three whole events at once": (lambda n: in_groups(engine(n), 3), "bunched"),
}


@pytest.mark.parametrize(("make", "code"), HELD.values(), ids=HELD)
def test_what_held_text_on_its_way_is_named(make: Make, code: str) -> None:
    reason = gathered(many(make))
    assert reason is not None
    assert reason.code == code
    for remedy in (
        "proxy_buffering off",
        "proxy_http_version 1.1",
        "option http-no-delay",
        "X-Accel-Buffering",
        "TCP_NODELAY",
    ):
        assert remedy in reason.advice


@pytest.mark.parametrize("hold", [by_beat, by_timer, by_acknowledgement])
@pytest.mark.parametrize("hold_ms", [10, 20, 40, 50, 100])
@pytest.mark.parametrize("events", [1.3, 2.0, 2.5])
def test_what_holds_text_for_longer_than_an_event_takes_is_seen(hold, hold_ms: float, events: float) -> None:
    """Also where fewer than half of the events come with another; a stall gathers as many, but is longer."""
    reason = gathered(many(lambda n: hold(engine(n, 103, gap_ms=hold_ms / events), hold_ms)))
    assert reason is not None
    assert reason.code in ("bunched", "held-by-time")


@pytest.mark.parametrize("hold", [by_beat, by_timer, by_acknowledgement])
def test_what_holds_text_for_less_than_an_event_takes_joins_none(hold) -> None:
    """docs/method.md says that it is not seen."""
    assert gathered(many(lambda n: hold(engine(n), 19))) is None


def through_link(n_replies: int, events_per_ms: float) -> Columns:
    """Replies over one link that sends all that one of them has waiting, the longest waiting first."""
    waiting = {k: [(at + 7 * k, data) for at, data in engine()] for k in range(n_replies)}
    came: list[Pieces] = [[waiting[k].pop(0)] for k in range(n_replies)]
    now_ms = 0.0
    while left := {k: pieces for k, pieces in waiting.items() if pieces}:
        k, pieces = min(left.items(), key=lambda each: each[1][0][0])
        now_ms = max(now_ms, pieces[0][0])
        n = sum(at <= now_ms for at, _ in pieces)
        now_ms += n / events_per_ms
        came[k].append((now_ms, b"".join(data for _, data in pieces[:n])))
        waiting[k] = pieces[n:]
    return columns_of(record_table([reply(pieces, k, slept_ms=0) for k, pieces in enumerate(came)]))


@pytest.mark.parametrize(
    ("events_per_ms", "code"), [(0.5, "held-by-link"), (0.25, "held-by-link"), (50.0, None)]
)
def test_a_full_link_is_named(events_per_ms: float, code: str | None) -> None:
    reason = gathered(through_link(30, events_per_ms))
    assert (reason and reason.code) == code


def test_short_replies_at_once_and_longer_ones_in_buffers_are_one_finding() -> None:
    makes = [HELD["all at the end"][0], HELD["full 16 KiB only"][0]]
    reason = gathered(columns_of(record_table([reply(makes[k % 3 > 0](N_TOK), k) for k in range(24)])))
    assert reason is not None
    assert reason.code == "held-by-size"


UNKNOWN: dict[str, tuple[Make, int, str]] = {
    "a token and an empty event each": (
        lambda n: in_groups(engine(n, more=SILENT), 5),
        8,
        "came with the one",
    ),
    "an empty event after each group": (
        lambda n: in_groups(engine(n), 4, 7, 5, after=chunk(SILENT)),
        8,
        "came",
    ),
    "few groups, an empty event after each": (
        lambda n: in_groups(engine(n), 60, after=chunk(SILENT)),
        0,
        "came",
    ),
    "without pacing, in one write": (lambda n: to_end(engine(n, gap_ms=0)), 8, "All text of 20 of 20"),
    "hardly slower with each event": (lambda n: to_end(engine(n, gap_ms=0.05)), 8, "All text of 20 of 20"),
    "all of one length at the end": (lambda n: to_end(engine(n)), 0, "All text of 20 of 20"),
}
"""What an engine may do as well as a proxy, by how many tokens each reply is longer, and what is said."""


@pytest.mark.parametrize(("make", "longer", "said"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_an_engine_may_write_itself_is_not_called_held(make: Make, longer: int, said: str) -> None:
    columns = many(make, longer=longer)
    reason = gathered(columns)
    assert reason is not None
    assert (reason.code, said in reason.text) == ("bunched", True)
    assert "the server or a proxy" in reason.text
    assert not any(
        each.held for row in summarize(columns, **conditions()).grades.values() for each in row.values()
    )


ORDINARY: dict[str, tuple[Make, dict[str, float]]] = {
    "an engine": (engine, {}),
    "after a long queue": (lambda n: engine(n, 60_000), {}),
    "one event with 8 tokens": (lambda n: engine(n, every=8), {}),
    "one event with all tokens": (lambda n: engine(n, every=n), {}),
    "an event without text after each": (lambda n: engine(n, more=SILENT), {}),
    "a beat of 20 ms": (lambda n: by_beat(engine(n), 20), {}),
    "a link that cuts each event": (lambda n: by_size(engine(n), 100), {}),
    "the client slept": (lambda n: by_beat(engine(n), 200), {"slept_ms": 195}),
    "the client slept all the time": (lambda n: to_end(engine(n)), {"slept_ms": 1900}),
    "no kernel stamps": (lambda n: by_size(engine(n), 4096), {"stamped": False}),
}


@pytest.mark.parametrize(("make", "how"), ORDINARY.values(), ids=ORDINARY)
def test_what_an_engine_or_a_late_client_does_is_not(make: Make, how: dict[str, float]) -> None:
    assert gathered(many(make, **how)) is None


def test_a_hundred_ordinary_runs_have_no_such_note() -> None:
    """Engines of any speed that sometimes stall and then write what they have; clients that sleep."""
    rng = np.random.default_rng(77)

    def stalling(n_tok: int) -> Iterator[tuple[float, bytes]]:
        at_ms, ready_ms = float(rng.uniform(5, 5000)), 0.0
        gap_ms, share = float(rng.uniform(1, 100)), float(rng.uniform(0, 0.1))
        yield 4.0, HEAD
        for _ in range(n_tok):
            at_ms += gap_ms * float(rng.uniform(0.7, 1.3))
            ready_ms = max(at_ms, ready_ms)
            yield ready_ms, chunk(event(1))
            if rng.random() < share:
                ready_ms = at_ms + 5 * gap_ms
        yield ready_ms, chunk(event(0, text="", finish="length")) + chunk(DONE) + b"0\r\n\r\n"

    def reads(n_tok: int) -> Pieces:
        joined: dict[float, bytes] = {}
        for at_ms, data in stalling(n_tok):
            joined[at_ms] = joined.get(at_ms, b"") + data
        return list(joined.items())

    for _ in range(100):
        assert gathered(many(reads, 12, slept_ms=float(rng.uniform(0.1, 1)))) is None


@pytest.mark.parametrize(("make", "spoilt"), [(HELD["all at the end"][0], True), (engine, False)])
def test_no_slo_on_tpot_is_judged_where_text_was_held(make: Make, spoilt: bool) -> None:
    targets = ("tpot.p50<=5s", "itl.p50<=5s", "e2e.p50<=500s", "attainment>=0.5", "tpot<=5s")
    summary = summarize(many(make), **conditions(goals=[parse_slo(each) for each in targets]))
    assert summary.verdict.state == State.VALID
    results = {each.target.partition("<")[0].partition(">")[0]: each for each in summary.targets}
    assert [results[name].result == Result.PASS for name in ("tpot.p50", "itl.p50", "attainment")] == [
        not spoilt
    ] * 3
    assert ("held on the way" in results["tpot.p50"].reason) == spoilt
    assert results["e2e.p50"].result == Result.PASS
    assert (summary.grades["tpot"]["p50"].grade == Grade.UNRELIABLE) == spoilt
    assert summary.grades["e2e"]["p50"].grade == Grade.OK
    assert any(each.code == "held-to-end" for each in summary.verdict.warnings) == spoilt
