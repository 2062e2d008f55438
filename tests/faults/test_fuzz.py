"""Fuzzing what others send: bytes of HTTP and SSE, JSON replies of every dialect, run folders, suite files.

Quick here: the stored corpus and a few hundred examples. The slow tests give each target 15 seconds, .ci/run a minute (the
replies of all dialects share theirs); a longer search:
`FUZZ_SECONDS=600 pytest -m slow tests/faults/test_fuzz.py`. `TEST_SEED` repeats one.
What once broke is kept in `corpus/`.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h11
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from burstline.cli import main
from burstline.loadgen.capture import http1
from burstline.loadgen.capture.capture import Capture
from burstline.loadgen.wire.exchange import Exchange
from burstline.measure.record.record import Record, record_of
from burstline.measure.record.tables import record_table
from burstline.servers.messages import EngineError, HttpReply, Read
from burstline.servers.registry import ENGINES
from burstline.servers.replies import understood
from burstline.workloads.request import Request
from tests.faults.lab import GOLDEN_RUN, noted
from tests.seeds import SEED

CORPUS = Path(__file__).parent / "corpus"
GOLDEN = Path(__file__).parents[1] / "golden"
SECONDS = float(os.environ.get("FUZZ_SECONDS", "15"))
REQUEST = Request(0, array("I", range(8)), None, 8, 4)
ENGINE_NAMES = sorted(ENGINES)

quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

# Bytes of HTTP and of event streams.

TOKENS = (
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.0 200 \r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 503 x\r\n",
    b"Content-Type: text/event-stream\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n",
    b"Content-Length: \xb2\r\n", b"Content-Length: " + b"9" * 30 + b"\r\n", b"Connection: close\r\n", b"\r\n",
    b"0\r\n\r\n", b"5\r\nabcde\r\n", b"ffffffffffffffff\r\n", b"-1\r\n", b"data: ", b"data: [DONE]\n\n", b"\n\n", b"\n",
    b'{"choices":[{"index":0,"text":"x","finish_reason":null}]}', b'{"choices":[]}', b'{"error":{"message":"no"}}',
    b'{"usage":{"prompt_tokens":8,"completion_tokens":4}}', b"event: x\n", b": comment\n", b"\xff\xfe", b"\x00", b"[",
)  # fmt: skip
wires = st.lists(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=12)), max_size=40).map(b"".join)


def golden_wires() -> list[bytes]:
    return [path.read_bytes() for path in sorted(GOLDEN.rglob("*.http")) if path.stat().st_size < 50_000]


def record_from(wire: bytes, cuts: list[int], engine: str) -> Record:
    """What becomes of these bytes, read in these pieces."""
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})
    reads = tuple(Read(10 * k, 10 * k, wire[a:b]) for k, (a, b) in enumerate(pairwise(edges)))
    capture = Capture(0, 0, 0, 0, 1, 1_000_000, reads, None, None)
    record = record_of(REQUEST, capture, ENGINES[engine].decode)
    record_table([record])
    return record


def without_times(record: Record) -> Record:
    record = replace(record, token_ns=(), read_lag_ns=(), read_error_ns=(), n_reads=0)
    return replace(record, headers_ns=None, first_event_ns=None, answer_ns=None)


def check_wire(wire: bytes, cuts: list[int], engine: str) -> None:
    """No split of a stream changes its record, and the wire's own framing survives any of its prefixes."""
    whole, split = record_from(wire, [], engine), record_from(wire, cuts, engine)
    assert without_times(whole) == without_times(split)
    assert whole.error is None or whole.error.isprintable()
    exchange = Exchange()
    for a, b in pairwise(sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})):
        exchange.data += wire[a:b]
        try:
            if exchange.is_whole():
                exchange.is_exact()
                break
        except EngineError:
            break

    check_as_h11(wire)


_BARE_OR_FOLDED = re.compile(rb"(?<!\r)\n|\r(?!\n)|\r\n[ \t]")


def check_as_h11(wire: bytes) -> None:
    """A reply that h11 takes for whole and valid has the same status and body here."""
    theirs = by_h11(wire)
    if theirs is None:
        return
    try:
        parsed = http1.parse([Read(0, 0, wire)])
    except EngineError as error:
        # Refused on purpose: compressed bodies, and numbers and heads beyond our limits.
        if not re.search(r"compressed|expected one number|expected a head|head of the reply", str(error)):
            raise
        return
    assert parsed is not None
    assert (parsed[0].status, parsed[0].body, parsed[0].complete) == (*theirs, True)


