"""Every number of a run in one dictionary: a pure function of its records and its telemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from loadgen.driver.job import DriveReport
from loadgen.metrics import throughput
from loadgen.metrics.definitions import METRICS, Metric, latencies, samples_of
from loadgen.metrics.memory import memory
from loadgen.metrics.schedule_fidelity import pacing
from loadgen.metrics.server_histograms import agreement
from loadgen.metrics.slo import NO_CRITERION, Goal, attainment, good, judge_goals, parse_goal
from loadgen.metrics.steady_state import NO_START_WAVE, NOT_STEADY, TESTS, Steady, steady_part
from loadgen.metrics.survival import survival
from loadgen.metrics.telemetry_query import Watched
from loadgen.metrics.token_accounting import conservation, counts, lengths
from loadgen.metrics.windowed import goodput_in, throughputs_in
from loadgen.record.columns import Columns, columns_of
from loadgen.record.manifest import MAX_FAILURES, SCHEMA, ArrivalFacts, Certificate
from loadgen.record.rundir import Run
from loadgen.record.telemetry import Telemetry
from loadgen.stats.estimates import Absent, Estimate, Figure, early_stopping_bound, label, measured
from loadgen.stats.quantiles import mean, percentiles
from loadgen.stats.serial_correlation import (
    OrderedSamples,
    bound_in_order,
    mean_in_order,
    percentile_in_order,
    share_in_order,
)
from loadgen.verdict.certificate import certified, errors_of
from loadgen.verdict.instrument import instrument
from loadgen.verdict.verdict import Evidence, Reason, judge
from loadgen.verdict.warnings import caveats
from servers.engine import Identity

QUANTILES: Final = (0.5, 0.9, 0.95, 0.99)
WINDOW: Final = (
    *("start_s", "end_s", "warm_up_s", "n_warm_up"),
    *("start_wave_ttft_p50_s", "start_wave_e2e_p50_s"),
)
HEADLINE: Final = ("ttft", "itl", "e2e")
"""Whose percentiles the client's lateness is held against."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a summary needs besides the records. `concurrency` is a closed loop's, None in an open one.

    `certificate` says how far off a server of known truth found the client, Absent why nobody asked; None
    where the run is older than certificates. `not_comparable` and `not_stationary` are reasons found
    elsewhere. `arrivals` are the pattern, the rate and the burstiness that were asked for, None where no one
    knows: then no part of the run is taken for steady.
    """

    telemetry: Telemetry = field(default_factory=Telemetry.empty)
    reports: Sequence[DriveReport] = ()
    identity: Identity | None = None
    status: str = "complete"
    concurrency: int | None = None
    certificate: Certificate | Absent | None = None
    not_comparable: tuple[Reason, ...] = ()
    not_stationary: tuple[Reason, ...] = ()
    goals: tuple[Goal, ...] = ()
    arrivals: ArrivalFacts | None = None
    max_failures: float = MAX_FAILURES


def summarize_run(run: Run, **more: Any) -> dict[str, Any]:
    """The summary of a run on disk, from its files alone; `more` are further fields of `Context`."""
    manifest = run.manifest
    context = Context(
        telemetry=run.watched,
        reports=manifest.drivers,
        identity=manifest.identity,
        status=run.status,
        concurrency=manifest.concurrency,
        certificate=manifest.certificate,
        arrivals=manifest.arrivals,
        max_failures=manifest.max_failures,
        goals=tuple(map(parse_goal, manifest.targets)),
        **more,
    )
    return summarize(run.columns, context)


def summarize(records: pa.Table | Columns, context: Context | None = None) -> dict[str, Any]:
    """Counts, metrics, throughput and the rest by name, ready for JSON.

    Every figure is `{"point", "low", "high", "level", "n", "unit"}`, perhaps with a `note`, or
    `{"point": null, "absent": reason}`; only `schema`, `verdict`, `targets`, `counts`, tallies in `lengths`
    and the criteria of `goodput` are not.
    """
    context = context or Context()
    whole = records if isinstance(records, Columns) else columns_of(records)
    pattern, closed = context.arrivals.pattern if context.arrivals else None, context.concurrency is not None
    steady = steady_part(whole, pattern, concurrency=context.concurrency)
    c = whole.due_from(steady.window.start_s) if steady else whole
    ends_s = whole.closed_s[~np.isnan(whole.closed_s)]
    watched = Watched(context.telemetry, float(ends_s.max()) if len(ends_s) else 0.0)
    errors_s = errors_of(context.certificate)
    metrics = {
        name: figures(metric, c, steady) | _instrument_error(errors_s.get(name))
        for name, metric in METRICS.items()
        if metric.of or metric.pooled
    }
    bounds = {
        name: _bounds(metric, c, steady)
        for name, metric in METRICS.items()
        if metric.of and metric.failures == "infinite"
    }
    client = instrument(whole, context.reports, watched, closed_loop=closed)
    client |= certified(context.certificate)
    sections: dict[str, Any] = {
        "counts": counts(whole),
        "metrics": metrics,
        "bounds": bounds,
        "survival": survival(whole),
        "throughput": _throughput(whole, steady),
        "goodput": _goodput(c, steady, context),
        "window": _window(whole, steady),
        "stationarity": dict(steady.figures) if steady else dict.fromkeys(TESTS, NOT_STEADY),
        "schedule": pacing(whole, context.arrivals, closed_loop=closed),
        "concurrency": throughput.concurrency(whole),
        "burst": throughput.burst(c),
        "stalls": throughput.stalls(c),
        "lengths": lengths(whole),
        "instrument": client,
        "memory": memory(watched, context.reports, context.identity),
        "conservation": conservation(whole, watched),
        "agreement": agreement(whole, watched),
    }
    verdict = judge(
        _evidence(sections, context, steady),
        caveats(sections, context.certificate),
    )
    targets = [judged.to_json() for judged in judge_goals(context.goals, sections, c, verdict)]
    return {"schema": SCHEMA, "verdict": verdict.to_json(), "targets": targets, **_jsonable(sections)}


def _throughput(c: Columns, steady: Steady | None) -> dict[str, Figure]:
    return throughputs_in(c, steady.window, steady.block_s) if steady else throughput.throughputs(c)


def _goodput(c: Columns, steady: Steady | None, context: Context) -> dict[str, Any]:
    """What met every criterion for single requests, by request, by token, and as a share of all planned."""
    criteria = [goal for goal in context.goals if goal.per_request]
    if not criteria:
        return {"criteria": [], **dict.fromkeys(("attainment", "requests_per_s", "tok_per_s"), NO_CRITERION)}
    met = good(c, criteria)
    rates = goodput_in(c, steady.window, steady.block_s, met) if steady else throughput.goodput(c, met)
    return {
        "criteria": [goal.text for goal in criteria],
        "attainment": share_in_order(met, c.due_s, steady.least_block) if steady else attainment(met),
        **rates,
    }


def figures(metric: Metric, c: Columns, steady: Steady | None = None) -> dict[str, Figure]:
    """The metric's percentiles and its mean, by name."""
    if not c.ok.any() and metric.failures == "infinite":
        return dict.fromkeys([*map(label, QUANTILES), "mean"], throughput.NO_SUCCESS)
    samples = samples_of(metric, c)
    if metric.pooled is None and not np.isfinite(samples.value).any():
        absent = Absent(f"{metric.title} is defined for no request")
        return dict.fromkeys([*map(label, QUANTILES), "mean"], absent)
    quantiles = percentiles(samples, QUANTILES, metric.unit)
    average = mean(samples, metric.unit)
    if steady:
        in_order = OrderedSamples.of(samples, c.due_s, steady.least_block)
        quantiles = {p: percentile_in_order(figure, in_order, p) for p, figure in quantiles.items()}
        average = mean_in_order(average, in_order)
    return {label(p): quantiles[p] for p in QUANTILES} | {"mean": average}


