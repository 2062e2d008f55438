"""The one model of a page: cases of one workload, in each 1 to n contenders, of each 1 to n runs.

A run is a comparison with one contender that ran once; `--repeats` is one contender that ran several times.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import combinations
from typing import Any, Final

import numpy as np

from burstline.errors import tables_beside
from burstline.measure.metrics.definitions import METRICS, latencies, samples_of
from burstline.measure.metrics.sessions import turns_of
from burstline.measure.metrics.slo import judge_over_runs, parse_slo
from burstline.measure.record.columns import Columns, Floats, Ints
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.record import Outcome
from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import Reason, SloResult, widened
from burstline.measure.stats.figure import Absent, Estimate, Figure
from burstline.measure.stats.quantiles import over_runs, percentile_over_runs
from burstline.measure.stats.significance import Answer, Contrast, Difference, between_runs, judged
from burstline.measure.summarize import part_of, summarize_run
from burstline.measure.verdict.certificate import Printed
from burstline.measure.verdict.comparable import ALONE, Comparability, comparability, work_of
from burstline.reports.model.sweep_load import differ_in_load_alone
from burstline.servers.identity import Identity
from burstline.servers.redact import redacted, words_of_server
from burstline.servers.registry import ENGINES
from burstline.workloads.request import RequestKind

Path = tuple[str, ...]
"""Where the summary keeps a figure: ("metrics", "ttft", "p50")."""
Pair = tuple[str, str]
Contrasts = Mapping[Path, Contrast | Absent]

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
LATENCIES: Final = ("ttft", "tpot", "itl", "e2e")
"""The latencies of the headline; a page folds the others away."""
LOG_LINES: Final = 12
"""How many of the last lines of the server's log a page may show."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A number that contenders are compared by: where the summary keeps it, and which way is better."""

    title: str
    path: Path
    better: str


def _headline(place: str, row: Mapping[str, Any]) -> Headline:
    path = tuple(place.split("."))
    if path[0] != "metrics":
        return Headline(row["title"], path, row["better"])
    metric = METRICS[path[1]]
    return Headline(f"{metric.title} {path[2]}", path, metric.better)


_ROWS: Final = tables_beside(__file__, "headlines.toml")
_BY_PLACE: Final = {place: _headline(place, row) for place, row in _ROWS.items()}
HEADLINES: Final = tuple(_BY_PLACE.values())
E2E: Final = _BY_PLACE["metrics.e2e.p50"]
OUTPUT: Final = _BY_PLACE["throughput.output_tok_per_s"]
INPUT: Final = _BY_PLACE["throughput.input_tok_per_s"]
TITLES: Final = {headline.path: (headline.title, headline.better) for headline in HEADLINES}
JUDGED: Final = tuple(each.path for place, each in _BY_PLACE.items() if _ROWS[place].get("is_judged"))
"""The numbers a verdict is given on: the more there are, the less each can show."""


