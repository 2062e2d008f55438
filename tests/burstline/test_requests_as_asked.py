"""How requests are asked: endpoints, sampling, extra fields, headers, adapters, replicas, certificates."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from burstline import cli
from burstline.bench.server_session import check_start, choose_engine
from burstline.console.server_options import ServerOptions
from burstline.measure.record.rundir import open_run
from burstline.models.model_folder import make_model
from burstline.servers.destination import Destination, dressed
from burstline.servers.messages import Call, Target
from burstline.servers.redact import Secret
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request, Sampling, WorkloadError
from tests.burstline.answering import answering
from tests.servers.tiny_model import make_tiny_model
from tests.truth.rig import truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import Script
from tests.verdicts import done

pytestmark = pytest.mark.usefixtures("without_page")
TARGET = Target("http://x", "m")
ROWS = Path(__file__).parents[1] / "data" / "workloads"


def body_of(call: Call) -> dict[str, Any]:
    body: dict[str, Any] = orjson.loads(call.body)
    return body


@contextmanager
def completions(asked: list[tuple[str, Any]]) -> Iterator[str]:
    """An OpenAI-compatible server without a stream, that notes what it is asked."""

    def answer(path: str, body: Any) -> tuple[int, object]:
        if body is None:
            return 200, {"data": [{"id": "m", "owned_by": "somebody"}]}
        asked.append((path, body))
        n = body.get("max_tokens", 1)
        usage = {"completion_tokens": n, "prompt_tokens": len(body.get("prompt", [])) or 3}
        return 200, {
            "choices": [{"text": "x", "message": {"content": "x"}, "finish_reason": "length"}],
            "usage": usage,
        }

    with answering(answer) as url:
        yield url


def run(out: Path, *words: str) -> int:
    load = ("--requests", "12", "--prompt-tokens", "64", "--output-tokens", "4")
    return cli.main(["run", "-q", "--out", str(out), *load, *words])


def test_an_engine_can_be_asked_through_the_chat_endpoint_and_keeps_its_start_and_its_gauges() -> None:
    chat = choose_engine(ServerOptions(engine="vllm", endpoint="chat"))
    assert (chat.name, chat.title, chat.metrics_path) == ("vllm+chat", "vLLM (chat)", "/metrics")
    call = chat.encode(Request(0, None, "hello", 1, 4), TARGET)
    assert (call.path, body_of(call)["messages"]) == (
        "/v1/chat/completions",
        [{"role": "user", "content": "hello"}],
    )
    assert chat.root_cause("ValueError: no") == ENGINES["vllm"].root_cause("ValueError: no")
    assert chat.settings is ENGINES["vllm"].settings
    assert "vllm+chat" in ENGINES
    assert "vllm+chat" not in list(ENGINES)


@pytest.mark.parametrize(
    ("engine", "endpoint", "name"),
    [
        ("vllm", None, "vllm"), ("vllm", "completions", "vllm"), ("vllm", "native", "vllm"),
        ("tgi", "completions", "tgi+completions"), ("lightllm", "native", "lightllm"),
        ("openai", "chat", "openai-chat"), ("openai-chat", "completions", "openai"),
    ],
)  # fmt: skip
def test_the_endpoint_chooses_the_dialect(engine: str, endpoint: str | None, name: str) -> None:
    assert choose_engine(ServerOptions(engine=engine, endpoint=endpoint)).name == name


def test_extra_fields_are_laid_over_the_body_and_adapters_take_turns() -> None:
    (extra,) = Secret.words('{"min_p": 0.1, "parameters": {"top_n": 2}}')
    target = Target("http://x", "m", extra_body=extra, loras=("a", "b"))
    call = Call("POST", "/", orjson.dumps({"model": "m", "parameters": {"max": 4}}))
    bodies = [body_of(dressed(call, target, index, ("model",))) for index in range(3)]
    assert [body["model"] for body in bodies] == ["a", "b", "a"]
    assert bodies[0] == {"model": "a", "min_p": 0.1, "parameters": {"max": 4, "top_n": 2}}
    tgi = body_of(dressed(call, target, 1, ENGINES["tgi"].lora_path))
    assert tgi["parameters"] == {"max": 4, "top_n": 2, "adapter_id": "b"}
    assert dressed(call, TARGET, 0, ("model",)) is call


@pytest.mark.parametrize("engine", ["lightllm", "llamacpp", "trtllm"])
def test_adapters_are_refused_where_a_request_cannot_name_one(engine: str) -> None:
    where = ServerOptions(engine=engine, url=Secret.words("http://127.0.0.1:1"), lora=("one",))
    with pytest.raises(WorkloadError, match=r"--lora one: .* cannot select an adapter by request"):
        check_start(choose_engine(where), where, 8)


def test_the_command_that_makes_weights_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It once was `burstline make-model --format gguf`, without a folder and a shape."""
    monkeypatch.setenv("BURSTLINE_LLAMA_SERVER", sys.executable)
    folder = make_model(tmp_path / "m", "tiny")
    where = ServerOptions(engine="llamacpp", model=str(folder))
    with pytest.raises(WorkloadError, match="holds no weights") as refused:
        check_start(choose_engine(where), where, 8)
    command = str(refused.value).split("`")[1].split()
    assert command[0] == "burstline"
    assert cli.main(command[1:]) == 0
    (made,) = tmp_path.glob("m-*")
    assert list(made.glob("*.gguf"))


