import sys
from dataclasses import asdict, replace
from pathlib import Path

import orjson
import pytest

from burstline.loadgen.capture.capture import Capture
from burstline.measure.metrics.definitions import METRICS
from burstline.measure.record.columns import columns_of
from burstline.measure.record.record import record_of
from burstline.measure.record.tables import record_table
from burstline.servers.engines import sglang
from burstline.servers.engines.sglang import Sglang
from burstline.servers.host import installation
from burstline.servers.host.installation import Installation
from burstline.servers.identity import Admission
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, HttpReply, Read, Target
from burstline.workloads.request import Request, Sampling
from tests.servers import documented as said
from tests.servers.golden import GOLDEN, golden_reply, http_reply

ENGINE = Sglang()
TARGET = Target("http://h:1", "m")


def recorded(path: str) -> HttpReply:
    """0.5.23 on a CPU, a made model of 5 million parameters."""
    return golden_reply(f"sglang/{path.rpartition('/')[2]}.http")


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


def test_a_recorded_stream_brings_the_servers_own_times_of_the_request() -> None:
    reply = ENGINE.decode(recorded("generate_stream"))
    assert [event.n_tok for event in reply.events] == [1] * 8
    assert (reply.n_output_ids, reply.n_output_usage, reply.n_prompt_tok, reply.n_cached_tok) == (8, 8, 32, 0)
    assert reply.times is not None
    assert reply.times.queue_s == pytest.approx(0.000275, abs=1e-6)
    assert reply.times.prefill_s == pytest.approx(0.0145, abs=1e-4)
    assert reply.times.first_token_s == pytest.approx(0.0170, abs=1e-4)


def test_the_parts_of_a_requests_ttft_add_up_to_what_the_client_saw() -> None:
    raw = (GOLDEN / "sglang" / "generate_stream.http").read_bytes()
    reads = [Read(30_000_000, None, raw[:800]), Read(90_000_000, None, raw[800:])]
    request = Request(0, tuple(range(32)), None, 32, 8)
    record = record_of(request, Capture(0, 0, 1, 2, 3, 91_000_000, reads), ENGINE.decode)
    c = columns_of(record_table([record]))
    parts = ("server_queue", "server_prefill", "server_other", "outside_server")
    queue_s, prefill_s, other_s, outside_s = (float(METRICS[name].of(c)[0]) for name in parts)
    assert (queue_s, prefill_s) == (record.server_queue_s, record.server_prefill_s)
    assert other_s == pytest.approx(0.0170 - 0.0145 - 0.0003, abs=2e-4)
    assert outside_s == pytest.approx(0.030 - 0.0170, abs=1e-4)
    assert queue_s + prefill_s + other_s + outside_s == pytest.approx(c.first_s[0] - c.sent_s[0])


@pytest.mark.parametrize(
    ("name", "words"), [("too_long", "reduce the number of tokens"), ("bad_params", "max_new_tokens")]
)
def test_an_error_within_a_reply_of_status_200_is_an_error(name: str, words: str) -> None:
    raw = recorded(f"generate_{name}")
    assert raw.status == 200
    assert words in (ENGINE.decode(raw).error or "")


def installed_in(monkeypatch: pytest.MonkeyPatch, environment: Path) -> None:
    """As the install script leaves it: the interpreter and the `sglang` command in one folder."""
    (environment / "bin").mkdir()
    (environment / "bin" / "sglang").touch()
    found = Installation("py", {"sglang": "0.5.23"}, environment / "bin")
    monkeypatch.setattr(installation, "find_installation", lambda *_: found)


