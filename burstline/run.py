"""`burstline run`: the flags of a run and what they mean."""

import argparse
import secrets
from pathlib import Path

from burstline import exit_codes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "burstline run [--engine NAME | --url URL] [OPTIONS] [-- ENGINE ARGS...]"
    engine = parser.add_argument_group("what is measured")
    engine.add_argument(
        "--engine", metavar="NAME", help="the engine to start, or the dialect spoken at --url"
    )
    engine.add_argument("--url", help="drive the server that already runs there instead of starting one")
    engine.add_argument("--model", metavar="NAME_OR_DIR", help="a model folder, or a name the engine knows")
    engine.add_argument("--vllm-python", metavar="PATH", help="the interpreter that has vLLM installed")
    load = parser.add_argument_group("the load")
    load.add_argument("--requests", type=int, default=1000, metavar="N", help="default 1000")
    load.add_argument("--prompt-tokens", default="512", metavar="N|A..B", help="exact prompt length (512)")
    load.add_argument("--output-tokens", default="64", metavar="N|A..B", help="exact output length (64)")
    load.add_argument("--arrival", default="burst", help="when requests are due: burst (all at once)")
    load.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (0)")
    load.add_argument("--salt", metavar="HEX", help="repeat an earlier run's salt, byte for byte")
    load.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="whose ordinary ids prompts are drawn from"
    )
    load.add_argument("--vocab-size", type=int, metavar="N", help="where neither tokenizer nor server says")
    load.add_argument(
        "--deadline-s", type=float, default=600.0, help="per request, from when it was due (600)"
    )
    out = parser.add_argument_group("what is written")
    out.add_argument(
        "--out", type=Path, default=Path("runs"), metavar="DIR", help="where runs are kept (runs/)"
    )
    out.add_argument("-q", "--quiet", action="store_true", help="no progress, only where the report is")
    parser.set_defaults(engine_args=())


def run(args: argparse.Namespace) -> int:
    from burstline.experiment import Settings, run_experiment

    salt = args.salt if args.salt is not None else secrets.token_hex(8)
    settings = Settings(
        engine=args.engine,
        url=args.url,
        model=args.model,
        vllm_python=args.vllm_python,
        requests=args.requests,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        arrival=args.arrival,
        seed=args.seed,
        salt=salt,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        deadline_s=args.deadline_s,
        out=args.out,
        quiet=args.quiet,
        engine_args=args.engine_args,
    )
    return run_experiment(settings) or exit_codes.DONE
