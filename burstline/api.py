"""The Python API: `burstline.load(run)` opens what `burstline run` wrote: pandas tables, typed values."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path

import pandas as pd

from burstline.loadgen.record.rundir import Run, open_run
from burstline.loadgen.record.summary import Summary
from burstline.loadgen.record.verdict import Verdict
from burstline.reports.formats.csv import request_frame
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.page.figure_files import figure_files
from burstline.workloads.request import WorkloadError


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the report in its light theme. A notebook shows it as it is."""

    name: str
    svg: str = field(repr=False)
    png: bytes = field(repr=False)

    def _repr_svg_(self) -> str:
        return self.svg


class LoadedRun:
    """A run that has ended. Each table is read from disk when it is first asked for."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __repr__(self) -> str:
        return f"<burstline run {self._run.path}>"

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._run.path

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per planned request, whatever its outcome.

        Times `*_ns` are integer nanoseconds from the run's start; latencies (`ttft_s`, `e2e_s`, ...) are
        seconds, NaN where a request failed or has none.
        """
        return request_frame(self._run)

    @cached_property
    def telemetry(self) -> pd.DataFrame:
        """What was sampled: one row per sample with `at_ns`, `source`, `name`, `value`, `note`."""
        found = self._run.telemetry
        return pd.DataFrame(columns=["at_ns", "source", "name", "value", "note"]) if found is None else found

    @cached_property
    def summary(self) -> Summary:
        """Every number with its interval, sample count and unit, as in `summary.json`."""
        if self._run.summary is None:
            raise WorkloadError(f"{self.path} has no summary.json; `burstline report {self.path}` writes it")
        return self._run.summary

    @property
    def verdict(self) -> Verdict:
        """The run's state (`VALID`, ...) with its reasons."""
        return self.summary.verdict

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """Every figure of the report, by name: `ecdf-ttft`, ..."""
        drawn = figure_files(alone(view_of(self._run)))
        names = [Path(name).stem for name in drawn if name.endswith(".svg")]
        return {
            name: Figure(name, drawn[f"{name}.svg"].decode(), drawn.get(f"{name}.png", b"")) for name in names
        }

    def figure(self, name: str) -> Figure:
        """One figure of the report; WorkloadError where this run has none of that name."""
        if name not in self.figures:
            raise WorkloadError(f"{self.path} has no figure {name!r}; it has {', '.join(self.figures)}")
        return self.figures[name]


def load(run: str | PathLike[str]) -> LoadedRun:
    """Open a run by its folder, or by a file in it such as `records.parquet`.

    Raises WorkloadError (`burstline.workloads.request`) where there is no run, or one that cannot be read.
    """
    path = Path(run)
    return LoadedRun(open_run(path.parent if path.is_file() else path))
