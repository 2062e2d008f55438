"""Whatever the end of a gate or of a search, its terminal, its page and its exit code say the same."""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from burstline.bench import limit
from burstline.cli import main
from burstline.measure.record.rundir import Run
from burstline.measure.record.verdict import State, Use, withheld
from burstline.suites import gate
from tests.burstline.test_policy import made, planted, searched, verdict

__all__ = ["made"]
CODES = {"SAME": 0, "BETTER": 0, "WORSE": 3, "UNDECIDED": 4}
LIMITS = {
    "confirmed": (0, "CONFIRMED", r"^\S.* up to (?P<low>.+), but not at (?P<high>.+);"),
    "none": (3, "NO LOAD HOLDS", r" misses .+ even at (?P<high>.+?), the lowest load"),
    "open": (4, "NOT CONFIRMED", r"not confirmed[.;]|No load probed met all SLOs|is unknown"),
    "lost": (4, "NOT CONFIRMED", r"not confirmed[.;]|No load probed met all SLOs|is unknown"),
}
"""By the state of a search: its exit code, its page's verdict, and what its sentence looks like."""


@dataclass(frozen=True)
class GateEnd:
    """A gate with planted runs: how much slower the candidate is, the states of its and the baseline's runs.

    `stored`: that many baselines are there before; `history`: a series of so many runs. `outcome` is "" where
    the noise decides it.
    """

    outcome: str
    slower: float = 1.0
    flags: Sequence[str] = ()
    candidate: State = State.VALID
    baseline: State = State.VALID
    stored: int = 0
    history: int = 0


UNRANKED = [s for s in State if withheld(verdict(s), Use.RANKED) and s != State.FAILED]
GATES = [
    *(GateEnd("WORSE", slower, ("--margin", margin)) for slower in (1.3, 1.5) for margin in ("1", "5")),
    *(GateEnd("BETTER", slower, ("--margin", margin)) for slower in (0.5, 0.7) for margin in ("1", "5")),
    *(GateEnd("SAME", slower, ("--margin", "40")) for slower in (0.9, 1.0, 1.1)),
    *(GateEnd("", slower, ("--max-runs", "6", "--margin", "2")) for slower in (0.97, 0.99, 1.0, 1.01, 1.03)),
    *(GateEnd("", slower, ("--metric", "ttft.p50", "--metric", "tpot.p50")) for slower in (0.7, 1.0, 1.5)),
    *(GateEnd("UNDECIDED", slower, ("--budget-s", "0.001")) for slower in (0.5, 1.0, 1.5)),
    *(GateEnd("UNDECIDED", 1.5, candidate=state) for state in UNRANKED),
    *(GateEnd("WORSE", 1.5, candidate=state) for state in State if state not in UNRANKED),
    *(GateEnd("UNDECIDED", 1.5, baseline=state) for state in (State.FAILED, State.DISTURBED)),
    *(GateEnd(outcome, slower, stored=4) for outcome, slower in (("WORSE", 1.5), ("BETTER", 0.5))),
    *(GateEnd(outcome, slower, history=9) for outcome, slower in (("WORSE", 1.5), ("BETTER", 0.5))),
    *(GateEnd("UNDECIDED", history=n) for n in (1, 4)),
]  # fmt: skip
SEARCHES = [
    *((State.VALID, limit_at, 0.0) for limit_at in (0.2, 0.5, 1.3, 2.5, 3, 4, 5, 7, 10, 17, 40, 90)),
    *((state, limit_at, 0.0) for state in State if state != State.VALID for limit_at in (0.2, 10.0)),
    *((State.VALID, limit_at, pace_s) for limit_at in (0.2, 3.0, 17.0) for pace_s in (170.0, 310.0)),
]  # fmt: skip
"""The state of all probes, the limit, and the seconds between two looks at the clock, of 3,600 s in all."""


def sampled(ends: Sequence[Any]) -> Sequence[Any]:
    """All of them; every sixth is quick enough to be looked at each time."""
    return [end if k % 6 == 0 else pytest.param(end, marks=pytest.mark.slow) for k, end in enumerate(ends)]


def test_60_ends_are_planted():
    assert len(GATES) + len(SEARCHES) >= 60


def banner(page: str) -> str:
    (state,) = re.findall(r"</span> ([A-Z ]+)</p>", page)
    return state


