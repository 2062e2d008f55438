"""`burstline compare`: rank runs that did the same work."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from burstline import exit_codes
from burstline.stdout import json_text
from reports.compare.sweep_load import SweepLoad, differ_in_load_alone, load_of

if TYPE_CHECKING:
    from loadgen.record.manifest import Manifest
    from loadgen.record.rundir import Run
    from loadgen.verdict.verdict import Reason
    from reports.compare.comparison import Comparison

CHECKED: Final = {
    "workload": "workload",
    "seed": "seed",
    "model": "model",
    "devices": "devices",
    "cpu": "CPU",
    "cores": "cores",
}
"""What must be equal of runs that are compared, and how it is called."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="what `burstline run` wrote")
    parser.add_argument(
        "--anyway", action="store_true", help="compare though workload, model or machine differ, and say so"
    )
    parser.add_argument(
        "--format", choices=("text", "markdown", "html", "json"), default="text", help="html: the page"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write it there instead of printing it")


def run(args: argparse.Namespace) -> int:
    from loadgen.record.arrow import keep_pandas_out
    from loadgen.record.rundir import open_run
    from workloads.request import WorkloadError

    keep_pandas_out()
    runs = [open_run(path) for path in args.runs]
    if len(runs) < 2:
        raise WorkloadError("one run cannot be compared: name two or more")
    unlike = differences(runs)
    if unlike and not args.anyway:
        told = "; ".join(reason.text.rstrip(".") for reason in unlike)
        raise WorkloadError(
            f"these runs were not made alike: {told}. Compare like with like, or add --anyway to see what "
            "differs, and in a page (--format html) their numbers side by side, without a ranking"
        )
    comparison = comparison_of(runs, unlike, (args.out or Path()).parent)
    shown = _as(args.format, comparison)
    if args.out is None:
        print(shown)
    else:
        args.out.write_text(shown, "utf-8")
        print(f"Written: {args.out}")
    return exit_codes.DONE if comparison.comparable else exit_codes.INCONCLUSIVE


def comparison_of(runs: Sequence[Run], unlike: Sequence[Reason], beside: Path) -> Comparison:
    """Any runs, the same engine with the same command line being repeats of one contender.

    Runs of one workload at several loads are a sweep, with a cell for each load.
    """
    from reports.compare.comparison import Comparison, Member, cell_of

    manifests = [run.manifest for run in runs]
    swept = differ_in_load_alone(manifests)
    labels = labels_of(manifests, swept=swept)
    groups: dict[SweepLoad | None, list[Member]] = {}
    for label, run in zip(labels, runs, strict=True):
        href = os.path.relpath(run.path / "report.html", beside)
        groups.setdefault(load_of(run.manifest) if swept else None, []).append(Member(label, run, href))
    loads = sorted(load for load in groups if load is not None)
    what = " and ".join(dict.fromkeys(m.title or m.workload for m in manifests))
    told = f"{len(loads)} loads from {loads[0].number} to {loads[-1]}" if swept else what
    cells = tuple(cell_of(str(load or ""), groups[load], unlike) for load in (loads if swept else [None]))
    title = f"{' against '.join(dict.fromkeys(labels))}: {told}"
    return Comparison(title, cells, (f"{len(runs)} runs",))


def comparison_of_suite(folder: Path) -> Comparison | None:
    """Every finished run of a suite's folder, one cell for each model and workload; None without any."""
    import orjson

    from burstline.suites.execution import MANIFEST, finished_in
    from reports.compare.comparison import Comparison, Member, cell_of

    suite = orjson.loads((folder / MANIFEST).read_bytes())
    members: dict[str, list[Member]] = {}
    missing = []
    for slot in suite["slots"]:
        run = finished_in(folder / slot["id"])
        if run is None:
            missing.append(f"{slot['engine']}, {slot['cell']}, repeat {slot['repeat']}")
            continue
        href = f"{slot['id']}/{run.name}/report.html"
        members.setdefault(slot["cell"], []).append(Member(slot["engine"], run, href, slot["repeat"]))
    if not members:
        return None
    order = list(dict.fromkeys(slot["engine"] for slot in suite["slots"]))
    cells = tuple(
        cell_of(name, sorted(runs, key=lambda m: order.index(m.label))) for name, runs in members.items()
    )
    facts = (
        suite["description"],
        f"{len(suite['slots']) - len(missing)} of {len(suite['slots'])} runs",
        "interleaved in time, each engine started anew for each run",
    )
    return Comparison(suite["name"], cells, tuple(filter(None, facts)), tuple(missing))


def write_all(comparison: Comparison, folder: Path) -> Path:
    """Page, Markdown and JSON of a comparison; where the page is."""
    for name, shape in (("report.html", "html"), ("report.md", "markdown"), ("comparison.json", "json")):
        (folder / name).write_text(_as(shape, comparison), "utf-8")
    return folder / "report.html"


def _as(shape: str, comparison: Comparison) -> str:
    from reports.compare.digest import digest
    from reports.compare.page import render, to_json
    from reports.formats.markdown import markdown
    from reports.formats.text import text

    if shape == "json":
        return f"{json_text(to_json(comparison))}\n"
    if shape == "html":
        return render(comparison)
    return {"markdown": markdown, "text": text}[shape](digest(comparison))


def differences(runs: Sequence[Run]) -> list[Reason]:
    """In which of the checked metadata the runs differ."""
    from loadgen.verdict.verdict import Reason

    found = [checked_metadata(run.manifest) for run in runs]
    swept = differ_in_load_alone([run.manifest for run in runs])
    reasons = []
    for key, name in CHECKED.items():
        if key == "workload" and swept:
            continue
        values = {run.name: facts[key] for run, facts in zip(runs, found, strict=True)}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{value} in {run}" for run, value in values.items())
            reasons.append(Reason(key, f"The {name} differs: {told}.", "Make the runs alike in this."))
    return reasons


def checked_metadata(manifest: Manifest) -> dict[str, str]:
    """What the manifest says of everything in CHECKED."""
    devices = Counter(device.name for device in manifest.devices)
    return {
        "workload": manifest.title or manifest.workload,
        "seed": str(manifest.seed),
        "model": manifest.server.model_name if manifest.server else "unnamed",
        "devices": ", ".join(f"{n} x {name}" for name, n in devices.items()) or "none",
        "cpu": str(manifest.host.cpu),
        "cores": str(manifest.host.cores_allowed or manifest.host.cores),
    }


def labels_of(manifests: Sequence[Manifest], *, swept: bool = False) -> list[str]:
    """A name for each run's contender: its engine, with a letter only where that is needed.

    What must be equal makes another contender where it is not, for no run repeats one of other work or on
    another machine. Where loads are `swept`, neither the load does nor what adapters fit to it.
    """
    engines = [manifest.engine for manifest in manifests]
    kinds = [
        (engine, *_what(manifest, swept), *_how(manifest, swept=swept))
        for engine, manifest in zip(engines, manifests, strict=True)
    ]
    labels = []
    for engine, kind in zip(engines, kinds, strict=True):
        others = list(dict.fromkeys(other for other in kinds if other[0] == engine))
        labels.append(engine if len(others) == 1 else f"{engine} {chr(ord('A') + others.index(kind))}")
    return labels


def _what(manifest: Manifest, swept: bool) -> tuple[str, ...]:
    """What was done, and where."""
    return tuple(
        value for key, value in checked_metadata(manifest).items() if not (swept and key == "workload")
    )


def _how(manifest: Manifest, *, swept: bool) -> tuple[str, ...]:
    """Version and command line without the flags that differ from start to start, or with a swept load."""
    from servers.registry import ENGINES

    engine = ENGINES.get(manifest.engine)
    passing: frozenset[str] = frozenset()
    if engine is not None:
        passing = engine.start_flags | engine.load_flags if swept else engine.start_flags
    server = manifest.server
    argv = () if server is None else server.argv or (str(server.url),)
    kept = [
        word
        for before, word in zip(["", *argv], argv, strict=False)
        if before not in passing and word.split("=")[0] not in passing
    ]
    return (str(manifest.identity.version if manifest.identity else None), *kept)
