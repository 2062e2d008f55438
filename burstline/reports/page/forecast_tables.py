"""A forecast in words and tables: one run's score, and the coverage and bias of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from burstline.reports.blocks import Cell, Note, Table, table
from burstline.reports.number_format import duration, number
from burstline.roofline.predict.forecast import CONFIDENCE, Score

TITLES: Final = {
    "metrics.ttft.p50": "TTFT p50",
    "metrics.tpot.p50": "TPOT p50",
    "metrics.e2e.p50": "E2E p50",
    "throughput.requests_per_s": "Requests/s",
}


def score_line(score: Score) -> Note:
    """What a terminal says of a forecast: inside or outside, and by how much."""
    said = []
    for name in score.measured:
        where = "inside" if score.inside(name) else "outside"
        said.append(f"{TITLES[name]} {where} ({_percent(score.ratio(name) - 1)})")
    return Note(f"Forecast, {CONFIDENCE:.0%} intervals, measured against predicted: {', '.join(said)}.")


def score_table(score: Score) -> Table:
    rows: list[list[str | Cell]] = [
        [
            TITLES[name],
            _value(name, score.predicted[name].point),
            f"{_value(name, score.predicted[name].low)} to {_value(name, score.predicted[name].high)}",
            _value(name, measured),
            _percent(score.ratio(name) - 1),
            "inside" if score.inside(name) else "outside",
        ]
        for name, measured in score.measured.items()
    ]
    columns = ["Figure", "Forecast", f"{CONFIDENCE:.0%} interval", "Measured", "Difference", "Interval"]
    return table(
        f"The forecast, sealed before the first request; intervals from {score.intervals}",
        columns,
        rows,
        text=(0, 5),
    )


def predictions(scores: Sequence[tuple[str, str, Score]]) -> Table:
    """Coverage and bias by engine and device; `scores` are of runs, with their engines and kinds of load."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for engine, load, score in scores:
        for group in (
            (f"{engine} on {score.device}", load),
            (f"{engine} on {score.device}", "all"),
            ("all", "all"),
        ):
            groups.setdefault(group, []).append(score)
    rows: list[list[str | Cell]] = []
    for (where, load), of in sorted(groups.items(), key=lambda item: (item[0][0] == "all", item[0])):
        by_name = {name: [each for each in of if name in each.measured] for name in TITLES}
        n = sum(len(each.measured) for each in of)
        inside = sum(each.inside(name) for name, each_of in by_name.items() for each in each_of)
        figures = [_coverage(name, each_of) for name, each_of in by_name.items()]
        rows.append([where, load, str(len(of)), f"{inside / n:.0%} of {n}" if n else "–", *figures])
    columns = ["Engine and device", "Load", "Runs", f"Inside {CONFIDENCE:.0%} intervals", *TITLES.values()]
    return table("Forecasts: share inside, and median measured over predicted", columns, rows, text=(0, 1))


def _coverage(name: str, scores: Sequence[Score]) -> str:
    if not scores:
        return "–"
    inside = np.mean([each.inside(name) for each in scores])
    return f"{inside:.0%}, {_percent(float(np.median([each.ratio(name) for each in scores])) - 1)}"


def _value(name: str, value: float) -> str:
    return f"{number(value)}/s" if name.endswith("per_s") else duration(value)


def _percent(share: float) -> str:
    return f"{share:+.0%}".replace("-", "−")
