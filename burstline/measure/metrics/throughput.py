"""Rates and counts of a run as a whole: throughput, goodput, concurrency, stalls, and how a burst drains.

Within a window of steady state, intervals come from blocks of time: neighbours in time share one queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.definitions import METRICS, STALL_FACTOR, STALL_FLOOR_S, gaps, ttft
from burstline.measure.record.columns import Columns, Floats, Ints, seconds_or_nan
from burstline.measure.record.record import Outcome
from burstline.measure.record.summary import Burst, Concurrency, Stalls, Throughput
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.stats.estimates import LEVEL, ONE_RUN, Absent, Estimate, Figure, measured
from burstline.measure.stats.figure import known, noted
from burstline.measure.stats.quantiles import quantile_of
from burstline.measure.stats.serial_correlation import LEAST_BLOCKS, rate_interval, ratio_interval

NO_SUCCESS = Absent("no request succeeded", "no-success")
NO_LATER_SUCCESS = replace(NO_SUCCESS, reason="no request after the warm-up succeeded")
NO_LENGTH = Absent("the window has no length", "no-window")
UNCOUNTED = Absent("the server did not count its tokens", "not-counted")
BINS_A_BLOCK: Final = 8
CROWDED: Final = 0.75
"""To at most this share of the requests in flight replies stream where streams are the limit."""
RATES: Final = ("output_tok_per_s", "input_tok_per_s", "total_tok_per_s", "requests_per_s")


@dataclass(frozen=True, slots=True)
class Window:
    """From when until when things count, in seconds from the run's start: after `start_s`, up to `end_s`.

    The window of a closed loop starts with the end of a request. Counting that end would add one.
    """

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """What a load keeps running: requests, or whole sessions with their pauses, one entry each.

    `start_s` is when the first request was due, infinite where it was never sent, `end_s` when the last one
    was over, infinite of what was cut off. `name` numbers the requests or sessions, ascending: request i of
    the plan is a part of `session[i]`, or of itself.
    """

    start_s: Floats
    end_s: Floats
    name: Ints
    session: Ints | None = None

    @classmethod
    def of(cls, c: Columns, session: Ints | None = None) -> Lives:
        """Of all requests that were to be sent, also of those that were abandoned."""
        name, own = np.unique(_names(c, session), return_inverse=True)
        start_s, end_s = np.full(len(name), np.inf), np.full(len(name), -np.inf)
        np.minimum.at(start_s, own, np.where(np.isnan(c.dispatched_s), np.inf, c.due_s))
        over_s = c.over_s
        np.maximum.at(end_s, own, np.where(np.isnan(over_s), np.inf, over_s))
        return cls(start_s, end_s, name, session)

    @property
    def begun_s(self) -> Floats:
        return self.start_s[np.isfinite(self.start_s)]

    @property
    def stays_s(self) -> Floats:
        ended = np.isfinite(self.end_s)
        return self.end_s[ended] - self.start_s[ended]

    def sums(self, c: Columns, amount: Floats) -> Floats:
        """An amount of each of these requests, summed for each life."""
        own = np.searchsorted(self.name, _names(c, self.session))
        return np.bincount(own, weights=amount, minlength=len(self.name)).astype(np.float64)


def _names(c: Columns, session: Ints | None) -> Ints:
    return c.index if session is None else session[c.index]


def whole_run(c: Columns) -> Window | None:
    """From the first request sent until the last was over, if it failed too; None where none succeeded."""
    if not c.ok.any():
        return None
    return Window(float(np.nanmin(c.sent_s)), float(np.nanmax(c.over_s)))


def throughputs(c: Columns) -> Throughput:
    return Throughput(**{name: _over_run(c, each, METRICS[name].unit) for name, each in _amounts(c).items()})


def _amounts(c: Columns) -> dict[str, Floats]:
    return {
        "output_tok_per_s": c.output_tok,
        "input_tok_per_s": prompt_tok(c),
        "total_tok_per_s": c.output_tok + prompt_tok(c),
        "requests_per_s": np.ones(len(c)),
    }


def good_rates(c: Columns, met: NDArray[np.bool_]) -> tuple[Figure, Figure]:
    tokens = np.where(met, c.output_tok, 0.0)
    return _over_run(c, met.astype(np.float64), "1/s"), _over_run(c, tokens, "tok/s")


def _over_run(c: Columns, amount: Floats, unit: str) -> Figure:
    """The successes' amount per second of the whole run; `amount` is per request.

    Without an interval: in a burst no block of time is like another, and requests drawn again would only end
    earlier than the last did, so that the interval would begin at the point.
    """
    window = whole_run(c)
    if window is None:
        return NO_SUCCESS
    if window.length_s <= 0:
        return NO_LENGTH
    total = float(amount[c.ok].sum())
    return UNCOUNTED if np.isnan(total) else _once(total / window.length_s, unit, int(c.ok.sum()))


def throughputs_in(
    c: Columns,
    window: Window,
    block_s: float,
    lives: Lives | None = None,
    n_cosines: int | None = None,
    too_short: str | None = None,
) -> Throughput:
    """Rates of work within the window: each token and each completion when it came.

    `block_s` is the least time over which neighbours are taken to depend on each other. The intervals of a
    closed loop come from so many cosines of its `lives`, unless it is `too_short` for that.
    """
    ok, own = c.ok, c.per_event(c.ok)
    output = _binned(window, block_s, c.event_s[own], c.event_n[own])
    given = _binned(window, block_s, c.first_s[ok], prompt_tok(c)[ok])
    counted, given_counted = (not np.isnan(n[ok]).any() for n in (c.output_tok, prompt_tok(c)))
    requests = _binned(window, block_s, c.last_s[ok], np.ones(int(ok.sum())))
    binned = {
        "output_tok_per_s": [output] if counted else None,
        "input_tok_per_s": [given] if given_counted else None,
        "total_tok_per_s": [output, given] if counted and given_counted else None,
        "requests_per_s": [requests],
    }
    rates = {
        name: UNCOUNTED if each is None else _rate(window, block_s, each, METRICS[name].unit)
        for name, each in binned.items()
    }
    if lives is not None:
        for name, amount in _amounts(c).items():
            sums = lives.sums(c, np.where(ok, amount, 0.0))
            rates[name] = _by_lives(lives, sums, window, n_cosines, too_short, rates[name])
    return Throughput(**rates)


def _by_lives(
    lives: Lives, amount: Floats, window: Window, n_cosines: int | None, too_short: str | None, figure: Figure
) -> Figure:
    """A closed loop's rate with the interval that its lives give: each brings an `amount`, or none."""
    ended = np.flatnonzero((lives.end_s > window.start_s) & (lives.end_s <= window.end_s))
    if isinstance(figure, Absent) or not len(ended):
        return figure
    ended = ended[np.argsort(lives.start_s[ended], kind="stable")]
    if n_cosines is None:
        return Estimate(figure.point, None, None, None, figure.n, figure.unit, too_short)
    factors = ratio_interval(amount[ended], lives.end_s[ended] - lives.start_s[ended], n_cosines)
    low, high = (figure.point * factor for factor in factors)
    note = f"1 run; from the {'requests' if lives.session is None else 'sessions'} that ended"
    return Estimate(figure.point, low, high, LEVEL, figure.n, figure.unit, note)


