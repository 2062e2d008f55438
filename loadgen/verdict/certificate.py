"""The instrument's own error: what the client reported less what a server of known truth sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from burstline.loadgen.record.columns import Columns, Floats
from burstline.loadgen.record.drive_report import DriveReport
from burstline.workloads import achieved

if TYPE_CHECKING:
    from burstline.servers.truth.exchanges import Served

METRICS: Final = ("ttft", "itl", "tpot", "e2e")
TOLERATED: Final = 0.05
"""How far off the ITL's p99 may be at the highest event rate that counts as followed."""
KEPT_PACE: Final = 0.95
"""Below this share of the asked event rate it is the truth server that cannot follow."""


@dataclass(frozen=True, slots=True)
class MetricError:
    """How one metric was reported and what it truly was, seconds.

    `bias_s` is the mean of reported minus true over `n` requests (ITL: gaps), `p50_s` and `p99_s` are
    percentiles of its absolute value; the other four are percentiles of the metric itself.
    """

    n: int
    bias_s: float
    p50_s: float
    p99_s: float
    true_p50_s: float
    true_p99_s: float
    reported_p50_s: float
    reported_p99_s: float


@dataclass(frozen=True, slots=True)
class ServedSchedule:
    """How the truth server received the load. None where the load's pattern does not define a figure.

    `spread_s` is from the first arrival to the last of a burst; `late_*_s` how long after its due time each
    request had arrived whole; `rate_error`, `gap_cv` with the plan's own, and `gap_ks`, the distance from
    the asked gamma law, are those of `burstline.workloads.achieved`.
    """

    spread_s: float | None = None
    late_p50_s: float | None = None
    late_p99_s: float | None = None
    rate_error: float | None = None
    gap_cv: float | None = None
    planned_gap_cv: float | None = None
    gap_ks: float | None = None


@dataclass(frozen=True, slots=True)
class EventRateLimit:
    """The highest event rate at which the ITL's p99 was within 5% of the truth, and what ended the search.

    `by` is "client" (its error grew), "truth server" (it could send no faster) or "search" (nothing failed
    up to the highest rate tried): in the last two the client's own limit is at least this.
    """

    events_per_s: float
    by: str


