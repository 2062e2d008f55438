"""Grades: how much late sends and late reads of the client changed each percentile, or text that was held.

What counts is the effect on that very percentile, never a percentile of the lag: if 1% of the requests left
1 ms late, no p99 need be wrong by 1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.definitions import (
    METRICS,
    QUANTILES,
    Metric,
    gap_samples,
    gaps,
    latencies,
    samples_of,
)
from burstline.measure.record.columns import Columns, Floats, Ints, seconds_or_nan
from burstline.measure.record.verdict import (
    Grade,
    Grades,
    PercentileGrade,
    Reason,
    is_unreliable,
    tolerance_s,
)
from burstline.measure.stats.estimates import Absent, Figure, early_stopping_floor, label, measured
from burstline.measure.stats.quantiles import Samples, quantile_of


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


def widened(figure: Figure, moved: float | None) -> Figure:
    """The number with its interval widened by what late reading may have moved it, if that matters."""
    if moved is None or isinstance(figure, Absent) or moved <= tolerance_s(figure.point):
        return figure
    return replace(
        figure,
        low=None if figure.low is None else max(figure.low - moved, 0.0),
        high=None if figure.high is None else figure.high + moved,
    )


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
    return float(after_s.max()) if len(after_s) >= _LEAST else math.inf


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


BUNCHED: Final = "bunched"
"""Code of whole events in groups, which may be the engine's own; the others make TPOT and ITL unreliable."""
_TOGETHER_S, _LEAST, _SHARE, _LONG, _OWN_SHARE, _FEW = 1e-4, 10, 0.8, 8, 0.2, 0.1
"""Events closer than this came together: in one read, or in segments of one write. How many groups a finding
needs, which share must agree, and events of a reply that came at once; the share of the time before a group
up to which the client may have slept and not made the group itself, or groups may be uneven; the share of
events below which nothing gathers them."""
_ADVICE: Final = (
    "Send the load to the engine directly, or switch buffering off on the way: nginx `proxy_buffering off`, "
    "`proxy_http_version 1.1`, or the header `X-Accel-Buffering: no`; HAProxy `option http-no-delay`; Ray "
    "Serve `stream_batching_interval_ms`; in a server of your own set TCP_NODELAY, or text waits for 40 ms."
)


