"""The server as its clients see it: a real process, real sockets, a tiny model."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, HttpReply, Kind, Target
from burstline.servers.openai import count_in, tokenize_call, tokens_in
from burstline.servers.reference import __main__ as reference_server
from burstline.servers.reference.serve import serve
from burstline.servers.reference.steplog import load_steps
from burstline.servers.reference.tokenizer import built_in
from burstline.servers.reference.weights import ModelConfig, assemble, random_source
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request

REFERENCE = ENGINES["reference"]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 300, "max_position_embeddings": 256, "eos_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip
IDS = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The server's process and what it said first."""
    argv = (sys.executable, "-m", "burstline.servers.reference", *arguments)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


def end(process: subprocess.Popen[str], by: int = signal.SIGTERM) -> int:
    """Its exit status, after a signal (0: none is sent)."""
    process.send_signal(by)
    assert process.stdout is not None
    process.stdout.close()
    return process.wait(timeout=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[tuple[str, Path]]:
    """Its address and its step log; room for 24 blocks of 16 tokens, four sequences at once."""
    log = folder / "steps.jsonl"
    sizes = ("--kv-tokens", "384", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    process, said = start("--port", "0", "--model", str(folder), "--step-log", str(log), *sizes)
    yield said.removeprefix("Listening on ").strip(), log
    assert end(process) == 0


@pytest.fixture
def client(server: tuple[str, Path]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], trust_env=False, verify=False, timeout=30) as client:
        yield client


def complete(client: httpx.Client, **fields: object) -> dict:
    return client.post("/v1/completions", json=IDS | fields).raise_for_status().json()


def events(client: httpx.Client, **fields: object) -> list[dict]:
    body = client.post("/v1/completions", json=IDS | {"stream": True} | fields).raise_for_status().text
    payloads = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]


def gauge(client: httpx.Client, name: str) -> float | None:
    return getattr(REFERENCE.gauges(client.get("/metrics").text), name)


def settles(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within ten seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_plain_answer_has_vllms_shape(client: httpx.Client) -> None:
    answer = complete(client)
    choice = answer["choices"][0]
    assert (answer["object"], answer["model"]) == (
        "text_completion",
        client.get("/v1/models").json()["data"][0]["id"],
    )
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 9, "completion_tokens": 6} | {
        "prompt_tokens_details": {"cached_tokens": 0}
    }
    assert (choice["finish_reason"], choice["token_ids"], choice["prompt_token_ids"]) == (
        "length",
        None,
        None,
    )
    assert choice["text"]


def test_a_stream_says_what_the_plain_answer_says(client: httpx.Client) -> None:
    plain = complete(client, return_token_ids=True)["choices"][0]
    streamed = events(client, return_token_ids=True)
    choices = [event["choices"][0] for event in streamed]
    assert "".join(choice["text"] for choice in choices) == plain["text"]
    assert [i for choice in choices for i in choice["token_ids"]] == plain["token_ids"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6, 7], *[None] * 5]
    assert [choice["finish_reason"] for choice in choices] == [*[None] * 5, "length"]


