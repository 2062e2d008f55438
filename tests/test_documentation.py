"""Commands of README and the how-tos: their flags exist, and the printed outputs are today's."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from burstline.cli import Parser
from burstline.verbs.arguments import add_arguments
from tests.verdicts import Undecided

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
SLO = ROOT / "docs/howto/find-the-highest-load-within-an-slo.md"
UNQUIET = ("DISTURBED", "CLIENT-BOUND", "COLD", "NOT-STATIONARY", "The hypervisor gave")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each `burstline ...` in a block for a shell, without comments."""
    console = "\n".join(blocks(page, "console")).replace("\\\n", " ")
    for text in (*blocks(page, "sh"), "\n".join(re.findall(r"^\$ (.*)", console, re.MULTILINE))):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["docker", "run"]:  # of our image
                words = [word.removesuffix(":local") for word in words]
            if "burstline" in words:
                yield words[words.index("burstline") + 1 :]


def parser_of(verb: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"burstline {verb}", description="")
    add_arguments(verb, parser)
    return parser


ALL = [(page, words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{p.stem}: {' '.join(w)[:60]}" for p, w in ALL])
def test_the_real_parser_takes_each_command_of_the_documentation(page: Path, words: list[str]) -> None:
    verb, *flags = words
    own = flags[: flags.index("--")] if "--" in flags else flags
    parser_of(verb).parse_args(own)  # an unknown flag or a bad value ends it


def test_readme_and_the_how_to_compare_a_setting_by_the_same_commands() -> None:
    in_readme = list(commands(README))
    how_to = list(commands(ROOT / "docs/howto/compare-a-setting.md"))[:3]
    assert [words[0] for words in how_to] == ["run", "run", "compare"]
    assert all(words in in_readme for words in how_to)


def shell(command: str, folder: Path) -> tuple[int, str]:
    burstline = f'burstline() {{ {shlex.quote(sys.executable)} -P -m burstline "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", burstline + command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode in (0, 3, 4), done.stderr[-2000:]
    return done.returncode, done.stdout


MACHINE = (
    (r" Processes that Burstline did not start used [^.]*\.", ""),
    (r"The run cannot be compared with its hardware: [^\n]*\n(?:  [^\n]*\n)*", ""),
    (r"(?s) \d+% of the engine's time went .*? \(\d+%\)\.", ""),  # where the CPU is calibrated
    (r"[✓✕?] (pass|fail|inconclusive)|SLOs: [^.]*|\((the whole|one run) [^)]*\)|below |Report: \S+", ""),
    (r"[\[(][−\d][^\])]*[\])]", ""),  # an interval, which a run on an unsteady machine may lack
    (r"\b(ms|µs|s)\b", "time"),
    (r"\d[\d,.]*", "#"),
    (r"\s+", " "),
)
"""What depends on the machine, and what takes its place: results, intervals, units of time, numbers."""


def gist(text: str) -> str:
    for pattern, instead in MACHINE:
        text = re.sub(pattern, instead, text)
    return text.strip()


OUTPUTS = [
    pytest.param(text, marks=[pytest.mark.measures] if "--engine" in text else [], id=text.split()[2])
    for text in blocks(README, "console")
]
"""Of the README; those of runs are judged, and that by times."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("text", OUTPUTS)
def test_the_outputs_of_readme_are_todays(text: str, tmp_path: Path) -> None:
    output, expected = "", []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n", part)
        assert command
        if not command[0].startswith("echo"):
            output += shell(command[0], tmp_path)[1]
            expected += part[command.end() :].split("...")
    if said := [word for word in UNQUIET if word in output]:
        raise Undecided(f"a run says {said[0]}")
    plain = gist if "--engine" in text else lambda text: " ".join(text.split())
    assert [each for each in expected if plain(each) not in plain(output)] == [], output


@pytest.mark.thorough
@pytest.mark.measures
@pytest.mark.timeout(1800)
def test_the_how_to_for_slos_ends_in_the_limit_that_it_prints(tmp_path: Path) -> None:
    (command, *_), (limit, *_) = blocks(SLO, "sh"), blocks(SLO, "text")
    code, output = shell(command, tmp_path)
    if code == 4:
        raise Undecided("this machine is too slow for the budget")
    assert gist(re.sub(r"\b[NM]\b", "9", limit)) in gist(output)
