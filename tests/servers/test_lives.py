"""Which tests share an engine's life, and so a worker."""

import pytest

from tests.servers.lives import engine_in


@pytest.mark.parametrize(
    ("nodeid", "engine"),
    [
        ("tests/a.py::test_b[@vllm]", "vllm"),
        ("tests/a.py::test_b[burst-@vllm-small-cache]", "vllm"),
        ("tests/a.py::test_b[@sglang-0.3]", "sglang"),
        ("tests/a.py::test_b[vllm]", None),
        ("tests/a.py::test_b[http://me:key@vllm]", None),
        ("tests/a.py::test_b[@home]", None),
        ("tests/a.py::test_b", None),
    ],
    ids=range(7),  # else they would be ids of tests at a life themselves
)
def test_the_id_of_a_test_at_a_life_names_its_engine(nodeid: str, engine: str | None) -> None:
    assert engine_in(nodeid) == engine
