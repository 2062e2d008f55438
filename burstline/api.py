"""The Python API: `run` sends a load, `load` opens a run that has ended, `compare` ranks runs, `gate` judges
a change, `limit` searches for the highest load, `bound` asks the roofline.

Options have the names of the command's flags with `_` for `-`, and a suite's types: `requests=200`,
`arrival="poisson"`, `slo=["ttft.p99<=2s"]`. WorkloadError and RooflineError (both ValueError) say what is
wrong with them, EngineError what is wrong with the server.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Final

import pandas as pd

from burstline.bench.limit import check_limit, searched
from burstline.bench.progress import Called, Progress, Snapshot
from burstline.bench.run import carry_out
from burstline.bench.run_settings import Settings as RunSettings
from burstline.bench.run_settings import words_of_run
from burstline.console import exit_codes
from burstline.console.server_options import ServerOptions, own_key
from burstline.machine.hints import Hints
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.summary import Summary
from burstline.measure.record.verdict import Verdict
from burstline.reports.formats.predicted import shown
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.page.digest import comparison_json
from burstline.reports.page.files import figure_files, request_frame, written
from burstline.reports.page.limit_page import LimitResult
from burstline.servers.redact import Secret, learn_from
from burstline.servers.settings import Settings
from burstline.suites.gate import GateResult, gated
from burstline.suites.toml_table import TomlTable
from burstline.verbs.bound import BoundOptions, analyse, check
from burstline.verbs.compare import compared
from burstline.verbs.run import checked_load
from burstline.workloads.options import as_text, options_of, words_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import GateOptions, Goals, LimitOptions, LoadSpec

Value = str | float | bool | PathLike[str] | Sequence[str] | None
"""The value of an option; None leaves it unset."""
_OF_A_RUN: Final = (ServerOptions, Settings, LoadSpec, Goals, Hints)


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
        """The samples: one row each, with `at_ns`, `source`, `name`, `value`, `note`."""
        found = self._run.telemetry
        return pd.DataFrame(columns=["at_ns", "source", "name", "value", "note"]) if found is None else found

    @cached_property
    def summary(self) -> Summary:
        """Every number with its interval, sample count and unit, as in `summary.json`."""
        if self._run.summary is None:
            raise WorkloadError(f"{self.path} has no summary.json; `burstline report RUN` writes it")
        return self._run.summary

    @cached_property
    def numbers(self) -> pd.DataFrame:
        """The same as a table, by path (`metrics.ttft.p99`): title, point, low, high, level, n, unit.

        A number that is absent has no point, and says why in `absent`.
        """
        rows = {row.name: {"title": row.title} | row.figure.to_json() for row in self.summary.rows()}
        return pd.DataFrame.from_dict(rows, orient="index")

    @property
    def verdict(self) -> Verdict:
        """The run's state (`VALID`, ...) with its reasons."""
        return self.summary.verdict

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """Every figure of the report, by name: `ttft_cdf`, ..."""
        drawn = figure_files(alone(view_of(self._run)))
        stems = [Path(file).stem for file in drawn if file.endswith(".svg")]
        names = {stem.replace("-", "_"): stem for stem in stems}
        return {
            name: Figure(name, drawn[f"{stem}.svg"].decode(), drawn.get(f"{stem}.png", b""))
            for name, stem in names.items()
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


def run(
    *,
    out: str | PathLike[str] = "runs",
    canary: bool = True,
    calibrate: bool = True,
    engine_args: Sequence[str] = (),
    progress: Callable[[str | Snapshot], object] | None = None,
    **options: Value,
) -> LoadedRun:
    """Send a load to a server, write the run with its report below `out`, and open it.

    `options` are the flags of `burstline run`: of the server (`engine`, `url`, `model`, `max_num_seqs`, ...),
    of the load (`requests`, `rate`, `prompt_tokens`, ...) and `slo`. `engine_args` go to the engine as they
    are; the API key comes from BURSTLINE_API_KEY. `canary=False` does not measure the client's own error,
    `calibrate=False` not this CPU where it never was.
    `progress` is called with each phase as a text, and some times a second during the load with a `Snapshot`,
    whose `str` is a line: `progress=print` shows both.

    Raises WorkloadError where the options make no sense, EngineError where the server does not start or ends
    early; KeyboardInterrupt where it is interrupted. What was sent until then is kept and reported.
    """
    table = _table("burstline.run", _OF_A_RUN, options, out)
    settings = replace(_settings(table, out, engine_args), canary=canary, calibrate=calibrate)
    ended = carry_out(settings, Progress() if progress is None else Called(progress))
    if ended.code == exit_codes.INTERRUPTED:
        raise KeyboardInterrupt(f"what was sent is kept in {ended.run.path}")
    return load(ended.run.path)


def limit(
    *,
    out: str | PathLike[str] = "runs",
    calibrate: bool = True,
    engine_args: Sequence[str] = (),
    **options: Value,
) -> LimitResult:
    """Search the highest load within the SLOs; every probe is kept as a run below `out`, with a page.

    `options` are the flags of `burstline limit`: of the server, of the load, `slo`, and of the search.
    `found.low` is the load that holds, `found.high` the lowest that is too much. Raises as `run` does.
    """
    table = _table("burstline.limit", (*_OF_A_RUN, LimitOptions), options, out)
    asked = LimitOptions(**table.options(LimitOptions))
    settings = _settings(table, out, engine_args, asked)
    result, _, folder, interrupted = searched(replace(settings, quiet=True, calibrate=calibrate), asked)
    if interrupted:
        raise KeyboardInterrupt(f"what was found is kept in {folder}")
    return result


def gate(
    *contenders: str | PathLike[str] | LoadedRun, out: str | PathLike[str] = "runs", **options: Value
) -> GateResult:
    """Judge whether a candidate is worse than its baseline; write the page and every run below `out`.

    Name the baseline, then the candidate: each a URL, a command such as `run --engine vllm --model DIR`, or,
    of the baseline, a run or a folder of runs. With `history`, a folder of runs, name one candidate, or none
    for its newest run. `options` are the flags of `burstline gate` and those of both runs; progress goes to
    standard error. Raises as `run` does.
    """
    table = _table("burstline.gate", (GateOptions, *_OF_A_RUN), options, out)
    shared = tuple(word for kind in _OF_A_RUN for word in words_of(kind(**table.options(kind))))
    learn_from(shared, os.environ)
    names = [str(each.path if isinstance(each, LoadedRun) else each) for each in contenders]
    return gated(names, shared, GateOptions(**table.options(GateOptions)), Path(out))


for _function, _own in ((run, ()), (limit, (LimitOptions,)), (gate, (GateOptions,))):
    for _row in (row for kind in (*_own, *_OF_A_RUN) for row in options_of(kind).values()):
        _function.__doc__ = f"{_function.__doc__}\n    {_row.name}: {_row.help.replace('%%', '%')}"


def _settings(
    table: TomlTable, out: str | PathLike[str], engine_args: Sequence[str], limit: LimitOptions | None = None
) -> RunSettings:
    """What a run, or a search for the `limit`, is made of."""
    if not isinstance(engine_args, list | tuple) or not all(isinstance(word, str) for word in engine_args):
        raise WorkloadError(
            f"{table.where}: engine_args must be a list of strings, e.g. ['--flag', '4'], not {engine_args!r}"
        )
    goals, hints = Goals(**table.options(Goals)), Hints(**table.options(Hints))
    where = ServerOptions(
        **table.options(ServerOptions),
        settings=Settings(**table.options(Settings)),
        engine_args=Secret.words(*engine_args),
        api_key=own_key(),
    )
    asked = LoadSpec(**table.options(LoadSpec))
    verb = "run" if limit is None else "limit"
    argv = words_of_run(where, Path(out), asked, goals, hints, *filter(None, [limit]), verb=verb)
    learn_from((), os.environ)
    load = checked_load(check_limit(asked, goals, limit) if limit else asked, goals, where)
    return RunSettings(where, load, goals, Path(out), hints=hints, argv=argv)


@dataclass(frozen=True, slots=True)
class Compared:
    """Runs side by side, and whether they may be ranked; text and `document` are those of `compare`."""

    comparable: bool
    document: Mapping[str, Any] = field(repr=False)
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def compare(
    *runs: str | PathLike[str] | LoadedRun, vary: Sequence[str] = (), anyway: bool = False
) -> Compared:
    """Rank runs that did the same work: their folders, or runs that are loaded; WorkloadError below two.

    `vary` names intended differences (`["max-num-seqs"]`); `anyway` takes runs that differ, and says so.
    """
    paths = [run.path if isinstance(run, LoadedRun) else Path(run) for run in runs]
    comparison = compared(paths, Path(), vary, anyway)
    return Compared(comparison.comparable, comparison_json(comparison), written("text", comparison))


@dataclass(frozen=True, slots=True)
class Bound:
    """A prediction for the hardware. Its text is that of `burstline bound`, `document` that of its `--json`.

    Times are seconds unless a key says microseconds (`*_us`).
    """

    document: Mapping[str, Any] = field(repr=False)

    def __str__(self) -> str:
        return str(shown([self.document], self.document["model"]["name"]))

    @property
    def latency_s(self) -> dict[str, float]:
        """Seconds for the whole batch, by what they are computed with: `ceiling`, then each calibration."""
        return dict(self.document["latency_s"])

    @property
    def output_tok_per_s(self) -> dict[str, float]:
        """Output tokens a second of all replicas, likewise."""
        return dict(self.document["output_tok_per_s"])

    @property
    def ops(self) -> pd.DataFrame:
        """One row per phase and operation: shape, flops, bytes, what bounds it, ideal and predicted time."""
        phases: Mapping[str, Any] = self.document["phases"]
        return pd.DataFrame([{"phase": name} | op for name, phase in phases.items() for op in phase["ops"]])


def bound(model: str | PathLike[str], device: str | PathLike[str], **options: Value) -> Bound:
    """What a device could do for a model: which operation bounds prefill and decode, how many requests fit.

    `model` is a bundled name or has a config.json, `device` an id, a driver's name or a device file;
    `options` are the other flags of `burstline bound`: `batch`, `prompt`, `output`, `tp`, `quant`, ...
    Raises RooflineError where one is unknown, or nothing fits.
    """
    table = _table("burstline.bound", (BoundOptions,), options)
    asked = BoundOptions(**table.options(BoundOptions))
    check(asked)
    return Bound(analyse(asked, str(model), str(device)))


def _table(function: str, kinds: Sequence[type], options: Mapping[str, Value], out: object = "") -> TomlTable:
    """The options as a suite's table has them: texts, numbers, switches and lists."""
    if not isinstance(out, str | PathLike):
        raise WorkloadError(f"{function}: out must be a folder, not {type(out).__name__} {out!r}")
    known = {name: row for kind in kinds for name, row in options_of(kind).items()}
    raw: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, str | int | float):
            raw[name] = value
        elif isinstance(value, Sequence):
            raw[name] = list(value) if name in known and known[name].many else as_text(tuple(value))
        elif value is not None:
            raw[name] = as_text(value)
    table = TomlTable(raw, function)
    table.only(*known)
    return table
