"""Faults in what a server sends: every request has its outcome, and no other request pays for it."""

from __future__ import annotations

import json
import ssl
import time
from collections import Counter
from pathlib import Path

import pytest

from burstline.loadgen.capture.capture import reply_limit_bytes
from burstline.measure.metrics.accounting import lengths
from burstline.measure.record.columns import columns_of
from burstline.measure.record.tables import record_table
from burstline.measure.stats.estimates import Estimate
from tests.faults import hostile
from tests.faults.hostile import STREAM_HEAD, chunk, event, streams, usage
from tests.faults.lab import N_OUTPUT_TOK, N_PROMPT_TOK, Shot, counted, noted, shoot

OK_EVENTS = tuple(
    event(finish="length" if k == N_OUTPUT_TOK else None, usage=usage(k, N_PROMPT_TOK))
    for k in range(1, N_OUTPUT_TOK + 1)
)
DONE = b"data: [DONE]\n\n"
WHOLE = b"".join(map(chunk, (*OK_EVENTS, DONE)))


def with_count(n: object, name: str = "prompt_tokens") -> hostile.Fault:
    counts = {**usage(N_OUTPUT_TOK, N_PROMPT_TOK), name: n}
    return streams(*OK_EVENTS[:-1], event(finish="length", usage=counts), DONE)


def with_finish(reason: object) -> hostile.Fault:
    last = {"choices": [{"index": 0, "text": "x", "finish_reason": reason}], "usage": usage(3, 4)}
    return streams(*OK_EVENTS[:-1], b"data: " + json.dumps(last).encode() + b"\n\n", DONE)


def with_head(line: bytes) -> hostile.Fault:
    return hostile.says(b"HTTP/1.1 200 OK\r\n" + line + b"\r\n\r\nx")


DEEP = b"[" * 1000 + b"]" * 1000
DEEP_ERROR = b'{"error": {"message": ' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}}"

