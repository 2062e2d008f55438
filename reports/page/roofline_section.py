"""The section on the hardware: how far the engine is from what the device could do, and what bounds it."""

from __future__ import annotations

from collections.abc import Iterator

from burstline.reports.blocks import Block, Cell, Folded, Note, Side, Table, Tile, Tiles, table
from burstline.reports.figures import roofline
from burstline.reports.model.comparison import View
from burstline.reports.number_format import count, duration, number, scale_for
from burstline.roofline.reconcile.reconciliation import (
    DeviceFacts,
    OpRow,
    PhaseRow,
    Reconciliation,
    Utilisation,
)


def is_known(view: View) -> bool:
    """Whether the run was compared with its hardware, or states why it could not be."""
    return view.summary.roofline is not None


def metal(view: View) -> list[Block]:
    """The sentence, the rooflines, the bound tables, the gap, what would help, and what was assumed."""
    found = view.summary.roofline
    if not isinstance(found, Reconciliation):
        why = found.absent if found else "this was never computed"
        return [Note(f"The run cannot be compared with its hardware: {why}.")]
    measured_s = sum(bar.seconds for bar in found.waterfall)
    drawn = (roofline.roofline(phase, found.device) for phase in found.phases)
    plots = tuple(plot for plot in drawn if plot is not None)
    bounds = tuple(_bounds(phase, found.device) for phase in found.phases)
    return [
        Note(found.sentence),
        Tiles(tuple(_tiles(found, measured_s))),
        _shares(found),
        roofline.waterfall(found.waterfall, measured_s),
        _sensitivity(found, measured_s),
        *([Side(plots, roofline.EXPLAINED)] if plots else []),
        Folded("What bounds each operation of a step, and for how long", bounds),
        Folded("What was assumed, and where the ceilings come from", (_assumed(found),)),
    ]


def _tiles(found: Reconciliation, measured_s: float) -> Iterator[Tile]:
    """Each phase by what bounds it most, then the whole run."""
    for phase in found.phases:
        limit = next(iter(phase.limit_shares))
        name, use = ("MFU", phase.mfu) if limit == "compute" else ("MBU", phase.mbu)
        value = use.reachable if use.measured is None else use.measured
        title, kind = _title(phase), "FLOP/s" if name == "MFU" else "bandwidth"
        yield Tile(f"{title}: {name}, share of peak {kind}", number(value * 100), "%", _reach(use))
    for label, seconds, of in (
        ("The run at the ceiling", found.ceiling_s, "every op at its bound"),
        (
            "The run as predicted",
            found.predicted_s,
            f"it took {_more(measured_s / found.predicted_s)}",
        ),
    ):
        scale = scale_for("s", [seconds])
        yield Tile(label, number(seconds / scale.divisor), scale.unit, of)


def _shares(found: Reconciliation) -> Table:
    names = (("mfu", "MFU"), ("mfu_full", "MFU, attention as a full square"), ("mbu", "MBU"))
    rows: list[list[str | Cell]] = []
    for phase in found.phases:
        shape = (
            f"{count(phase.n_steps)} steps; on average {number(phase.mean_tok)} tokens of "
            f"{number(phase.mean_requests)} requests, context {number(phase.mean_context_tok)}"
        )
        for key, name in names:
            use = getattr(phase, key)
            said = [_percent(getattr(use, which)) for which in ("measured", "reachable", "ceiling")]
            rows.append([Cell(f"{_title(phase)}: {name}", detail=shape if key == "mfu" else ""), *said])
    columns = ["Share of the device's peak", "Measured", "Predicted reachable", "At the ceiling"]
    return table(f"What each phase uses of {found.device.name}", columns, rows)


def _reach(use: Utilisation) -> str:
    """What calibrated kernels should reach: a prediction, which a good engine may beat."""
    predicted = _percent(use.reachable)
    if use.measured is None:
        return "reachable; not measured"
    return f"of a reachable {predicted}" if use.measured <= use.reachable else f"predicted: {predicted}"


def _title(phase: PhaseRow) -> str:
    """Which steps the phase's figures are of."""
    if phase.phase == "decode":
        return "Decode-only steps"
    return "Prefill and mixed steps" if phase.n_mixed else "Prefill steps"


def _bounds(phase: PhaseRow, device: DeviceFacts) -> Table:
    largest = max((op.predicted_s for op in phase.ops), default=0.0)
    scale = scale_for("s", [largest])

    def time(seconds: float | None) -> str:
        return "–" if seconds is None else number(seconds / scale.divisor)

    rows: list[list[str | Cell]] = [
        [
            Cell(op.name, detail=" ".join(filter(None, [op.kind.partition(" ")[2], _runs(op)]))),
            _shape(op),
            _big(op.flops, "FLOP") if op.flops else "–",
            _big(op.bytes, "B"),
            number(op.intensity) if op.flops else "–",
            number(op.ridge) if op.ridge else "–",
            op.limit,
            time(op.ideal_s),
            Cell(time(op.predicted_s), detail=f"[{time(op.low_s)}, {time(op.high_s)}]"),
            time(op.measured_s),
            _percent(op.share),
        ]
        for op in phase.ops
    ]
    times = [f"{name} ({scale.unit})" for name in ("Ideal", "Predicted", "Measured")]
    columns = ["Op", "M × N × K", "FLOPs", "Bytes", "FLOP/B", "Ridge", "Bound", *times, "Of the step"]
    caption = f"What bounds each op of a typical step of {phase.phase}, on {device.name} in {device.dtype}"
    return table(caption, columns, rows, text=(0, 6))


def _runs(op: OpRow) -> str:
    return f"× {op.count}" if op.count > 1 else ""


def _shape(op: OpRow) -> str:
    sizes = [getattr(op, side) for side in ("m", "n", "k") if getattr(op, side)]
    return " × ".join(count(size) for size in sizes) if sizes else "–"


def _big(value: float, unit: str) -> str:
    """An amount with a decimal prefix."""
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= power:
            return f"{number(value / power)} {prefix}{unit}"
    return f"{number(value)} {unit}"


def _sensitivity(found: Reconciliation, measured_s: float) -> Table:
    rows = [
        [
            change.change,
            "–" if change.makespan_s is None else duration(change.makespan_s),
            "–" if change.ratio is None else _changed(change.ratio),
            change.why,
        ]
        for change in found.sensitivity
    ]
    base = duration(found.predicted_s)
    caption = (
        f"What would help: the run as predicted, {base} ({duration(measured_s)} measured), with one change"
    )
    return table(caption, ["Change", "Predicted run", "Difference", "Why"], rows, text=(0, 3))


def _assumed(found: Reconciliation) -> Table:
    model = found.model
    rows = [
        [f"device: {found.device.name}, known by {model.device_from}"],
        [f"model: {_big(model.params, '')}parameters, its shape from {model.config_from}"],
        *([said] for said in found.assumed),
    ]
    return table(f"What was assumed; predictions by {found.tier}", ["Assumed"], rows)


def _changed(ratio: float) -> str:
    percent = round((ratio - 1) * 100)
    return f"{percent:+d}%".replace("-", "−") if percent else "0%"


def _more(ratio: float) -> str:
    percent = round(abs(ratio - 1) * 100)
    return f"{percent}% {'longer' if ratio > 1 else 'less'}" if percent else "as long"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{number(share * 100)}%"
