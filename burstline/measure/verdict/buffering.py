"""What held text on its way to the client: a proxy, a timer or a full link, by how events arrived."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.measure.record.columns import LONG, Columns, Floats, Ints
from burstline.measure.record.verdict import Reason
from burstline.measure.stats.estimates import early_stopping_floor
from burstline.measure.stats.quantiles import quantile_of
from burstline.wording import time_text

BUNCHED: Final = "bunched"
"""Code of whole events in groups, which may be the engine's own; the others make TPOT and ITL unreliable."""
_TOGETHER_S, _LEAST, _SHARE, _OWN_SHARE, _FEW = 1e-4, 10, 0.8, 0.2, 0.1
"""Events closer than this came together: in one read, or in segments of one write. How many groups a finding
needs, and which share must agree; the share of the time before a group
up to which the client may have slept and not made the group itself, or groups may be uneven; the share of
events below which nothing gathers them."""


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
    whole, inner = sure & is_first & is_last & (n >= LONG), sure & ~is_last & (n > 2)
    cut = inner & (c.event_error_ns[starts + n - 1] > 0)
    n_silent = c.table.column("n_events").to_numpy() - c.n_events
    cut &= (n_silent <= np.bincount(of[cut], minlength=len(c)))[of]
    n_whole, n_cut, n_long = (np.count_nonzero(x) for x in (whole, cut, c.ok & (c.n_events >= LONG)))
    n_agree, n_all = n_whole + n_cut, max(n_whole + np.count_nonzero(inner), n_long)
    bunched = Reason.of(BUNCHED, share=share)
    if n_agree >= max(_LEAST, _SHARE * n_all) and 2 * n_long >= np.count_nonzero(c.ok):
        if n_whole < n_cut:
            return Reason.of("held-by-size", n=n[cut].mean())
        slope_s, unsure_s = _slope(n[whole], wait_s[whole])
        if slope_s - 3 * unsure_s > _TOGETHER_S:  # made one by one, then: something held them
            return Reason.of("held-to-end", n=n_whole, n_long=n_long)
        bunched = Reason.of("bunched.whole", n=n_whole, n_long=n_long)
    # A timer holds all but the end of a reply: its last events come sooner than those before them did.
    before = np.flatnonzero(sure & is_last & ~is_first) - 1
    before = before[sure[before] & ~is_first[before]]
    if len(before) >= _LEAST:
        step_s = wait_s[before] / n[before]
        low_s, early_s, high_s = np.quantile(n[before + 1] * step_s - wait_s[before + 1], (0.25, 0.5, 0.75))
        if early_s > max(_OWN_SHARE * np.median(step_s), 3 * (high_s - low_s) / len(before) ** 0.5):
            late_ms = np.median(wait_s[before]) * 1e3
            return Reason.of("held-by-time", n=n[before].mean(), late_ms=late_ms)
    # A full link sends one piece after another, of whichever reply: the time before each is as its size.
    order = np.argsort(c.event_s[starts])
    slope_s, unsure_s = _slope(n[order[1:]], np.diff(c.event_s[starts][order]))
    if len(order) > 5 * _LEAST and unsure_s * len(order) ** 0.5 < _OWN_SHARE * slope_s:
        return Reason.of("held-by-link", per_s=1 / slope_s)
    return bunched


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
    has_text, is_one = c.has_text, c.came_at_once
    if not (n_one := np.count_nonzero(is_one)):
        return None
    without = ""
    rest_s, all_s = ((c.first_s - c.origin_s)[of] for of in (has_text & ~is_one, has_text))
    enough = [p for p in (50, 90) if len(rest_s) >= early_stopping_floor(p / 100)]
    if enough:
        rest = " and ".join(f"p{p} is {time_text(quantile_of(rest_s, p / 100))}" for p in enough)
        with_them = f" ({time_text(quantile_of(all_s, enough[-1] / 100))} with them)"
        without = f"; without them TTFT {rest}{with_them}"
    return Reason.of("in-one-event", n=n_one, n_ok=np.count_nonzero(has_text), without=without)
