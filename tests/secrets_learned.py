"""A process that has learned no secret yet: what one learns stays for ever."""

import pytest

from burstline.servers import redact


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_learned", "_known"):
        monkeypatch.setattr(redact, name, set())
    for name in ("_known_text", "_known_bytes"):
        monkeypatch.setattr(redact, name, None)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret has been learned yet."""
    forget(monkeypatch)