# Name: (what the server does to one request in three, how that request ends)
FAULTS: dict[str, tuple[hostile.Fault, str]] = {
    'usage says "10" for 10': (with_count("10"), "error_event"),
    "usage says true": (with_count(True), "error_event"),
    "usage says 2^63-1 tokens": (with_count(2**63 - 1, "completion_tokens"), "error_event"),
    "usage says 10^9 prompt tokens": (with_count(10**9), "error_event"),
    "usage says -1 tokens": (with_count(-1), "error_event"),
    "usage says 1e400 tokens": (with_count(1e400), "error_event"),
    "finish_reason {}": (with_finish({"a": 1}), "error_event"),
    "finish_reason is markup": (with_finish("\u001b[31m<script>"), "error_event"),
    "JSON 1,000 levels deep": (hostile.replies(DEEP), "error_event"),
    "an error object 400 levels deep": (hostile.replies(DEEP_ERROR), "error_event"),
    "JSON that is a number": (hostile.replies(7), "error_event"),
    "choices that are a string": (hostile.replies({"choices": "none"}), "error_event"),
    "no UTF-8": (streams(b"data: \xff\xfe\n\n", DONE), "error_event"),
    "Content-Length: \u00b2": (with_head("Content-Length: \u00b2".encode("latin-1")), "error_event"),
    "Content-Length of 5,000 digits": (with_head(b"Content-Length: " + b"9" * 5000), "error_event"),
    "Content-Length: -1": (with_head(b"Content-Length: -1"), "error_event"),
    "Content-Length: 1, 2": (with_head(b"Content-Length: 1, 2"), "error_event"),
    "a chunk of 0x5 bytes": (hostile.says(STREAM_HEAD + b"0x5\r\nabcde\r\n0\r\n\r\n"), "error_event"),
    "a chunk of +5 bytes": (hostile.says(STREAM_HEAD + b"+5\r\nabcde\r\n0\r\n\r\n"), "error_event"),
    "a chunk line of 100 kB": (hostile.says(STREAM_HEAD + b"5;" + b"x" * 100_000), "truncated"),
    "80,000 interim heads": (hostile.says(b"HTTP/1.1 100 Continue\r\n\r\n" * 80_000), "error_event"),
    "a head without end": (hostile.endless(b"x: y\r\n", b"HTTP/1.1 200 OK\r\n"), "error_event"),
    "speaks SSH": (hostile.says(b"SSH-2.0-OpenSSH_9\r\n"), "error_event"),
    "a compressed reply": (with_head(b"Content-Length: 1\r\nContent-Encoding: gzip"), "error_event"),
    "a stream without end": (hostile.endless(chunk(event())), "too_large"),
    "a line without end": (hostile.endless(chunk(b"x" * 1000)), "too_large"),
    "a body without framing or end": (hostile.endless(b"x" * 1000, b"HTTP/1.1 200 OK\r\n\r\n"), "too_large"),
    "RST before the head": (hostile.then_resets(b""), "reset"),
    "RST after the head": (hostile.then_resets(STREAM_HEAD), "reset"),
    "RST after one token": (hostile.then_resets(STREAM_HEAD + chunk(OK_EVENTS[0])), "reset"),
    "closed after one token": (hostile.then_closes(STREAM_HEAD + chunk(OK_EVENTS[0])), "truncated"),
    "closed in the middle of an event": (hostile.then_closes(STREAM_HEAD + WHOLE[:60]), "truncated"),
    "hangs before the head": (hostile.hangs(), "timeout"),
    "hangs after one token": (hostile.hangs(STREAM_HEAD + chunk(OK_EVENTS[0])), "timeout"),
    "a byte at a time": (hostile.dribbles(STREAM_HEAD + WHOLE + b"0\r\n\r\n", 0.0002), "ok"),
    "interim heads and trailers": (
        hostile.says(b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + STREAM_HEAD + WHOLE + b"0\r\nx: y\r\n\r\n"),
        "ok",
    ),
    "HTTP/1.0, ended by closing": (
        hostile.then_closes(
            b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + b"".join((*OK_EVENTS, DONE))
        ),
        "ok",
    ),
    "bytes after the end": (hostile.says(STREAM_HEAD + WHOLE + b"0\r\n\r\nHTTP/1.1 500 x\r\n\r\n"), "ok"),
    "a redirect": (
        hostile.says(b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"),
        "http_302",
    ),
    "503 with a web page": (
        hostile.says(b"HTTP/1.1 503 x\r\nContent-Length: 13\r\n\r\n<html></html>"),
        "http_503",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_reply_ends_its_own_request_as_expected_and_no_other(name: str, tmp_path: Path) -> None:
    fault, outcome = FAULTS[name]
    deadline_s = 2.0 if outcome == "timeout" else 60.0
    with hostile.serving(hostile.for_some(fault, 3)) as server:
        shot = shoot(server.url, tmp_path, 6, deadline_s=deadline_s)
    expected = Counter(ok=4) + Counter({outcome: 2})
    noted(name, counted(expected), counted(shot.outcomes), shot.time_s)
    assert shot.outcomes == expected, shot.errors
    assert sorted(record.index for record in shot.records) == list(range(6))
    for text in shot.errors:
        assert text.isprintable(), text
        assert len(text) < 2100
    assert all(r.finish_reason is None or r.finish_reason.isalpha() for r in shot.records)
    assert all(0 <= (r.prompt_tok or 0) <= 100 for r in shot.records)
    if outcome == "too_large":
        limit = reply_limit_bytes(N_PROMPT_TOK, N_OUTPUT_TOK)
        assert max(sum(len(read.data) for read in c.reads) for c in shot.captures) < limit + (1 << 18)


EVENTS = b"".join(map(chunk, OK_EVENTS))
LONGER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9000\r\n\r\n"
# Name: (what comes behind the finish reason, whether the reply counts as cut there)
CUTS: dict[str, tuple[hostile.Fault, bool]] = {
    "a length that is never reached": (hostile.says(LONGER + b"".join(OK_EVENTS)), True),
    "a length that is never reached, [DONE]": (hostile.says(LONGER + b"".join((*OK_EVENTS, DONE))), False),
    "RST behind the finish reason": (hostile.then_resets(STREAM_HEAD + EVENTS), True),
    "closed behind the finish reason": (hostile.then_closes(STREAM_HEAD + EVENTS), True),
    "RST behind [DONE]": (hostile.then_resets(STREAM_HEAD + WHOLE), False),
    "the last chunk, no [DONE]": (hostile.says(STREAM_HEAD + EVENTS + b"0\r\n\r\n"), False),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_reply_that_is_cut_behind_its_end_is_ok_and_counted(name: str, tmp_path: Path) -> None:
    fault, is_cut = CUTS[name]
    with hostile.serving(hostile.for_some(fault, 3)) as server:
        shot = shoot(server.url, tmp_path, 6, deadline_s=2.0)
    cut = lengths(columns_of(record_table(shot.records))).cut_behind
    assert isinstance(cut, Estimate)
    n = int(cut.point)
    noted(name, f"6 ok, {2 * is_cut} cut", f"{counted(shot.outcomes)}, {n} cut", shot.time_s)
    assert shot.outcomes == Counter(ok=6), shot.errors
    assert n == 2 * is_cut
    assert all(record.output_tok == N_OUTPUT_TOK for record in shot.records)


@pytest.mark.parametrize("greet", [hostile.closes_at_once, hostile.resets_at_once])
@pytest.mark.measures
def test_a_server_that_hangs_up_at_once_is_asked_ever_more_slowly(greet, tmp_path: Path) -> None:
    with hostile.serving(hostile.honest, greet=greet) as server:
        shot = shoot(server.url, tmp_path, 10, deadline_s=60.0)
    per_request = server.n_connections / 10
    name = greet.__name__.replace("_", " ")
    seen = f"{counted(shot.outcomes)}; {per_request:.1f} connections a request"
    noted(f"accepts and {name}", "10 failed, below 20 connections a request", seen, shot.time_s)
    assert per_request < 20
    assert shot.outcomes["ok"] == 0
    assert sum(shot.outcomes.values()) == 10
    assert shot.time_s < 10


def test_nothing_listens(tmp_path: Path) -> None:
    shot = shoot("http://127.0.0.1:9", tmp_path, 5)
    noted("nothing listens", "5 connect", counted(shot.outcomes), shot.time_s)
    assert shot.outcomes == Counter(connect=5)


@pytest.mark.parametrize("key", ["sk-plain-0123456789", "sl/ash+pl@nted=", 'quo"te\\back'])
def test_a_key_that_the_server_quotes_is_nowhere(key: str, tmp_path: Path) -> None:
    with hostile.serving(hostile.quotes_authorization) as server:
        shot = shoot(server.url, tmp_path, 3, api_key=key)
    assert shot.outcomes == Counter(http_401=3)
    everything = repr(shot.records) + repr([c.detail for c in shot.captures])
    raw = b"".join(read.data for capture in shot.captures for read in capture.reads)
    leaked = [form for form in (key, json.dumps(key)[1:-1]) if form in everything or form.encode() in raw]
    noted("the server quotes the key it was sent", "removed", leaked or "removed", shot.time_s)
    assert not leaked
    assert b"*****" in raw


def test_a_tls_goodbye_in_mid_reply_is_a_truncation(tls: ssl.SSLContext, tmp_path: Path) -> None:
    def goodbye(sock: ssl.SSLSocket, asked: hostile.Asked) -> None:
        sock.sendall(STREAM_HEAD + chunk(OK_EVENTS[0]))
        sock.settimeout(0.5)
        sock.unwrap()  # close_notify; the socket itself stays open
        time.sleep(3)

    with hostile.serving(goodbye, tls=tls) as server:  # type: ignore[arg-type]
        shot: Shot = shoot(server.url, tmp_path, 3, deadline_s=5.0)
    noted("TLS close_notify in mid-reply", "3 truncated", counted(shot.outcomes), shot.time_s)
    assert shot.outcomes == Counter(truncated=3), shot.errors
