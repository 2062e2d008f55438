"""`burstline run`: the flags of a run and what they mean."""

import argparse
import secrets
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from burstline.engine_flags import add_engine, share_replicas, where_of
from burstline.machine.hints import add_cost, add_hints, hints_of

if TYPE_CHECKING:
    from burstline.bench.driver_processes import DriverProcesses
    from burstline.bench.wish import Wish
    from burstline.cluster.session import RayOptions

MOST_EARLY: Final = 16
"""More drivers than these are started when the rest of the command is known to be right."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "burstline run [--engine NAME] [--url URL] [OPTIONS] [-- ENGINE ARGS...]\n"
        "       burstline run SUITE.toml [--out DIR] [--no-certify] [--dry-run]"
    )
    parser.add_argument("suite", nargs="?", type=Path, metavar="SUITE.toml", help="a whole suite (suites/)")
    parser.add_argument("--dry-run", action="store_true", help="a suite's commands, in order, and no more")
    add_engine(parser.add_argument_group("what is measured"))
    add_load(parser.add_argument_group("the load"))
    add_sources(parser.add_argument_group("where requests come from"))
    add_arrivals(parser.add_argument_group("when requests are due"))
    add_targets(parser.add_argument_group("what it must reach"))
    add_cost(parser.add_argument_group("what it costs"))
    add_hints(parser.add_argument_group("the hardware (roofline)"))
    add_cluster(parser.add_argument_group("from many machines"))
    again = parser.add_argument_group("how often")
    again.add_argument(
        "--repeats", type=int, metavar="N", help="run N times; 3 and more give intervals between runs"
    )
    again.add_argument(
        "--restart",
        nargs="?",
        const=1,
        type=int,
        metavar="K",
        help="restart the server between repeats; with K after every K of them, which tells the spread over "
        "fresh starts from the spread over repeats of one start",
    )
    out = parser.add_argument_group("what is written")
    out.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept (runs/)"
    )
    out.add_argument(
        "--no-certify", action="store_true", help="do not measure the instrument's own error first"
    )
    out.add_argument(
        "--no-canary", action="store_true", help="do not measure the instrument's own error during the run"
    )
    out.add_argument("-q", "--quiet", action="store_true", help="no progress, only the result")
    parser.set_defaults(engine_args=())


def add_cluster(group: argparse._ActionsContainer) -> None:
    """Load drivers, or a suite's runs, on the nodes of a Ray cluster."""
    group.add_argument(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help="drive the load from --workers on a Ray cluster, or spread a suite over it (HOST:PORT; the one "
        "that runs here)",
    )
    group.add_argument(
        "--platform", metavar="NAME", help="of a suite with platforms: run this one only, here unless --ray"
    )
    group.add_argument(
        "--worker-resources", metavar="NAME=N,...", help="Ray resources that each worker reserves (CPU=1)"
    )


def add_load(group: argparse._ArgumentGroup) -> None:
    """How many requests, how long, how driven."""
    group.add_argument("--requests", type=int, metavar="N", help="how many (1000)")
    group.add_argument(
        "--prompt-tokens",
        default="512",
        metavar="LENGTHS",
        help="prompt lengths: 512, 256..768, normal:512,128, lognormal:512,400, zipf:1.2,16..4096, "
        "file:lengths.csv (512)",
    )
    group.add_argument("--output-tokens", default="64", metavar="LENGTHS", help="likewise (64)")
    group.add_argument(
        "--request-kind", default="generate", metavar="KIND", help="generate (default), embed or rerank"
    )
    group.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (0)")
    group.add_argument("--salt", metavar="HEX", help="an earlier run's salt repeats it byte for byte")
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="whose ordinary ids prompts are drawn from; it counts replies that the server does not count",
    )
    group.add_argument("--vocab-size", type=int, metavar="N", help="if neither tokenizer nor server says it")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (0)")
    group.add_argument("--top-p", type=float, metavar="P", help="of sampling, with --temperature (1)")
    group.add_argument(
        "--cancel-share",
        type=share,
        metavar="P",
        help="the share of requests whose clients hang up in the middle of the reply, e.g. 0.2 or 20%%",
    )
    group.add_argument("--cancel-after", metavar="LENGTHS", help="after how many tokens they hang up (8)")
    group.add_argument(
        "--deadline-s", type=float, default=600.0, help="per request, from when it was due (600)"
    )
    group.add_argument(
        "--workers",
        type=number_or_auto,
        default=1,
        metavar="N|auto",
        help="load driver processes (1); auto: one for 2,000 requests in flight, on half the cores at most",
    )


