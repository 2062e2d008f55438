"""Both readers at hand for tests."""

import pytest

from loadgen.wire import compiled_reader


def use_reader(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have every wire of this test, its subprocesses' too, use this reader; skips where it cannot be had."""
    monkeypatch.delenv(compiled_reader.VARIABLE, raising=False)
    compiled_reader._library.cache_clear()  # another test may have looked where it cannot be kept
    if name == "compiled" and isinstance(why := compiled_reader.library(), str):
        pytest.skip(f"no compiled reader here: {why}")
    monkeypatch.setenv(compiled_reader.VARIABLE, name)
    return name