def by_h11(wire: bytes) -> tuple[int, bytes] | None:
    """Status and body by h11; None where it refuses the reply, or it is not whole.

    Also None where only h11's leniency makes it valid: bare line feeds and folded lines in the framing.
    """
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    status, body, framing, at = None, b"", b"", 0
    try:
        connection.receive_data(wire)
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code if event.http_version in (b"1.0", b"1.1") else None
            elif isinstance(event, h11.Data):
                body += event.data
                start = wire.find(event.data, at)
                framing, at = framing + wire[at:start], start + len(event.data)
            elif event is h11.NEED_DATA and not connection.trailing_data[1]:
                connection.receive_data(b"")  # the connection has ended
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return None
    framing += wire[at : len(wire) - len(connection.trailing_data[0])]
    return None if status is None or _BARE_OR_FOLDED.search(framing) else (status, body)


@quick
@given(wires, st.lists(st.integers(0, 1 << 20), max_size=12), st.sampled_from(ENGINE_NAMES))
def test_no_bytes_of_a_server_break_the_framing_or_depend_on_their_splits(
    wire: bytes, cuts: list[int], engine: str
) -> None:
    check_wire(wire, cuts, engine)


def test_replies_of_real_engines_are_read_as_h11_reads_them() -> None:
    for wire in golden_wires():
        assert by_h11(wire) is not None
        check_as_h11(wire)


# JSON replies of every dialect.

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8),
    st.sampled_from(["length", "stop", "\x1b[2J", "=1+1", 2**63 - 1, -1, 1e400]),
)  # fmt: skip
KEYS = [
    "choices",
    "text",
    "finish_reason",
    "delta",
    "message",
    "content",
    "role",
    "usage",
    "prompt_tokens",
    "completion_tokens",
    "error",
    "token",
    "id",
    "token_ids",
    "prompt_token_ids",
    "generated_text",
    "details",
    "finished",
    "tokens_predicted",
    "tokens_evaluated",
    "stop",
    "stop_type",
    "meta_info",
    "reasoning_content",
    "tool_calls",
    "prompt_tokens_details",
    "cached_tokens",
    "timings",
    "index",
    "object",
    "detail",
    "code",
    "event",
    "data",
    "count_output_tokens",
    "output_ids",
    "text_output",
    "prompt_n",
    "predicted_n",
]
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
    ),
    max_leaves=25,
)


def check_values(answers: list[object], engine: str, as_stream: bool) -> None:
    parts = [json.dumps(answer).encode() for answer in answers]
    body = b"".join(b"data: %s\n\n" % part for part in parts) if as_stream else b"".join(parts)
    kind = "text/event-stream" if as_stream else "application/json"
    reply = understood(ENGINES[engine].decode, HttpReply(200, {"content-type": kind}, body))
    assert reply.error is None or reply.error.isprintable()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    record = record_from(head + body, [], engine)
    for n in (record.prompt_tok, record.output_tok, record.cached_tok):
        assert n is None or 0 <= n < 2**31


@quick
@given(st.lists(values, min_size=1, max_size=4), st.sampled_from(ENGINE_NAMES), st.booleans())
def test_no_json_of_a_server_breaks_a_decoder(answers: list[object], engine: str, as_stream: bool) -> None:
    check_values(answers, engine, as_stream)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, removed, repeated, or replaced by something that once mattered."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randint(1, 40)]
            case 2:
                out[at:at] = out[at : at + rng.randint(1, 200)]
            case 3:
                out[at:at] = rng.choice(TOKENS)
            case _:
                out[at : at + rng.randint(0, 8)] = rng.choice(
                    [b"null", b"true", b"-1", b"1e999", b'"10"', b"{}", b"[]", b"9" * 30, b"\\ud800", b"\x00"]
                )
    return bytes(out)


# Run folders and suites.


def check_folder(run: Path, change: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
    change(run)
    for words in (["report", "--format", "text"], ["verify"]):
        code = main([*words, str(run)])
        said = capsys.readouterr()
        assert code in (0, 2, 4), said.err
        assert "Traceback" not in said.err, said.err[-3000:]


def a_change(rng: random.Random) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != "report.html")
        path = rng.choice(files)
        path.write_bytes(mutated(path.read_bytes(), rng))

    return change


