from dataclasses import asdict
from pathlib import Path

import orjson
import pytest

from servers.engine import EngineError, HttpReply, LaunchOptions, Target
from servers.engines import llamacpp
from servers.engines.llamacpp import LlamaCpp
from tests.servers import documented as said
from tests.servers.golden import http_reply
from workloads.request import Request

ENGINE = LlamaCpp()
LOG = """load_tensors:   CPU_Mapped model buffer size =  1024.00 MiB
load_tensors:        CUDA0 model buffer size =  4096.50 MiB
llama_kv_cache:      CUDA0 KV buffer size =   512.00 MiB
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(llamacpp.SERVER_VARIABLE, "/opt/llama-server")


def options(model: str, *extra_args: str) -> LaunchOptions:
    return LaunchOptions(model, "127.0.0.1", 8001, "m", Path(), extra_args=extra_args)


def test_a_request_asks_for_token_ids_and_never_for_the_cache() -> None:
    call = ENGINE.encode(Request(0, (5, 6), None, 2, 9), Target("http://h:1", "m"))
    assert call.path == "/completion"
    assert orjson.loads(call.body) == {
        "prompt": [5, 6],
        "n_predict": 9,
        "ignore_eos": True,
        "temperature": 0.0,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }


def test_tokens_are_counted_by_their_ids_and_totals_by_the_last_event() -> None:
    reply = ENGINE.decode(http_reply(said.llama_stream(3)))
    assert [event.n_tok for event in reply.events] == [1, 1, 1, 0]
    assert (reply.n_output_ids, reply.n_output_usage, reply.n_prompt_tok, reply.n_cached_tok) == (3, 3, 17, 0)
    assert reply.finish_reason == "length"


@pytest.mark.usefixtures("installed")
def test_it_starts_on_one_gguf_file_of_a_folder_with_metrics_and_without_cache(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    launch = ENGINE.launch(options(str(tmp_path), "-np", "64"))
    assert launch.argv == (
        *("/opt/llama-server", "-m", str(file), "--alias", "m", "--host", "127.0.0.1", "--port", "8001"),
        *("--metrics", "-fit", "off", "--no-cache-prompt", "-cram", "0", "-np", "64"),
    )
    assert ENGINE.launch(options("org/model")).argv[1:3] == ("-hf", "org/model")
    (tmp_path / "other.gguf").touch()
    with pytest.raises(EngineError, match="holds 2 GGUF files"):
        ENGINE.launch(options(str(tmp_path)))


def test_where_it_is_not_installed_the_user_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(llamacpp.SERVER_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EngineError, match=r"no llama-server is found.*releases"):
        ENGINE.launch(options("m.gguf"))


def test_it_identifies_a_server_by_its_slots_and_its_buffers() -> None:
    replies = {
        "/props": {
            "total_slots": 4,
            "default_generation_settings": {"n_ctx": 2048},
            "model_path": "m.gguf",
            "build_info": "b9310-e2ef8fe42",
        },
        "/v1/models": {"data": [{"id": "m", "meta": {"n_vocab": 32000}}]},
    }
    identity = ENGINE.identify(lambda path: HttpReply(200, {}, orjson.dumps(replies[path])), LOG)
    assert (identity.version, identity.max_model_len, identity.max_num_seqs) == ("b9310-e2ef8fe42", 2048, 4)
    assert (identity.kv_tok, identity.kv_bytes, identity.vocab_size) == (8192, 512 * 2**20, 32000)
    assert identity.weight_bytes == 5120.5 * 2**20


def test_gauges_that_it_gives_and_those_it_does_not() -> None:
    text = "".join(
        f"# TYPE llamacpp:{name} gauge\nllamacpp:{name} {value}\n"
        for name, value in (
            ("requests_processing", 3),
            ("requests_deferred", 9),
            ("tokens_predicted_total", 50),
        )
    )
    gauges = asdict(ENGINE.gauges(text))
    told = {name: value for name, value in gauges.items() if value is not None}
    assert told == {"running": 3, "waiting": 9, "generation_tokens": 50}


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
        ("main: server is listening on http://127.0.0.1:8001", None),
    ],
)
def test_the_root_cause_is_the_first_complaint(log: str, cause: str | None) -> None:
    assert ENGINE.root_cause(log) == cause
