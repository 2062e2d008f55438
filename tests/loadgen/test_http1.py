"""HTTP/1.1 replies: however the bytes were cut into reads, they mean the same."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.loadgen.capture import http1
from burstline.loadgen.capture.capture import Reads
from burstline.servers.messages import EngineError, Read
from tests.loadgen.scripted import STREAM_HEAD, chunk

EVENTS = [b"data: one\n\n", b"data: two\r\n\r\n", b"data: \xe2\x82\xac 10\r\n\r\n", b"data: [DONE]\n\n"]
BODY = b"".join(EVENTS)

CHUNKED = STREAM_HEAD + b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"
REPLIES = {
    "chunked": CHUNKED,
    "one chunk for all": STREAM_HEAD + chunk(BODY) + b"0\r\n\r\n",
    "chunk extensions and trailers": STREAM_HEAD
    + b"".join(b"%X;a=b\r\n%s\r\n" % (len(e), e) for e in EVENTS)
    + b"0\r\nX-Sum: 1\r\n\r\n",
    "content length": b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY,
    "interim replies": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + CHUNKED,
}


def reads_of(data: bytes, cuts: list[int]) -> list[Read]:
    edges = [0, *sorted({c for c in cuts if 0 < c < len(data)}), len(data)]
    return [Read(10 * i + 5, 10 * i, data[a:b]) for i, (a, b) in enumerate(pairwise(edges))]


@pytest.mark.parametrize("name", REPLIES)
@given(data=st.data())
def test_every_split_of_a_reply_decodes_the_same(name: str, data: st.DataObject) -> None:
    wire = REPLIES[name]
    reads = reads_of(wire, data.draw(st.lists(st.integers(1, len(wire) - 1), max_size=20)))
    parsed = http1.parse(reads)
    assert parsed is not None
    reply, arrivals = parsed
    assert (reply.status, reply.body, reply.complete) == (200, BODY, True)
    # The read that completes an event is the first by which all bytes up to the event's last are there.
    ends = [sum(map(len, EVENTS[: k + 1])) for k in range(len(EVENTS))]
    for end, index in zip(ends, arrivals.body_ends.searchsorted(ends).tolist(), strict=True):
        so_far = http1.parse(reads[: index + 1])
        before = http1.parse(reads[:index])
        assert so_far is not None
        assert len(so_far[0].body) >= end
        assert before is None or len(before[0].body) < end


@pytest.mark.parametrize("name", REPLIES)
def test_every_torn_reply_is_incomplete_and_keeps_what_came(name: str) -> None:
    wire = REPLIES[name]
    for cut in range(1, len(wire)):
        parsed = http1.parse(reads_of(wire[:cut], []))
        if parsed is not None:
            assert not parsed[0].complete
            assert BODY.startswith(parsed[0].body)


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_of_single_bytes_has_its_head_when_the_blank_line_came(name: str) -> None:
    wire = REPLIES[name]
    parsed = http1.parse(reads_of(wire, list(range(len(wire)))))
    assert parsed is not None
    head_bytes = wire.index(b"\r\n\r\n", wire.index(b"200 OK")) + 4
    assert parsed[1].headers_ns == 10 * (head_bytes - 1) + 5


def test_nothing_and_half_a_head_are_no_reply() -> None:
    assert http1.parse([]) is None
    assert http1.parse(reads_of(STREAM_HEAD[:-1], [])) is None


def test_a_body_ended_by_the_connection_is_whole_as_far_as_it_goes() -> None:
    parsed = http1.parse(reads_of(b"HTTP/1.0 200 OK\r\n\r\nabc", [20]))
    assert parsed is not None
    assert (parsed[0].body, parsed[0].complete) == (b"abc", True)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_statuses_without_a_body_end_with_their_head(status: bytes) -> None:
    parsed = http1.parse(reads_of(b"HTTP/1.1 " + status + b"\r\n\r\n", []))
    assert parsed is not None
    assert parsed[0].complete


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", "compressed"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "expected an HTTP/1.1 reply"),
        (b"HTTP/2 200\r\n\r\n", "expected an HTTP/1.1 reply"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n", "Content-Length 'ten'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n", "Content-Length '1, 2'"),
        (STREAM_HEAD + b"xyz\r\n", "size of a chunk"),
        (STREAM_HEAD + b"-5\r\nabcde\r\n", "size of a chunk"),
    ],
)
def test_what_is_no_plain_http_is_refused_with_its_cause(wire: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        http1.parse(reads_of(wire, []))


@pytest.mark.parametrize("line", [b"0000000000000003", b"3;" + b"x" * 60_000, b"0" * 64 + b"3 ;a=b"])
def test_a_chunks_size_may_have_zeros_before_it_and_a_long_extension_behind(line: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    parsed = http1.parse(reads_of(head + line + b"\r\nabc\r\n0\r\n\r\n", []))
    assert parsed is not None
    assert (parsed[0].body, parsed[0].complete) == (b"abc", True)


def test_repeated_headers_are_joined_and_names_are_lower_case() -> None:
    head = http1.read_head(b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a:2\r\nContent-Length: 3, 3\r\n\r\n")
    assert head is not None
    assert head.headers["x-a"] == "1, 2"
    assert head.length == 3


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: keep-alive\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\n\r\n", False),
    ],
)
def test_a_connection_is_used_again_only_where_the_reply_allows_it(head: bytes, keep_alive: bool) -> None:
    parsed = http1.read_head(head)
    assert parsed is not None
    assert parsed.keep_alive is keep_alive


def test_reads_by_column_are_the_same_reads() -> None:
    reads = [Read(5, None, b"ab"), Read(9, 7, b"c"), Read(11, 10, b"")]
    columns = Reads.of(reads)
    assert list(columns) == reads
    assert columns[-2] == reads[1]
    assert columns[1:] == tuple(reads[1:])
    assert Reads.of(columns) is columns
    assert len(columns) == 3


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_has_none_whatever_its_head_says(status: int) -> None:
    wire = STREAM_HEAD.replace(b"200", b"%d" % status)
    assert b"chunked" in wire
    parsed = http1.parse(reads_of(wire, []))
    assert parsed is not None
    assert (parsed[0].status, parsed[0].body, parsed[0].complete) == (status, b"", True)
