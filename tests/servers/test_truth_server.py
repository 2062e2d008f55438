import os
import resource
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from burstline.servers.engines.truth import Truth
from burstline.servers.host import ready
from burstline.servers.host.child import ChildLostError
from burstline.servers.messages import EngineError, HttpReply, Target
from burstline.servers.registry import ENGINES
from burstline.servers.replies import server_sent_events
from burstline.servers.truth import replies, rig
from burstline.servers.truth.router import take_call
from burstline.workloads.request import Request, WorkloadError
from tests.truth.queue import PrefixCache, Queue
from tests.truth.rig import TruthRig, truth_server
from tests.truth.router import ProductSetup, TruthSetup
from tests.truth.script import Script
from tests.truth.serve import ScriptedServer, Served

FAST = Script(ttft_s=0.004, gaps_s=(0.001,))
STREAM = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True}


def test_a_server_of_ours_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        truth = rig.TruthRig(f"http://127.0.0.1:{mute.getsockname()[1]}")
        with pytest.raises(
            ChildLostError, match=r"the known-truth server is lost: .*no complete answer within 0\.2 s"
        ):
            truth.log()
    silent = rig.truth_server("echo", "tests.servers.host.obedient")  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"did not start: .* did not answer within 0\.2 s"), silent:
        pass


def post(truth: TruthRig, body: dict, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    with httpx.Client(trust_env=False, verify=False, timeout=10) as client:
        return client.post(truth.url + path, json=body, headers=headers)


def raw(truth: TruthRig, *parts: bytes) -> socket.socket:
    where = urlsplit(truth.url)
    sock = socket.create_connection((where.hostname, where.port), timeout=10)
    for part in parts:
        sock.sendall(part)
    return sock


def request_bytes(body: dict, path: str = "/v1/completions") -> bytes:
    content = orjson.dumps(body)
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        path.encode(),
        len(content),
        content,
    )


def until(sock: socket.socket, end: bytes, count: int = 1) -> bytes:
    got = b""
    while got.count(end) < count:
        data = sock.recv(65536)
        if not data:
            raise AssertionError(f"closed after {got!r}")
        got += data
    return got


def stamps(content: bytes) -> list[int]:
    return [orjson.loads(data)["sent_ns"] for data in server_sent_events(content)[0] if data != b"[DONE]"]


def test_what_was_sent_is_what_the_log_says_to_the_nanosecond():
    with truth_server(FAST, thread=True) as truth:
        reply = post(truth, STREAM, **{"x-burstline-index": "41"})
        (row,) = truth.log()
    assert row.index == 41
    assert row.event_kind == ["headers", "token", "token", "token", "token", "usage", "done"]
    assert row.ns_of("headers") == int(reply.headers["x-burstline-sent-ns"])
    assert row.token_ns == stamps(reply.content)[:4]
    assert row.ns_of("usage") == stamps(reply.content)[4]
    assert row.ns_of("error") is None


def test_its_log_may_be_longer_than_what_is_read_of_foreign_servers(monkeypatch):
    monkeypatch.setattr(ready, "MAX_REPLY_BYTES", 100)
    with truth_server(FAST, thread=True) as truth:
        post(truth, STREAM)
        assert len(truth.log()) == 1


def test_events_are_due_at_absolute_times_from_the_arrival_and_never_sent_early():
    with truth_server(FAST, thread=True) as truth:
        post(truth, STREAM)
        (row,) = truth.log()
    ms = 1_000_000
    assert [due - row.arrival_ns for due in row.event_due_ns] == [0, 4 * ms, 5 * ms, 6 * ms, *[7 * ms] * 3]
    assert min(row.lateness_ns) >= 0
    assert row.first_byte_ns <= row.arrival_ns <= row.read_ns <= row.event_ns[0]
    assert row.ended == "done"


def test_arrivals_carry_the_kernels_stamp_and_a_slow_request_arrives_with_its_last_byte():
    first, rest = request_bytes(STREAM)[:20], request_bytes(STREAM)[20:]
    with truth_server(FAST, thread=True) as truth:
        with raw(truth, first) as sock:
            truth.metrics()  # a whole exchange in between: the server has seen the first part
            sock.sendall(rest)
            until(sock, b"0\r\n\r\n")
        (row,) = truth.log()
    assert row.kernel_stamps
    assert row.first_byte_ns < row.arrival_ns


def test_a_connection_serves_one_request_after_the_other_also_when_both_were_sent_at_once():
    with truth_server(FAST, thread=True) as truth:
        with raw(truth, request_bytes(STREAM) * 2) as sock:
            until(sock, b"0\r\n\r\n", count=2)
            sock.sendall(request_bytes(STREAM))
            until(sock, b"0\r\n\r\n")
        assert [row.ended for row in truth.log()] == ["done"] * 3


