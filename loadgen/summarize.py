"""Every number of a run: a pure function of its records and its telemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from burstline.loadgen.metrics import throughput
from burstline.loadgen.metrics.definitions import METRICS, QUANTILES, Metric, latencies, samples_of
from burstline.loadgen.metrics.instrument import instrument, pacing
from burstline.loadgen.metrics.laws import broken_laws
from burstline.loadgen.metrics.memory import cost, memory
from burstline.loadgen.metrics.server_histograms import agreement
from burstline.loadgen.metrics.sessions import Turns, session_figures, turns_of
from burstline.loadgen.metrics.slo import NO_CRITERION, Goal, attainment, good, judge_goals, parse_goal
from burstline.loadgen.metrics.steady_state import (
    NO_START_WAVE,
    NOT_STEADY,
    ColdStart,
    Steady,
    cold_start,
    steady_part,
)
from burstline.loadgen.metrics.throughput import good_rates, good_rates_in, throughputs_in
from burstline.loadgen.metrics.token_accounting import cached_by_counters, conservation, counts, lengths
from burstline.loadgen.record.columns import Columns, columns_of
from burstline.loadgen.record.drive_report import DriveReport, LostDriver
from burstline.loadgen.record.manifest import ArrivalFacts, RunNoise, WarmUpBursts
from burstline.loadgen.record.record import NO_FAILURES, Outcome
from burstline.loadgen.record.rundir import Run
from burstline.loadgen.record.summary import (
    CountedWindow,
    Goodput,
    MetricFigures,
    Quantiles,
    Stationarity,
    Summary,
)
from burstline.loadgen.record.telemetry import Telemetry
from burstline.loadgen.record.verdict import PercentileGrade, Reason, State, Verdict
from burstline.loadgen.stats.estimates import Absent, Figure, early_stopping_bound, label, measured
from burstline.loadgen.stats.figure import inverse
from burstline.loadgen.stats.quantiles import mean, percentiles
from burstline.loadgen.stats.serial_correlation import (
    OrderedSamples,
    bound_in_order,
    mean_in_order,
    percentile_in_order,
    share_in_order,
)
from burstline.loadgen.verdict.grades import grades, most_moved, widened
from burstline.loadgen.verdict.judge import HEADLINE, Evidence, judge
from burstline.loadgen.verdict.warnings import caveats
from burstline.servers.identity import Identity
from burstline.workloads.spec import MAX_FAILURES


@dataclass(frozen=True, slots=True)
class Context:
    """What a summary needs in addition to the records.

    `concurrency` is a closed loop's, None in an open one. `not_comparable` and `not_stationary` are reasons
    from other checks. `arrivals` are the planned pattern, rate and burstiness; without them no part of the
    run counts as steady. `usd_per_hour` is the price of the server's hardware. `turns` are the places of the
    requests in their sessions, if there are any. `lost` are the drivers that were lost during the load.
    """

    telemetry: Telemetry = field(default_factory=Telemetry.empty)
    reports: Sequence[DriveReport] = ()
    identity: Identity | None = None
    status: str = "complete"
    death: str = ""
    concurrency: int | None = None
    duration_s: float | None = None
    server_here: bool = False
    noise: Mapping[str, RunNoise] = field(default_factory=dict)
    not_comparable: tuple[Reason, ...] = ()
    not_stationary: tuple[Reason, ...] = ()
    goals: tuple[Goal, ...] = ()
    arrivals: ArrivalFacts | None = None
    expected_cached: float | None = None
    warm_up: WarmUpBursts | None = None
    max_failures: float = MAX_FAILURES
    usd_per_hour: float | None = None
    turns: Turns | None = None
    cancel_share: float = 0.0
    lost: tuple[LostDriver, ...] = ()


def summarize_run(run: Run, not_comparable: tuple[Reason, ...] = ()) -> Summary:
    """The summary of a run on disk, from its files alone; `not_comparable` are reasons from other checks."""
    manifest = run.manifest
    context = Context(
        telemetry=run.watched,
        reports=manifest.drivers,
        identity=manifest.identity,
        status=run.status,
        death=(manifest.error or "") if run.status == "failed" else "",
        concurrency=manifest.concurrency,
        duration_s=manifest.asked.duration_s,
        noise=manifest.noise,
        server_here=manifest.server is not None and not manifest.server.attached,
        not_comparable=not_comparable,
        arrivals=manifest.arrivals,
        expected_cached=manifest.load.expected_cached_fraction if manifest.load else None,
        warm_up=manifest.load.warm_up if manifest.load else None,
        max_failures=manifest.max_failures,
        usd_per_hour=manifest.usd_per_hour,
        cancel_share=hang_ups.share if (hang_ups := manifest.asked.cancel_share) else 0.0,
        goals=tuple(map(parse_goal, manifest.targets)),
        turns=turns_of(run),
        lost=manifest.lost,
    )
    return summarize(run.columns, context)


def summarize(records: pa.Table | Columns, context: Context | None = None) -> Summary:
    """Counts, metrics, throughput and the rest, with the verdict on them."""
    context = context or Context()
    planned = records if isinstance(records, Columns) else columns_of(records)
    ran_out = None
    if context.concurrency is not None and context.duration_s is not None:
        # A loop that goes by time is planned longer than it can last: what it did not need was not asked for.
        asked, planned = planned, planned.without(Outcome.NOT_SENT)
        if len(planned) == len(asked):
            ran_out = _ran_out(planned, context.duration_s)
    # Deliberately abandoned requests add load but measure no latency.
    whole = planned.without(Outcome.ABANDONED)
    pattern, closed = context.arrivals.pattern if context.arrivals else None, context.concurrency is not None
    # Requests never sent (the run was interrupted) are outside the window.
    inside = whole.without(Outcome.NOT_SENT)
    duration_s = context.duration_s if context.status == "complete" else None
    if context.lost:  # the window ends with the load that was asked for
        duration_s = min(each.at_s for each in context.lost)
        inside = inside.without(Outcome.DRIVER_LOST).due_before(duration_s)
    steady = steady_part(inside, pattern, concurrency=context.concurrency, duration_s=duration_s)
    window = steady.window if steady else throughput.whole_run(inside)
    c = inside.due_from(window.start_s) if steady and window else inside
    watched = context.telemetry.over(planned.end_s)
    client = instrument(planned, context.reports, watched, closed_loop=closed)
    graded = grades(c, _known(client.canary_beyond_p99_s) or 0.0)
    opening = context.turns.opens if context.turns else None
    cold = cold_start(whole, context.concurrency, opening)
    rates = (
        throughputs_in(inside, steady.window, steady.block_s, steady.least_block if closed else None)
        if steady
        else throughput.throughputs(inside)
    )
    metrics = {
        name: figures(metric, c, steady, graded.get(name))
        for name, metric in METRICS.items()
        if metric.of or metric.pooled
    }
    unjudged = Summary(
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
        throughput=rates,
        goodput=_goodput(inside, c, steady, context),
        window=_window(whole, steady, cold),
        stationarity=Stationarity(**steady.figures) if steady else Stationarity.absent(NOT_STEADY),
        schedule=pacing(planned, context.arrivals, closed_loop=closed),
        concurrency=replace(throughput.concurrency(planned, window), **throughput.server_queue(watched)),
        burst=throughput.burst(c),
        stalls=throughput.stalls(c),
        lengths=lengths(whole),
        instrument=client,
        memory=memory(watched, context.reports, context.identity),
        cost=cost(rates.output_tok_per_s, watched, context.usd_per_hour),
        conservation=conservation(planned, watched),
        agreement=agreement(whole, watched),
        grades=graded,
        sessions=session_figures(whole, context.turns, steady.window.start_s if steady else None)
        if context.turns
        else None,
    )
    is_cold, slow_start = False, None
    if cold and (steady is None or cold.until_s >= steady.window.start_s):
        is_cold, slow_start = cold.counted(unjudged.metrics["ttft"])
    elif cold:
        slow_start = cold.left_out()
    warnings = caveats(
        unjudged,
        status=context.status,
        server_here=context.server_here,
        expected_cached=context.expected_cached,
        counted_cached=cached_by_counters(watched),
        warm_up=context.warm_up,
        cold=None if is_cold else slow_start,
        cancel_share=context.cancel_share,
        lost=context.lost,
    )
    warnings = (*warnings, *((ran_out,) if ran_out else ()))
    evidence = replace(
        _evidence(unjudged, whole, context, steady),
        # A session counts once in a closed loop, and its branches may be in flight together.
        contradictions=broken_laws(unjudged, planned, None if context.turns else context.concurrency),
        cold=(slow_start,) if is_cold and slow_start else (),
    )
    verdict = judge(evidence, warnings)
    summary = replace(unjudged, verdict=verdict)
    return replace(summary, targets=judge_goals(context.goals, summary, c, context.noise))


def _ran_out(c: Columns, duration_s: float) -> Reason | None:
    """What to say of a loop by time whose requests were all sent before its time was over."""
    if np.isnan(c.dispatched_s).all() or (last_s := float(np.nanmax(c.dispatched_s))) > 0.9 * duration_s:
        return None
    text = f"All {len(c):,} planned requests were sent within {last_s:.3g} s of the {duration_s:g} s asked."
    return Reason("ran-out", text, "The figures hold for that time; ask for it with --requests N.")


def _goodput(inside: Columns, c: Columns, steady: Steady | None, context: Context) -> Goodput:
    """What met every criterion for single requests: rates in the window, and the share of those due in it.

    `inside` are all requests of the load, `c` those that were due in the window.
    """
    criteria = [goal for goal in context.goals if goal.per_request]
    if not criteria:
        return replace(Goodput.absent(NO_CRITERION), criteria=())
    names = tuple(goal.text for goal in criteria)
    met, of_those_due = good(inside, criteria), good(c, criteria)
    if met is None or of_those_due is None:
        return replace(Goodput.absent(throughput.UNCOUNTED), criteria=names)
    if steady is None:
        return Goodput(names, attainment(of_those_due), *good_rates(inside, met))
    least_block = None if context.concurrency is None else steady.least_block
    share = share_in_order(of_those_due, c.due_s, steady.least_block)
    return Goodput(names, share, *good_rates_in(inside, steady.window, steady.block_s, met, least_block))


def figures(
    metric: Metric,
    c: Columns,
    steady: Steady | None = None,
    graded: Mapping[str, PercentileGrade] | None = None,
) -> MetricFigures:
    """The metric's percentiles and its mean, with what late reading can have done to them (`graded`)."""
    if not c.ok.any() and metric.failures == "infinite":
        return MetricFigures.absent(throughput.NO_SUCCESS)
    samples = samples_of(metric, c)
    if metric.pooled is None and not np.isfinite(samples.value).any():
        return MetricFigures.absent(Absent(f"{metric.title} is defined for no request", "undefined"))
    quantiles = percentiles(samples, QUANTILES, metric.unit)
    average = mean(samples, metric.unit)
    if steady:
        in_order = OrderedSamples.of(samples, c.due_s, steady.least_block)
        quantiles = {p: percentile_in_order(figure, in_order, p) for p, figure in quantiles.items()}
        average = mean_in_order(average, in_order)
    graded = graded or {}
    return MetricFigures(
        **{label(p): widened(figure, graded.get(label(p))) for p, figure in quantiles.items()},
        mean=average,
        instrument_error=most_moved(graded),
    )


