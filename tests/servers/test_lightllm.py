import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest

from burstline.servers.engines.lightllm import Lightllm
from burstline.servers.host import installation
from burstline.servers.host.installation import Installation
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, HttpReply, Target
from burstline.servers.registry import engine_at
from burstline.workloads.request import Request, Sampling
from tests.servers.golden import GOLDEN, golden_reply, http_reply

ENGINE = Lightllm()
TARGET = Target("http://h:1", "m")
LOG = """INFO 11-21 02:01:08 [basemodel.py:1] loading
INFO 50.25 GB space is available after load the model weight
0.5 MB is the size of one token kv cache
102912 is the profiled max_total_token_num with the mem_fraction 0.9
INFO set shm_max_total_token_num value to 102912"""


def recorded(path: str) -> HttpReply:
    name = {"/get_server_info": "server_info", "/v1/models": "models"}[path]
    return golden_reply(f"lightllm/{name}.http")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Installation("py", {"lightllm": "1.2.0"}, Path())
    monkeypatch.setattr(installation, "find_installation", lambda *_: here)
    monkeypatch.delenv("LIGHTLLM_LOG_LEVEL", raising=False)


def options(*extra_args: str, n_concurrent: int | None = None) -> LaunchOptions:
    return LaunchOptions("/m", "127.0.0.1", 8001, "m", Path(), None, extra_args, n_concurrent)


def test_a_request_says_all_that_the_models_own_generation_config_would_decide() -> None:
    call = ENGINE.encode(Request(0, (5, 6), None, 2, 9), TARGET)
    assert call.path == "/generate_stream"
    assert orjson.loads(call.body) == {
        "inputs": [5, 6],
        "parameters": {
            "max_new_tokens": 9,
            "ignore_eos": True,
            "do_sample": False,
            "repetition_penalty": 1.0,
        },
    }
    warm = Request(0, None, "a", 2, 9, ignore_eos=False, sampling=Sampling(0.5, 0.9, 3))
    fields = orjson.loads(ENGINE.encode(warm, TARGET).body)
    assert fields["inputs"] == "a"
    assert fields["parameters"]["ignore_eos"] is False
    chosen = {
        name: fields["parameters"][name] for name in ("do_sample", "temperature", "top_p", "seed", "top_k")
    }
    assert chosen == {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "seed": 3, "top_k": -1}


def test_every_event_of_a_recorded_stream_is_one_token_even_without_text() -> None:
    reply = ENGINE.decode(golden_reply("lightllm/generate_stream_ids.http"))
    assert [event.n_tok for event in reply.events] == [1] * 12
    assert (reply.n_prompt_tok, reply.n_output_usage) == (64, 12)
    assert (reply.finish_reason, reply.terminated) == ("length", True)


@pytest.mark.usefixtures("installed")
def test_it_starts_on_one_gpu_quietly_and_with_time_for_its_slow_stop() -> None:
    launch = ENGINE.launch(options("--mem_fraction", "0.85"))
    assert launch.argv == (
        *("py", "-m", "lightllm.server.api_server", "--model_dir", "/m", "--model_name", "m"),
        *("--host", "127.0.0.1", "--port", "8001", "--tp", "1", "--mem_fraction", "0.85"),
    )
    assert launch.env == {"LIGHTLLM_LOG_LEVEL": "info"}
    assert (launch.stop_grace_s, launch.version, launch.notes) == (75, "1.2.0", ())
    assert "1" not in ENGINE.launch(options("--tp", "2")).argv


@pytest.mark.usefixtures("installed")
def test_a_burst_beyond_its_slots_gets_as_many_slots_and_the_user_is_told() -> None:
    launch = ENGINE.launch(options(n_concurrent=1000))
    raised = ("--running_max_req_size", "1000", "--graph_max_batch_size", "1000")
    assert launch.argv[-4:] == raised
    many = ENGINE.launch(options(n_concurrent=20_000)).argv
    assert many[many.index("--running_max_req_size") + 1] == "1024"
    assert "wait in LightLLM's HTTP process" in launch.notes[0]
    assert ENGINE.launch(options(n_concurrent=256)).notes == ()
    chosen = ENGINE.launch(options("--running_max_req_size=64", n_concurrent=1000))
    assert (chosen.argv[-1], chosen.notes) == ("--running_max_req_size=64", ())


@pytest.mark.usefixtures("installed")
def test_slots_that_the_user_sets_get_cuda_graphs_for_all_of_them() -> None:
    """By default batches beyond 256 decode eagerly."""
    launch = ENGINE.launch(options("--running_max_req_size", "512", n_concurrent=40))
    assert launch.argv[-4:] == ("--graph_max_batch_size", "512", "--running_max_req_size", "512")
    assert [note.split(":")[0] for note in launch.notes] == ["--graph_max_batch_size 512"]
    for own in (("--graph_max_batch_size", "64"), ("--disable_cudagraph",)):
        chosen = ENGINE.launch(options("--running_max_req_size", "512", *own))
        assert (chosen.argv[-len(own) :], chosen.notes) == (own, ())
        assert " ".join(chosen.argv).count("--graph_max_batch_size") == own.count("--graph_max_batch_size")
    assert ENGINE.launch(options("--running_max_req_size", "64")).notes == ()


def test_inside_its_image_it_is_started_by_the_images_python() -> None:
    inside = LaunchOptions("/m", "0.0.0.0", 8001, "m", Path(), image="lightllm")
    assert ENGINE.launch(inside).argv[:3] == ("python", "-m", "lightllm.server.api_server")


