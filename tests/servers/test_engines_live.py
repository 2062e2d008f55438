"""Real engines on a CPU: each started by its adapter under the keeper, asked, identified.

An engine whose environment variable names no installation is skipped; .ci/run has all of them. That nothing
of an engine is left is checked where its life ends (tests/servers/lives.py).
"""

import json
import os
import subprocess
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from burstline.measure.record.rundir import Run, open_run
from burstline.models.model_folder import make_model
from burstline.servers.host.ready import getter
from burstline.servers.identity import Identity
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import HttpReply, Reply, Target
from burstline.servers.registry import ENGINES, engine_at
from burstline.workloads.request import Request
from tests import verdicts
from tests.servers.lives import VARIABLES, Life, Lives, of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCAB = 8192
N_PROMPTS, N_GREEDY = 20, 8
N_BURST = 200


@dataclass(frozen=True)
class Ids:
    """Where a reply of an engine's own has token ids, and what it must be asked for them."""

    key: str
    extra_fields: dict[str, object]


IDS = {
    "vllm": Ids("token_ids", {"return_token_ids": True, "stream_options": None}),
    "sglang": Ids("output_ids", {}),
    "llamacpp": Ids("tokens", {}),
}


@dataclass
class Lived:
    """What one life of an engine showed."""

    life: Life
    identity: Identity
    recognised: str | None
    reply: Reply
    counted: float | None
    beyond: Reply
    tokens: list[list[int]]
    burst: Run


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


@pytest.fixture(scope="module")
def seen_of() -> dict[str, Lived]:
    return {}


@pytest.fixture(params=[of(name) for name in IDS])
def lived(
    request: pytest.FixtureRequest,
    seen_of: dict[str, Lived],
    lives: Lives,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Lived]:
    """Each engine is asked once, for all of the tests here."""
    name = request.param
    if name not in seen_of:
        seen_of[name] = asked(lives(name), tmp_path_factory.mktemp(name))
    return name, seen_of[name]


def asked(life: Life, folder: Path) -> Lived:
    name, target, max_len = life.engine, life.target, life.setting.max_len
    engine, ids = ENGINES[name], IDS[name]
    assert max_len is not None
    get = getter(target)
    identity = engine.identify(get, life.server.log())
    identity = identity.completed_by(life.launch.fixed) if life.launch.fixed else identity
    before = engine.gauges(get("/metrics").body.decode()).generation_tokens or 0
    long = Request(0, array("I", range(100, 612)), None, 512, 32)
    reply = engine.decode(answered(name, target, long))
    after = engine.gauges(get("/metrics").body.decode()).generation_tokens
    beyond = Request(0, array("I", [7] * (max_len + 16)), None, max_len + 16, 8)
    refused = engine.decode(answered(name, target, beyond))
    tokens = [
        ids_in(answered(name, target, prompt(k), stream=False, **ids.extra_fields), ids.key)
        for k in range(N_PROMPTS)
    ]
    recognised = engine_at(get)
    burst = fired_at(target.url, folder)
    assert life.server.alive(), "the burst ended the server"
    counted = None if after is None else after - before
    return Lived(life, identity, recognised, reply, counted, refused, tokens, burst)


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
    print(f"{name}: ready after {seen.life.ready_s:.1f} s")


def test_an_engine_is_recognised_and_says_what_it_serves_with(lived: tuple[str, Lived]) -> None:
    name, seen = lived
    identity, asked_for = seen.identity, seen.life.setting
    assert asked_for.max_len is not None
    assert asked_for.slots is not None
    assert seen.recognised == name
    assert (identity.dtype, identity.kv_cache_dtype) == ("float32", "float32")
    assert (identity.max_model_len, identity.max_num_seqs, identity.max_num_batched_tokens) == (
        asked_for.max_len,
        asked_for.slots,
        asked_for.step_tok,
    )
    assert (identity.prefix_cache, identity.tensor_parallel_size) == (asked_for.prefix_cache, 1)
    assert identity.version
    assert identity.kv_tok is not None
    assert identity.kv_tok >= asked_for.slots * asked_for.max_len


def test_a_prompt_beyond_the_limit_is_an_error_in_the_servers_words(lived: tuple[str, Lived]) -> None:
    _, seen = lived
    assert str(seen.life.setting.max_len) in (seen.beyond.error or "")
    assert not seen.beyond.n_output_usage


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
    lived: tuple[str, Lived], lives: Lives
) -> None:
    """In float32 the order of sums is all that is left to differ. Engines that lived before are compared.

    They may have lived in another worker: each leaves its tokens in a folder, and the last two to do so meet.
    """
    name, seen = lived
    assert [len(ids) for ids in seen.tokens] == [N_GREEDY] * N_PROMPTS
    assert len({tuple(ids) for ids in seen.tokens}) > N_PROMPTS // 2
    folder = lives.of_all_workers / "tokens"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.part").write_text(json.dumps(seen.tokens))
    (folder / f"{name}.part").rename(folder / f"{name}.json")
    for other in sorted({path.stem for path in folder.glob("*.json")} - {name}):
        others = json.loads((folder / f"{other}.json").read_text())
        equal = sum(a == b for a, b in zip(seen.tokens, others, strict=True))
        print(f"{name} and {other}: {equal} of {N_PROMPTS} prompts give the same {N_GREEDY} tokens")
        assert equal >= N_PROMPTS - 1


def test_vllm_and_sglang_invent_weights_where_a_folder_has_none(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "empty", "tiny")
    for name in ("vllm", "sglang"):
        if VARIABLES[name] in os.environ:
            launch = ENGINES[name].launch(LaunchOptions(str(folder), "127.0.0.1", 1, "tiny", tmp_path))
            assert "--load-format" in launch.argv
            assert "holds no weights" in launch.notes[0]