@dataclass(frozen=True, eq=False)
class View:
    """One run as its page reads it; `summary` is made where none was written."""

    run: Run
    summary: Summary

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def manifest(self) -> Manifest:
        return self.run.manifest

    @property
    def columns(self) -> Columns:
        return self.run.columns

    @cached_property
    def needed(self) -> Columns:
        """The planned requests but for those that a load for a time, or an interrupted one, left unsent."""
        left = self.manifest.may_end_early or self.summary.verdict.is_interrupted
        return self.columns.without(Outcome.NOT_SENT) if left else self.columns

    @property
    def log_tail(self) -> list[str]:
        """The last lines of the server's log, none where Burstline did not start it."""
        return [redacted(line) for line in self.run.server_log.splitlines()[-LOG_LINES:]]

    @property
    def log_cause(self) -> str | None:
        """The line of the log that says why nothing was served, where the engine's adapter finds one."""
        engine = ENGINES.get(self.manifest.engine)
        cause = engine.root_cause(self.run.server_log) if engine else None
        return words_of_server(cause, 300) if cause else None

    @property
    def is_generating(self) -> bool:
        """Whether replies are generated: embeddings and ranks have no first token."""
        return self.manifest.asked.request_kind == RequestKind.GENERATE

    @property
    def headline(self) -> tuple[str, ...]:
        return LATENCIES if self.is_generating else ("e2e",)

    @property
    def has_served(self) -> bool:
        return bool(self.summary.counts.get("ok"))

    @property
    def title(self) -> str:
        """Engine and workload, in the words of those who know them."""
        manifest = self.manifest
        engine = ENGINES[manifest.engine].title if manifest.engine in ENGINES else manifest.engine
        return f"{engine}: {manifest.title or manifest.workload or self.name}"

    @property
    def facts(self) -> dict[str, str]:
        """What was measured, on what and when; "" where it is not known."""
        manifest = self.manifest
        identity = manifest.identity or Identity(manifest.engine)
        model = identity.model or (manifest.server.model if manifest.server else None) or ""
        devices = [device.name for device in manifest.devices]
        many = " + ".join(f"{devices.count(name)} × {name}" for name in dict.fromkeys(devices))
        utc, status = manifest.clock.utc if manifest.clock else "", str(self.run.status)
        return {
            "engine": f"{identity.engine} {identity.version}" if identity.version else "",
            "model": "" if model == identity.engine else model,
            "dtype": identity.dtype or "",
            "devices": many or manifest.host.cpu or "",
            "date": f"{datetime.fromisoformat(utc).astimezone(UTC):%d %B %Y, %H:%M} UTC" if utc else "",
            "status": {"complete": "", "failed": "the run failed"}.get(status, f"the run was {status}"),
        }

    def words(self, column: str) -> list[str | None]:
        """A column of text of the records, one entry per request."""
        found: list[str | None] = self.columns.table.column(column).to_pylist()
        return found

    def latency(self, metric: str) -> Floats:
        """One value per record in seconds: +inf where it failed, NaN where it is undefined."""
        return latencies(METRICS[metric], self.columns)

    @cached_property
    def counted(self) -> Columns:
        """The requests that the summary's latencies are made of."""
        return part_of(self.columns, self.manifest, self.run.status, turns_of(self.run)).counted

    @cached_property
    def shown(self) -> "Shown":
        slowest = np.argsort(-np.nan_to_num(self.latency("e2e"), nan=-1.0), kind="stable")
        _, first_of_each_kind = np.unique(np.array(self.words("outcome"), dtype=str), return_index=True)
        return shown_of(sending_order(self.columns), slowest, first_of_each_kind.tolist())


def view_of(run: Run) -> View:
    """The run with its summary; of one that ended before one was written, what its files give."""
    return View(run, run.summary if run.summary is not None else summarize_run(run))


@dataclass(frozen=True, eq=False)
class Contender:
    """One system under one name: its runs, in the order of time. Only here its numbers are made of them."""

    label: str
    views: tuple[View, ...]
    _figures: dict[Path, Figure] = field(default_factory=dict, repr=False)

    def figure(self, *path: str) -> Figure:
        """The number at `path` of the summaries: one run's own, of several the pooled one.

        Percentiles are those of all requests, every run with equal weight, other numbers the runs' geometric
        mean; from three runs on with an interval between runs.
        """
        if path not in self._figures:
            self._figures[path] = self._over_runs(path) if len(self.views) > 1 else self._own(path)[0]
        return self._figures[path]

    def _own(self, path: Path) -> list[Figure]:
        return [view.summary.figure(*path) for view in self.views]

    def _over_runs(self, path: Path) -> Figure:
        values = self.points(path)
        if isinstance(values, Absent):
            return values
        if path[0] == "metrics" and path[2] != "mean":
            metric, p = path[1], float(path[2].removeprefix("p")) / 100
            samples = [samples_of(METRICS[metric], view.counted) for view in self.views]
            graded = [view.summary.grades.get(metric, {}).get(path[2]) for view in self.views]
            most_s = max((each.read_effect_s or 0.0 for each in graded if each), default=None)
            return widened(percentile_over_runs(samples, p, METRICS[metric].unit), most_s)
        first = self._own(path)[0]
        return over_runs(np.array(values), first.unit if isinstance(first, Estimate) else "")

    def points(self, path: Path) -> list[float] | Absent:
        """The number of each run; Absent where one lacks it."""
        figures = self._own(path)
        lacking = next((figure for figure in figures if isinstance(figure, Absent)), None)
        return lacking or [figure.point for figure in figures if isinstance(figure, Estimate)]

    @cached_property
    def slos(self) -> tuple[SloResult, ...]:
        """Each SLO once, judged by its figure over all runs; of a single run as it was judged."""
        summaries = [view.summary for view in self.views]
        own = {row.target: row for summary in summaries for row in summary.targets}
        if len(summaries) == 1:
            return tuple(own.values())
        return judge_over_runs([*map(parse_slo, own)], summaries, lambda path: self.figure(*path))

    def counted(self, metric: str) -> Floats:
        """Every request of all runs that its numbers count; +inf where it failed."""
        return np.concatenate([latencies(METRICS[metric], view.counted) for view in self.views])

    @property
    def e2e_s(self) -> float:
        """E2E p50, seconds; infinite where there is none."""
        figure = self.figure(*E2E.path)
        return figure.point if isinstance(figure, Estimate) else math.inf


