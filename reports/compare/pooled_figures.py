"""One contender's number out of one run or several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from loadgen.metrics.definitions import METRICS, Samples
from loadgen.stats.across_runs import over_runs, percentile_over
from loadgen.stats.estimates import Absent, Figure
from loadgen.stats.significance import LEAST_RUNS
from reports.run_view import View
from workloads.seeds import rng

Node = Mapping[str, Any]
Path = tuple[str, ...]


def figure_of(views: Sequence[View], path: Path) -> Node:
    """The number at `path` of the summaries: one run's own, of two the envelope, of three and more pooled.

    Percentiles are those of all requests of all runs, other numbers the runs' geometric mean; how far runs
    lie apart is in the interval.
    """
    figures = [at(view.summary, path) for view in views]
    if len(views) < LEAST_RUNS:
        return envelope(figures)
    pooled = _pooled(views, figures, path)
    return envelope(figures) if isinstance(pooled, Absent) else pooled.to_json()


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


def envelope(figures: Sequence[Node]) -> Node:
    """The middle run's point (the lower of two) with the intervals of all; absent where one run lacks it."""
    lacking = next((figure for figure in figures if figure["point"] is None), None)
    if lacking is not None:
        return lacking
    if len(figures) == 1:
        return figures[0]
    values = sorted(float(figure["point"]) for figure in figures)
    lows, highs = zip(*map(_ends, figures), strict=True)
    low, high = min(lows), max(highs)
    return {
        "point": values[(len(values) - 1) // 2],
        "low": low if math.isfinite(low) else None,
        "high": high if math.isfinite(high) else None,
        "level": figures[0].get("level"),
        "n": len(values),
        "unit": figures[0]["unit"],
        "note": f"the middle of {len(values)} runs; the interval holds those of all",
    }


def _pooled(views: Sequence[View], figures: Sequence[Node], path: Path) -> Figure:
    if path[0] == "metrics":
        metric, p = path[1], float(path[2].removeprefix("p")) / 100
        samples = [_samples(view, metric) for view in views]
        return percentile_over(samples, p, METRICS[metric].unit, rng(0, f"repeats of {metric}"))
    values = points(views, path)
    return values if isinstance(values, Absent) else over_runs(np.array(values), figures[0]["unit"])


def _samples(view: View, metric: str) -> Samples:
    """What the summary's number was made of."""
    pooled = METRICS[metric].pooled
    if pooled is not None:
        samples = pooled(view.columns)
        kept = view.columns.due_s[samples.owner] >= view.warm_up_end_s
        return Samples(samples.value[kept], samples.weight[kept], samples.owner[kept])
    values = view.counted(metric)
    owner = np.flatnonzero(~np.isnan(values)).astype(np.int32)
    return Samples(values[owner], np.ones(len(owner), np.int32), owner)


def _ends(figure: Node) -> tuple[float, float]:
    """Both ends of the interval, infinite where there is no bound; of a plain reading the reading itself."""
    low, high = figure.get("low"), figure.get("high")
    if figure.get("level") is None:
        low, high = (figure["point"] if end is None else end for end in (low, high))
    return (-math.inf if low is None else float(low), math.inf if high is None else float(high))
