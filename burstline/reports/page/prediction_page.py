"""The page of a prediction: of `burstline bound` and of `burstline study`."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import orjson

from burstline.loadgen.capture.files import write_json
from burstline.measure.record.typed_json import from_json, to_json
from burstline.reports.blocks import Command, Findings, Heading, Plot
from burstline.reports.figures.drawing import WIDE
from burstline.reports.figures.first_screen import methods
from burstline.reports.figures.roofline import roofline
from burstline.reports.formats.predicted import Predicted
from burstline.reports.page.files import standalone_svg
from burstline.reports.page.first_screen import next_tile
from burstline.reports.page.page import Page, PageSection, beside, evidence

PREDICTION: Final = "prediction.json"
"""A prediction's file in its folder."""


def prediction_page(shown: Predicted) -> str:
    """The answer, four short answers, rooflines or methods, the tables folded."""
    assumed, again = Findings(shown.assumed), Command("Reproduce this prediction", shown.command)
    return Page(
        title=shown.title,
        facts=(f"`{shown.command.partition(' --')[0]}`", "predicted, not measured"),
        verdict=shown.verdict,
        tiles=[*shown.tiles, next_tile(shown.then)],
        pictures=beside(list(pictures(shown))),
        sections=[
            *evidence(shown.tables),
            PageSection("assumed", "", "What was assumed?", [assumed], folded=True),
            PageSection("again", "", "Reproduce", [again], folded=True),
        ],
        summary=shown.document,
        digest=[Heading(shown.title), shown.verdict, *shown.tables, assumed, again],
    ).html()


def pictures(shown: Predicted) -> Iterator[Plot]:
    """Of one device the rooflines of its phases, of several that of decode; of methods time and memory."""
    for k, (device, phases) in enumerate(zip(shown.devices, shown.phases, strict=True)):
        for phase in phases[: 1 if len(shown.devices) > 1 else None]:
            plot = roofline(phase, device, f"d{k}-", WIDE)
            if plot is not None:
                title = f"{phase.phase.capitalize()} on {device.name}"
                yield replace(plot, title=title, table=f"bounds-{phase.phase}")
    if shown.seconds:
        yield methods("time", "Time of a step", "s", shown.seconds)
        yield methods("memory", "Memory of a device", "GB", shown.gigabytes, shown.capacity_gb)


def write_prediction(shown: Predicted, folder: Path, *, quiet: bool) -> None:
    """Keep it in the folder, and its page as `burstline report` makes it again; `quiet`: say nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / PREDICTION, to_json(shown))
    kept = from_json(Predicted, orjson.loads((folder / PREDICTION).read_bytes()))
    (folder / "report.html").write_text(prediction_page(kept), "utf-8")
    for plot in pictures(kept):
        (folder / f"{plot.id}.svg").write_text(standalone_svg(plot), "utf-8")
    if not quiet:
        print(f"Report: {folder / 'report.html'}")