def contrasts_of(
    contenders: Sequence[Contender], repeats: Mapping[str, Sequence[int]]
) -> dict[Pair, Contrasts]:
    """Every pair of contenders in their order: the second against the first, in JUDGED.

    `repeats` are the numbers of each contender's runs where runs of one number were neighbours in time,
    empty where that is not known.
    """
    found: dict[Pair, Contrasts] = {}
    for a, b in combinations(contenders, 2):
        of_a, of_b = repeats[a.label], repeats[b.label]
        interleaved = bool(of_a) and of_a == of_b
        differences = {"/".join(path): _difference(a, b, path, interleaved=interleaved) for path in JUDGED}
        contrasts = judged(differences)
        found[a.label, b.label] = {path: contrasts["/".join(path)] for path in JUDGED}
    return found


def _difference(a: Contender, b: Contender, path: Path, *, interleaved: bool) -> Difference | Absent:
    """Of the numbers that the table shows, with the scatter of the runs' own."""
    for view in (*a.views, *b.views):
        if by := view.summary.spoilt_by(*path):
            return Absent(f"{by} in {view.name}: {' '.join(path[1:])} is unreliable")
    of_a, of_b = a.points(path), b.points(path)
    for values in (of_a, of_b):
        if isinstance(values, Absent):
            return values
    shown_a, shown_b = a.figure(*path), b.figure(*path)
    if isinstance(shown_a, Absent) or isinstance(shown_b, Absent) or not shown_a.point or not shown_b.point:
        return Absent("a ratio needs values above 0", "not-positive")
    point = math.log(shown_b.point / shown_a.point)
    return between_runs(np.array(of_a), np.array(of_b), interleaved=interleaved, point=point)


def better(contrast: Contrast | Absent | None, which: str) -> bool | None:
    """Whether the ratio's first contender is better, None where that is open; `which` is lower or higher."""
    if not isinstance(contrast, Contrast) or contrast.answer != Answer.DIFFERENT:
        return None
    return (contrast.ratio.point > 1) == (which == "higher")


