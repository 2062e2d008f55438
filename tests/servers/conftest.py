import pytest

from burstline.servers import redact


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret has been learned yet."""
    for name in ("_learned", "_known"):
        monkeypatch.setattr(redact, name, set())
    for name in ("_known_text", "_known_bytes"):
        monkeypatch.setattr(redact, name, None)
