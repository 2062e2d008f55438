"""Pages, refusals and counters as servers and gateways really give them, with what is made of them."""

import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType, SimpleNamespace

import orjson
import pytest

from burstline.bench import server_session
from burstline.bench.server_session import _attached
from burstline.console.server_options import ServerOptions
from burstline.measure.record.tables import telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.stats.estimates import Absent
from burstline.servers.gauges import gauges_in
from burstline.servers.host import ready, watch
from burstline.servers.host.telemetry import Row
from burstline.servers.introspection import first_model, json_at
from burstline.servers.launch import Launch
from burstline.servers.messages import Call, EngineError, HttpReply, Target, target_at
from burstline.servers.redact import Secret
from burstline.servers.registry import ENGINES
from burstline.workloads.request import Request
from tests.servers import documented as said

MODELS = {
    "OpenAI's": ({"object": "list", "data": [{"id": "m", "object": "model"}]}, "m"),
    "a bare list": ([{"id": "m"}], "m"),
    "a bare list of names": (["m", "n"], "m"),
    "names in data": ({"data": ["m"]}, "m"),
    "under models": ({"models": [{"name": "m", "size": 3}]}, "m"),
    "under models, as model": ({"models": [{"model": "m"}]}, "m"),
    "an empty list": ([], None),
    "nothing": ({"object": "list", "data": []}, None),
    "no list": ({"data": "m"}, None),
    "an error": ({"detail": "Not Found"}, None),
    "null": (None, None),
}


