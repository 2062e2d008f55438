"""The server's own latency histograms, compared with the client's latencies.

A server's clock starts when it has taken a request in, the client's when the last byte was written; both stop
with a token. What the client has more is the network, whatever stands between, and the server's own front end
(its HTTP server, its tokenizer); the server can never have more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.definitions import e2e_service, gaps, ttft_service
from burstline.measure.record.columns import Columns, Floats
from burstline.measure.record.summary import Agreement
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import FLOOR_S, Reason, time_text
from burstline.measure.stats.estimates import Absent, Estimate, Figure, measured
from burstline.measure.stats.quantiles import Ranked, each_once

LATENCIES = ("ttft", "itl", "e2e")
UNEXPLAINED = 0.05
"""The share of a latency by which the two sides may differ before a warning."""


def agreement(c: Columns, watched: Telemetry) -> Agreement:
    """By latency the client's median and the server's, and how much more the client has.

    TTFT and E2E count from when the request was written, ITL is pooled over tokens. `*_gap_s` is the
    difference of the means, Absent where the two counted different numbers: then they saw different things.
    """
    figures: dict[str, Figure] = {}
    for name in LATENCIES:
        values, weights = _client(name, c)
        median, mean_s = _of_server(watched, name)
        client: Figure = Absent("the client has no such latency")
        if len(values):
            ranked = Ranked.of(values, weights)
            client = measured(ranked.at(ranked.total / 2), "s", "", int(ranked.total))
        figures[f"{name}_client_p50_s"] = client
        figures[f"{name}_server_p50_s"] = median
        figures[f"{name}_gap_s"] = _gap(client, median, float((values * weights).sum()), mean_s)
    return Agreement(**figures, **_means(watched))


def _means(watched: Telemetry) -> dict[str, Figure]:
    """The server's own split of a request's time and of a step's: only what the engine exports.

    These have no counterpart at the client.
    """
    figures: dict[str, Figure] = {}
    for name in (slot.name for slot in fields(Agreement) if slot.name.startswith("server_")):
        counter = name.removeprefix("server_").removesuffix("_mean_s")
        grown = watched.grown_together("engine", f"{counter}_")
        if not isinstance(grown, Absent) and set(grown) == {"sum", "count"} and grown["count"]:
            unit = "s" if name.endswith("_s") else "1"
            figures[name] = measured(grown["sum"] / grown["count"], unit, "", int(grown["count"]))
    return figures


def disagreement(agreed: Agreement, read_late_s: Mapping[str, float]) -> Iterator[Reason]:
    """What the two sides cannot both mean, or what lies between them but our own late reads, the first."""
    for name in LATENCIES:
        gap, client = agreed.figure(f"{name}_gap_s"), agreed.figure(f"{name}_client_p50_s")
        if isinstance(gap, Absent) or isinstance(client, Absent):
            continue
        least = max(FLOOR_S, UNEXPLAINED * client.point)
        if -least <= gap.point <= max(least, 2 * read_late_s.get(name, 0.0)):
            continue
        size = time_text(abs(gap.point))
        if gap.point > 0:
            text = f"The server's own {name.upper()} is {size} shorter than the client's."
            advice = "The rest is time in the network, a proxy or the server's front end, not in the engine."
        else:
            text = f"The server's own {name.upper()} is {size} longer than the client saw."
            advice = "The server probably also counted requests of other clients, or cancelled ones."
        yield Reason("server-view", text, advice)
        return


def _client(name: str, c: Columns) -> tuple[Floats, NDArray[Any]]:
    """The values as the server would count them, and how often each counts."""
    if name == "itl":
        came = gaps(c, counted=True)
        return came.value / came.weight, came.weight
    values = ttft_service(c) if name == "ttft" else e2e_service(c)[c.ok]
    values = values[~np.isnan(values)]
    return values, each_once(values)


def _gap(client: Figure, server: Figure, client_s: float, server_mean_s: float) -> Figure:
    """`client_s` is the sum of the client's values."""
    if isinstance(server, Absent) or isinstance(client, Absent):
        return server if isinstance(server, Absent) else client
    if server.n < client.n:
        return Absent(f"the server's own metrics are incomplete ({server.n:,} of {client.n:,})")
    if server.n > client.n:
        counted = f"{server.n:,}, here {client.n:,}"
        return Absent(f"the server also counted others' or failed requests ({counted})")
    gap_s = client_s / client.n - server_mean_s
    return Estimate(gap_s, None, None, None, client.n, "s", "difference of the means")


def _of_server(watched: Telemetry, name: str) -> tuple[Figure, float]:
    """The median of the growth of the server's own histogram, and the mean, s.

    The median is interpolated in the bucket that holds it, between whose edges it lies for certain.
    """
    grown = watched.grown_together("engine", f"{name}_")
    if isinstance(grown, Absent):
        return grown, math.nan
    buckets = {float(key.removeprefix("le_")): n for key, n in grown.items() if key.startswith("le_")}
    if not buckets or not grown.get("count"):
        return Absent("the server's histogram did not grow"), math.nan
    at_most_s = sorted(buckets)  # to infinity
    n = np.array([buckets[edge] for edge in at_most_s])
    total, k = int(n[-1]), int(np.searchsorted(n, int(n[-1]) / 2))
    low, before = (at_most_s[k - 1], float(n[k - 1])) if k else (0.0, 0.0)
    high = at_most_s[k]
    if math.isinf(high):
        median = Estimate(low, low, None, 1.0, total, "s", "beyond the last bucket")
    else:
        point = low + (high - low) * (total / 2 - before) / float(n[k] - before)
        median = Estimate(point, low, high, 1.0, total, "s", "the server's own histogram")
    return median, grown["sum"] / total
