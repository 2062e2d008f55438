"""The table of engines: names at once, modules on first use."""

import pickle
import subprocess
import sys

import pytest

from burstline.servers.registry import ENGINES
from servers.messages import HttpReply


def loaded_after(code: str) -> set[str]:
    said = subprocess.check_output(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], text=True
    )
    return set(said.split())


def test_listing_the_engines_imports_none_of_them() -> None:
    loaded = loaded_after("from burstline.servers.registry import ENGINES\nassert 'vllm' in list(ENGINES)")
    assert not {name for name in loaded if name.startswith("burstline.servers.engines")}


def test_asking_for_one_engine_imports_no_other() -> None:
    loaded = loaded_after("from burstline.servers.registry import ENGINES\nENGINES['vllm']")
    assert {name for name in loaded if name.startswith("burstline.servers.engines.")} == {
        "burstline.servers.engines.vllm"
    }
    assert "huggingface_hub" not in loaded


@pytest.mark.parametrize("name", list(ENGINES))
def test_an_engine_knows_its_own_name(name: str) -> None:
    assert ENGINES[name].name == name
    assert ENGINES[name] is ENGINES[name]


@pytest.mark.parametrize("name", [*ENGINES, "vllm+chat", "tgi+completions", "sglang+chat"])
def test_an_engine_can_be_sent_to_the_processes_that_decode_for_it(name: str) -> None:
    sent = pickle.loads(pickle.dumps(ENGINES[name].decode))
    reply = HttpReply(200, {}, b'{"choices":[{"text":"x","finish_reason":"length"}]}')
    assert sent(reply) == ENGINES[name].decode(reply)
