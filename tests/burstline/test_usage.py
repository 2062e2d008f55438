"""A slip in a command is told before anything heavy is imported: it should feel instant."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable

import pytest

from burstline.cli import Parser, main
from burstline.console import exit_codes
from burstline.dtypes import FLOATS
from burstline.reports.model.foreign import TOOLS
from burstline.reports.model.gated import NUMBERS
from burstline.reports.page.files import FILES
from burstline.roofline.training.recipe import KERNELS
from burstline.servers.truth.router import SCRIPTS
from burstline.verbs import VERBS
from burstline.verbs.arguments import add_arguments
from burstline.verbs.report import PRINTED
from burstline.verbs.study import RECIPES

HEAVY = ("pyarrow", "scipy", "matplotlib", "pandas", "huggingface_hub.file_download")
SLIPS = (
    "run --requests 0",
    "run --prompt-tokens abc",
    "run --arrival poisson",
    "run --concurrency 4 --rate 3",
    "run --engine nonsense",
    "run --url nonsense",
    "run --url=",
    "run --url ,",
    "run --tokenizer /nonsense",
    "run --max-failures 2",
    "run --requests 0 --url http://127.0.0.1:9",
    "report nonsense",
    "verify nonsense",
    "compare nonsense",
    f"report {'x' * 300}",
)


def test_usage_errors_are_one_line_each_and_import_nothing_heavy() -> None:
    program = (
        "import sys; from burstline.cli import main; codes = [main(slip.split()) for slip in sys.argv[1:]];"
        f"print(*codes, *sys.modules.keys() & {set(HEAVY)!r})"
    )
    done = subprocess.run([sys.executable, "-c", program, *SLIPS], capture_output=True, text=True)
    assert done.stdout.split() == ["2"] * len(SLIPS)
    assert done.stderr.count("\n") == len(SLIPS), done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_flag_of_any_command_needs_nothing_heavy(verb: str) -> None:
    code = f"from burstline.cli import main; main([{verb!r}, '--no-such-flag'])"
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert f"burstline {verb}: " in done.stderr
    imported = set(re.findall(r"\| +(\S+)$", done.stderr, re.MULTILINE))
    assert not imported & {*HEAVY, *(["numpy"] if verb != "bound" else [])}


def choices(verb: str, flag: str) -> list[str]:
    parser = Parser(f"burstline {verb}", "")
    add_arguments(verb, parser)
    (action,) = (each for each in parser._actions if flag in each.option_strings)
    return list(action.choices or ())


@pytest.mark.parametrize(
    ("verb", "flag", "known"),
    [
        ("gate", "--metric", NUMBERS),
        ("report", "--format", (*PRINTED, *FILES)),
        ("certify", "--script", SCRIPTS),
        ("make-model", "--dtype", FLOATS),
        ("study", "--recipe", RECIPES),
        ("study", "--kernels", KERNELS),
    ],
)
def test_the_choices_of_a_flag_are_what_its_command_knows(verb: str, flag: str, known: Iterable[str]) -> None:
    assert choices(verb, flag) == list(known)


def test_help_names_each_tool_that_certify_can_start() -> None:
    parser = Parser("burstline certify", "")
    add_arguments("certify", parser)
    (client,) = (each for each in parser._actions if "--client" in each.option_strings)
    started = [tool for tool, row in TOOLS.items() if "command" in row]
    assert (client.help or "").endswith(f"installed tool: {', '.join(started)}")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("run", "limit", "gate", "serve")])
def test_words_for_an_engine_are_refused_where_none_is_started(verb: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--", "--tensor-parallel-size", "2"])
    assert ended.value.code == exit_codes.USAGE
    assert "unrecognized arguments: -- --tensor-parallel-size 2" in capsys.readouterr().err
