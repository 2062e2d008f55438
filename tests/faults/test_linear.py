"""Twice the foreign text takes twice the time: pages by which a server is known, its metrics, models, TOML."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import orjson
import pytest

from burstline.errors import MOST_TOML, RooflineError, parse_toml
from burstline.measure.record.run_writer import without_secrets
from burstline.servers.gauges import samples_at
from burstline.servers.host.ready import _doing, stage_of
from burstline.servers.introspection import first_model, json_at
from burstline.servers.messages import HttpReply
from burstline.servers.registry import ENGINES

METRIC = "vllm:num_requests_running"
LINES: dict[str, Callable[[int], str]] = {
    "a long label": lambda n: f'{METRIC}{{a="{"x" * n}"}} 1\n',
    "many labels": lambda n: METRIC + "{" + ",".join(f'a{k}="b"' for k in range(n // 10)) + "} 1\n",
    "quotes": lambda n: f'{METRIC}{{a="{chr(92) + chr(34)}' * (n // 40) + '"} 1\n',
    "escaped quotes": lambda n: METRIC + '{a="' + '\\"' * (n // 2) + '"} 1\n',
    "backslashes": lambda n: METRIC + '{a="' + "\\\\" * (n // 2) + '"} 1\n',
    "a long number": lambda n: f"{METRIC} {'1' * n}\n",
    "many lines": lambda n: f'{METRIC}{{a="b"}} 1\n' * (n // 40),
    "other names": lambda n: '# TYPE x counter\nx_total{a="b"} 1\n' * (n // 36),
}
WORDS = {
    "a long word": "x",
    "digits": "4711",
    "short words": "a bc def ",
    "lines": "INFO 12-03 dtype=torch.float16 max_num_seqs=5\n",
    "a path": "ipc:///tmp/",
    "JSON": '{"a": "b", "n": 5},',
    "a warning": "aWarning",
}
TOML: dict[str, Callable[[int], str]] = {
    "a long word": lambda n: f"a = '{'x' * n}'",
    "many keys": lambda n: "".join(f"k{k} = 1\n" for k in range(n // 12)),
    "many tables": lambda n: "".join(f"[t{k}]\na = 1\n" for k in range(n // 14)),
    "one list of tables": lambda n: "[[t]]\na = 1\n" * (n // 12),
    "a list": lambda n: f"a = [{'1, ' * (n // 3)}]",
    "dots": lambda n: f"{'a.' * 4000}a = 1\n" * (n // 8010),
    "dots of one table": lambda n: "".join(f"a.b{k} = 1\n" for k in range(n // 12)),
    "comments": lambda n: "# " + "x" * n,
    "lines of a string": lambda n: f'a = """{"x" * 20 + chr(10)}' * (n // 40),
    "braces": lambda n: "a = " + "{ b = " * (n // 6),
}


def identity(text: str) -> None:
    """vLLM, with this text on every page and in its log, and what is kept of it."""
    body = orjson.dumps({"version": text})
    found = ENGINES["vllm"].identify(lambda path: HttpReply(200, {}, body), text)
    without_secrets({"raw": dict(found.raw)})


def log(text: str) -> None:
    for engine in ENGINES.values():
        stage_of(engine, text)
        if engine.cause is not None:
            engine.cause.search(text)
    _doing([], text, 1.0)


def models(text: str) -> None:
    for page in ({"data": [{"id": text, "owned_by": text}]}, [text], {"models": text.split(" ")}):
        first_model(json_at(lambda path, page=page: HttpReply(200, {}, orjson.dumps(page)), "/v1/models"))  # type: ignore[misc]


def metrics(text: str) -> None:
    samples_at(lambda path: HttpReply(200, {}, text.encode()), [METRIC])


def toml(text: str) -> None:
    with suppress(RooflineError):
        parse_toml(text, "x.toml")


def of_words(name: str) -> Callable[[int], str]:
    return lambda n: WORDS[name] * (n // len(WORDS[name]))


CASES = {
    **{f"identity: {name}": (identity, of_words(name), 1 << 20) for name in WORDS},
    **{f"a log: {name}": (log, of_words(name), 1 << 20) for name in WORDS},
    **{f"models: {name}": (models, of_words(name), 1 << 20) for name in WORDS},
    **{f"metrics: {name}": (metrics, page, 1 << 20) for name, page in LINES.items()},
    **{f"TOML: {name}": (toml, file, MOST_TOML * 2 // 5) for name, file in TOML.items()},
}


def least_s(work: Callable[[str], None], text: str) -> float:
    """CPU time, the least of two."""
    times_s = []
    for _ in range(2):
        began_s = time.process_time()
        work(text)
        times_s.append(time.process_time() - began_s)
    return min(times_s)


@pytest.mark.measures
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("work", "text", "size"), CASES.values(), ids=CASES)
def test_twice_the_foreign_text_takes_twice_the_time(
    work: Callable[[str], None], text: Callable[[int], str], size: int
) -> None:
    once_s, twice_s = (least_s(work, text(n)) for n in (size, 2 * size))
    assert twice_s <= 2.5 * once_s + 0.05


@pytest.mark.parametrize("line", ["a long label", "many labels", "escaped quotes", "backslashes"])
def test_a_line_of_metrics_is_bounded_and_the_bound_is_named(line: str) -> None:
    """The parser's work grows with the square of a line."""
    page = LINES[line](100_000)
    assert samples_at(lambda path: HttpReply(200, {}, page.encode()), [METRIC]) == []
    with pytest.raises(ValueError, match=r"a line of \d+,\d+ characters; expected at most 8,192"):
        ENGINES["vllm"].gauges(page)
