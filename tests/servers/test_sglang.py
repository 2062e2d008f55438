import sys
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest

from servers.engine import EngineError, HttpReply, LaunchOptions, Target
from servers.engines import sglang
from servers.engines.sglang import Sglang
from servers.host.installation import Installation
from tests.servers import documented as said
from tests.servers.golden import http_reply
from workloads.request import Request, Sampling

ENGINE = Sglang()
TARGET = Target("http://h:1", "m")
METRICS = """sglang:num_running_reqs{model_name="m",tp_rank="0"} 7.0
sglang:num_queue_reqs{model_name="m"} 2.0
sglang:token_usage{model_name="m"} 0.25
sglang:num_retracted_reqs{pid="4741"} 1.0
sglang:num_retracted_requests_total{model_name="m"} 48.0
sglang:cached_tokens_total{cache_source="device"} 10.0
sglang:cached_tokens_total{cache_source="host"} 5.0
sglang:prompt_tokens_total{model_name="m"} 100.0
sglang:generation_tokens_total{model_name="m"} 200.0
sglang:max_total_num_tokens{model_name="m"} 30764.0
sglang:kv_cache_memory_usage_gb{model_name="m"} 2.0
sglang:weight_memory_usage_gb{model_name="m"} 0.0
"""


def server(path: str) -> HttpReply:
    info = {
        "version": "0.5.23",
        "dtype": "auto",
        "kv_cache_dtype": "fp8_e4m3",
        "context_length": 4096,
        "page_size": 1,
        "chunked_prefill_size": 8192,
        "disable_radix_cache": True,
        "tp_size": 2,
        "internal_states": [{"effective_max_running_requests_per_dp": 512}],
    }
    replies = {"/server_info": info, "/model_info": {"model_path": "/m"}}
    if path == "/metrics":
        return HttpReply(200, {}, METRICS.encode())
    return HttpReply(200, {}, orjson.dumps(replies[path]))


def test_a_request_sends_ids_and_only_known_sampling_parameters() -> None:
    call = ENGINE.encode(Request(0, (5, 6), None, 2, 9), TARGET)
    assert call.path == "/generate"
    assert orjson.loads(call.body) == {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 9, "ignore_eos": True, "temperature": 0.0},
        "stream": True,
    }
    warm = orjson.loads(
        ENGINE.encode(Request(0, None, "a", 1, 9, sampling=Sampling(0.5, 0.9, 3)), TARGET).body
    )
    assert warm["text"] == "a"
    assert (warm["sampling_params"]["top_p"], warm["sampling_params"]["sampling_seed"]) == (0.9, 3)


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_of_an_event_are_the_growth_of_the_total_whichever_way_it_streams(incremental: bool) -> None:
    reply = ENGINE.decode(http_reply(said.sglang_stream(1, 4, 5, incremental=incremental)))
    assert [event.n_tok for event in reply.events] == [1, 3, 1]
    assert (reply.n_output_ids, reply.n_output_usage, reply.n_prompt_tok, reply.n_cached_tok) == (5, 5, 17, 1)


def test_it_starts_with_metrics_and_increments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sglang, "find_installation", lambda *_: Installation("py", {"sglang": "0.5.23"}, Path())
    )
    options = LaunchOptions("/m", "127.0.0.1", 8001, "m", Path(), extra_args=("--disable-radix-cache",))
    launch = ENGINE.launch(options)
    assert launch.argv == (
        *("py", "-m", "sglang.launch_server", "--model-path", "/m", "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", "8001", "--enable-metrics", "--incremental-streaming-output"),
        *("--tp-size", "1", "--random-seed", "0", "--disable-radix-cache"),
    )
    assert ENGINE.installed(None) == "0.5.23"


def test_where_it_is_not_installed_the_user_is_told_how_to_get_it() -> None:
    with pytest.raises(EngineError, match=r"pip install 'sglang==0\.5\.23'"):
        ENGINE.launch(LaunchOptions("/m", "127.0.0.1", 1, "m", Path(), sys.executable))


def test_it_identifies_a_server_and_a_memory_gauge_of_zero_was_not_measured() -> None:
    identity = asdict(ENGINE.identify(server, ""))
    del identity["raw"]
    assert identity == {
        "engine": "sglang",
        "version": "0.5.23",
        "model": "/m",
        "max_model_len": 4096,
        "dtype": None,
        "kv_dtype": "fp8_e4m3",
        "kv_tok": 30764,
        "kv_block_tok": 1,
        "kv_bytes": 2 * 2**30,
        "weight_bytes": None,
        "max_num_seqs": 512,
        "max_batched_tok": 8192,
        "vocab_size": None,
        "prefix_caching": False,
        "tensor_parallel": 2,
    }


def test_gauges_count_all_retractions_and_hits_of_every_source() -> None:
    assert asdict(ENGINE.gauges(METRICS)) == {
        "running": 7,
        "waiting": 2,
        "kv_used_fraction": 0.25,
        "preemptions": 48,
        "prefix_hit_tokens": 15,
        "prompt_tokens": 100,
        "generation_tokens": 200,
        "latencies": None,
    }
    assert ENGINE.gauges("").waiting is None


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "[02:01:08 TP0] Traceback\nRuntimeError: Not enough memory. Please try to increase\nOSError: x",
            "RuntimeError: Not enough memory. Please try to increase",
        ),
        (
            "launch_server.py: error: unrecognized arguments: --x",
            "launch_server.py: error: unrecognized arguments: --x",
        ),
        ("[2026-11-21 02:01:08] The server is fired up and ready to roll!", None),
    ],
)
def test_the_root_cause_is_the_first_that_failed(log: str, cause: str | None) -> None:
    assert ENGINE.root_cause(log) == cause
