"""Whether text was held on its way: groups of events that the client itself did not make."""

from __future__ import annotations

from typing import Final

import numpy as np

from burstline.measure.record.columns import Columns
from burstline.measure.record.verdict import Reason

BUNCHED: Final = "bunched"
"""Code of whole events in groups, which may be the engine's own; the others make TPOT and ITL unreliable."""
_TOGETHER_S: Final = 1e-4
"""Events closer than this came together: in one read, or in segments of one write."""
_LEAST, _SHARE, _LONG = 10, 0.8, 8
"""How many groups a finding needs, which share must agree, and events of a reply that came at once."""
_OWN_SHARE: Final = 0.2
"""Of the time before a group: if the client may have slept longer, it may have made the group itself."""
_ADVICE: Final = (
    "Send the load to the engine directly, or switch buffering off on the way: nginx `proxy_buffering off`, "
    "`proxy_http_version 1.1`, or the header `X-Accel-Buffering: no`; HAProxy `option http-no-delay`; Ray "
    "Serve `stream_batching_interval_ms`."
)


def gathered(c: Columns) -> Reason | None:
    """What held text on its way, by how the events of the requests that succeeded arrived.

    An engine writes whole events. What fills buffers, or a link that is full, cuts them: the rest of an event
    comes with the next group. The last event of a read has no error bound, so a group whose last event has
    one ended within the next event.
    """
    apart_s = np.diff(c.event_s, prepend=-np.inf)
    opens = (apart_s > _TOGETHER_S) | ~c.follows
    n_gaps = np.count_nonzero(c.follows)
    if 2 * (len(opens) - np.count_nonzero(opens)) <= n_gaps:
        return None
    starts = np.flatnonzero(opens)
    ends = np.append(starts[1:], len(opens))
    n, is_first = ends - starts, ~c.follows[starts]
    is_last = np.append(is_first[1:], True)
    wait_s = np.where(is_first, c.per_event(c.first_s - c.sent_s)[starts], apart_s[starts])
    error_s = np.maximum.reduceat(c.event_error_ns, starts) / 1e9
    stamped = np.minimum.reduceat(np.minimum(c.event_lag_ns, c.event_error_ns), starts) >= 0
    sure = c.per_event(c.ok)[starts] & stamped & (error_s <= _OWN_SHARE * wait_s)
    if 2 * (n_joined := (n[sure] - 1).sum()) <= n_gaps:
        return None
    at_once, inner = sure & is_first & is_last & (n >= _LONG), sure & ~is_last & (n > 2)
    cut = inner & (c.event_error_ns[ends - 1] > 0)
    n_at_once, n_cut, n_long = (np.count_nonzero(x) for x in (at_once, cut, c.ok & (c.n_events >= _LONG)))
    n_agree, n_all = n_at_once + n_cut, max(n_at_once + np.count_nonzero(inner), n_long)
    if n_agree >= max(_LEAST, _SHARE * n_all) and 2 * n_long >= np.count_nonzero(c.ok):
        spoilt = "TPOT and ITL are not the engine's, and no SLO on them is judged"
        if n_at_once >= n_cut:
            text = f"All text of {n_at_once:,} of {n_long:,} replies came at once: {spoilt}."
            return Reason("held-to-end", text, _ADVICE)
        text = f"Text came {n[cut].mean():.3g} events at a time, cut within an event: a proxy fills buffers"
        return Reason("held-by-size", f"{text}, or a link is full. {spoilt}.", _ADVICE)
    share = f"{n_joined / n_gaps:.0%} of the events came with the one before"
    text = f"{share}: the server or a proxy writes several at once."
    return Reason(BUNCHED, text, f"Use TPOT instead of ITL. {_ADVICE}")