def check_suite(text: bytes, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "suite.toml"
    path.write_bytes(text)
    code = main(["run", str(path), "--dry-run", "--out", str(folder / "out")])
    said = capsys.readouterr()
    assert code in (0, 2), said.err
    assert "Traceback" not in said.err, said.err[-3000:]


SUITES = sorted((Path(__file__).parents[2] / "burstline/suites/shipped").glob("*.toml"))


def test_a_few_mutated_suites_are_refused_in_plain_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(11)
    for k in range(30):
        check_suite(mutated(SUITES[k % len(SUITES)].read_bytes(), rng), tmp_path, capsys)


# What once broke: replayed here, and first of all by the slow targets (the folders only there: `test_folders.py`
# shows each in the quick suite).


def stored(kind: str) -> list[Path]:
    paths = sorted((CORPUS / kind).iterdir())
    assert paths
    return paths


def replay_wires() -> None:
    for path in stored("wire"):
        for engine in ENGINE_NAMES:
            check_wire(path.read_bytes(), [1, 7, 30, 200], engine)


def replay_replies(engine: str) -> None:
    for path in stored("replies"):
        for as_stream in (False, True):
            check_values(json.loads(path.read_bytes()), engine, as_stream)


def replay_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has the files that differ from a whole run."""
    for path in stored("folders"):
        run = shutil.copytree(GOLDEN_RUN, folder / "run")
        check_folder(run, lambda run, path=path: shutil.copytree(path, run, dirs_exist_ok=True), capsys)
        shutil.rmtree(run)


def replay_suites(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in stored("suites"):
        check_suite(path.read_bytes(), folder, capsys)


def test_the_corpus_of_what_once_broke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_wires()
    for engine in ENGINE_NAMES:
        replay_replies(engine)
    replay_suites(tmp_path, capsys)


# Some seconds each.


def for_a_while(name: str, seconds: float = SECONDS) -> Iterator[random.Random]:
    until_s, n, began_s = time.monotonic() + seconds, 0, time.monotonic()
    while time.monotonic() < until_s:
        n += 1
        yield random.Random(f"{name} {SEED} {n}")
    noted(
        f"fuzz: {name}",
        "no exception, loss or split",
        f"{n:,} cases",
        time.monotonic() - began_s,
    )


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """A case that asks for gigabytes fails, and does not take the machine with it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    in_use = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 4 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("bounded_memory")
def test_fuzz_wire(tmp_path: Path) -> None:
    replay_wires()
    seeds = golden_wires()
    for rng in for_a_while("HTTP and SSE bytes"):
        wire = rng.choice(seeds)
        wire = (
            mutated(wire, rng) if rng.random() < 0.8 else b"".join(rng.choices(TOKENS, k=rng.randint(1, 40)))
        )
        cuts = [rng.randrange(1 << 20) for _ in range(rng.randint(0, 30))]
        engine = rng.choice(ENGINE_NAMES)
        try:
            check_wire(wire, cuts, engine)
        except BaseException:
            (tmp_path / "broke.http").write_bytes(wire)
            print(f"kept in {tmp_path / 'broke.http'} (engine {engine}, cuts {cuts})")
            raise


LEAVES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**63 - 1, 2**70, 0.5, 1e308, float("nan"), "", "x", "length", "stop",
    "\x1b[2J", "=1+1", "\ud83d", "10",
)  # fmt: skip


def a_value(rng: random.Random, depth: int = 0) -> object:
    """A JSON value with the words of every dialect in places where they may not belong."""
    kind = rng.randrange(10)
    if depth > 4 or kind < 4:
        return rng.choice(LEAVES)
    if kind < 6:
        return [a_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): a_value(rng, depth + 1) for _ in range(rng.randrange(7))}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_fuzz_replies(engine: str) -> None:
    replay_replies(engine)
    for rng in for_a_while(f"JSON replies, {engine}", SECONDS / len(ENGINE_NAMES)):
        answers = [a_value(rng) for _ in range(rng.randint(1, 4))]
        check_values(answers, engine, rng.random() < 0.5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("bounded_memory")
def test_fuzz_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_folders(tmp_path, capsys)
    for rng in for_a_while("run folders"):
        run = shutil.copytree(GOLDEN_RUN, tmp_path / "run")
        check_folder(run, a_change(rng), capsys)
        shutil.rmtree(run)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("bounded_memory")
def test_fuzz_suites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay_suites(tmp_path, capsys)
    for rng in for_a_while("suites"):
        check_suite(mutated(rng.choice(SUITES).read_bytes(), rng), tmp_path, capsys)
