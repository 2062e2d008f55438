"""From runs to the comparison of them: what they differ in, and who the contenders are."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from burstline.measure.record.manifest import Manifest
from burstline.measure.record.rundir import Run
from burstline.measure.record.verdict import Reason
from burstline.measure.stats.figure import Absent
from burstline.measure.verdict.comparable import NOT_STATED
from burstline.measure.verdict.factors import GATED, canonical, differing, factors, how_alike, loads_differ
from burstline.reports.model.comparison import Comparison, Member, case_of
from burstline.reports.model.sweep_load import SweepLoad, differ_in_load_alone, load_of, load_range
from burstline.servers.registry import ENGINES
from burstline.workloads.request import WorkloadError

CHECKED: Final = {
    "workload": "workload", "model": "model", "devices": "devices", "cpu": "CPU", "cores": "cores"
}  # fmt: skip
"""What must be equal of runs that are compared, and how it is called."""
CHOSEN: Final = frozenset({"model", "devices"})
"""Those of them by which people choose: where one alone differs, it is what is compared."""
NO_FLAG: Final = frozenset({
    "placement", "image", "version", "governor", "smt", "numa-nodes", "server-addresses", "prompts",
    "warm-up",
})  # fmt: skip
"""Factors that no flag of the engine sets."""


def differing_factors(runs: Sequence[Run], *, as_sweep: bool = True) -> dict[str, list[str]]:
    """In which factors the runs differ, but for the load where they may be seen as a sweep."""
    swept = as_sweep and differ_in_load_alone([run.manifest for run in runs])
    fitted = ("workload", *GATED) if swept else ()  # adapters fit limits to the load
    rows = [{k: value for k, value in factors(run.manifest).items() if k not in fitted} for run in runs]
    most = [run.summary.concurrency.max for run in runs if run.summary is not None]
    known = [figure.point for figure in most if not isinstance(figure, Absent)]
    return differing(rows, max(known) if len(known) == len(runs) else None)


def _varied(asked: Sequence[str], found: Mapping[str, list[str]]) -> tuple[str, ...]:
    """The factors that are compared: the engine, those asked for, else the one that differs."""
    names = tuple(map(canonical, asked))
    for name in names:
        if name not in found:
            known = ", ".join(found) or "nothing"
            raise WorkloadError(f"--vary {name}: these runs do not differ in it; they differ in {known}")
    if "engine" in found:
        return tuple(dict.fromkeys(("engine", *names)))
    own = tuple(name for name in found if name not in CHECKED or name in CHOSEN)
    return names or (own if len(own) == 1 == len(found) else ())


def settled_in(found: Collection[str], varied: Collection[str]) -> set[str]:
    """The settings that may differ between runs that differ in `found`: those `varied`, and those of one
    engine, where what was not varied is a reason of its own (`_unlike`)."""
    several = "engine" in found
    settled = {GATED[name] for name in found if name in GATED and (name in varied or not several)}
    settled |= {"workload"} & {*varied} if not several else set()
    return settled if "max-num-seqs" in found else {*settled, GATED["max-num-seqs"]}


def _unlike(name: str, values: Sequence[str], runs: Sequence[Run]) -> Reason:
    """A factor that must not differ, with the command that would make the last run like the first."""
    told = ", ".join(f"{value} in {run.name}" for value, run in zip(values, runs, strict=True))
    odd = next(run for run, value in zip(runs, values, strict=True) if value != values[0])
    title, has_flag = CHECKED.get(name, name), name not in CHECKED and name not in NO_FLAG
    what = f"The {title} differs: {told}"
    if name == "workload" and len({run.manifest.engine for run in runs}) > 1:
        return Reason.of(name, what=what)
    how = how_alike(name, values[0], runs[0].manifest, odd.manifest) if has_flag else ""
    do = f"Restart {odd.manifest.engine} {how}" if how else f"Give the runs the same {title}"
    return Reason(name, f"{what}.", f"{do}, or add --vary {name}.")


def comparison_of(
    runs: Sequence[Run], beside: Path, *, varied: Sequence[str] = (), anyway: bool = False
) -> Comparison:
    """Any runs, the same engine with the same command line being repeats of one contender.

    `varied` are the factors that were asked for; what else differs is a reason to rank nothing.

    Runs of one workload at several loads are a sweep, with a case for each load, unless the load is `varied`.
    """
    manifests = [run.manifest for run in runs]
    as_sweep = "workload" not in map(canonical, varied)
    swept, found = as_sweep and differ_in_load_alone(manifests), differing_factors(runs, as_sweep=as_sweep)
    varied = _varied(varied, found)
    several = "engine" in found
    unlike = [
        _unlike(name, values, runs)
        for name, values in found.items()
        if name not in varied and not (several and name in GATED)
    ]
    settled = settled_in(found, varied)
    unlike += [loads_differ(runs)] if "workload" in settled else []
    setting = setting_of(manifests, varied)
    labels = labels_of(manifests, swept=swept, varied=varied)
    groups: dict[SweepLoad | None, list[Member]] = {}
    for label, run in zip(labels, runs, strict=True):
        href = os.path.relpath(run.path / "report.html", beside)
        groups.setdefault(load_of(run.manifest) if swept else None, []).append(Member(label, run, href))
    loads = sorted(load for load in groups if load is not None)
    what = " and ".join(dict.fromkeys(m.title or m.workload for m in manifests))
    told = f"{len(loads)} loads from {load_range(loads[0], loads[-1])}" if swept else what
    cases = tuple(
        case_of(str(load or ""), groups[load], unlike, varied=settled, anyway=anyway)
        for load in (loads if swept else [None])
    )
    names = f"{setting} {' vs '.join(dict.fromkeys(labels))}".lstrip()
    also = f"varied: {', '.join(varied)}" if varied and varied != ("engine",) and not setting else ""
    return Comparison(f"{names}: {told}", cases, tuple(filter(None, (f"{len(runs)} runs", also))))


def setting_of(manifests: Sequence[Manifest], varied: Sequence[str]) -> str:
    """`vllm max-num-seqs` where runs of one engine vary in one factor, "" elsewhere."""
    engines = {manifest.engine for manifest in manifests}
    return f"{engines.pop()} {varied[0]}" if len(engines) == len(varied) == 1 else ""


def labels_of(manifests: Sequence[Manifest], *, swept: bool = False, varied: Sequence[str] = ()) -> list[str]:
    """A name for each run's contender: its engine, with a letter only where that is needed.

    Where one engine varies in one factor the name is its value: the title says what it is of.

    What must be equal makes another contender where it is not, for no run repeats one of other work or on
    another machine. Where loads are `swept`, neither the load does nor what adapters fit to it.
    """
    if setting_of(manifests, varied):
        values = [factors(manifest).get(varied[0], NOT_STATED) for manifest in manifests]
        return _loads(manifests, values) if varied[0] == "workload" else values
    engines = [manifest.engine for manifest in manifests]
    checked = [name for name in CHECKED if not (swept and name == "workload")]
    kinds = [
        (manifest.engine, *map(factors(manifest).get, checked), *_how(manifest, swept=swept))
        for manifest in manifests
    ]
    labels = []
    for engine, kind in zip(engines, kinds, strict=True):
        others = list(dict.fromkeys(other for other in kinds if other[0] == engine))
        labels.append(engine if len(others) == 1 else f"{engine} {chr(ord('A') + others.index(kind))}")
    return labels


def _loads(manifests: Sequence[Manifest], titles: Sequence[str]) -> list[str]:
    """`2 req/s`, `concurrency 4`, `burst`; where that is no name of one load alone, `load A`."""
    names = [str(load_of(manifest) or manifest.asked.kind) for manifest in manifests]
    counts = [re.sub(r"([\d,]+) (\w+)s\b.*|.*", r"\1-\2 load", title, count=1) for title in titles]
    for short in (names, counts):  # `60-request load`
        if len({*zip(short, titles, strict=True)}) == len({*short}):
            return short
    return [f"load {chr(ord('A') + list(dict.fromkeys(titles)).index(title))}" for title in titles]


def _how(manifest: Manifest, *, swept: bool) -> tuple[str, ...]:
    """Version and command line without the flags that differ from start to start, or with a swept load."""
    engine = ENGINES.get(manifest.engine)
    passing: frozenset[str] = frozenset()
    if engine is not None:
        passing = engine.start_flags | engine.load_flags if swept else engine.start_flags
    server = manifest.server
    argv = () if server is None else server.command or (str(server.url),)
    kept = [
        word
        for before, word in zip(["", *argv], argv, strict=False)
        if before not in passing and word.split("=")[0] not in passing
    ]
    return (str(manifest.identity.version if manifest.identity else None), *kept)