def test_where_it_is_not_installed_the_user_is_told_how_to_get_it() -> None:
    missing = LaunchOptions("/m", "127.0.0.1", 1, "m", Path(), sys.executable)
    with pytest.raises(EngineError, match=r"not installed for .*github\.com/ModelTC/LightLLM.*--container"):
        ENGINE.launch(missing)
    assert ENGINE.installed(sys.executable) is None


def test_it_identifies_a_server_from_recorded_replies_and_its_log() -> None:
    identity = asdict(ENGINE.identify(recorded, LOG))
    assert identity.pop("raw")["server_info"]["running_max_req_size"] == 8
    expected = {
        "model": "/models/tiny",
        "max_model_len": 512,
        "kv_tok": 102912,
        "kv_bytes": 102912 * 2**19,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "prefix_cache": True,
        "tensor_parallel_size": 1,
        "version": None,
        "weight_bytes": None,
        "kv_cache_dtype": identity["dtype"],
    }
    assert {name: identity[name] for name in expected} == expected


def test_the_text_none_is_no_data_type_of_the_kv_cache() -> None:
    """`--llm_kv_type` is "None" by default, and every comparison of the KV cache's precision failed."""
    assert json.loads(recorded("/get_server_info").body)["llm_kv_type"] == "None"
    identity = ENGINE.identify(recorded, "")
    assert identity.kv_cache_dtype == identity.dtype == "bf16"


def test_requests_beyond_its_slots_are_told_before_the_load() -> None:
    (note,) = ENGINE.before_load(ENGINE.identify(recorded, ""), 40, 64)
    assert note == (
        "LightLLM has 8 slots: other requests wait in a queue that none of its metrics shows. Pass "
        "--concurrency 8, or raise the server's limit (--running_max_req_size)"
    )
    assert ENGINE.before_load(ENGINE.identify(recorded, ""), 8, 64) == ()


def test_without_a_log_its_kv_cache_is_what_the_user_gave() -> None:
    assert ENGINE.identify(recorded, "").kv_tok == 2000


def test_gauges_come_from_recorded_metrics_and_what_is_not_provided_is_none() -> None:
    gauges = asdict(ENGINE.gauges(golden_reply("lightllm/metrics.http").body.decode()))
    assert gauges.pop("generation_tokens") == 66
    assert gauges.pop("prompt_tokens") == 739
    latencies = gauges.pop("latencies")
    assert (latencies["ttft_count"], latencies["e2e_count"]) == (6, 6)
    assert latencies["ttft_sum"] < latencies["e2e_sum"]
    assert gauges.pop("prefix_hit_tokens") == 0
    assert set(gauges.values()) == {None}
    running = 'lightllm_num_running_reqs{model_name="m"} 3.0\nlightllm_queue_size{model_name="m"} 2.0\n'
    assert ENGINE.gauges(running).running == 3


def test_its_router_queue_is_not_shown_as_what_waits() -> None:
    """What waits for a slot waits in the HTTP process: the timeline drew 0 waiting requests while 32 did."""
    assert ENGINE.gauges('lightllm_queue_size{model_name="m"} 2.0\n').waiting is None
    assert not ENGINE.capabilities.queue_depth


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("x\nRuntimeError: port 8001 has been used\n", "RuntimeError: port 8001 has been used"),
        (
            "ERROR check max len infer fail, you can try: 1.Set the --mem_fraction\nException: x: y",
            "check max len infer fail, you can try: 1.Set the --mem_fraction",
        ),
        ("INFO init func start_router_process : init ok\n", None),
        ("ERROR init func start_router_process : no such model\n", "no such model"),
        ("", None),
    ],
)
def test_the_root_cause_is_the_first_that_failed(log: str, cause: str | None) -> None:
    assert ENGINE.root_cause(log) == cause


def test_a_dead_engine_is_not_healthy() -> None:
    reply = http_reply((GOLDEN / "lightllm/health.http").read_bytes())
    assert (reply.status, ENGINE.probe_path) == (200, "/health")


def test_an_attached_server_that_tells_nothing_is_unknown_not_zero() -> None:
    nothing: Callable[[str], HttpReply] = lambda path: HttpReply(404, {}, b"")  # noqa: E731
    identity = asdict(ENGINE.identify(nothing, ""))
    assert {value for name, value in identity.items() if name not in ("engine", "raw")} == {None}


@pytest.mark.usefixtures("installed")
def test_the_name_of_its_shared_memory_stands_in_its_log() -> None:
    launch = ENGINE.launch(options())
    log = (
        f"all start args:Namespace(zmq_mode={orjson.loads(recorded('/get_server_info').body)['zmq_mode']!r})"
    )
    assert re.findall(launch.leftover_id or "", log) == ["80d7fb0f4489454f_0"]
    of_2025 = log.replace("80d7fb0f4489454f", "28555")
    assert re.findall(launch.leftover_id or "", of_2025) == ["28555_0"]
    assert launch.leftovers == ("/dev/shm/{id}_*", "/tmp/_{id}_*")


@pytest.mark.parametrize("page", ["# TYPE lightllm_x gauge\n", 'lightllm_x{a="b"} 1\n'])
def test_one_of_before_1_1_is_recognised_by_its_metrics_and_names_its_model(page: str) -> None:
    pages = {"/metrics": page, "/get_model_name": '{"model_name": "old"}'}

    def get(path: str) -> HttpReply:
        return HttpReply(200, {}, pages[path].encode()) if path in pages else HttpReply(404, {}, b"")

    assert engine_at(get) == "lightllm"
    assert ENGINE.identify(get, "").model == "old"
    assert engine_at(lambda path: HttpReply(404, {}, b"")) == "openai"
