"""The command: a table of verbs, each imported on use, and the one place where errors become exit codes."""

import argparse
import atexit
import gc
import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burstline import __version__
from burstline.console import exit_codes, memory_limits
from burstline.console.stdout import outlets
from burstline.servers.host.child import ChildLostError
from burstline.servers.host.interrupt import terminable
from burstline.servers.redact import learn_from
from burstline.verbs import VERBS
from burstline.wording import hint, of_others, others
from burstline.workloads.request import WorkloadError, not_a_run

N_BETWEEN_COLLECTIONS = 20_000
"""New objects from one collection of the youngest to the next; Python's own 700 suit programs that last."""
PRINTED = ("certify", "compare", "engines", "verify", "report", "bound", "study")
"""The commands whose result is what they print; those of the others are in files."""
WITH_RESULT = (exit_codes.DONE, exit_codes.TARGET_MISSED, exit_codes.INCONCLUSIVE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is one of `console.exit_codes`, also if stdout is closed early."""
    if argv is None:  # a process of our own: nearly all of its objects live to its end
        gc.set_threshold(N_BETWEEN_COLLECTIONS)
        atexit.register(gc.freeze)  # else Python looks at them all once more (0.2 s)
    for descriptor in range(3):  # of a standard stream that is closed a socket would take the number
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    os.environ.pop("MPLBACKEND", None)  # a notebook's or an old shell's: our figures need none
    with outlets() as output:
        words = list(sys.argv[1:] if argv is None else argv)
        learn_from(words, os.environ)
        code = _main(words)
        output.flush()
        if output.lost is None or code not in WITH_RESULT or not words or words[0] not in PRINTED:
            return code
        why = f"{output.lost.strerror}; make room, or write it elsewhere"
        return _fail(f"standard output could not be written: {why}", exit_codes.USAGE)


OF_LOADS = ("run", "limit")
"""The commands that have the flags of a load."""
NEVER_EMPTY = ("--salt", "--out", "--to")
"""Flags that would mean their default, or this folder, where a shell's variable is empty."""


def _main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return exit_codes.DONE if argv else exit_codes.USAGE
    if argv[0] in ("-V", "--version"):
        print(f"burstline {__version__}")
        return exit_codes.DONE
    if argv[0].startswith("--print-completion"):
        shell = argv[0].partition("=")[2] or "".join(argv[1:2])
        try:
            print(importlib.import_module("burstline.completion").script_for(shell))
        except WorkloadError as error:
            return _fail(str(error), exit_codes.USAGE)
        return exit_codes.DONE
    if argv[0] not in VERBS:
        ours = others()["commands"].get(argv[0])
        wanted = f"it is `burstline {ours}` here" if ours else hint(argv[0], VERBS)
        return _fail(f"unknown command {argv[0]!r}; {wanted}", exit_codes.USAGE)
    if (too_little := memory_limits.refusal()) is not None:
        return _fail(too_little, exit_codes.USAGE)
    try:
        with terminable():
            return _run_verb(argv[0], argv[1:])
    except KeyboardInterrupt:
        return _fail("interrupted", exit_codes.INTERRUPTED)


def _run_verb(name: str, argv: list[str]) -> int:
    summary = VERBS[name]
    try:
        flags: Any = importlib.import_module("burstline.verbs.arguments")
    except WorkloadError as error:  # modules of the user's own are imported with it
        return _fail(str(error), exit_codes.USAGE)
    parser = Parser(prog=f"burstline {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    flags.add_arguments(name, parser)
    parser.brief = flags.BRIEF.get(name, frozenset())
    if parser.brief:
        parser.add_argument("--help-all", action="help", help="show every flag")
    own = argv
    if "--" in argv:  # what stands after it is the engine's
        at = argv.index("--")
        own = argv[:at]
        if "[-- " not in (parser.usage or ""):
            parser.error(f"unrecognized arguments: {' '.join(argv[at:])}; {name} starts no engine")
        parser.set_defaults(engine_args=tuple(argv[at + 1 :]))
    words = ((*word.partition("="), after) for word, after in zip(own, [*own[1:], "-"], strict=False))
    given = [(flag, value if equals else after) for flag, equals, value, after in words]
    for flag in (flag for flag, value in given if flag in NEVER_EMPTY and not value):
        return _fail(f"{flag} '': expected a value; give one, or drop it", exit_codes.USAGE)
    if "--help-all" in own:
        parser.brief = frozenset()
    if name in OF_LOADS and any(of_others(*pair) for pair in given):
        parser.error(parser.near(given))
    args, unknown = parser.parse_known_args(own)
    if unknown:
        near = parser.near(given)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{near and f'; {near}'}")
    try:
        Path.cwd()
    except OSError as error:
        gone = f"the working directory cannot be used: {error.strerror}; cd to another"
        return _fail(gone, exit_codes.USAGE)
    for place in filter(None, (getattr(args, "out", None), getattr(args, "to", None))):
        if not getattr(args, "dry_run", False) and (why := memory_limits.lost_with_container(place)):
            return _fail(why, exit_codes.USAGE)
    try:
        for run in getattr(args, "runs", None) or filter(None, [getattr(args, "run", None)]):
            if not run.exists():
                raise not_a_run(run)
        return int(importlib.import_module(f"burstline.verbs.{name.replace('-', '_')}").run(args))
    except Exception as error:
        refused = _refused(args, error)
        code = exit_codes.USAGE if refused else exit_codes.of_error(error)
        if code == exit_codes.OUR_BUG and not isinstance(error, ChildLostError):
            traceback.print_exc()  # here, not by the interpreter: secrets are taken out of what is printed
            return code
        told = error.strerror if isinstance(error, OSError) and error.filename is None else None
        if isinstance(error, MemoryError):
            told = f"out of memory: {error}; ask for less, or raise the limit (`ulimit -v`, the container's)"
        return _fail(refused or told or str(error), code)


def _refused(args: argparse.Namespace, error: Exception) -> str | None:
    """Which place that the user named the system refuses, and why; None for any other error."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    place = Path(str(error.filename)).absolute()
    for named in (value.absolute() for value in vars(args).values() if isinstance(value, Path)):
        if place == named or named in place.parents or place in named.parents:
            return f"{error.filename}: {error.strerror}; choose an existing, accessible path"
    return None


class Parser(argparse.ArgumentParser):
    """argparse, with one line for an error, and whole flags only: a short one could change its meaning.

    `brief` are the flags that `--help` shows, all of them where it is empty.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.brief: frozenset[str] = frozenset()
        self.formatter_class = self._formatter

    def flags(self) -> list[str]:
        self.brief = frozenset()
        return re.findall(r"(?<!\S)--[a-z][a-z-]*", self.format_help())

    def near(self, given: Sequence[tuple[str, str]]) -> str:
        """What to write instead of flags and values that are not ours."""
        known = self.flags()
        flags = ((flag, value) for flag, value in given if flag.startswith("--"))
        told = (
            of_others(flag, value) or ("" if flag in known else hint(flag, known)) for flag, value in flags
        )
        return "; ".join(dict.fromkeys(filter(None, told)))

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
    verbs = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in VERBS.items())
    return (
        f"burstline {__version__}: benchmarks LLM inference servers, measures its own error,\n"
        "and compares the result with the hardware's roofline.\n\n"
        f"usage: burstline COMMAND [OPTIONS]\n\n{verbs}\n\n"
        "Run `burstline COMMAND --help` for the flags. Start with: burstline run\n"
        'Completion in bash: eval "$(burstline --print-completion bash)"'
    )


def _fail(message: str, code: int) -> int:
    print(f"burstline: {message[:10_000]}", file=sys.stderr)
    return code
