import sys
from array import array
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import orjson
import pytest

from burstline.servers.engines.vllm import Vllm
from burstline.servers.host import installation, kernel
from burstline.servers.host.installation import Installation, find_installation
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, Event, HttpReply, Kind, Target
from burstline.workloads.request import Request
from tests.servers.golden import GOLDEN, golden_reply

ENGINE = Vllm()


def log(name: str) -> str:
    return (GOLDEN / "vllm" / f"{name}.log").read_text()


def metrics() -> str:
    return (GOLDEN / "vllm" / "metrics.prom").read_text()


def recorded(path: str) -> HttpReply:
    if path == "/metrics":
        return HttpReply(200, {}, metrics().encode())
    return golden_reply(f"vllm/{path.removeprefix('/v1').strip('/')}.http")


def test_requests_ask_for_usage_in_every_event_and_never_for_minimum_tokens() -> None:
    call = ENGINE.encode(Request(0, array("I", [7]), None, 1, 9), Target("http://h:1", "m"))
    fields = orjson.loads(call.body)
    assert fields["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (fields["prompt"], fields["max_tokens"], fields["ignore_eos"]) == ([7], 9, True)
    assert "min_tokens" not in fields


def test_every_event_of_a_recorded_stream_counts_its_tokens() -> None:
    raw = golden_reply("vllm/completions_stream_usage_each.http")
    reply = ENGINE.decode(raw)
    assert [event.n_tok for event in reply.events] == [1] * 20 + [None]
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.finish_reason) == (16, 20, "length")
    ends = [event.end for event in reply.events]
    assert [raw.body[end - 2 : end] for end in ends] == [b"\n\n"] * 21
    assert raw.body[ends[-1] :] == b"data: [DONE]\n\n"


def test_events_of_several_tokens_are_counted_by_their_ids() -> None:
    reply = ENGINE.decode(golden_reply("vllm/completions_stream_ids_interval.http"))
    assert [event.n_tok for event in reply.events] == [1, 8, 8, 3, None]
    assert (reply.n_output_ids, reply.n_output_usage, reply.n_prompt_tok) == (20, 20, 16)


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("too_long", 400, "maximum context length is 2048 tokens"),
        ("unknown_model", 404, "The model `nope` does not exist"),
        ("unknown_route", 404, "Not Found"),
    ],
)
def test_recorded_refusals_keep_the_servers_words(name: str, status: int, words: str) -> None:
    raw = golden_reply(f"vllm/error_{name}.http")
    reply = ENGINE.decode(raw)
    assert raw.status == status
    assert words in (reply.error or "")
    assert reply.events == [Event(len(raw.body), Kind.ERROR, None)]


def test_it_identifies_a_server_from_its_endpoints_and_its_log() -> None:
    identity = asdict(ENGINE.identify(recorded, log("start")))
    raw = identity.pop("raw")
    expected = {
        "engine": "vllm",
        "version": "0.32.0",
        "model": "models/m5",
        "max_model_len": 2048,
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "kv_tok": 1_048_576 - 128,  # its first block stays empty
        "kv_block_tok": 128,
        "kv_bytes": 2 * 2**30,
        "weight_bytes": None,
        "max_num_seqs": None,
        "max_num_batched_tokens": None,
        "vocab_size": None,
        "prefix_cache": True,
        "tensor_parallel_size": 1,
    }
    assert {name: identity[name] for name in expected} == expected
    assert raw["cache_config"]["num_gpu_blocks"] == "8192"


def test_memory_and_limits_come_from_the_log_of_every_worker() -> None:
    lines = """(Worker_TP0 pid=1) INFO 11-21 02:01:08 [x:1] Model loading took 7.5 GiB memory and 3.2 s
(Worker_TP1 pid=2) INFO 11-21 02:01:08 [x:1] Model loading took 7.5 GiB memory and 3.3 s
(Worker_TP0 pid=1) INFO 11-21 02:01:08 [x:1] Available KV cache memory: 50.25 GiB
(EngineCore pid=1) INFO 11-21 02:01:08 [x:1] Chunked prefill is enabled with max_num_batched_tokens=8192.
(APIServer pid=1) INFO 11-21 02:01:08 [x:1] non-default args: {'max_num_seqs': 256, 'dtype': 'half'}"""
    nothing: Callable[[str], HttpReply] = lambda path: HttpReply(404, {}, b"{}")  # noqa: E731
    identity = ENGINE.identify(nothing, lines)
    assert identity.weight_bytes == 15 * 2**30
    assert identity.kv_bytes == 50.25 * 2**30
    assert (identity.max_num_seqs, identity.max_num_batched_tokens) == (256, 8192)


