"""Steady state: the measured part of an open or closed loop, and whether the server kept up in it.

In an open loop requests come on their own schedule: where the queue grows, every latency is a function of how
long the run was, and no property of the server. A closed loop begins with a wave of requests that start
together, and ends when nothing is left to dispatch; in between it is on its plateau.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.definitions import e2e_service, tpot, ttft, ttft_service
from burstline.measure.metrics.throughput import Lives, Window
from burstline.measure.record.columns import Columns, Floats, Ints
from burstline.measure.record.summary import Stationarity
from burstline.measure.record.verdict import MOST_SHARE, QUEUE_GREW, Reason, tolerance_s
from burstline.measure.stats.estimates import Absent, Figure, early_stopping_floor, measured
from burstline.measure.stats.figure import known
from burstline.measure.stats.serial_correlation import (
    MOST_COSINES,
    N_BATCHES,
    correlation_length,
    mann_kendall,
    outgrown,
    shift,
    theil_slope,
    warm_up_end,
)
from burstline.waves import FILLED, whole_waves
from burstline.wording import time_text
from burstline.workloads.arrivals import STEADY_PATTERNS

LEAST_REQUESTS: Final = 80
"""Eight windows of ten requests are the least a trend is looked for in."""
ALPHA: Final = 0.01
NOT_STEADY: Final = Absent("only an open loop at one rate has a warm-up")
KEPT_FULL: Final = Absent("a closed loop keeps as many requests in flight as it was asked for")
LEAST_WAVES: Final = 4
"""Requests of a closed loop that run together share their delays: so many times as many as run at a time are
the least that an interval is made from, and as many cosines."""
LEAST_LENGTHS: Final = 20
"""A shorter load, in times over which its speed stays alike, says little of other loads."""
FLAT: Final = 1e-3
"""A series that varies by less than a thousandth has no warm-up."""
LEAST_BACKLOG: Final = 0.03
"""A server falls behind where the queue takes up this share of the requests that come."""
CHANCE: Final = 4.0
"""In standard deviations: without a queue the number in flight is Poisson, and this is beyond chance."""
LEAST_CHANGE: Final = {"in_flight": 0.25, "ttft": 0.25, "tpot": 0.1}
"""A trend must also matter: how far it must move its series over the run, as a share of the median."""


@dataclass(frozen=True, slots=True)
class Steady:
    """The measured part of an open loop at one rate, or of a closed loop.

    `window` is from the end of the warm-up (closed loop: the C-th completion) to the last request due (closed
    loop: a whole number of times C completions later). `warm_up` is how long that took from the first, and
    `n_warm_up` requests were due before its end. Latencies are those of requests that were due from its start
    on, until `counts_until_s` at most: when no new session takes the place of one that ends. `block_s` is the
    least time over which neighbours are taken to depend on each other. In a closed loop intervals come from
    `n_cosines`, or it is `too_short` for any. `figures` are the tests, `reasons`
    why the run is not stationary.
    """

    window: Window
    warm_up: Figure
    n_warm_up: int
    block_s: float
    figures: Stationarity
    reasons: tuple[Reason, ...]
    n_cosines: int | None = None
    too_short: str | None = None
    counts_until_s: float | None = None

    def counted(self, c: Columns) -> Columns:
        later = c.due_from(self.window.start_s)
        return later if self.counts_until_s is None else later.where(later.due_s <= self.counts_until_s)


def plateau(c: Columns, lives: Lives, concurrency: int) -> Steady | None:
    """A closed loop over whole waves of requests or sessions; None where no median is behind the first."""
    waves = whole_waves(lives.begun_s, lives.end_s, concurrency)
    if waves is None or not c.ok.any():
        return None
    window, last_s = Window(*waves), float(lives.begun_s.max())
    later = (c.due_s >= window.start_s) & (c.due_s <= last_s)
    if int((c.ok & later).sum()) < early_stopping_floor(0.5) or window.length_s <= 0:
        return None
    counts_until_s = None if lives.session is None else last_s
    # What ends later ran beside fewer and fewer others: it was faster, and no drift.
    full = later & (c.closed_s <= last_s)
    series = {name: _logs(c, full, values) for name, values in (("ttft", ttft(c)), ("tpot", tpot(c)))}
    tests = [_shifted(name, *each, concurrency) for name, each in series.items()]
    n_waves = int(((lives.end_s > window.start_s) & (lives.start_s <= last_s)).sum()) / concurrency
    n_cosines, too_short = _n_cosines([logs for logs, _ in series.values()], n_waves, window, lives)
    return Steady(
        window=window,
        warm_up=measured(window.start_s - float(np.nanmin(c.dispatched_s)), "s", "nothing was dispatched"),
        n_warm_up=int((c.due_s < window.start_s).sum()),
        block_s=min(_least_block_s(c, lives), window.length_s),
        figures=replace(Stationarity.absent(KEPT_FULL), **_figures(tests)),
        reasons=_drifts(tests),
        n_cosines=n_cosines,
        too_short=too_short,
        counts_until_s=counts_until_s,
    )


def steady_part(
    c: Columns,
    pattern: str | None,
    *,
    concurrency: int | None = None,
    duration_s: float | None = None,
    lives: Lives | None = None,
) -> Steady | None:
    """The part of a run that counts; None for bursts, rates meant to vary and loops without a plateau.

    An open loop lasts as long as was asked (`duration_s`), also where its last request is due before the end.
    It starts at an empty server: what is in flight, and what comes out, grows for as long as a request stays,
    though no queue does. So nothing counts before the system has filled, for which half the run is the limit.
    Of sessions the first turns come at the rate, so they last until the last one began, and fill the system
    as long as whole sessions stay. `lives` are those of `c` if none are given.
    """
    lives = lives or Lives.of(c)
    if concurrency is not None:
        return plateau(c, lives, concurrency)
    of_sessions = lives.session is not None
    due_s = lives.begun_s if of_sessions else c.due_s
    spread = float(np.ptp(due_s)) if len(due_s) else 0.0
    if pattern not in STEADY_PATTERNS or spread <= 0 or not c.ok.any():
        return None
    cut_s = _warm_up_end_s(c)
    first_s, end_s = float(due_s.min()), max(float(due_s.max()), duration_s or 0.0)
    stays_s = lives.stays_s if of_sessions else (c.last_s - c.due_s)[c.ok]
    filled_s = float(np.quantile(stays_s, FILLED)) if len(stays_s) else math.inf
    start_s = max(first_s + min(filled_s, (end_s - first_s) / 2), cut_s or 0.0)
    if pattern == "constant":  # from one arrival to another it holds as many requests as gaps
        start_s = float(min(due_s[(due_s >= start_s) & (due_s < end_s)], default=start_s))
    window, block_s = Window(start_s, end_s), _least_block_s(c, lives)
    tests = _tests(c, window)
    return Steady(
        window=window,
        warm_up=measured(None if cut_s is None else start_s - first_s, "s", "it settled past the middle"),
        n_warm_up=int((c.due_s < start_s).sum()),
        block_s=min(block_s, window.length_s) if of_sessions else block_s,
        figures=Stationarity(**_figures(tests)),
        reasons=_queued(c) or _reasons(tests, int((c.due_s >= start_s).sum()), settled=cut_s is not None),
        counts_until_s=end_s if of_sessions else None,
    )


def _least_block_s(c: Columns, lives: Lives) -> float:
    """Twice the mean stay, and 1 s: over less time neighbours depend on each other."""
    stays_s = e2e_service(c)[c.ok] if lives.session is None else lives.stays_s
    return max(1.0, 2 * float(np.mean(stays_s))) if len(stays_s) else 1.0


def _warm_up_end_s(c: Columns) -> float | None:
    """When the latest of TTFT and TPOT had settled; None where either does so only past the middle."""
    cuts = [float(c.due_s.min())]
    for values in (ttft(c), tpot(c)):
        logs, due_s = _logs(c, c.ok, values)
        if len(logs) < LEAST_REQUESTS or np.ptp(logs) < FLAT:
            continue
        if (cut := warm_up_end(logs)) is None:
            return None
        cuts.append(float(due_s[cut]))
    return max(cuts)


@dataclass(frozen=True, slots=True)
class _Test:
    """Of `n` values: `change` is how far the series moves over the run, as a share of its `median`.

    `p` is the chance of as clear a change where there is none, and `at_s` when it came, if at once.
    """

    name: str
    p: float | None = None
    n: int = 0
    change: float = 0.0
    median: float = 0.0
    at_s: float | None = None

    def found(self, alpha: float = ALPHA) -> bool:
        return self.p is not None and self.p < alpha and abs(self.change) >= LEAST_CHANGE[self.name]

    def reason(self) -> Reason:
        name = "drifting" if self.change > 0 else "drifting.fell"
        if self.at_s is not None:
            name = "drifting.step" if self.change > 0 else "drifting.step-fell"
        return Reason.of(name, metric=self.name.upper(), change=abs(self.change), at_s=self.at_s)


def _figures(tests: Iterable[_Test]) -> dict[str, Figure]:
    few = f"a trend needs {LEAST_REQUESTS} requests and 8 windows"
    return {
        f"{test.name}_{what}": measured(None if test.p is None else value, "1", few, test.n)
        for test in tests
        for what, value in (("trend_p", test.p), ("change_fraction", test.change))
    }


def _logs(c: Columns, counted: NDArray[np.bool_], values: Floats) -> tuple[Floats, Floats]:
    """The logarithms of what is known and counted, in the order of dispatch, and when each was due.

    A heavy tail must not pass for a warm-up.
    """
    known = np.flatnonzero(counted & c.ok & (values > 0))
    known = known[np.argsort(c.due_s[known], kind="stable")]
    return np.log(values[known]), c.due_s[known]


def _shifted(name: str, logs: Floats, due_s: Floats, concurrency: int) -> _Test:
    """A drift or a step in a closed loop. Requests that run together share their delays."""
    n = len(logs)
    found = shift(logs, n / concurrency) if n >= LEAST_REQUESTS and np.ptp(logs) > FLAT else None
    if found is None:
        return _Test(name)
    at, change, p = found
    at_s = None if at is None else float(due_s[int(at * n)])
    return _Test(name, p, n, math.expm1(change), math.exp(float(np.median(logs))), at_s)


def _n_cosines(
    series: Iterable[Floats], n_waves: float, window: Window, lives: Lives
) -> tuple[int | None, str | None]:
    """From how many cosines the intervals of a closed loop come; else why there are none, and what to run."""
    alike = max(correlation_length(logs) if np.ptp(logs) > FLAT else 0.0 for logs in series if len(logs))
    times = max(LEAST_LENGTHS * alike, LEAST_WAVES / n_waves)
    if times > 1:
        why, safe = f"fewer than {LEAST_WAVES} times as many as run at a time", 2
        if LEAST_LENGTHS * alike > 1:  # a short run shows only a part of how long it stays alike
            why, safe = f"the speed stays alike over {alike * window.length_s:.2g} s", 3
        of_sessions = lives.session is not None  # their number sets how long the load takes
        flag, size = ("--sessions", len(lives.begun_s)) if of_sessions else ("--duration-s", window.length_s)
        return None, f"1 run: {why}; for an interval pass {flag} {math.ceil(safe * times * size)}"
    most = int(min(n_waves, 0.1 / max(alike, 1e-3)))
    return max(LEAST_WAVES, min(MOST_COSINES, most)), None


def _tests(c: Columns, window: Window) -> list[_Test]:
    n = int((c.due_s >= window.start_s).sum())
    if n < LEAST_REQUESTS or window.length_s <= 0:
        return [_Test(name) for name in LEAST_CHANGE]
    edges = np.linspace(window.start_s, window.end_s, int(np.clip(n // 20, 8, 40)) + 1)
    over_s = np.where(np.isnan(c.closed_s), np.inf, c.closed_s)
    in_flight = [(over_s.clip(a, b) - c.due_s.clip(a, b)).sum() / (b - a) for a, b in pairwise(edges)]
    return [
        _test("in_flight", np.array(in_flight)),
        _test("ttft", _medians(c, np.where(c.ok, ttft(c), np.inf), edges)),
        _test("tpot", _medians(c, tpot(c), edges)),
    ]


def _test(name: str, series: Floats) -> _Test:
    series = series[~np.isnan(series)]
    finite = series[np.isfinite(series)]
    if not len(finite):
        return _Test(name)
    # Where most of a window failed it is worse than any other, by rank; how much worse is unknown.
    series = np.where(np.isinf(series), 2 * finite.max(), series)
    trend, median = mann_kendall(series), float(np.median(series))
    if trend is None or median <= 0:
        return _Test(name)
    return _Test(name, trend[1], len(series), float(theil_slope(series)) * len(series) / median, median)


def _medians(c: Columns, values: Floats, edges: Floats) -> Floats:
    """The median of the requests due in each window; NaN where none is known."""
    own = np.searchsorted(edges, c.due_s, side="right") - 1
    groups = [values[(own == k) & ~np.isnan(values)] for k in range(len(edges) - 1)]
    return np.array([np.median(group) if len(group) else np.nan for group in groups])


def _drifts(tests: Iterable[_Test]) -> tuple[Reason, ...]:
    """One reason is enough: where TTFT drifts, TPOT often does."""
    return tuple(test.reason() for test in tests if test.name != "in_flight" and test.found())[:1]


def _queued(c: Columns) -> tuple[Reason, ...]:
    """Whether more requests wait for a first token, in the end, than at a server just at its capacity.

    This takes no warm-up and fewer requests than a trend; it begins with the first that waits, when the
    server has filled. What is in flight also grows, for as long as a reply lasts, where nothing waits.
    """
    due_s = np.sort(c.due_s)
    begun_s = np.sort(np.where(c.n_events > 0, c.first_s, np.where(np.isnan(c.closed_s), np.inf, c.closed_s)))
    waiting = np.arange(len(due_s), dtype=np.float64) - np.searchsorted(begun_s, due_s)
    waiting = waiting[max(int(np.argmax(waiting > 0)) - 1, 0) :]
    if len(waiting) <= N_BATCHES or not outgrown(waiting, ALPHA / 2):
        return ()
    return (Reason.of("overloaded.waiting", n=waiting[-1]),)


def _reasons(tests: list[_Test], n: int, *, settled: bool) -> tuple[Reason, ...]:
    reasons = []
    queue = next(test for test in tests if test.name == "in_flight")
    backlog, chance = queue.change * queue.median, CHANCE * math.sqrt(max(queue.median, 0.0))
    if queue.found() and backlog > max(LEAST_BACKLOG * n, chance):
        reasons.append(Reason.of(QUEUE_GREW, share=queue.change))
    reasons = reasons or [*_drifts(tests)]
    if not settled and not reasons and any(test.found(0.05) for test in tests):
        reasons.append(Reason.of("never-settled"))
    return tuple(reasons)


SIZES: Final = (3, 5, 10, 20, 50, 100, 200, 500)
"""How many first requests are looked at together."""
SLOWER: Final = 0.8
"""The share of them that must be slower than nine tenths of the rest."""


@dataclass(frozen=True, slots=True)
class ColdStart:
    """The first `n` requests, `after` those of a closed loop's first wave, had a median TTFT, from the send,
    that was `slower_s` above the rest's.

    `rest_s` is the median of the rest. `until_s` is when the last of them was due, `which` are their indices.
    """

    n: int
    slower_s: float
    rest_s: float
    until_s: float
    which: Ints
    after: int = 0

    @property
    def size(self) -> str:
        who = f"{self.n} requests after the first {self.after}" if self.after else f"first {self.n} requests"
        return f"The {who} waited {time_text(self.slower_s)} longer for their first token than the rest"

    def counted(
        self, printed: Mapping[str, Figure], rest: Mapping[str, Figure], n: int, code: str = "cold"
    ) -> tuple[bool, tuple[Reason, ...]]:
        """Whether they spoil TTFT's `printed` percentiles, which without them were `rest`; what to say of it.

        They do where they raise one by more than 5% and by more than half of its interval; `n` are counted in
        it. `code` is the advice: behind a warm-up another changes nothing, nor before a probe of a search.
        """
        pairs = {p: (known(rest[p]), known(figure)) for p, figure in printed.items()}
        moved = {p: (low, high) for p, (low, high) in pairs.items() if low and high and low < high}
        least_s = {p: max(MOST_SHARE * low, _half_width(printed[p])) for p, (low, _) in moved.items()}
        spoiled = [p for p, (low, high) in moved.items() if high - low > least_s[p]]
        p = max(spoiled or moved, key=lambda p: moved[p][1] / moved[p][0], default="")
        without, with_them = map(time_text, moved.get(p, (0.0, 0.0)))
        if without == with_them:
            return False, ()
        size = f"{self.size}. {'They move' if n == self.n else f'{n} of them are measured: this moves'}"
        return bool(spoiled), (Reason.of(code, size=size, p=p, without=without, with_them=with_them),)

    def left_out(self) -> Reason:
        """Of a run whose figures begin after them."""
        return Reason.of("cold.left-out", size=self.size, rest=time_text(self.rest_s))


def _half_width(figure: Figure) -> float:
    """Of the interval; 0 without one, infinite where an end is open."""
    if isinstance(figure, Absent) or figure.level is None:
        return 0.0
    return math.inf if figure.low is None or figure.high is None else (figure.high - figure.low) / 2


def cold_start(c: Columns, concurrency: int | None, opening: NDArray[np.bool_] | None) -> ColdStart | None:
    """The largest group of first requests slower by more than the scatter of the rest; None without one.

    Less than the instrument may be off by is no difference. A burst has no first requests: all wait in one
    queue. In a closed loop the first wave is left out, whose prompts are all computed at once. Of sessions
    only the `opening` turns are alike.
    """
    use = c.has_text if opening is None else c.has_text & opening
    if concurrency is None and len(np.unique(c.due_s[use])) < 2:
        return None
    order = np.flatnonzero(use)[np.argsort(c.sent_s[use], kind="stable")[concurrency or 0 :]]
    values, worst = ttft_service(c)[order], None
    for n in SIZES:
        if 4 * n > len(values):
            break
        first, rest = values[:n], values[n:]
        middle, high, scatter = np.quantile(rest, [0.5, 0.9, 0.95])
        slower_s = float(np.median(first) - middle)
        if slower_s > max(scatter - middle, tolerance_s(middle)) and np.mean(first > high) >= SLOWER:
            last_s, which = float(c.due_s[order[:n]].max()), c.index[order[:n]]
            worst = ColdStart(n, slower_s, float(middle), last_s, which, concurrency or 0)
    return worst