@pytest.mark.parametrize(("page", "name"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("status", [200, 201])
def test_the_first_model_is_read_from_any_list(page: object, name: str | None, status: int) -> None:
    models = json_at(lambda path: HttpReply(status, {}, orjson.dumps(page)), "/v1/models")
    assert first_model(models).get("id") == name


def ranks(label: str, *values: float, name: str = "sglang:num_running_reqs") -> str:
    return (
        "\n".join(f'{name}{{model_name="m",{label}="{k}"}} {value}' for k, value in enumerate(values)) + "\n"
    )


@pytest.mark.parametrize(
    ("page", "running"),
    [
        (ranks("tp_rank", *[4.0] * 8), 4.0),
        (ranks("pp_rank", 4.0, 3.0), 4.0),
        (ranks("moe_ep_rank", 4.0, 4.0), 4.0),
        (ranks("dp_rank", 4.0, 3.0), 7.0),
        (ranks("engine", 4.0, 3.0), 7.0),
        (ranks("kind", 4.0, 4.0), 8.0),
        (ranks('dp_rank="0",tp_rank', 4.0, 4.0) + ranks('dp_rank="1",tp_rank', 2.0, 2.0), 6.0),
    ],
)
def test_ranks_that_share_a_request_count_it_once(page: str, running: float) -> None:
    assert gauges_in(page, {"running": ("sglang:num_running_reqs",)}).running == running


@contextmanager
def answering(
    *replies: bytes, unstreamed: bytes = b"", pages: Mapping[str, bytes] = MappingProxyType({})
) -> Iterator[Target]:
    """A server that answers POST after POST with these raw replies, then with the last again.

    `unstreamed` is the reply to each that asks for no stream, if it is another one.
    """
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["content-length"]))
            own = unstreamed if b'"stream":true' not in asked else b""
            self.wfile.write(own or (left.pop(0) if len(left) > 1 else left[0]))
            self.close_connection = True

        def do_GET(self) -> None:
            self.wfile.write(pages.get(self.path, b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"))
            self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Target(f"http://127.0.0.1:{server.server_port}", "m")
    finally:
        server.shutdown()
        server.server_close()


def raw(status: str, body: object = "", *headers: str) -> bytes:
    data = body.encode() if isinstance(body, str) else orjson.dumps(body)
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


REFUSALS = {
    "a redirect": (
        "openai",
        raw("307 Temporary Redirect", "", "location: http://other:1/v1"),
        "http://other:1/v1",
    ),
    "a redirect for good": (
        "openai-chat",
        raw("308 Permanent Redirect", "", "location: /x"),
        "redirects to /x",
    ),
    "chats alone": ("openai", raw("404 Not Found", {"detail": "Not Found"}), "--endpoint chat"),
    "chats alone, by its method": ("openai", raw("405 Method Not Allowed"), "--endpoint chat"),
    "no chat template": (
        "openai-chat",
        raw("500 Internal Server Error", {"error": "the tokenizer has no chat template"}),
        "--endpoint completions",
    ),
    "no chat template, refused": (
        "openai-chat",
        raw("400 Bad Request", {"error": {"message": "Chat template is not set"}}),
        "--endpoint completions",
    ),
    "another model": (
        "openai",
        raw("404 Not Found", {"error": "The model m does not exist"}),
        "does not exist$",
    ),
}


HEAD_ALONE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
"""What a gateway sends that has not asked yet, and closes when it is refused."""


@pytest.mark.parametrize(("engine", "reply", "words"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("is_behind", [False, True], ids=["at once", "behind a head"])
def test_a_refusal_that_says_its_cause_is_told_at_once_with_what_helps(
    engine: str, reply: bytes, words: str, *, is_behind: bool
) -> None:
    streamed = HEAD_ALONE if is_behind else reply
    with answering(streamed, unstreamed=reply) as target, pytest.raises(ready.RefusalError) as caught:
        ready.wait_ready(ENGINES[engine], None, target, timeout_s=20.0)
    assert re.search(words, str(caught.value)), caught.value


MISTYPED = {
    "a path too much": (
        "/foo",
        True,
        "has the wrong path /foo: models are listed without it, .+--url {}$",
    ),
    "a word too little": ("/v1/completion", True, "the wrong path /v1/completion: .+--url {}$"),
    "of a gateway": ("/team", False, "; check the path /team of --url; if it serves chats alone, "),
    "none": ("", True, "Not Found; if it serves chats alone, pass --endpoint chat$"),
}


@pytest.mark.parametrize(("path", "lists", "words"), MISTYPED.values(), ids=MISTYPED)
def test_a_mistyped_path_is_named(path: str, words: str, *, lists: bool) -> None:
    pages = {"/v1/models": raw("200 OK", {"data": [{"id": "m"}]})} if lists else {}
    not_found = raw("404 Not Found", {"error": {"message": "File Not Found"}})
    with answering(not_found, pages=pages) as target, pytest.raises(ready.RefusalError) as caught:
        ready.wait_ready(ENGINES["openai"], None, target_at(f"{target.url}{path}", "m"), timeout_s=20.0)
    assert re.search(words.format(re.escape(target.url)), str(caught.value)), caught.value


def test_a_server_that_takes_a_request_and_is_silent_is_not_said_to_be_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Target(f"http://127.0.0.1:{silent.getsockname()[1]}", "m")
        # Both time limits end at once.
        said_late = "(no token has come yet|POST .*no complete answer within [0-9.]+ s)"
        with pytest.raises(EngineError, match=rf"is not ready after 0\.5 s: {said_late}$"):
            ready.wait_ready(ENGINES["openai"], None, target, timeout_s=0.5)


@pytest.mark.parametrize("name", ["triton", "mlserver", "OpenVINO Model Server"])
def test_a_server_of_another_protocol_is_named(name: str) -> None:
    pages = {"/v2": raw("200 OK", {"name": name, "version": "2.51.0"})}
    refusal = raw("404 Not Found", {"error": "Not Found"})
    with answering(refusal, pages=pages) as target, pytest.raises(ready.RefusalError) as caught:
        ready.wait_ready(ENGINES["openai-chat"], None, target, timeout_s=30.0)
    assert f"it is {name} with KServe's protocol" in str(caught.value)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"detail": "no worker yet, ask /readiness"}, "no worker yet, ask /readiness"),
        ("starting", "starting"),
        ("", "without a body"),
    ],
)
def test_an_unhealthy_server_is_quoted(said: object, words: str) -> None:
    pages = {"/health": raw("503 Service Unavailable", said)}
    with answering(READY["text"], pages=pages) as target, pytest.raises(EngineError) as caught:
        ready.wait_ready(ENGINES["vllm"], None, target, timeout_s=0.6)
    assert re.search(f"/health answers 503: .*{words}", str(caught.value))


