"""One contender's number out of one run or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.metrics.definitions import METRICS, Samples, samples_of
from loadgen.stats.across_runs import over_runs, percentile_over_runs
from loadgen.stats.estimates import Absent, Figure
from reports.run_view import View

Node = Mapping[str, Any]
Path = tuple[str, ...]


def figure_of(views: Sequence[View], path: Path) -> Node:
    """The number at `path` of the summaries: one run's own, of several the pooled one.

    Percentiles are those of all requests, every run with equal weight, other numbers the runs' geometric
    mean; from three runs on with an interval between runs.
    """
    figures = [at(view.summary, path) for view in views]
    if len(views) == 1:
        return figures[0]
    return _pooled(views, figures, path).to_json()


def at(summary: Node, path: Path) -> Node:
    """The figure at `path`, an absent one where there is none."""
    node: Any = summary
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {"point": None, "absent": "this run's summary lacks it"}


def points(views: Sequence[View], path: Path) -> list[float] | Absent:
    """The number of each run; Absent where one lacks it."""
    figures = [at(view.summary, path) for view in views]
    lacking = next((figure for figure in figures if figure["point"] is None), None)
    if lacking is not None:
        return Absent(str(lacking.get("absent", "a run lacks it")))
    return [float(figure["point"]) for figure in figures]


def _pooled(views: Sequence[View], figures: Sequence[Node], path: Path) -> Figure:
    values = points(views, path)
    if path[0] == "metrics":
        if isinstance(values, Absent):
            return values
        metric, p = path[1], float(path[2].removeprefix("p")) / 100
        return percentile_over_runs([samples(view, metric) for view in views], p, METRICS[metric].unit)
    return values if isinstance(values, Absent) else over_runs(np.array(values), figures[0]["unit"])


def samples(view: View, metric: str) -> Samples:
    """What the summary's number was made of."""
    c = view.columns.due_from(view.warm_up_end_s) if view.warm_up_end_s else view.columns
    return samples_of(METRICS[metric], c)
