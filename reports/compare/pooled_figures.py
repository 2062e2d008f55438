"""One contender's number out of one run or several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.metrics.definitions import METRICS, Samples, samples_of
from loadgen.stats.across_runs import over_runs, percentile_over_runs
from loadgen.stats.figure import Absent, Estimate, Figure
from reports.run_view import View

Path = tuple[str, ...]
"""Where the summary keeps a figure: ("metrics", "ttft", "p50")."""


def figure_of(views: Sequence[View], path: Path) -> Figure:
    """The number at `path` of the summaries: one run's own, of several the pooled one.

    Percentiles are those of all requests, every run with equal weight, other numbers the runs' geometric
    mean; from three runs on with an interval between runs.
    """
    if len(views) == 1:
        return views[0].summary.figure(*path)
    values = points(views, path)
    if isinstance(values, Absent):
        return values
    if path[0] == "metrics" and path[2] != "mean":
        metric, p = path[1], float(path[2].removeprefix("p")) / 100
        return percentile_over_runs([samples(view, metric) for view in views], p, METRICS[metric].unit)
    first = views[0].summary.figure(*path)
    return over_runs(np.array(values), first.unit if isinstance(first, Estimate) else "")


def points(views: Sequence[View], path: Path) -> list[float] | Absent:
    """The number of each run; Absent where one lacks it."""
    figures = [view.summary.figure(*path) for view in views]
    lacking = next((figure for figure in figures if isinstance(figure, Absent)), None)
    return lacking or [figure.point for figure in figures if isinstance(figure, Estimate)]


def samples(view: View, metric: str) -> Samples:
    """What the summary's number was made of."""
    c = view.columns.due_from(view.warm_up_end_s) if view.warm_up_end_s else view.columns
    return samples_of(METRICS[metric], c)