SETTINGS = b"\0\0\x12\x04\0\0\0\0\0\0\x03\0\0\0\x64\0\x04\0\x01\0\0\0\x06\0\0\x20\0"
NO_REPLIES = {
    "HTTP/2 alone": (SETTINGS, "HTTP/2 alone"),
    "HTTP/2 without settings": (b"\0\0\0\x04\0\0\0\0\0", "HTTP/2 alone"),
    "the head alone": (HEAD_ALONE, "the head of a reply and closed"),
    "the head alone, with a length": (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", "and closed"),
    "another protocol": (b"SSH-2.0-x\r\n", "SSH-2.0-x"),
}


@pytest.mark.parametrize(("reply", "words"), NO_REPLIES.values(), ids=NO_REPLIES)
def test_what_is_no_reply_is_named(reply: bytes, words: str) -> None:
    with answering(reply) as target, pytest.raises(EngineError, match=words):
        ready.send(target, Call("POST", "/v1/completions", b"{}"), 5.0)


def test_a_wanted_certificate_is_named() -> None:
    error = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] tlsv13 alert certificate required")
    assert "wants a certificate of the client" in ready._why(error)


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (
            "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
            "max_completion_tokens",
        ),
        ({"message": "max_completion_tokens is required"}, "max_completion_tokens"),
    ],
)
def test_a_server_that_wants_the_newer_name_of_the_limit_gets_it(words: object, limit: str) -> None:
    where = ServerOptions(model="m")
    with answering(raw("400 Bad Request", {"error": words}), READY["text"]) as target:
        site = _attached(ENGINES["openai"], replace(where, url=Secret.words(target.url)), lambda text: None)
    asked = orjson.loads(site.engine.encode(Request(0, None, "a", 1, 7), site.target).body)
    assert asked[limit] == 7
    assert "max_tokens" not in asked
    assert any(limit in note for note in site.notes)


NAMES = {
    "one": ({"data": [{"id": "m"}]}, (), "m", False),
    "none": ({"data": []}, (), "default", True),
    "no list": (None, (), "default", True),
    "none, and one is given": ({"data": []}, ("given",), "given", False),
}


@pytest.mark.parametrize(("page", "given", "model", "is_said"), NAMES.values(), ids=NAMES)
def test_a_model_that_no_server_named_is_told(
    page: object, given: tuple[str, ...], model: str, *, is_said: bool
) -> None:
    """R33, R82: mlx-lm and Dynamo may list none."""
    pages, told = {} if page is None else {"/v1/models": raw("200 OK", page)}, list[str]()
    with answering(READY["text"], pages=pages) as target:
        where = ServerOptions(url=Secret.words(target.url), model=next(iter(given), None))
        site = _attached(ENGINES["openai"], where, told.append)
    assert site.target.model == model
    assert any(f"lists no model: requests ask for {model!r}; --model" in words for words in told) == is_said


