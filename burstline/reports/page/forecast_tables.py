"""A run's score in words and as a table."""

from __future__ import annotations

from typing import Final

from burstline.reports.blocks import Cell, Note, Table, table
from burstline.reports.number_format import changed, duration, number
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
        said.append(f"{TITLES[name]} {where} ({changed(score.ratio(name) - 1)})")
    return Note(f"Forecast, {CONFIDENCE:.0%} intervals, measured against predicted: {', '.join(said)}.")


def score_table(score: Score) -> Table:
    rows: list[list[str | Cell]] = [
        [
            TITLES[name],
            _value(name, score.predicted[name].point),
            f"{_value(name, score.predicted[name].low)} to {_value(name, score.predicted[name].high)}",
            _value(name, measured),
            changed(score.ratio(name) - 1),
            "inside" if score.inside(name) else "outside",
        ]
        for name, measured in score.measured.items()
    ]
    columns = ["Figure", "Forecast", f"{CONFIDENCE:.0%} interval", "Measured", "Difference", "Interval"]
    return table(
        f"The forecast, made before the first request; intervals from {score.intervals}",
        columns,
        rows,
        text=(0, 5),
    )


def _value(name: str, value: float) -> str:
    return f"{number(value)}/s" if name.endswith("per_s") else duration(value)
