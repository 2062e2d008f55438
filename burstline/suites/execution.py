"""Run a suite: each run is one command, finished runs are skipped, one report covers all."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import orjson

from burstline import exit_codes
from burstline.bench.report import of_summary
from burstline.bench.server_session import check_model, check_requests
from burstline.cluster.placement import ray_session
from burstline.loadgen.record.files import write_json
from burstline.loadgen.record.rundir import Run, open_run
from burstline.reports.formats.text import text
from burstline.reports.model.comparison import Comparison, Member, case_of, view_of
from burstline.reports.page.digest import digest, verdict_line
from burstline.reports.page.files import write_all
from burstline.server_options import API_KEY_VARIABLE
from burstline.servers.host import child
from burstline.servers.host.interrupt import terminable
from burstline.servers.redact import redacted
from burstline.suites.memory_fit import fits
from burstline.suites.platforms import run_by_platform
from burstline.suites.suite import SCHEMA, Contender, Slot, Suite, load_suite, make_where_missing, schedule
from burstline.terminal import show
from burstline.workloads.request import WorkloadError

MANIFEST: Final = "suite.json"
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
) -> int:
    """Run what of the suite is not done yet, then write the report over all of it; the exit code.

    The suite's folder is `out/<name>-<first 8 of its hash>`: another word in the file is another suite.
    `ray` is the address of a cluster: then each run goes to a node of its platform. `platform` leaves out
    the runs of all others; without `ray` this machine is that platform.
    """
    suite = load_suite(path)
    for engine in suite.engines:
        check_requests(engine.server)
    names = [one.name for one in suite.platforms]
    if platform is not None and platform not in names:
        known = f"it has {', '.join(names)}" if names else "it has no [[platform]]"
        raise WorkloadError(f"--platform {platform}: not a platform of {path}; {known}")
    if names and ray is None and platform is None and not dry_run:
        raise WorkloadError(
            f"{path} has the platforms {', '.join(names)}: add --ray to run on a cluster's nodes, or "
            f"--platform {names[0]} if this machine is one of them"
        )
    folder = out / suite.folder_name
    all_slots = schedule(suite)
    slots = [s for s in all_slots if platform is None or (s.platform and s.platform.name == platform)]
    if dry_run:
        print("".join(f"# {line}\n" for line in fits(slots)), end="")
        print("\n".join(shlex.join(["burstline", *slot.argv(folder / slot.id)]) for slot in slots))
        return exit_codes.DONE
    environments = {engine.name: _environment(engine) for engine in suite.engines}
    if ray is None:
        for model in suite.models:
            if model.path and model.like is None and all(e.server.url is None for e in suite.engines):
                check_model(model.path)
        for model in suite.models:
            make_where_missing(model)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as lock, terminable():
        _keep(suite, all_slots, path, folder)
        try:
            if ray is None:

                def here(argv: Sequence[str], slot: Slot) -> int:
                    words = [word.replace(OUT, str(folder / slot.id)) for word in argv]
                    own = slot.platform.env if slot.platform else {}
                    return _called(words, {**environments[slot.engine.name], **own}, lock)

                codes = [_carry_out(slot, len(slots), folder, here) for slot in slots]
            else:
                codes = _over_cluster(ray, slots, folder, environments)
        except KeyboardInterrupt:
            codes = [exit_codes.INTERRUPTED]
        comparable = _report(folder)
    return exit_codes.worst(
        [
            *(code for code in codes if code in (exit_codes.INTERRUPTED, exit_codes.ENGINE_FAILED)),
            *_codes_of_targets(slots, folder),
            exit_codes.DONE if comparable else exit_codes.INCONCLUSIVE,
        ]
    )


def finished_in(folder: Path) -> Run | None:
    """The run in a slot's folder that came to its end, None where there is none yet."""
    runs = [open_run(manifest.parent) for manifest in sorted(folder.glob("*/manifest.json"))]
    return next((run for run in runs if run.status == "complete" and run.summary is not None), None)


def _environment(engine: Contender) -> dict[str, str]:
    """Ours, with this engine's key, and no other, under the name that a run reads."""
    environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    if engine.api_key_env is None:
        return environment
    key = os.environ.get(engine.api_key_env)
    if not key:
        raise WorkloadError(
            f"engine {engine.name!r} wants its key in the environment variable {engine.api_key_env}, "
            f"which is not set; try: export {engine.api_key_env}=..."
        )
    return environment | {API_KEY_VARIABLE: key}


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Nobody else works in the folder. Runs inherit the lock: one whose parent was killed still holds it."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkloadError(f"{folder} is in use: this suite is running already; wait for it") from None
        yield lock.fileno()