def test_it_starts_with_metrics_and_increments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed_in(monkeypatch, tmp_path)
    options = LaunchOptions("/m", "127.0.0.1", 8001, "m", Path(), extra_args=("--disable-radix-cache",))
    launch = ENGINE.launch(options)
    assert launch.argv == (
        *("py", str(tmp_path / "bin" / "sglang"), "serve", "--model-path", "/m", "--served-model-name", "m"),
        *("--host", "127.0.0.1", "--port", "8001", "--enable-metrics", "--incremental-streaming-output"),
        *("--tp-size", "1", "--random-seed", "0", "--disable-radix-cache"),
    )
    assert launch.env == {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    assert ENGINE.installed(None) == "0.5.23"


def test_an_environment_for_cpus_is_started_on_the_cpu_with_its_own_libcuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed_in(monkeypatch, tmp_path)
    library = tmp_path / "lib" / "no-cuda"
    library.mkdir(parents=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sglang, "threads_for_server", lambda: 1)
    options = LaunchOptions("/m", "127.0.0.1", 8001, "m", Path(), extra_args=("--device", "cpu"))
    launch = ENGINE.launch(options)
    assert launch.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert launch.env["LD_LIBRARY_PATH"] == f"{library}:/opt/lib"
    assert launch.env["OMP_NUM_THREADS"] == "1"
    assert launch.env["SGLANG_CPU_OMP_THREADS_BIND"].isdecimal()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS" not in ENGINE.launch(options).env
    own = launch.argv[launch.argv.index("--attention-backend") :]
    assert own[:4] == (*own[:1], "torch_native", "--disable-overlap-schedule", "--mem-fraction-static")
    assert 0 < float(own[4]) < 0.9
    assert own[5:] == ("--device", "cpu")
    assert launch.argv.count("--device") == 1


def test_where_it_is_not_installed_the_user_is_told_how_to_get_it() -> None:
    with pytest.raises(EngineError, match=r"pip install 'sglang==0\.5\.23'.*install-sglang-cpu\.sh"):
        ENGINE.launch(LaunchOptions("/m", "127.0.0.1", 1, "m", Path(), sys.executable))


LOG = "[2026-11-22 03:49:24] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 910926, K size: 0.87 GB"


def test_how_it_batches_is_read_from_its_flags() -> None:
    identity = ENGINE.identify(recorded, LOG)
    assert ENGINE.admission_of(None) == Admission(mixed_steps=False, ahead=True)
    assert ENGINE.admission_of(identity) == Admission(mixed_steps=False)  # --disable-overlap-schedule
    mixed = {"server_info": {"enable_mixed_chunk": True}}
    assert ENGINE.admission_of(replace(identity, raw=mixed)) == Admission(ahead=True)


def test_it_identifies_a_recorded_server_and_what_it_chose_itself_from_its_log() -> None:
    identity = asdict(ENGINE.identify(recorded, LOG))
    del identity["raw"]
    assert {name: value for name, value in identity.items() if value is not None} == {
        "engine": "sglang",
        "version": "0.5.23",
        "model": "/models/tiny",
        "max_model_len": 4096,  # `context_length` is null: only /v1/models says it
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "kv_tok": 1022593,
        "kv_block_tok": 1,
        "kv_bytes": 2094272512,
        # no weight_bytes: the gauge says -1.9e-05, it was not measured
        "max_num_seqs": 4096,
        "max_num_batched_tokens": 4096,  # a chunk, not --max-prefill-tokens
        "chunked_prefill": True,
        "cuda_graphs": "off",
        "attention": "torch_native",
        "system": "cpu",
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "expert_parallel": False,
        "gpu_memory_utilization": 0.1,
        "prefix_cache": False,
        "tensor_parallel_size": 1,
    }


def test_of_a_server_found_running_the_data_type_that_it_chose_is_not_known() -> None:
    identity = ENGINE.identify(recorded, "")
    assert (identity.dtype, identity.kv_cache_dtype) == (None, None)


def test_gauges_count_hits_of_every_source_and_priorities_once() -> None:
    metrics = """sglang:num_running_reqs{priority=""} 7.0
sglang:num_running_reqs{priority="1"} 4.0
sglang:num_running_reqs{priority="None"} 3.0
sglang:num_retracted_reqs{pid="4741"} 1.0
sglang:num_retracted_requests_total{model_name="m"} 48.0
sglang:cached_tokens_total{cache_source="device"} 10.0
sglang:cached_tokens_total{cache_source="host"} 5.0
"""
    gauges = ENGINE.gauges(metrics)
    assert (gauges.running, gauges.preemptions, gauges.prefix_hit_tokens) == (7, 48, 15)
    assert ENGINE.gauges("").waiting is None


def test_gauges_and_histograms_of_a_recorded_server() -> None:
    gauges = ENGINE.gauges(recorded("metrics").body.decode())
    assert (gauges.running, gauges.waiting, gauges.kv_used_fraction) == (0, 0, 0)
    assert (gauges.prompt_tokens, gauges.generation_tokens) == (12955, 1634)
    assert gauges.latencies is not None
    assert gauges.latencies["ttft_count"] == 107


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
        (
            "[2026-11-22 04:57:01] Subprocess scheduler_0 (pid=7) crashed with exit code -9. Triggering",
            "Subprocess scheduler_0 (pid=7) crashed with exit code -9",
        ),
        ("[2026-11-21 02:01:08] The server is fired up and ready to roll!", None),
    ],
)
def test_the_root_cause_is_the_first_that_failed(log: str, cause: str | None) -> None:
    assert ENGINE.root_cause(log) == cause


def test_its_profiler_is_told_the_folder_and_when_to_stop(tmp_path: Path) -> None:
    assert ENGINE.profiler is not None
    body = ENGINE.profiler.body(tmp_path, 400)
    assert (body["output_dir"], body["num_steps"], body["record_shapes"]) == (str(tmp_path), 400, True)
