"""A comparison: groups of runs of one workload, their numbers, and whether they may be ranked."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from loadgen.metrics.definitions import METRICS
from loadgen.record.columns import Floats
from loadgen.record.rundir import Run
from loadgen.record.verdict import Reason
from loadgen.stats.figure import Estimate, Figure
from loadgen.verdict.comparable import ALONE, Comparability, admitted, comparability
from loadgen.verdict.served_work import ServedWork, work_of
from reports.compare.pooled_figures import Path, figure_of
from reports.compare.significance_text import Contrasts, Pair, better, contrasts_of, turned
from reports.compare.sweep_load import differ_in_load_alone
from reports.run_view import View, view_of


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
    Headline("Peak memory of the server's processes", ("memory", "server_peak_bytes"), "lower"),
    Headline("Peak memory of the devices", ("memory", "device_peak_bytes"), "lower"),
)


E2E: Final = next(h for h in HEADLINES if h.path == ("metrics", "e2e", "p50"))
TITLES: Final = {headline.path: (headline.title, headline.better) for headline in HEADLINES}


@dataclass(frozen=True, slots=True)
class Member:
    """One run, under the name of its contender; `href` is where its own page lies, "" if nowhere.

    Runs of several contenders with the same `repeat` were neighbours in time; None where that is not known.
    """

    label: str
    run: Run
    href: str = ""
    repeat: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ComparisonCell:
    """Runs of one model and workload; `labels` are the contenders, in order, each with one run or more.

    `contrasts` hold the second of every pair of contenders against the first, none where they did not do the
    same work. `left_out` are runs that the client spoilt, with their contenders; nothing else knows of them.
    """

    name: str
    labels: tuple[str, ...]
    views: Mapping[str, tuple[View, ...]]
    works: tuple[ServedWork, ...]
    gate: Comparability
    hrefs: Mapping[str, str]
    contrasts: Mapping[Pair, Contrasts] = field(default_factory=dict)
    left_out: tuple[tuple[str, View], ...] = ()
    _figures: dict[tuple[str, Path], Figure] = field(default_factory=dict)

    def figure(self, label: str, headline: Headline) -> Figure:
        """The contender's number out of its one run, or out of all."""
        key = (label, headline.path)
        if key not in self._figures:
            self._figures[key] = figure_of(self.views[label], headline.path)
        return self._figures[key]

    def best(self, headline: Headline) -> str | None:
        """The contender that is significantly better than every other; None where there is none."""

        def beats(one: str, other: str) -> bool:
            return better(self.versus(one, other).get(headline.path), headline.better) is True

        winners = (one for one in self.labels if all(beats(one, o) for o in self.labels if o != one))
        return next(winners, None) if len(self.labels) > 1 else None

    def versus(self, one: str, other: str) -> Contrasts:
        """Every ratio of `one` to `other`; none where they are not compared."""
        if (other, one) in self.contrasts:
            return self.contrasts[other, one]
        return turned(self.contrasts.get((one, other), {}))

    def e2e(self, label: str) -> float:
        """The contender's E2E p50, seconds; infinite where it has none."""
        figure = self.figure(label, E2E)
        return figure.point if isinstance(figure, Estimate) else math.inf

    def pairs(self) -> list[tuple[Pair, Contrasts]]:
        """The fastest by E2E p50 against each other contender, in the order of E2E p50, and their ratios.

        The whole page compares these pairs in this direction.
        """
        order = sorted(self.labels, key=self.e2e)
        return [((order[0], other), self.versus(order[0], other)) for other in order[1:]]

    def latencies(self, label: str, metric: str) -> Floats:
        """Every planned request of all the contender's runs; +inf where it failed."""
        return np.concatenate([view.latency(metric) for view in self.views[label]])


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Everything that one page compares."""

    title: str
    cells: tuple[ComparisonCell, ...]
    facts: tuple[str, ...] = ()
    missing: tuple[str, ...] = field(default=())

    @property
    def comparable(self) -> bool:
        """Whether all of it may be ranked: contenders, or one contender at several loads."""
        swept = differ_in_load_alone(
            [view.manifest for cell in self.cells for views in cell.views.values() for view in views]
        )
        if swept and all(cell.gate.state == ALONE for cell in self.cells):
            return True
        return all(cell.gate.comparable for cell in self.cells)


def cell_of(
    name: str,
    members: Sequence[Member],
    unlike: Sequence[Reason] = (),
    *,
    varied: Collection[str] = (),
    anyway: bool = False,
) -> ComparisonCell:
    """The runs of one workload, judged; the same runs give the same cell."""
    all_works = [work_of(member.run, member.label) for member in members]
    works, left_out = admitted(all_works)
    kept = [member for member, work in zip(members, all_works, strict=True) if work in works]
    labels = tuple(dict.fromkeys(member.label for member in kept))
    of = {label: sorted((m for m in kept if m.label == label), key=_in_time) for label in labels}
    views = {label: tuple(view_of(member.run) for member in own) for label, own in of.items()}
    repeats = {label: [m.repeat for m in own if m.repeat is not None] for label, own in of.items()}
    gate = comparability(works, unlike, varied=varied, anyway=anyway)
    gate = replace(gate, warnings=(*left_out, *gate.warnings))
    return ComparisonCell(
        name=name,
        labels=labels,
        views=views,
        works=works,
        gate=gate,
        hrefs={member.run.name: member.href for member in members},
        contrasts=contrasts_of(views, repeats) if gate.comparable else {},
        left_out=tuple((member.label, view_of(member.run)) for member in members if member not in kept),
    )


def _in_time(member: Member) -> int:
    return member.repeat or 0
