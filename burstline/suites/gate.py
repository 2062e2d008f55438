"""`burstline gate`: run two contenders in turn until it is decided which is faster; or judge a series."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from burstline.console import exit_codes
from burstline.console.terminal import show
from burstline.loadgen.capture.files import write_json
from burstline.measure.record.rundir import Run, open_run, originals
from burstline.measure.record.typed_json import from_fields, plain
from burstline.reports.blocks import Block, Plot
from burstline.reports.formats.text import markdown
from burstline.reports.model.comparison import Member
from burstline.reports.model.gated import (
    BASELINE,
    CANDIDATE,
    NUMBERS,
    GateOutcome,
    Judged,
    Rule,
    compared,
    judge_pairs,
    judge_series,
)
from burstline.reports.page.files import standalone_svg
from burstline.reports.page.gate_blocks import gate_blocks, gate_json, gate_junit, gate_page, sentence
from burstline.servers.messages import EngineError
from burstline.servers.redact import without_secrets
from burstline.suites.execution import all_finished_in, called, finished_in
from burstline.workloads.request import WorkloadError

CODES: Final = {
    GateOutcome.SAME: exit_codes.DONE,
    GateOutcome.BETTER: exit_codes.DONE,
    GateOutcome.WORSE: exit_codes.TARGET_MISSED,
    GateOutcome.UNDECIDED: exit_codes.INCONCLUSIVE,
}
OWN_FLAGS: Final = ("--out", "--repeats", "--restart", "--ray")
"""Flags of `run` that the gate itself decides."""


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """A run that was judged: as which contender, "" in a series; its folder, from that of the gate."""

    label: str
    path: str
    repeat: int | None


@dataclass(frozen=True, slots=True)
class GateInputs:
    """What a gate judged, by which rule, and its command: kept to write its page again."""

    command: str
    rule: Rule
    runs: tuple[JudgedRun, ...]

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> GateInputs:
        kept = from_fields(cls, row.get("inputs"), "inputs")
        if not kept.runs or not set(kept.rule.numbers) <= set(NUMBERS.values()):
            raise ValueError("inputs: expected runs, and numbers of `burstline gate --metric`")
        return kept

    def page(self, folder: Path) -> str:
        members = [_member(r.label, open_run(folder / r.path), folder, r.repeat) for r in self.runs]
        judged = _judge(members, self.rule)
        return _page(judged, gate_blocks(judged, self.command), members)


def run_gate(
    baseline: str, candidate: str, shared: Sequence[str], rule: Rule, out: Path, budget_s: float | None
) -> int:
    """Run A B B A ... until it is decided, the most runs are done or the next pair would exceed the budget.

    Contenders are a URL or the words of a `run` command, to which `shared` are added; the baseline may be the
    folder of a run or of several, whose numbers are then used as they are. Returns the exit code.
    """
    stored = stored_runs(Path(baseline)) if Path(baseline).is_dir() else []
    argvs = {CANDIDATE: argv_of(candidate, shared)}
    if not stored:
        argvs = {BASELINE: argv_of(baseline, shared), **argvs}
    folder, start_s, longest_s = _new_folder(out), time.monotonic(), 0.0
    members = [_member(BASELINE, run, folder) for run in stored]
    for k in range(rule.most):
        began_s = time.monotonic()
        for label in list(argvs)[:: 1 if k % 2 == 0 else -1]:
            run = run_in(folder / f"{k + 1:02}-{label}", argvs[label], label)
            members.append(_member(label, run, folder, k))
        judged = _judge(members, rule)
        n = len(members) - len(stored)
        why = [] if judged.known else [reason.text for reason in judged.reasons]
        print(f"After {n} runs: {judged.outcome}.", sentence(judged), *why, file=sys.stderr)
        ended_s = time.monotonic()
        longest_s = max(longest_s, ended_s - began_s)
        if judged.is_over or (budget_s is not None and ended_s - start_s + longest_s > budget_s):
            break
    return _report(folder, judged, start_s, members)


def run_history(history: Path, candidate: str | None, shared: Sequence[str], rule: Rule, out: Path) -> int:
    """Judge a run by the series of those in a folder: the candidate, or the newest of them."""
    runs, start_s = stored_runs(history), time.monotonic()
    folder, new = _new_folder(out), list[Run]()
    if candidate is not None and Path(candidate).is_dir():
        new = stored_runs(Path(candidate))
    elif candidate is not None:
        new = [run_in(folder / CANDIDATE, argv_of(candidate, shared), CANDIDATE)]
    each = originals([*new, *runs])[0]
    members = [_member(CANDIDATE if run in new else "", run, folder) for run in each]
    return _report(folder, _judge(members, rule), start_s, members)


def _member(label: str, run: Run, folder: Path, repeat: int | None = None) -> Member:
    return Member(label, run, os.path.relpath(run.path / "report.html", folder), repeat)


def _judge(members: Sequence[Member], rule: Rule) -> Judged:
    """Judge two contenders, or a series and the candidates that were named for it."""
    if any(member.label == BASELINE for member in members):
        return judge_pairs(members, rule)
    named = [member.run for member in members if member.label]
    return judge_series([member.run for member in members], rule, named)


def stored_runs(folder: Path) -> list[Run]:
    """The finished runs in a folder, at any depth, or that it is."""
    runs, copies = originals(all_finished_in(folder))
    if not runs:
        raise WorkloadError(f"{folder}: no finished run in it; expected folders of `burstline run`")
    for copy, original in copies:
        print(f"{copy.path} is {original.path} again: it counts once", file=sys.stderr)
    return runs


def argv_of(text: str, shared: Sequence[str]) -> list[str]:
    """The arguments of a contender's runs, but for their folder; WorkloadError where it is none."""
    if text.startswith(("http://", "https://")):
        words = ["run", "--url", text]
    else:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise WorkloadError(f"{text!r}: {error}; quote it as a shell would") from None
        words = words[1:] if words[:1] == ["burstline"] else words
    if words[:1] != ["run"]:
        raise WorkloadError(
            f"{text!r}: expected a URL, the folder of a run, or a command in quotes, such as "
            "'run --engine vllm --model DIR'"
        )
    if len(words) > 1 and not words[1].startswith("-"):
        raise WorkloadError(f"{text!r}: a gate compares single runs, {words[1]} is a suite; give its flags")
    at = words.index("--") if "--" in words else len(words)
    words[at:at] = shared
    for word in words:
        if word.partition("=")[0] in OWN_FLAGS:
            raise WorkloadError(f"{word} in a contender would be ignored: the gate sets it")
    return words


