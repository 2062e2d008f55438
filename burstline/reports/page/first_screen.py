"""The first screen of a run: how fast, at what load, what limits it, what next, and the pictures of it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from burstline.measure.metrics.definitions import METRICS, latencies
from burstline.measure.metrics.slo import parse_slo
from burstline.measure.record.columns import Columns, Floats, Ints
from burstline.measure.stats.estimates import early_stopping_floor
from burstline.measure.stats.figure import Absent, Estimate, known
from burstline.reports.blocks import MARKS, Banner, Plot, Tile
from burstline.reports.figures import first_screen, roofline
from burstline.reports.figures.drawing import WIDE
from burstline.reports.figures.run_figures import Span
from burstline.reports.model.comparison import QUANTILES, Case, View, sending_order
from burstline.reports.model.sweeps import Sweep
from burstline.reports.number_format import duration, interval, scale_of, with_unit
from burstline.reports.page.answer import cut_short, failures, few_ended, rates, tail
from burstline.reports.page.bottleneck import (
    limit_of,
    limited_by,
    limits_at_the_top,
    next_by,
    next_of_sweep,
    used,
)
from burstline.reports.page.digest import FAILURES
from burstline.reports.page.estimate_tables import title_of
from burstline.reports.page.sweep_words import best_loads, best_points, limits, slo_words, slos_words
from burstline.reports.sentences import LIMITS, say
from burstline.roofline.reconcile.reconciliation import NotReconciled, Reconciliation
from burstline.wording import counted

LONG: Final = 80
"""Letters of an advice that is no short answer."""
CLAUSE: Final = re.compile(r"; |: | \(")
"""What ends the first clause of a reason: the rest stands with the hardware."""
STALLED: Final = 0.1
"""The share of a request's time from which on stalls are told under the picture."""
MIDDLE: Final = 640.0
"""How wide the latencies over time are drawn beside two other columns, CSS pixels."""


def strip(verdict: Banner) -> Banner:
    """The verdict in one line: SLOs in short words; "What next?" has the first advice."""
    chips = []
    for each in verdict.targets:
        is_rated = each.result in MARKS
        measured = each.measured if is_rated else each.measured.partition(", ")[0]
        text, reason = slos_words(each.text.split(" and ")), each.reason if is_rated else ""
        chips.append(replace(each, text=text, measured=measured, reason=reason))
    k = next((k for k, reason in enumerate(verdict.reasons) if reason.advice), -1)
    reasons = (replace(r, advice="") if at == k else r for at, r in enumerate(verdict.reasons))
    return replace(verdict, targets=tuple(chips), reasons=tuple(reasons))


def tiles(view: View) -> list[Tile]:
    """The four answers; one that is not known is left out."""
    return [tile for tile in (_how_fast(view), _load(view), _limit(view), _next(view)) if tile.value]


def sweep_tiles(sweep: Sweep, cases: Sequence[Case]) -> list[Tile]:
    """The four answers of a sweep: at the load that gives most, and at the first that is too much."""
    best = next(iter(best_points(sweep)), None)
    label, at = (best.label, best.load) if best else (sweep.labels[0], sweep.loads[0])
    having = [(load, case) for load, case in zip(sweep.loads, cases, strict=True) if label in case.labels]
    own = {load: case.named(label).views[0] for load, case in having}
    last = next((p.load for p in sweep.of(label) if p.missed or p.overloaded), list(own)[-1])
    is_known = any(p.missed or p.overloaded or not p.doubts for p in sweep.of(label))
    code = limited_by(own[last].summary, own[last].manifest)[0] if is_known else "limit.unknown"
    of_each = limits_at_the_top(sweep, cases) if len(sweep.labels) > 1 else ()
    why = " ".join((*[f"{label} at {last}."] * is_known, limits(sweep), *of_each))
    tiles = [
        Tile("How fast?", speed(own[at], "p50") if best else "", f"Medians at {at} with {label}."),
        Tile("At what load?", f"{rates(own[at])} at {at}" if best else "At none", best_loads(sweep)),
        Tile("What limits it?", LIMITS.get(code, ""), why),
        next_tile(next_of_sweep(sweep, cases)),
    ]
    return [tile for tile in tiles if tile.value]


