"""A run's numbers as OpenMetrics text: gauges with the time at which the load ended.

`promtool tsdb create-blocks-from openmetrics` gives it to Prometheus. A percentile is a label; the ends of
its interval are gauges of their own, `..._low` and `..._high`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, StateSetMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.registry import Collector

from burstline.loadgen.record.rundir import Run
from burstline.loadgen.stats.figure import Absent
from burstline.reports.model.comparison import view_of


class _Numbers(Collector):
    def __init__(self, run: Run) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        return _families(self._run)


def openmetrics(run: Run) -> bytes:
    """Verdict, requests by outcome, and every number that is not absent."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(run))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


def _families(run: Run) -> Iterator[Metric]:
    view = view_of(run)
    summary, manifest, facts = view.summary, view.manifest, view.facts
    at_s = (manifest.clock.wall_ns / 1e9 if manifest.clock else 0.0) + view.columns.end_s
    families: dict[str, GaugeMetricFamily] = {}

    def add(name: str, title: str, value: float | None, label: str = "", of: str = "") -> None:
        labels = ["run", label] if label else ["run"]
        family = families.setdefault(name, GaugeMetricFamily(f"burstline_{name}", title, labels=labels))
        if value is not None:
            family.add_metric([run.name, of] if label else [run.name], value, timestamp=at_s)

    info = InfoMetricFamily("burstline_run", "What was measured, and how.", labels=["run"])
    known = {"engine": manifest.engine, "workload": manifest.title or manifest.workload}
    info.add_metric([run.name], known | {k: v for k, v in facts.items() if k != "engine"}, timestamp=at_s)
    yield info
    verdict = StateSetMetricFamily("burstline_verdict", "The state of the run.", labels=["run"])
    state = summary.verdict.state
    verdict.add_metric([run.name], {str(each): each == state for each in type(state)}, timestamp=at_s)
    yield verdict
    for outcome, n in summary.counts.items():
        add("requests", "Requests by outcome.", n, "outcome", outcome)
    for row in summary.rows():
        figure, (section, *path) = row.figure, row.name.split(".")
        if isinstance(figure, Absent):
            continue
        values = {"": figure.point, "_low": figure.low, "_high": figure.high}
        for end, value in values.items():
            if value is None:
                continue
            if section in ("metrics", "bounds"):
                bound = "_bound" if section == "bounds" else ""
                name = f"{path[0]}{bound}_seconds{end}"
                add(name, f"{path[0]} in seconds.", value, "statistic", path[1])
            else:
                add("_".join((section, *path)) + end, f"{row.title}, {figure.unit}.", value)
    yield from families.values()
