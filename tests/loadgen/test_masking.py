"""A key that a server quotes is gone from the capture, and all else of the reply is as it was."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.loadgen.capture.masking import masked_reply
from burstline.servers import redact
from tests.secrets_learned import forget

HEAD = b"HTTP/1.1 200 OK\r\nserver: %b\r\ncontent-type: %b\r\n%b\r\n"
JSON, EVENTS, TEXT = b"application/json", b"text/event-stream", b"text/plain"
pytestmark = pytest.mark.usefixtures("fresh")


def reply(body: bytes, kind: bytes = JSON, *, said: bytes = b"x", chunk: int = 0) -> bytes:
    if not chunk:
        return HEAD % (said, kind, b"") + body
    parts = [body[at : at + chunk] for at in range(0, len(body), chunk)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return HEAD % (said, kind, b"transfer-encoding: chunked\r\n") + framed + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("key", "body", "kind", "left"),
    [
        ("12345", b'{"n": 12345, "ids": [5, 12345, 7], "said": "12345"}', JSON,
         b'{"n": 12345, "ids": [5, 12345, 7], "said": "*****"}'),
        ("choices", b'{"choices": [{"text": "choices"}]}', JSON, b'{"choices": [{"text": "*******"}]}'),
        ("choices", b'data: {"choices" : ["a choices \\" b"]}\n\n', EVENTS,
         b'data: {"choices" : ["a ******* \\" b"]}\n\n'),
        ("987654321", b"data: no such key 987654321\n\n", EVENTS, b"data: no such key *********\n\n"),
        ("987654321", b"987654321", EVENTS, b"987654321"),
        ("987654321", b"no key: 987654321", TEXT, b"no key: *********"),
        ("1e300", b'[1e300, 5.1e300, "1e300"]', JSON, b'[1e300, 5.1e300, "*****"]'),
        ("open-sesame", b'{"a": "open-sesame', JSON, b'{"a": "***********'),
        ('se"cret', rb'{"a": "se\"cret", "se\"cret": 1}', JSON, rb'{"a": "********", "se\"cret": 1}'),
        ("secret-1", b'{\n  "a": 5,\n  "b": "secret-1"\n}', JSON, b'{\n  "a": 5,\n  "b": "********"\n}'),
        ("secret-1", b'data: he said "\ndata: {"secret-1": "secret-1"}\n', EVENTS,
         b'data: he said "\ndata: {"secret-1": "********"}\n'),
    ],
)  # fmt: skip
def test_values_go_and_names_numbers_and_framing_stay(key, body, kind, left):
    redact.learn(key)
    assert masked_reply(reply(body, kind)) == reply(left, kind)
    whole = len(body)
    assert masked_reply(reply(body, kind, chunk=whole)) == reply(left, kind, chunk=whole)


def test_headers_lose_their_values_and_keep_their_names():
    redact.learn("server")
    assert masked_reply(reply(b"{}", said=b"a server b")) == reply(b"{}", said=b"a ****** b")


def test_chunk_sizes_and_what_a_chunk_cuts_stay_readable():
    redact.learn("abcde")
    masked = masked_reply(reply(b'{"a": "' + b"z" * 0xABCDE + b'abcde", "n": 1}', chunk=0xABCDE))
    assert masked.startswith(HEAD % (b"x", JSON, b"transfer-encoding: chunked\r\n") + b"abcde\r\n")
    assert b"abcde" not in masked[200:]


KEYS = st.text(st.sampled_from('abe15"\\/é =:-{}[],'), min_size=5, max_size=12)
NAMES = st.sampled_from(["a", "b15", "choices", "usage"])


@given(
    KEYS,
    st.recursive(
        st.one_of(
            st.integers(0, 10**6), st.booleans(), st.none(), st.text("abe15 é", max_size=6), st.just("KEY")
        ),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
        max_leaves=12,
    ),
    st.integers(0, 9),
    st.booleans(),
)
def test_a_masked_reply_decodes_to_the_same_but_for_the_key(key, value, chunk, ascii_only):
    def where(inner, text):
        if isinstance(inner, dict):
            return {name: where(each, text) for name, each in inner.items()}
        if isinstance(inner, list):
            return [where(each, text) for each in inner]
        return f"it is {text}." if inner == "KEY" else inner

    def encoded(text):
        return json.dumps(where(value, text), ensure_ascii=ascii_only).encode()

    with pytest.MonkeyPatch.context() as patch:
        forget(patch)
        redact.learn(key)
        if (
            any(form in json.dumps(where(value, "")) for form in redact._known)
            or key.lower() in redact.OF_PROTOCOL
        ):
            return
        raw = reply(encoded(key), chunk=chunk and len(encoded(key)))
        masked = masked_reply(raw)
        assert len(masked) == len(raw)
        stars = "*" * len(json.dumps(key, ensure_ascii=ascii_only)[1:-1].encode())
        assert masked == reply(encoded(stars), chunk=chunk and len(encoded(key)))
