from hypothesis import given
from hypothesis import strategies as st

from burstline.servers import replies

ONE_LINE = st.binary(max_size=20).map(lambda b: b.replace(b"\r", b"").replace(b"\n", b"").lstrip(b" "))


def test_every_event_ends_just_past_its_blank_line() -> None:
    body = b"data: one\n\ndata:two\n\n"
    assert replies.server_sent_events(body) == ([b"one", b"two"], [11, 21])


def test_carriage_returns_alone_or_with_newlines_end_lines_too() -> None:
    assert replies.server_sent_events(b"data: a\r\n\r\ndata: b\r\rdata: c\n\n") == (
        [b"a", b"b", b"c"],
        [11, 20, 29],
    )


def test_comments_and_other_fields_are_no_events() -> None:
    body = b": ping\n\nevent: x\nid: 7\nretry: 1\n\n: again\ndata: a\nevent: y\n\n"
    assert replies.server_sent_events(body) == ([b"a"], [len(body)])


def test_several_data_lines_are_one_event_joined_by_newlines() -> None:
    assert replies.server_sent_events(b"data: a\ndata\ndata:  b\n\n") == ([b"a\n\n b"], [23])


def test_a_last_event_without_its_blank_line_is_handed_out() -> None:
    assert replies.server_sent_events(b"data: a\n\ndata: b") == ([b"a", b"b"], [9, 16])
    assert replies.server_sent_events(b"data: a\n\ndata: b\n") == ([b"a", b"b"], [9, 17])


def test_a_byte_order_mark_and_an_empty_body_are_fine() -> None:
    assert replies.server_sent_events(b"\xef\xbb\xbfdata: a\n\n") == ([b"a"], [12])
    assert replies.server_sent_events(b"") == ([], [])


@given(st.lists(ONE_LINE, max_size=8))
def test_the_quick_way_and_the_whole_grammar_agree(payloads: list[bytes]) -> None:
    body = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    assert replies._plain_events(body) == replies._any_events(body) == replies.server_sent_events(body)
    assert replies.server_sent_events(body)[0] == payloads


@given(
    st.lists(st.sampled_from([b"data:", b"data: ", b"\n\n", b"\n", b"\r", b"x", b" ", b":", b"\xef\xbb\xbf"]))
)
def test_the_quick_way_never_says_otherwise_than_the_whole_grammar(parts: list[bytes]) -> None:
    body = b"".join(parts)
    assert replies._plain_events(body) in (None, replies._any_events(body))


@given(st.binary())
def test_any_bytes_give_events_that_end_in_order_inside_the_body(body: bytes) -> None:
    payloads, ends = replies.server_sent_events(body)
    assert len(payloads) == len(ends)
    assert ends == sorted(set(ends))
    assert all(0 < end <= len(body) for end in ends)