def add_sources(group: argparse._ArgumentGroup) -> None:
    """Where requests come from besides random numbers, and what they share."""
    group.add_argument(
        "--data", metavar="FILE|NAME", help="prompts: JSONL, JSON, text, CSV, Parquet, a dataset"
    )
    group.add_argument(
        "--data-column", action="append", default=[], metavar="NAME=COLUMN", help="e.g. prompt=question"
    )
    group.add_argument(
        "--data-filter", action="append", default=[], metavar="'COLUMN<OP>VALUE'", help="e.g. 'lang==en'"
    )
    group.add_argument("--data-split", metavar="NAME", help="of a data set that has several")
    group.add_argument("--data-order", default="shuffle", metavar="ORDER", help="shuffle (default) or file")
    group.add_argument("--trace", metavar="FILE", help="a recorded load: Mooncake, Azure, BurstGPT, JSONL")
    group.add_argument("--trace-speed", type=float, metavar="X", help="play the trace X times as fast (1)")
    group.add_argument("--trace-window", metavar="A..B", help="seconds of the trace, e.g. 600..1200")
    group.add_argument("--shared-prefix", type=int, metavar="N", help="tokens that prompts of a group share")
    group.add_argument("--prefix-hit", type=float, metavar="P", help="share of prompt tokens to be cached")
    group.add_argument("--groups", type=int, metavar="K", help="prefixes that are shared (1)")
    group.add_argument("--sessions", type=int, metavar="N", help="conversations instead of requests")
    group.add_argument("--turns", metavar="LENGTHS", help="turns of a conversation (4)")
    group.add_argument("--turn-tokens", metavar="LENGTHS", help="what each later turn adds (64)")
    group.add_argument("--think-s", metavar="SECONDS", help="between a reply and the next turn, e.g. 0.5..3")
    group.add_argument("--tool-s", metavar="SECONDS", help="how long a tool takes, e.g. lognormal:2,3")
    group.add_argument("--tool-share", type=float, metavar="P", help="share of turns that come from a tool")
    group.add_argument("--fan-out", type=int, metavar="K", help="branches that an agent starts and joins")
    group.add_argument(
        "--warmup", metavar="N|Ns|auto|0", help="requests, or seconds of the load, sent first and not counted"
    )
    group.add_argument("--warmup-handover", action="store_true", help="do not drain the warm-up")


def number_or_auto(text: str) -> int | Literal["auto"]:
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or auto, not {text!r}") from None


def add_arrivals(group: argparse._ArgumentGroup) -> None:
    """When requests are due."""
    group.add_argument("--arrival", help="burst (all at once), constant, poisson, gamma, ramp, steps, replay")
    group.add_argument("--rate", type=float, metavar="R", help="requests per second")
    group.add_argument("--duration-s", type=float, help="how long requests arrive, instead of --requests")
    group.add_argument("--burstiness", type=float, help="gamma: 1 is Poisson, less is clumpier")
    group.add_argument("--ramp-to", type=float, metavar="R", help="ramp: the last rate")
    group.add_argument("--steps", metavar="RxS,...", help="steps: rate x seconds, e.g. 5x30,10x30")
    group.add_argument(
        "--arrival-times", type=Path, metavar="FILE", help="replay: a time in seconds per line"
    )
    group.add_argument("--concurrency", type=int, metavar="N", help="a closed loop: N requests at a time")
    group.add_argument("--max-rate", type=float, metavar="R", help="closed loop: at most R starts per second")


def add_targets(group: argparse._ArgumentGroup) -> None:
    """The SLOs of the run: exit code 3 if one is missed, 4 if one is inconclusive."""
    group.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="'METRIC.P<=VALUE'",
        help="a target, e.g. 'ttft.p99<=2s' or 'output_tok_per_s>=1000'; without a percentile, e.g. "
        "'ttft<=2s', what each request must meet to count as goodput (repeatable; mind the quotes)",
    )
    group.add_argument(
        "--max-failures",
        type=share,
        default=0.01,
        metavar="SHARE",
        help="the share of requests that may fail, e.g. 0.05 or 5%%; above it the run is not VALID (1%%)",
    )


def share(text: str) -> float:
    """0.05 and 5% are the same."""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a share such as 0.01 or 1%, not {text!r}") from None


def run(args: argparse.Namespace) -> int:
    if args.suite is not None or args.dry_run:
        return _run_suite(args)
    share_replicas(args)
    _check_load(args)
    with _drivers_of(args) as drivers:
        _check_server(args)
        return _run_experiment(args, drivers)


def _check_load(args: argparse.Namespace) -> None:
    """Refuse what is wrong with the load before anything heavy is imported or started."""
    from burstline.bench.wish import check_flags, check_limits

    check_flags(wish_of(args))
    check_limits(args.max_failures, args.vocab_size, args.tokenizer, args.usd_per_hour)


def _check_server(args: argparse.Namespace) -> None:
    """Refuse what is wrong with the server's flags, while drivers import."""
    from burstline.bench.server_session import check_where, choose_engine

    where = where_of(args)
    check_where(where)
    if where.engine is not None:
        choose_engine(where)


