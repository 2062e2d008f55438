"""Where prompts get their ids from."""

import json

import pytest

from burstline.bench import plan_for_server as vocabulary
from burstline.bench.plan_for_server import vocabulary_for
from burstline.bench.server_session import Site
from burstline.servers.host.ready import Startup
from burstline.servers.identity import Identity
from burstline.servers.messages import HttpReply, Target
from burstline.servers.registry import ENGINES
from burstline.workloads.prompts import vocabulary_of_folder
from burstline.workloads.request import WorkloadError


def site_of(name: str, **facts: object) -> Site:
    engine = ENGINES[name]
    return Site(
        engine,
        Target("http://x", "m"),
        Identity(name, **facts),
        None,
        None,
        Startup(0.0),
        engine.capabilities,
    )


def test_a_vocabulary_that_nobody_tells_is_the_ids_that_the_server_makes_of_text(monkeypatch):
    asked = []

    def answer(target, call, timeout_s):
        text = json.loads(call.body)["prompt"]
        asked.append((call.path, len(call.body)))
        return HttpReply(
            200, {}, json.dumps({"tokens": [hash(word) % 5000 for word in text.split()]}).encode()
        )

    monkeypatch.setattr(vocabulary, "send", answer)
    made = vocabulary_for(None, None, None, site_of("vllm"))
    assert len(made.ids) > 1000
    assert made.ids.max() < 5000
    assert {path for path, _ in asked} == {"/tokenize"}
    assert max(n for _, n in asked) < 4096


@pytest.mark.parametrize("name", ["vllm", "lightllm", "sglang", "trtllm", "llamacpp"])
def test_a_server_that_tells_nothing_is_sent_no_ids_and_the_user_is_told_what_to_give(monkeypatch, name):
    sent = []

    def answer(target, call, timeout_s):
        sent.append(call)
        return HttpReply(404, {}, b"{}")

    monkeypatch.setattr(vocabulary, "send", answer)
    with pytest.raises(WorkloadError, match=r"is unknown: .* --tokenizer DIR or --vocab-size N"):
        vocabulary_for(None, None, None, site_of(name))
    assert [call.path for call in sent] == ["/tokenize"] * (name == "vllm")


def test_the_folder_that_a_server_names_is_read_where_it_is_on_this_machine(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 800}')
    made = vocabulary_for(None, None, None, site_of("lightllm", model=str(tmp_path)))
    assert made.ids.tolist() == list(range(100, 700))


def test_a_file_of_weights_is_no_folder_and_no_error(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert vocabulary_of_folder(tmp_path / "model.gguf") is None


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
