"""Every number of a run: a pure function of its records and its telemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from burstline.measure.metrics import throughput
from burstline.measure.metrics.accounting import broken_laws, conservation, counts, lengths
from burstline.measure.metrics.definitions import METRICS, QUANTILES, Metric, latencies, samples_of
from burstline.measure.metrics.instrument import instrument, pacing
from burstline.measure.metrics.prefix_cache import CacheUse, prefix_cache, uses_of
from burstline.measure.metrics.server import agreement, cost, memory
from burstline.measure.metrics.sessions import Turns, session_figures, turns_of
from burstline.measure.metrics.slo import NO_CRITERION, Slo, attainment, judge_slos, missed, parse_slo
from burstline.measure.metrics.steady_state import NOT_STEADY, Steady, cold_start, steady_part
from burstline.measure.metrics.throughput import Lives, good_rates, good_rates_in, throughputs_in
from burstline.measure.record.columns import Columns
from burstline.measure.record.manifest import Manifest, Status
from burstline.measure.record.record import NO_FAILURES, Outcome
from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import (
    CountedWindow,
    Goodput,
    MetricFigures,
    Quantiles,
    Stationarity,
    Summary,
    Throughput,
)
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import Grade, PercentileGrade, Reason, State, Verdict, widened
from burstline.measure.stats.estimates import Absent, Figure, early_stopping_bound, label, measured
from burstline.measure.stats.figure import inverse, known, noted
from burstline.measure.stats.quantiles import Samples, extremes, mean, percentiles
from burstline.measure.stats.serial_correlation import (
    OrderedSamples,
    bound_in_order,
    mean_in_order,
    percentile_in_order,
    share_in_order,
)
from burstline.measure.verdict import buffering, grades
from burstline.measure.verdict.judge import HEADLINE, caveats, judge


def summarize_run(run: Run, not_comparable: tuple[Reason, ...] = ()) -> Summary:
    """The summary of a run on disk, from its files alone; `not_comparable` are reasons from other checks."""
    return summarize(
        run.columns,
        run.manifest,
        telemetry=run.watched,
        status=run.status,
        turns=turns_of(run),
        uses=uses_of(run),
        not_comparable=not_comparable,
    )


def summarize(
    planned: Columns,
    manifest: Manifest,
    *,
    telemetry: Telemetry | None = None,
    status: Status = "complete",
    turns: Turns | None = None,
    uses: Sequence[CacheUse] = (),
    not_comparable: tuple[Reason, ...] = (),
) -> Summary:
    """Counts, metrics, throughput and the rest of all `planned` requests, with the verdict on them.

    `turns` are their places in sessions, if there are any; `uses` what each did to the prefix cache.
    """
    slos = tuple(map(parse_slo, manifest.targets))
    slos = tuple(replace(slo, advice="") for slo in slos) if manifest.is_probe else slos
    part = part_of(planned, manifest, status, turns)
    watched = (telemetry or Telemetry({}, [])).over(part.planned.end_s)
    summary = _numbers(part, manifest, watched, turns, slos)
    if (gathering := buffering.gathered(part.counted)) and gathering.code != buffering.BUNCHED:
        summary = replace(summary, grades=grades.held(summary.grades))
    summary = replace(summary, prefix_cache=prefix_cache(part.planned, manifest, watched, uses))
    cold, slow_start = _cold(part, manifest, turns, summary.metrics["ttft"])
    warnings = (*caveats(summary, manifest, status), *(() if cold else slow_start), *part.ran_out)
    verdict = judge(
        summary,
        manifest,
        status,
        decisive={*HEADLINE, *((slo.metric, slo.statistic) for slo in slos if slo.statistic)},
        cause=_cause(part.whole, summary.counts),
        others={
            # In a closed loop of sessions a slot is a session's, also while its user thinks.
            State.FAILED: broken_laws(summary, part.planned, None if turns else manifest.asked.concurrency),
            State.NOT_STATIONARY: part.steady.reasons if part.steady else (),
            State.NOT_COMPARABLE: not_comparable,
            State.COLD: slow_start if cold else (),
        },
        warnings=(*filter(None, [gathering, buffering.in_one_event(part.counted)]), *warnings),
    )
    summary = replace(summary, verdict=verdict)
    return replace(summary, targets=judge_slos(slos, summary, part.counted))


def _numbers(
    part: Part, manifest: Manifest, watched: Telemetry, turns: Turns | None, slos: Sequence[Slo]
) -> Summary:
    """The summary before its verdict and its targets, which are judged by it."""
    planned, whole, inside, c, steady = part.planned, part.whole, part.inside, part.counted, part.steady
    closed, window, n_cores = manifest.asked.concurrency is not None, part.window, manifest.host.cores or 1
    client = instrument(
        planned, manifest.drivers, watched, closed_loop=closed, n_cores=n_cores, started=manifest.server_here
    )
    beyond_s = known(client.canary_beyond_p99_s) or 0.0
    graded = {name: _by_interval(name, rows, c, steady) for name, rows in grades.grades(c, beyond_s).items()}
    if steady:
        how = (part.lives if closed else None, steady.n_cosines, steady.too_short)
        rates = throughputs_in(inside, steady.window, steady.block_s, *how)
    else:
        rates = throughput.throughputs(inside)
    late = throughput.read_error(inside, window, beyond_s)
    share = known(late) or 0.0
    came = {name: rates.figure(name) for name in throughput.RATES}
    rates = Throughput(**{name: widened(rate, share * (known(rate) or 0.0)) for name, rate in came.items()})
    off_s, per_token = known(client.canary_p99_s) or 0.0, ("tpot", "ntpot")
    # Their tokens share an error at a reply's ends.
    n_shares = max(1.0, float(np.median(c.shown_tok[c.ok])) - 1) if c.ok.any() else 1.0
    metrics = {
        name: figures(metric, c, steady, graded.get(name), off_s / (n_shares if name in per_token else 1))
        for name, metric in METRICS.items()
        if metric.of or metric.pooled
    }
    return Summary(
        counts=counts(planned),
        metrics=metrics,
        verdict=Verdict(State.VALID),
        bounds={
            name: _bounds(metric, c, steady)
            for name, metric in METRICS.items()
            if metric.of and metric.failures == "infinite"
        },
        interactivity=Quantiles(
            **{p: inverse(metrics["ntpot"].figure(p), "tok/s") for p in map(label, QUANTILES)}
        ),
        throughput=replace(rates, read_error_fraction=late),
        goodput=_goodput(part, slos, rates),
        window=_window(part),
        stationarity=steady.figures if steady else Stationarity.absent(NOT_STEADY),
        schedule=pacing(planned, closed_loop=closed),
        concurrency=replace(throughput.concurrency(planned, window), **throughput.server_queue(watched)),
        burst=throughput.burst(c),
        stalls=throughput.stalls(c),
        lengths=lengths(whole),
        instrument=client,
        memory=memory(watched, manifest.drivers, manifest.identity),
        cost=cost(
            rates,
            watched,
            manifest.usd_per_hour,
            window=(window.start_s, window.end_s) if window else None,
            server_here=manifest.on_this_machine,
        ),
        conservation=conservation(planned, watched),
        agreement=agreement(whole, watched),
        grades=graded,
        sessions=session_figures(whole, turns, steady.window.start_s if steady else None) if turns else None,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """Which requests count for what.

    Of all `planned` requests `whole` leaves out those that were abandoned deliberately: they add load but
    measure no latency. `inside` are those that belong to the load's own time, `counted` those that were due
    in the `steady` part, if there is one. `lives` are its requests, or sessions.
    """

    planned: Columns
    whole: Columns
    inside: Columns
    counted: Columns
    lives: Lives
    steady: Steady | None
    window: throughput.Window | None
    ran_out: tuple[Reason, ...]


def part_of(planned: Columns, manifest: Manifest, status: Status, turns: Turns | None) -> Part:
    asked = manifest.asked
    ran_out: tuple[Reason, ...] = ()
    if manifest.may_end_early:
        needed = planned.without(Outcome.NOT_SENT)
        if asked.duration_s is not None and len(needed) == len(planned):
            ran_out = _ran_out(planned, asked.duration_s)
        planned = needed
    duration_s = (manifest.ended_s or asked.duration_s) if status == "complete" else None
    in_time = planned
    if manifest.lost:  # the window ends with the load that was asked for
        duration_s = min(each.at_s for each in manifest.lost)
        in_time = planned.without(Outcome.DRIVER_LOST)
        in_time = in_time.where(in_time.due_s <= duration_s)
    whole = planned.without(Outcome.ABANDONED)
    # Requests never sent (the run was interrupted) are outside the window.
    inside = in_time.without(Outcome.ABANDONED).without(Outcome.NOT_SENT)
    lives = Lives.of(in_time, turns.session if turns else None)
    users = asked.concurrency
    steady = steady_part(inside, asked.pattern, concurrency=users, duration_s=duration_s, lives=lives)
    window = steady.window if steady else throughput.whole_run(inside)
    counted = steady.counted(inside) if steady else inside
    return Part(planned, whole, inside, counted, lives, steady, window, ran_out)


def _cold(
    part: Part, manifest: Manifest, turns: Turns | None, ttft: MetricFigures
) -> tuple[bool, tuple[Reason, ...]]:
    """Whether slow first requests spoil TTFT's figures, and what to say of them."""
    cold, c = cold_start(part.whole, manifest.asked.concurrency, turns.opens if turns else None), part.counted
    if cold is None:
        return False, ()
    if part.steady is not None and cold.until_s < part.steady.window.start_s:
        return False, (cold.left_out(),)
    is_cold = np.isin(c.index, cold.which)
    rest = samples_of(METRICS["ttft"], c.where(~is_cold))
    printed = {p: ttft.figure(p) for p in map(label, QUANTILES)}
    code = "cold.probe" if manifest.is_probe else "cold.warmed" if manifest.asked.warmup else "cold"
    return cold.counted(printed, percentiles(rest, QUANTILES, "s"), int(is_cold.sum()), code)