def _keep(suite: Suite, slots: Sequence[Slot], path: Path, folder: Path) -> None:
    """What is to be run, in order, with the file as it was written, but for its secrets."""
    (folder / "suite.toml").write_text(redacted(path.read_text("utf-8")), "utf-8")
    rows = [
        {
            "id": slot.id,
            "engine": slot.engine.name,
            "model": slot.model.name,
            "workload": slot.workload.name,
            "repeat": slot.repeat,
            "cell": slot.cell,
        }
        for slot in slots
    ]
    facts = {"schema": SCHEMA, "name": suite.name, "description": suite.description, "sha256": suite.sha256}
    write_json(folder / MANIFEST, {**facts, "repeats": suite.repeats, "slots": rows})


def _over_cluster(
    address: str,
    slots: Sequence[Slot],
    folder: Path,
    environments: Mapping[str, dict[str, str]],
) -> list[int]:
    """Each platform's runs one after another, the platforms side by side."""
    with ray_session(address) as ray:

        def carry_out(slot: Slot, call: Call) -> int:
            return _carry_out(slot, len(slots), folder, call)

        keys = {
            name: {API_KEY_VARIABLE: env[API_KEY_VARIABLE]} if API_KEY_VARIABLE in env else {}
            for name, env in environments.items()
        }
        return run_by_platform(ray, slots, folder, keys, carry_out)


def _carry_out(slot: Slot, n_slots: int, folder: Path, call: Call) -> int:
    """Run one slot unless it is done; the run's exit code, that of a failed engine if it came to no end."""
    title = ", ".join(word for word in (slot.engine.name, slot.cell) if word)
    slot_name = f"[{slot.place} of {n_slots}] {title}, repeat {slot.repeat}"
    if finished_in(folder / slot.id) is not None:
        print(f"{slot_name}: done before", file=sys.stderr)
        return exit_codes.DONE
    print(slot_name, file=sys.stderr)
    argv = slot.argv(Path(OUT))
    code = call(argv, slot)
    if code == exit_codes.INTERRUPTED:
        raise KeyboardInterrupt
    if code in (exit_codes.USAGE, exit_codes.OUR_BUG):
        raise WorkloadError(
            f"{slot_name} could not be run (see above); the suite ends here. What ran is kept"
        )
    run = finished_in(folder / slot.id)
    print(textwrap.indent(_verdict(run) if run else f"failed with exit code {code}", "    "), file=sys.stderr)
    return code if run else exit_codes.ENGINE_FAILED


def _called(argv: Sequence[str], environment: dict[str, str], lock: int) -> int:
    """The exit code of `burstline ARGV`, in a session of its own: a Ctrl-C reaches it once, through us."""
    with subprocess.Popen(
        [*child.command("burstline"), *argv],
        stdout=subprocess.DEVNULL,
        env=environment | {"PYTHONPATH": child.import_path()},
        pass_fds=(lock,),
        start_new_session=True,
    ) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)


def _verdict(run: Run) -> str:
    """The run's verdict and what came of its targets, a line each."""
    return text([verdict_line(view_of(run).summary)])


def _report(folder: Path) -> bool:
    """Write the report over whatever is finished; whether all is there, and comparable if it is several."""
    comparison = comparison_of_suite(folder)
    if comparison is None:
        print("No run of the suite came to its end: there is nothing to report.", file=sys.stderr)
        return False
    page = write_all(comparison, folder)
    show(digest(comparison))
    print(f"Report: {page}")
    alone = all(case.is_alone for case in comparison.cases)
    return comparison.comparable or (alone and not comparison.missing)


def comparison_of_suite(folder: Path) -> Comparison | None:
    """Every finished run of a suite's folder, one case for each model and workload; None without any."""
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
    cases = tuple(
        case_of(name, sorted(runs, key=lambda m: order.index(m.label))) for name, runs in members.items()
    )
    servers = [member.run.manifest.server for runs in members.values() for member in runs]
    anew = all(server is not None and not server.attached for server in servers)
    facts = (
        suite["name"] if suite["description"] else "",
        f"{len(suite['slots']) - len(missing)} of {len(suite['slots'])} runs",
        f"interleaved in time{', each engine started anew for each run' if anew else ''}",
    )
    return Comparison(
        suite["description"] or suite["name"], cases, tuple(filter(None, facts)), tuple(missing)
    )


def _codes_of_targets(slots: Sequence[Slot], folder: Path) -> Iterator[int]:
    """For each engine at each workload, whether every repeat kept its targets; a sweep at one load at least.

    A sweep is driven until its targets are missed: that alone is no failure.
    """
    found: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for slot in slots:
        run = finished_in(folder / slot.id)
        if run is not None and run.summary is not None and run.summary.targets:
            loads = found.setdefault((slot.engine.name, slot.model.name, slot.workload.of), {})
            loads.setdefault(slot.workload.name, []).append(of_summary(run.summary))
    for loads in found.values():
        yield exit_codes.best(map(exit_codes.worst, loads.values()))
