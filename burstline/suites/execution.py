"""Run a suite: each run is one command, finished runs are skipped, one report covers all."""

import fcntl
import math
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from burstline.bench.conclusion import of_summary
from burstline.bench.limit import CODES
from burstline.bench.repeats import code_of_loads, code_of_runs
from burstline.bench.run import check as check_run
from burstline.bench.run_settings import Settings as RunSettings
from burstline.bench.server_session import check_requests, check_start, check_where, choose_engine
from burstline.cluster.placement import ray_session
from burstline.console import exit_codes
from burstline.console.server_options import API_KEY_VARIABLE
from burstline.console.terminal import show
from burstline.dtypes import FLOATS
from burstline.errors import RooflineError
from burstline.loadgen.capture.files import write_json
from burstline.measure.metrics.slo import cannot_be_met
from burstline.measure.record.run_writer import json_of
from burstline.measure.record.rundir import Run, open_run, originals
from burstline.reports.formats.text import text
from burstline.reports.model.comparison import Comparison, Member, case_of, view_of
from burstline.reports.model.contenders import differing_factors, settled_in
from burstline.reports.model.sweeps import sweeps_in
from burstline.reports.page.digest import digest, run_banner
from burstline.reports.page.files import write_all
from burstline.reports.page.limit_page import RESULT, LimitResult, answer_of, limits_blocks, limits_page
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.capacity import room
from burstline.roofline.predict.predict import Deployment
from burstline.servers.host import child
from burstline.servers.host.interrupt import terminable
from burstline.servers.messages import EngineError
from burstline.servers.redact import Secret, redacted, without_secrets
from burstline.servers.settings import Settings
from burstline.suites.platforms import run_by_platform
from burstline.suites.suite import (
    SCHEMA,
    Contender,
    Slot,
    Suite,
    load_suite,
    make_where_missing,
    schedule,
    suite_file,
)
from burstline.wording import counted
from burstline.workloads.load import Load
from burstline.workloads.options import words_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import LimitOptions

SUITE_JSON: Final = "suite.json"
OUT: Final = "{out}"
"""Stands in a command for the folder of its runs, which a node puts elsewhere."""


Call = Callable[[Sequence[str], Slot], int]
"""Runs `burstline ARGV` for a slot, here or on a node; gives its exit code."""


def run_suite(
    path: Path,
    out: Path,
    *,
    dry_run: bool = False,
    ray: str | None = None,
    platform: str | None = None,
    quiet: bool = False,
) -> int:
    """Run what of the suite is not done yet, then write the report over all of it; the exit code.

    The suite's folder is `out/<name>-<first 8 of its hash>`: another word in the file is another suite.
    `ray` is the address of a cluster: then each run goes to a node of its platform. `platform` leaves out
    the runs of all others; without `ray` this machine is that platform. `quiet`: the runs show no progress.
    """
    path = suite_file(path)
    suite = load_suite(path)
    for engine in suite.engines:
        check_requests(engine.server)
    all_slots = schedule(suite)
    slots = _chosen(suite, all_slots, path, platform)
    if suite.platforms and ray is None and platform is None and not dry_run:
        names = [one.name for one in suite.platforms]
        raise WorkloadError(
            f"{path} has the platforms {', '.join(names)}: add --ray to run on a cluster's nodes, or "
            f"--platform {names[0]} if this machine is one of them"
        )
    folder = out / f"{suite.name}-{suite.sha256[:8]}"
    if dry_run:
        lacking = [] if suite.platforms else [f"cannot run here: {each}" for each in lacks(slots)]
        lines = (*fits(slots), *lacking, *_made_and_sent(slots))
        print("".join(f"# {line}\n" for line in lines), end="")
        words = (without_secrets(["burstline", *slot.argv(folder / slot.id)]) for slot in slots)
        print("\n".join(map(shlex.join, words)))
        return exit_codes.DONE
    environments = {engine.name: _environment(engine) for engine in suite.engines}
    if ray is None:
        if lacking := lacks([slot for slot in slots if _done(slot, folder) is None]):
            raise WorkloadError("\n  ".join((f"{path} was not begun:", *lacking)))
        for model in suite.models:
            make_where_missing(model)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as lock, terminable():
        _keep(suite, all_slots, path, folder)
        try:
            codes = _carry_out_all(slots, folder, environments, lock, ray, quiet=quiet)
        except KeyboardInterrupt:
            codes = [exit_codes.INTERRUPTED]
        runs = [slot for slot in slots if slot.workload.limit is None]  # a search keeps many of its own
        limits = [slot for slot in slots if slot not in runs]
        comparison = comparison_of_suite(folder)
        comparable = _report(comparison, folder) if runs or not limits else True
        found = report_limits(limits, folder, suite.description or suite.name)
    return exit_codes.worst(
        [
            *(code for code in codes if code in (exit_codes.INTERRUPTED, exit_codes.ENGINE_FAILED)),
            *_codes_of_targets(runs, folder, comparison),
            *found,
            exit_codes.DONE if comparable else exit_codes.INCONCLUSIVE,
        ]
    )


