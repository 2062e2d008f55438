"""Asks a running engine for its own gauges, rarely."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

from servers.engine import Engine, EngineError, Get, Target
from servers.host.ready import getter
from servers.host.telemetry import Row, missing, rows_of
from servers.redact import words_of_server

PERIOD_S = 1.0
"""Rarely: an engine renders its metrics on the very thread that serves requests."""
TIMEOUT_S = 5.0


def scrape(
    engine: Engine, target: Target, write: Callable[[Iterable[Row]], None], stopped: threading.Event
) -> None:
    """Asks the engine for its gauges until `stopped`, and once more then: its counters must cover the load.

    Beside them stands `scrape_s`: how long the answer took.
    """
    if engine.metrics_path is None:
        write([missing("engine", f"{engine.title} has no metrics")])
        return
    get = getter(target, timeout_s=TIMEOUT_S)
    complaints: set[str] = set()
    is_last = False
    while True:
        began_ns = time.monotonic_ns()
        rows = _gauge_rows(engine, get, engine.metrics_path)
        fresh = [row for row in rows if row.value is not None or row.name + str(row.note) not in complaints]
        complaints |= {row.name + str(row.note) for row in rows if row.value is None}
        write(fresh)
        if is_last:
            return
        is_last = stopped.wait(max(0.0, PERIOD_S - (time.monotonic_ns() - began_ns) / 1e9))


def _gauge_rows(engine: Engine, get: Get, path: str) -> list[Row]:
    began_ns = time.monotonic_ns()
    try:
        reply = get(path)
    except EngineError as error:
        return [missing("engine", str(error))]
    at_ns = time.monotonic_ns()
    if reply.status != 200:
        return [missing("engine", f"{path} answers {reply.status}")]
    try:
        values = asdict(engine.gauges(reply.body.decode(errors="replace")))
    except Exception as error:  # whatever a server's bytes can make a parser do
        return [missing("engine", words_of_server(f"{path} cannot be read: {error}"))]
    latencies: dict[str, float] = values.pop("latencies") or {}
    rows = [Row(at_ns, "engine", "scrape_s", (at_ns - began_ns) / 1e9)]
    for name, value in values.items():
        rows.append(Row(at_ns, "engine", name, value, "not provided" if value is None else None))
    return rows + rows_of("engine", latencies, at_ns)
