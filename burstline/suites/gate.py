"""`burstline gate`: run two contenders in turn until it is decided which is faster; or judge a series."""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from burstline.console import exit_codes
from burstline.loadgen.capture.files import write_json
from burstline.measure.record.rundir import Run, open_run, originals
from burstline.measure.record.typed_json import from_fields, plain
from burstline.measure.stats.estimates import Estimate
from burstline.reports.blocks import Block, Plot
from burstline.reports.formats.text import markdown, text
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
from burstline.workloads.options import words_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import GateOptions

CODES: Final = {
    GateOutcome.SAME: exit_codes.DONE,
    GateOutcome.BETTER: exit_codes.DONE,
    GateOutcome.WORSE: exit_codes.TARGET_MISSED,
    GateOutcome.UNDECIDED: exit_codes.INCONCLUSIVE,
}
OWN_FLAGS: Final = ("--out", "--repeats", "--restart", "--ray")
"""Flags of `run` that the gate itself decides."""
LEAST_RUNS: Final = 6
MOST_RUNS: Final = 200


def rule_of(options: GateOptions) -> Rule:
    """The rule that they make; WorkloadError where one is out of its range."""
    if not 0 < options.margin < 100:
        raise WorkloadError(f"--margin {options.margin:g}: expected percent, above 0 and below 100")
    if not LEAST_RUNS <= options.max_runs <= MOST_RUNS:
        raise WorkloadError(f"--max-runs {options.max_runs}: expected {LEAST_RUNS} to {MOST_RUNS}")
    if options.budget_s is not None and not options.budget_s > 0:
        raise WorkloadError(f"--budget-s {options.budget_s:g}: expected seconds above 0")
    numbers = tuple(NUMBERS[name] for name in dict.fromkeys(options.metric or ["e2e.p50"]))
    return Rule(numbers, options.margin / 100, options.max_runs // 2, options.anyway)


@dataclass(frozen=True, slots=True)
class GateResult:
    """What a gate decided. `path` is its folder, `document` the content of its `gate.json`.

    `ratios` are the candidate's number over the baseline's with their intervals, by name.
    """

    outcome: GateOutcome
    path: Path
    ratios: Mapping[str, Estimate] = field(repr=False)
    document: Mapping[str, Any] = field(repr=False)
    blocks: Sequence[Block] = field(repr=False)

    def __str__(self) -> str:
        return text(self.blocks)


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
    def from_json(cls, row: dict[str, Any]) -> Self:
        kept = from_fields(cls, row.get("inputs"), "inputs")
        if not kept.runs or not set(kept.rule.numbers) <= set(NUMBERS.values()):
            raise ValueError("inputs: expected runs, and numbers of `burstline gate --metric`")
        return kept

    def page(self, folder: Path) -> str:
        members = [_member(r.label, open_run(folder / r.path), folder, r.repeat) for r in self.runs]
        judged = _judge(members, self.rule)
        return _page(judged, gate_blocks(judged, self.command), members)


def gated(contenders: Sequence[str], shared: Sequence[str], options: GateOptions, out: Path) -> GateResult:
    """Judge two contenders, or with a history the one that is named, else the newest run, and write it all.

    Contenders are a URL or the words of a `run` command, to which `shared` are added; the baseline may be the
    folder of a run or of several, whose numbers are then used as they are.
    """
    rule, start_s, n = rule_of(options), time.monotonic(), len(contenders)
    if options.history is not None:
        if n > 1:
            raise WorkloadError("--history judges one run: name one candidate, or none for the newest run")
        folder, members = _newest(options.history, next(iter(contenders), None), shared, out)
    elif n == 2:
        folder, members = _in_turn(contenders, shared, rule, out, options.budget_s)
    else:
        raise WorkloadError(f"{n} given: expected BASELINE and CANDIDATE, or --history FOLDER")
    words = (*contenders, *words_of(options), "--out", str(out), *(["--", *shared] if shared else ()))
    command, judged = shlex.join(without_secrets(["burstline", "gate", *words])), _judge(members, rule)
    runs = (JudgedRun(m.label, str(Path(m.href).parent), m.repeat) for m in members)
    blocks, inputs = gate_blocks(judged, command), GateInputs(command, rule, tuple(runs))
    document = gate_json(judged) | {"inputs": plain(inputs)}
    (folder / "report.html").write_text(_page(judged, blocks, members), "utf-8")
    (folder / "summary.md").write_text(markdown(blocks), "utf-8")
    (folder / "junit.xml").write_text(gate_junit(judged, time.monotonic() - start_s), "utf-8")
    write_json(folder / "gate.json", document)
    for plot in (block for block in blocks if isinstance(block, Plot)):
        (folder / f"{plot.id}.svg").write_text(standalone_svg(plot), "utf-8")
    ratios = {number.headline.title: look.ratio for number, look in judged.known}
    return GateResult(judged.outcome, folder, ratios, document, blocks[:-1])


def _in_turn(
    contenders: Sequence[str], shared: Sequence[str], rule: Rule, out: Path, budget_s: float | None
) -> tuple[Path, list[Member]]:
    """Run A B B A ... until it is decided, the most runs are done or the next pair would exceed the budget.

    Returns the new folder, and the runs in it.
    """
    baseline, candidate = contenders
    stored = stored_runs(Path(baseline)) if Path(baseline).is_dir() else []
    argvs = {CANDIDATE: argv_of(candidate, shared)}
    if not stored:
        argvs = {BASELINE: argv_of(baseline, shared), **argvs}
    folder, start_s, longest_s, n_counted = _new_folder(out), time.monotonic(), 0.0, 0
    members = [_member(BASELINE, run, folder) for run in stored]
    for k in range(rule.most):
        began_s = time.monotonic()
        for label in list(argvs)[:: 1 if k % 2 == 0 else -1]:
            run = run_in(folder / f"{k + 1:02}-{label}", argvs[label], label)
            members.append(_member(label, run, folder, k))
        judged = _judge(members, rule)
        n = len(members) - len(stored)
        is_counted = judged.known and judged.n_values > n_counted
        why = [] if is_counted else [reason.text for reason in judged.reasons]
        n_counted = judged.n_values
        print(f"After {n} runs: {judged.outcome}.", sentence(judged), *why, file=sys.stderr)
        ended_s = time.monotonic()
        longest_s = max(longest_s, ended_s - began_s)
        if judged.is_over or (budget_s is not None and ended_s - start_s + longest_s > budget_s):
            break
    return folder, members


def _newest(
    history: Path, candidate: str | None, shared: Sequence[str], out: Path
) -> tuple[Path, list[Member]]:
    """A new folder; the runs of the history, with the candidate if it is named."""
    runs, folder, new = stored_runs(history), _new_folder(out), list[Run]()
    if candidate is not None and Path(candidate).is_dir():
        new = stored_runs(Path(candidate))
    elif candidate is not None:
        new = [run_in(folder / CANDIDATE, argv_of(candidate, shared), CANDIDATE)]
    each = originals([*new, *runs])[0]
    return folder, [_member(CANDIDATE if run in new else "", run, folder) for run in each]


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