def _how_fast(view: View) -> Tile:
    """`13.7 s, then 115 ms per token`: the medians, or the means of too few requests for a median."""
    p = next((p for p in ("p50", "mean") if _speed_figures(view, p)), "mean")
    ends = {key: interval(f, scale_of([f])) for key, f in _speed_figures(view, p).items()}
    names = ", ".join(f"{title_of(key)} {p} {end}".rstrip() for key, end in ends.items())
    return Tile("How fast?", speed(view, p), f"{names}. {tail(view.summary, view.manifest)}".strip())


def _speed_figures(view: View, p: str) -> dict[str, Estimate]:
    """The latencies that say how fast a run is, at a percentile, by metric; those that are known."""
    keys = ("ttft", "tpot") if view.is_generating else ("e2e",)
    figures = {key: view.summary.figure("metrics", key, p) for key in keys}
    return {key: f for key, f in figures.items() if isinstance(f, Estimate) and np.isfinite(f.point)}


def speed(view: View, p: str) -> str:
    """`13.7 s, then 115 ms per token` at a percentile, "" where none is known."""
    told = {key: with_unit(figure) for key, figure in _speed_figures(view, p).items()}
    return ", ".join(f"then {text} per token" if key == "tpot" else text for key, text in told.items())


def _load(view: View) -> Tile:
    """`34.0 req/s · 2,170 tok/s`, the most in flight, and what failed or was cut short."""
    summary, parts = view.summary, []
    most = counted(known(summary.concurrency.max) or 0, "request")
    if most not in f"0 requests {limit_of(summary, view.manifest)}":  # a number stands once
        parts.append(f"at most {most} in flight")
    if isinstance(lasted := summary.window.length_s, Estimate):
        parts.append(f"{duration(lasted.point)} measured")
    first = f"{', '.join(parts).capitalize()}." if parts else ""
    is_told = any(reason.code in FAILURES for reason in summary.verdict.reasons)
    details = " ".join(
        filter(None, (first, few_ended(view), cut_short(view), "" if is_told else failures(view)))
    )
    told, rate = rates(view), summary.throughput.requests_per_s
    if not told and view.has_served and isinstance(rate, Absent):
        told, details = "Unknown", f"{rate.reason[:1].upper()}{rate.reason[1:]}. {details}".rstrip()
    return Tile("At what load?", told, details)


def _limit(view: View) -> Tile:
    """What limited the run in two or three words, then how that shows."""
    code, _ = limited_by(view.summary, view.manifest)
    text = limit_of(view.summary, view.manifest, hardware=False)
    begun, _, rest = text.partition(": ")
    if begun.startswith(("Limited", "What limited")) and rest and code != "limit.token-budget":
        text = f"{rest[:1].upper()}{rest[1:]}"
    elif code in ("limit.refused", "limit.lost"):  # without what limited the others
        text = f"{text.partition('. ')[0].removesuffix('.')}."
    lacking = view.summary.roofline
    why = f"No roofline: {CLAUSE.split(lacking.absent)[0]}." if isinstance(lacking, NotReconciled) else ""
    return Tile("What limits it?", LIMITS.get(code, ""), f"{text} {why}".rstrip())


def _next(view: View) -> Tile:
    """The first step: after a valid run by what limited it, else what the verdict advises."""
    first = next((reason for reason in view.summary.verdict.reasons if reason.advice), None)
    step = first.advice if first else next_by(view)
    if first and len(step) > LONG and first.code in FAILURES:
        return Tile("What next?", "Find out why requests failed", step)
    return next_tile(step)


def next_tile(step: str) -> Tile:
    """A step as the answer to what to do next: its first clause, and the rest below."""
    step = step.removeprefix("Next: ")
    found = re.search(r"[,.;] (?=which |so that |[A-Z])", step)
    value, rest = (step[: found.start()], step[found.end() :]) if found else (step, "")
    return Tile("What next?", f"{value[:1].upper()}{value[1:]}".removesuffix("."), rest)


def pictures(view: View) -> list[Plot]:
    """Latency over time, where a request's time goes, the percentiles, the hardware's limit where known."""
    shown = [key for key in ("ttft", "tpot", "e2e") if key in view.headline]
    held = used(view.summary)
    bounds = bounds_of(view)
    values = {title_of(key): latencies(METRICS[key], view.needed) for key in shown}
    values = {title: each for title, each in values.items() if np.isfinite(each).any()}
    if not values:
        return []
    plots = [_over_time(view, values, bounds, MIDDLE if held else WIDE), *_time_split(view)]
    plots.append(_ranges(view, shown, bounds))
    if held and isinstance(found := view.summary.roofline, Reconciliation):
        shown_at = roofline.overview(found)
        plots.append(replace(shown_at, finding=held, explained=shown_at.finding))
    return plots