def test_scripts_are_used_in_the_order_of_arrival_and_a_request_may_bring_its_own():
    with truth_server([Script(ttft_s=0, n_tok=1), Script(ttft_s=0, n_tok=2)], thread=True) as truth:
        post(truth, STREAM)
        post(truth, STREAM, **{"x-burstline-script": '{"n_tok": 9}'})
        post(truth, STREAM)
        post(truth, STREAM)
        assert [sum(row.event_tok) for row in truth.log()] == [1, 9, 2, 2]
        truth.reset()
        assert truth.log() == ()
        post(truth, STREAM)
        assert [sum(row.event_tok) for row in truth.log()] == [1]


@pytest.mark.parametrize(
    ("native", "path", "body"),
    [
        (
            "tgi",
            "/generate_stream",
            {"inputs": "a b c", "parameters": {"max_new_tokens": 2, "details": True}},
        ),
        ("lightllm", "/generate_stream", {"inputs": [1, 2, 3], "parameters": {"max_new_tokens": 2}}),
        (
            "sglang",
            "/generate",
            {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}, "stream": True},
        ),
        (
            "openai",
            "/v1/chat/completions",
            {"messages": [{"content": "a b c"}], "max_tokens": 2, "stream": True},
        ),
    ],
)
def test_every_dialect_answers_on_its_own_path(native, path, body):
    with truth_server(FAST, setup=TruthSetup(native=native), thread=True) as truth:
        reply = post(truth, body, path)
        (row,) = truth.log()
    assert reply.status_code == 200
    assert len(stamps(reply.content)) >= 2
    assert (row.n_prompt_tok, sum(row.event_tok)) == (3, 2)


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v1/completions", b"{", 400),
        ("/v1/completions", b"[]", 400),
        ("/v1/completions", b'{"prompt": 3}', 400),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 0}', 400),
        ("/generate", b"{}", 404),
    ],
)
def test_a_wrong_request_is_refused_and_the_server_lives(path, content, status):
    with truth_server(FAST, thread=True) as truth, httpx.Client(trust_env=False) as client:
        assert client.post(truth.url + path, content=content).status_code == status
        assert client.post(truth.url + "/v1/completions", json=STREAM).status_code == 200
        assert (
            client.post(truth.url + "/v1/completions", headers={"x-burstline-script": "{"}).status_code == 400
        )


def test_what_is_not_http_is_told_so_and_dropped():
    with truth_server(FAST, thread=True) as truth, raw(truth, b"hello\r\n\r\n") as sock:
        assert until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 400")
        while sock.recv(100):
            pass


def test_an_early_close_is_a_truncated_reply():
    script = Script(ttft_s=0, gaps_s=(0.001,), fault="close", fault_after_tok=2)
    with truth_server(script, thread=True) as truth:
        with pytest.raises(httpx.RemoteProtocolError):
            post(truth, STREAM)
        (row,) = truth.log()
    assert (row.ended, sum(row.event_tok)) == ("close", 2)


def test_a_reset_is_a_reset():
    with truth_server(Script(ttft_s=0, fault="reset", fault_after_tok=-1), thread=True) as truth:
        with raw(truth, request_bytes(STREAM)) as sock, pytest.raises(ConnectionResetError):
            sock.recv(100)
        assert truth.log()[0].ended == "reset"


def test_half_closing_ends_only_the_servers_direction():
    with truth_server(Script(ttft_s=0, fault="half_close", fault_after_tok=4), thread=True) as truth:
        with raw(truth, request_bytes(STREAM)) as sock:
            while sock.recv(65536):
                pass
            sock.sendall(b"still open")
        assert truth.log()[0].ended == "half_close"


def test_a_stalled_reply_stays_open_until_the_client_leaves():
    with truth_server(Script(ttft_s=0, fault="stall", fault_after_tok=1), thread=True) as truth:
        with raw(truth, request_bytes(STREAM)) as sock:
            until(sock, b"seq")
            assert truth.log()[0].ended is None
            assert truth.metrics()["truth:requests_running"] == 1
        while truth.log()[0].ended is None:
            pass
        assert truth.log()[0].ended == "client_closed"
        assert truth.metrics()["truth:requests_running"] == 0