_NO_LATER: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Certificate:
    """The instrument's own error under one shape of load, measured at a server whose true timing is known.

    `errors` has one entry per metric that the load defines. `events_per_s` is the mean rate over the time in
    which tokens came. `server_late_p99_s` is the truth server's lateness against its script: errors exclude
    it, since they are measured from the actual send. `n_unmatched` requests failed or brought another number
    of events than were sent. `others_cpu_fraction` is the share of the machine's CPU used by processes other
    than client and truth server; None where not known.
    """

    errors: Mapping[str, MetricError]
    schedule: ServedSchedule
    n_requests: int
    n_events: int
    n_unmatched: int
    events_per_s: float | None
    read_lag_p50_s: float | None
    read_lag_p99_s: float | None
    kernel_stamped: float
    cpu_per_event_s: float | None
    server_late_p99_s: float | None
    others_cpu_fraction: float | None = None
    limit: EventRateLimit | None = None

    @property
    def is_clean(self) -> bool:
        """Every request is accounted for, and 99% of all latencies are right within a millisecond."""
        return not self.n_unmatched and all(error.p99_s <= _NO_LATER for error in self.errors.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """Reported and true time of every event of every matched request, seconds from the run's start.

    `first` and `last` index each request's own events; `row` names its line in the records.
    """

    reported_s: Floats
    true_s: Floats
    first: Any
    last: Any
    row: Any


def certificate(
    c: Columns,
    served: Sequence[Served],
    reports: Sequence[DriveReport],
    *,
    open_loop: bool = True,
    law: tuple[float, float] | None = None,
    others_cpu_fraction: float | None = None,
) -> Certificate:
    """The certificate of a load whose records are `c` and whose truth is `served`, joined by request index.

    `law` is the rate and the burstiness that gaps between arrivals were drawn from, None for other patterns.
    """
    t0_ns = next((report.t0_ns for report in reports if report.t0_ns is not None), 0)
    rows = {row.index: row for row in served if row.index is not None}
    pairs = _paired(c, rows, t0_ns)
    lag_s = c.event_lag_s
    lag_s = lag_s[~np.isnan(lag_s)]
    n_events = len(c.event_s)
    late_ns = [row.lateness_ns[1:] for row in served]
    return Certificate(
        errors=_errors(c, pairs, rows, t0_ns),
        schedule=_schedule(c, rows, t0_ns, law) if open_loop else ServedSchedule(),
        n_requests=len(c),
        n_events=n_events,
        n_unmatched=len(c) - len(pairs.row),
        events_per_s=_rate(pairs.true_s),
        read_lag_p50_s=_quantile(lag_s, 0.5),
        read_lag_p99_s=_quantile(lag_s, 0.99),
        kernel_stamped=len(lag_s) / n_events if n_events else 0.0,
        cpu_per_event_s=sum(report.cpu_s for report in reports) / n_events if n_events else None,
        server_late_p99_s=_quantile(np.concatenate([[], *late_ns]) / 1e9, 0.99),
        others_cpu_fraction=others_cpu_fraction,
    )


def limit(
    c: Columns, served: Sequence[Served], t0_ns: int, rungs: Sequence[tuple[float, int]]
) -> EventRateLimit:
    """How far up a ladder of event rates the client followed.

    `rungs` are the asked events per second and how many of each stream's tokens belong to it, in order; every
    stream has them all.
    """
    pairs = _paired(c, {row.index: row for row in served if row.index is not None}, t0_ns)
    if not len(pairs.row):
        return EventRateLimit(0.0, "client")
    best = 0.0
    begin = 0
    for asked_per_s, n_tok in rungs:
        at = pairs.first[:, None] + np.arange(begin, begin + n_tok)
        begin += n_tok
        true_s = pairs.true_s[at]
        per_s = _rate(true_s.ravel()) or 0.0
        reported, true = (np.quantile(np.diff(s[at], axis=1), 0.99) for s in (pairs.reported_s, pairs.true_s))
        if abs(reported - true) > TOLERATED * true:
            return EventRateLimit(best, "client")
        best = max(best, per_s)
        if per_s < KEPT_PACE * asked_per_s:
            return EventRateLimit(best, "truth server")
    return EventRateLimit(best, "search")


def _paired(c: Columns, rows: Mapping[int, Served], t0_ns: int) -> _Pairs:
    reported, true, matched = [], [], []
    for i, index in enumerate(c.table.column("index").to_pylist()):
        own_s = c.event_s[c.starts[i] : c.starts[i + 1]]
        row = rows.get(index)
        if row is not None and c.ok[i] and len(row.token_ns) == len(own_s):
            reported.append(own_s)
            true.append((np.array(row.token_ns) - t0_ns) / 1e9)
            matched.append(i)
    ends = np.cumsum([len(own_s) for own_s in reported], dtype=np.int64)
    firsts = np.concatenate([[0], ends])[:-1].astype(np.int64)
    return _Pairs(_joined(reported), _joined(true), firsts, ends - 1, np.array(matched, dtype=np.int64))


def _errors(c: Columns, pairs: _Pairs, rows: Mapping[int, Served], t0_ns: int) -> dict[str, MetricError]:
    """In a burst latency counts from the send: its truth is when the server's kernel had the request."""
    origin_s = c.origin_s[pairs.row]
    index = c.table.column("index").to_numpy(zero_copy_only=False)[pairs.row]
    arrived_s = np.array([(rows[int(i)].arrival_ns - t0_ns) / 1e9 for i in index])
    true_origin_s = np.where(origin_s == c.due_s[pairs.row], origin_s, arrived_s) if len(index) else origin_s
    inner = np.ones(len(pairs.true_s), dtype=bool)
    inner[pairs.first] = False
    n_later = (c.output_tok - c.first_n)[pairs.row]
    many = n_later > 0

    def of(times_s: Floats, from_s: Floats) -> dict[str, Floats]:
        first_s, last_s = times_s[pairs.first], times_s[pairs.last]
        gaps_s = np.diff(times_s, prepend=0.0)[inner] / c.event_n[_events(c, pairs)][inner]
        return {
            "ttft": first_s - from_s,
            "itl": gaps_s,
            "tpot": (last_s - first_s)[many] / n_later[many],
            "e2e": last_s - from_s,
        }

    reported, true = of(pairs.reported_s, origin_s), of(pairs.true_s, true_origin_s)
    return {name: _error(reported[name], true[name]) for name in METRICS if len(true[name])}


def _events(c: Columns, pairs: _Pairs) -> Any:
    """Which of all events of the records belong to matched requests."""
    return c.per_event(np.isin(np.arange(len(c)), pairs.row))


def _error(reported_s: Floats, true_s: Floats) -> MetricError:
    off_s = reported_s - true_s
    return MetricError(
        len(off_s),
        float(off_s.mean()),
        *(float(value) for value in np.quantile(np.abs(off_s), [0.5, 0.99])),
        *(float(value) for times_s in (true_s, reported_s) for value in np.quantile(times_s, [0.5, 0.99])),
    )


def _schedule(
    c: Columns, rows: Mapping[int, Served], t0_ns: int, law: tuple[float, float] | None
) -> ServedSchedule:
    came = [(i, rows[index]) for i, index in enumerate(c.table.column("index").to_pylist()) if index in rows]
    due_s = c.due_s[[i for i, _ in came]]
    arrived_s = np.array([row.arrival_ns - t0_ns for _, row in came]) / 1e9
    late_s, at_s = arrived_s - due_s, np.sort(arrived_s)
    is_burst = len(due_s) > 0 and float(np.ptp(due_s)) == 0.0
    return ServedSchedule(
        spread_s=float(np.ptp(at_s)) if is_burst else None,
        late_p50_s=_quantile(late_s, 0.5),
        late_p99_s=_quantile(late_s, 0.99),
        rate_error=achieved.rate_error(at_s, due_s),
        gap_cv=None if is_burst else achieved.gap_cv(at_s),
        planned_gap_cv=achieved.gap_cv(due_s),
        gap_ks=achieved.gap_ks(at_s, *law) if law else None,
    )


def _rate(at_s: Floats) -> float | None:
    took_s = float(np.ptp(at_s)) if len(at_s) else 0.0
    return (len(at_s) - 1) / took_s if took_s else None


def _quantile(values: Floats, p: float) -> float | None:
    return float(np.quantile(values, p)) if len(values) else None


def _joined(parts: list[Floats]) -> Floats:
    return np.concatenate(parts) if parts else np.empty(0)