def bounds_of(view: View) -> dict[str, dict[str, float]]:
    """The upper bounds of the SLOs on latencies, by the metric's title and by their words."""
    found: dict[str, dict[str, float]] = {}
    for slo in map(parse_slo, view.manifest.targets):
        if slo.metric in ("ttft", "tpot", "e2e") and slo.op == "<=":
            words = slo_words(slo).removeprefix(title_of(slo.metric)).strip()
            found.setdefault(title_of(slo.metric), {})[words] = slo.bound
    return found


def is_burst(view: View) -> bool:
    return len(view.columns) > 1 and float(np.ptp(view.columns.due_s)) == 0


def overtaken(c: Columns) -> int:
    """How many requests got their first token before one that was sent earlier and by more than chance."""
    sent = sending_order(c)
    first = c.first_s[sent][c.ok[sent]]
    latest = np.maximum.accumulate(first) if len(first) else first
    step = float(np.median(np.diff(np.sort(first)))) if len(first) > 1 else 0.0
    return int((first < latest - 10 * max(step, 1e-3)).sum())


def _over_time(view: View, latencies: Mapping[str, Floats], bounds: first_screen.Bounds, wide: float) -> Plot:
    c, n_late = view.needed, 0
    title, label, x = "Latency over time", "when the request was due (s)", c.due_s
    if is_burst(view):
        title, label = "Latency along the queue", "place in the server's order of first tokens"
        sent = sending_order(c)  # what has no first token stands last
        served = sent[np.argsort(c.first_s[sent], kind="stable")]
        x, n_late = np.argsort(served).astype(np.float64) + 1, overtaken(c)
    finding = _trend(view, next(iter(latencies)))
    if n_late:
        finding = f"Not served in the order of sending: {counted(n_late, 'request')} overtook others."
    greyed = [] if is_burst(view) else left_out(view, float(c.due_s.max()))
    return first_screen.over_time(x, label, latencies, bounds, greyed, finding, title=title, wide=wide)


def _trend(view: View, name: str) -> str:
    """What the picture shows first: a drift, or that there is none; "" where neither is clear."""
    if is_burst(view):
        slope_s, came_s = known(view.summary.burst.ttft_slope_s_per_request), view.latency("ttft")
        came_s = came_s[np.isfinite(came_s)]
        # The last of a queue waits for all others; if that is little of its TTFT, there was no queue.
        rises = slope_s is not None and slope_s * len(came_s) > 0.5 * came_s.max(initial=0.0) > 0
        return f"{name} rises along the queue: later requests waited for earlier ones." if rises else ""
    steady = view.summary.stationarity
    p, change = known(steady.ttft_trend_p), known(steady.ttft_change_fraction)
    if p is None or change is None:
        return ""
    when = "after the warm-up" if known(view.summary.window.n_warm_up) else "during the run"
    if abs(change) > 0.1:
        return f"{name} {'rose' if change > 0 else 'fell'} {when}." if p < 0.05 else ""
    # What rises and falls again has no trend, but is not steady either.
    values = latencies(METRICS["ttft"], view.counted)[np.argsort(view.counted.due_s, kind="stable")]
    medians = [np.median(part) for part in np.array_split(values[np.isfinite(values)], 8) if len(part)]
    return f"{name} shows no drift {when}." if max(medians, default=0) <= 2 * min(medians, default=0) else ""


def left_out(view: View, end_s: float) -> list[Span]:
    """Warm-up and drain of an open loop: before and after the window in which its numbers count."""
    window = view.summary.window
    start, last = known(window.start_s), known(window.end_s)
    if not isinstance(window.n_warm_up, Estimate) or start is None or last is None:
        return []
    spans = ((float(view.columns.due_s.min()), start, "warm-up"), (last, end_s, "drain"))
    return [span for span in spans if span[1] > span[0]]


