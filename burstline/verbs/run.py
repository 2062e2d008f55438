"""`burstline run`: the flags of a run and what they mean."""

import argparse
import secrets
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from burstline.bench.server_session import check_where
from burstline.cluster.placement import RayOptions, parse_ray
from burstline.console.flags import add_options, read_options
from burstline.console.server_options import ServerOptions, add_settings, server_of
from burstline.machine.hints import Hints
from burstline.workloads.load import Load, load_of
from burstline.workloads.options import as_text, flag_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import Goals, LoadSpec, check_goals

BRIEF = frozenset({
    "--help", "--help-all", "--engine", "--url", "--model", "--requests", "--rate",
    "--concurrency", "--duration-s", "--prompt-tokens", "--output-tokens", "--data", "--trace",
    "--slo", "--audit", "--repeats", "--out", "--quiet",
})  # fmt: skip
"""The flags that `--help` shows; `--help-all` shows the others too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "burstline run [--engine NAME] [--url URL] [OPTIONS] [-- ENGINE ARGS...]\n"
        "       burstline run SUITE [--out DIR] [--dry-run] [-q]"
    )
    parser.add_argument(
        "suite",
        nargs="?",
        type=Path,
        metavar="SUITE",
        help="run a suite: a TOML file, or a shipped one such as laptop",
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the commands of a suite")
    out = add_one_run(parser)
    out.add_argument(
        "--no-canary", action="store_true", help="do not check the client's error during the run"
    )
    cluster = parser.add_argument_group("several machines")
    cluster.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS[,NAME=N...]",
        help="send the load from --workers drivers on a Ray cluster, or spread a suite over it (HOST:PORT, "
        "default: this machine's); a driver reserves one CPU and NAME=N, e.g. auto,client=1",
    )
    cluster.add_argument(
        "--platform",
        metavar="NAME",
        help="run only this platform of a suite, on this machine unless --ray is given",
    )
    again = parser.add_argument_group("repeats")
    again.add_argument(
        "--repeats", type=int, metavar="N", help="run N times; three or more give intervals over runs"
    )
    again.add_argument(
        "--restart",
        nargs="?",
        const=1,
        type=int,
        metavar="K",
        help="restart the server between repeats; with K after every K repeats, to separate the spread over "
        "starts from the spread over repeats",
    )


def add_one_run(parser: argparse.ArgumentParser) -> argparse._ActionsContainer:
    """The flags of a run that a search has, too; the group of its output."""
    server = parser.add_argument_group("the server")
    add_options(server, ServerOptions)
    add_settings(server)
    add_options(parser.add_argument_group("the load"), LoadSpec)
    add_options(parser.add_argument_group("service-level objectives"), Goals)
    hardware = parser.add_argument_group("the hardware (roofline)")
    add_options(hardware, Hints)
    hardware.add_argument(
        "--no-calibrate", action="store_true", help="do not measure this CPU, once and for the roofline"
    )
    out = parser.add_argument_group("output")
    out.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="folder for the runs (runs/)"
    )
    out.add_argument("-q", "--quiet", action="store_true", help="print only the result, no progress")
    parser.set_defaults(engine_args=())
    return out


def run(args: argparse.Namespace) -> int:
    if args.suite is not None or args.dry_run:
        return _run_suite(args)
    where, goals = server_of(args), read_options(Goals, args)
    loads = [checked_load(read_options(LoadSpec, each), goals, where) for each in _swept(args)]
    # Here: what a run imports would delay `--help` and the answer to a wrong flag.
    from burstline.bench.run import run_once
    from burstline.bench.run_settings import Settings, words_of_run

    settings = Settings(
        where,
        loads[0],
        goals,
        args.out,
        args.quiet,
        canary=not args.no_canary,
        calibrate=not args.no_calibrate,
        hints=read_options(Hints, args),
        ray=_ray_of(args, loads[0].spec),
        argv=tuple(sys.argv[1:]),
    )
    every = [settings]
    if len(loads) > 1:  # each has a command of its own
        words = partial(words_of_run, where, args.out, goals, settings.hints)
        every = [replace(settings, load=load, argv=words(load.spec)) for load in loads]
    if args.repeats is not None or len(every) > 1:
        from burstline.bench.repeats import run_several

        return run_several(every, args.repeats or 1, restart_after=args.restart)
    if args.restart is not None:
        raise WorkloadError("--restart restarts the server between repeats: add --repeats N")
    return run_once(every[0])


def _swept(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The flags of each load, of which a sweep has several."""
    names = [name for name in ("rate", "concurrency") if isinstance(vars(args)[name], tuple)]
    if not names:
        return [args]
    values, salt = vars(args)[names[0]], args.salt or secrets.token_hex(8)
    if len(names) > 1 or len(set(values)) < len(values):
        raise WorkloadError(f"{flag_of(names[0])} {as_text(values)}: expected one list of different loads")
    return [argparse.Namespace(**{**vars(args), names[0]: value, "salt": salt}) for value in values]


def checked_load(spec: LoadSpec, goals: Goals, where: ServerOptions) -> Load:
    """The load with its salt and workers; refuses what is wrong before anything is started."""
    check_goals(goals)
    check_where(where)
    return load_of(_shared(spec, len(where.urls)))


def _shared(spec: LoadSpec, n_urls: int) -> LoadSpec:
    """With as many workers as there are URLs, or a multiple: each worker drives one of them."""
    if n_urls < 2:
        return spec
    if spec.workers == 1:
        return replace(spec, workers=n_urls)
    if spec.workers == "auto" or spec.workers % n_urls:
        raise WorkloadError(
            f"--workers {spec.workers} cannot share {n_urls} URLs evenly: each worker drives one; give a "
            f"multiple of {n_urls}"
        )
    return spec


def _ray_of(args: argparse.Namespace, spec: LoadSpec) -> RayOptions | None:
    if args.platform is not None:
        raise WorkloadError("--platform picks the runs of a suite: name it, e.g. laptop")
    if args.ray is None:
        return None
    if args.ray.endswith(".toml"):
        raise WorkloadError(
            f"--ray {args.ray}: expected HOST:PORT; put the suite first: run {args.ray} --ray"
        )
    address, resources = parse_ray(args.ray)
    n_workers = None if spec.workers == "auto" else spec.workers
    return RayOptions(address, n_workers, not args.no_canary, resources)


OF_A_SUITE = ("suite", "out", "quiet", "dry_run", "ray", "platform")


def _run_suite(args: argparse.Namespace) -> int:
    from burstline.suites.execution import run_suite

    if args.ray is not None and parse_ray(args.ray)[1]:
        raise WorkloadError(
            f"--ray {args.ray}: a suite's runs go by its [[platform]] tables; name the address"
        )
    if args.suite is None:
        raise WorkloadError("--dry-run shows what a suite would run: name it, e.g. laptop")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    without = vars(parser.parse_args([]))
    beside = [name for name, value in vars(args).items() if name not in OF_A_SUITE and value != without[name]]
    if beside:
        flags = ", ".join("--" + name.replace("_", "-") for name in beside)
        raise WorkloadError(f"{args.suite} defines the runs; {flags} would be ignored: put it into the file")
    return run_suite(
        args.suite, args.out, dry_run=args.dry_run, ray=args.ray, platform=args.platform, quiet=args.quiet
    )