def _chosen(suite: Suite, slots: Sequence[Slot], path: Path, platform: str | None) -> list[Slot]:
    names = [one.name for one in suite.platforms]
    if platform is not None and platform not in names:
        known = f"it has {', '.join(names)}" if names else "it has no [[platform]]"
        raise WorkloadError(f"--platform {platform}: not a platform of {path}; {known}")
    return [s for s in slots if platform is None or (s.platform and s.platform.name == platform)]


def _done(slot: Slot, folder: Path) -> Run | tuple[str, LimitResult] | None:
    return (finished_in if slot.workload.limit is None else limit_in)(folder / slot.id)


def lacks(slots: Sequence[Slot]) -> list[str]:
    """What contenders need and do not have here: engine, packages, weights, port, GPUs; once each."""
    told = set[str]()
    for slot in {(slot.engine.name, slot.model.name, slot.workload.name): slot for slot in slots}.values():
        where = slot.engine.at(slot.model, slot.platform)
        try:
            if slot.model.like is not None:  # what is missing will be made
                check_start(choose_engine(where), replace(where, model=None), 0)
            else:
                check_where(where)
                check_run(RunSettings(where, slot.workload.load, slot.workload.goals))
        except (WorkloadError, EngineError) as error:
            told.add(f"{slot.engine.name}: {error}")
    return sorted(told)


def _made_and_sent(slots: Sequence[Slot]) -> Iterator[str]:
    """Models that are made first, each load with what it leaves to the defaults, and how long it lasts."""
    for model in {slot.model.path: slot.model for slot in slots if slot.model.like is not None}.values():
        if not (Path(model.path or "") / "config.json").exists():
            weights = f"random weights ({', '.join(model.formats)})" if model.formats else "no weights"
            yield f"{model.path} is made first: the shape of {model.like}, {weights}"
    for load in {slot.workload.name: slot.workload for slot in slots}.values():
        slos = f", SLOs {', '.join(load.goals.slo)}" if load.goals.slo else ""
        search = f"highest load in {load.limit.budget_s:g} s; the first: " if load.limit else ""
        yield f"{load.name}: {search}{load.load.title}{slos}"
        yield from () if load.limit else cannot_be_met(load.goals.slo, load.load)
    yield _time_of([(slot.workload.limit, slot.workload.load) for slot in slots])


def _time_of(loads: Sequence[tuple[LimitOptions | None, Load]]) -> str:
    """How many runs there are, and how long their loads last as far as that is known before."""
    timed_s = [load.spec.duration_s or load.arrivals.n / (load.spec.rate or math.inf) for _, load in loads]
    lasts_s = [limit.budget_s if limit else s for (limit, _), s in zip(loads, timed_s, strict=True)]
    rest = f"; the load of {lasts_s.count(0)} lasts until all replies are there" if 0 in lasts_s else ""
    known = f"{sum(lasts_s) / 60:.1f} min of load, and the" if any(lasts_s) else "the"
    return f"{counted(len(lasts_s), 'run')}: {known} starts{rest}"