def _time_split(view: View) -> Iterator[Plot]:
    """The parts of E2E round its percentiles, each request's by the client's clock, and by the server's."""
    c = view.counted
    e2e = np.where(c.ok & ~c.came_at_once, c.last_s - c.origin_s, np.nan)
    order = np.argsort(e2e, kind="stable")[: int(np.isfinite(e2e).sum())]
    if not len(order) or not view.is_generating:
        return
    parts = _parts(c, known(view.summary.stalls.threshold_s))
    names = [p for p in ("p50", "p90", "p99") if known(view.summary.figure("metrics", "e2e", p)) is not None]
    groups: dict[str, Ints] = {"mean": order}
    n = int(np.count_nonzero(~np.isnan(view.counted.due_s)))
    if names:
        half = max(2, len(order) // 200)
        at = {p: min(round(QUANTILES[p] * (n - 1)), len(order) - 1) for p in names}
        groups = {p: order[max(k - half, 0) : k + half + 1] for p, k in at.items()}
    elif len(order) > 1:
        groups["slowest"] = order[-1:]
    waits = c.first_s - c.origin_s
    texts = [f"{float(waits[own].mean() / e2e[own].mean()):.0%}" for own in groups.values()]
    first, last = next(iter(groups)), list(groups)[-1]
    finding = f"Waiting for the first token is {texts[0]} of the time at {first.replace('mean', 'the mean')}"
    if last != first and texts[-1] != texts[0]:
        finding += f" and {texts[-1]} at {last}"
    stalls = {name: float(parts["stalls"][own].mean() / e2e[own].mean()) for name, own in groups.items()}
    worst = max(stalls, key=lambda name: stalls[name])
    if stalls[worst] >= STALLED:
        finding += f"; stalls between tokens are {stalls[worst]:.0%} at {worst.replace('mean', 'the mean')}"
    told = view.summary.agreement
    queue, prefill = known(told.server_queue_mean_s), known(told.server_prefill_mean_s)
    also = ""
    if queue is not None and prefill is not None:
        also = say("time-split.server", queue=duration(queue), prefill=duration(prefill))
    yield first_screen.time_split(parts, groups, f"{finding}.", also)


def _parts(c: Columns, threshold_s: float | None) -> dict[str, Floats]:
    """Seconds of each request by what it waited for; NaN where it failed."""
    stalled: Floats = np.zeros(len(c))
    if threshold_s is not None and len(c.event_s) > 1:
        gaps = np.diff(c.event_s, prepend=c.event_s[0])
        gaps[~c.follows | (gaps <= threshold_s)] = 0
        owner = np.repeat(np.arange(len(c)), c.n_events)
        stalled = np.bincount(owner, weights=gaps, minlength=len(c)).astype(np.float64)
    late = np.nan_to_num(c.sent_s - c.origin_s)
    wait, decode = c.first_s - c.origin_s - late, c.last_s - c.first_s - stalled
    queue, prefill = c.server_queue_s, c.server_prefill_s
    if (queue + prefill <= wait)[c.ok].all():  # false where the server does not tell them
        waits = {"queue": queue, "prefill": prefill, "network, HTTP, client": wait - queue - prefill}
    else:
        waits = {"queue + prefill": wait}
    return {"sent late": late, **waits, "decode": decode, "stalls": stalled}


def _ranges(view: View, shown: Sequence[str], bounds: first_screen.Bounds) -> Plot:
    figures: dict[str, dict[str, Estimate]] = {}
    for key in shown:
        each = ((p, view.summary.figure("metrics", key, p)) for p in QUANTILES)
        figures[title_of(key)] = {p: f for p, f in each if isinstance(f, Estimate) and np.isfinite(f.point)}
    values = {title_of(key): view.latency(key) for key in shown}
    return first_screen.ranges(figures, values, bounds, few(view))


def few(view: View) -> str:
    """`8 requests: p50 needs 11, p90 64.`, or why others are missing; "" where none is."""
    figures = [view.summary.figure("metrics", "e2e", p) for p in ("p50", "p90", "p95", "p99")]
    absent = {p: f for p, f in zip(QUANTILES, figures, strict=False) if isinstance(f, Absent)}
    n = int(view.counted.failed.sum() + view.counted.ok.sum())
    floors = {p: early_stopping_floor(QUANTILES[p]) for p in absent}
    needed = [f"{p} {floor:,}" for p, floor in floors.items() if n < floor]
    if not needed:
        return f"{next(iter(absent.values())).reason}." if absent else ""
    return f"{counted(n, 'request')}: {', '.join(needed).replace(' ', ' needs ', 1)}."
