"""`burstline run`: what the flags of a run mean."""

import argparse
import secrets
import sys
from dataclasses import replace

from burstline.bench.server_session import check_where
from burstline.cluster.placement import RayOptions, parse_ray
from burstline.console.flags import read_options
from burstline.console.server_options import ServerOptions, server_of
from burstline.machine.hints import Hints
from burstline.verbs.arguments import add_arguments
from burstline.workloads.load import Load, load_of
from burstline.workloads.options import as_text, flag_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import Goals, LoadSpec, check_goals


def run(args: argparse.Namespace) -> int:
    if args.suite is not None:
        return _run_suite(args)
    where, goals = server_of(args), read_options(Goals, args)
    loads = [checked_load(read_options(LoadSpec, each), goals, where) for each in _swept(args)]
    # Here: what a run imports would delay the answer to a wrong option.
    from burstline.bench.run import carry_out
    from burstline.bench.run_settings import Settings

    one = Settings(
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
    every = [replace(one, load=load) for load in loads]
    if args.dry_run:
        from burstline.suites.execution import show_plan

        return show_plan(every, args.repeats or 1)
    if args.repeats is not None or len(every) > 1:
        from burstline.bench.repeats import run_several  # it draws: matplotlib takes a second

        return run_several(every, args.repeats or 1, restart_after=args.restart)
    if args.restart is not None:
        raise WorkloadError("--restart restarts the server between repeats: add --repeats N")
    return carry_out(every[0], answer=True).code


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
        raise WorkloadError(f"--ray {args.ray}: expected HOST:PORT; name a suite first: run SUITE --ray")
    address, resources = parse_ray(args.ray)
    n_workers = None if spec.workers == "auto" else spec.workers
    return RayOptions(address, n_workers, not args.no_canary, resources)


OF_A_SUITE = ("suite", "out", "quiet", "dry_run", "ray", "platform")


def _run_suite(args: argparse.Namespace) -> int:
    from burstline.suites.execution import run_suite  # it draws: matplotlib takes a second

    if args.ray is not None and parse_ray(args.ray)[1]:
        raise WorkloadError(f"--ray {args.ray}: a suite's runs go by its [[platform]] tables; name HOST:PORT")
    parser = argparse.ArgumentParser()
    add_arguments("run", parser)
    without = vars(parser.parse_args([]))
    beside = [name for name, value in vars(args).items() if name not in OF_A_SUITE and value != without[name]]
    if beside:
        flags = ", ".join("--" + name.replace("_", "-") for name in beside)
        raise WorkloadError(f"{args.suite} defines the runs; {flags} would be ignored: put it into the file")
    return run_suite(
        args.suite, args.out, dry_run=args.dry_run, ray=args.ray, platform=args.platform, quiet=args.quiet
    )
