"""What a run's headline figures are by what its servers did, computed a second time from their own logs.

It follows `docs/method.md` and imports nothing that computes figures. What was asked comes from the plan and
the manifest; what happened comes from the truth servers alone, on the machine's monotonic clock. Times are
seconds from the run's start. Where the window begins or ends at an event, the two sides see it some
microseconds apart, so rates are ranges: what came for certain, and what may have come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow.parquet as pq

EDGE_S = 0.004
"""By how much the two sides may differ on when the window begins and ends."""
LATE_S = 0.004
"""By how much a latency may differ: the loopback, and a busy machine's wait between due and sent."""
HUNG_UP_S = 0.05
"""How much later than the client a busy server may see that it hung up."""
QUANTILES = {"p50": (0.5, 11), "p90": (0.9, 64), "p99": (0.99, 662)}
"""Each with the samples that it needs to be printed."""
STEADY = ("constant", "poisson", "gamma")


class Range(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class Reply:
    """What one server did for one request; `at_s` and `n_tok` are of the events that carry tokens.

    `first_s` is when the first event of any kind was sent, NaN where that is not known.
    """

    index: int
    sent_s: float
    status: int
    at_s: np.ndarray
    n_tok: np.ndarray
    is_done: bool
    over_s: float
    hung_up: bool
    n_prompt_tok: int
    n_cached_tok: int | None
    ended: str | None
    first_s: float


@dataclass(frozen=True)
class Asked:
    """The load as it was planned; `due_s` only holds where requests have times of their own."""

    due_s: np.ndarray
    n_output_tok: np.ndarray
    pattern: str | None
    concurrency: int | None
    duration_s: float | None
    parents: Sequence[Sequence[int]]
    session: np.ndarray | None
    pause_s: np.ndarray
    abandons: bool
    is_timed: bool
    was_interrupted: bool


def asked(run: Path) -> tuple[Asked, int]:
    """What was asked, and the run's start on the monotonic clock, in ns."""
    manifest = orjson.loads((run / "manifest.json").read_bytes())
    plan = pq.read_table(run / "plan.parquet")
    if "stage" in plan.column_names:
        rows = [i for i, stage in enumerate(plan.column("stage").to_pylist()) if stage is None]
        plan = plan.take(rows)
    sessions = plan.column("session").to_pylist() if "session" in plan.column_names else [None]
    has_sessions = sessions[0] is not None
    return (
        Asked(
            due_s=plan.column("due_ns").to_numpy() / 1e9,
            n_output_tok=plan.column("n_output_tok").to_numpy(),
            pattern=(manifest["asked"]["arrival"] or "burst").partition(":")[0],
            concurrency=manifest["asked"]["concurrency"],
            duration_s=manifest["asked"].get("duration_s") if manifest["status"] == "complete" else None,
            parents=[row or [] for row in plan.column("after").to_pylist()] if has_sessions else [],
            session=np.unique(sessions, return_inverse=True)[1] if has_sessions else None,
            pause_s=plan.column("pause_ns").fill_null(0).to_numpy() / 1e9 if has_sessions else np.zeros(0),
            abandons=bool(manifest["asked"].get("cancel_share")),
            is_timed=manifest["asked"]["concurrency"] is not None
            and bool(manifest["asked"].get("duration_s")),
            was_interrupted=manifest["status"] == "interrupted",
        ),
        min(driver["t0_ns"] for driver in manifest["drivers"]),
    )


def _first_ns(row: Any) -> float:
    """When the first event was sent; NaN where heartbeats were, for some are events and some comments."""
    if "comment" in row.event_kind:
        return math.nan
    events = zip(row.event_ns, row.event_kind, strict=True)
    return next((ns for ns, kind in events if kind != "headers"), math.nan)


def replies(rows: Sequence[Any], n: int, zero_ns: int) -> dict[int, Reply]:
    """The servers' rows of the load's own requests, by index: neither probes nor warm-up."""
    found = {}
    for row in rows:
        if row.index is None or row.index >= n:
            continue
        token = [k for k, n_tok in enumerate(row.event_tok) if n_tok]
        last_ns = row.event_ns[-1] if row.event_ns else row.arrival_ns
        is_done = "done" in row.event_kind
        over_ns = last_ns if is_done or row.ended_ns is None else row.ended_ns
        found[row.index] = Reply(
            index=row.index,
            sent_s=(row.arrival_ns - zero_ns) / 1e9,
            status=row.status,
            at_s=np.array([(row.event_ns[k] - zero_ns) / 1e9 for k in token]),
            n_tok=np.array([row.event_tok[k] for k in token]),
            is_done=is_done,
            over_s=(over_ns - zero_ns) / 1e9,
            first_s=(_first_ns(row) - zero_ns) / 1e9,
            hung_up=row.ended == "client_closed",
            n_prompt_tok=row.n_prompt_tok or 0,
            n_cached_tok=row.n_cached_tok,
            ended=row.ended,
        )
    return found


def outcome(reply: Reply | None, n_asked: int, load: Asked) -> str:
    """How a request ended, by the words of the page."""
    if reply is None:
        return "not_sent"
    if reply.status != 200:
        return f"http_{reply.status}"
    if reply.is_done:
        n = int(reply.n_tok.sum())
        return "ok" if n == n_asked else "short" if n < n_asked else "long"
    if reply.hung_up:
        if load.was_interrupted:
            return "cancelled"
        return "abandoned" if load.abandons and len(reply.at_s) else "timeout"
    return {"reset": "reset", "close": "truncated", "half_close": "truncated"}.get(reply.ended or "", "open")


@dataclass(frozen=True)
class Truth:
    """Figures by their names in summary.json; a latency of infinity is printed as absent.

    So is a rate whose window is shorter than `shortest_s`: two E2E on average, and a second.
    """

    counts: Counter[str]
    latencies: dict[str, float]
    rates: dict[str, Range]
    window: Range
    n: int
    shortest_s: float


def quantile(values: np.ndarray, p: float) -> float:
    """Linear between neighbours; infinite as soon as one of them is."""
    ordered = np.sort(values)
    place = p * (len(ordered) - 1)
    low, high = ordered[int(np.floor(place))], ordered[int(np.ceil(place))]
    return float(low + (high - low) * (place % 1)) if np.isfinite(high) else float("inf")


def truth(
    run: Path, rows: Sequence[Any], page: tuple[float, float], n_counted: int, ttft_slo_s: float
) -> Truth:
    """Every headline figure. `page` is the window by the page. A warm-up's end is a statistical choice, so it
    may lie later than the definition's start, but not past the middle of the run; and where a wave of a
    closed loop ends within `EDGE_S` of the last dispatch the page says whether it counts.
    `n_counted` is the page's population: it settles on which side of the window's begin the requests lie that
    were due within `EDGE_S` of it, and no others.
    """
    load, zero_ns = asked(run)
    n = len(load.n_output_tok)
    by_index = replies(rows, n, zero_ns)
    kinds = [outcome(by_index.get(i), int(load.n_output_tok[i]), load) for i in range(n)]
    seen = [by_index[i] for i in range(n) if kinds[i] not in ("abandoned", "not_sent")]
    ok = [reply for reply in seen if kinds[reply.index] == "ok"]
    due_s = _due(load, by_index)
    every = [by_index[i] for i in range(n) if kinds[i] != "not_sent"]
    ends_s = {r.index: r.at_s[-1] if kinds[r.index] == "ok" else r.over_s for r in every}
    lives = _lives(load, ends_s, due_s)
    window, is_steady = _window(load, lives, seen, ok, due_s, page, n_counted)
    # Percentiles: of the requests that were due from the window's begin on, and while sessions still began.
    by_due = sorted(seen, key=lambda r: due_s[r.index])
    if is_steady and load.session is not None:
        by_due = [r for r in by_due if due_s[r.index] <= max(begun_s for begun_s, _ in lives)]
    least, most = (sum(due_s[r.index] >= window.low + edge_s for r in by_due) for edge_s in (EDGE_S, -EDGE_S))
    counted = by_due[-min(max(n_counted, least), most) :] if is_steady else by_due
    # For certain, and at most: on the criterion's very edge some microseconds decide.
    sure, maybe = (
        {r.index for r in ok if r.at_s[0] - due_s[r.index] <= ttft_slo_s + edge_s}
        for edge_s in (-LATE_S, LATE_S)
    )

    def latency(of: Any) -> np.ndarray:
        return np.array([of(r) if kinds[r.index] == "ok" else np.inf for r in counted])

    ttft = latency(lambda r: r.at_s[0] - due_s[r.index])
    e2e = latency(lambda r: r.at_s[-1] - due_s[r.index])
    ntpot = latency(lambda r: (r.at_s[-1] - due_s[r.index]) / r.n_tok.sum())
    several = [r for r in counted if kinds[r.index] != "ok" or r.n_tok.sum() > r.n_tok[0]]
    tpot = np.array(
        [
            (r.at_s[-1] - r.at_s[0]) / (r.n_tok.sum() - r.n_tok[0]) if kinds[r.index] == "ok" else np.inf
            for r in several
        ]
    )
    gaps = [
        np.repeat(np.diff(r.at_s) / r.n_tok[1:], r.n_tok[1:])
        if kinds[r.index] == "ok"
        else np.full(int(load.n_output_tok[r.index]) - 1, np.inf)
        for r in counted
    ]
    series = {"ttft": ttft, "e2e": e2e, "tpot": tpot, "ntpot": ntpot, "itl": np.concatenate(gaps)}
    first_event = latency(lambda r: r.first_s - r.sent_s)
    if not np.isnan(first_event).any():
        series["first_event"] = first_event
    latencies = {
        f"{name}.{label}": quantile(values, p)
        for name, values in series.items()
        for label, (p, least) in QUANTILES.items()
        if len(values) >= least
    }

    def completions_of(those: set[int]) -> list[tuple[float, float]]:
        return [(r.at_s[-1], 1.0) for r in ok if r.index in those]

    def outputs_of(those: set[int]) -> list[tuple[float, float]]:
        return [(at, float(k)) for r in ok if r.index in those for at, k in zip(r.at_s, r.n_tok, strict=True)]

    all_ok = {r.index for r in ok}
    completions, outputs = completions_of(all_ok), outputs_of(all_ok)
    inputs = [(r.at_s[0], float(r.n_prompt_tok)) for r in ok]
    window_of = window
    if not is_steady:  # the whole run: everything counts, at its edges too
        window_of = Range(window.low - EDGE_S, window.high + EDGE_S)
    rates = {
        "requests_per_s": _rate(completions, window, whole=not is_steady),
        "output_tok_per_s": _rate(outputs, window, whole=not is_steady),
        "input_tok_per_s": _rate(inputs, window, whole=not is_steady),
    }
    for name, came in (("good.requests_per_s", completions_of), ("good.tok_per_s", outputs_of)):
        low, high = (_rate(came(those), window, whole=not is_steady) for those in (sure, maybe))
        rates[name] = Range(low.low, high.high)
    rates["total_tok_per_s"] = Range(
        rates["output_tok_per_s"].low + rates["input_tok_per_s"].low,
        rates["output_tok_per_s"].high + rates["input_tok_per_s"].high,
    )
    due_here = {r.index for r in counted}
    low, high = (len(those & due_here) / max(1, len(counted)) for those in (sure, maybe))
    rates["good.attainment"] = Range(low - 1e-9, high + 1e-9)
    rates |= _in_flight(every, window_of)
    if load.session is not None:
        rates |= _sessions(load, by_index, kinds, due_s, {r.index for r in counted})
    if ok and all(r.n_cached_tok is not None for r in ok):
        share = sum(r.n_cached_tok or 0 for r in ok) / sum(r.n_prompt_tok for r in ok)
        rates["lengths.cached_fraction"] = Range(share - 1e-9, share + 1e-9)
    counts = Counter(kinds)
    if load.is_timed:  # planned longer than it can last: what it did not need was not asked for
        del counts["not_sent"]
    came = e2e[np.isfinite(e2e)]
    shortest_s = max(1.0, 2 * float(came.mean())) if len(came) else 1.0
    return Truth(counts, latencies, rates, window, len(counted), shortest_s)


def _due(load: Asked, by_index: dict[int, Reply]) -> np.ndarray:
    """When each request was due: the plan's time in an open loop, its own send in a burst and a closed loop,
    and for a later turn of a session the end of the turns before it and the pause."""
    due_s = np.array(load.due_s, dtype=float)
    is_burst = np.ptp(load.due_s) == 0
    for i, reply in sorted(by_index.items()):
        parents = load.parents[i] if load.parents else []
        if parents:
            ends = [by_index[j].over_s for j in parents if j in by_index]
            due_s[i] = max(ends) + load.pause_s[i] if ends else reply.sent_s
        elif load.concurrency is not None or is_burst:
            due_s[i] = reply.sent_s
    return due_s


def _lives(load: Asked, ends_s: dict[int, float], due_s: np.ndarray) -> list[tuple[float, float]]:
    """When each request, or each whole session, began and ended; infinite what was cut off."""
    if load.session is None:
        return [(due_s[i], end_s) for i, end_s in ends_s.items()]
    found = []
    for session in range(int(load.session.max()) + 1):
        own = np.flatnonzero(load.session == session)
        sent = [i for i in own if i in ends_s]
        if sent:
            ended_s = max(ends_s[i] for i in sent) if len(sent) == len(own) else math.inf
            found.append((min(due_s[i] for i in sent), ended_s))
    return found


def _window(
    load: Asked,
    lives: list[tuple[float, float]],
    seen: list[Reply],
    ok: list[Reply],
    due_s: np.ndarray,
    page: tuple[float, float],
    n_counted: int,
) -> tuple[Range, bool]:
    served = {r.index for r in ok}
    whole_s, by_client = max((r.at_s[-1] if r.index in served else r.over_s, r.hung_up) for r in seen)
    if by_client and whole_s - HUNG_UP_S <= page[1] <= whole_s:  # when the client knows better
        whole_s = page[1]
    whole = Range(min(r.sent_s for r in seen), whole_s)
    if load.concurrency is not None:
        ends_s, last_s, c = (
            sorted(ended_s for _, ended_s in lives),
            max(at_s for at_s, _ in lives),
            load.concurrency,
        )
        fewest, many = (sum(at_s <= last_s + edge_s for at_s in ends_s) // c for edge_s in (-EDGE_S, EDGE_S))
        n_waves = (
            min(range(fewest, many + 1), key=lambda k: abs(ends_s[max(k, 1) * c - 1] - page[1]))
            if many
            else 0
        )
        if n_waves < 2:
            return whole, False
        window = Range(ends_s[c - 1], ends_s[n_waves * c - 1])
        # Behind the wave are 11 successes, as many as a median needs, or the whole run counts: on the edge
        # the page's own population says which.
        most, least = (
            sum(window.low + edge_s <= due_s[r.index] <= last_s for r in ok) for edge_s in (-EDGE_S, EDGE_S)
        )
        is_steady = least >= 11 if (least >= 11) == (most >= 11) else n_counted < len(seen)
        return (window, True) if is_steady and window.high > window.low else (whole, False)
    planned_s = due_s[[r.index for r in seen]]
    stays_s = [r.at_s[-1] - due_s[r.index] for r in ok]
    if load.session is not None:  # sessions come at the rate, and fill the system as long as they stay
        planned_s = np.array([begun_s for begun_s, _ in lives])
        stays_s = [ended_s - begun_s for begun_s, ended_s in lives if ended_s < math.inf]
    if load.pattern not in STEADY or np.ptp(planned_s) <= 0:
        return whole, False
    first_s, end_s = planned_s.min(), max(planned_s.max(), load.duration_s or 0.0)
    fill_s = min(quantile(np.array(stays_s), 0.95) if stays_s else math.inf, (end_s - first_s) / 2)
    a = first_s + fill_s
    if load.pattern == "constant":  # from one arrival to another; on the edge the page says which
        due_s = np.sort(planned_s[planned_s < end_s])
        first, second = ([*due_s[due_s >= a + edge_s], a] for edge_s in (-EDGE_S, EDGE_S))
        a = page[0] if abs(page[0] - second[0]) < EDGE_S else first[0]
    if page[0] > a + EDGE_S:
        assert page[0] <= first_s + 0.75 * (end_s - first_s), "the window begins past what a warm-up may take"
        a = page[0]
    return Range(a, end_s), True


def _rate(came: list[tuple[float, float]], window: Range, *, whole: bool) -> Range:
    """Amounts that came in (a, b] per second, for windows a little shorter and a little longer.

    Of the whole run everything counts.
    """
    at_s, amount = np.array(came).T if came else np.zeros((2, 0))
    length_s = window.high - window.low

    def within(grow_s: float) -> float:
        if whole:
            return float(amount.sum())
        return float(amount[(at_s > window.low - grow_s) & (at_s <= window.high + grow_s)].sum())

    return Range(within(-EDGE_S) / (length_s + 2 * EDGE_S), within(EDGE_S) / max(length_s - 2 * EDGE_S, 1e-9))


def _in_flight(every: list[Reply], window: Range) -> dict[str, Range]:
    """Mean and maximum of the requests in flight within the window, by a sweep over starts and ends."""
    a, b = window
    overlap = sum(max(0.0, min(r.over_s, b) - max(r.sent_s, a)) for r in every)
    slack = len(every) * 2 * EDGE_S / (b - a)
    mean = overlap / (b - a)
    inside = [r for r in every if r.sent_s < b and r.over_s > a]

    def highest(shrink_s: float) -> float:
        """With each request shorter (or longer) by so much at its end; a server learns late of a hang-up."""
        late_s = {r.index: shrink_s + HUNG_UP_S * (r.hung_up and shrink_s > 0) for r in inside}
        steps = sorted(
            [(max(r.sent_s, a), 1) for r in inside]
            + [(max(min(r.over_s, b) - late_s[r.index], max(r.sent_s, a)), -1) for r in inside]
        )
        now = most = 0
        for _, step in steps:
            now += step
            most = max(most, now)
        return float(most)

    return {
        "concurrency.mean": Range(mean - slack, mean + slack),
        "concurrency.max": Range(highest(EDGE_S), highest(-EDGE_S)),
    }


def _sessions(
    load: Asked, by_index: dict[int, Reply], kinds: list[str], due_s: np.ndarray, counted: set[int]
) -> dict[str, Range]:
    """Of the sessions whose first turn is counted: how many, how many ended whole, their mean time if all."""
    assert load.session is not None
    n, spans = 0, []
    for session in range(int(load.session.max()) + 1):
        own = np.flatnonzero(load.session == session)
        if min(own, key=lambda i: due_s[i]) not in counted:
            continue
        n += 1
        if all(kinds[i] == "ok" for i in own):
            spans.append(max(by_index[i].at_s[-1] for i in own) - min(due_s[i] for i in own))
    found = {
        "sessions.sessions": Range(n, n),
        "sessions.completed": Range(len(spans) / n - 1e-9, len(spans) / n + 1e-9),
    }
    turns = _turns_of(load, by_index, kinds, due_s, counted)
    found |= {f"turn {k + 1}.{name}": value for k, row in enumerate(turns) for name, value in row.items()}
    if len(spans) == n:
        mean_s = float(np.mean(spans))
        found["sessions.makespan_mean_s"] = Range(mean_s - LATE_S, mean_s + LATE_S)
    return found


def _turns_of(
    load: Asked, by_index: dict[int, Reply], kinds: list[str], due_s: np.ndarray, counted: set[int]
) -> list[dict[str, Range]]:
    """By place in the session, of sessions whose first turn is counted: how many turns, how many served, the
    mean prompt of those, and the medians of TTFT and E2E."""
    depth = np.zeros(len(kinds), dtype=int)
    opening = np.arange(len(kinds))
    for i, parents in enumerate(load.parents):
        depth[i] = 1 + max((depth[j] for j in parents), default=-1)
        opening[i] = opening[parents[0]] if parents else i
    found = []
    for k in range(int(depth.max()) + 1):
        own = [i for i in np.flatnonzero(depth == k) if opening[i] in counted]
        ok = [by_index[i] for i in own if kinds[i] == "ok"]
        row = {"requests": Range(len(own), len(own)), "ok": Range(len(ok), len(ok))}
        if ok:
            mean = float(np.mean([r.n_prompt_tok for r in ok]))
            row["prompt_tok_mean"] = Range(mean - 1e-6, mean + 1e-6)
        if len(ok) == len(own) >= 11:
            for name, at in (("ttft", 0), ("e2e", -1)):
                median = quantile(np.array([r.at_s[at] - due_s[r.index] for r in ok]), 0.5)
                row[name] = Range(median - LATE_S, median + LATE_S)
        found.append(row)
    return found
