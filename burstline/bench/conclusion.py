"""Everything after the load: records, summary, page, headline and exit code, from the run's files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson

from burstline.console import exit_codes
from burstline.console.terminal import show
from burstline.errors import RooflineError
from burstline.loadgen.capture.files import TRACES, write_bytes, write_json
from burstline.machine.hardware import throw_away
from burstline.machine.roofline import forecast_load, read_forecast, scored, seen_in, setup_of
from burstline.measure.metrics.audit import audit, compared, misread, replies_differ
from burstline.measure.metrics.slo import state_decides
from burstline.measure.record.decode import Readings, decode_run, readings
from burstline.measure.record.run_writer import AUDIT, PROFILE, PROFILED_LOAD, READINGS, RunDir
from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import Audit, Summary
from burstline.measure.record.tables import keep_pandas_out
from burstline.measure.record.typed_json import MismatchError, from_json, to_json
from burstline.measure.record.verdict import Reason
from burstline.measure.stats.figure import Absent
from burstline.measure.summarize import summarize_run
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.page.digest import headline
from burstline.roofline.predict.forecast import Forecast, NoForecast
from burstline.roofline.profile.attribute import Profile, profile_of
from burstline.roofline.profile.compare import compare
from burstline.roofline.profile.trace import SentRequest, first_difference
from burstline.roofline.reconcile.reconcile import reconcile
from burstline.roofline.reconcile.reconciliation import EXCEEDED, NotReconciled, Profiled, Reconciliation
from burstline.servers.engine import Engine
from burstline.servers.registry import ENGINES


def write_report(run: Run, made: Summary | None = None) -> Summary:
    """The summary, where it is not `made`, and the page; the same files of a run give the same bytes."""
    from burstline.reports.page.page import render  # with matplotlib: an answer does not wait for it

    summary = made or summarized(run)
    write_bytes(run.report, render(alone(view_of(run))).encode())
    return summary


def summarized(run: Run) -> Summary:
    """The summary, which is written and kept with the run."""
    keep_pandas_out()
    forecast = read_forecast(run)
    roofline, profile = reconciled(run, forecast), profiled(run)
    if why := exceeded(roofline) or exceeded(profile):
        roofline, forecast = NotReconciled(why, EXCEEDED), forecast and NoForecast(why)
        profile = profile and NotReconciled(why, EXCEEDED)
    found = audited(run)
    doubts = (*suspect(roofline), *suspect(profile), *misread(found))
    summary = summarize_run(run, not_comparable=doubts)
    verdict = summary.verdict
    run.summary = replace(
        summary,
        verdict=replace(verdict, warnings=(*verdict.warnings, *replies_differ(found))),
        roofline=roofline,
        forecast=scored(forecast, run, summary),
        profile=profile,
        audit=found,
    )
    write_json(run.path / "summary.json", run.summary.to_json())
    return run.summary


def conclude(
    run: RunDir, engine: Engine, measure_again: Callable[[], None] | None = None, *, answer: bool = False
) -> Summary:
    """Write the manifest, and from the captures records, summary and page, which can be made again from them.

    If the run exceeded what was measured of this CPU, that is measured again. With `answer` standard output
    says how it went before the page is made.
    """
    run.save_manifest()
    run.save("records.parquet", [decode_run(run.path, engine.decode)])
    for measure in (measure_again, None):
        read = Run.of(run)
        summary = summarized(read)
        if getattr(summary.roofline, "code", None) != EXCEEDED or not throw_away(run) or measure is None:
            break
        measure()
    run.telemetry_table = None  # a search has its next load while it holds this run
    if answer:
        view = view_of(read)
        show(headline(alone(view), view))
    return write_report(read, summary)


def of_summary(summary: Summary) -> int:
    state = exit_codes.INCONCLUSIVE if state_decides(summary) else exit_codes.DONE
    return exit_codes.worst([exit_codes.of_results(target.result for target in summary.targets), state])


def reconciled(run: Run, forecast: Forecast | NoForecast | None) -> Reconciliation | NotReconciled:
    """The summary's `roofline`, from the run's own files alone: the same files give the same answer."""
    hardware = run.manifest.hardware
    try:
        setup, assumed = setup_of(run)
        found = reconcile(seen_in(run, assumed), setup, forecast_load(forecast, run))
    except RooflineError as why:
        return NotReconciled(str(why))
    assert hardware is not None
    model = replace(found.model, config_from=hardware.model_from, device_from=hardware.device_from)
    return replace(found, model=model)


def profiled(run: Run) -> Profiled | NotReconciled | None:
    """The summary's `profile`: the engine's own, from its traces or from what was read of them before."""
    kept, traces = run.path / PROFILE, run.path / TRACES
    if not kept.exists() and not traces.is_dir():
        return None
    try:
        setup, _ = setup_of(run)
        made = None if kept.exists() else keep_profile(run, traces)
        profile = made or from_json(Profile, orjson.loads(kept.read_bytes()), PROFILE)
        c = run.columns
        context_tok = np.nanmean(c.planned_prompt_tok) + np.nanmean(c.output_tok) / 2
        return compare(profile, setup, float(context_tok))
    except (RooflineError, MismatchError, ValueError) as why:
        return NotReconciled(str(why))


def audited(run: Run) -> Audit | None:
    """The summary's `audit`, from the captures of the load and those of the same requests alone."""
    if run.manifest.asked.audit is None:
        return None
    if not all((run.path / folder).is_dir() for folder in AUDIT):
        return Audit.absent(Absent("the run ended before its audit", "not-audited"))
    engine = ENGINES[run.manifest.engine]
    alone, again = (readings(run.path / folder, engine, range(len(run.asked))) for folder in AUDIT)
    loaded = readings(run.path / "captures", engine, alone.keys() & again.keys())
    found = audit([(loaded[k].generated, alone[k].generated, again[k].generated) for k in sorted(loaded)])
    if not (kept := run.path / READINGS).exists():
        return found
    theirs = from_json(Readings, orjson.loads(kept.read_bytes()), READINGS)
    return replace(found, second_reader=compared(theirs.client, theirs.replies, again))


