import json
import socket
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest

from burstline.servers.engines import tgi
from burstline.servers.engines.tgi import Tgi
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, HttpReply, Kind, Target
from burstline.workloads.request import Request, Sampling
from tests.servers import documented as said
from tests.servers.golden import GOLDEN, decode_completion, golden_reply, http_reply

ENGINE = Tgi()
TARGET = Target("http://h:1", "m")
LOG = "\n".join(
    json.dumps(
        {"timestamp": "2026-11-21T02:01:08Z", "level": "INFO", "fields": {"message": message}, "target": "x"}
    )
    for message in (
        "Args {\n  num_shard: Some(\n    2,\n  ),\n  max_batch_prefill_tokens: Some(\n    8192,\n  )",
        "Using prefix caching = True",
        "KV-cache blocks: 43808, size: 1",
        "Setting max batch total tokens to 43808",
    )
)


def info(path: str) -> HttpReply:
    facts = {
        "model_id": "/m",
        "max_concurrent_requests": 128,
        "max_total_tokens": 4096,
        "router": "text-generation-router",
        "version": "3.3.7",
    }
    return HttpReply(200, {}, orjson.dumps(facts)) if path == "/info" else HttpReply(404, {}, b"")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tgi.LAUNCHER_VARIABLE, sys.executable)
    for name in ("HF_HUB_OFFLINE", "PORT", "HOSTNAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 32000, "eos_token_id": 2}')
    (folder / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.6}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def options(model: Path | str, tmp_path: Path, *extra: str, n_concurrent: int | None = None) -> LaunchOptions:
    return LaunchOptions(str(model), "127.0.0.1", 8001, "m", tmp_path, None, extra, n_concurrent)


def test_a_greedy_request_sends_no_sampling_field_and_truncates_nothing() -> None:
    call = ENGINE.encode(Request(0, None, "some text", 2, 9), TARGET)
    assert call.path == "/generate_stream"
    assert orjson.loads(call.body) == {
        "inputs": "some text",
        "parameters": {
            "max_new_tokens": 9,
            "details": True,
            "do_sample": False,
            "return_full_text": False,
        },
    }


def test_a_sampled_request_leaves_out_a_top_p_of_one_which_is_refused() -> None:
    warm = orjson.loads(
        ENGINE.encode(Request(0, None, "a", 1, 9, sampling=Sampling(0.5, 1.0, 3)), TARGET).body
    )
    assert warm["parameters"].items() >= {"do_sample": True, "temperature": 0.5, "seed": 3}.items()
    assert "top_p" not in warm["parameters"]


def test_token_ids_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(EngineError, match="accepts only text"):
        ENGINE.encode(Request(0, (1, 2), None, 2, 9), TARGET)


def test_every_event_is_one_token_and_the_last_one_has_the_totals() -> None:
    reply = ENGINE.decode(http_reply(said.tgi_stream(5)))
    assert [(event.kind, event.n_tok) for event in reply.events] == [(Kind.ANSWER, 1)] * 5
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.finish_reason) == (17, 5, "length")
    assert reply.terminated


def test_a_last_event_that_is_not_of_its_published_type_is_an_error() -> None:
    odd = said.tgi_event(1, "length")
    odd["details"] = 7
    reply = ENGINE.decode(http_reply(said.stream(odd)))
    assert "not a reply of this engine" in (reply.error or "")


@pytest.mark.usefixtures("installed")
def test_two_of_them_on_one_machine_share_no_port_and_no_socket(model: Path, tmp_path: Path) -> None:
    first = ENGINE.launch(options(model, tmp_path / "a"))
    collide = ("--port", "--master-port", "--prometheus-port", "--shard-uds-path")
    with ExitStack() as running:
        for flag in collide[1:3]:
            port = int(first.argv[first.argv.index(flag) + 1])
            running.enter_context(socket.create_server(("127.0.0.1", port)))
        second = ENGINE.launch(LaunchOptions(str(model), "127.0.0.1", 8002, "m", tmp_path / "b"))
    for flag in collide:
        assert first.argv[first.argv.index(flag) + 1] != second.argv[second.argv.index(flag) + 1]
    assert first.argv[first.argv.index("--hostname") + 1] == "127.0.0.1"
    assert first.argv[first.argv.index("--num-shard") + 1] == "1"
    assert first.stop_grace_s >= 100
    assert first.env == {"HF_HUB_OFFLINE": "1"}


