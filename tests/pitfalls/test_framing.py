"""Pitfalls 4 and 6: how bytes are cut and framed changes nothing; an error inside a 200 is a failure."""

from dataclasses import asdict
from typing import Any

from burstline.loadgen.record.record import Record
from tests.pitfalls.chain import play
from tests.truth.script import Script

WORDS = " né漢😀"
WHOLE = Script(ttft_s=0.0, gaps_s=(0.002,), text=WORDS, tok_per_event=(2, 1))
TIMES = ("due_ns", "dispatched_ns", "connected_ns", "sent_ns", "headers_ns", "closed_ns", "answer_ns")


def log_of(record: Record) -> dict[str, Any]:
    """What was said, without when, and in how many reads."""
    facts = asdict(record)
    for name in (*TIMES, "index", "token_ns", "read_lag_ns", "read_error_ns", "n_reads"):
        del facts[name]
    return facts


def logs_of(scripts: list[Script]) -> list[dict[str, Any]]:
    """What is understood of one request per script."""
    return [log_of(record) for record in play(scripts, len(scripts), n_output_tok=5).records]


def changed(**fields: Any) -> Script:
    return Script(**{**asdict(WHOLE), **fields})


def test_04_an_event_cut_at_any_byte_is_the_same_event() -> None:
    """One request for every offset, multi-byte characters and the blank line among them."""
    played = play([WHOLE, *(changed(split_at=(k,)) for k in range(1, 330))], 330, n_output_tok=5)
    whole, *cut = played.records
    assert [log_of(record) for record in cut] == [log_of(whole)] * 329
    assert max(record.n_reads for record in cut) > whole.n_reads, "nothing was cut"


def test_04_and_06_however_a_stream_is_framed_it_says_the_same() -> None:
    framings = [
        changed(drip_bytes=1, split_gap_s=0.0),
        changed(events_per_write=3),
        changed(events_per_write=2, split_at=(7, -9)),
        changed(crlf=True),
        changed(space=False),
        changed(comments_s=(0.0, 0.001, 0.003)),
        changed(chunked=False),
        changed(crlf=True, space=False, comments_s=(0.002,), split_at=(-1, -2, -3)),
        changed(stamp=False),
    ]
    whole, *others = logs_of([WHOLE, *framings])
    for framing, log in zip(framings, others, strict=True):
        assert log == whole, framing


def test_06_an_error_event_after_a_200_is_a_failure_and_keeps_the_servers_words() -> None:
    script = Script(
        ttft_s=0.0, gaps_s=(0.001,), fault="error", fault_after_tok=3, message="CUDA out of memory"
    )
    (record,) = play(script).records
    assert (record.outcome, record.http_status) == ("error_event", 200)
    assert "CUDA out of memory" in (record.error or "")


def test_06_keep_alives_before_the_first_token_do_not_open_ttft() -> None:
    (record,) = play(Script(ttft_s=0.15, comments_s=(0.0, 0.05, 0.1), gaps_s=(0.001,))).records
    assert record.token_ns[0] - record.due_ns >= 150_000_000
    assert len(record.token_ns) == 8