def keep_profile(run: Run, traces: Path) -> Profile:
    """Read the traces once; what counts of them is kept in the run's folder."""
    deployment = setup_of(run)[0].deployment
    profile = profile_of(traces, deployment.model, deployment.parallel)
    sent = run.path / PROFILED_LOAD
    has_one_scheduler = deployment.parallel.n_devices == deployment.parallel.tp
    if traces == run.path / TRACES and sent.exists() and has_one_scheduler:
        requests = from_json(tuple[SentRequest, ...], orjson.loads(sent.read_bytes()), PROFILED_LOAD)
        if why := first_difference([(step.prompts, step.decodes) for step in profile.steps], requests):
            profile = replace(
                profile, notes=(*profile.notes, f"the steps are not the load that was sent: {why}")
            )
    write_json(run.path / PROFILE, to_json(profile))
    return profile


def exceeded(found: Reconciliation | Profiled | NotReconciled | None) -> str:
    """Why a calibration of this CPU is none: a run was faster than what was measured; "" where none was."""
    if found is None or isinstance(found, NotReconciled) or found.device.known_by == "specified":
        return ""
    return "".join(
        f"{each.what} was {each.excess:.0%} above the measured ceiling of {found.device.name}, and two "
        f"measurements differ by at most {each.tolerance:.0%}: this calibration is wrong for this run; "
        "a kept one is thrown away, and the next run measures again: if that is exceeded too, the server "
        "computed less than was asked"
        for each in found.suspicions[:1]
    )


def suspect(found: Reconciliation | Profiled | NotReconciled | None) -> tuple[Reason, ...]:
    """Reasons not to believe a run: rates above what the hardware can do under every possible set-up."""
    if found is None or isinstance(found, NotReconciled):
        return ()
    return tuple(
        Reason(
            "beats-the-ceiling",
            each.said_of(found.device),
            f"Look for the cause: {'; or '.join(each.causes)}.",
        )
        for each in found.suspicions
    )