def good_rates_in(
    c: Columns, window: Window, met: NDArray[np.bool_], share: Figure, served: Throughput
) -> tuple[Figure, Figure]:
    """Good requests that ended in the window, and their tokens that arrived in it, per second.

    They are a `share` of what was `served`, and as uncertain as both: a crowd of misses that did not come, or
    came once, is in the share's interval only.
    """
    own = c.per_event(met)
    at_s, amount = (c.last_s[met], c.event_s[own]), (np.ones(int(met.sum())), c.event_n[own])
    requests, tokens = (
        _share_of(rate, share, float(_binned(window, window.length_s, *each)[0].sum()) / window.length_s)
        for rate, *each in zip((served.requests_per_s, served.output_tok_per_s), at_s, amount, strict=True)
    )
    return requests, UNCOUNTED if np.isnan(c.output_tok[met]).any() else tokens


def _share_of(rate: Figure, share: Figure, point: float) -> Figure:
    """The part of a rate that is good: `point`, with the errors of both, relative, as those of a product."""
    if isinstance(rate, Absent) or isinstance(share, Absent):
        return rate if isinstance(rate, Absent) else share
    if None in (rate.low, rate.high, share.low, share.high):
        return replace(rate, point=point)
    ends = [
        math.hypot(*(math.log(each.point / end) if end and each.point else math.inf for each, end in both))
        for both in (((rate, rate.low), (share, share.low)), ((rate, rate.high), (share, share.high)))
    ]
    low, high = point * math.exp(-ends[0]), point * math.exp(ends[1])
    if not point:
        low, high = 0.0, float(rate.high or 0) * float(share.high or 0)
    return replace(rate, point=point, low=low, high=high, note="1 run; from throughput and attainment")


