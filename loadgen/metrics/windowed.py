"""Rates over a window of steady state, with intervals from blocks of time: neighbours share one queue."""

from __future__ import annotations

import math
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadgen.metrics.throughput import UNCOUNTED, Window, prompt_tok
from loadgen.record.columns import Columns, Floats
from loadgen.stats.estimates import LEVEL, Absent, Estimate, Figure
from loadgen.stats.serial_correlation import LEAST_BLOCKS, rate_interval

BINS_A_BLOCK: Final = 8


def throughputs_in(c: Columns, window: Window, block_s: float) -> dict[str, Figure]:
    """Rates of work within the window: each token and each completion when it came.

    `block_s` is the least time over which neighbours are taken to depend on each other.
    """
    rate = partial(_rate, window, block_s)
    prompt, ok, own = prompt_tok(c), c.ok, c.ok[c.owner]
    output_s, output = c.event_s[own], c.event_n[own].astype(np.float64)
    input_s, given = c.first_s[ok], prompt[ok]
    both_s, both = np.concatenate([input_s, output_s]), np.concatenate([given, output])
    counted = not np.isnan(c.output_tok[ok]).any()
    return {
        "output_tok_per_s": rate(output_s, output, "tok/s") if counted else UNCOUNTED,
        "input_tok_per_s": rate(input_s, given, "tok/s"),
        "total_tok_per_s": rate(both_s, both, "tok/s") if counted else UNCOUNTED,
        "requests_per_s": rate(c.last_s[ok], np.ones(int(ok.sum())), "1/s"),
    }


def goodput_in(c: Columns, window: Window, block_s: float, met: NDArray[np.bool_]) -> dict[str, Figure]:
    """Good requests due within the window, and their tokens, per second."""
    rate = partial(_rate, window, block_s)
    due_s, tokens = c.due_s[met], c.output_tok[met]
    return {
        "requests_per_s": rate(due_s, np.ones(len(due_s)), "1/s"),
        "tok_per_s": UNCOUNTED if np.isnan(tokens).any() else rate(due_s, tokens, "tok/s"),
    }


def _rate(window: Window, block_s: float, at_s: Floats, amount: Floats, unit: str) -> Figure:
    if window.length_s < block_s:
        return Absent(f"the window of {window.length_s:.2g} s is too short: {_too_short(block_s)}")
    inside = (at_s >= window.start_s) & (at_s <= window.end_s)
    n_bins = math.floor(window.length_s / block_s * BINS_A_BLOCK)
    edges = np.linspace(window.start_s, window.end_s, n_bins + 1)
    brought = np.histogram(at_s, edges, weights=amount)[0]
    interval = rate_interval(brought, np.diff(edges), BINS_A_BLOCK)
    point, n = float(amount[inside].sum() / window.length_s), int(inside.sum())
    if interval is None:
        return Estimate(point, None, None, None, n, unit, _too_short(block_s))
    return Estimate(point, *interval, LEVEL, n, unit, "1 run; from blocks of time")


def _too_short(block_s: float) -> str:
    return (
        f"an interval needs {LEAST_BLOCKS} blocks of {block_s:.2g} s (at least twice the mean E2E, and 1 s)"
    )
