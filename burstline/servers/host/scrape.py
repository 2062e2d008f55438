"""Poll a running engine, or each of its replicas, for its gauges, at a low rate."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, replace

from burstline.servers.engine import Engine
from burstline.servers.host.ready import PAGE_TIMEOUT_S, getter
from burstline.servers.host.telemetry import Row, missing, rows_of
from burstline.servers.identity import Gauges
from burstline.servers.messages import EngineError, Get, HttpReply, Target
from burstline.servers.redact import words_of_server

PERIOD_S = 1.0
"""Rarely: an engine renders its metrics on the very thread that serves requests."""
SETTLE_S = 15.0
"""How long counters may move after the load; then they are taken as they are."""
SETTLE_PERIOD_S = 0.25
COUNTERS = frozenset({"prompt_tokens", "generation_tokens", "ttft_count", "e2e_count", "running"})
"""Counters that must stop changing after the load; `running`, because disconnects may be noticed late."""


def scrape(
    engine: Engine, target: Target, write: Callable[[Iterable[Row]], None], stopped: threading.Event
) -> None:
    """Ask the engine for its gauges until `stopped`, then until its counters stand still: they must cover
    the load, and some engines count late.

    They stand still when they have not moved for `engine.counters_settle_s`; SETTLE_S bounds the wait.
    `scrape_s` is how long the answer took.
    """
    if engine.metrics_path is None:
        write([missing("engine", f"Burstline reads no metrics of: {engine.title}{_unread(target)}")])
        return
    gets = [
        getter(replace(target, url=url), timeout_s=PAGE_TIMEOUT_S) for url in (target.url, *target.replicas)
    ]
    complaints: set[str] = set()
    is_last, quiet_since_s, until_s = False, 0.0, 0.0
    latest: dict[str, float] = {}
    while True:
        began_ns = time.monotonic_ns()
        rows = _gauge_rows(engine, gets)
        fresh = [row for row in rows if row.value is not None or row.name + str(row.note) not in complaints]
        complaints |= {row.name + str(row.note) for row in rows if row.value is None}
        write(fresh)
        counters = {row.name: row.value for row in rows if row.value is not None and row.name in COUNTERS}
        now_s = time.monotonic()
        if counters != latest:
            latest, quiet_since_s = counters, now_s
        if is_last:
            if now_s - quiet_since_s >= engine.counters_settle_s or now_s >= until_s:
                return
            time.sleep(min(SETTLE_PERIOD_S, engine.counters_settle_s))
        else:
            is_last = stopped.wait(max(0.0, PERIOD_S - (time.monotonic_ns() - began_ns) / 1e9))
            if is_last:
                until_s, quiet_since_s, latest = time.monotonic() + SETTLE_S, time.monotonic(), {}


def _unread(target: Target) -> str:
    """What a page of metrics has that Burstline knows no names of, by the first word of their names."""
    with suppress(EngineError):
        page = getter(target, timeout_s=PAGE_TIMEOUT_S)("/metrics")
        words = re.findall(r"^# TYPE ([a-zA-Z]+)", page.body.decode(errors="replace"), re.MULTILINE)
        if page.ok and words:
            return f", whose /metrics has {', '.join(f'{word}*' for word in dict.fromkeys(words))}"
    return ""


def _gauge_rows(engine: Engine, gets: Sequence[Get]) -> list[Row]:
    """The gauges of all replicas together: sums, and the mean share of their KV caches."""
    path = engine.metrics_path or ""
    began_ns = time.monotonic_ns()
    try:
        gauges = [_gauges(engine, get(path), path) for get in gets]
    except EngineError as error:
        return [missing("engine", str(error))]
    at_ns = time.monotonic_ns()
    rows = [Row(at_ns, "engine", "scrape_s", (at_ns - began_ns) / 1e9)]
    for name in (each.name for each in fields(Gauges) if each.name != "latencies"):
        values = [value for each in gauges if (value := getattr(each, name)) is not None]
        whole = len(values) == len(gauges)
        mean = len(values) if name == "kv_used_fraction" else 1
        value = sum(values) / mean if whole else None
        rows.append(Row(at_ns, "engine", name, value, None if whole else "it has no such metric"))
    latencies: Counter[str] = Counter()
    for each in gauges:
        latencies.update(each.latencies or {})
    return rows + rows_of("engine", latencies, at_ns)


def _gauges(engine: Engine, reply: HttpReply, path: str) -> Gauges:
    if not reply.ok:
        raise EngineError(f"{path} answers {reply.status}")
    try:
        return engine.gauges(reply.body.decode(errors="replace"))
    except Exception as error:  # whatever a server's bytes can make a parser do
        raise EngineError(words_of_server(f"{path} cannot be read: {error}")) from error