def _drivers_of(args: argparse.Namespace) -> "AbstractContextManager[DriverProcesses | None]":
    """Drivers that import from now on, for one run at a server that runs; for others they would wait long."""
    are_unused = args.url is None or args.ray is not None or args.repeats is not None
    if are_unused or args.workers not in range(1, MOST_EARLY + 1):
        return nullcontext()
    from burstline.bench.driver_processes import DriverProcesses

    return DriverProcesses(args.workers, args.engine)


def _run_experiment(args: argparse.Namespace, drivers: "DriverProcesses | None") -> int:
    where, early_answer = where_of(args), None
    if where.url is not None and args.repeats is None:
        from burstline.bench.server_session import EarlyAnswer

        early_answer = EarlyAnswer(where)
    from burstline.lean import import_numpy

    import_numpy()
    from burstline.bench.experiment import run_experiment
    from burstline.bench.run_settings import Settings
    from workloads.request import WorkloadError

    settings = Settings(
        where,
        wish_of(args),
        args.tokenizer,
        args.vocab_size,
        args.out,
        args.quiet,
        certify=not args.no_certify,
        canary=not args.no_canary,
        hints=hints_of(args),
        targets=tuple(args.slo),
        usd_per_hour=args.usd_per_hour,
        ray=_ray_of(args),
        max_failures=args.max_failures,
        early_answer=early_answer,
    )
    if args.repeats is not None:
        from burstline.bench.repeats import run_repeats

        return run_repeats(settings, args.repeats, restart_after=args.restart)
    if args.restart is not None:
        raise WorkloadError("--restart restarts the server between repeats: add --repeats N")
    return run_experiment(settings, drivers)


def _ray_of(args: argparse.Namespace) -> "RayOptions | None":
    from workloads.request import WorkloadError

    if args.platform is not None:
        raise WorkloadError("--platform picks the runs of a suite: name its file, e.g. suites/laptop.toml")
    if args.ray is None:
        if args.worker_resources is not None:
            raise WorkloadError("--worker-resources says what a worker takes of a Ray node: add --ray")
        return None
    from burstline.cluster.session import RayOptions, parse_resources

    if args.ray.endswith(".toml"):
        raise WorkloadError(
            f"--ray {args.ray}: expected HOST:PORT; put the suite first: run {args.ray} --ray"
        )
    if args.workers == "auto":
        raise WorkloadError("--ray needs a number of --workers, e.g. one for each node")
    resources = parse_resources(args.worker_resources) if args.worker_resources else {}
    return RayOptions(args.ray, args.workers, not args.no_canary, resources)


OF_A_SUITE = ("suite", "out", "no_certify", "dry_run", "ray", "platform")


def _run_suite(args: argparse.Namespace) -> int:
    from burstline.suites.execution import run_suite
    from workloads.request import WorkloadError

    if args.suite is None:
        raise WorkloadError("--dry-run shows what a suite would run: name its file, e.g. suites/laptop.toml")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    without = vars(parser.parse_args([]))
    beside = [name for name, value in vars(args).items() if name not in OF_A_SUITE and value != without[name]]
    if beside:
        flags = ", ".join("--" + name.replace("_", "-") for name in beside)
        raise WorkloadError(f"{args.suite} says what is run; {flags} would be ignored: put it into the file")
    return run_suite(
        args.suite,
        args.out,
        certify=not args.no_certify,
        dry_run=args.dry_run,
        ray=args.ray,
        platform=args.platform,
    )


OF_SOURCES = (
    "temperature", "top_p",
    "request_kind", "shared_prefix", "prefix_hit", "groups", "data", "data_split", "data_order", "trace",
    "trace_speed", "trace_window", "sessions", "turns", "turn_tokens", "think_s", "tool_s", "tool_share",
    "fan_out", "warmup", "warmup_handover", "cancel_share", "cancel_after",
)  # fmt: skip
"""Flags that `Wish` takes over as they are."""


def wish_of(args: argparse.Namespace) -> "Wish":
    """The load's flags as they were typed, with a fresh salt where none was."""
    from burstline.bench.wish import Wish

    return Wish(
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        arrival=args.arrival,
        rate=args.rate,
        burstiness=args.burstiness,
        ramp_to=args.ramp_to,
        steps=args.steps,
        arrival_times=args.arrival_times,
        duration_s=args.duration_s,
        concurrency=args.concurrency,
        max_rate=args.max_rate,
        workers=args.workers,
        seed=args.seed,
        salt=secrets.token_hex(8) if args.salt is None else args.salt,
        deadline_s=args.deadline_s,
        data_column=tuple(args.data_column),
        data_filter=tuple(args.data_filter),
        **{name: getattr(args, name) for name in OF_SOURCES},
    )
