"""Who answers at a URL is known before anything else is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burstline import cli
from burstline.bench.server_session import choose_engine
from burstline.console.server_options import ServerOptions
from burstline.servers.redact import Secret
from tests.burstline.answering import answering


def model(owner: str, limit: int | None = None) -> Any:
    def answer(path: str, body: Any) -> tuple[int, object]:
        # Once it is recognised one token is asked for, while the load is still being checked.
        assert body is None or limit is not None, "nothing is generated before the server is recognised"
        row = {"id": "m", "owned_by": owner} | ({} if limit is None else {"max_model_len": limit})
        return (200, {"data": [row]}) if path == "/v1/models" else (404, {})

    return answer


@pytest.mark.parametrize(
    ("answer", "words", "said"),
    [
        (model("vllm"), ("--engine", "tgi"), "is vLLM; drop --engine, or pass --engine vllm"),
        (
            model("lightllm"),
            ("--engine", "vllm"),
            "is LightLLM; drop --engine, or pass --engine",
        ),
        (model("sglang"), ("--engine", "vllm", "--endpoint", "chat"), "is SGLang; drop --engine"),
        (model("vllm", 512), (), "the longest request has 576 tokens (prompt and output), but the server at"),
    ],
)
def test_a_wrong_engine_and_a_too_long_request_are_refused_with_what_answers_there(
    answer: Any, words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as url:
        assert cli.main(["run", "--url", url, *words, "--out", str(tmp_path / "runs")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("owner", "engine"),
    [("burstline", "reference"), ("burstline-truth", "truth"), ("vllm", "vllm"), ("somebody", "openai")],
)
def test_a_server_is_known_by_its_own_words(owner: str, engine: str) -> None:
    with answering(model(owner)) as url:
        assert choose_engine(ServerOptions(url=Secret.words(url))).name == engine
