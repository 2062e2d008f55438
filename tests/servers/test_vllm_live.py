"""A real vLLM, started by the adapter under the keeper, asked, identified, stopped."""

import os
from array import array
from pathlib import Path

import httpx
import psutil
import pytest

from servers.engine import EngineError, HttpReply, Launch, LaunchOptions, Target
from servers.engines.vllm import PYTHON_VARIABLE, Vllm
from servers.host import process
from servers.host.ready import getter, wait_ready
from tests.servers.tiny_model import MAX_LEN, make_tiny_model
from workloads.request import Request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no vLLM"),
]
ENGINE = Vllm()


def launch(tmp_path: Path, port: int, *extra_args: str) -> Launch:
    model = make_tiny_model(tmp_path / "model")
    options = LaunchOptions(
        str(model), "127.0.0.1", port, "tiny", tmp_path, None, ("--enforce-eager", *extra_args)
    )
    return ENGINE.launch(options)


def test_a_real_vllm_starts_answers_exactly_and_leaves_nothing(tmp_path: Path) -> None:
    port = process.free_port()
    target = Target(f"http://127.0.0.1:{port}", "tiny")
    started = launch(tmp_path, port)
    assert "holds no weights" in started.notes[0]
    with process.start(started, tmp_path / "server.log") as server:
        wait_ready(ENGINE, server, target, timeout_s=300)
        family = psutil.Process(server.keeper_pid).children(recursive=True)
        reply = ENGINE.decode(ask(target, Request(0, array("I", range(100, 612)), None, 512, 32)))
        identity = ENGINE.identify(getter(target), server.log())
        gauges = ENGINE.gauges(getter(target)("/metrics").body.decode())
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.error) == (512, 32, None)
    assert (reply.finish_reason, reply.terminated) == ("length", True)
    assert sum(event.n_tok or 0 for event in reply.events) == 32
    assert (identity.max_model_len, identity.tensor_parallel, identity.prefix_caching) == (MAX_LEN, 1, True)
    assert identity.version is not None
    assert identity.dtype == "bfloat16"
    assert identity.kv_tok is not None
    assert identity.kv_tok > MAX_LEN
    assert (gauges.running, gauges.generation_tokens) == (0, 33)
    assert len(family) >= 2
    assert not any(member.is_running() for member in family)
    process.require_free_port("127.0.0.1", port)


def test_a_real_vllm_that_finds_no_weights_fails_with_its_root_cause(tmp_path: Path) -> None:
    port = process.free_port()
    started = launch(tmp_path, port, "--load-format=auto")
    target = Target(f"http://127.0.0.1:{port}", "tiny")
    failure = pytest.raises(EngineError, match=r"exit code 1 .*Cannot find any model weights")
    with process.start(started, tmp_path / "server.log") as server, failure:
        wait_ready(ENGINE, server, target, timeout_s=300)


def ask(target: Target, request: Request) -> HttpReply:
    call = ENGINE.encode(request, target)
    reply = httpx.post(target.url + call.path, content=call.body, headers=dict(call.headers), timeout=120)
    return HttpReply(reply.status_code, dict(reply.headers), reply.content)