def turned(contrast: Contrast) -> Contrast:
    """The same with its ratio the other way round."""
    ratio = contrast.ratio
    low, high = (None if end is None else 1 / end if end else math.inf for end in (ratio.high, ratio.low))
    point = 1 / ratio.point if ratio.point else math.inf
    return replace(contrast, ratio=replace(ratio, point=point, low=low, high=high))


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
class Case:
    """Runs of one model and workload by contender, and whether these may be ranked.

    `contrasts` hold the second of every pair of contenders against the first, none where they did not do the
    same work.
    """

    name: str
    contenders: tuple[Contender, ...]
    gate: Comparability
    hrefs: Mapping[str, str] = field(default_factory=dict)
    contrasts: Mapping[Pair, Contrasts] = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        return [contender.label for contender in self.contenders]

    @property
    def views(self) -> list[View]:
        return [view for contender in self.contenders for view in contender.views]

    @property
    def is_alone(self) -> bool:
        """Whether nothing is to be compared: one contender, whose runs can be used."""
        return self.gate.state == ALONE

    def key(self, who: str, path: Path) -> str:
        """The key of a number of a contender, or of a ratio of two: equal wherever the page shows it."""
        return f"{self.name}/{who}:{'.'.join(path)}"

    def named(self, label: str) -> Contender:
        return next(contender for contender in self.contenders if contender.label == label)

    def best(self, headline: Headline) -> str | None:
        """The contender that is significantly better than every other; None where there is none."""

        def beats(one: str, other: str) -> bool:
            return better(self.versus(one, other).get(headline.path), headline.better) is True

        labels = self.labels
        winners = (one for one in labels if all(beats(one, other) for other in labels if other != one))
        return next(winners, None) if len(labels) > 1 else None

    def versus(self, one: str, other: str) -> Contrasts:
        """Every ratio of `one` to `other`; none where they are not compared."""
        if (other, one) in self.contrasts:
            return self.contrasts[other, one]
        reverse = self.contrasts.get((one, other), {})
        return {path: each if isinstance(each, Absent) else turned(each) for path, each in reverse.items()}

    def pairs(self) -> list[tuple[Pair, Contrasts]]:
        """The fastest by E2E p50 against each other contender, in the order of E2E p50, and their ratios.

        The whole page compares these pairs in this direction.
        """
        order = [each.label for each in sorted(self.contenders, key=lambda each: each.e2e_s)]
        return [((order[0], other), self.versus(order[0], other)) for other in order[1:]]


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Everything that one page shows; `others` are results of other tools, which are never ranked."""

    title: str
    cases: tuple[Case, ...]
    facts: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    others: tuple[Printed, ...] = ()

    @property
    def views(self) -> list[View]:
        return [view for case in self.cases for view in case.views]

    @property
    def run(self) -> View | None:
        """The one run that this is about; None of several, and of a suite however many it has finished."""
        return None if len(self.views) != 1 or self.cases[0].hrefs or self.others else self.views[0]

    @property
    def comparable(self) -> bool:
        """Whether all of it may be ranked: contenders, or one contender at several loads."""
        if self.others:
            return False
        if all(case.is_alone for case in self.cases):
            return differ_in_load_alone([view.manifest for view in self.views])
        return all(case.gate.comparable for case in self.cases)


def alone(view: View) -> Comparison:
    """A run as a comparison with one contender."""
    case = Case("", (Contender(view.manifest.engine, (view,)),), Comparability(ALONE, (), (), ()))
    return Comparison(view.title, (case,), tuple(dict.fromkeys(filter(None, view.facts.values()))))


def case_of(
    name: str,
    members: Sequence[Member],
    unlike: Sequence[Reason] = (),
    *,
    varied: Collection[str] = (),
    anyway: bool = False,
) -> Case:
    """The runs of one workload, judged; the same runs give the same case."""
    works = [work_of(member.run, member.label) for member in members]
    of = {
        label: sorted((m for m in members if m.label == label), key=lambda member: member.repeat or 0)
        for label in dict.fromkeys(member.label for member in members)
    }
    contenders = tuple(Contender(label, tuple(view_of(m.run) for m in own)) for label, own in of.items())
    repeats = {label: [m.repeat for m in own if m.repeat is not None] for label, own in of.items()}
    gate = comparability(works, unlike, varied=varied, anyway=anyway)
    return Case(
        name,
        contenders,
        gate,
        hrefs={member.run.name: member.href for member in members},
        contrasts=contrasts_of(contenders, repeats) if gate.comparable else {},
    )


ALL_UP_TO: Final = 2000
EACH: Final = 800
"""How many are drawn evenly spaced, and how many of the slowest, where not all are."""


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """Positions among `n` records: `even` in the order of sending and `slowest` first are drawn.

    `listed` is the table: in the order of sending, all that is drawn or that the page links to.
    """

    n: int
    even: Ints
    slowest: Ints
    listed: Ints

    @property
    def all(self) -> bool:
        return len(self.listed) == self.n

    def href(self, position: int) -> str:
        """Where on the page the request is listed; "" where it is not."""
        return f"#r{position}" if self.all or position in self.listed else ""


def shown_of(sent: Ints, slowest: Ints, named: Iterable[int]) -> Shown:
    """All of a small run; of a large one EACH evenly spaced, EACH of the slowest, and those `named`.

    `sent` and `slowest` are all positions, in the order of sending and from the slowest to the fastest.
    """
    n = len(sent)
    if n <= ALL_UP_TO:
        return Shown(n, sent, slowest, sent)
    even = sent[np.linspace(0, n - 1, EACH).round().astype(np.int64)]
    kept = np.zeros(n, dtype=bool)
    kept[np.concatenate([even, slowest[:EACH], np.fromiter(named, np.int64)])] = True
    return Shown(n, even, slowest[:EACH], sent[kept[sent]])


def sending_order(c: Columns) -> Ints:
    """Positions of the records in the order in which they were sent; never sent last, ties in plan order."""
    return np.argsort(c.sent_s, kind="stable")
