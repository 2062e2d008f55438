"""One life of each engine: it starts when a test first asks for it, and ends with the session.

All tests that only send requests share it. Those that start, stop or break an engine, or need settings that
no other has, start their own. The ids of tests at a life name it (`of`), so that one worker of xdist runs
them all.

An idle life costs its memory and next to no CPU.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from burstline.models.model_folder import make_model
from burstline.servers.engines import llamacpp, sglang, transformers_serve, vllm
from burstline.servers.host import process
from burstline.servers.host.ready import wait_ready
from burstline.servers.launch import Launch, LaunchOptions
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES

VARIABLES: Final = {
    "vllm": vllm.PYTHON_VARIABLE,
    "sglang": sglang.PYTHON_VARIABLE,
    "llamacpp": llamacpp.SERVER_VARIABLE,
    "transformers": transformers_serve.PYTHON_VARIABLE,
}
"""Where an engine is installed; the embedded one is everywhere."""
RANK: Final = 8
ADAPTERS: Final = ("one", "two")
TEMPLATE: Final = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True)
class Setting:
    """How one life is started: the engine, its words, and those of them that tests ask about."""

    engine: str
    max_len: int | None = None
    slots: int | None = None
    step_tok: int | None = None
    prefix_cache: bool = True
    args: tuple[str, ...] = ()
    has_adapters: bool = False
    has_profiler: bool = False


SETTINGS: Final[Mapping[str, Setting]] = {
    "vllm": Setting(
        "vllm", 2048, 128, 2048,
        args=(
            *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "128"),
            *("--max-num-batched-tokens", "2048", "--enforce-eager", "--enable-prefix-caching"),
            *("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", str(len(ADAPTERS))),
        ),
        has_adapters=True,
        has_profiler=True,
    ),
    "vllm-small-cache": Setting(
        "vllm",
        args=(
            *("--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "65"),
            *("--max-model-len", "1024", "--max-num-batched-tokens", "512"),
        ),
    ),
    "sglang": Setting(
        "sglang", 2048, 128, 2048,
        # Its scheduler would else spin on a core while nothing is asked. It sizes its cache from the memory
        # that is free when it starts, less what others take meanwhile: the cap, not the machine, decides.
        args=(
            *("--dtype", "float32", "--context-length", "2048", "--max-running-requests", "128"),
            *("--chunked-prefill-size", "2048", "--sleep-on-idle"),
            *("--mem-fraction-static", "0.5", "--max-total-tokens", str(128 * 2048)),
        ),
    ),
    "llamacpp": Setting(
        "llamacpp", 1024, 16, 512, prefix_cache=False,
        args=("-np", "16", "-c", str(16 * 1024), "-b", "512", "-ctk", "f32", "-ctv", "f32"),
    ),
    # By default it takes nearly all memory of the machine for its KV cache.
    "transformers": Setting(
        "transformers", args=("--device", "cpu", "--cb-num-blocks", "64", "--cb-block-size", "32")
    ),
    "reference": Setting("reference"),
    "reference-small-cache": Setting(
        "reference", args=("--kv-tokens", "2048", "--max-num-batched-tokens", "512")
    ),
}  # fmt: skip
"""Each life by its name. The small caches hold 2,048 tokens."""


@dataclass(frozen=True)
class Life:
    """A server that runs. `model` is its folder, `traces` where its profiler writes."""

    name: str
    setting: Setting
    target: Target
    model: Path
    log: Path
    traces: Path
    launch: Launch
    server: process.Server
    ready_s: float

    @property
    def engine(self) -> str:
        return self.setting.engine

    @property
    def url(self) -> str:
        return self.target.url


def of(name: str, *values: object, marks: Collection[pytest.MarkDecorator] = ()) -> Any:
    """The parameter `name`, and further ones, of a test at this life."""
    return pytest.param(name, *values, id=f"@{name}", marks=marks)


def engine_in(nodeid: str) -> str | None:
    """The engine whose life a test is at, by its id; None at no life."""
    found = re.search(r"[\[-]@([a-z]+)", nodeid)
    return found[1] if found and found[1] in SETTINGS else None


@dataclass
class Lives:
    """Called with a name, the life of that name."""

    folder: Path
    of_all_workers: Path
    """A folder that the workers of this session share."""
    ends: ExitStack
    _begun: dict[str, Life | Exception] = field(default_factory=dict)

    def __call__(self, name: str) -> Life:
        variable = VARIABLES.get(SETTINGS[name].engine)
        if variable is not None and variable not in os.environ:
            pytest.skip(f"{variable} names no {ENGINES[SETTINGS[name].engine].title}")
        if name not in self._begun:
            try:
                self._begun[name] = self.ends.enter_context(_living(name, self.folder / name, self.model))
            except Exception as error:  # it would fail again, minutes later
                self._begun[name] = error
        life = self._begun[name]
        if isinstance(life, Exception):
            raise life
        assert life.server.alive(), f"{name} died in an earlier test: {life.server.last_line()}"
        return life

    @cached_property
    def model(self) -> Path:
        """The tiny model that all of them serve, in float32, as safetensors and as GGUF."""
        return make_model(self.folder / "tiny", "tiny", formats=("safetensors", "gguf"), dtype="float32")


@contextmanager
def _living(name: str, folder: Path, model: Path) -> Iterator[Life]:
    """Starts an engine, and ends it: it must have lived until then, and nothing of it may be left."""
    setting, extra, traces = SETTINGS[name], list(SETTINGS[name].args), folder / "traces"
    traces.mkdir(parents=True)
    if setting.has_adapters:
        config = json.loads((model / "config.json").read_text())
        adapters = [f"{each}={make_adapter(folder / each, config, k)}" for k, each in enumerate(ADAPTERS)]
        (folder / "chat.jinja").write_text(TEMPLATE)
        extra += ["--chat-template", str(folder / "chat.jinja"), "--lora-modules", *adapters]
    engine, port = ENGINES[setting.engine], process.free_port()
    options = LaunchOptions(
        "" if engine.brings_model else str(model),
        *("127.0.0.1", port, "tiny", folder, None, tuple(extra)),
        profile_dir=traces if setting.has_profiler else None,
    )
    launch, log = engine.launch(options), folder / "server.log"
    target = Target(f"http://127.0.0.1:{port}", launch.served_name or "tiny")
    with process.start(launch, log) as server:
        ready = wait_ready(engine, server, target, timeout_s=600)
        family = psutil.Process(server.keeper_pid).children(recursive=True)
        print(f"\n{name} lives after {ready.ready_s:.1f} s")
        yield Life(name, setting, target, model, log, traces, launch, server, ready.ready_s)
        was_alive = server.alive()
    assert was_alive, f"{name} died: {server.last_line()}"
    left = [member for member in family if member.is_running()]
    assert family, f"{name} had no processes"
    assert not left, f"{name} left {left}"
    process.require_free_port("127.0.0.1", port)


def make_adapter(folder: Path, config: Mapping[str, int], seed: int) -> Path:
    """A LoRA adapter of random weights for the query projections, as PEFT writes one."""
    folder.mkdir(parents=True)
    draws = np.random.Generator(np.random.PCG64(seed))
    hidden = config["hidden_size"]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = draws.normal(0, 0.5, (RANK, hidden)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = draws.normal(0, 0.5, (hidden, RANK)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(facts | {"target_modules": ["q_proj"]}))
    return folder


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    with ExitStack() as ends:
        own = tmp_path_factory.getbasetemp()
        shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
        yield Lives(tmp_path_factory.mktemp("lives"), shared, ends)
