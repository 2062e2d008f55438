"""The command: a table of verbs, each imported on use, and the one place where errors become exit codes."""

import argparse
import atexit
import difflib
import errno
import gc
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from burstline import __version__, exit_codes
from burstline.roofline.errors import RooflineError
from burstline.servers.host.child import ChildLostError
from burstline.servers.host.interrupt import terminable
from burstline.servers.messages import EngineError
from burstline.servers.redact import learn_from
from burstline.stdout import outlets
from burstline.workloads.request import WorkloadError

TRACEBACK = "BURSTLINE_TRACEBACK"
N_BETWEEN_COLLECTIONS = 20_000
"""New objects from one collection of the youngest to the next; Python's own 700 suit programs that last."""

VERBS: dict[str, tuple[str, str]] = {
    "run": ("burstline.verbs.run", "send a workload to an engine and write the report"),
    "certify": (
        "burstline.verbs.certify",
        "measure the client's own error under this load",
    ),
    "compare": ("burstline.verbs.compare", "compare runs, if they did the same work"),
    "make-model": (
        "burstline.verbs.make_model",
        "make a model folder: config, tokenizer, random weights",
    ),
    "engines": ("burstline.verbs.engines", "list engines: installed, running, how to install the others"),
    "serve": ("burstline.verbs.serve", "start an engine by itself and print its URL"),
    "verify": ("burstline.verbs.verify", "check that a run's figures follow from what was captured"),
    "report": (
        "burstline.verbs.report",
        "make a run's page again, print the run, or write it in other formats",
    ),
    "bound": ("burstline.verbs.bound", "what the hardware could do: which GEMM bounds prefill and decode"),
    "study": ("burstline.verbs.study", "what binds inference across devices, memories and generations"),
    "calibrate": ("burstline.verbs.calibrate", "measure this machine for the roofline"),
}


GONE: dict[str, str] = {
    "accuracy": "in a clone, `make accuracy` checks the roofline model against measured data",
    "export": "say `burstline report RUN --to DIR --format csv`",
    "show": "say `burstline report RUN --format text`",
    "--arrival-times": "say --arrival file:FILE",
    "--burstiness": "say --arrival gamma:SHAPE, e.g. --arrival gamma:0.5",
    "--cancel-after": "say it after the share, e.g. --cancel-share 20%,after=4..12",
    "--data-column": "say it after the file, e.g. --data FILE,prompt=question",
    "--data-filter": "keep the rows you want in a file of their own",
    "--data-order": "rows are shuffled by --seed; --arrival replay keeps the file's order",
    "--data-split": "say it after the name, e.g. --data NAME,split=test",
    "--enforce-eager": "say --cuda-graphs 0",
    "--fan-out": "an agent's branches are not simulated",
    "--groups": "say them after the prefix, e.g. --shared-prefix 256,groups=4",
    "--max-rate": "give --rate R for R starts a second; --concurrency alone has no ceiling",
    "--no-calibrate": "drop it: a run no longer measures this CPU; `burstline calibrate --device cpu` does",
    "--no-certify": "drop it: a run no longer certifies first; `burstline certify` does",
    "--prefix-hit": "say --shared-prefix with a share, e.g. --shared-prefix 60%",
    "--ramp-to": "say --arrival ramp:FIRST..LAST, e.g. --arrival ramp:2..20",
    "--steps": "say --arrival steps:RxS,..., e.g. --arrival steps:5x30,10x30",
    "--tool-s": "say all pauses with --think-s, e.g. --think-s lognormal:2,3",
    "--tool-share": "say all pauses with --think-s, e.g. --think-s lognormal:2,3",
    "--trace-speed": "say it after the file, e.g. --trace FILE,speed=2",
    "--trace-window": "say it after the file, e.g. --trace FILE,window=600..1200",
    "--worker-resources": "say it after the address, e.g. --ray HOST:PORT,client=1",
    "--url-by": "requests take turns at several URLs, conversations stay at one",
    "--vllm-python": "say --engine-python PATH",
    "--warmup-handover": "drop it: what counts begins once the load has filled the server",
    **{
        f"run {flag}": f"the engine's settings say it; else `burstline report RUN {flag}` states it"
        for flag in (
            "--tp",
            "--pp",
            "--dp",
            "--ep",
            "--quant",
            "--kv-dtype",
            "--token-budget",
            "--draft-tokens",
            "--expert-share",
        )
    },
    "run --usd-per-hour": "say `burstline report RUN --usd-per-hour USD`",
}
"""Verbs and flags that there were, those of one verb with its name, and what to do instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is one of `burstline.exit_codes`, also if stdout is closed early."""
    if argv is None:
        _collect_rarely()
    for descriptor in range(3):  # of a standard stream that is closed a socket would take the number
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    with outlets():
        words = list(sys.argv[1:] if argv is None else argv)
        learn_from(words, os.environ)
        return _main(words)


def _collect_rarely() -> None:
    """For a process of our own: nearly all of its objects live to its end, which no collection need see.

    By default Python looks at them all several times, and twice more at the end (0.2 s each).
    """
    gc.set_threshold(N_BETWEEN_COLLECTIONS)
    atexit.register(gc.freeze)


