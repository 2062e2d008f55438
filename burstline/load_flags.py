"""The flags of a load: how many requests, of what kind, when, and what they must reach."""

import argparse
import secrets
from pathlib import Path
from typing import Literal

from burstline.bench.load_spec import LoadSpec


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
    group.add_argument("--data-split", metavar="NAME", help="of a data set that has several")
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
    group.add_argument(
        "--warmup", metavar="N|Ns|auto|0", help="requests, or seconds of the load, sent first and not counted"
    )


def number_or_auto(text: str) -> int | Literal["auto"]:
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or auto, not {text!r}") from None


def add_arrivals(group: argparse._ArgumentGroup) -> None:
    """When requests are due."""
    group.add_argument("--arrival", help="burst (all at once), constant, poisson, gamma, ramp, steps, replay")
    group.add_argument("--rate", type=float, metavar="R", help="requests per second")
    group.add_argument("--duration-s", type=float, help="how long requests are sent, instead of --requests")
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


OF_SOURCES = (
    "temperature", "top_p",
    "request_kind", "shared_prefix", "prefix_hit", "groups", "data", "data_split", "trace",
    "trace_speed", "trace_window", "sessions", "turns", "turn_tokens", "think_s", "warmup", "cancel_share",
    "cancel_after",
)  # fmt: skip
"""Flags that `LoadSpec` takes over as they are."""


def spec_of(args: argparse.Namespace) -> LoadSpec:
    """The load's flags as they were typed, with a fresh salt where none was."""
    return LoadSpec(
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
        **{name: getattr(args, name) for name in OF_SOURCES},
    )