def test_usage_comes_when_asked_for_at_the_end_or_with_every_event(client: httpx.Client) -> None:
    assert all("usage" not in event for event in events(client))
    *first, last = events(client, stream_options={"include_usage": True})
    assert all("usage" not in event for event in first)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event["usage"]["completion_tokens"] for event in events(client, stream_options=options)]
    assert counts == [1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("prompt", ["hello", ["hello"], [[5, 6, 7]], "Grüße, 世界", [299]])
def test_a_prompt_is_text_or_ids_or_a_batch_of_one(client: httpx.Client, prompt: object) -> None:
    assert complete(client, prompt=prompt)["usage"]["completion_tokens"] == 6


def test_seeded_sampling_repeats_and_unseeded_does_not(client: httpx.Client) -> None:
    def sampled(**fields: object) -> list[int]:
        fields = {"temperature": 1.0, "max_tokens": 40, "return_token_ids": True} | fields
        return complete(client, **fields)["choices"][0]["token_ids"]

    assert sampled(seed=1) == sampled(seed=1)
    assert sampled(seed=1) != sampled(seed=2)
    assert sampled() != sampled()


@pytest.mark.parametrize(
    ("fields", "status", "kind", "said"),
    [
        ({"prompt": [1] * 250, "max_tokens": 7}, 400, "BadRequestError", "maximum context length is 256"),
        ({"prompt": []}, 400, "BadRequestError", "empty"),
        ({"prompt": [300]}, 400, "BadRequestError", "300 is out of vocabulary"),
        ({"prompt": [-1]}, 400, "BadRequestError", "-1 is out of vocabulary"),
        ({"prompt": [[1], [2]]}, 400, "BadRequestError", "one prompt a request"),
        ({"prompt": None}, 400, "BadRequestError", "prompt must be"),
        ({"max_tokens": 0}, 400, "BadRequestError", "max_tokens is 0"),
        ({"max_tokens": True}, 400, "BadRequestError", "max_tokens is True"),
        ({"min_tokens": 7}, 400, "BadRequestError", "min_tokens=7 is not offered"),
        ({"temperature": -1}, 400, "BadRequestError", "temperature is -1"),
        ({"stream_options": 1}, 400, "BadRequestError", "stream_options is 1"),
        ({"n": 2}, 400, "BadRequestError", "n=2 is not offered"),
        ({"logprobs": 1}, 400, "BadRequestError", "logprobs=1 is not offered"),
        ({"model": "other"}, 404, "NotFoundError", "`other` does not exist"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_stream(
    client: httpx.Client, fields: dict, status: int, kind: str, said: str
) -> None:
    reply = client.post("/v1/completions", json=IDS | {"stream": True} | fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (status, status, kind)
    assert said in error["message"]


@pytest.mark.parametrize("body", [b"{", b"[1]", b""])
def test_a_body_that_is_no_object_is_refused(client: httpx.Client, body: bytes) -> None:
    assert client.post("/v1/completions", content=body).json()["error"]["param"] == "body"


def test_more_requests_than_fit_all_end_and_show_in_the_gauges(
    client: httpx.Client, server: tuple[str, Path]
) -> None:
    """Twelve streams of 120 tokens in a cache for 384: they queue, are preempted, and all end alike."""
    sockets = [_ask(client, {"max_tokens": 117}) for _ in range(12)]
    bodies = [_rest(sock) for sock in sockets]
    texts = [
        [
            json.loads(line[6:])["choices"][0]["text"]
            for line in b.splitlines()
            if line[:6] == b"data: " and b"{" in line
        ]
        for b in bodies
    ]
    assert len(texts[0]) == 117
    assert all(text == texts[0] for text in texts)
    assert max(load_steps(server[1])[1]["n_waiting"]) > 0
    assert gauge(client, "preemptions")
    assert (gauge(client, "running"), gauge(client, "kv_used_fraction")) == (0, 0)


def test_a_client_that_goes_frees_its_blocks(client: httpx.Client) -> None:
    before = _finished(client, "abort")
    # Far more than can end before they are closed.
    sockets = [_ask(client, {"max_tokens": 250}) for _ in range(24)]
    for sock in sockets:
        sock.close()
    assert settles(lambda: _finished(client, "abort") > before)
    idle = ("running", "waiting", "kv_used_fraction")
    assert settles(lambda: [gauge(client, name) for name in idle] == [0, 0, 0])


def _ask(client: httpx.Client, fields: dict) -> socket.socket:
    """A stream that has been asked for and has begun to answer, so that it is known to be in the engine."""
    body = json.dumps(IDS | {"stream": True} | fields).encode()
    sock = socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=30)
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {}\r\n\r\n"
    sock.sendall(head.format(len(body)).encode() + body)
    sock.recv(1, socket.MSG_PEEK)
    return sock


def _rest(sock: socket.socket) -> bytes:
    parts = []
    with sock:
        while part := sock.recv(65536):
            parts.append(part)
    return b"".join(parts)


def _finished(client: httpx.Client, reason: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return next(float(x.split()[-1]) for x in lines if "request_success" in x and f'"{reason}"' in x)


def test_counters_and_histograms_grow_with_a_request(client: httpx.Client) -> None:
    def counts() -> list[float | None]:
        metrics = client.get("/metrics").text
        ttft = next(x for x in metrics.splitlines() if x.startswith("vllm:time_to_first_token_seconds_count"))
        gauges = REFERENCE.gauges(metrics)
        return [gauges.prompt_tokens, gauges.generation_tokens, float(ttft.split()[-1])]

    before = counts()
    complete(client)
    assert [after - old for after, old in zip(counts(), before, strict=True)] == [3, 6, 1]


def test_tokenize_counts_what_a_completion_counts(client: httpx.Client) -> None:
    reply = client.post("/tokenize", json={"prompt": "some text"}).json()
    assert (
        reply["count"]
        == len(reply["tokens"])
        == complete(client, prompt="some text")["usage"]["prompt_tokens"]
    )
    assert reply["max_model_len"] == 256


def test_a_text_is_counted_by_its_own_tokenizer(client: httpx.Client) -> None:
    target = Target(str(client.base_url), client.get("/v1/models").json()["data"][0]["id"])
    text = " a b c, dé"
    known = built_in(300).encode(text, add_special_tokens=False).ids
    call = tokenize_call(text, target)
    reply = client.request(call.method, call.path, content=call.body, headers=dict(call.headers))
    answer = HttpReply(reply.status_code, dict(reply.headers), reply.content)
    assert (count_in(answer), tokens_in(answer)) == (len(known), known)


def test_a_prompt_that_begins_like_an_earlier_one_is_partly_cached_and_counted(client: httpx.Client) -> None:
    def counters() -> list[float]:
        lines = client.get("/metrics").text.splitlines()
        names = ("vllm:prefix_cache_queries_total{", "vllm:prefix_cache_hits_total{")
        return [float(line.split()[-1]) for name in names for line in lines if line.startswith(name)]

    def ask(prompt: list[int]) -> dict:
        body = IDS | {"prompt": prompt}
        return client.post("/v1/completions", json=body).json()

    queries, hits = counters()
    long = [(7 * k) % 290 + 1 for k in range(50)]
    first, again, other = ask(long), ask(long), ask([*long[:40], 3, 3, 3])
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, again, other)]
    assert cached == [0, 48, 32]
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
    assert counters() == [queries + 143, hits + 80]


def test_the_step_log_of_a_live_server_holds_every_token(
    client: httpx.Client, server: tuple[str, Path]
) -> None:
    _, before = load_steps(server[1])
    complete(client)
    header, after = load_steps(server[1])
    new = slice(len(before["step"]), None)
    assert header["config"]["num_hidden_layers"] == 2
    assert (sum(after["prefill_tok"][new]), sum(after["decode_tok"][new])) == (3, 5)


def test_the_adapter_asks_reads_and_identifies(client: httpx.Client) -> None:
    def get(path: str) -> HttpReply:
        reply = client.get(path)
        return HttpReply(reply.status_code, dict(reply.headers), reply.content)

    identity = REFERENCE.identify(get, "")
    assert (identity.kv_tok, identity.max_num_seqs, identity.max_num_batched_tokens) == (384, 4, 64)
    assert (identity.vocab_size, identity.max_model_len, identity.dtype) == (300, 256, "float32")
    assert (identity.kv_cache_dtype, identity.kv_block_tok, identity.prefix_cache) == ("float32", 16, True)
    assert (identity.engine, identity.tensor_parallel_size) == ("reference", 1)
    assert identity.kv_bytes == 384 * 2 * 2 * 2 * 8 * 4
    target = Target(str(client.base_url), client.get("/v1/models").json()["data"][0]["id"])
    call = REFERENCE.encode(Request(0, (5, 6, 7), None, 3, 6), target)
    answer = client.request(call.method, call.path, content=call.body, headers=dict(call.headers))
    reply = REFERENCE.decode(HttpReply(answer.status_code, dict(answer.headers), answer.content))
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.finish_reason, reply.error) == (
        3,
        6,
        "length",
        None,
    )
    assert [event.n_tok for event in reply.events if event.kind is Kind.ANSWER] == [1] * 6


def test_another_server_is_not_identified_as_this_one() -> None:
    with pytest.raises(EngineError, match="404"):
        REFERENCE.identify(lambda _: HttpReply(404, {}, b""), "")


def test_the_adapter_launches_what_the_server_understands(tmp_path: Path) -> None:
    launch = REFERENCE.launch(
        LaunchOptions("reference", "127.0.0.1", 0, "a name", tmp_path, extra_args=("--seed", "3"))
    )
    process, said = start(*launch.argv[launch.argv.index("burstline.servers.reference") + 1 :])
    try:
        url = said.removeprefix("Listening on ").strip()
        assert httpx.get(url + "/v1/models", trust_env=False).json()["data"][0]["id"] == "a name"
        assert launch.step_log is not None
        assert load_steps(launch.step_log)[0]["weights"] == "random, seed 3"
    finally:
        assert end(process) == 0


def test_sigterm_ends_an_open_stream_with_abort_and_the_process_with_0() -> None:
    process, said = start("--port", "0")
    with httpx.Client(
        base_url=said.removeprefix("Listening on ").strip(), trust_env=False, verify=False, timeout=30
    ) as client:
        sock = _ask(client, {"max_tokens": 4000})
        assert settles(lambda: (gauge(client, "generation_tokens") or 0) > 3)
        process.send_signal(signal.SIGTERM)
        body = _rest(sock)
    assert end(process) == 0
    assert b'"finish_reason":"abort"' in body
    assert b"data: [DONE]" in body


def test_a_taken_port_is_one_clear_line(server: tuple[str, Path]) -> None:
    port = server[0].rpartition(":")[2]
    process, said = start("--port", port)
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert REFERENCE.root_cause(f"some\n{said}") == said.strip()
    assert end(process, by=0) == 1


@pytest.mark.parametrize(
    ("config", "arguments", "said"),
    [
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, (), "not MixtralForCausalLM"),
        ({}, ("--max-model-len", "300"), "300 is above the model's 256"),
        ({}, ("--kv-tokens", "32", "--max-model-len", "64"), "64 is above the KV cache's 32"),
        (None, (), "config.json"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_clear_line(
    tmp_path: Path,
    config: dict | None,
    arguments: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    monkeypatch.setattr(sys, "argv", ["reference", "--port", "0", "--model", str(tmp_path), *arguments])
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(SystemExit) as ended:
        serve(reference_server._options(), listener)
    line = str(ended.value.code)
    assert line.startswith("error: ")
    assert said in line
    assert REFERENCE.root_cause(line) == line.strip()


def test_a_folders_own_weights_are_served(folder: Path, tmp_path: Path, client: httpx.Client) -> None:
    """The random weights of seed 0, saved and loaded, say what the server that drew them says."""
    names, source = {}, random_source(0)

    def kept(name: str, shape: tuple[int, ...]) -> np.ndarray:
        names[name] = source(name, shape)
        return names[name]

    assemble(ModelConfig.from_json(CONFIG), kept)
    save_file(names, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    process, said = start("--port", "0", "--model", str(tmp_path), "--seed", "99")
    try:
        with httpx.Client(
            base_url=said.removeprefix("Listening on ").strip(), trust_env=False, verify=False
        ) as other:
            info = other.get("/server_info").json()
            assert info["weights"] == "safetensors"
            assert complete(other)["choices"][0]["text"] == complete(client)["choices"][0]["text"]
    finally:
        assert end(process) == 0


def test_it_speaks_the_chat_endpoint_with_lists_of_messages(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    asked = {"messages": messages, "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    whole = client.post("/v1/chat/completions", json=asked).raise_for_status().json()
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["role"] == "assistant"
    assert whole["usage"]["completion_tokens"] == 5
    streamed = client.post(
        "/v1/chat/completions", json=asked | {"stream": True, "stream_options": {"include_usage": True}}
    )
    reply = ENGINES["openai-chat"].decode(HttpReply(200, dict(streamed.headers), streamed.content))
    assert (reply.n_output_usage, reply.terminated, reply.error) == (5, True, None)
    assert sum(event.kind is Kind.ANSWER for event in reply.events) <= 5
    longer = [*messages, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "again"}]
    more = client.post("/v1/chat/completions", json=asked | {"messages": longer}).json()
    assert more["usage"]["prompt_tokens"] > whole["usage"]["prompt_tokens"]
    refused = client.post("/v1/chat/completions", json=asked | {"messages": "hello"})
    assert refused.status_code == 400
    assert "messages must be a list" in refused.json()["error"]["message"]