def _ran_out(c: Columns, duration_s: float) -> tuple[Reason, ...]:
    """What to say of a loop by time whose requests were all sent before its time was over."""
    last_s = float(np.nanmax(c.dispatched_s, initial=-np.inf))
    if np.isinf(last_s) or last_s > 0.9 * duration_s:
        return ()
    return (Reason.of("ran-out", n=len(c), last_s=last_s, asked_s=duration_s),)


def _goodput(part: Part, slos: Sequence[Slo], served: Throughput) -> Goodput:
    """What met every criterion for single requests: rates in the window, and the share of those due in it."""
    inside, c, steady = part.inside, part.counted, part.steady
    criteria = [slo for slo in slos if slo.per_request]
    if not criteria:
        return replace(Goodput.absent(NO_CRITERION), criteria=())
    names = tuple(slo.text for slo in criteria)
    misses, of_those_due = missed(inside, criteria), missed(c, criteria)
    if misses is None or of_those_due is None:
        return replace(Goodput.absent(throughput.UNCOUNTED), criteria=names)
    met = misses <= 1
    if steady is None:
        return Goodput(names, attainment(of_those_due <= 1), *good_rates(inside, met))
    in_order = _in_order(Samples.per_request(of_those_due), c, steady)
    share = share_in_order(in_order) if in_order else attainment(of_those_due <= 1, steady.too_short)
    return Goodput(names, share, *good_rates_in(inside, steady.window, met, share, served))