def _edges(window: Window, block_s: float) -> Floats:
    n_bins = max(1, math.floor(window.length_s / block_s * BINS_A_BLOCK))
    return np.linspace(window.start_s, window.end_s, n_bins + 1)


def _binned(window: Window, block_s: float, at_s: Floats, amount: NDArray[Any]) -> tuple[Floats, int]:
    """The amount per bin of a window, and the number of arrivals."""
    inside = (at_s > window.start_s) & (at_s <= window.end_s)
    amounts = np.histogram(at_s[inside], _edges(window, block_s), weights=amount[inside])[0]
    return amounts.astype(np.float64), int(inside.sum())


def _rate(window: Window, block_s: float, binned: Sequence[tuple[Floats, int]], unit: str) -> Figure:
    if window.length_s < block_s:
        return Absent(f"the window of {window.length_s:.2g} s is too short: {_too_short(block_s)}")
    amounts, n = np.sum([each for each, _ in binned], axis=0), sum(n for _, n in binned)
    interval = rate_interval(amounts, np.diff(_edges(window, block_s)), BINS_A_BLOCK)
    point = float(amounts.sum()) / window.length_s
    if interval is None:
        return Estimate(point, None, None, None, n, unit, _too_short(block_s))
    return Estimate(point, *interval, LEVEL, n, unit, "1 run; from blocks of time")


def _too_short(block_s: float) -> str:
    return f"an interval needs {LEAST_BLOCKS} blocks of {block_s:.2g} s (1 s and twice the mean E2E or more)"


def read_error(c: Columns, window: Window | None, beyond_s: float) -> Figure:
    """The share of each rate by which late reads may have changed it.

    Each event may have come earlier by its own bound and `beyond_s`: then it may have come before an edge of
    the window, or be an edge that moves.
    """
    if window is None or window.length_s <= 0:
        return NO_LENGTH
    own, some = c.per_event(c.ok), c.ok & (c.n_events > 0)
    error_s = np.nan_to_num(seconds_or_nan(c.event_error_ns), nan=np.inf) + beyond_s
    last = c.starts[1:][some] - 1
    edges, shares = (window.start_s, window.end_s), []
    for at_s, n, late_s in (
        (c.event_s[own], c.event_n[own], error_s[own]),
        (c.event_s[last], np.ones(len(last)), error_s[last]),
    ):
        crossed = [float(n[(at_s > edge) & (at_s - late_s <= edge)].sum()) for edge in edges]
        total = float(n[(at_s > edges[0]) & (at_s <= edges[1])].sum())
        late = sum(float(late_s[at_s == edge].max(initial=0.0)) for edge in edges)
        shares.append((max(crossed) / total if total else math.inf) + late / window.length_s)
    return measured(max(shares), "1", "the effect of late reads on the rates is unknown", len(last))


def prompt_tok(c: Columns) -> Floats:
    """Prompt tokens by the server's count, by the plan's where it gave none; NaN where neither knows."""
    planned = np.where(c.planned_prompt_tok > 0, c.planned_prompt_tok, np.nan)
    return np.where(np.isnan(c.prompt_tok), planned, c.prompt_tok)


