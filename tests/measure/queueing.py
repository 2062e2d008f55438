"""Open-loop runs that never happened: requests at a queue of eight servers with a textbook answer."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from burstline.measure.record import tables
from tests.truth.queue import departures

N_SERVERS = 8
MEAN_S = 0.2


def queued(load: float, n: int, seed: int, *, slow_start: int = 0, tokens: int = 5) -> pa.Table:
    """`n` Poisson arrivals at `load` times what the servers can take; gamma services of mean 0.2 s, cv 0.3.

    The first token comes 20 ms after service starts, the last when it ends. The first `slow_start` services
    take 0.5 s longer before their first token.
    """
    random = np.random.default_rng(seed)
    due_s = np.cumsum(random.exponential(MEAN_S / N_SERVERS / load, n))
    services_s = random.gamma(0.3**-2, MEAN_S * 0.3**2, n)
    extra_s = np.where(np.arange(n) < slow_start, 0.5, 0.0)
    left_s = departures(due_s, services_s + extra_s, N_SERVERS)
    first_s = left_s - services_s + 0.02 * random.lognormal(0, 0.2, n)
    return table(due_s, first_s, np.maximum(left_s, first_s + 1e-3), tokens)


def table(due_s, first_s, last_s, tokens: int) -> pa.Table:
    """Successes with tokens evenly between their first and their last."""
    n = len(due_s)
    token_ns = np.linspace(first_s, last_s, tokens, axis=1) * 1e9
    due_ns = (due_s * 1e9).astype(np.int64)
    ones = [[1] * tokens] * n
    columns = {
        "index": np.arange(n),
        "outcome": ["ok"] * n,
        **dict.fromkeys(("due_ns", "dispatched_ns", "connected_ns", "sent_ns"), due_ns),
        "headers_ns": token_ns[:, 0].astype(np.int64),
        "answer_ns": token_ns[:, 0].astype(np.int64),
        "closed_ns": token_ns[:, -1].astype(np.int64),
        "token_ns": list(token_ns.astype(np.int64)),
        "token_n": ones,
        "read_lag_ns": [[0] * tokens] * n,
        "read_error_ns": [[0] * tokens] * n,
        **dict.fromkeys(("planned_prompt_tok", "prompt_tok"), [16] * n),
        **dict.fromkeys(("planned_output_tok", "output_tok"), [tokens] * n),
    }
    return pa.table(
        [pa.array(columns.get(field.name, [None] * n), field.type) for field in tables.RECORDS],
        schema=tables.RECORDS,
    )
