"""Grades: how far the client moved each percentile of each metric, by sending late and by reading late.

What counts is the effect on that very percentile, never a percentile of the lag: if 1% of the requests left
1 ms late, no p99 need be wrong by 1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Final

import numpy as np

from burstline.loadgen.metrics.definitions import (
    METRICS,
    QUANTILES,
    Metric,
    gap_samples,
    gaps,
    latencies,
    samples_of,
)
from burstline.loadgen.record.columns import Columns, Floats, seconds_or_nan
from burstline.loadgen.record.verdict import Grade, PercentileGrade, tolerance_s
from burstline.loadgen.stats.estimates import Figure, early_stopping_floor, label, measured
from burstline.loadgen.stats.quantiles import Samples, quantile_of


def most_moved(graded: Mapping[str, PercentileGrade] | None) -> Figure | None:
    """The most by which late reading can have moved one of a metric's percentiles; None without grades."""
    if not graded:
        return None
    known = [each.read_effect_s for each in graded.values() if each.read_effect_s is not None]
    return measured(max(known, default=None), "s", "no percentile has a bound of its reading", len(known))


_OF_THE_SERVER: Final = ("ttft", "tpot", "itl", "e2e", "ttft_service", "e2e_service", "ttfa", "icl")
_FROM_DUE: Final = ("ttft", "e2e", "ttfa")


def grades(c: Columns) -> dict[str, dict[str, PercentileGrade]]:
    """The grade of every percentile of every metric of the server that these requests support."""
    if not c.ok.any():
        return {name: {} for name in _OF_THE_SERVER}
    first_error_s, last_error_s = _errors_of_ends(c)
    return {name: _graded(name, METRICS[name], c, first_error_s, last_error_s) for name in _OF_THE_SERVER}


def _graded(
    name: str, metric: Metric, c: Columns, first_error_s: Floats, last_error_s: Floats
) -> dict[str, PercentileGrade]:
    ranked = samples_of(metric, c).ranked_for(QUANTILES)
    values = {p: ranked.quantile(p) for p in QUANTILES if ranked.total >= early_stopping_floor(p)}
    del ranked  # a large run's are let go before the next are made
    if metric.pooled:  # one after the other: of a large run they are most of the memory
        ends = [_quantiles(_gap_bound(name, c, least=least), values) for least in (True, False)]
    else:
        bounds = _bounds(name, metric, c, first_error_s, last_error_s)
        ends = [_quantiles(samples, values) for samples in bounds]
    found = {}
    for p, value in values.items():
        if not math.isfinite(value):
            continue
        moved = [_apart(value, end[p]) for end in ends]
        read_s = None if None in moved else max(each for each in moved if each is not None)
        send_s, as_sent_s = _send_effect(name, metric, c, p)
        found[label(p)] = PercentileGrade(_grade(value, send_s, read_s), send_s, read_s, as_sent_s)
    return found


def _grade(value_s: float, send_s: float | None, read_s: float | None) -> Grade:
    allowed_s = tolerance_s(value_s)
    if read_s is not None and read_s > allowed_s:
        return Grade.UNRELIABLE
    return Grade.AS_SENT if send_s is not None and send_s > allowed_s else Grade.OK


def _send_effect(name: str, metric: Metric, c: Columns, p: float) -> tuple[float | None, float | None]:
    """|Q(from due) - Q(from the send)|, exactly, and Q(from the send)."""
    if name not in _FROM_DUE:
        return 0.0, None
    values = latencies(metric, c)
    late_s = np.nan_to_num(c.sent_s - c.due_s)
    by_due, by_send = (quantile_of(values + c.origin_s - from_s, p) for from_s in (c.due_s, c.due_s + late_s))
    return _apart(by_due, by_send), by_send if math.isfinite(by_send) else None


def _bounds(
    name: str, metric: Metric, c: Columns, first_error_s: Floats, last_error_s: Floats
) -> tuple[Samples, Samples]:
    """The least and the most that every request's value can have been, were all errors as bad as possible."""
    values = latencies(metric, c)
    if name == "tpot":
        n_later = c.output_tok - c.first_n
        n_later = np.where(n_later > 0, n_later, np.inf)  # failed, or not defined: nothing to move
        return (
            Samples.per_request(values - last_error_s / n_later),
            Samples.per_request(values + first_error_s / n_later),
        )
    early_s = last_error_s if name.startswith("e2e") else first_error_s
    return Samples.per_request(values - early_s), Samples.per_request(values)


def _gap_bound(name: str, c: Columns, *, least: bool) -> Samples:
    """The same of gaps, each between two events that may both have come earlier."""
    came = gaps(c, counted=name != "icl")
    own = came.ends_one if least else np.append(came.ends_one[1:], False)
    value = seconds_or_nan(c.event_error_ns[own])
    if least:
        np.subtract(came.value, value, out=value)
        np.maximum(value, 0, out=value)
    else:
        value += came.value
    value /= came.n
    return gap_samples(c, value, came.n, came.counts)


def _errors_of_ends(c: Columns) -> tuple[Floats, Floats]:
    """By how much each request's first and last token may have come earlier; 0 where it has none."""
    error_s, some = c.event_error_s, c.n_events > 0
    first_s, last_s = np.zeros(len(c)), np.zeros(len(c))
    first_s[some], last_s[some] = error_s[c.starts[:-1][some]], error_s[c.starts[1:][some] - 1]
    return first_s, last_s


def _quantiles(samples: Samples, ps: Collection[float]) -> dict[float, float]:
    """NaN where an error is unknown (NaN sorts last): then there is no bound."""
    ranked = samples.ranked_for(ps)
    known = len(ranked.value) and not math.isnan(ranked.value[-1])
    return {p: ranked.quantile(p) if known else math.nan for p in ps}


def _apart(a: float, b: float) -> float | None:
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else None