def test_adapters_are_named_where_the_dialect_reads_them() -> None:
    paths = {name: ENGINES[name].lora_path for name in ("tgi", "tgi+chat", "sglang+chat", "vllm+chat")}
    assert paths == {
        "tgi": ("parameters", "adapter_id"), "tgi+chat": ("model",),
        "sglang+chat": ("lora_path",), "vllm+chat": ("model",),
    }  # fmt: skip


def test_headers_go_with_every_request_and_replace_those_of_the_client() -> None:
    target = Target("http://x", "m", headers=(Secret("X-Team: blue"), Secret("User-Agent: mine")))
    sent = Destination.of(target).serialised(Call("POST", "/v1/completions", b"{}"))
    assert b"x-team: blue\r\n" in sent
    assert b"user-agent: mine\r\n" in sent
    assert sent.count(b"user-agent") == 1


def test_a_load_asks_as_it_was_told(tmp_path: Path) -> None:
    asked: list[tuple[str, Any]] = []
    with completions(asked) as url:
        words = ("--engine", "vllm", "--vocab-size", "1000", "--temperature", "0.7", "--top-p", "0.9")
        extra = ("--extra-body", '{"min_p": 0.2}', "--lora", "one,two", "--header", "X-Team: blue")
        assert done(run(tmp_path / "runs", "--url", url, *words, *extra), tmp_path)
    load = [body for path, body in asked if path == "/v1/completions" and body["max_tokens"] == 4]
    assert len(load) == 12
    assert {(body["temperature"], body["top_p"], body["min_p"]) for body in load} == {(0.7, 0.9, 0.2)}
    assert Counter(body["model"] for body in load) == {"one": 6, "two": 6}
    (folder,) = (tmp_path / "runs").iterdir()
    assert {request.sampling for request in open_run(folder).plan.requests} == {Sampling(0.7, 0.9, 0)}


@pytest.mark.slow
def test_clients_that_hang_up_are_no_failures_and_the_server_frees_what_it_held(tmp_path: Path) -> None:
    script = Script(ttft_s=0.02, gaps_s=(0.02,))
    with truth_server(script, thread=True) as truth:
        words = (
            "--engine",
            "truth",
            "--output-tokens",
            "40",
            "--cancel-share",
            "25%,after=3..5",
        )
        assert done(run(tmp_path / "runs", "--url", truth.url, *words), tmp_path)
        after, log = truth.metrics(), truth.log()
    (folder,) = (tmp_path / "runs").iterdir()
    one = open_run(folder)
    summary = one.summary
    assert summary is not None
    assert summary.counts == {"planned": 12, "ok": 9, "abandoned": 3}
    rows = one.records.to_pandas() if hasattr(one.records, "to_pandas") else one.records
    gone = rows[rows["outcome"] == "abandoned"]
    assert all(3 <= len(tokens) < 40 for tokens in gone["token_ns"])
    assert Counter(row.ended for row in log)["client_closed"] == 3
    # It held prompts and answers of all twelve, and nothing of them is left.
    assert (after["truth:requests_running"], after["truth:kv_usage"]) == (0, 0)
    memory = summary.memory
    assert (memory.running_after.point, memory.kv_after_fraction.point) == (0, 0)
    codes = {warning.code for warning in summary.verdict.warnings}
    assert "abandoned" in codes
    assert "failures" not in codes
    assert summary.figure("metrics", "e2e", "mean").n == 9


@pytest.mark.slow
def test_replicas_share_the_requests_evenly_and_their_counters_add_up(tmp_path: Path) -> None:
    with truth_server(thread=True) as one, truth_server(thread=True) as two:
        words = ("--engine", "truth", "--url", f"{one.url},{two.url}")
        assert done(run(tmp_path / "runs", *words), tmp_path)
        shares = [sum(row.index is not None for row in truth.log()) for truth in (one, two)]
    assert shares == [6, 6]
    (folder,) = (tmp_path / "runs").iterdir()
    summary = open_run(folder).summary
    assert summary is not None
    assert summary.conservation.output_server_tok.point == 48