def _main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return exit_codes.DONE if argv else exit_codes.USAGE
    if argv[0] in ("-V", "--version"):
        print(f"burstline {__version__}")
        return exit_codes.DONE
    if argv[0] in GONE:
        return _fail(f"{argv[0]} is gone: {GONE[argv[0]]}", exit_codes.USAGE)
    if argv[0] not in VERBS:
        near = nearest(argv[0], VERBS)
        wanted = near or f"; expected one of: {', '.join(VERBS)}"
        return _fail(f"unknown verb {argv[0]!r}{wanted}", exit_codes.USAGE)
    return _run_verb(argv[0], argv[1:])


def _run_verb(name: str, argv: list[str]) -> int:
    try:
        with terminable():
            return _terminable_verb(name, argv)
    except KeyboardInterrupt:
        return _fail("interrupted", exit_codes.INTERRUPTED)


def _terminable_verb(name: str, argv: list[str]) -> int:
    module_name, summary = VERBS[name]
    verb = importlib.import_module(module_name)
    parser = Parser(prog=f"burstline {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    verb.add_arguments(parser)
    parser.brief = getattr(verb, "BRIEF", frozenset())
    if parser.brief:
        parser.add_argument("--help-all", action="help", help="show every flag")
    own, engine_args = _split_at_dashes(argv)
    if engine_args is not None:
        parser.set_defaults(engine_args=tuple(engine_args))
    for flag in (word.partition("=")[0] for word in own if word.startswith("--")):
        instead = GONE.get(flag) or GONE.get(f"{name} {flag}")
        if instead is not None:
            return _fail(f"{flag} is gone: {instead}", exit_codes.USAGE)
    if "--help-all" in own:
        parser.brief = frozenset()
    args, unknown = parser.parse_known_args(own)
    if unknown:
        near = "".join(nearest(word.partition("=")[0], parser.flags()) for word in unknown[:1])
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    try:
        Path.cwd()
    except OSError as error:
        return _fail(
            f"the working directory cannot be used: {error.strerror}; cd to another", exit_codes.USAGE
        )
    try:
        return int(verb.run(args))
    except Exception as error:
        refused = _refused(args, error) or _damaged(args, error)
        code = exit_codes.USAGE if refused else _exit_code_of(error)
        if code == exit_codes.OUR_BUG and not _explains_itself(error):
            traceback.print_exc()  # here, not by the interpreter: secrets are taken out of what is printed
            return code
        told = error.strerror if isinstance(error, OSError) and error.filename is None else None
        return _fail(refused or told or str(error), code)


def _refused(args: argparse.Namespace, error: Exception) -> str | None:
    """Which place that the user named the system refuses, and why; None for any other error."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    place = Path(str(error.filename)).absolute()
    for named in (value.absolute() for value in vars(args).values() if isinstance(value, Path)):
        if place == named or named in place.parents or place in named.parents:
            return f"{error.filename}: {error.strerror}; name a place that is there and may be used"
    return None


def _damaged(args: argparse.Namespace, error: Exception) -> str | None:
    """Which run that the user named is damaged, and where; None where the error is another's, or ours."""
    if _exit_code_of(error) != exit_codes.OUR_BUG or os.environ.get(TRACEBACK):
        return None
    from burstline.verbs.verify import checks_of

    for run in _runs_in(args):
        for check in checks_of(run):
            if check.problem is not None:
                return (
                    f"{run} is damaged, or not of this version: {check.what}: {check.problem}; "
                    f"`burstline verify` says what can still be read ({TRACEBACK}=1 shows where it failed)"
                )
    return None


def _runs_in(args: argparse.Namespace) -> Iterator[Path]:
    for value in vars(args).values():
        for path in value if isinstance(value, list | tuple) else [value]:
            if isinstance(path, Path) and (path / "manifest.json").is_file():
                yield path


def _exit_code_of(error: Exception) -> int:
    if isinstance(error, EngineError):
        return exit_codes.ENGINE_FAILED
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if full or isinstance(error, WorkloadError | RooflineError):
        return exit_codes.USAGE
    return exit_codes.OUR_BUG


def _explains_itself(error: Exception) -> bool:
    """Whether a traceback would tell no more: a helper process was killed from outside."""
    return isinstance(error, ChildLostError)


def _split_at_dashes(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """What stands before `--` is ours, what stands after it is the engine's; None where there is no `--`."""
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean --rate?`, "" where nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """argparse, with one line for an error, and whole flags only: a short one could change its meaning.

    `brief` are the flags that `--help` shows, all of them where it is empty.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.brief: frozenset[str] = frozenset()
        self.formatter_class = self._formatter

    def flags(self) -> list[str]:
        """Every flag there is."""
        self.brief = frozenset()
        return re.findall(r"(?<!\S)--[a-z][a-z-]*", self.format_help())

    def _formatter(self, prog: str) -> argparse.HelpFormatter:
        parser = self

        class Formatter(argparse.HelpFormatter):
            def add_argument(self, action: argparse.Action) -> None:
                flags = action.option_strings
                if not parser.brief or not flags or not parser.brief.isdisjoint(flags):
                    super().add_argument(action)

        return Formatter(prog)

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(exit_codes.USAGE, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in VERBS.items())
    return (
        f"burstline {__version__}: benchmarks LLM inference servers, measures its own error,\n"
        "and compares the result with the hardware's roofline.\n\n"
        f"usage: burstline VERB [OPTIONS]\n\n{verbs}\n\n"
        "`burstline VERB --help` says more. Begin with: burstline run"
    )


def _fail(message: str, code: int) -> int:
    print(f"burstline: {message}", file=sys.stderr)
    return code