def test_a_crowded_schedule_does_not_keep_newcomers_waiting():
    # The next event is always nearer than it is worth sleeping for, for a second.
    body = STREAM | {"max_tokens": 50_000}
    with (
        truth_server(Script(ttft_s=0, gaps_s=(0.00002,)), thread=True) as truth,
        raw(truth, request_bytes(body)),
    ):
        assert truth.metrics()["truth:requests_running"] == 1


def test_requests_that_outlive_a_reset_stay_in_the_log():
    stalled_then_fast = [Script(ttft_s=0, fault="stall"), FAST]
    with truth_server(stalled_then_fast, thread=True) as truth, raw(truth, request_bytes(STREAM)) as sock:
        until(sock, b"200 OK")
        post(truth, STREAM)
        truth.reset()
        with raw(truth, request_bytes(STREAM)) as other:
            until(other, b"200 OK")
            assert [(row.number, row.ended) for row in truth.log()] == [(0, None), (2, None)]


def test_a_reply_without_chunks_ends_with_the_connection():
    with truth_server(Script(ttft_s=0, chunked=False), thread=True) as truth:
        reply = post(truth, STREAM)
    assert reply.headers["connection"] == "close"
    assert len(stamps(reply.content)) == 5


@pytest.mark.parametrize("script", [{"drip_bytes": 9}, {"split_at": [3, -2]}], ids=["drip", "split"])
def test_cut_writes_arrive_as_the_same_events(script):
    script = orjson.dumps(script | {"split_gap_s": 0.00002}).decode()
    with truth_server(FAST, thread=True) as truth:
        reply = post(truth, STREAM, **{"x-burstline-script": script})
        (row,) = truth.log()
    events = [orjson.loads(data) for data in server_sent_events(reply.content)[0][:-1]]
    assert [event["seq"] for event in events] == [0, 1, 2, 3, 4]
    # The stamp is the first part's, the log's instant the last part's.
    assert all(event["sent_ns"] <= ns for event, ns in zip(events, row.token_ns, strict=False))


def test_a_reader_that_does_not_read_gets_all_of_it_in_the_end():
    body = STREAM | {"max_tokens": 30_000}
    with (
        truth_server(Script(ttft_s=0, gaps_s=(0,)), thread=True) as truth,
        raw(truth, request_bytes(body)) as sock,
    ):
        while truth.metrics()["truth:generation_tokens_total"] < 30_000:
            pass
        assert until(sock, b"0\r\n\r\n").count(b'"seq"') == 30_001


def test_departures_follow_the_queue_at_the_logged_arrivals():
    queue = Queue(2, 0.004, 1.0, seed=5)
    with truth_server(setup=TruthSetup(queue=queue), thread=True) as truth:
        socks = [raw(truth, request_bytes(STREAM)) for _ in range(20)]
        for sock in socks:
            until(sock, b"0\r\n\r\n")
            sock.close()
        rows = truth.log()
    again = Queue(2, 0.004, 1.0, seed=5)
    for row in rows:
        assert (row.start_ns, row.departure_ns) == again.admit(row.arrival_ns)
        token_due_ns = [due for due, n_tok in zip(row.event_due_ns, row.event_tok, strict=True) if n_tok]
        assert token_due_ns[-1] == row.departure_ns
        assert max(gap := [b - a for a, b in pairwise(token_due_ns)]) - min(gap) <= 1
    assert any(row.start_ns > row.arrival_ns for row in rows)


def test_a_repeated_prompt_is_answered_faster_and_a_salted_one_is_not():
    prompt = list(range(64))
    salted = [1000, *prompt[1:]]
    script = Script(ttft_s=0.032, gaps_s=(0,))
    with truth_server(script, setup=TruthSetup(prefix_cache=True), thread=True) as truth:
        for ids in (prompt, salted, prompt):
            reply = post(truth, STREAM | {"prompt": ids})
        rows = truth.log()
        assert truth.metrics()["truth:prefix_cache_hit_tokens_total"] == 48
    assert [row.n_cached_tok for row in rows] == [0, 0, 48]
    due_ms = [(row.event_due_ns[1] - row.arrival_ns) / 1e6 for row in rows]
    assert due_ms == [32, 32, 8]
    assert b'"cached_tokens":48' in reply.content


def test_the_prefix_cache_counts_whole_blocks_from_the_front():
    cache = PrefixCache()
    assert cache.look_up(list(range(50))) == 0
    assert cache.look_up(list(range(50))) == 48
    assert cache.look_up([*range(20), *range(40)]) == 16
    assert cache.look_up([7, *range(1, 50)]) == 0
    assert cache.look_up(list(range(48))) == 32
    cache.reset()
    assert cache.look_up(list(range(50))) == 0
    assert cache.look_up("a " * 20) == 0
    assert cache.look_up("a " * 20) == 16