def gathered(c: Columns) -> Reason | None:
    """What held text on its way, by how the events of the requests that succeeded arrived.

    An engine writes whole events. What fills buffers, or a link that is full, cuts them: the rest of an event
    comes with the next group. The last event of a read has no error bound, so a group whose last event has
    one ended within the next event, or with one that carries no token, if the reply has so many of them.
    """
    apart_s = np.diff(c.event_s, prepend=-np.inf)
    starts = np.flatnonzero((apart_s > _TOGETHER_S) | ~c.follows)
    n_gaps = np.count_nonzero(c.follows)
    if len(apart_s) - len(starts) <= _FEW * n_gaps:
        return None
    n, of = np.diff(starts, append=len(apart_s)), c.per_event(np.arange(len(c)))[starts]
    is_first, is_last = ~c.follows[starts], ~np.append(c.follows, False)[starts + n]
    wait_s = np.where(is_first, (c.first_s - c.sent_s)[of], apart_s[starts])
    error_s = np.maximum.reduceat(c.event_error_ns, starts) / 1e9
    stamped = np.minimum.reduceat(np.minimum(c.event_lag_ns, c.event_error_ns), starts) >= 0
    sure = c.ok[of] & stamped & (error_s <= _OWN_SHARE * wait_s)
    share = (n[sure] - 1).sum() / n_gaps
    if share <= _FEW or (share <= 0.5 and not _has_beat(n, wait_s, sure & ~is_first & ~is_last)):
        return None
    whole, inner = sure & is_first & is_last & (n >= _LONG), sure & ~is_last & (n > 2)
    cut = inner & (c.event_error_ns[starts + n - 1] > 0)
    n_silent = c.table.column("n_events").to_numpy() - c.n_events
    cut &= (n_silent <= np.bincount(of[cut], minlength=len(c)))[of]
    n_whole, n_cut, n_long = (np.count_nonzero(x) for x in (whole, cut, c.ok & (c.n_events >= _LONG)))
    n_agree, n_all = n_whole + n_cut, max(n_whole + np.count_nonzero(inner), n_long)
    text, use = f"{share:.0%} of the events came with the one before", "TPOT instead of ITL"
    spoilt = "TPOT and ITL are not the engine's, and no SLO on them is judged"
    if n_agree >= max(_LEAST, _SHARE * n_all) and 2 * n_long >= np.count_nonzero(c.ok):
        if n_whole < n_cut:
            text = f"Text came {n[cut].mean():.3g} events at a time, cut within an event: a proxy fills"
            return Reason("held-by-size", f"{text} buffers, or a link is full. {spoilt}.", _ADVICE)
        text, use = f"All text of {n_whole:,} of {n_long:,} replies came at once", "E2E, not TPOT or ITL"
        slope_s, unsure_s = _slope(n[whole], wait_s[whole])
        if slope_s - 3 * unsure_s > _TOGETHER_S:  # made one by one, then: something held them
            return Reason("held-to-end", f"{text}, longer ones later: {spoilt}.", _ADVICE)
    # A timer holds all but the end of a reply: its last events come sooner than those before them did.
    before = np.flatnonzero(sure & is_last & ~is_first) - 1
    before = before[sure[before] & ~is_first[before]]
    if len(before) >= _LEAST:
        step_s = wait_s[before] / n[before]
        low_s, early_s, high_s = np.quantile(n[before + 1] * step_s - wait_s[before + 1], (0.25, 0.5, 0.75))
        if early_s > max(_OWN_SHARE * np.median(step_s), 3 * (high_s - low_s) / len(before) ** 0.5):
            text = f"Text came {n[before].mean():.3g} events at a time, the last sooner: a timer holds it"
            late = f"TTFT can be {np.median(wait_s[before]) * 1e3:.3g} ms late"
            return Reason("held-by-time", f"{text}. {late}; {spoilt}.", _ADVICE)
    # A full link sends one piece after another, of whichever reply: the time before each is as its size.
    order = np.argsort(c.event_s[starts])
    slope_s, unsure_s = _slope(n[order[1:]], np.diff(c.event_s[starts][order]))
    if len(order) > 5 * _LEAST and unsure_s * len(order) ** 0.5 < _OWN_SHARE * slope_s:
        text = f"Text came reply after reply at a constant {1 / slope_s:,.0f} events/s: a link is full"
        return Reason("held-by-link", f"{text}. {spoilt}.", "Use a faster link, or lower the load.")
    return Reason(BUNCHED, f"{text}: the server or a proxy writes several at once.", f"Use {use}. {_ADVICE}")


def _has_beat(n: Ints, wait_s: Floats, inner: NDArray[np.bool_]) -> bool:
    """Whether groups of several events came as evenly as single ones; after a stall they come later."""
    joined_s, single_s = wait_s[inner & (n > 1)], wait_s[inner & (n == 1)]
    if len(joined_s) < _LEAST:
        return False
    low_s, usual_s, high_s = np.quantile(joined_s, (0.25, 0.5, 0.75))
    off_s = abs(np.median(single_s) - usual_s) if len(single_s) >= _LEAST else 0.0
    return bool(max(high_s - low_s, off_s) <= _OWN_SHARE * usual_s)


def _slope(x: Ints, y_s: Floats) -> tuple[float, float]:
    """By how much y rises with x, and the standard error of that."""
    x_off, y_off = x - x.sum() / max(len(x), 1), y_s - y_s.sum() / max(len(x), 1)
    spread = max((x_off * x_off).sum(), 1.0)
    slope = (x_off * y_off).sum() / spread
    return float(slope), float((((y_off - slope * x_off) ** 2).sum() / max(len(x) - 2, 1) / spread) ** 0.5)


def in_one_event(c: Columns) -> Reason | None:
    """The replies of which one event brought all text, or nearly all: their TTFT is of the whole reply."""
    has_text = c.ok & ~np.isnan(c.text_s)
    is_one = has_text & (c.shown_tok >= _LONG) & (c.first_n >= 0.9 * c.shown_tok)
    if not (n_one := np.count_nonzero(is_one)):
        return None
    text = f"{n_one:,} of {np.count_nonzero(has_text):,} replies came in one event: their TTFT is of all text"
    rest_s, all_s = ((c.first_s - c.origin_s)[of] for of in (has_text & ~is_one, has_text))
    if len(rest_s):
        p50_s, p90_s, with_s = quantile_of(rest_s, 0.5), quantile_of(rest_s, 0.9), quantile_of(all_s, 0.9)
        text += f"; without them TTFT p50 is {p50_s:.3g} s and p90 {p90_s:.3g} s ({with_s:.3g} s with them)"
    return Reason("in-one-event", f"{text}.", "No TPOT or ITL of theirs shows the engine: use their E2E.")