def test_a_server_that_still_loads_is_waited_for_as_long_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cold model behind a swapper; meanwhile it is told what is waited for."""
    loads, told = raw("503 Service Unavailable", {"error": "Loading model"}), list[str]()
    monkeypatch.setattr(server_session, "_every", lambda period_s, limit_s, say: lambda _, state: say(state))
    with answering(loads) as target:
        where = ServerOptions(url=Secret.words(target.url), model="m", ready_s=0.7)
        with pytest.raises(EngineError) as caught:
            _attached(ENGINES["openai"], where, told.append)
    assert told[-1] == "a request for one token failed: Loading model"
    assert "is not ready after 0.7 s: a request for one token failed: Loading model" in str(caught.value)
    assert "--ready-s S waits longer" in str(caught.value)


ODD_PAGES = {
    "none": raw("404 Not Found"),
    "an empty object": raw("200 OK", {}),
    "an empty list": raw("200 OK", []),
    "a word": raw("200 OK", "smg"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("page", ODD_PAGES.values(), ids=ODD_PAGES)
def test_a_server_that_is_taken_for_another_is_one_line(engine: str, page: bytes) -> None:
    """R42: a router lists the model of the engine behind it and has none of its other pages."""
    pages = {"/v1/models": raw("200 OK", {"data": [{"id": "m", "max_model_len": 9}]})}
    pages |= dict.fromkeys(("/version", "/info", "/get_server_info", "/server_info", "/props"), page)
    with answering(pages=pages) as target, suppress(EngineError):
        assert ready.identified(ENGINES[engine], ready.getter(target), "").engine == engine


HEADERS = {
    "nothing": ((), ""),
    "a proxy": (("via: 1.1 varnish",), "via: 1.1 varnish"),
    "a proxy that names itself": (("server: nginx/1.22.1",), "server: nginx/1.22.1"),
    "LiteLLM": (("x-litellm-version: 1.2",), "x-litellm-version: 1.2"),
    "Envoy": (("x-envoy-upstream-service-time: 3",), "x-envoy-upstream-service-time"),
}


@pytest.mark.parametrize(("headers", "words"), HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("cookie", [(), ("set-cookie: route=7",)])
def test_what_stands_between_is_said(headers: Sequence[str], words: str, cookie: Sequence[str]) -> None:
    with answering(pages={"/v1/models": raw("200 OK", {"data": []}, *headers, *cookie)}) as target:
        told = ready.passed_through(target, of_sessions=True)
        alone = ready.passed_through(target, of_sessions=False)
    assert len(told) == bool(headers) + bool(cookie)
    assert words in " ".join(told)
    assert any("cookie" in each for each in told) == bool(cookie)
    assert alone == told[: bool(headers)]


WORKERS = {
    "two": ({"workers": [{"url": "http://a:1"}, {"url": "http://a:2"}], "total": 2}, "router with 2 workers"),
    "one": (
        {"workers": [{"url": "http://a:1", "worker_type": "regular"}], "total": 1},
        "router with 1 worker",
    ),
    "another page": ({"workers": 4}, ""),
    "a page of words": ("workers", ""),
    "none": (None, ""),
}


@pytest.mark.parametrize(("page", "words"), WORKERS.values(), ids=WORKERS)
def test_a_router_is_known_by_the_workers_that_it_lists(page: object, words: str) -> None:
    """R43: sglang-router 0.3.2 says of itself only that it is "local"."""
    pages = {"/v1/models": raw("200 OK", {"data": [{"id": "unknown", "owned_by": "local"}]})}
    pages |= {} if page is None else {"/workers": raw("200 OK", page)}
    with answering(pages=pages) as target:
        told = ready.passed_through(target, of_sessions=False)
    assert len(told) == bool(words)
    assert words in " ".join(told)


@pytest.mark.parametrize(
    "page", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n[", raw("500 No", "workers")]
)
def test_a_proxy_is_named_whatever_becomes_of_the_page_of_workers(page: bytes) -> None:
    pages = {"/v1/models": raw("200 OK", {"data": []}, "via: 1.1 varnish"), "/workers": page}
    with answering(pages=pages) as target:
        (told,) = ready.passed_through(target, of_sessions=False)
    assert "via: 1.1 varnish" in told


PAGES = {
    "a router's": (
        raw("200 OK", "# TYPE dynamo_frontend_inflight gauge\n# TYPE process_x gauge\n"),
        "dynamo*, process*",
    ),
    "another's": (raw("200 OK", "# HELP x\n# TYPE bentoml_service_requests counter\n"), "bentoml*"),
    "one with colons": (raw("200 OK", "# TYPE smg:requests counter\n"), "smg*"),
    "a web page": (raw("200 OK", "<html>"), ""),
    "none": (raw("404 Not Found", "# TYPE a gauge\n"), ""),
}


@pytest.mark.parametrize(("page", "words"), PAGES.values(), ids=PAGES)
def test_metrics_that_nobody_here_reads_are_named(page: bytes, words: str) -> None:
    with answering(pages={"/metrics": page}) as target:
        rows = list[Row]()
        watch.scrape(ENGINES["openai"], target, rows.extend, threading.Event())
    (row,) = rows
    told = f"Burstline reads no metrics of: {ENGINES['openai'].title}"
    assert row.note == (f"{told}, whose /metrics has {words}" if words else told)


CALL = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}]}
READY = {
    "text": said.stream(said.completion_event("a"), said.DONE),
    "a tool's call alone": said.stream(CALL, said.DONE),
    "text of another name": said.stream({"choices": [{"delta": {"novel": "a"}}]}, said.DONE),
    "a heartbeat first": said.stream({"type": "ping"}, said.completion_event("a"), said.DONE),
    "early hints": b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    + said.stream(said.completion_event("a"), said.DONE),
    "two interim replies": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n"
    + said.stream(said.completion_event("a"), said.DONE),
    "created": said.stream(said.completion_event("a"), said.DONE).replace(b" 200 ", b" 201 ", 1),
    "a token without text": said.stream(said.completion_event("", "length"), said.usage_event(1), said.DONE),
    "busy at first": raw("503 Service Unavailable", {"detail": "Loading model"}),
}


@pytest.mark.parametrize("name", READY)
def test_a_server_that_generates_is_ready_however_it_says_so(name: str) -> None:
    later = (READY["text"],) if name == "busy at first" else ()
    with answering(READY[name], *later) as target:
        ready.wait_ready(ENGINES["openai"], None, target, timeout_s=20.0)


def test_the_cause_is_not_replaced_by_an_attempt_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last attempt would have had a tenth of a second."""
    left_s: list[float] = []

    def fails(target: Target, call: Call, timeout_s: float) -> HttpReply:
        left_s.append(timeout_s)
        raise EngineError("no memory" if timeout_s > 0.5 else "no complete answer within 0.1 s")

    monkeypatch.setattr(ready, "send", fails)
    monkeypatch.setattr(ready, "POLL_S", 0.05)
    with pytest.raises(EngineError, match="no memory"):
        ready.wait_ready(ENGINES["openai"], None, Target("http://127.0.0.1:1", "m"), timeout_s=1.6)
    assert left_s
    assert min(left_s) > 0.5


