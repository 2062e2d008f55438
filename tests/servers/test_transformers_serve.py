import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import orjson
import psutil
import pytest

from burstline.servers.engines import transformers_serve
from burstline.servers.engines.transformers_serve import TransformersServe
from burstline.servers.host import installation
from burstline.servers.host.installation import Installation
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import EngineError, HttpReply, Target
from burstline.workloads.request import Request, Sampling
from tests.servers.golden import GOLDEN, golden_reply

ENGINE = TransformersServe()
TARGET = Target("http://h:1", "models/tiny")
ALL = {
    "transformers": "5.23.0",
    "accelerate": "1",
    "fastapi": "1",
    "openai": "3",
    "torch": "2",
    "uvicorn": "0",
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(*missing: str) -> None:
        there = {name: version for name, version in ALL.items() if name not in missing}
        found = Installation("py", there, Path("/bin")) if "transformers" in there else None
        monkeypatch.setattr(installation, "find_installation", lambda *_: found)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return pretend


def test_lengths_are_forced_by_a_whole_generation_config_and_nothing_foreign_is_sent() -> None:
    call = ENGINE.encode(Request(0, None, "banana", 3, 9), TARGET)
    fields = orjson.loads(call.body)
    assert orjson.loads(fields.pop("generation_config")) == {
        "max_new_tokens": 9,
        "do_sample": False,
        "eos_token_id": -1,
    }
    assert fields == {"model": "models/tiny", "prompt": "banana", "stream": True}


def test_sampling_and_a_free_end_are_said_in_the_same_config() -> None:
    warm = Request(0, None, "banana", 3, 9, ignore_eos=False, sampling=Sampling(0.5, 0.9, 3))
    fields = orjson.loads(ENGINE.encode(warm, TARGET).body)
    config = orjson.loads(fields["generation_config"])
    assert config == {"max_new_tokens": 9, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    assert fields["seed"] == 3


def test_token_ids_are_refused_before_anything_is_sent() -> None:
    with pytest.raises(EngineError, match="accepts only text"):
        ENGINE.encode(Request(0, (1, 2), None, 2, 9), TARGET)


def test_only_the_usage_of_a_recorded_stream_counts_tokens() -> None:
    reply = ENGINE.decode(golden_reply("transformers/completions_stream.http"))
    assert {event.n_tok for event in reply.events} == {None}
    assert (reply.n_prompt_tok, reply.n_output_usage, reply.finish_reason) == (9, 12, "length")
    assert reply.terminated


def test_it_starts_with_continuous_batching_and_is_asked_for_the_very_model_it_was_given(
    install: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    monkeypatch.setattr(transformers_serve, "GPUS", ())
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: SimpleNamespace(total=100 << 30, available=40 << 30)
    )
    monkeypatch.setattr(transformers_serve, "memory_limit", lambda: None)
    launch = ENGINE.launch(LaunchOptions(str(tmp_path), "127.0.0.1", 8001, "m", tmp_path))
    assert launch.argv == (
        *("py", "/bin/transformers", "serve", str(tmp_path), "--host", "127.0.0.1", "--port", "8001"),
        *("--continuous-batching", "--cb-max-memory-percent", "0.200"),
    )
    assert (launch.served_name, launch.version, launch.env) == (
        str(tmp_path),
        "5.23.0",
        {"HF_HUB_OFFLINE": "1"},
    )
    assert "at most half of this machine's free memory (20% of all)" in launch.notes[0]
    monkeypatch.setattr(transformers_serve, "GPUS", ("/",))
    on_gpu = ENGINE.launch(LaunchOptions(str(tmp_path), "127.0.0.1", 8001, "m", tmp_path))
    assert "--cb-max-memory-percent" not in on_gpu.argv
    own = ("--no-continuous-batching", "--cb-num-blocks", "64")
    chosen = ENGINE.launch(LaunchOptions("org/m", "127.0.0.1", 8001, "m", tmp_path, extra_args=own))
    assert "--continuous-batching" not in chosen.argv
    assert (chosen.notes, chosen.env) == ((), {})


@pytest.mark.parametrize(
    ("missing", "words"),
    [("transformers", "is not installed for"), ("accelerate", "needs accelerate in")],
)
def test_what_is_missing_is_named_with_how_to_get_it(
    missing: str, words: str, install: Callable[..., None], tmp_path: Path
) -> None:
    install(missing)
    with pytest.raises(EngineError, match=rf"{words} .*pip install 'transformers\[serving\]' accelerate"):
        ENGINE.launch(LaunchOptions("m", "127.0.0.1", 1, "m", tmp_path, sys.executable))


def test_it_tells_nothing_of_its_model_or_its_load() -> None:
    identity = asdict(ENGINE.identify(lambda path: HttpReply(500, {}, b""), ""))
    assert {value for name, value in identity.items() if name not in ("engine", "raw")} == {None}
    assert set(asdict(ENGINE.gauges("")).values()) == {None}


def test_a_log_without_an_exception_has_no_root_cause() -> None:
    assert ENGINE.root_cause((GOLDEN / "transformers" / "start.log").read_text()) is None
    log = "Traceback\nValueError: first\nOSError: Error no file named model.safetensors found\n"
    assert ENGINE.root_cause(log) == "OSError: Error no file named model.safetensors found"
