"""Both readers at hand for tests."""

import pytest

from loadgen import compiled


def use_reader(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have every wire of this test, its subprocesses' too, use this reader; skips where it cannot be had."""
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    compiled._library.cache_clear()  # another test may have looked where it cannot be kept
    if name == "compiled" and isinstance(why := compiled.library(), str):
        pytest.skip(f"no compiled reader here: {why}")
    monkeypatch.setenv(compiled.VARIABLE, name)
    return name
