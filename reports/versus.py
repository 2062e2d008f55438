"""Runs held against each other: groups of runs of one workload, what they show side by side, and the gate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from loadgen.columns import Floats
from loadgen.comparable import ALONE, Comparability, comparability
from loadgen.matched import Matched, matched
from loadgen.metrics import METRICS
from loadgen.rundir import Run
from loadgen.stats import Absent
from loadgen.verdict import Reason
from loadgen.work import Work, work_of
from reports.loads import differ_in_load_alone
from reports.view import View, view_of
from workloads.seeds import rng

Node = Mapping[str, Any]

LEAST_RUNS: Final = 3


@dataclass(frozen=True, slots=True)
class Headline:
    """A row of the side-by-side table: where the summary keeps it, and which way is better."""

    title: str
    path: tuple[str, ...]
    better: str


HEADLINES: Final = (
    *(
        Headline(f"{METRICS[name].title} {p}", ("metrics", name, p), METRICS[name].better)
        for name, p in (
            ("ttft", "p50"),
            ("ttft", "p99"),
            ("tpot", "p50"),
            ("tpot", "p99"),
            ("itl", "p99"),
            ("e2e", "p50"),
            ("e2e", "p99"),
        )
    ),
    Headline("Output", ("throughput", "output_tok_per_s"), "higher"),
    Headline("Input", ("throughput", "input_tok_per_s"), "higher"),
    Headline("Requests", ("throughput", "requests_per_s"), "higher"),
    Headline("Memory of the server's processes, peak", ("memory", "server_peak_bytes"), "lower"),
    Headline("Memory of the devices, peak", ("memory", "device_peak_bytes"), "lower"),
)


@dataclass(frozen=True, slots=True)
class Member:
    """One run, under the name of its contender; `href` is where its own page lies, "" if nowhere."""

    label: str
    run: Run
    href: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """Runs of one model and workload; `labels` are the contenders, in order, each with one run or more."""

    name: str
    labels: tuple[str, ...]
    views: Mapping[str, tuple[View, ...]]
    works: tuple[Work, ...]
    gate: Comparability
    matched: Matched | Absent
    hrefs: Mapping[str, str]

    def figure(self, label: str, headline: Headline) -> Node:
        """The contender's number: its one run's estimate, or the middle run's with all their intervals."""
        return over_runs([_at(view.summary, headline.path) for view in self.views[label]])

    def best(self, headline: Headline) -> str | None:
        """Who is best beyond doubt: only where the work was the same and no interval overlaps its own.

        A plain reading has no interval; the range of three runs stands for one.
        """
        figures = {label: self.figure(label, headline) for label in self.labels}
        if not self.gate.comparable or any(figure["point"] is None for figure in figures.values()):
            return None
        if any(
            figures[label].get("level") is None and len(self.views[label]) < LEAST_RUNS for label in figures
        ):
            return None
        sign = -1.0 if headline.better == "higher" else 1.0
        ends = {label: sorted(sign * end for end in _ends(figure)) for label, figure in figures.items()}
        first = min(ends, key=lambda label: ends[label][1])
        others = [low for label, (low, _) in ends.items() if label != first]
        return first if others and ends[first][1] < min(others) else None

    def latencies(self, label: str, metric: str) -> Floats:
        """Every planned request of all the contender's runs; +inf where it failed."""
        return np.concatenate([view.latency(metric) for view in self.views[label]])


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Everything that one page compares."""

    title: str
    cells: tuple[Cell, ...]
    facts: tuple[str, ...] = ()
    missing: tuple[str, ...] = field(default=())

    @property
    def comparable(self) -> bool:
        """Whether all of it may be held against each other: contenders, or one contender at several loads."""
        swept = differ_in_load_alone(
            [view.manifest for cell in self.cells for views in cell.views.values() for view in views]
        )
        if swept and all(cell.gate.state == ALONE for cell in self.cells):
            return True
        return all(cell.gate.comparable for cell in self.cells)


def cell_of(name: str, members: Sequence[Member], unlike: Sequence[Reason] = ()) -> Cell:
    """The runs of one workload, judged; the same runs give the same cell."""
    labels = tuple(dict.fromkeys(member.label for member in members))
    works = tuple(work_of(member.run, member.label) for member in members)
    gate = comparability(works, unlike)
    return Cell(
        name=name,
        labels=labels,
        views={label: tuple(view_of(m.run) for m in members if m.label == label) for label in labels},
        works=works,
        gate=gate,
        matched=matched(works, gate, rng(0, "matched work")),
        hrefs={member.run.name: member.href for member in members},
    )


def over_runs(figures: Sequence[Node]) -> Node:
    """One figure out of those of several runs; absent where one run lacks it.

    The point is the middle run's (the lower of two): percentiles are never averaged. The interval holds the
    intervals of all runs, because restarts differ by more than a single run knows.
    """
    lacking = next((figure for figure in figures if figure["point"] is None), None)
    if lacking is not None:
        return lacking
    if len(figures) == 1:
        return figures[0]
    points = sorted(float(figure["point"]) for figure in figures)
    lows, highs = zip(*map(_ends, figures), strict=True)
    low, high = min(lows), max(highs)
    return {
        "point": points[(len(points) - 1) // 2],
        "low": low if math.isfinite(low) else None,
        "high": high if math.isfinite(high) else None,
        "level": figures[0].get("level"),
        "n": len(points),
        "unit": figures[0]["unit"],
        "note": f"the middle of {len(points)} runs; the interval holds those of all",
    }


def _ends(figure: Node) -> tuple[float, float]:
    """Both ends of the interval, infinite where there is no bound; of a plain reading the reading itself."""
    low, high = figure.get("low"), figure.get("high")
    if figure.get("level") is None:
        low, high = (figure["point"] if end is None else end for end in (low, high))
    return (-math.inf if low is None else float(low), math.inf if high is None else float(high))


def _at(summary: Node, path: Sequence[str]) -> Node:
    node: Any = summary
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else {"point": None, "absent": "this run's summary lacks it"}
