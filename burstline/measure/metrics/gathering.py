"""Whether text was held on its way: groups of events that the client itself did not make."""

from __future__ import annotations

from typing import Final

import numpy as np

from burstline.measure.record.columns import Columns
from burstline.measure.record.verdict import Reason

BUNCHED: Final = "bunched"
"""Code of whole events in groups, which may be the engine's own; the others make TPOT and ITL unreliable."""
_TOGETHER_S, _LEAST, _SHARE, _LONG, _OWN_SHARE = 1e-4, 10, 0.8, 8, 0.2
"""Events closer than this came together: in one read, or in segments of one write. How many groups a finding
needs, which share must agree, and events of a reply that came at once; the share of the time before a group
up to which the client may have slept and not made the group itself."""
_ADVICE: Final = (
    "Send the load to the engine directly, or switch buffering off on the way: nginx `proxy_buffering off`, "
    "`proxy_http_version 1.1`, or the header `X-Accel-Buffering: no`; HAProxy `option http-no-delay`; Ray "
    "Serve `stream_batching_interval_ms`."
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
    if 2 * (len(apart_s) - len(starts)) <= n_gaps:
        return None
    n, of = np.diff(starts, append=len(apart_s)), c.per_event(np.arange(len(c)))[starts]
    is_first, is_last = ~c.follows[starts], ~np.append(c.follows, False)[starts + n]
    wait_s = np.where(is_first, (c.first_s - c.sent_s)[of], apart_s[starts])
    error_s = np.maximum.reduceat(c.event_error_ns, starts) / 1e9
    stamped = np.minimum.reduceat(np.minimum(c.event_lag_ns, c.event_error_ns), starts) >= 0
    sure = c.ok[of] & stamped & (error_s <= _OWN_SHARE * wait_s)
    if 2 * (n_joined := (n[sure] - 1).sum()) <= n_gaps:
        return None
    whole, inner = sure & is_first & is_last & (n >= _LONG), sure & ~is_last & (n > 2)
    cut = inner & (c.event_error_ns[starts + n - 1] > 0)
    n_silent = c.table.column("n_events").to_numpy() - c.n_events
    cut &= (n_silent <= np.bincount(of[cut], minlength=len(c)))[of]
    n_whole, n_cut, n_long = (np.count_nonzero(x) for x in (whole, cut, c.ok & (c.n_events >= _LONG)))
    n_agree, n_all = n_whole + n_cut, max(n_whole + np.count_nonzero(inner), n_long)
    text, use = f"{n_joined / n_gaps:.0%} of the events came with the one before", "TPOT instead of ITL"
    if n_agree >= max(_LEAST, _SHARE * n_all) and 2 * n_long >= np.count_nonzero(c.ok):
        spoilt = "TPOT and ITL are not the engine's, and no SLO on them is judged"
        if n_whole < n_cut:
            text = f"Text came {n[cut].mean():.3g} events at a time, cut within an event: a proxy fills"
            return Reason("held-by-size", f"{text} buffers, or a link is full. {spoilt}.", _ADVICE)
        text, use = f"All text of {n_whole:,} of {n_long:,} replies came at once", "E2E, not TPOT or ITL"
        x, y = n[whole] - n[whole].mean(), wait_s[whole] - wait_s[whole].mean()
        slope_s = (x * y).sum() / max((x * x).sum(), 1.0)
        noise_s2 = ((y - slope_s * x) ** 2).sum() / (len(x) - 2) / max((x * x).sum(), 1.0)
        if slope_s - 3 * noise_s2**0.5 > _TOGETHER_S:  # made one by one, then: something held them
            return Reason("held-to-end", f"{text}, longer ones later: {spoilt}.", _ADVICE)
    return Reason(BUNCHED, f"{text}: the server or a proxy writes several at once.", f"Use {use}. {_ADVICE}")