@pytest.mark.parametrize(
    ("version", "lines", "ahead"),
    [
        ("0.33.0", "", True),
        ("0.12.0", "", False),
        ("0.12.0", "non-default args: {'model_tag': 'm', 'async_scheduling': True}", True),
        ("0.33.0", "non-default args: {'async_scheduling': False, 'dtype': 'half'}", False),
        ("0.33.0", "Initializing a V1 LLM engine with config: device_config=cpu, seed=0", False),
    ],
)
def test_steps_are_scheduled_ahead_by_version_flag_and_device(version: str, lines: str, ahead: bool) -> None:
    def get(path: str) -> HttpReply:
        return HttpReply(200, {}, f'{{"version": "{version}"}}'.encode() if path == "/version" else b"{}")

    assert ENGINE.admission_of(ENGINE.identify(get, lines)).ahead == ahead


def test_an_attached_server_that_tells_nothing_is_identified_as_unknown_not_as_zero() -> None:
    identity = ENGINE.identify(lambda path: HttpReply(404, {}, b""), "")
    assert {value for name, value in asdict(identity).items() if name not in ("engine", "raw")} == {None}


def test_gauges_come_from_recorded_metrics() -> None:
    gauges = asdict(ENGINE.gauges(metrics()))
    latencies = gauges.pop("latencies")
    assert {name: latencies[f"{name}_count"] for name in ("ttft", "itl", "e2e")} == {
        "ttft": 9,
        "itl": 441,
        "e2e": 9,
    }
    assert (latencies["ttft_le_0.02"], latencies["ttft_le_+Inf"]) == (6, 9)
    assert latencies["e2e_sum"] == pytest.approx(1.404, abs=1e-3)
    assert gauges == {
        "running": 0,
        "waiting": 0,
        "kv_used_fraction": 0,
        "preemptions": 0,
        "prefix_hit_tokens": 3072,
        "prompt_tokens": 4608,
        "generation_tokens": 450,
        "resident_bytes": 675262464,
    }


def test_gauges_of_data_parallel_engines_add_up_but_for_the_used_fraction() -> None:
    text = "".join(
        f'vllm:{name}{{engine="{engine}",model_name="m {{x}}"}} {value}\n'
        for engine in (0, 1)
        for name, value in (("num_requests_running", 3 + engine), ("kv_cache_usage_perc", 0.5 * engine))
    )
    gauges = ENGINE.gauges(text)
    assert (gauges.running, gauges.kv_used_fraction, gauges.waiting) == (7, 0.25, None)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("no_weights", "RuntimeError: Cannot find any model weights with `models/m5`"),
        (
            "kv_too_large",
            "ValueError: Available memory on node 0 (7.46/8.84 GiB) on kv cache allocation is less",
        ),
        ("max_len", "1 validation error for ModelConfig: Value error, User-specified max_model_len (99999)"),
        (
            "no_such_model",
            "HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name'",
        ),
        ("unknown_flag", "vllm: error: unrecognized arguments: --nonsense 3"),
    ],
)
def test_the_root_cause_of_a_recorded_failure_is_found(name: str, cause: str) -> None:
    assert cause in (ENGINE.root_cause(log(f"failed_{name}")) or "")


def test_a_log_without_an_exception_has_no_root_cause() -> None:
    assert ENGINE.root_cause(log("start")) is None
    assert ENGINE.root_cause("") is None


