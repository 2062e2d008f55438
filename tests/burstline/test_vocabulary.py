"""Where prompts get their ids from."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burstline.bench import vocabulary
from burstline.bench.server_session import Site
from burstline.bench.vocabulary import LARGEST_VOCABULARY, vocabulary_by_asking, vocabulary_of_folder
from servers.engine import HttpReply, Identity, Target
from servers.registry import ENGINES
from workloads.request import WorkloadError


@given(st.integers(16, LARGEST_VOCABULARY))
def test_bisection_finds_the_size_of_any_vocabulary_in_a_few_questions(size):
    asked = []

    def accepts(token_id):
        asked.append(token_id)
        return token_id < size

    assert vocabulary_by_asking(accepts).ids[-1] == size * 7 // 8 - 1
    assert len(asked) < 25


def test_a_server_that_takes_any_id_is_told_apart():
    with pytest.raises(WorkloadError, match="--vocab-size"):
        vocabulary_by_asking(lambda token_id: True)


def test_a_server_that_refuses_every_id_is_told_apart():
    with pytest.raises(WorkloadError, match="refuses every"):
        vocabulary_by_asking(lambda token_id: False)


@pytest.mark.parametrize(
    ("body", "accepted"),
    [
        (b'data: {"choices":[{"index":0,"text":"x","finish_reason":"length"}]}\n\ndata: [DONE]\n\n', True),
        (b'data: {"error":{"message":"Token id 4194304 is out of vocabulary"}}\n\ndata: [DONE]\n\n', False),
    ],
)
def test_a_refusal_inside_a_reply_of_status_200_is_a_refusal(monkeypatch, body, accepted):
    target = Target("http://x", "m")
    engine = ENGINES["vllm"]
    site = Site(engine, target, Identity("vllm"), None, None, 0.0, engine.capabilities)
    headers = {"content-type": "text/event-stream"}
    monkeypatch.setattr(vocabulary, "send", lambda *_: HttpReply(200, headers, body))
    assert vocabulary._accepts(site, 4194304) is accepted


def test_a_tokenizer_larger_than_the_model_is_cut_to_the_model(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    pieces = {f"p{i}": i for i in range(5)}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}, "added_tokens": []}))
    assert vocabulary_of_folder(tmp_path).ids.tolist() == [0, 1, 2]


def test_a_folder_with_only_a_config_gives_the_middle_of_its_vocabulary(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 800}')
    assert vocabulary_of_folder(tmp_path).ids.tolist() == list(range(100, 700))


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WorkloadError, match=r"config\.json"):
        vocabulary_of_folder(tmp_path)


def test_an_empty_folder_knows_nothing(tmp_path):
    assert vocabulary_of_folder(tmp_path) is None
