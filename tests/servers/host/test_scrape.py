"""How often an engine is asked for its gauges, and when its counters have settled after a load."""

import socket
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from burstline.servers.engines.vllm import Vllm
from burstline.servers.gauges import Gauges
from burstline.servers.host import watch
from burstline.servers.host.telemetry import Row
from burstline.servers.messages import HttpReply, Target


class Engine(Vllm):
    """Its counter is what its body says."""

    counters_settle_s = 0.2

    def gauges(self, text: str) -> Gauges:
        return Gauges(generation_tokens=float(text))


def scraped(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], bytes], n_before: int = 1, **limits: float
) -> list[Row]:
    """The rows of a load that ends behind `n_before` answers; the k-th answer is `answer(k)`."""
    for name, limit_s in limits.items():
        monkeypatch.setattr(watch, name, limit_s)
    stopped, rows, n = threading.Event(), list[Row](), [0]

    def get(path: str) -> HttpReply:
        n[0] += 1
        if n[0] >= n_before:
            stopped.set()
        return HttpReply(200, {}, answer(n[0]))

    monkeypatch.setattr(watch, "getter", lambda *_, **__: get)
    watch.scrape(Engine(), Target("http://x", "m"), rows.extend, stopped)
    return rows


def tokens(rows: Iterable[Row]) -> list[float | None]:
    return [row.value for row in rows if row.name == "generation_tokens"]


def test_counters_are_read_until_they_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tokens(scraped(monkeypatch, lambda k: b"%d" % min(k, 4), SETTLE_PERIOD_S=0.02))
    assert found[:4] == [1, 2, 3, 4]
    assert 4 < len(found) < 30


def test_counters_that_never_stand_still_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tokens(scraped(monkeypatch, lambda k: b"%d" % k, SETTLE_S=1.0, SETTLE_PERIOD_S=0.02))
    assert 3 < len(found) < 60


def test_an_engine_is_asked_rarely_and_what_it_lacks_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    began_s = time.monotonic()
    rows = scraped(monkeypatch, lambda k: b"api_key=v4lue-1", n_before=4, SCRAPE_PERIOD_S=0.1, SETTLE_S=0.0)
    assert time.monotonic() - began_s >= 0.15
    (row,) = rows
    assert row.value is None
    assert row.note == "/metrics cannot be read: could not convert string to float: 'api_key=(removed)'"


def test_gauges_are_read_at_no_steady_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the beat of evenly spaced arrivals, a reading meets each request at the same moment of its life."""
    waits_s: list[float] = []

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits_s.append(timeout or 0.0)
            return len(waits_s) == 200

    monkeypatch.setattr(watch, "getter", lambda *_, **__: lambda path: HttpReply(200, {}, b"1"))
    monkeypatch.setattr(watch, "SETTLE_S", 0.0)
    watch.scrape(Engine(), Target("http://x", "m"), lambda rows: None, Stopped())
    counts, _ = np.histogram(np.cumsum(waits_s) % 0.2, bins=4, range=(0, 0.2))
    assert counts.min() > 20, "of five requests a second"
    assert 0.9 < np.mean(waits_s) < 1.1


def test_a_metric_that_an_engine_does_not_have_is_told_from_a_page_that_is_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R47: LightLLM and TGI count no queue, or are slow to tell."""
    rows = scraped(monkeypatch, lambda k: b"5", SETTLE_S=0.0)
    assert {(row.value, row.note) for row in rows if row.name == "waiting"} == {
        (None, "it has no such metric")
    }


def test_a_complaint_that_quotes_a_long_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = scraped(monkeypatch, lambda k: b"x" * 100_000, SETTLE_S=0.0)
    assert len(row.note or "") < 2100


def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGE_TIMEOUT_S", "SETTLE_S"):
        monkeypatch.setattr(watch, name, 0.1)
    stopped, rows = threading.Event(), list[Row]()
    stopped.set()
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        target = Target(f"http://127.0.0.1:{deaf.getsockname()[1]}", "m")
        watch.scrape(Engine(), target, rows.extend, stopped)
    assert {row.value for row in rows} == {None}