def _bounds(metric: Metric, c: Columns, steady: Steady | None) -> Quantiles:
    if steady:
        in_order = OrderedSamples.of(samples_of(metric, c), c.due_s, steady.least_block)
        return Quantiles(*(bound_in_order(in_order, p, metric.unit) for p in QUANTILES))
    values = latencies(metric, c)
    return Quantiles(*(early_stopping_bound(values, p, metric.unit) for p in QUANTILES))


def _window(c: Columns, steady: Steady | None, cold: ColdStart | None) -> CountedWindow:
    """From when until when rates count, and what was left out in front as warm-up."""
    window = steady.window if steady else throughput.whole_run(c)
    if window is None:
        return CountedWindow.absent(throughput.NO_SUCCESS)
    wave = steady.start_wave if steady else dict.fromkeys(("ttft_p50_s", "e2e_p50_s"), NO_START_WAVE)
    return CountedWindow(
        start_s=measured(window.start_s, "s", ""),
        end_s=measured(window.end_s, "s", ""),
        warm_up_s=steady.warm_up if steady else NOT_STEADY,
        n_warm_up=measured(steady.n_warm_up, "requests", "", len(c)) if steady else NOT_STEADY,
        cold_requests=measured(cold.n, "requests", "", len(c)) if cold else None,
        cold_slower_s=measured(cold.slower_s, "s", "", cold.n) if cold else None,
        **{f"start_wave_{name}": figure for name, figure in wave.items()},
    )