@pytest.mark.parametrize(
    ("native", "path", "body", "status", "says"),
    [
        ("openai", "/v1/completions", STREAM, 503, b'"error":{"message":"Model is overloaded'),
        ("tgi", "/generate_stream", {"inputs": "a"}, 200, b'"error_type":"overloaded"'),
        ("tgi", "/generate", {"inputs": "a"}, 503, b'"error_type":"overloaded"'),
    ],
)
def test_load_above_the_limit_is_shed_as_the_engine_sheds_it(native, path, body, status, says):
    stall = Script(ttft_s=0, fault="stall")
    with truth_server(stall, setup=TruthSetup(native=native, max_in_flight=1), thread=True) as truth:
        with raw(truth, request_bytes(STREAM)) as sock:
            until(sock, b"200 OK")
            refused = post(truth, body, path)
        assert refused.status_code == status
        assert says in refused.content
        assert truth.metrics()["truth:requests_refused_total"] == 1


def test_a_server_in_its_own_process_serves_logs_and_goes():
    setup = TruthSetup(
        native="tgi", queue=Queue(1, 0.001, 0.0), prefix_cache=True, max_in_flight=9, shed_status=429
    )
    with truth_server([FAST, FAST], setup=setup) as truth:
        post(truth, STREAM)
        (row,) = truth.log()
        os.kill(truth.pid, 0)
    assert isinstance(row, Served)
    assert row.departure_ns - row.start_ns == 1_000_000
    with pytest.raises(ProcessLookupError):
        os.kill(truth.pid, 0)


def test_the_products_server_serves_openai_alone_and_logs_the_same():
    product_script = replies.Script(ttft_s=0.004, gaps_s=(0.001,))
    with rig.truth_server(ProductSetup((product_script,))) as truth:
        assert post(truth, {"inputs": "a"}, "/generate_stream").status_code == 404
        assert post(truth, {"max_tokens": 4}).status_code == 400
        chat = {"messages": [{"content": "a b c"}], "max_tokens": 2, "stream": True}
        assert post(truth, chat, "/v1/chat/completions").content.count(b'"content":" tok"') == 2
        whole = post(truth, chat | {"stream": False}, "/v1/chat/completions").json()
        assert whole["choices"][0]["message"]["content"] == " tok tok"
        assert [(row.text, row.n_prompt_tok) for row in truth.log()[-2:]] == [("a b c", 3)] * 2
        truth.reset()
        assert httpx.get(truth.url + "/v1/models", trust_env=False).json()["data"][0]["id"] == "truth"
        assert post(truth, STREAM).content.count(b'"usage"') == 0, "none asked for"
        counted = STREAM | {"stream_options": {"include_usage": True}}
        reply = post(truth, counted, **{"x-burstline-index": "41"})
        *_, row = truth.log()
        assert truth.metrics()["truth:generation_tokens_total"] == 12
        truth.reset()
        assert truth.log() == ()
    assert row.event_kind == ["headers", *["token"] * 4, "usage", "done"]
    assert row.token_ns == stamps(reply.content)[:4]
    assert [due - row.arrival_ns for due in row.event_due_ns[:3]] == [0, 4_000_000, 5_000_000]
    assert (row.index, row.ended) == (41, "done")
    with pytest.raises(ProcessLookupError):
        os.kill(truth.pid, 0)


def test_the_products_server_refuses_cuts_holds_back_and_lets_wait_as_scripted():
    scripts = (
        replies.Script(ttft_s=0.004, gaps_s=(0.002,), events_per_write=3),
        replies.Script(status=503),
        replies.Script(ttft_s=0.0, gaps_s=(0.0,), cut_after_tok=2),
    )
    with rig.truth_server(ProductSetup(scripts, cycle=True, slots=1)) as truth:
        truth.reset()
        assert post(truth, STREAM).status_code == 200
        assert post(truth, STREAM).status_code == 503
        with pytest.raises(httpx.RemoteProtocolError):
            post(truth, STREAM)
        held, refused, cut = truth.log()
        assert [held.event_ns[i] - held.event_ns[1] for i in (2, 3)] == [0, 0], "one write for three events"
        assert held.event_due_ns[1] - held.arrival_ns == 8_000_000
        assert (refused.status, refused.token_ns) == (503, [])
        assert (cut.ended, len(cut.token_ns)) == ("close", 2)
        truth.reset()
        socks = [raw(truth, request_bytes(STREAM)) for _ in range(2)]
        for sock in socks:
            sock.recv(1)
            sock.close()
        first, second = truth.log()
    assert second.connection != first.connection
    assert second.body_hash == first.body_hash