def test_a_server_of_another_kind_is_no_replica(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        truth_server(thread=True) as one,
        truth_server(setup=TruthSetup(max_model_len=64), thread=True) as two,
    ):
        assert run(tmp_path / "runs", "--engine", "truth", "--url", f"{one.url},{two.url}") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("burstline:")]
    assert (
        f"--url {two.url} is not a replica: its max model len is 64, that of the first URL is 1048576" in line
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", ["--data", "--trace"])
def test_rows_of_data_and_of_a_trace_are_sampled_and_dressed_like_other_requests(
    source: str, tmp_path: Path
) -> None:
    asked: list[tuple[str, Any]] = []
    if source == "--data":
        make_tiny_model(tmp_path / "tiny")
        rows = (
            "--data",
            str(ROWS / "prompts.jsonl"),
            "--tokenizer",
            str(tmp_path / "tiny"),
            "--requests",
            "8",
        )
    else:
        rows = ("--trace", f"{ROWS / 'trace.jsonl'},speed=20", "--requests", "8")
    with completions(asked) as url:
        words = ("run", "-q", "--out", str(tmp_path / "runs"))
        how = ("--temperature", "0.7", "--top-p", "0.9", "--extra-body", '{"min_p": 0.2}')
        server = ("--engine", "vllm", "--vocab-size", "1000", "--url", url, "--header", "X-Team: blue")
        code = cli.main([*words, "--requests", "8", "--seed", "3", *rows, *how, *server])
        assert done(code, tmp_path)
    drawn = [(b["temperature"], b["top_p"], b["seed"]) for _, b in asked if b["temperature"] and b["min_p"]]
    assert Counter(drawn) == {(0.7, 0.9, 3): 8}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--extra-body", "{"), "--extra-body is not JSON"),
        (("--extra-body", "[1]"), "--extra-body [1]: expected a JSON object"),
        (("--extra-body", '{"stream": false}'), "--extra-body: Burstline sets stream itself"),
        (
            ("--extra-body", '{"max_tokens": 1}'),
            "does not set: set it with --output-tokens",
        ),
        (("--extra-body", '{"parameters": {"max_new_tokens": 1}}'), "Burstline sets max_new_tokens itself"),
        (("--extra-body", '{"prompt": "x"}'), "Burstline sets prompt itself"),
        (("--header", "nonsense"), "expected 'NAME: VALUE'"),
        (("--header", "X-Team: blue\rX-Other: 1"), "expected 'NAME: VALUE'"),
        (("--insecure",), "--insecure would be ignored: it applies only to an https --url"),
        (("--ca-bundle", "/nowhere.pem"), "--ca-bundle /nowhere.pem is not a file"),
        (("--top-p", "0.9"), "--top-p 0.9 would be ignored: greedy decoding does not sample"),
        (("--cancel-share", "2"), "--cancel-share: '2': expected a share from 0 to 1"),
        (
            ("--cancel-share", "0.5,after=64"),
            "replies have 4 tokens, so no client would disconnect",
        ),
        (("--cancel-share", "0.5", "--turns", "3"), "--cancel-share is for single requests"),
        (("--temperature", "-1"), "--temperature -1: expected 0 (greedy) or more"),
        (("--url", "http://127.0.0.1:1,http://127.0.0.1:2", "--workers", "3"), "cannot share 2 URLs evenly"),
        (("--url", "http://127.0.0.1:1", "--port", "1"), "--port would be ignored"),
        (("--url", "http://127.0.0.1:1,http://127.0.0.1:1/v1"), "--url names http://127.0.0.1:1 twice"),
    ],
)
def test_what_makes_no_sense_of_a_request_is_one_line_and_exit_code_2(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = run(tmp_path / "runs", *words)
    except SystemExit as exit_:  # argparse
        code = int(exit_.code or 0)
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[0], lines
    assert not (tmp_path / "runs").exists()
    left = [process.cmdline() for process in psutil.Process().children()]
    assert not any(
        "burstline.loadgen.driver.drive" in argv for argv in left
    )  # started before the flags were checked


def test_a_key_with_a_line_break_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BURSTLINE_API_KEY", "sk-of-mine\n")
    assert run(tmp_path / "runs", "--url", "http://127.0.0.1:1") == 2
    said = capsys.readouterr().err
    assert "BURSTLINE_API_KEY has a line break" in said
    assert "sk-of-mine" not in said


def test_a_bundle_without_certificates_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text(json.dumps({}))
    target = Target("https://x", "m", ca_bundle=str(tmp_path / "empty.pem"))
    with pytest.raises(Exception, match="no certificates can be read"):
        Destination.of(target).tls()
    assert Destination.of(Target("https://x", "m", insecure=True)).tls().verify_mode == 0