def figures(
    metric: Metric,
    c: Columns,
    steady: Steady | None = None,
    graded: Mapping[str, PercentileGrade] | None = None,
    canary_s: float | None = None,
) -> MetricFigures:
    """The metric's percentiles, mean, spread and ends, with what late reading can have done to them.

    `graded` says that of each percentile; `canary_s` is how far the canary was off (p99).
    """
    if not c.ok.any() and metric.failures == "infinite":
        after = steady is not None and steady.n_warm_up > 0
        return MetricFigures.absent(throughput.NO_LATER_SUCCESS if after else throughput.NO_SUCCESS)
    samples = samples_of(metric, c)
    if metric.pooled is None and not np.isfinite(samples.value).any():
        return MetricFigures.absent(Absent("no request has it", "undefined"))
    in_order = _in_order(samples, c, steady)
    quantiles, average = _percentiles(samples, metric.unit, in_order), mean(samples, metric.unit)
    average = mean_in_order(average, in_order) if in_order else average
    if steady and steady.too_short:
        quantiles = {p: noted(figure, steady.too_short) for p, figure in quantiles.items()}
        average = noted(average, steady.too_short)
    moved_s = {p: each.read_effect_s for p, each in (graded or {}).items()}
    return MetricFigures(
        **{p: widened(figure, moved_s.get(p)) for p, figure in quantiles.items()},
        mean=average,
        **extremes(samples, metric.unit),
        instrument_error=grades.most_moved(graded, canary_s),
    )


