"""Closed loops at a server whose speed wanders, drifts or takes a step, on a virtual clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np
import pyarrow as pa
from scipy.signal import lfilter

from burstline.measure.record import tables

STEP_S = 0.01
"""Between two values of the speed, and of a token at speed 1."""
PREFILL_S = 0.05
LATER = 8

Shape = Callable[[np.ndarray], np.ndarray]
"""From the time, as a share of the load, to the logarithm of the slowness."""


def drift(times: float) -> Shape:
    return lambda at: math.log(times) * at


def step(times: float, where: float = 0.5) -> Shape:
    return lambda at: math.log(times) * (at > where)


def wander(n: int, correlation_s: float, random: np.random.Generator, sd: float = 0.1) -> np.ndarray:
    """An autoregression of first order, the same at all times; 0 for a correlation of 0."""
    if not correlation_s:
        return np.zeros(n)
    phi = math.exp(-STEP_S / correlation_s)
    shocks = sd * math.sqrt(1 - phi**2) * random.normal(size=n)
    return lfilter([1.0], [1.0, -phi], shocks, zi=[phi * sd * random.normal()])[0]


def closed_loop(
    c: int,
    length_s: float,
    random: np.random.Generator,
    *,
    correlation_s: float = 0.0,
    shape: Shape | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """When each of the requests sent in so many seconds was due, its first and last token, and its tokens.

    All in flight at a time are as fast as the server is then. Lengths vary from 33 to 97 tokens, prefills by
    a fifth, and tokens by a fiftieth, for each request alone.
    """
    at_s = np.arange(round((3 * length_s + 10) / STEP_S)) * STEP_S
    slow = wander(len(at_s), correlation_s, random)
    if shape is not None:
        slow = slow + shape(np.clip(at_s / length_s, 0, 1))
    done = np.r_[0, np.cumsum(np.exp(-slow))[:-1] * STEP_S]
    slots, rows, over = [0.0] * c, [], float(np.interp(length_s, at_s, done))
    while slots[0] < over:
        n = int(random.integers(32, 97))
        due = heapq.heappop(slots)
        first = due + PREFILL_S * math.exp(0.2 * random.normal())
        last = first + n * STEP_S * math.exp(0.02 * random.normal())
        rows.append((due, first, last, n + 1))
        heapq.heappush(slots, last)
    due, first, last, n_tok = np.array(rows).T
    return (*(np.interp(each, done, at_s) for each in (due, first, last)), n_tok.astype(int))


def table(due_s: np.ndarray, first_s: np.ndarray, last_s: np.ndarray, n_tok: np.ndarray) -> pa.Table:
    """Records of successes: an event with the first token, and LATER with the others."""
    n = len(due_s)
    shares = np.arange(LATER + 1) / LATER
    at_s = first_s[:, None] + (last_s - first_s)[:, None] * shares
    tokens = np.diff(np.floor((n_tok - 1)[:, None] * shares).astype(np.int64), axis=1)
    due_ns, first_ns, last_ns = ((each * 1e9).astype(np.int64) for each in (due_s, first_s, last_s))
    values = {
        "index": np.arange(n),
        "outcome": ["ok"] * n,
        **dict.fromkeys(("due_ns", "dispatched_ns", "connected_ns", "sent_ns"), due_ns),
        **dict.fromkeys(("headers_ns", "answer_ns"), first_ns),
        "closed_ns": last_ns,
        "token_ns": list((at_s * 1e9).astype(np.int64)),
        "token_n": list(np.column_stack([np.ones(n, np.int64), tokens])),
        **dict.fromkeys(("read_lag_ns", "read_error_ns"), [[0] * (LATER + 1)] * n),
        **dict.fromkeys(("planned_prompt_tok", "prompt_tok"), [16] * n),
        **dict.fromkeys(("planned_output_tok", "output_tok"), n_tok),
    }
    arrays = [pa.array(values.get(field.name, [None] * n), field.type) for field in tables.RECORDS]
    return pa.table(arrays, schema=tables.RECORDS)