def show_plan(every: Sequence[RunSettings], n: int) -> int:
    """Check runs of these settings, n of each; print what they send, for how long, and their commands."""
    for each in every:
        check_run(each, lambda note: print(f"# {note}"))
        print(f"# {each.load.title}")
    print(f"# {_time_of([(None, each.load) for each in every] * n)}")
    print("\n".join(each.again() for each in every))
    return exit_codes.DONE


def _carry_out_all(
    slots: Sequence[Slot],
    folder: Path,
    environments: Mapping[str, dict[str, str]],
    lock: int,
    ray: str | None,
    *,
    quiet: bool,
) -> list[int]:
    """The exit codes of the runs, one after another here, or on a cluster's nodes."""
    carry_out = partial(_carry_out, n_slots=len(slots), folder=folder, quiet=quiet)
    if ray is None:

        def here(argv: Sequence[str], slot: Slot) -> int:
            words = [word.replace(OUT, str(folder / slot.id)) for word in argv]
            own = {k: v.reveal() for k, v in slot.platform.env.items()} if slot.platform else {}
            return called(words, environments[slot.engine.name] | own, lock)

        return [carry_out(slot, here) for slot in slots]
    keys = {name: {k: env[k] for k in (API_KEY_VARIABLE,) if k in env} for name, env in environments.items()}
    with ray_session(ray) as session:
        return run_by_platform(session, slots, folder, keys, carry_out)


def finished_in(folder: Path) -> Run | None:
    """The run in a slot's folder that came to its end, None where there is none yet."""
    return next(all_finished_in(folder), None)


def all_finished_in(folder: Path) -> Iterator[Run]:
    """Every run in the folder, at any depth, that came to its end; the folder may be one itself."""
    runs = (open_run(manifest.parent) for manifest in sorted(folder.glob("**/manifest.json")))
    return (run for run in runs if run.status == "complete" and run.summary is not None)


def _environment(engine: Contender) -> dict[str, str]:
    """Ours, with this engine's key, and no other, under the name that a run reads."""
    environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    if engine.api_key_env is None:
        return environment
    if not (key := os.environ.get(engine.api_key_env)):
        raise WorkloadError(
            f"engine {engine.name!r} needs its key in the environment variable {engine.api_key_env}, "
            f"which is not set; try: export {engine.api_key_env}=..."
        )
    return environment | {API_KEY_VARIABLE: Secret(key).reveal()}


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Lock the folder. Runs inherit the lock, so one whose parent was killed still holds it."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkloadError(f"{folder} is in use: this suite is running already; wait for it") from None
        yield lock.fileno()


def _keep(suite: Suite, slots: Sequence[Slot], path: Path, folder: Path) -> None:
    """The runs in order, and the suite file without its secrets."""
    text = path.read_text("utf-8")
    words = [word for engine in suite.engines for word in words_of(engine.server)]
    for word, shown in zip(words, without_secrets(words), strict=True):
        text = text.replace(word, shown)
    (folder / "suite.toml").write_text(redacted(text), "utf-8")
    rows = [
        {"id": s.id, "engine": s.engine.name, "model": s.model.name, "workload": s.workload.name}
        | {"repeat": s.repeat, "cell": s.cell}
        for s in slots
        if s.workload.limit is None
    ]
    facts = {"schema": SCHEMA, "name": suite.name, "description": suite.description, "sha256": suite.sha256}
    write_json(folder / SUITE_JSON, {**facts, "repeats": suite.repeats, "slots": rows})


