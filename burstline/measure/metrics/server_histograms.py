"""The server's own latency histograms, compared with the client's latencies.

A server's clock starts when it has taken a request in, the client's when the last byte was written; both stop
with a token. What the client has more is the network, whatever stands between, and the server's own front end
(its HTTP server, its tokenizer); the server can never have more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class _LatencyHistogram:
    """How an engine's histogram grew over the load: `n[i]` were at most `at_most_s[i]`, ascending to inf."""

    at_most_s: Floats
    n: Floats
    sum_s: float

    @property
    def total(self) -> int:
        return int(self.n[-1])

    @property
    def median(self) -> Estimate:
        """Interpolated in the bucket that holds it, between whose edges it lies for certain."""
        half = self.total / 2
        k = int(np.searchsorted(self.n, half))
        low, before = (self.at_most_s[k - 1], self.n[k - 1]) if k else (0.0, 0.0)
        high = float(self.at_most_s[k])
        if math.isinf(high):
            return Estimate(float(low), float(low), None, 1.0, self.total, "s", "beyond the last bucket")
        point = low + (high - low) * (half - before) / (self.n[k] - before)
        return Estimate(float(point), float(low), high, 1.0, self.total, "s", "the server's own histogram")


def agreement(c: Columns, watched: Telemetry) -> Agreement:
    """By latency the client's median and the server's, and how much more the client has.

    TTFT and E2E count from when the request was written, ITL is pooled over tokens. `*_gap_s` is the
    difference of the means, Absent where the two counted different numbers: then they saw different things.
    """
    figures: dict[str, Figure] = {}
    for name in LATENCIES:
        values, weights = _client(name, c)
        server = _histogram(watched, name)
        client = _median(values, weights)
        figures[f"{name}_client_p50_s"] = client
        figures[f"{name}_server_p50_s"] = server if isinstance(server, Absent) else server.median
        figures[f"{name}_gap_s"] = _gap(client, values, weights, server)
    return Agreement(**figures, **_means(watched))


MEANS_S: Final = (
    "queue", "prefill", "decode", "inference", "validation", "token",
    "prefill_step", "decode_step", "prefill_forward", "decode_forward",
)  # fmt: skip
"""Times of the server's own that have a mean, and no counterpart at the client."""
RATIOS: Final = ("accepted", "acceptance", "accepted_a_step")


def _means(watched: Telemetry) -> dict[str, Figure]:
    """The server's own split of a request's time and of a step's: only what the engine exports."""
    figures: dict[str, Figure] = {}
    for name in (*MEANS_S, *RATIOS):
        grown = watched.grown_together("engine", f"{name}_")
        if isinstance(grown, Absent) or set(grown) != {"sum", "count"} or not grown["count"]:
            continue
        unit, end = ("s", "_mean_s") if name in MEANS_S else ("1", "")
        mean = measured(grown["sum"] / grown["count"], unit, "", int(grown["count"]))
        figures[f"server_{name}{end}"] = mean
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
        return came.value / came.n, came.n
    values = ttft_service(c) if name == "ttft" else e2e_service(c)[c.ok]
    values = values[~np.isnan(values)]
    return values, each_once(values)


def _median(values: Floats, weights: NDArray[Any]) -> Figure:
    if not len(values):
        return Absent("the client has no such latency")
    ranked = Ranked.of(values, weights)
    return measured(ranked.at(ranked.total / 2), "s", "", int(ranked.total))


def _gap(client: Figure, values: Floats, weights: NDArray[Any], server: _LatencyHistogram | Absent) -> Figure:
    if isinstance(server, Absent):
        return server
    if isinstance(client, Absent):
        return client
    if server.total < client.n:
        return Absent(f"the server's own metrics are incomplete ({server.total:,} of {client.n:,})")
    if server.total > client.n:
        counted = f"{server.total:,}, here {client.n:,}"
        return Absent(f"the server also counted others' or failed requests ({counted})")
    gap_s = float((values * weights).sum()) / client.n - server.sum_s / server.total
    return Estimate(gap_s, None, None, None, client.n, "s", "difference of the means")


def _histogram(watched: Telemetry, name: str) -> _LatencyHistogram | Absent:
    grown = watched.grown_together("engine", f"{name}_")
    if isinstance(grown, Absent):
        return grown
    buckets = {float(key.removeprefix("le_")): n for key, n in grown.items() if key.startswith("le_")}
    if not buckets or not grown.get("count"):
        return Absent("the server's histogram did not grow")
    at_most_s = np.array(sorted(buckets))
    return _LatencyHistogram(
        at_most_s, np.array([buckets[edge] for edge in at_most_s.tolist()]), grown["sum"]
    )