def concurrency(c: Columns, window: Window | None) -> Concurrency:
    """Requests in flight within the window, [sent, closed), by sweep line."""
    known = ~np.isnan(c.sent_s) & ~np.isnan(c.closed_s)
    if window is None or window.length_s <= 0 or not known.any():
        return Concurrency.absent(Absent("no request was sent and closed"))
    inside = known & (c.sent_s < window.end_s) & (c.closed_s > window.start_s)
    sent_s, closed_s = c.sent_s[inside], c.closed_s[inside]
    start_s, end_s = np.maximum(sent_s, window.start_s), np.minimum(closed_s, window.end_s)
    at_s, in_flight = in_flight_steps(start_s, end_s)
    mean = float((in_flight[:-1] * np.diff(at_s)).sum() / window.length_s)
    n, reason = len(sent_s), "nothing was in flight in the window"
    return Concurrency(
        mean=measured(mean if n else None, "requests", reason, n),
        max=measured(float(in_flight.max()) if n else None, "requests", reason, n),
        open_after_fraction=_open_after(c),
        streaming_max=_most_streams(c, inside, float(in_flight.max(initial=0.0))),
    )


def _most_streams(c: Columns, inside: NDArray[np.bool_], most: float) -> Figure | None:
    """The most replies that streamed at once, where that is a limit: as many did (one fewer, of five or more)
    for half of the time in which others waited for their first token."""
    some = inside & ~np.isnan(c.first_s + c.last_s)
    at_s = np.concatenate([each[some] for each in (c.sent_s, c.first_s, c.last_s)])
    order, n = np.argsort(at_s, kind="stable"), int(some.sum())
    waiting, streaming = (np.repeat(step, n)[order].cumsum()[:-1] for step in ((1, -1, 0), (0, 1, -1)))
    at_once, length_s = int(streaming.max(initial=0)), np.diff(at_s[order]) * (waiting > 0)
    held_s = length_s[streaming >= at_once - (at_once >= 5)].sum()
    if 0 < at_once <= CROWDED * most and held_s > length_s.sum() / 2:
        return measured(float(at_once), "requests", "", n)
    return None


def _open_after(c: Columns) -> Figure:
    """The share of the time of whole replies that passed behind their last token: no latency holds it."""
    whole = c.ok & ~np.isnan(c.last_s + c.closed_s + c.sent_s)
    behind_s, all_s = (float((c.closed_s - since_s)[whole].sum()) for since_s in (c.last_s, c.sent_s))
    return measured(behind_s / all_s if all_s else None, "1", "no request succeeded", int(whole.sum()))


def server_queue(watched: Telemetry) -> dict[str, Any]:
    """How many requests ran and waited in the server while the load ran, by its own gauges; on average by its
    sum of their waits, where it has one, over the load's length (Little's law)."""
    (at_s, waiting), (since_s, running) = (watched.during("engine", name) for name in ("waiting", "running"))
    mean: Figure = watched.absent("engine", "waiting")
    waited_s = watched.grown("engine", "queue_sum", "s")
    if isinstance(waited_s, Estimate) and watched.length_s:
        mean = measured(waited_s.point / watched.length_s, "requests", "", waited_s.n)
    elif len(waiting) > 1:
        mean = measured(float(waiting.mean()), "requests", "", len(waiting))
        mean = noted(mean, f"the mean of {len(waiting)} readings of its gauge")
    full = np.interp(at_s[waiting > 0], since_s, running) >= 0.9 * running.max() if len(running) else ()
    most = watched.most("waiting", "requests")
    if (known(most) or 0) < (known(mean) or 0) and isinstance(most, Estimate):
        most = Absent("the readings of its gauge missed the longest queue")
    return {
        "server_running_max": watched.most("running", "requests"),
        "server_waiting_max": most,
        "server_waiting_mean": mean,
        "server_full_fraction": measured(float(np.mean(full)), "1", "", len(full)) if len(full) else None,
    }


