"""Real engines on a CPU: each started by its adapter under the keeper, asked, identified, stopped.

An engine whose environment variable names no installation is skipped; .ci/run has all of them.
"""

import json
import os
import subprocess
import sys
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import pytest

from burstline.loadgen.record.rundir import Run, open_run
from burstline.models.model_folder import make_model
from burstline.servers.engines import llamacpp, sglang, vllm
from burstline.servers.host import process
from burstline.servers.host.ready import getter, wait_ready
from burstline.servers.identity import Identity
from burstline.servers.launch import Launch, LaunchOptions
from burstline.servers.messages import HttpReply, Reply, Target
from burstline.servers.registry import ENGINES, engine_at
from burstline.workloads.request import Request
from tests import verdicts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MAX_LEN, SLOTS, STEP_TOK, VOCAB = 1024, 16, 512, 8192
N_PROMPTS, N_GREEDY = 20, 8
N_BURST = 200


@dataclass(frozen=True)
class Installed:
    """How one engine gets the settings that all have, and where a reply of its own has token ids."""

    variable: str
    args: tuple[str, ...]
    key_of_ids: str
    extra_fields: dict[str, object]


ENGINES_HERE = {
    "vllm": Installed(
        vllm.PYTHON_VARIABLE,
        (
            *("--dtype", "float32", "--max-model-len", str(MAX_LEN), "--max-num-seqs", str(SLOTS)),
            *("--max-num-batched-tokens", str(STEP_TOK), "--no-enable-prefix-caching", "--enforce-eager"),
        ),
        "token_ids",
        {"return_token_ids": True, "stream_options": None},
    ),
    "sglang": Installed(
        sglang.PYTHON_VARIABLE,
        (
            *("--dtype", "float32", "--context-length", str(MAX_LEN), "--max-running-requests", str(SLOTS)),
            *("--chunked-prefill-size", str(STEP_TOK), "--disable-radix-cache"),
        ),
        "output_ids",
        {},
    ),
    "llamacpp": Installed(
        llamacpp.SERVER_VARIABLE,
        (
            *("-np", str(SLOTS), "-c", str(SLOTS * MAX_LEN), "-b", str(STEP_TOK)),
            *("-ctk", "f32", "-ctv", "f32"),
        ),
        "tokens",
        {},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return make_model(folder, "tiny", formats=("safetensors", "gguf"), dtype="float32")


@dataclass
class Lived:
    """What one life of an engine showed."""

    launch: Launch
    identity: Identity
    recognised: str | None
    reply: Reply
    counted: float | None
    beyond: Reply
    tokens: list[list[int]]
    burst: Run
    left: list[psutil.Process]
    ready_s: float


def ask(target: Target, path: str, body: bytes, headers: dict[str, str]) -> HttpReply:
    reply = httpx.post(target.url + path, content=body, headers=headers, timeout=120)
    return HttpReply(reply.status_code, dict(reply.headers), reply.content)


def answered(name: str, target: Target, request: Request, **fields: object) -> HttpReply:
    call = ENGINES[name].encode(request, target)
    body = json.dumps(json.loads(call.body) | fields).encode()
    return ask(target, call.path, body, dict(call.headers))


def ids_in(raw: HttpReply, key: str) -> list[int]:
    """The generated ids of a whole reply, under the engine's own key.

    Not of a stream: llama.cpp sends no event for a token that leaves a character incomplete.
    """
    answer = json.loads(raw.body)
    return list((answer.get("choices") or [answer])[0][key])


def prompt(k: int) -> Request:
    """64 ids; each prompt has others."""
    ids = array("I", ((3 + (k * 64 + i) * 2654435761) % (VOCAB - 3) + 3 for i in range(64)))
    return Request(k, ids, None, 64, N_GREEDY)


def options(name: str, model: Path, folder: Path) -> LaunchOptions:
    extra = ENGINES_HERE[name].args
    return LaunchOptions(str(model), "127.0.0.1", process.free_port(), "tiny", folder, extra_args=extra)


@pytest.fixture(scope="module")
def lives() -> dict[str, Lived]:
    return {}


@pytest.fixture(params=ENGINES_HERE)
def lived(
    request: pytest.FixtureRequest,
    lives: dict[str, Lived],
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Lived]:
    """Each engine lives once, for all of the tests here."""
    name = request.param
    if ENGINES_HERE[name].variable not in os.environ:
        pytest.skip(f"{ENGINES_HERE[name].variable} names no {ENGINES[name].title}")
    if name not in lives:
        lives[name] = live(name, model, tmp_path_factory.mktemp(name))
    return name, lives[name]


def live(name: str, model: Path, folder: Path) -> Lived:
    engine, here = ENGINES[name], ENGINES_HERE[name]
    asked = options(name, model, folder)
    launch = engine.launch(asked)
    target = Target(f"http://127.0.0.1:{asked.port}", "tiny")
    with process.start(launch, folder / "server.log") as server:
        ready = wait_ready(engine, server, target, timeout_s=300)
        family = psutil.Process(server.keeper_pid).children(recursive=True)
        get = getter(target)
        identity = engine.identify(get, server.log())
        identity = identity.completed_by(launch.fixed) if launch.fixed else identity
        before = engine.gauges(get("/metrics").body.decode()).generation_tokens or 0
        long = Request(0, array("I", range(100, 612)), None, 512, 32)
        reply = engine.decode(answered(name, target, long))
        after = engine.gauges(get("/metrics").body.decode()).generation_tokens
        beyond = Request(0, array("I", [7] * (MAX_LEN + 16)), None, MAX_LEN + 16, 8)
        refused = engine.decode(answered(name, target, beyond))
        tokens = [
            ids_in(answered(name, target, prompt(k), stream=False, **here.extra_fields), here.key_of_ids)
            for k in range(N_PROMPTS)
        ]
        recognised = engine_at(get)
        burst = fired_at(target.url, folder)
        alive = server.alive()
    process.require_free_port("127.0.0.1", asked.port)
    assert alive, "the burst ended the server"
    left = [member for member in family if member.is_running()]
    counted = None if after is None else after - before
    return Lived(launch, identity, recognised, reply, counted, refused, tokens, burst, left, ready.ready_s)


def fired_at(url: str, folder: Path) -> Run:
    """A burst at a server that is told by its URL alone: no engine, no model, no tokenizer."""
    load = ("--requests", str(N_BURST), "--prompt-tokens", "32", "--output-tokens", "8")
    argv = [
        sys.executable,
        "-m",
        "burstline",
        "run",
        "-q",
        "--url",
        url,
        *load,
        "--out",
        str(folder / "runs"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert verdicts.done(done.returncode, folder / "runs"), done.stderr
    (path,) = (folder / "runs").iterdir()
    return open_run(path)


def test_a_burst_at_a_url_alone_gets_every_reply_whole_and_does_not_hurt_the_server(
    lived: tuple[str, Lived],
) -> None:
    name, seen = lived
    records = seen.burst.records
    assert seen.burst.manifest.engine == name
    assert list(records["outcome"]) == ["ok"] * N_BURST
    assert set(records["prompt_tok"]) == {32}
    assert set(records["output_tok"]) == {8}
    assert seen.burst.summary.conservation.output_residual.point == 0


def test_an_engine_answers_with_exactly_the_tokens_asked_for(lived: tuple[str, Lived]) -> None:
    name, seen = lived
    reply = seen.reply
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.error) == (512, 32, None)
    assert (reply.finish_reason, reply.terminated) == ("length", True)
    assert sum(event.n_tok or 0 for event in reply.events) == 32
    assert seen.counted in (None, 32)
    print(f"{name}: ready after {seen.ready_s:.1f} s")


def test_an_engine_is_recognised_and_says_what_it_serves_with(lived: tuple[str, Lived]) -> None:
    name, seen = lived
    identity = seen.identity
    assert seen.recognised == name
    assert (identity.dtype, identity.kv_cache_dtype) == ("float32", "float32")
    assert (identity.max_model_len, identity.max_num_seqs, identity.max_num_batched_tokens) == (
        MAX_LEN,
        SLOTS,
        STEP_TOK,
    )
    assert (identity.prefix_cache, identity.tensor_parallel_size) == (False, 1)
    assert identity.version
    assert identity.kv_tok is not None
    assert identity.kv_tok >= SLOTS * MAX_LEN


def test_a_prompt_beyond_the_limit_is_an_error_in_the_servers_words(lived: tuple[str, Lived]) -> None:
    _, seen = lived
    assert str(MAX_LEN) in (seen.beyond.error or "")
    assert not seen.beyond.n_output_usage


def test_a_stopped_engine_leaves_nothing_running(lived: tuple[str, Lived]) -> None:
    _, seen = lived
    assert seen.left == []


def test_engines_that_clock_their_requests_split_the_time_to_the_first_token(
    lived: tuple[str, Lived],
) -> None:
    name, seen = lived
    times = seen.reply.times
    if name == "vllm":
        assert times is None
        return
    assert times is not None
    assert times.prefill_s is not None
    assert 0 < times.prefill_s < 60
    if name == "sglang":
        assert times.queue_s is not None
        assert times.first_token_s is not None
        assert 0 <= times.queue_s + times.prefill_s <= times.first_token_s


def test_engines_generate_the_same_tokens_from_the_same_weights(
    lives: dict[str, Lived], lived: tuple[str, Lived]
) -> None:
    """In float32 the order of sums is all that is left to differ. Engines that lived before are compared."""
    name, seen = lived
    assert [len(ids) for ids in seen.tokens] == [N_GREEDY] * N_PROMPTS
    assert len({tuple(ids) for ids in seen.tokens}) > N_PROMPTS // 2
    for other in (other for other in lives if other != name):
        equal = sum(a == b for a, b in zip(seen.tokens, lives[other].tokens, strict=True))
        print(f"{name} and {other}: {equal} of {N_PROMPTS} prompts give the same {N_GREEDY} tokens")
        assert equal >= N_PROMPTS - 1


def test_vllm_and_sglang_invent_weights_where_a_folder_has_none(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "empty", "tiny")
    for name in ("vllm", "sglang"):
        if ENGINES_HERE[name].variable in os.environ:
            launch = ENGINES[name].launch(replace(options(name, folder, tmp_path), extra_args=()))
            assert "--load-format" in launch.argv
            assert "holds no weights" in launch.notes[0]
