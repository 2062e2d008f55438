"""The table of engines: names at once, modules on first use."""

import pickle
import subprocess
import sys

from burstline.servers.messages import HttpReply
from burstline.servers.registry import ENGINES


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


def test_an_engine_knows_its_own_name_and_can_be_sent_to_the_processes_that_decode_for_it() -> None:
    reply = HttpReply(200, {}, b'{"choices":[{"text":"x","finish_reason":"length"}]}')
    for name in (*ENGINES, "vllm+chat", "tgi+completions", "sglang+chat"):
        engine = ENGINES[name]
        assert engine.name == name
        assert engine is ENGINES[name]
        assert pickle.loads(pickle.dumps(engine.decode))(reply) == engine.decode(reply)
