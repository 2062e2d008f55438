import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import orjson
import pytest

from burstline.servers.engines import llamacpp
from burstline.servers.engines.llamacpp import LlamaCpp
from burstline.servers.identity import Identity
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, HttpReply, Kind, Target
from burstline.servers.settings import Settings, spell
from burstline.workloads.request import Request, WorkloadError
from tests.servers.golden import golden_reply

ENGINE = LlamaCpp()
LOG = """load_tensors:   CPU_Mapped model buffer size =  1024.00 MiB
load_tensors:        CUDA0 model buffer size =  4096.50 MiB
llama_kv_cache:      CUDA0 KV buffer size =   512.00 MiB
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> str:
    """Any program will do that is not started."""
    monkeypatch.setenv(llamacpp.SERVER_VARIABLE, sys.executable)
    monkeypatch.setattr(llamacpp, "threads_for_server", lambda: None)
    return sys.executable


def options(model: str, *extra_args: str) -> LaunchOptions:
    return LaunchOptions(model, "127.0.0.1", 8001, "m", Path(), extra_args=extra_args)


def test_a_request_asks_for_token_ids_and_leaves_the_cache_to_the_server() -> None:
    call = ENGINE.encode(Request(0, (5, 6), None, 2, 9), Target("http://h:1", "m"))
    assert call.path == "/completion"
    assert orjson.loads(call.body) == {
        "prompt": [5, 6],
        "n_predict": 9,
        "ignore_eos": True,
        "temperature": 0.0,
        "return_tokens": True,
        "stream": True,
    }


def test_tokens_are_the_growth_of_the_total_also_where_a_character_takes_several() -> None:
    """Recorded: 12 tokens in 8 events; a token that leaves a character incomplete gets no event."""
    reply = ENGINE.decode(golden_reply("llamacpp/completion_multibyte.http"))
    assert [event.n_tok for event in reply.events] == [1, 2, 2, 1, 1, 1, 1, 1, 2]
    assert [event.kind for event in reply.events] == [Kind.ANSWER] * 9
    assert (reply.n_output_ids, reply.n_output_usage, reply.n_prompt_tok) == (None, 12, 32)


def test_a_recorded_stream_ends_with_its_totals_and_its_own_time_for_the_prompt() -> None:
    reply = ENGINE.decode(golden_reply("llamacpp/completion_stream.http"))
    assert [event.n_tok for event in reply.events] == [1] * 8 + [0]
    assert (reply.n_output_usage, reply.n_prompt_tok, reply.n_cached_tok) == (8, 32, 0)
    assert (reply.finish_reason, reply.terminated, reply.error) == ("length", True, None)
    assert reply.times is not None
    assert reply.times.prefill_s == pytest.approx(0.0398, abs=0.0001)


def test_a_reply_that_ran_out_of_context_is_cut_and_no_error() -> None:
    reply = ENGINE.decode(golden_reply("llamacpp/completion_context_full.http"))
    assert (reply.n_prompt_tok, reply.n_output_usage) == (700, 68)
    assert (reply.finish_reason, reply.error) == ("length", None)


@pytest.mark.parametrize(
    ("name", "words"),
    [("too_long", "800 tokens.* exceeds the available context"), ("bad_field", "must be number")],
)
def test_what_it_refuses_is_read_in_its_own_words(name: str, words: str) -> None:
    reply = ENGINE.decode(golden_reply(f"llamacpp/completion_{name}.http"))
    assert re.search(words, reply.error or "")


def test_it_starts_on_one_gguf_file_of_a_folder_with_metrics_and_without_cache(
    installed: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    launch = ENGINE.launch(options(str(tmp_path), "-np", "64"))
    assert launch.argv == (
        *(installed, "-m", str(file), "--alias", "m", "--host", "127.0.0.1", "--port", "8001"),
        *("--metrics", "-fit", "off", "--no-cache-prompt", "-cram", "0", "-np", "64"),
    )
    assert launch.fixed == Identity(
        "llamacpp",
        kv_cache_dtype="float16",
        max_num_batched_tokens=2048,
        prefix_cache=False,
        tensor_parallel_size=1,
    )
    assert ENGINE.launch(options("org/model")).argv[1:3] == ("-hf", "org/model")
    (tmp_path / "other.gguf").touch()
    with pytest.raises(EngineError, match="holds 2 GGUF files"):
        ENGINE.launch(options(str(tmp_path)))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("extra", [(), ("--no-cache-prompt",)])
def test_a_cache_that_is_off_by_a_setting_too_is_switched_off_once(extra: tuple[str, ...]) -> None:
    argv = ENGINE.launch(options("m.gguf", *extra)).argv
    assert (argv.count("--no-cache-prompt"), argv.count("-cram")) == (1, 1)


@pytest.mark.usefixtures("installed")
def test_a_small_machine_keeps_a_core_for_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "threads_for_server", lambda: 1)
    launch = ENGINE.launch(replace(options("m.gguf"), n_concurrent=8))
    assert launch.argv[launch.argv.index("-t") + 1] == "1"
    assert launch.n_cores == 1
    chosen = ENGINE.launch(replace(options("m.gguf", "--threads", "2"), n_concurrent=8))
    assert "-t" not in chosen.argv
    assert chosen.n_cores is None


@pytest.mark.usefixtures("installed")
def test_slots_context_and_connections_are_sized_to_the_load() -> None:
    def room(n_at_once: int, *extra: str) -> tuple[str, ...]:
        asked = replace(options("m.gguf", *extra), n_concurrent=n_at_once, n_request_tok=576)
        argv = ENGINE.launch(asked).argv
        return argv[argv.index("0") + 1 :]

    assert room(8) == ("-np", "8", "-c", str(8 * 768), "--threads-http", "12")
    assert room(1000) == ("-np", "256", "-c", str(256 * 768), "--threads-http", "1004")
    assert room(8, "-c", "4096") == ("-np", "8", "--threads-http", "12", "-c", "4096")
    assert room(8, "--parallel", "4") == ("-c", str(4 * 768), "--threads-http", "12", "--parallel", "4")
    asked = replace(options("m.gguf"), n_concurrent=1000, n_request_tok=576)
    assert (
        ENGINE.launch(asked).notes[1]
        == "-np 256: of more than 256 requests at a time the others wait for a slot"
    )


def test_settings_are_spelled_in_its_own_flags() -> None:
    asked = Settings(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=1024,
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        tensor_parallel_size=1,
        prefix_cache=False,
    )
    sent = spell("llama.cpp", ENGINE.settings, asked, ())
    assert sent.arguments == (
        *("-np", "8", "-b", "512", "--kv-unified-per-slot", "1024", "-ctk", "bf16", "-ctv", "bf16"),
        "--no-cache-prompt",
    )
    for refused in (Settings(kv_cache_dtype="fp8"), Settings(tensor_parallel_size=2)):
        with pytest.raises(WorkloadError, match=r"llama\.cpp"):
            spell("llama.cpp", ENGINE.settings, refused, ())


@pytest.mark.usefixtures("installed")
def test_what_the_command_settles_is_read_from_it() -> None:
    fixed = ENGINE.launch(options("m.gguf", "-ctk", "bf16", "--batch-size=512", "--cache-prompt")).fixed
    assert fixed is not None
    assert (fixed.kv_cache_dtype, fixed.max_num_batched_tokens, fixed.prefix_cache) == ("bfloat16", 512, True)


@pytest.mark.parametrize("path", ["/nonexistent/llama-server", __file__])
def test_a_named_server_that_is_no_program_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setenv(llamacpp.SERVER_VARIABLE, path)
    with pytest.raises(EngineError, match=f"{llamacpp.SERVER_VARIABLE}={path} is not an executable program"):
        ENGINE.installed(None)


def test_where_it_is_not_installed_the_user_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(llamacpp.SERVER_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match=r"no llama-server is found.*releases"):
        ENGINE.launch(options("m.gguf"))


def recorded(path: str) -> HttpReply:
    return golden_reply(f"llamacpp/{path.rpartition('/')[2]}.http")


@pytest.mark.parametrize(
    ("log", "kv_tok"),
    [
        ("load_model: initializing, n_slots = 2, n_ctx_slot = 768, kv_unified = 'false'", 1536),
        ("load_model: initializing, n_slots = 2, n_ctx_slot = 768, kv_unified = 'true'", 768),
        ("", None),
    ],
)
def test_its_cache_is_one_pool_or_one_for_each_slot_as_its_log_says(log: str, kv_tok: int | None) -> None:
    assert ENGINE.identify(recorded, log).kv_tok == kv_tok


def test_it_identifies_a_recorded_server() -> None:
    identity = asdict(ENGINE.identify(recorded, LOG))
    del identity["raw"]
    assert {name: value for name, value in identity.items() if value is not None} == {
        "engine": "llamacpp",
        "version": "b1-0c1e570",
        "model": "/models/tiny/model.gguf",
        "max_model_len": 768,
        "dtype": "bfloat16",
        "kv_bytes": 512 * 2**20,
        "weight_bytes": 10003456,
        "max_num_seqs": 2,
        "quantization": "none",
        "vocab_size": 8192,
    }


def test_a_quantized_file_is_named_by_its_type_and_has_no_data_type() -> None:
    def quantized(path: str) -> HttpReply:
        raw = recorded(path)
        return replace(raw, body=raw.body.replace(b'"model_ftype":"BF16"', b'"model_ftype":"Q4_K - Medium"'))

    identity = ENGINE.identify(quantized, "")
    assert (identity.dtype, identity.quantization) == (None, "Q4_K - Medium")


def test_gauges_that_it_gives_and_those_it_does_not() -> None:
    gauges = asdict(ENGINE.gauges(recorded("metrics").body.decode()))
    assert not any(gauges.pop("latencies").values())  # it speculates where it has a draft model
    told = {name: value for name, value in gauges.items() if value is not None}
    assert told == {
        "running": 0,
        "waiting": 0,
        "prompt_tokens": 764,
        "prefix_hit_tokens": 0,
        "generation_tokens": 88,
    }


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ('error while handling argument "-c": stoi\n', 'error while handling argument "-c": stoi'),
        (
            "gguf_init_from_file: failed to open GGUF file 'x.gguf'\nmain: exiting due to an error",
            "failed to open GGUF file 'x.gguf'",
        ),
        (
            "main: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1",
            "couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1",
        ),
        (
            (
                "0.00.024.017 E llama_model_load: error loading model: tensor 'a' is not within the file\n"
                "0.00.024.025 E llama_model_load_from_file_impl: failed to load model"
            ),
            "error loading model: tensor 'a' is not within the file",
        ),
        ("main: server is listening on http://127.0.0.1:8001", None),
    ],
)
def test_the_root_cause_is_the_first_complaint(log: str, cause: str | None) -> None:
    assert ENGINE.root_cause(log) == cause