@pytest.mark.parametrize(
    ("counts", "grown"), [((3, 5, 9), 4.0), ((100, 3, 105, 7, 110), None), ((100, 0, 4), None)]
)
def test_a_counter_that_falls_is_of_more_than_one_life(counts: Sequence[float], grown: float | None) -> None:
    rows = [Row((k - 1) * 10**9, "engine", "generation_tokens", n) for k, n in enumerate(counts)]
    watched = Telemetry.of(telemetry_table(rows)).over(len(counts) - 2.0)
    figure, change = (f("engine", "generation_tokens", "tok") for f in (watched.grown, watched.change))
    assert not isinstance(change, Absent), "a gauge may fall"
    if grown is None:
        assert isinstance(figure, Absent)
        assert "several" in figure.reason
    else:
        assert not isinstance(figure, Absent)
        assert figure.point == grown


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_that_was_asked_for_is_what_is_printed(flag: str) -> None:
    ended = SimpleNamespace(alive=lambda: False, launch=Launch(("vllm", flag)), log=lambda: "usage: vllm\n")
    with pytest.raises(EngineError, match=r"^usage: vllm\n$"):
        ready.wait_ready(ENGINES["vllm"], ended, Target("http://127.0.0.1:9", ""))  # type: ignore[arg-type]