def _carry_out(slot: Slot, call: Call, n_slots: int, folder: Path, *, quiet: bool) -> int:
    """Run one slot unless it is done; the run's exit code, that of a failed engine if it came to no end."""
    title = ", ".join(word for word in (slot.engine.name, slot.cell) if word)
    slot_name = f"[{slot.place} of {n_slots}] {title}, repeat {slot.repeat}"
    if _done(slot, folder) is not None:
        print(f"{slot_name}: done before", file=sys.stderr)
        return exit_codes.DONE
    print(slot_name, file=sys.stderr)
    verb, *flags = slot.argv(Path(OUT))
    argv = (verb, *(["--quiet"] if quiet else []), *flags)
    code = call(argv, slot)
    if code == exit_codes.INTERRUPTED:
        raise KeyboardInterrupt
    if code in (exit_codes.USAGE, exit_codes.OUR_BUG):
        raise WorkloadError(f"{slot_name} could not be run (see above): the suite stops, its runs are kept")
    done = _done(slot, folder)
    how = f"failed with exit code {code}"
    if isinstance(done, Run):
        how = text([replace(run_banner(view_of(done).summary), reasons=())])
    elif done is not None:
        how = text([answer_of(done[1])])
    print(textwrap.indent(how, "    "), file=sys.stderr)
    return code if done else exit_codes.ENGINE_FAILED


def called(argv: Sequence[str], environment: dict[str, str], *inherited: int) -> int:
    """The exit code of `burstline ARGV`, in a session of its own: a Ctrl-C reaches it once, through us.

    `inherited` are file descriptors that it keeps open.
    """
    with subprocess.Popen(
        [*child.command("burstline"), *argv],
        stdout=subprocess.DEVNULL,
        env=environment | {"PYTHONPATH": child.import_path()},
        pass_fds=inherited,
        start_new_session=True,
    ) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)


def _report(comparison: Comparison, folder: Path) -> bool:
    """Write the report over whatever is finished; whether all is there, and comparable if it is several."""
    page = write_all(comparison, folder)
    show(digest(comparison))
    print(f"Report: {page}")
    alone = all(case.is_alone for case in comparison.cases)
    return comparison.comparable or (alone and not comparison.missing)


def comparison_of_suite(folder: Path) -> Comparison:
    """Each finished run of a suite's folder once, one case for each model and workload."""
    suite = json_of(folder / SUITE_JSON)
    members: dict[str, list[Member]] = {}
    missing = []
    found = {slot["id"]: finished_in(folder / slot["id"]) for slot in suite["slots"]}
    copies = [copy for copy, _ in originals(filter(None, found.values()))[1]]
    for slot in suite["slots"]:
        run = found[slot["id"]]
        if run is None or run in copies:
            missing.append(f"{slot['engine']}, {slot['cell']}, repeat {slot['repeat']}")
            continue
        href = f"{slot['id']}/{run.name}/report.html"
        members.setdefault(slot["cell"], []).append(Member(slot["engine"], run, href, slot["repeat"]))
    order = list(dict.fromkeys(slot["engine"] for slot in suite["slots"]))
    cases = tuple(
        case_of(
            name,
            sorted(runs, key=lambda m: order.index(m.label)),
            varied=settled_in(differing_factors([member.run for member in runs]), ()),
        )
        for name, runs in members.items()
    )
    loads = {
        name: " and ".join(dict.fromkeys(member.run.manifest.title or "" for member in runs))
        for name, runs in members.items()
    }
    # The page names the model once.
    models = {name.rpartition(", ")[0] for name in loads}
    short = {name: name.rpartition(", ")[2] if len(models) == 1 else name for name in loads}
    asked = [f"{short[name]}: {load}" for name, load in loads.items()] if len(set(loads.values())) > 1 else []
    servers = [member.run.manifest.server for runs in members.values() for member in runs]
    anew = all(server is not None and not server.attached for server in servers)
    facts = (
        *(asked or [*loads.values()][:1]),
        f"{len(suite['slots']) - len(missing)} of {len(suite['slots'])} runs",
        f"interleaved in time{', each engine restarted for each run' if anew else ''}",
    )
    return Comparison(
        suite["description"] or suite["name"], cases, tuple(filter(None, facts)), tuple(missing)
    )