def run_in(folder: Path, argv: Sequence[str], label: str) -> Run:
    """Carry out one run; WorkloadError or EngineError where it came to no end."""
    verb, *flags = argv
    words = [verb, "--out", str(folder), "--quiet", *flags]
    print(f"The {label}: burstline {shlex.join(without_secrets(words))}", file=sys.stderr)
    code = called(words, dict(os.environ))
    if code == exit_codes.INTERRUPTED:
        raise KeyboardInterrupt
    if code in (exit_codes.USAGE, exit_codes.OUR_BUG):
        raise WorkloadError(f"the {label} could not be run (see above)")
    run = finished_in(folder)
    if run is None:
        raise EngineError(f"the {label} failed (see above); its runs are in {folder}")
    return run


def _new_folder(out: Path) -> Path:
    """The first `gate-001`, `gate-002`, ... that is not there."""
    k = 1
    while (folder := out / f"gate-{k:03}").exists():
        k += 1
    folder.mkdir(parents=True)
    return folder


def _page(judged: Judged, blocks: Sequence[Block], members: Sequence[Member]) -> str:
    """With both contenders side by side, also where none of their runs counts."""
    is_series = all(member.label != BASELINE for member in members)
    return gate_page(judged, blocks, None if is_series else judged.case or compared(members, judged.rule))


def _report(folder: Path, judged: Judged, start_s: float, members: Sequence[Member]) -> int:
    """Write and print the result; its exit code."""
    command = shlex.join(without_secrets(["burstline", *sys.argv[1:]]))
    runs = (JudgedRun(m.label, str(Path(m.href).parent), m.repeat) for m in members)
    inputs = GateInputs(command, judged.rule, tuple(runs))
    blocks, page = gate_blocks(judged, command), folder / "report.html"
    page.write_text(_page(judged, blocks, members), "utf-8")
    (folder / "summary.md").write_text(markdown(blocks), "utf-8")
    lasted_s = time.monotonic() - start_s
    (folder / "junit.xml").write_text(gate_junit(judged, lasted_s), "utf-8")
    write_json(folder / "gate.json", gate_json(judged) | {"inputs": plain(inputs)})
    for plot in blocks:
        if isinstance(plot, Plot):
            (folder / f"{plot.id}.svg").write_text(standalone_svg(plot), "utf-8")
    show(blocks[:-1])
    print(f"Report: {page}")
    return CODES[judged.outcome]