def options(tmp_path: Path, *extra_args: str) -> LaunchOptions:
    return LaunchOptions(str(tmp_path), "127.0.0.1", 8001, "m", tmp_path, "py", extra_args)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends that an environment has vLLM, in these distributions, with or without the command."""

    def pretend(command: bool = True, **versions: str) -> None:
        scripts = tmp_path / "bin"
        scripts.mkdir()
        if command:
            (scripts / "vllm").touch()
        named = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(installation, "find_installation", lambda *_: Installation("py", named, scripts))

    for name in ("HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS", "BURSTLINE_VLLM_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    return pretend


def test_a_gpu_build_is_started_by_its_command(tmp_path: Path, install: Callable[..., None]) -> None:
    install(vllm="0.33.0")
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    launch = ENGINE.launch(options(tmp_path, "--dtype", "bfloat16"))
    assert launch.argv[:4] == ("py", str(tmp_path / "bin" / "vllm"), "serve", str(tmp_path))
    assert launch.argv[launch.argv.index("--port") :][:2] == ("--port", "8001")
    assert launch.argv[-2:] == ("--dtype", "bfloat16")
    assert "--load-format" not in launch.argv
    assert launch.notes == ()
    assert launch.env == {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def test_a_server_that_is_to_be_profiled_gets_its_profiler_which_a_client_starts(
    tmp_path: Path, install: Callable[..., None]
) -> None:
    install(vllm="0.33.0")
    launch = ENGINE.launch(replace(options(tmp_path), profile_dir=tmp_path / "profile"))
    config = orjson.loads(launch.argv[launch.argv.index("--profiler-config") + 1])
    assert config["torch_profiler_dir"] == str(tmp_path / "profile")
    assert config["torch_profiler_record_shapes"]
    assert ENGINE.profiler is not None
    assert ENGINE.profiler.body(tmp_path, 400) == {"max_iterations": 400}
    assert "--profiler-config" not in ENGINE.launch(options(tmp_path)).argv


def test_a_cpu_build_without_its_alias_is_started_by_its_module_and_bounded_in_memory(
    tmp_path: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(vllm_cpu="0.32.0")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    launch = ENGINE.launch(options(tmp_path))
    assert launch.argv[1:5] == ("-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path))
    assert launch.env == {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}


def test_a_model_without_weights_gets_invented_ones_and_the_user_is_told(
    tmp_path: Path, install: Callable[..., None]
) -> None:
    install(vllm="0.33.0")
    (tmp_path / "config.json").touch()
    launch = ENGINE.launch(options(tmp_path))
    assert launch.argv[-2:] == ("--load-format", "dummy")
    assert "holds no weights" in launch.notes[0]
    assert ENGINE.launch(options(tmp_path, "--load-format=auto")).notes == ()


@pytest.mark.parametrize(
    ("build", "flags", "dtype", "args", "is_told"),
    [
        ("vllm_cpu", "avx2 fma", "bfloat16", (), True),
        ("vllm_cpu", "avx2 fma", "float32", (), False),
        ("vllm_cpu", "avx2 fma", "bfloat16", ("--dtype=float32",), False),
        ("vllm_cpu", "avx512f avx512_bf16", "bfloat16", (), False),
        ("vllm_cpu", "asimd bf16", "bfloat16", (), False),
        ("vllm", "avx2 fma", "bfloat16", (), False),
    ],
)
def test_a_data_type_that_the_cpu_has_no_instructions_for_is_told_before_the_start(
    tmp_path: Path, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch,
    build: str, flags: str, dtype: str, args: tuple[str, ...], is_told: bool,
) -> None:  # fmt: skip
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags : {flags}\n")
    monkeypatch.setattr(kernel, "CPUINFO", cpuinfo)
    install(**{build: "0.33.0"})
    (tmp_path / "config.json").write_text(f'{{"torch_dtype": "{dtype}"}}')
    (tmp_path / "model.safetensors").touch()
    notes = ENGINE.launch(options(tmp_path, *args)).notes
    assert ["--dtype float32" in note for note in notes] == [True] * is_told


def test_without_vllm_the_error_names_both_ways_to_get_it(tmp_path: Path) -> None:
    wanted = LaunchOptions("m", "127.0.0.1", 8001, "m", tmp_path, python=sys.executable)
    if find_installation(sys.executable, "vllm") is not None:
        pytest.skip("vLLM is installed beside us")
    with pytest.raises(EngineError, match=r"pip install vllm.*scripts/install-vllm-cpu.sh"):
        ENGINE.launch(wanted)


def test_an_environment_is_asked_what_it_has() -> None:
    found = find_installation(sys.executable, "pytest", "pytest", "no-such-distribution")
    assert found is not None
    assert dict(found.versions) == {"pytest": pytest.__version__}
    assert found.scripts.is_dir()
    assert find_installation(sys.executable, "no_such_module") is None
    with pytest.raises(EngineError, match="/no/python does not run as a Python interpreter"):
        find_installation("/no/python", "vllm")


def test_a_dead_engine_core_condemns_the_front_end_that_still_lives() -> None:
    """Recorded: the worker was killed, the API server lived for two seconds more."""
    prefix = "(APIServer pid=2294) ERROR 11-22 04:58:07 [serving.py:500]"
    dead = f"{prefix} vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. "
    log = f"{dead}See stack trace (above) for the root cause.\n"
    assert ENGINE.dead("INFO: Application startup complete.\n") is None
    assert ENGINE.dead(log) == "EngineDeadError: a process of its engine core ended"
    cause = "(EngineCore pid=7) ERROR 11-22 04:58:07 [core.py:9] RuntimeError: CUDA error: out of memory\n"
    assert ENGINE.dead(cause + log) == "RuntimeError: CUDA error: out of memory"


def test_the_command_inside_its_image_begins_with_the_model() -> None:
    """The image's entry point is `vllm serve`."""
    options = LaunchOptions("/models/m", "0.0.0.0", 8000, "m", Path(), image="vllm/vllm-openai:v0.33.0")
    assert ENGINE.launch(options).argv[:3] == ("/models/m", "--served-model-name", "m")


@pytest.mark.parametrize(("n", "ranks"), [(1, None), (2, 2), (8, 8)])
def test_ranks_that_each_have_a_cache_are_seen_in_the_metrics(n: int, ranks: int | None) -> None:
    row = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="%d"} 1.0\n'
    page = HttpReply(200, {}, "".join(row % k for k in range(n)).encode())
    identity = ENGINE.identify(lambda path: page if path == "/metrics" else HttpReply(404, {}, b""), "")
    assert identity.kv_tok == n * (100 * 16 - 16)
    assert identity.data_parallel_size == ranks