def _in_order(samples: Samples, c: Columns, steady: Steady | None) -> OrderedSamples | None:
    """What intervals come from; None where there are none."""
    if steady is None or steady.too_short:
        return None
    return OrderedSamples.of(samples, c.due_s, steady.n_cosines)


def _percentiles(samples: Samples, unit: str, in_order: OrderedSamples | None) -> dict[str, Figure]:
    found = percentiles(samples, QUANTILES, unit)
    if in_order is None:
        return found
    return {label(p): percentile_in_order(found[label(p)], in_order, p) for p in QUANTILES}


def _by_interval(
    name: str, graded: Mapping[str, PercentileGrade], c: Columns, steady: Steady | None
) -> Mapping[str, PercentileGrade]:
    """The grades; a percentile is unreliable if late sends moved it beyond the interval that it has without.

    Sends of a burst shape its load: none is late.
    """
    as_sent = any(each.grade == Grade.AS_SENT for each in graded.values())
    if not (as_sent and np.array_equal(c.origin_s, c.due_s)):
        return graded
    own = Samples.per_request(latencies(METRICS[name], c) - np.nan_to_num(c.sent_s - c.due_s))
    without = _percentiles(own, "s", _in_order(own, c, steady))
    return {
        p: replace(each, grade=Grade.UNRELIABLE)
        if each.grade == Grade.AS_SENT and grades.moved_beyond(without[p], each.send_effect_s or 0.0)
        else each
        for p, each in graded.items()
    }


def _bounds(metric: Metric, c: Columns, steady: Steady | None) -> Quantiles:
    if steady and steady.too_short:
        return Quantiles.absent(Absent(steady.too_short, "too-short"))
    if in_order := _in_order(samples_of(metric, c), c, steady):
        return Quantiles(*(bound_in_order(in_order, p, metric.unit) for p in QUANTILES))
    values = latencies(metric, c)
    return Quantiles(*(early_stopping_bound(values, p, metric.unit) for p in QUANTILES))


def _window(part: Part) -> CountedWindow:
    """From when until when rates count, and what was left out in front as warm-up."""
    window, steady = part.window, part.steady
    if window is None:
        return CountedWindow.absent(throughput.NO_SUCCESS)
    return CountedWindow(
        start_s=measured(window.start_s, "s", ""),
        end_s=measured(window.end_s, "s", ""),
        warm_up_s=steady.warm_up if steady else NOT_STEADY,
        n_warm_up=measured(steady.n_warm_up, "requests", "", len(part.whole)) if steady else NOT_STEADY,
    )


def _cause(c: Columns, counts: Mapping[str, int]) -> str:
    """The error of the first request that failed in the most frequent way, at most 200 characters."""
    kinds = {name: n for name, n in counts.items() if name not in NO_FAILURES}
    if not any(kinds.values()):
        return ""
    worst = max(kinds, key=kinds.__getitem__)
    errors = c.table.column("error").filter(pa.array(c.having("outcome", [worst])))
    return next((str(error)[:200] for error in errors.to_pylist() if error), "")