def start(*arguments: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    argv = [sys.executable, "-m", "burstline.servers.truth", "--port", "0", *arguments]
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_the_command_ends_at_sigterm_and_writes_its_log(tmp_path):
    log = tmp_path / "truth.jsonl"
    with start("--log", str(log)) as process:
        post(TruthRig(process.stdout.readline().split()[-1], process.pid), STREAM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    assert len(log.read_bytes().splitlines()) == 1


def test_a_server_that_cannot_start_says_why():
    with pytest.raises(WorkloadError, match="above 0"), truth_server(setup=TruthSetup(queue=_impossible())):
        pass


def _impossible() -> Queue:
    queue = Queue(1, 1.0)
    queue.mean_s = -1.0
    return queue


@pytest.mark.parametrize("wrong", [{"native": "nobody"}, {"max_in_flight": 0}])
def test_an_impossible_house_is_refused(wrong):
    with pytest.raises(WorkloadError, match="expected"):
        TruthSetup(**wrong)


def test_a_port_in_use_is_an_error():
    first = ScriptedServer(TruthSetup())
    with pytest.raises(OSError, match="in use"):
        ScriptedServer(TruthSetup(), port=first.port)
    first.stop()
    first.run()


def test_a_request_is_taken_only_when_whole():
    whole = request_bytes({"prompt": "a"})
    for n in range(len(whole)):
        assert take_call(bytearray(whole[:n]), 1) is None
    inbox = bytearray(whole + b"POST")
    call = take_call(inbox, 5)
    assert (call.method, call.path, call.body, call.arrival_ns) == (
        "POST",
        "/v1/completions",
        b'{"prompt":"a"}',
        5,
    )
    assert inbox == b"POST"
    with pytest.raises(ValueError, match="Content-Length"):
        take_call(bytearray(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"), 0)


def test_the_adapter_asks_and_understands_the_server():
    engine = ENGINES["truth"]
    assert isinstance(engine, Truth)
    with truth_server(Script(ttft_s=0, gaps_s=(0,), n_tok=4, tok_per_event=(3,)), thread=True) as truth:
        target = Target(truth.url, "truth")

        def send(call) -> HttpReply:
            with httpx.Client(trust_env=False) as client:
                reply = client.request(
                    call.method, truth.url + call.path, content=call.body, headers=dict(call.headers)
                )
            return HttpReply(reply.status_code, dict(reply.headers), reply.content)

        ready = engine.decode(send(engine.ready_call(target)))
        reply = engine.decode(send(engine.encode(Request(5, (1, 2, 3), None, 3, 9), target)))
        identity = engine.identify(
            lambda path: HttpReply(200, {}, httpx.get(truth.url + path, trust_env=False).content), ""
        )
        gauges = engine.gauges(httpx.get(truth.url + engine.metrics_path, trust_env=False).text)
        rows = truth.log()
    assert rows[1].index == 5
    ttft_ns, e2e_ns = (sum(row.token_ns[k] - row.arrival_ns for row in rows) for k in (0, -1))
    assert gauges.latencies["ttft_count"] == gauges.latencies["e2e_le_+Inf"] == 2
    assert gauges.latencies["ttft_sum"] == pytest.approx(ttft_ns / 1e9)
    assert gauges.latencies["e2e_sum"] == pytest.approx(e2e_ns / 1e9)
    assert (ready.n_output_usage, ready.terminated) == (1, True)
    assert [event.n_tok for event in reply.events] == [3, 1, None]
    assert (reply.n_prompt_tok, reply.n_output_ids, reply.n_output_usage) == (3, 4, 4)
    assert (identity.engine, identity.model) == ("truth", "truth")
    assert (gauges.running, gauges.generation_tokens, gauges.waiting) == (0, 5, None)


def test_a_login_of_1024_open_files_is_enough_for_its_tests() -> None:
    """M6: the server in a thread has its clients in the same process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    try:
        with truth_server(Script(), thread=True):
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_launch_line_starts_this_server(tmp_path):
    from burstline.servers.launch import LaunchOptions

    options = LaunchOptions("unused", "127.0.0.1", 8123, "m", tmp_path, extra_args=("--max-model-len=99",))
    argv = Truth().launch(options).argv
    assert argv[1:] == (
        *("-P", "-m", "burstline.servers.truth", "--host", "127.0.0.1", "--port", "8123", "--model", "m"),
        "--max-model-len=99",
    )
    assert Truth().root_cause("fine\nOSError: [Errno 98] Address already in use\n").startswith("OSError")
    assert Truth().root_cause("fine") is None
