"""Where the engine is: a URL as people write it, and what is said where nothing of the kind is there."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from burstline.bench import server_session
from burstline.bench.server_session import choose_engine, serving
from burstline.console.server_options import ServerOptions
from burstline.servers.messages import EngineError
from burstline.servers.redact import Secret
from tests.burstline.answering import answering

MODELS = {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}


@pytest.fixture
def desk() -> Iterator[tuple[str, list[str]]]:
    """Lists a model as vLLM does, has no other page, and refuses every request; what it was asked for."""
    paths: list[str] = []

    def answer(path: str, body: Any) -> tuple[int, object]:
        paths.append(path)
        if body is not None:
            return 400, {"error": {"message": "no such luck"}}
        return (200, MODELS) if path == "/v1/models" else (404, {})

    with answering(answer) as url:
        yield url, paths


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_a_url_with_v1_is_asked_for_the_same_as_one_without(desk, tmp_path, end):
    url, paths = desk
    where = ServerOptions(url=Secret.words(f"{url}{end}"))
    engine = choose_engine(where)
    assert engine.name == "vllm"
    refused = pytest.raises(EngineError, match=r"refuses a request for one token \(HTTP 400\): no such luck$")
    with refused, serving(engine, where, tmp_path, print):
        pass
    assert {"/v1/models", "/version", "/health", "/v1/completions"} <= set(paths)
    assert not [path for path in paths if path.startswith(("/v1/v1", "/v1/health", "/v1/version"))]


@pytest.mark.parametrize("binds", ["PAGE_TIMEOUT_S", "ATTACH_TIMEOUT_S"])
def test_a_server_that_says_nothing_is_not_waited_for(binds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by page nor by all of its pages."""
    for name in ("PAGE_TIMEOUT_S", "ATTACH_TIMEOUT_S"):
        monkeypatch.setattr(server_session, name, 0.1 if name == binds else 600.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        assert choose_engine(ServerOptions(url=Secret.words(url))).name == "openai"
