"""What every engine's replies come to: the same scenes for all, fed whole and byte by byte."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from burstline.loadgen.capture.capture import Capture
from burstline.measure.record.record import Record, record_of
from burstline.servers.host.ready import stage_of
from burstline.servers.messages import EngineError, HttpReply, Read
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request
from tests.servers import documented as said
from tests.servers.golden import GOLDEN


@dataclass(frozen=True)
class Scene:
    """A reply, what was asked, and what the record must say of it."""

    engine: str
    what: str
    raw: bytes
    outcome: str
    asked: tuple[int, int] = (17, 4)  # prompt and output tokens
    out: int | None = None
    prompt: int | None = None
    error: str | None = None
    died: str | None = None
    ids: bool = True


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


TGI_OVERLOADED = said.stream(said.tgi_error("Model is overloaded", "overloaded"))
SGLANG_FULL = {
    "error": {"message": "The request queue is full.", "type": "x", "code": 503, "retryable": False}
}
SGLANG_ABORT = {"type": "abort", "message": "Aborted by watchdog", "status_code": 500, "err_type": "Internal"}
LLAMA_FULL = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
LLAMA_LONG = {
    "error": {"code": 400, "message": "the request exceeds the context", "type": "exceed_context_size_error"}
}
CHAT = said.stream(
    said.chat_event({"role": "assistant", "content": ""}),
    *(said.chat_event({"content": " a"}) for _ in range(3)),
    said.chat_event({"content": " a"}, "length"),
    said.usage_event(4),
    said.DONE,
)
THOUGHT = said.stream(
    said.chat_event({"role": "assistant"}),
    *(said.chat_event({"reasoning_content": " a"}) for _ in range(2)),
    *(said.chat_event({"content": " a"}) for _ in range(2)),
    said.chat_event({}, "length"),
    said.usage_event(4),
    said.DONE,
)
COMPLETION = said.stream(
    *(said.completion_event(" a") for _ in range(3)),
    said.completion_event(" a", "length"),
    said.usage_event(4),
    said.DONE,
)
MID_ERROR = said.stream(
    said.completion_event(" a"), {"error": {"message": "engine died", "type": "x"}}, said.DONE
)

SCENES = [
    # vLLM, recorded
    Scene("vllm", "stream", golden("vllm/completions_stream.http"), "ok", (512, 64), 64, 512),
    Scene("vllm", "plain", golden("vllm/completions_plain.http"), "ok", (512, 64), 64, 512),
    Scene("vllm", "too long", golden("vllm/error_too_long.http"), "http_400", error="maximum context length"),
    Scene(
        "vllm", "overload", said.plain(503, {"error": {"message": "Queue full"}}), "http_503", error="Queue"
    ),
    Scene(
        "vllm", "stopped", golden("vllm/completions_stream_server_stopped.http"), "aborted", (16, 1500), 288
    ),
    Scene(
        "vllm", "died", said.cut(golden("vllm/completions_stream.http"), 3), "reset", (512, 64), died="reset"
    ),
    # TGI, from its source
    Scene("tgi", "stream", said.tgi_stream(4), "ok", out=4, prompt=17, ids=False),
    Scene("tgi", "old framing", said.tgi_stream(4).replace(b"data: ", b"data:\x20"), "ok", out=4, ids=False),
    Scene("tgi", "early end", said.tgi_stream(2, "eos_token"), "short", out=2, ids=False),
    Scene("tgi", "stop sequence", said.tgi_stream(2, "stop_sequence"), "short", out=2, ids=False),
    Scene("tgi", "overload", TGI_OVERLOADED, "refused", error="overloaded", ids=False),
    Scene(
        "tgi",
        "overload, plain",
        said.plain(429, said.tgi_error("Model is overloaded", "overloaded")),
        "refused",
        error="overloaded",
        ids=False,
    ),
    Scene(
        "tgi",
        "refused",
        said.stream(said.tgi_error("`inputs` must be shorter", "validation")),
        "error_event",
        error="must be shorter",
        ids=False,
    ),
    Scene(
        "tgi",
        "bad JSON",
        said.http(400, b"Failed to parse the request body", "text/plain"),
        "http_400",
        error="Failed to parse",
        ids=False,
    ),
    Scene(
        "tgi",
        "fails midway",
        said.stream(said.tgi_event(1), said.tgi_error("Request failed", "generation")),
        "error_event",
        out=1,
        error="Request failed",
        ids=False,
    ),
    Scene(
        "tgi", "ends midway", said.stream(said.tgi_event(1), said.tgi_event(2)), "truncated", out=2, ids=False
    ),
    Scene("tgi", "died", said.cut(said.tgi_stream(4), 2), "reset", out=2, died="reset", ids=False),
    # LightLLM, recorded
    Scene("lightllm", "stream", golden("lightllm/generate_stream_ids.http"), "ok", (64, 12), 12, 64),
    Scene("lightllm", "text", golden("lightllm/generate_stream_text.http"), "ok", (5, 4), 4, 5, ids=False),
    Scene(
        "lightllm", "clamped", golden("lightllm/generate_stream_clamped.http"), "clamped", (478, 100), 34, 478
    ),
    Scene(
        "lightllm",
        "too long",
        golden("lightllm/generate_stream_too_long.http"),
        "error_event",
        error="the input prompt token len 640",
    ),
    Scene("lightllm", "bad JSON", golden("lightllm/error_bad_json.http"), "http_400", error=""),
    Scene(
        "lightllm",
        "no parameters",
        golden("lightllm/error_missing_parameters.http"),
        "http_417",
        error="'parameters'",
    ),
    Scene("lightllm", "bad sampling", golden("lightllm/error_bad_sampling.http"), "http_400", error=""),
    Scene(
        "lightllm",
        "busy",
        said.plain(429, {"error": {"message": "busy", "code": 429}}),
        "http_429",
        error="busy",
    ),
    Scene(
        "lightllm",
        "fault",
        said.stream({"error": {"message": "boom", "type": "server_error", "code": "stream_error"}}),
        "error_event",
        error="boom",
    ),
    Scene(
        "lightllm",
        "stopped",
        golden("lightllm/generate_stream_server_stopped.http"),
        "truncated",
        (16, 1500),
        249,
    ),
    Scene(
        "lightllm",
        "died",
        said.cut(golden("lightllm/generate_stream_ids.http"), 5),
        "reset",
        (64, 12),
        5,
        64,
        died="reset",
    ),
    # SGLang, from its source
    Scene("sglang", "cumulative", said.sglang_stream(1, 2, 3, 4), "ok", out=4, prompt=17),
    Scene("sglang", "several a time", said.sglang_stream(1, 3, 4), "ok", out=4, prompt=17),
    Scene("sglang", "incremental", said.sglang_stream(1, 3, 4, incremental=True), "ok", out=4, prompt=17),
    Scene(
        "sglang",
        "plain",
        said.plain(200, said.sglang_event(4, 4, {"type": "length", "length": 4})),
        "ok",
        out=4,
    ),
    Scene("sglang", "early end", said.sglang_stream(1, 2, finish="stop"), "short", out=2),
    Scene("sglang", "queue full", said.stream(SGLANG_FULL, said.DONE), "error_event", error="queue is full"),
    Scene("sglang", "queue full, plain", said.plain(503, SGLANG_FULL), "http_503", error="queue is full"),
    Scene(
        "sglang",
        "bad type",
        said.plain(400, {"error": "invalid type: string"}),
        "http_400",
        error="invalid type",
    ),
    Scene(
        "sglang",
        "abort",
        said.stream(said.sglang_event(1, 1, SGLANG_ABORT), said.DONE),
        "error_event",
        out=1,
        error="watchdog",
    ),
    Scene(
        "sglang",
        "quiet abort",
        said.stream(said.sglang_event(1, 1, {"type": "abort"}), said.DONE),
        "aborted",
        out=1,
    ),
    Scene("sglang", "died", said.cut(said.sglang_stream(1, 2, 3, 4), 2), "reset", out=2, died="reset"),
    # llama.cpp, from its documentation
    Scene("llamacpp", "stream", said.llama_stream(4), "ok", out=4, prompt=17),
    Scene(
        "llamacpp",
        "pings",
        said.llama_stream(4).replace(b"0\r\n\r\n", b"3\r\n:\n\n\r\n0\r\n\r\n"),
        "ok",
        out=4,
    ),
    Scene("llamacpp", "plain", said.plain(200, said.llama_last(4)), "ok", out=4, prompt=17),
    Scene("llamacpp", "early end", said.llama_stream(2, "eos"), "short", out=2),
    Scene("llamacpp", "one too many", said.llama_stream(5), "long", out=5),
    Scene("llamacpp", "context full", said.llama_stream(2, "limit"), "clamped", out=2),
    Scene("llamacpp", "loading", said.plain(503, LLAMA_FULL), "http_503", error="Loading model"),
    Scene("llamacpp", "too long", said.plain(400, LLAMA_LONG), "http_400", error="exceeds the context"),
    Scene("llamacpp", "recorded", golden("llamacpp/completion_stream.http"), "ok", (32, 8), 8, 32),
    Scene("llamacpp", "multibyte", golden("llamacpp/completion_multibyte.http"), "ok", (32, 12), 12, 32),
    Scene(
        "llamacpp",
        "context ran out",
        golden("llamacpp/completion_context_full.http"),
        "clamped",
        (700, 200),
        68,
        700,
    ),
    Scene(
        "llamacpp",
        "fails midway",
        said.stream(said.llama_event(1), LLAMA_FULL),
        "error_event",
        out=1,
        error="Loading",
    ),
    Scene("llamacpp", "died", said.cut(said.llama_stream(4), 2), "reset", out=2, died="reset"),
    # transformers serve, recorded
    Scene(
        "transformers",
        "stream",
        golden("transformers/completions_stream.http"),
        "ok",
        (9, 12),
        12,
        9,
        ids=False,
    ),
    Scene(
        "transformers",
        "plain",
        golden("transformers/completions_plain.http"),
        "ok",
        (9, 12),
        12,
        9,
        ids=False,
    ),
    Scene(
        "transformers",
        "field",
        golden("transformers/error_unexpected_field.http"),
        "http_422",
        error="Unexpected fields",
        ids=False,
    ),
    Scene("transformers", "ids", golden("transformers/error_ids.http"), "http_400", error="must be a string"),
    Scene(
        "transformers",
        "bad JSON",
        golden("transformers/error_bad_json.http"),
        "http_422",
        error="json_invalid",
    ),
    Scene(
        "transformers",
        "model",
        golden("transformers/error_unknown_model.http"),
        "http_400",
        error="pinned to",
    ),
    Scene(
        "transformers", "dead worker", said.plain(503, {"detail": "cb_worker_dead"}), "http_503", error="dead"
    ),
    Scene(
        "transformers",
        "fails midway",
        said.stream(said.completion_event(" a"), {"error": "boom"}),
        "error_event",
        error="boom",
        ids=False,
    ),
    Scene("transformers", "ends midway", said.stream(said.completion_event(" a")), "truncated", ids=False),
    Scene(
        "transformers",
        "died",
        said.cut(golden("transformers/completions_stream.http"), 2),
        "reset",
        died="reset",
        ids=False,
    ),
    # TensorRT-LLM, from its source
    Scene("trtllm", "stream", COMPLETION, "ok", out=4, prompt=17),
    Scene(
        "trtllm",
        "unknown field",
        said.plain(400, {"error": "Extra inputs are not permitted"}),
        "http_400",
        error="Extra inputs",
    ),
    Scene(
        "trtllm",
        "flat error",
        said.flat_error(400, "should not exceed max_seq_len"),
        "http_400",
        error="max_seq_len",
    ),
    Scene("trtllm", "overload", said.flat_error(503, "busy"), "http_503", error="busy"),
    Scene("trtllm", "fails midway", MID_ERROR, "error_event", error="engine died"),
    Scene("trtllm", "died", said.cut(COMPLETION, 2), "reset", died="reset"),
    # any endpoint
    Scene("openai", "stream", COMPLETION, "ok", out=4, prompt=17, ids=False),
    Scene(
        "openai", "no usage", said.stream(said.completion_event(" a", "length"), said.DONE), "ok", ids=False
    ),
    Scene(
        "openai",
        "limited",
        said.plain(429, {"error": {"message": "Rate limit reached"}}),
        "http_429",
        error="Rate limit",
        ids=False,
    ),
    Scene("openai", "fails midway", MID_ERROR, "error_event", error="engine died", ids=False),
    Scene("openai", "died", said.cut(COMPLETION, 2), "reset", died="reset", ids=False),
    Scene("openai-chat", "stream", CHAT, "ok", out=4, prompt=17, ids=False),
    Scene(
        "openai-chat",
        "reasoning",
        THOUGHT,
        "ok",
        out=4,
        ids=False,
    ),
    Scene(
        "openai-chat", "limited", said.plain(429, {"error": "slow down"}), "http_429", error="slow", ids=False
    ),
    Scene("openai-chat", "died", said.cut(CHAT, 3), "reset", died="reset", ids=False),
]


def record(scene: Scene, pieces: list[bytes]) -> Record:
    n_prompt, n_output = scene.asked
    ids, text = (array("I", range(n_prompt)), None) if scene.ids else (None, "a")
    request = Request(0, ids, text, n_prompt, n_output)
    reads = [Read(10 + i, None, piece) for i, piece in enumerate(pieces)]
    capture = Capture(0, 0, 1, 2, 3, 10 + len(pieces), reads, failure=scene.died, detail=scene.died)
    return record_of(request, capture, ENGINES[scene.engine].decode)


def judged(record: Record) -> tuple[object, ...]:
    return (
        record.outcome,
        record.output_tok,
        record.prompt_tok,
        record.finish_reason,
        record.error,
        sum(record.token_n),
    )


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: f"{scene.engine}: {scene.what}")
def test_the_outcome_is_exact_however_the_bytes_arrive(scene: Scene) -> None:
    whole = record(scene, [scene.raw])
    assert whole.outcome == scene.outcome, whole.error
    if scene.out is not None:
        assert whole.output_tok == sum(whole.token_n) == scene.out
    if scene.prompt is not None:
        assert whole.prompt_tok == scene.prompt
    if scene.error is None:
        assert whole.error == scene.died
    else:
        assert scene.error in (whole.error or "")
        assert whole.error
    by_byte = record(scene, [scene.raw[i : i + 1] for i in range(len(scene.raw))])
    assert judged(by_byte) == judged(whole)
    assert list(by_byte.token_ns) == sorted(by_byte.token_ns)


def test_every_engine_streams_refuses_and_dies_in_these_scenes() -> None:
    for name in set(ENGINES) - {"truth", "reference"}:
        outcomes = {scene.outcome for scene in SCENES if scene.engine == name}
        assert {"ok", "reset"} <= outcomes, name
        assert any(outcome.startswith("http_") for outcome in outcomes), name


@pytest.mark.parametrize("name", sorted(set(ENGINES) - {"truth"}))
def test_no_body_makes_a_decoder_raise(name: str) -> None:
    for body in (b"", b"{", b"[]", b"null", b"data: {}\n\n", b"data: 7\n\n", b"\xff\x00"):
        raw = said.http(200, body)
        scene = Scene(name, "nonsense", raw, "error_event")
        assert record(scene, [raw]).outcome in ("error_event", "empty", "truncated"), body


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ENGINES)
def test_a_long_line_of_a_log_is_searched_for_a_cause_in_no_time(name: str) -> None:
    engine = ENGINES[name]
    for word in ("x", "x ", "a.b_"):
        log = f"begin\n{word * 200_000}\nend"
        assert engine.root_cause(log) is None
        assert engine.doomed(log) is None
        assert engine.dead(log) is None
        stage_of(engine, log)


METRICS: dict[str, Callable[[], HttpReply]] = {
    "none": lambda: HttpReply(404, {}, b"vllm:cache_config_info{"),
    "not metrics": lambda: HttpReply(200, {}, b'vllm:cache_config_info{a="\nsglang:max_total_num_tokens x y'),
    "too long": lambda: _raises("longer than 8 MiB"),
    "hangs": lambda: _raises("did not answer in time"),
}


def _raises(text: str) -> HttpReply:
    raise EngineError(text)


@pytest.mark.parametrize("page", METRICS)
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_whose_metrics_cannot_be_read_is_identified_without(name: str, page: str) -> None:
    def get(path: str) -> HttpReply:
        return METRICS[page]() if path == "/metrics" else HttpReply(200, {}, b'{"data": [{"id": "m"}]}')

    identity = ENGINES[name].identify(get, "")
    assert (identity.engine, identity.kv_tok) == (name, None)
