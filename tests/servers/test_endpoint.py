from array import array
from pathlib import Path

import orjson
import pytest

from servers.engine import EngineError, HttpReply, LaunchOptions, Target
from servers.registry import ENGINES
from workloads.request import Request

ENGINE = ENGINES["openai"]
TARGET = Target("https://host/v1", "m", "key")


def test_only_fields_of_openais_own_schema_are_sent_and_text_where_there_is_text() -> None:
    call = ENGINE.encode(Request(0, array("I", [7]), "seven", 1, 9), TARGET)
    fields = orjson.loads(call.body)
    assert set(fields) == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert fields["prompt"] == "seven"
    assert call.path == "/completions"
    ids_only = ENGINE.encode(Request(0, array("I", [7]), None, 1, 9), TARGET)
    assert orjson.loads(ids_only.body)["prompt"] == [7]


def test_it_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="attach to it by its URL"):
        ENGINE.launch(LaunchOptions("m", "127.0.0.1", 1, "m", tmp_path))


def test_it_is_whatever_model_it_names_and_nothing_else_is_known() -> None:
    reply = HttpReply(200, {}, b'{"data":[{"id":"gpt","object":"model"}]}')
    identity = ENGINE.identify(lambda path: reply, "")
    assert (identity.model, identity.version, identity.max_model_len) == ("gpt", None, None)
    assert ENGINE.gauges("").running is None