def limit_in(folder: Path) -> tuple[str, LimitResult] | None:
    """The place of a finished search's page in the suite's folder, and what it found."""
    for path in folder.glob(f"*/{RESULT}"):
        return f"{folder.name}/{path.parent.name}/report.html", LimitResult.from_json(json_of(path))
    return None


def report_limits(slots: Sequence[Slot], folder: Path, title: str) -> list[int]:
    """Print what the searches found and write the page over all; the exit code of each."""
    if not slots:
        return []
    found = [(f"{slot.engine.name}, {slot.cell}", limit_in(folder / slot.id)) for slot in slots]
    searches = [(name, *one) for name, one in found if one is not None]
    page = folder / "limits.html"
    page.write_text(limits_page(title, searches, [name for name, one in found if one is None]), "utf-8")
    show(limits_blocks(searches))
    print(f"Limits: {page}")
    return [CODES[one[1].state] if one else exit_codes.INCONCLUSIVE for _, one in found]


def _codes_of_targets(slots: Sequence[Slot], folder: Path, shown: Comparison) -> Iterator[int]:
    """For each engine at each workload, whether all repeats kept its SLOs; a sweep at one load at least.

    A sweep is driven until its targets are missed: that alone is no failure.
    """
    found: dict[tuple[str, ...], dict[str, list[tuple[Run, int]]]] = {}
    for slot in slots:
        run = finished_in(folder / slot.id)
        if run is not None and run.summary is not None and run.summary.targets:
            platform = slot.platform.name if slot.platform else ""
            key = (slot.engine.name, slot.model.name, slot.workload.of, platform)
            found.setdefault(key, {}).setdefault(slot.cell, []).append((run, of_summary(run.summary)))
    sweeps = sweeps_in(shown.cases)
    for (engine, *_), loads in found.items():
        codes = {cell: code_of_runs(*zip(*own, strict=True)) for cell, own in loads.items()}
        having = [(sweep, [case.name for case in cases if engine in case.labels]) for sweep, cases in sweeps]
        points = [pair for one, cells in having for pair in zip(cells, one.of(engine), strict=True)]
        own = [(codes[cell], at) for cell, at in points if cell in codes]
        yield code_of_loads(own) if own else exit_codes.best(codes.values())


def fits(slots: Sequence[Slot]) -> Iterator[str]:
    """A line for each load of each model on each platform whose device is stated."""
    seen = set()
    for slot in slots:
        if slot.platform is None or slot.platform.device is None or slot.engine.server.url is not None:
            continue
        settings = slot.engine.at(slot.model, slot.platform).settings
        parallel = Parallel(tp=settings.tensor_parallel_size or 1, pp=settings.pipeline_parallel_size or 1)
        if (slot.cell, parallel) not in seen:
            seen.add((slot.cell, parallel))
            n = parallel.tp * parallel.pp
            yield f"{slot.cell}, {counted(n, 'GPU')}: {_fit(slot, settings, parallel)}"


def _fit(slot: Slot, settings: Settings, parallel: Parallel) -> str:
    n_tok = slot.workload.load.longest_tok
    assert slot.platform is not None
    assert slot.platform.device is not None
    try:
        model, quant = load_model(slot.model.like or slot.model.path or "")
        quant = QUANTS[FLOATS[settings.dtype]] if settings.dtype in FLOATS else quant
        on = Deployment(model, quant, parallel, load_device(slot.platform.device))
        kv = room(on, utilisation=settings.gpu_memory_utilization or 0.9)
    except RooflineError as error:
        return f"does not fit: {error}"
    weights = f"{kv.weight_bytes / 1e9:.1f} GB of weights a GPU"
    if n_tok is None:
        return f"fits, {weights}"
    fit = {"yes": "fits", "no": "does not fit"}.get(kv.fits(1, n_tok), "fits or not, within the band")
    return f"{fit}, {weights}, room for {counted(kv.largest_batch(n_tok), 'request')} of {n_tok:,} tokens"