def _evidence(summary: Summary, c: Columns, context: Context, steady: Steady | None) -> Evidence:
    client = summary.instrument
    return Evidence(
        counts=summary.counts,
        grades=summary.grades,
        decisive={*HEADLINE, *((goal.metric, goal.statistic) for goal in context.goals if goal.statistic)},
        cause=_cause(c, summary.counts),
        death=context.death,
        canary_beyond_s=_known(client.canary_beyond_p99_s),
        waited_fraction=_known(client.client_cpu_wait_fraction),
        throttled_fraction=_known(client.throttled_fraction),
        others_cpu_fraction=_known(client.others_cpu_fraction),
        server_here=context.server_here,
        max_failures=context.max_failures,
        status=context.status,
        not_comparable=context.not_comparable,
        not_stationary=(*context.not_stationary, *(steady.reasons if steady else ())),
    )


def _known(figure: Figure) -> float | None:
    return None if isinstance(figure, Absent) else figure.point


def _cause(c: Columns, counts: Mapping[str, int]) -> str:
    """The error of the first request that failed in the most frequent way, at most 200 characters."""
    kinds = {name: n for name, n in counts.items() if name not in NO_FAILURES}
    if not any(kinds.values()):
        return ""
    worst = max(kinds, key=kinds.__getitem__)
    errors = c.table.column("error").filter(pa.array(c.having("outcome", [worst])))
    return next((str(error)[:200] for error in errors.to_pylist() if error), "")
