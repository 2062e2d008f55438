"""Text survives the round trip, whole and streamed, and every id is some text."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from burstline.servers.reference.tokenizer import TextStream, built_in

TOKENIZER = built_in(8192)


@given(st.text(max_size=60))
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    assert all(0 <= i < 8192 for i in ids)
    if "</s>" not in text:
        assert TOKENIZER.decode(ids) == text


@given(st.text(max_size=60).filter(lambda text: "</s>" not in text))
def test_streamed_deltas_join_to_the_text(text: str) -> None:
    ids, stream = TOKENIZER.encode(text).ids, TextStream(TOKENIZER)
    deltas = [stream.push(token, last=i == len(ids) - 1) for i, token in enumerate(ids)]
    assert "".join(deltas) == text


@example([0, 127, 0, 0, 0, 95])
@example([1, 95, 95, 95, 127, 95])
@given(st.lists(st.integers(0, 8191), min_size=1, max_size=40))
def test_any_ids_stream_without_a_crash_and_end_with_nothing_held(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER)
    deltas = [stream.push(token, last=i == len(ids) - 1) for i, token in enumerate(ids)]
    assert "".join(deltas).replace("\ufffd", "") == TOKENIZER.decode(ids).replace("\ufffd", "")


def test_every_id_but_eos_is_some_text() -> None:
    assert all(TOKENIZER.decode([i]) for i in range(1, 8192))
    assert TOKENIZER.decode([0]) == ""


@pytest.mark.parametrize("vocab_size", [257, 300, 32000])
def test_the_vocabulary_is_as_large_as_asked(vocab_size: int) -> None:
    assert built_in(vocab_size).get_vocab_size() == vocab_size
