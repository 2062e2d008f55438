"""The table of engines: names at once, modules on first use."""

import subprocess
import sys

import pytest

from servers.registry import ENGINES


def loaded_after(code: str) -> set[str]:
    said = subprocess.check_output(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"], text=True
    )
    return set(said.split())


def test_listing_the_engines_imports_none_of_them() -> None:
    loaded = loaded_after("from servers.registry import ENGINES\nassert 'vllm' in ENGINES and list(ENGINES)")
    assert not {name for name in loaded if name.startswith("servers.engines")}


def test_asking_for_one_engine_imports_no_other() -> None:
    loaded = loaded_after("from servers.registry import ENGINES\nENGINES['vllm']")
    assert {name for name in loaded if name.startswith("servers.engines.")} == {"servers.engines.vllm"}
    assert "huggingface_hub" not in loaded


@pytest.mark.parametrize("name", list(ENGINES))
def test_an_engine_knows_its_own_name(name: str) -> None:
    assert ENGINES[name].name == name
    assert ENGINES[name] is ENGINES[name]