@pytest.mark.usefixtures("installed")
def test_the_model_it_serves_never_ends_a_text_and_the_original_is_untouched(
    model: Path, tmp_path: Path
) -> None:
    launch = ENGINE.launch(options(model, tmp_path))
    served = Path(launch.argv[launch.argv.index("--model-id") + 1])
    assert served.is_relative_to(tmp_path.resolve())
    assert served != model
    config = json.loads((served / "generation_config.json").read_text())
    assert config == {"eos_token_id": [32000], "temperature": 0.6}
    assert (served / "model.safetensors").resolve() == (model / "model.safetensors").resolve()
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "eos_token_id [32000]" in launch.notes[0]


@pytest.mark.usefixtures("installed")
def test_a_name_on_the_hub_is_served_as_it_is_and_the_user_is_warned(tmp_path: Path) -> None:
    launch = ENGINE.launch(options("org/model", tmp_path))
    assert launch.argv[launch.argv.index("--model-id") + 1] == "org/model"
    assert "end early" in launch.notes[0]


@pytest.mark.usefixtures("installed")
def test_a_burst_beyond_128_raises_the_limit_and_the_user_is_told(model: Path, tmp_path: Path) -> None:
    launch = ENGINE.launch(options(model, tmp_path / "a", n_concurrent=1000))
    assert launch.argv[launch.argv.index("--max-concurrent-requests") + 1] == "1000"
    assert any("refuses more than 128" in note for note in launch.notes)
    small = ENGINE.launch(options(model, tmp_path / "b", n_concurrent=128))
    assert "--max-concurrent-requests" not in small.argv


def test_where_it_is_not_installed_the_user_is_told_how_to_get_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(tgi.LAUNCHER_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match=r"no text-generation-launcher is found\. Use --container"):
        ENGINE.launch(options(model, tmp_path))


def test_it_identifies_a_server_by_its_info_and_its_log() -> None:
    identity = ENGINE.identify(info, LOG)
    assert (identity.version, identity.model, identity.max_model_len) == ("3.3.7", "/m", 4096)
    assert (identity.kv_tok, identity.kv_block_tok) == (43808, 1)
    assert (identity.admission_limit, identity.max_num_seqs) == (128, None)
    assert (identity.prefix_cache, identity.tensor_parallel_size, identity.max_num_batched_tokens) == (
        True,
        2,
        8192,
    )
    assert ENGINE.identify(info, "").kv_tok is None


def test_what_a_real_launcher_logs_is_read_back() -> None:
    log = (GOLDEN / "tgi" / "server.log").read_text()
    identity = ENGINE.identify(lambda path: golden_reply("tgi/info.http"), log)
    assert (identity.dtype, identity.kv_cache_dtype, identity.quantization) == (
        "bfloat16",
        "bfloat16",
        "none",
    )
    assert (identity.max_num_batched_tokens, identity.admission_limit, identity.max_num_seqs) == (
        4096,
        4,
        None,
    )
    assert (identity.max_model_len, identity.max_input_tok) == (4096, 4095)
    assert (identity.attention, identity.chunked_prefill) == ("flashdecoding-ipex", True)
    assert identity.prefix_cache is False
    limited = log.replace("max_batch_size: None", "max_batch_size: Some(\\n        128,\\n    )")
    assert ENGINE.identify(lambda path: golden_reply("tgi/info.http"), limited).max_num_seqs == 128


def test_what_exceeds_its_admission_limit_is_told_before_the_load() -> None:
    identity = ENGINE.identify(lambda path: golden_reply("tgi/info.http"), "")
    (note,) = ENGINE.before_load(identity, 200, 64)
    assert note == (
        "TGI admits 4 requests at once and refuses others. Pass --concurrency 4, or raise the server's limit "
        "(--max-concurrent-requests)"
    )
    assert ENGINE.before_load(identity, 4, 1024) == ()
    (rounds,) = ENGINE.before_load(identity, 4, 1500)
    assert "1,500 tokens would become 2,048" in rounds
    assert "expect a gap at token 1,025" in rounds