def _instrument_error(error_s: Mapping[str, Figure] | None) -> dict[str, Figure]:
    """What the certificate says of the metric: 99 % of its values are known at least so well."""
    return {"instrument_error": error_s["p99"]} if error_s else {}


def _bounds(metric: Metric, c: Columns, steady: Steady | None) -> dict[str, Figure]:
    if steady:
        in_order = OrderedSamples.of(samples_of(metric, c), c.due_s, steady.least_block)
        return {label(p): bound_in_order(in_order, p, metric.unit) for p in QUANTILES}
    values = latencies(metric, c)
    return {label(p): early_stopping_bound(values, p, metric.unit) for p in QUANTILES}


def _window(c: Columns, steady: Steady | None) -> dict[str, Figure]:
    """From when until when rates count, and what was left out in front as warm-up."""
    window = steady.window if steady else throughput.whole_run(c)
    if window is None:
        return dict.fromkeys(WINDOW, throughput.NO_SUCCESS)
    wave = steady.start_wave if steady else dict.fromkeys(("ttft_p50_s", "e2e_p50_s"), NO_START_WAVE)
    return {
        "start_s": measured(window.start_s, "s", ""),
        "end_s": measured(window.end_s, "s", ""),
        "warm_up_s": steady.warm_up if steady else NOT_STEADY,
        "n_warm_up": measured(steady.n_warm_up, "requests", "", len(c)) if steady else NOT_STEADY,
        **{f"start_wave_{name}": figure for name, figure in wave.items()},
    }


def _evidence(sections: Mapping[str, Any], context: Context, steady: Steady | None) -> Evidence:
    client = sections["instrument"]
    throttled = client["throttled_fraction"]
    return Evidence(
        counts=sections["counts"],
        status=context.status,
        headline={name: sections["metrics"][name] for name in HEADLINE},
        send_lag_s={p: client[f"send_lag_{p}_s"] for p in ("p50", "p99")},
        read_error_s={p: client[f"read_error_{p}_s"] for p in ("p50", "p99")},
        instrument_error_s=errors_of(context.certificate),
        throttled_fraction=None if isinstance(throttled, Absent) else throttled.point,
        max_failures=context.max_failures,
        not_comparable=context.not_comparable,
        not_stationary=(*context.not_stationary, *(steady.reasons if steady else ())),
    )


def _jsonable(value: Any) -> Any:
    if isinstance(value, Estimate | Absent):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    return value
