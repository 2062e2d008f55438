"""The section on the hardware: how far the engine is from what the device could do, and what bounds it."""

from collections.abc import Sequence
from typing import Final

from burstline.measure.record.verdict import State
from burstline.reports.blocks import Block, Cell, Folded, Note, Side, Table, table
from burstline.reports.figures import roofline
from burstline.reports.model.comparison import View
from burstline.reports.number_format import changed, count, duration, number, prefixed, scale_for
from burstline.reports.page.estimate_tables import score_table
from burstline.reports.sentences import say
from burstline.roofline.predict.forecast import NoForecast, Score
from burstline.roofline.reconcile.reconciliation import (
    DeviceFacts,
    NotReconciled,
    OpRow,
    PhaseRow,
    Profiled,
    Reconciliation,
)


def metal(view: View) -> list[Block]:
    """The sentence, the rooflines, the bound tables, the gap, what would help, and what was assumed."""
    found = view.summary.roofline
    assert found is not None
    if isinstance(found, NotReconciled):
        return [Note(say("not-reconciled", why=found.absent))]
    measured_s = sum(bar.seconds for bar in found.waterfall)
    bounds = tuple(_bounds(phase, found.device) for phase in found.phases)
    return [
        Note(found.sentence),
        *[Note(say("roofline.disturbed"))] * (view.summary.verdict.state == State.DISTURBED),
        *_forecast(view.summary.forecast),
        roofline.waterfall(found.waterfall, measured_s, seen=found.phases[0].mfu.measured is not None),
        *_rooflines(found.phases, found.device),
        Folded("Shares of the peak, and what would help", (_shares(found), _sensitivity(found, measured_s))),
        Folded("What bounds each operation of a step, and for how long", bounds),
        Folded("What was assumed, and where the ceilings come from", (_assumed(found),)),
    ]


def _forecast(score: Score | NoForecast | None) -> list[Block]:
    if isinstance(score, Score):
        return [score_table(score)]
    return [Note(f"No forecast: {score.absent}.")] if score else []


def profile(view: View) -> list[Block]:
    """The engine's own profile, or why it could not be compared."""
    found = view.summary.profile
    assert found is not None
    return [Note(found.absent)] if isinstance(found, NotReconciled) else profiled(found)


def profiled(found: Profiled) -> list[Block]:
    """What is lost where, then each phase: modules beside their prediction, the roofline, each product."""
    of = "profile-"
    return [
        *(Note(each.said_of(found.device)) for each in found.suspicions),
        *map(Note, found.sentences),
        *map(roofline.modules, found.phases),
        *_rooflines(found.phases, found.device, of),
        *(_bounds(phase, found.device, of) for phase in found.phases),
        Note(f"The profiler slows what it measures; {'; '.join(found.notes)}."),
    ]


def _rooflines(phases: Sequence[PhaseRow], device: DeviceFacts, of: str = "") -> list[Side]:
    drawn = tuple(plot for phase in phases if (plot := roofline.roofline(phase, device, of)))
    return [Side(drawn, say("figure.roofline"))] if drawn else []


def _shares(found: Reconciliation) -> Table:
    device, rows = found.device, list[list[str | Cell]]()
    of = {
        "MFU": f"of the {device.known_by} peak of {prefixed(device.peak_flops_per_s, 'FLOP/s')}",
        "MBU": f"of the {device.known_by} bandwidth of {prefixed(device.levels[-1].bytes_per_s or 0, 'B/s')}",
    }
    for phase in found.phases:
        shape = (
            f"{count(phase.n_steps)} steps; on average {number(phase.mean_tok)} tokens of "
            f"{number(phase.mean_requests)} requests, context {number(phase.mean_context_tok)}"
        )
        for name, use in (("MFU", phase.mfu), ("MBU", phase.mbu)):
            shares = [_percent(share) for share in (use.measured, use.reachable, use.ceiling)]
            rows.append([Cell(f"{_title(phase)}: {name}", detail=of[name]), *shares])
        rows.append([Cell(REACHED, detail=shape), _percent(phase.reached), "100%", "–"])
    columns = ["Share", "Measured", "As predicted", "At the ceiling"]
    return table(f"What each phase uses of {device.name}", columns, rows)


REACHED: Final = "of what these shapes reach"
"""The third share: of the speed that is predicted for the shapes that a phase computes."""


def _title(phase: PhaseRow) -> str:
    if phase.phase == "decode":
        return "Decode-only steps"
    return "Prefill and mixed steps" if phase.n_mixed else "Prefill steps"


def _bounds(phase: PhaseRow, device: DeviceFacts, of: str = "") -> Table:
    """A row for each op, and for what else a profiled step did; `of` begins the table's id."""
    largest = max((op.predicted_s for op in phase.ops), default=0.0)
    scale = scale_for("s", [largest])

    def time(seconds: float | None) -> str:
        return "–" if seconds is None else number(seconds / scale.divisor)

    rows: list[list[str | Cell]] = [
        [
            Cell(op.label, detail=f"× {op.count}" if op.count > 1 else ""),
            _shape(op),
            prefixed(op.flops, "FLOP") if op.flops else "–",
            prefixed(op.bytes, "B"),
            number(op.intensity) if op.flops else "–",
            number(op.ridge) if op.ridge else "–",
            Cell(op.limit, detail=" + ".join(op.by)),
            time(op.ideal_s),
            Cell(time(op.predicted_s), detail=f"[{time(op.low_s)}, {time(op.high_s)}]"),
            Cell(time(op.measured_s), detail=f"90%: {time(op.slow_s)}" if op.slow_s else ""),
            prefixed(op.achieved_flops_per_s, "FLOP/s") if op.achieved_flops_per_s else "–",
            prefixed(op.bytes / op.measured_s, "B/s") if op.measured_s and op.bytes else "–",
            _percent(op.share),
        ]
        for op in phase.ops
    ]
    for label, seconds in phase.rest.items():
        rows.append([label, *["–"] * 8, time(seconds), "–", "–", _percent(seconds / phase.step_s)])
    times = [f"{name} ({scale.unit})" for name in ("Ideal", "Predicted", "Measured")]
    columns = ["Op", "M × N × K", "FLOPs", "Bytes", "FLOP/B", "Ridge", "Bound", *times]
    columns += ["Achieved", "Moved", "Of the step"]
    caption = f"What bounds each op of a typical step of {phase.phase}, on {device.name} in {device.dtype}"
    return table(caption, columns, rows, text=(0, 6), id=f"{of}bounds-{phase.phase}")


def _shape(op: OpRow) -> str:
    sizes = [getattr(op, side) for side in ("m", "n", "k") if getattr(op, side)]
    return " × ".join(count(size) for size in sizes) if sizes else "–"


def _sensitivity(found: Reconciliation, measured_s: float) -> Table:
    rows = [
        [change.change, duration(change.makespan_s), changed(change.ratio - 1), change.why]
        for change in found.sensitivity
        if change.makespan_s is not None and change.ratio is not None
    ]
    base = duration(found.predicted_s)
    caption = f"What would help: one change to the predicted run ({base}; measured {duration(measured_s)})"
    return table(caption, ["Change", "Predicted run", "Difference", "Why"], rows, text=(0, 3))


def _assumed(found: Reconciliation) -> Table:
    model = found.model
    rows = [
        [f"device: {found.device.name}, known by {model.device_from}"],
        [f"model: {prefixed(model.params, '')}parameters, its shape from {model.config_from}"],
        *([said] for said in found.assumed),
    ]
    return table(f"What was assumed; predictions by {found.by}", ["Assumed"], rows)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{number(share * 100)}%"
