"""Native dialects over real sockets: asked by an adapter, answered by the known-truth server."""

import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from burstline.servers.engine import Engine
from burstline.servers.engines.endpoint import IDS, IGNORE_EOS, USAGE
from burstline.servers.host import process
from burstline.servers.host.ready import RefusalError, getter, send, wait_ready
from burstline.servers.launch import Launch
from burstline.servers.messages import EngineError, Target
from burstline.servers.redact import Secret
from burstline.servers.registry import ENGINES, engine_at
from burstline.workloads.request import Request
from tests.servers import documented as said

FAKE = Path(__file__).parent / "host" / "fake_server.py"


@contextmanager
def speaking(dialect: str, tmp_path: Path) -> Iterator[Target]:
    port = process.free_port()
    argv = (sys.executable, "-m", "tests.truth", "--port", str(port), "--model", "m", "--dialect", dialect)
    with process.start(Launch(argv, stop_grace_s=5), tmp_path / "log") as server:
        target = Target(f"http://127.0.0.1:{port}", "m")
        wait_ready(ENGINES["openai"], server, target, timeout_s=20)
        yield target


def request_for(engine: Engine, n_output_tok: int) -> Request:
    if engine.capabilities.token_id_prompts:
        return Request(0, (5, 6, 7), None, 3, n_output_tok)
    return Request(0, None, "five six seven", 3, n_output_tok)


@pytest.mark.parametrize(
    "name",
    [pytest.param("tgi", marks=pytest.mark.slow), "lightllm", pytest.param("sglang", marks=pytest.mark.slow)],
)
def test_a_native_dialect_is_asked_and_read_back(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    with speaking(name, tmp_path) as target:
        wait_ready(engine, None, target, timeout_s=10)
        reply = engine.decode(send(target, engine.encode(request_for(engine, 7), target), 10))
    assert reply.error is None
    assert (reply.n_output_usage, reply.finish_reason, reply.terminated) == (7, "length", True)
    assert sum(event.n_tok or 0 for event in reply.events) == 7
    assert reply.n_prompt_tok is not None


def test_chat_is_asked_and_read_back_and_what_it_takes_is_found_out(tmp_path: Path) -> None:
    engine = ENGINES["openai-chat"]
    with speaking("openai", tmp_path) as target:
        wait_ready(engine, None, target, timeout_s=10)
        probed, _ = engine.probe(lambda call: send(target, call, 10), target)
        reply = engine.decode(send(target, engine.encode(request_for(engine, 9), probed), 10))
    assert {IGNORE_EOS, USAGE} <= set(probed.takes)
    assert IDS not in probed.takes
    assert (reply.n_output_usage, reply.error) == (9, None)


@contextmanager
def replying(raw: bytes) -> Iterator[Target]:
    """A server that answers every connection with the same bytes."""
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(raw)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Target(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


TGI = ENGINES["tgi"]


def test_tgi_is_ready_once_it_has_generated_a_token() -> None:
    with replying(said.tgi_stream(1)) as target:
        assert wait_ready(TGI, None, target, timeout_s=10).ready_s < 10


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (said.plain(422, said.tgi_error("`inputs` is too long", "validation")), "refuses .*too long"),
        (said.plain(401, said.tgi_error("no key", "auth")), "refuses .*no key"),
    ],
)
def test_tgis_refusal_of_one_token_ends_the_waiting_at_once(raw: bytes, words: str) -> None:
    with replying(raw) as target, pytest.raises(RefusalError, match=words):
        wait_ready(TGI, None, target, timeout_s=30)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (said.stream(said.tgi_error("Model is overloaded", "overloaded")), "overloaded"),
        pytest.param(
            said.plain(429, said.tgi_error("Model is overloaded", "overloaded")),
            "overloaded",
            marks=pytest.mark.slow,
        ),
        pytest.param(said.chunked([]), "returns none", marks=pytest.mark.slow),
    ],
)
def test_tgi_that_is_only_busy_is_waited_for(raw: bytes, words: str) -> None:
    with replying(raw) as target, pytest.raises(EngineError, match=f"not ready after 1 s: .*{words}"):
        wait_ready(TGI, None, target, timeout_s=1)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"login": Secret("me:pa55-0f-tgi"), "headers": (Secret("X-Team: blue"),)},
    ],
)
def test_tgis_first_token_takes_headers_and_login_but_no_key_that_the_user_saved_for_the_hub(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    heard = tmp_path / "heard"
    argv = [sys.executable, "-c", LISTEN, heard]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        url = f"http://127.0.0.1:{int(listener.stdout.readline())}"
        target = Target(url, "m", **more)
        monkeypatch.setattr(TGI, "probe_path", None)
        with pytest.raises(EngineError):
            wait_ready(TGI, None, target, timeout_s=1)
    asked = heard.read_text().lower()
    assert "post /generate_stream" in asked
    assert ("x-team: blue" in asked) == bool(more)
    assert (f"authorization: basic {b64encode(b'me:pa55-0f-tgi').decode()}".lower() in asked) == bool(more)
    assert "hf_secret" not in asked


LISTEN = """
import pathlib, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
connection, _ = listener.accept()
pathlib.Path(sys.argv[1]).write_bytes(connection.recv(65536))
"""


@pytest.mark.parametrize(
    ("raw", "engine"),
    [
        (b'{"data":[{"id":"m","owned_by":"lightllm"}]}', "lightllm"),
        (b'{"data":[{"id":"m","owned_by": "sglang"}]}', "sglang"),
        (b'{"data":[{"id":"m","owned_by":"tensorrt_llm"}]}', "trtllm"),
        (b'{"data":[{"id":"m","owned_by":"m"}],"router":"text-generation-router"}', "tgi"),
        (b'{"data":[{"id":"m","owned_by":"me"}]}', "openai"),
        (b"vllm:x 1", "vllm"),
    ],
)
def test_an_engine_is_recognised_by_its_own_words(raw: bytes, engine: str) -> None:
    with replying(said.http(200, raw)) as target:
        assert engine_at(getter(target, timeout_s=5)) == engine


def test_where_nothing_listens_no_engine_is_recognised() -> None:
    assert engine_at(getter(Target(f"http://127.0.0.1:{process.free_port()}", ""), timeout_s=1)) is None
