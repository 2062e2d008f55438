"""One workload at several loads: what each engine gives and what its users wait for, point by point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from burstline.measure.metrics.slo import Slo, parse_slo
from burstline.measure.record.manifest import ServerFacts
from burstline.measure.record.verdict import HELD, QUEUE_GREW, State, Use, withheld
from burstline.measure.stats.figure import Absent, Estimate, Figure, Result
from burstline.reports.model.comparison import OUTPUT, Case, Contender, View
from burstline.reports.model.sweep_load import SweepLoad, load_of, work_asked
from burstline.roofline.reconcile.reconciliation import Reconciliation

PERCENTILES: Final = ("p99", "p95", "p90", "p50")


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One contender at one load. `output` is per device where `Sweep.per_device`.

    `latency` is by metric at the sweep's percentile, `median` at p50. `result` is the worst of its SLOs over
    all its runs, "" without any; `missed` are those missed, `unsure` inconclusive ones, with reasons.
    `doubts`: states and causes for which it is not ranked. `overloaded`: requests in flight kept growing.
    """

    label: str
    load: SweepLoad
    output: Figure
    latency: Mapping[str, Figure]
    median: Mapping[str, Figure]
    result: str
    missed: tuple[str, ...]
    unsure: tuple[tuple[str, str], ...]
    doubts: tuple[str, ...]
    overloaded: bool

    @property
    def output_point(self) -> float:
        """The output, 0 where it is not known."""
        return self.output.point if isinstance(self.output, Estimate) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Points in the order of contender and load; `percentile` says which one of each latency they hold."""

    name: str
    kind: str
    loads: tuple[SweepLoad, ...]
    labels: tuple[str, ...]
    points: tuple[Point, ...]
    per_device: bool
    percentile: Mapping[str, str]
    slos: tuple[Slo, ...]

    @property
    def output_unit(self) -> str:
        return "tok/s per GPU" if self.per_device else "tok/s"

    @property
    def output_title(self) -> str:
        return f"Output ({self.output_unit})"

    def of(self, label: str) -> list[Point]:
        return [point for point in self.points if point.label == label]


def sweeps_in(cases: Sequence[Case]) -> list[tuple[Sweep, list[Case]]]:
    """Every sweep among the cases, with its cases in the order of load."""
    groups: dict[tuple[object, ...], list[tuple[SweepLoad, Case]]] = {}
    for case in cases:
        works = {(work_asked(view.manifest), load_of(view.manifest)) for view in case.views}
        work, load = works.pop() if len(works) == 1 else (None, None)
        if work is not None and load is not None:
            groups.setdefault((work, _model(case)), []).append((load, case))
    swept = [sorted(g, key=lambda pair: pair[0]) for g in groups.values() if len({load for load, _ in g}) > 1]
    named = len({_model(group[0][1]) for group in swept}) > 1
    return [(_sweep(group, named=named), [case for _, case in group]) for group in swept]


def _sweep(group: Sequence[tuple[SweepLoad, Case]], *, named: bool) -> Sweep:
    cases = [case for _, case in group]
    labels = tuple(dict.fromkeys(label for case in cases for label in case.labels))
    views = [view for case in cases for view in case.views]
    # Criteria for single requests are no bound on a percentile: only targets of whole runs are slos.
    targets = dict.fromkeys(row.target for view in views for row in view.summary.targets)
    slos = tuple(map(parse_slo, targets))
    percentile = {metric: _percentile(metric, cases, slos) for metric in ("tpot", "ttft", "e2e")}
    per_device = None not in [n_devices(view) for view in views]
    points = tuple(
        _point(case.named(label), load, case, percentile, per_device)
        for label in labels
        for load, case in group
        if label in case.labels
    )
    asked = views[0].manifest.asked
    name = f"{asked.prompt_tokens} → {asked.output_tokens} tokens"
    return Sweep(
        name=f"{_model(cases[0])}, {name}" if named else name,
        kind=group[0][0].kind,
        loads=tuple(load for load, _ in group),
        labels=labels,
        points=points,
        per_device=per_device,
        percentile=percentile,
        slos=slos,
    )


def _percentile(metric: str, cases: Sequence[Case], slos: Sequence[Slo]) -> str:
    """A target's; else of the time per token the median, of the others the highest that most points have."""
    wanted = [g.statistic for g in slos if g.metric == metric and g.statistic in PERCENTILES]
    if wanted:
        return str(wanted[0])
    if metric == "tpot":
        return "p50"
    contenders = [contender for case in cases for contender in case.contenders]
    figures = {p: [each.figure("metrics", metric, p) for each in contenders] for p in PERCENTILES}
    return max(PERCENTILES, key=lambda p: sum(isinstance(each, Estimate) for each in figures[p]))


def _point(
    contender: Contender, load: SweepLoad, case: Case, percentile: Mapping[str, str], per_device: bool
) -> Point:
    views = contender.views
    slos = contender.slos
    results = {row.result for row in slos}
    n = (n_devices(views[0]) or 1) if per_device else 1
    shown = [OUTPUT.path, *(("metrics", m, p) for m, best in percentile.items() for p in (best, "p50"))]
    states: list[str | None] = [withheld(view.summary.verdict, Use.RANKED) for view in views]
    spoilt = filter(None, (view.summary.spoilt_by(*path) for view in views for path in shown))
    states += [by if by == HELD else State.CLIENT_BOUND for by in spoilt]
    if case.gate.state == State.NOT_COMPARABLE:
        states.append(State.NOT_COMPARABLE)
    return Point(
        label=contender.label,
        load=load,
        output=_divided(contender.figure(*OUTPUT.path), n),
        latency={m: contender.figure("metrics", m, p) for m, p in percentile.items()},
        median={m: contender.figure("metrics", m, "p50") for m in percentile},
        result=next((r for r in (Result.FAIL, Result.INCONCLUSIVE, Result.PASS) if r in results), ""),
        missed=tuple(row.target for row in slos if row.result == Result.FAIL),
        unsure=tuple((row.target, row.reason) for row in slos if row.result == Result.INCONCLUSIVE),
        doubts=tuple(dict.fromkeys(map(str, filter(None, states)))),
        overloaded=any(view.summary.verdict.has(QUEUE_GREW) for view in views),
    )


def _divided(figure: Figure, n: int) -> Figure:
    if isinstance(figure, Absent):
        return figure
    low, high = (None if end is None else end / n for end in (figure.low, figure.high))
    return replace(figure, point=figure.point / n, low=low, high=high)


def n_devices(view: View) -> int | None:
    """Over how many GPUs the engine was spread; None without GPUs, or where that is not stated."""
    devices = view.manifest.devices
    roofline = view.summary.roofline
    on_cpu = isinstance(roofline, Reconciliation) and roofline.device.id.startswith("cpu")
    if not devices or on_cpu:
        return None
    if len(devices) == 1:
        return 1
    identity = view.manifest.identity
    if identity is None or identity.tensor_parallel_size is None:
        return None
    copies = (identity.pipeline_parallel_size or 1) * (identity.data_parallel_size or 1)
    spread = identity.tensor_parallel_size * copies
    # SGLang's attention by data parallel shares its tensor-parallel GPUs: then it is more than there are.
    return spread if spread <= len(devices) else None


def _model(case: Case) -> str:
    return (case.views[0].manifest.server or ServerFacts()).model_name
