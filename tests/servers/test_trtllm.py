import sys
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest

from burstline.servers.engines import trtllm
from burstline.servers.engines.trtllm import TrtLlm
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, HttpReply, Target
from burstline.workloads.request import Request

ENGINE = TrtLlm()


def test_not_one_field_is_sent_that_its_schema_lacks() -> None:
    fields = orjson.loads(ENGINE.encode(Request(0, (5, 6), None, 2, 9), Target("http://h:1", "m")).body)
    assert fields == {
        "model": "m",
        "prompt": [5, 6],
        "max_tokens": 9,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
    }


def test_it_is_started_with_the_users_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(trtllm.SERVER_VARIABLE, sys.executable)
    launch = ENGINE.launch(
        LaunchOptions("/m", "127.0.0.1", 8001, "m", tmp_path, extra_args=("--backend", "pytorch"))
    )
    where = ("--host", "127.0.0.1", "--port", "8001")
    assert launch.argv == (sys.executable, "/m", *where, "--backend", "pytorch")
    assert "return_perf_metrics" in launch.notes[0]
    monkeypatch.delenv(trtllm.SERVER_VARIABLE)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match="no trtllm-serve is found"):
        ENGINE.launch(LaunchOptions("/m", "127.0.0.1", 8001, "m", tmp_path))


def test_it_says_who_it_is_and_how_busy() -> None:
    replies = {"/version": {"version": "1.2.1"}, "/v1/models": {"data": [{"id": "m"}]}}
    identity = ENGINE.identify(lambda path: HttpReply(200, {}, orjson.dumps(replies[path])), "")
    assert (identity.version, identity.model, identity.kv_tok) == ("1.2.1", "m", None)
    text = 'trtllm_num_requests_running{model="m"} 4\ntrtllm_kv_cache_utilization{model="m"} 0.5\n'
    told = {name: value for name, value in asdict(ENGINE.gauges(text)).items() if value is not None}
    assert told == {"running": 4, "kv_used_fraction": 0.5}


def test_the_root_cause_is_the_first_complaint() -> None:
    assert ENGINE.root_cause("x\nRuntimeError: Failed to bind socket to 127.0.0.1:1\n") is not None
    assert ENGINE.root_cause("all is well") is None