def shown(page: str) -> str:
    """What a reader sees of the page before its sections, in one line."""
    head = page[page.index("<header>") : page.index("</header>")]
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", head)))


def written_again(folder: Path) -> str:
    """The page; `report` makes the same one from the folder."""
    page = folder / "report.html"
    before = page.read_text()
    page.unlink()
    assert main(["report", str(folder)]) == 0
    is_same = page.read_text() == before
    assert is_same
    return before


@pytest.fixture
def gated(made, tmp_path, monkeypatch, capsys):
    """Carries a gate out over planted runs: its exit code, what it printed, and its folder."""

    def run(end: GateEnd) -> tuple[int, str, Path]:
        seeds = iter(range(100))

        def of(folder: Path, slower: float, state: State) -> Run:
            return planted(made(speed=slower, seed=next(seeds) % 4), folder, verdict(state))

        def run_in(folder: Path, argv: Sequence[str], label: str) -> Run:
            slower = end.slower if label == "candidate" else 1.0
            return of(folder, slower, end.candidate if label == "candidate" else end.baseline)

        monkeypatch.setattr(gate, "run_in", run_in)
        stored = tmp_path / "stored"
        for _ in range(end.stored or end.history):
            of(stored, 1.0, end.baseline)
        contenders = ["run --engine vllm", "run --engine vllm --max-num-seqs 4"]
        if end.stored:
            contenders = [str(stored), "run --engine vllm"]
        if end.history:
            contenders = ["--history", str(stored), "run --engine vllm"]
        capsys.readouterr()
        code = main(["gate", *contenders, *end.flags, "--out", str(tmp_path / "out")])
        return code, capsys.readouterr().out, tmp_path / "out" / "gate-001"

    return run


@pytest.mark.parametrize("end", sampled(GATES), ids=lambda end: repr(end)[8:-1])
def test_a_gates_terminal_page_and_exit_code_agree(end, gated):
    code, terminal, folder = gated(end)
    found: dict[str, Any] = json.loads((folder / "gate.json").read_text())
    outcome, page = found["outcome"], written_again(folder)
    head = shown(page)
    assert outcome == (end.outcome or outcome)
    assert (CODES[outcome], banner(page)) == (code, outcome)
    assert " ".join(terminal.split()).startswith(f"{outcome}: {found['sentence']}")
    assert head.count(found["sentence"]) == 1
    changes = re.findall(r"[+-][\d.]+% \[[^\]]+\]", found["sentence"])
    assert changes or outcome == "UNDECIDED" or end.candidate == State.FAILED
    for change in changes:
        assert change in terminal
        assert change.partition(" ")[2] in head.replace(found["sentence"], ""), "as a short answer too"
    assert f"Within {100 * found['margin']:g}%" in head
    for other in CODES.keys() - {outcome}:
        assert not re.search(rf"\b{other}\b", head + terminal)
    suite = ET.parse(folder / "junit.xml").getroot()
    bad = {"WORSE": "failures", "UNDECIDED": "errors"}.get(outcome)
    assert [name for name in ("failures", "errors") if suite.get(name) != "0"][:1] == ([bad] if bad else [])


@pytest.mark.parametrize("end", sampled(SEARCHES), ids=str)
def test_a_searchs_terminal_page_and_exit_code_agree(end, made, tmp_path, capsys, monkeypatch):
    state, limit_at, pace_s = end
    monkeypatch.setattr(limit, "time", SimpleNamespace(monotonic=count(0.0, pace_s).__next__))
    told, kept = searched(lambda _: verdict(state), made, tmp_path, capsys, monkeypatch, limit_at)
    (folder,) = (tmp_path / "runs").glob("*-limit")
    page = written_again(folder)
    code, word, looks = LIMITS[kept["state"]]
    sentence = kept["answer"]
    assert (told.code, banner(page)) == (code, word)
    assert " ".join(told.terminal.split()).startswith(sentence)
    assert shown(page).count(sentence) == 1
    ends = re.search(looks, sentence)
    assert ends, sentence
    assert (kept["state"] == "confirmed") == ("at most 5%" in told.terminal) == ("at most 5%" in shown(page))
    load = re.search(r"At what load\?(.*)", shown(page))[1]
    for name, end in ends.groupdict().items():
        number = f"{kept['found'][name]:g}"
        assert number in end
        assert number in load
