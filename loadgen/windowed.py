"""Rates and means of an open-loop run over its steady window, with intervals by moving blocks.

Requests that are neighbours in time see the same queue: resampled one by one they would pass for independent,
and the interval for far narrower than it is. Kuensch, Annals of Statistics 17 (1989). But no interval knows
of what never came: of the mean TTFTs of 2,000 requests to a queue at 70 % load 82 % of the intervals hold the
truth, not 95 %, for its rare long waits (38 % as if independent; tests/loadgen/test_stationary.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadgen.blocks import LEAST_BLOCKS, block_interval, block_length
from loadgen.columns import Columns, Floats
from loadgen.metrics import Metric, latencies
from loadgen.stationary import Steady
from loadgen.stats import LEVEL, Absent, Estimate, Figure
from loadgen.totals import UNCOUNTED, prompt_tok

BINS_A_BLOCK: Final = 8


def throughputs_in(c: Columns, steady: Steady, rng: np.random.Generator) -> dict[str, Figure]:
    """Rates of work within the window: each token and each completion when it came."""
    prompt, ok, own = prompt_tok(c), c.ok, c.ok[c.owner]
    output_s, output = c.event_s[own], c.event_n[own].astype(np.float64)
    input_s, given = c.first_s[ok], prompt[ok]
    both_s, both = np.concatenate([input_s, output_s]), np.concatenate([given, output])
    counted = not np.isnan(c.output_tok[ok]).any()
    return {
        "output_tok_per_s": _rate(output_s, output, "tok/s", steady, rng) if counted else UNCOUNTED,
        "input_tok_per_s": _rate(input_s, given, "tok/s", steady, rng),
        "total_tok_per_s": _rate(both_s, both, "tok/s", steady, rng) if counted else UNCOUNTED,
        "requests_per_s": _rate(c.last_s[ok], np.ones(int(ok.sum())), "1/s", steady, rng),
    }


def goodput_in(
    c: Columns, steady: Steady, met: NDArray[np.bool_], rng: np.random.Generator
) -> dict[str, Figure]:
    """Good requests due within the window, and their tokens, per second."""
    due_s, tokens = c.due_s[met], c.output_tok[met]
    return {
        "requests_per_s": _rate(due_s, np.ones(len(due_s)), "1/s", steady, rng),
        "tok_per_s": UNCOUNTED if np.isnan(tokens).any() else _rate(due_s, tokens, "tok/s", steady, rng),
    }


def parts_of_mean(metric: Metric, c: Columns) -> tuple[Floats, Floats, Floats]:
    """Sum, weight and due time per request: the metric's mean is the sum of sums over that of weights."""
    if metric.pooled is not None:
        samples = metric.pooled(c)
        n = len(c)
        sums, weights = (
            np.bincount(samples.owner, amount, minlength=n).astype(np.float64)
            for amount in (samples.value * samples.weight, samples.weight)
        )
        return sums, weights, c.due_s
    values = latencies(metric, c)
    known = ~np.isnan(values)
    return np.where(known, values, 0.0), known.astype(np.float64), c.due_s


def _rate(at_s: Floats, amount: Floats, unit: str, steady: Steady, rng: np.random.Generator) -> Figure:
    window, block_s = steady.window, steady.block_s
    if window.length_s < block_s:
        return Absent(f"the window of {window.length_s:.2g} s is too short: {_too_short(block_s)}")
    inside = (at_s >= window.start_s) & (at_s <= window.end_s)
    n_bins = math.floor(window.length_s / block_s * BINS_A_BLOCK)
    edges = np.linspace(window.start_s, window.end_s, n_bins + 1)
    brought = np.histogram(at_s, edges, weights=amount)[0]
    block = max(BINS_A_BLOCK, block_length(brought))
    found = block_interval(brought, np.diff(edges), block, rng)
    point, n = float(amount[inside].sum() / window.length_s), int(inside.sum())
    if found is None:
        return Estimate(point, None, None, LEVEL, n, unit, _too_short(block_s * block / BINS_A_BLOCK))
    return Estimate(point, *found, LEVEL, n, unit, f"moving blocks of {block_s * block / BINS_A_BLOCK:.2g} s")


def with_blocks(
    mean: Figure, sums: Floats, weights: Floats, due_s: Floats, steady: Steady, rng: np.random.Generator
) -> Figure:
    """The mean with its interval by moving blocks of requests in the order they were due."""
    if isinstance(mean, Absent):
        return mean
    order = np.argsort(due_s, kind="stable")
    sums, weights = sums[order], weights[order]
    per_s = len(sums) / max(steady.window.length_s, steady.block_s)
    block = max(math.ceil(per_s * steady.block_s), block_length(sums - mean.point * weights))
    found = block_interval(sums, weights, block, rng)
    if found is None:
        return replace(mean, low=None, high=None, note=_too_short(block / per_s))
    return replace(mean, low=found[0], high=found[1], note=f"moving blocks of {block} requests")


def _too_short(block_s: float) -> str:
    return (
        f"an interval needs {LEAST_BLOCKS} blocks of {block_s:.2g} s (at least twice the mean E2E, and 1 s)"
    )