@pytest.mark.parametrize("name", ["generate_stream_overloaded", "completions_stream_overloaded"])
def test_an_overload_inside_a_reply_of_status_200_is_a_refusal_by_overload(name: str) -> None:
    raw = golden_reply(f"tgi/{name}.http")
    reply = ENGINE.decode(raw) if name.startswith("generate") else decode_completion(raw)
    assert reply.overloaded
    assert reply.error == "Model is overloaded"
    assert not ENGINE.decode(golden_reply("tgi/generate_stream_too_long.http")).overloaded


def test_gauges_that_it_gives_and_those_it_does_not() -> None:
    text = (
        "tgi_queue_size 4\ntgi_batch_current_size 8\ntgi_request_generated_tokens_sum 90\n"
        "tgi_request_input_length_sum 170\n"
        'tgi_request_duration_bucket{le="0.5"} 3\ntgi_request_duration_count 4\n'
    )
    gauges = asdict(ENGINE.gauges(text))
    assert {name for name, value in gauges.items() if value is None} == {
        "kv_used_fraction",
        "preemptions",
        "prefix_hit_tokens",
        "resident_bytes",
    }
    assert gauges["latencies"] == {"e2e_le_0.5": 3, "e2e_count": 4}
    assert (gauges["waiting"], gauges["running"], gauges["generation_tokens"]) == (4, 8, 90)


def error(message: str) -> str:
    return json.dumps(
        {"level": "ERROR", "fields": {"message": message}, "target": "text_generation_launcher"}
    )


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            error("Shard complete standard error output:\nOSError: x\nRuntimeError: Not enough memory")
            + "\nError: ShardCannotStart",
            "RuntimeError: Not enough memory",
        ),
        (
            "thread 'main' panicked at router/src/server.rs:1:\nfailed to build prometheus recorder: x\n",
            "failed to build prometheus recorder: x",
        ),
        ("error: unexpected argument '--x' found", "error: unexpected argument '--x' found"),
        (error("Webserver Crashed"), "ERROR Webserver Crashed"),
        (LOG, None),
    ],
)
def test_the_root_cause_is_a_shards_exception_a_panic_or_the_first_error(log: str, cause: str | None) -> None:
    assert ENGINE.root_cause(log) == cause


def test_its_own_split_of_a_request_and_of_a_step_is_read() -> None:
    told = ENGINE.gauges(golden_reply("tgi/metrics.http").body.decode()).latencies or {}
    means = {name.removesuffix("_sum") for name in told if name.endswith("_sum")}
    assert {"queue", "inference", "validation", "token", "prefill_step", "decode_forward"} <= means
    for name in ("queue", "inference", "prefill_step", "decode_step", "prefill_forward", "decode_forward"):
        assert told[f"{name}_count"] > 0
    assert told["decode_forward_sum"] <= told["decode_step_sum"]
    assert not [name for name in told if name.startswith("queue_le")]  # 300 buckets each


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("stored", "sent"), [("float16", "float16"), ("bfloat16", "bfloat16"), (None, "bfloat16")]
)
def test_the_checkpoints_data_type_is_always_sent(
    stored: str | None, sent: str, model: Path, tmp_path: Path
) -> None:
    """By default it serves bfloat16 weights in float16, and `/info` does not say so."""
    (model / "config.json").write_text(json.dumps({"vocab_size": 32000, "torch_dtype": stored}))
    argv = ENGINE.launch(options(model, tmp_path / "a")).argv
    assert argv[argv.index("--dtype") + 1] == sent
    chosen = ENGINE.launch(options(model, tmp_path / "b", "--dtype", "float16")).argv
    assert chosen.count("--dtype") == 1


def test_of_ninety_kilobytes_of_metrics_only_the_wanted_lines_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from prometheus_client import parser

    parsed: list[int] = []
    whole = parser.text_string_to_metric_families

    def counted(text: str) -> object:
        parsed.append(len(text))
        return whole(text)

    monkeypatch.setattr(parser, "text_string_to_metric_families", counted)
    body = golden_reply("tgi/metrics.http").body.decode()
    assert ENGINE.gauges(body).generation_tokens
    print(f"{len(body):,} bytes of metrics, {sum(parsed):,} of them parsed")
    assert len(body) > 50_000
    assert sum(parsed) < len(body) / 2
