"""Grades: how much late sends and late reads of the client changed each percentile.

What counts is the effect on that very percentile, never a percentile of the lag: if 1% of the requests left
1 ms late, no p99 need be wrong by 1 ms.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from burstline.measure.metrics.definitions import (
    METRICS,
    QUANTILES,
    Metric,
    gap_samples,
    gaps,
    latencies,
    samples_of,
)
from burstline.measure.record.columns import Columns, Floats, seconds_or_nan
from burstline.measure.record.verdict import Grade, Grades, PercentileGrade, is_unreliable, tolerance_s
from burstline.measure.stats.estimates import Absent, Figure, early_stopping_floor, label, measured
from burstline.measure.stats.quantiles import Samples, quantile_of

LEAST: Final = 10
"""Replies whose end was read in time that bound how late others can be."""


def most_moved(graded: Mapping[str, PercentileGrade] | None, canary_s: float | None = None) -> Figure | None:
    """The most by which late reading can have moved one of a metric's percentiles; None without grades.

    Not less than `canary_s`, how far the canary's events were from their true times in this run.
    """
    if not graded:
        return None
    known = [each.read_effect_s for each in graded.values() if each.read_effect_s is not None]
    known += [canary_s] if known and canary_s is not None else []
    why = "the effect of late reads is unknown for every percentile"
    return measured(max(known, default=None), "s", why, len(known))


def moved_beyond(without: Figure, effect_s: float) -> bool:
    """Whether late sends moved a percentile beyond its interval `without` them; beyond 5% if it has none."""
    if isinstance(without, Absent) or without.high is None:
        return isinstance(without, Absent) or is_unreliable(without.point, effect_s)
    return without.point + effect_s > without.high


_OF_THE_SERVER: Final = (
    "ttft", "tpot", "itl", "e2e", "ttft_service", "e2e_service", "ttfa", "icl", "first_event", "headers",
)  # fmt: skip
_FROM_DUE: Final = ("ttft", "e2e", "ttfa")


def grades(c: Columns, beyond_s: float = 0.0) -> dict[str, dict[str, PercentileGrade]]:
    """The grade of every percentile of every metric of the server that these requests support.

    Each event may have come before its stamp by its own bound and `beyond_s`, by which the canary's true
    times lay outside such bounds.
    """
    if not c.ok.any():
        return {name: {} for name in _OF_THE_SERVER}
    error_s = seconds_or_nan(c.event_error_ns)
    error_s += beyond_s
    error_s[np.isnan(error_s)] = np.inf
    return {name: _graded(name, METRICS[name], c, error_s) for name in _OF_THE_SERVER}


def held(graded: Grades) -> Grades:
    """The grades where text was held on its way: what lies between events is unreliable."""
    bad, rows = Grade.UNRELIABLE, [(name, graded[name].items()) for name in ("tpot", "itl", "icl")]
    spoilt = {k: {p: replace(g, grade=bad, held=g.grade != bad or None) for p, g in row} for k, row in rows}
    return {**graded, **spoilt}


def _graded(name: str, metric: Metric, c: Columns, error_s: Floats) -> dict[str, PercentileGrade]:
    ranked = samples_of(metric, c).ranked_for(QUANTILES)
    values = {p: ranked.quantile(p) for p in QUANTILES if ranked.total >= early_stopping_floor(p)}
    del ranked  # a large run's are let go before the next are made
    if metric.pooled:  # one after the other: of a large run they are most of the memory
        ends = [_quantiles(_gap_bound(name, c, error_s, least=least), values) for least in (True, False)]
    else:
        ends = [_quantiles(samples, values) for samples in _bounds(name, metric, c, error_s)]
    found = {}
    for p, value in values.items():
        if not math.isfinite(value):
            continue
        moved = [_apart(value, end[p]) for end in ends]
        read_s = None if None in moved else max(each for each in moved if each is not None)
        send_s, as_sent_s = _send_effect(name, metric, c, p)
        is_late = send_s is not None and send_s > tolerance_s(value)
        grade = Grade.AS_SENT if is_late else Grade.OK
        grade = Grade.UNRELIABLE if is_unreliable(value, read_s) else grade
        found[label(p)] = PercentileGrade(grade, send_s, read_s, as_sent_s)
    return found


def _send_effect(name: str, metric: Metric, c: Columns, p: float) -> tuple[float | None, float | None]:
    """|Q(from due) - Q(from the send)|, exactly, and Q(from the send)."""
    if name not in _FROM_DUE:
        return 0.0, None
    values = latencies(metric, c)
    late_s = np.nan_to_num(c.sent_s - c.due_s)
    by_due, by_send = (quantile_of(values + c.origin_s - from_s, p) for from_s in (c.due_s, c.due_s + late_s))
    return _apart(by_due, by_send), by_send if math.isfinite(by_send) else None


def _bounds(name: str, metric: Metric, c: Columns, error_s: Floats) -> tuple[Samples, Samples]:
    """The least and the most that every request's value can have been, were all errors as bad as possible."""
    values, some = latencies(metric, c), c.ok & (c.n_events > 0)
    first_error_s, last_error_s = np.zeros(len(c)), np.zeros(len(c))
    first_error_s[some] = error_s[c.starts[:-1][some]]
    last_error_s[some] = np.minimum(error_s[c.starts[1:][some] - 1], _most_after_s(c, error_s))
    if name == "tpot":
        n_later = c.output_tok - c.first_n
        n_later = np.where(n_later > 0, n_later, 1)  # failed, or not defined: nothing to move
        low, high = values - last_error_s / n_later, values + first_error_s / n_later
        return Samples.per_request(low), Samples.per_request(high)
    early_s = last_error_s if name.startswith("e2e") else first_error_s
    return Samples.per_request(values - early_s), Samples.per_request(values)


def _most_after_s(c: Columns, error_s: Floats) -> float:
    """How long after its last token a reply ends at most, by those read in time; infinite where few were."""
    some = c.ok & (c.n_events > 0)
    last = c.starts[1:][some] - 1
    after_s = c.closed_s[some] - c.event_s[last] + error_s[last]
    in_time = seconds_or_nan(c.event_lag_ns[last]) + error_s[last] <= tolerance_s(0.0)
    after_s = after_s[in_time & (after_s >= 0)]
    return float(after_s.max()) if len(after_s) >= LEAST else math.inf


def _gap_bound(name: str, c: Columns, error_s: Floats, *, least: bool) -> Samples:
    """The same of gaps, each between two events that may both have come earlier."""
    came = gaps(c, counted=name != "icl")
    own = came.ends_one if least else np.append(came.ends_one[1:], False)
    value = error_s[own]
    if least:
        np.subtract(came.value, value, out=value)
        np.maximum(value, 0, out=value)
    else:
        value += came.value
    value /= came.weight
    return gap_samples(c, value, came.weight, came.counts)


def _quantiles(samples: Samples, ps: Collection[float]) -> dict[float, float]:
    ranked = samples.ranked_for(ps)
    return {p: ranked.quantile(p) for p in ps}


def _apart(a: float, b: float) -> float | None:
    return abs(a - b) if math.isfinite(a) and math.isfinite(b) else None
