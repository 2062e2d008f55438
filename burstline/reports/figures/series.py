"""The series that the timeline draws, in bins of equal width. Times are seconds from the run's start."""

from __future__ import annotations

import math

import numpy as np

from burstline.measure.record.columns import Columns, Floats, Ints
from burstline.measure.record.telemetry import Telemetry

MOST_GAPS = 100_000
"""Of more gaps `step` takes evenly spaced ones."""
STALL = 10.0
"""A gap of so many medians is a stall, not a step."""


def bin_edges(end_s: float, n_bins: int = 200) -> Floats:
    """From 0 to at least `end_s` in at most `n_bins` bins whose width is 1, 2 or 5 x 10^k seconds."""
    least = max(end_s, 1e-3) / n_bins
    power: float = 10.0 ** math.floor(math.log10(least))
    width = next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))
    return np.arange(math.ceil(end_s / width - 1e-9) + 1, dtype=np.float64) * np.float64(width)


def sending_order(c: Columns) -> Ints:
    """Positions of the records in the order in which they were sent; never sent last, ties in plan order."""
    return np.argsort(c.sent_s, kind="stable")


def step(c: Columns) -> float:
    """About how long the engine's steps take, seconds: half of all time between tokens is in longer gaps.

    Not the median gap: while prompts are taken in, steps are few and long. 0 where there are no gaps.
    """
    gaps = np.diff(c.event_s)[c.follows[1:]]
    gaps = np.sort(gaps[gaps > 0][:: max(1, len(gaps) // MOST_GAPS)])
    if not len(gaps):
        return 0.0
    by_time = float(gaps[np.searchsorted(np.cumsum(gaps), gaps.sum() / 2)])
    return min(by_time, STALL * float(np.median(gaps)))


def tokens_per_s(c: Columns, edges: Floats) -> Floats:
    """Output tokens that arrived in each bin, per second; failed requests' too: the server made them."""
    counted: Floats = np.histogram(c.event_s, edges, weights=c.event_n)[0] / np.diff(edges)
    return counted


def in_flight(c: Columns, edges: Floats) -> Floats:
    """The most requests in flight (sent, not yet closed) at once in each bin."""
    sent = ~np.isnan(c.sent_s)
    opened = np.sort(c.sent_s[sent])
    closed = np.sort(np.nan_to_num(c.closed_s[sent], nan=np.inf))
    # Within a bin the number is greatest at the bin's start or just after one of its openings.
    most = (
        np.searchsorted(opened, edges[:-1], "right") - np.searchsorted(closed, edges[:-1], "right")
    ).astype(float)
    after = np.arange(1.0, len(opened) + 1) - np.searchsorted(closed, opened, "right")
    bins = np.searchsorted(edges, opened, "right") - 1
    inside = (bins >= 0) & (bins < len(most))
    np.maximum.at(most, bins[inside], after[inside])
    return most


def level(telemetry: Telemetry, source: str, name: str, edges: Floats) -> Floats:
    """The greatest reading in each bin; a bin without one keeps the last.

    Readings from before the start do not count: what an idle server said is not held into the load.
    """
    at_s, values = telemetry.series(source, name)
    at_s, values = at_s[at_s >= 0], values[at_s >= 0]
    most = np.full(len(edges) - 1, np.nan)
    if not len(at_s):
        return most
    last = np.searchsorted(at_s, edges[1:], "left") - 1
    kept = (last >= 0) & (edges[:-1] <= at_s[-1])
    most[kept] = values[last[kept]]
    bins = np.searchsorted(edges, at_s, "right") - 1
    inside = (bins >= 0) & (bins < len(most))
    np.fmax.at(most, bins[inside], values[inside])
    return most