def in_flight_steps(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """When the number in flight changes, ascending, and what it is from then on."""
    at_s = np.concatenate([end_s, start_s])
    step = np.concatenate([-np.ones(len(end_s)), np.ones(len(start_s))])
    order = np.argsort(at_s, kind="stable")
    return at_s[order], np.cumsum(step[order])


def stalls(c: Columns) -> Stalls:
    """Gaps a reader would notice: longer than 200 ms and than five times the median gap."""
    came = gaps(c)
    gap_s, n = came.value, len(came.value)
    if not n:
        return Stalls.absent(Absent("no gap to judge", "no-gap"))
    threshold_s = max(STALL_FLOOR_S, STALL_FACTOR * float(np.median(gap_s)))
    long = gap_s > threshold_s
    owner = np.searchsorted(c.starts, np.flatnonzero(came.ends_one)[long], side="right") - 1
    n_ok = int(c.ok.sum())
    return Stalls(
        count=measured(float(len(owner)), "stalls", "", n),
        total_s=measured(float(gap_s[long].sum()), "s", "", n),
        request_fraction=measured(len(np.unique(owner)) / n_ok, "1", "", n_ok),
        threshold_s=measured(threshold_s, "s", "", n),
    )


def burst(c: Columns) -> Burst:
    """Numbers of a burst only: first wave, drain, plateau, and how TTFT grows along the queue.

    A request's place in the queue is the order in which first tokens came. `ttft_slope_s_per_request` is what
    each place costs, by least squares; its inverse is the rate at which the server takes requests in, pure
    prefill only as long as no decoding competes with it.
    """
    spread_s = float(np.ptp(c.due_s)) if len(c) else 0.0
    if spread_s > 1e-3:
        return Burst.absent(Absent(f"not a burst: requests were due over {spread_s:.3g} s", "not-a-burst"))
    window = whole_run(c)
    if window is None:
        return Burst.absent(NO_SUCCESS)
    due_s, n, slope = float(c.due_s.min()), int(c.ok.sum()), _drain_slope(c)
    return Burst(
        first_wave_s=_once(float(c.first_s[c.ok].min()) - due_s, "s", n),
        drain_s=Absent("the run ended before the burst had drained", "not-drained")
        if c.having("outcome", [Outcome.CANCELLED.value]).any()
        else _once(window.end_s - due_s, "s", n),
        plateau_tok_per_s=_plateau(c),
        ttft_slope_s_per_request=slope,
        prefill_requests_per_s=_inverse(slope, 1.0, "1/s"),
        prefill_tok_per_s=UNCOUNTED
        if np.isnan(prompt_mean := float(prompt_tok(c)[c.ok].mean()))
        else _inverse(slope, prompt_mean, "tok/s"),
    )


def _plateau(c: Columns) -> Figure:
    """Tokens per second between the 10th and the 90th percentile of first tokens."""
    a_s, b_s = (quantile_of(c.first_s[c.ok], p) for p in (0.1, 0.9))
    if np.isnan(c.output_tok[c.ok]).any():
        return UNCOUNTED
    if b_s <= a_s:
        return Absent("all first tokens came at once")
    inside = (c.event_s >= a_s) & (c.event_s <= b_s) & c.per_event(c.ok)
    return _once(float(c.event_n[inside].sum()) / (b_s - a_s), "tok/s", int(c.ok.sum()))


def _drain_slope(c: Columns) -> Figure:
    waits_s = np.sort(ttft(c)[c.has_text & ~c.came_at_once])
    n = len(waits_s)
    if n < 11:
        return Absent(f"a slope along the queue needs 11 replies that streamed, there are {n}")
    place = np.arange(n) - (n - 1) / 2
    # Not by BLAS: the last digits of its sums go by the number of its threads.
    return _once((waits_s * place).sum() / (place**2).sum(), "s/request", n)


def _inverse(slope: Figure, factor: float, unit: str) -> Figure:
    if isinstance(slope, Absent):
        return slope
    if slope.point <= 0:
        return Absent("TTFT does not grow along the queue")
    return _once(factor / slope.point, unit, slope.n)


def _once(value: float, unit: str, n: int) -> Figure:
    return Estimate(float(value), None, None, None, n, unit, ONE_RUN)
