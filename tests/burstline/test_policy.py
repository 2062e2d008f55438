"""One policy for runs that are not VALID: each verdict planted in each command, and what each says of it."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from burstline.bench import certification, limit, repeats
from burstline.bench.conclusion import of_summary
from burstline.bench.run import Ended
from burstline.bench.run_settings import Settings
from burstline.cli import main
from burstline.console import exit_codes
from burstline.console.terminal import show
from burstline.loadgen.capture.files import write_json
from burstline.measure.metrics.slo import judge_slos, parse_slo
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.verdict import (
    DECIDES,
    HELD,
    TOO_LATE,
    Grade,
    PercentileGrade,
    Reason,
    State,
    Use,
    Verdict,
    withheld,
)
from burstline.measure.stats.figure import Result
from burstline.measure.stats.limit_search import (
    Evidence,
    Found,
    LatencyBound,
    LoadProbe,
    ProbeLook,
    Purpose,
    judge,
)
from burstline.measure.verdict.certificate import Measured, certificate
from burstline.reports.formats.text import text
from burstline.reports.model.comparison import Contender, _difference, alone, view_of
from burstline.reports.model.gated import NUMBERS, Rule, _unusable
from burstline.reports.page.digest import headline
from burstline.reports.page.limit_page import LimitResult, limit_blocks, why_open
from burstline.reports.page.page import render
from burstline.suites import gate
from burstline.workloads.load import load_of
from burstline.workloads.spec import LoadSpec
from tests.measure.test_certify import served, told
from tests.reports.synthetic_sweep import finished_run
from tests.test_documentation import ROOT

pytestmark = pytest.mark.slow

WHY = "This is planted."
CODES = {
    State.FAILED: "too-many-failures",
    State.CLIENT_BOUND: "read-lag",
    State.DISTURBED: "busy-machine",
    State.NOT_STATIONARY: "drifting",
    State.NOT_COMPARABLE: "beats-the-ceiling",
    State.COLD: "cold",
}
SLO = {"met": "e2e.p50<=100s", "missed": "e2e.p50<=1ms"}
CHIP = {"met": "E2E p50 ≤ 100 s", "missed": "E2E p50 ≤ 1 ms"}


def verdict(state: State, *, also: tuple[State, ...] | None = None) -> Verdict:
    reasons = tuple(Reason(CODES[each], WHY, "Do so.") for each in (state, *(also or ())) if each in CODES)
    return Verdict(state, reasons, also=also)


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Callable[..., Run]:
    """Runs by their facts, each made once."""
    runs: dict[tuple, Run] = {}

    def run(engine: str = "vllm", speed: float = 1.0, concurrency: int | None = None, seed: int = 0) -> Run:
        key = engine, speed, concurrency, seed
        if key not in runs:
            folder = tmp_path_factory.mktemp("made")
            runs[key] = finished_run(folder, engine, 40, speed=speed, concurrency=concurrency, seed=seed)
        return runs[key]

    return run


N_PLANTED = iter(range(1, 10**6))


def planted(
    run: Run, parent: Path, what: Verdict, slo: str = "", grade: PercentileGrade | None = None
) -> Run:
    """The run as one of its own, with this verdict, and this grade of all percentiles."""
    folder = parent / f"{run.name}-{(n := next(N_PLANTED))}"
    shutil.copytree(run.path, folder)
    copy = open_run(folder)
    manifest = copy.manifest
    assert manifest.clock is not None
    clock = replace(manifest.clock, wall_ns=manifest.clock.wall_ns + n)
    copy.save_manifest(replace(manifest, clock=clock, targets=(slo,) if slo else ()))
    opened = open_run(folder)
    assert opened.summary is not None
    summary = replace(opened.summary, verdict=what, forecast=None)
    if grade is not None:
        summary = replace(
            summary, grades={m: dict.fromkeys(("p50", "p90", "p99"), grade) for m in ("ttft", "tpot", "e2e")}
        )
    goals = [parse_slo(slo)] if slo else []
    write_json(
        copy.path / "summary.json",
        replace(summary, targets=judge_slos(goals, summary, opened.columns)).to_json(),
    )
    return open_run(folder)


@dataclass
class Told:
    """What a command said: its exit code, its words in the terminal and on its page."""

    code: int
    terminal: str
    page: str

    def both(self, words: str, on_page: str = "") -> bool:
        """Whether terminal and page agree in saying so; they must. `on_page`: the page's own words for it."""
        on = [re.sub(r"\s+", " ", text.replace(": ", " ")) for text in (self.terminal, self.page)]
        words = words.replace(": ", " ")
        found = [words in on[0], (on_page or words) in on[1]]
        assert found[0] == found[1], (words, found, self.terminal)
        return found[0]


def plain(page: str) -> str:
    """A page's text, without what its scripts and styles hold."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page)))


def run_told(what: Verdict, slo: str, made, tmp_path, capsys) -> Told:
    run = planted(made(), tmp_path, what, slo)
    assert run.summary is not None
    view = view_of(run)
    show(headline(alone(view), view))
    code = of_summary(run.summary)
    return Told(code, capsys.readouterr().out, plain(render(alone(view_of(run)))))


@pytest.mark.parametrize("state", State)
def test_a_run_decides_its_slo_as_the_table_says(state, made, tmp_path, capsys):
    for use, slo, code in (
        (Use.MET, "met", exit_codes.DONE),
        (Use.MISSED, "missed", exit_codes.TARGET_MISSED),
    ):
        found = run_told(verdict(state), SLO[slo], made, tmp_path, capsys)
        decides = withheld(verdict(state), use) is None
        result = {"met": "pass", "missed": "fail"}[slo] if decides else "inconclusive"
        worst = exit_codes.INCONCLUSIVE if not decides else code
        assert found.code == worst, (state, slo)
        assert found.both(f"{result}: {SLO[slo]}", f"{result} {CHIP[slo]}"), found.terminal
        assert found.both(str(state))
    bare = run_told(verdict(state), "", made, tmp_path, capsys)
    assert bare.code == (exit_codes.DONE if state == State.VALID else exit_codes.INCONCLUSIVE)


def compared(runs: list[Run], tmp_path, capsys) -> Told:
    names = [str(run.path) for run in runs]
    code = main(["compare", *names])
    terminal = capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["compare", *names, "--format", "html", "--out", str(page)]) == code
    capsys.readouterr()
    return Told(code, terminal, plain(page.read_text()))


@pytest.mark.parametrize("state", State)
def test_a_comparison_ranks_as_the_table_says(state, made, tmp_path, capsys):
    runs = [
        planted(made(engine, speed, seed=seed), tmp_path, verdict(state if engine == "tgi" else State.VALID))
        for engine, speed in (("vllm", 1.0), ("tgi", 1.5))
        for seed in range(2)
    ]
    found = compared(runs, tmp_path, capsys)
    ranked = withheld(verdict(state), Use.RANKED) is None
    assert found.code == (exit_codes.DONE if ranked else exit_codes.INCONCLUSIVE)
    assert found.both("vllm is 1.") == ranked
    assert ranked or found.both(f"2 of 4 runs are {state} (tgi)")


@pytest.mark.parametrize("state", State)
def test_a_sweep_counts_its_loads_as_the_table_says(state, made, tmp_path, capsys):
    runs = [
        planted(made(concurrency=n), tmp_path, verdict(state if n == 8 else State.VALID), SLO["met"])
        for n in (2, 8)
    ]
    found = compared(runs, tmp_path, capsys)
    ranked = withheld(verdict(state), Use.RANKED) is None
    assert found.code == (exit_codes.DONE if ranked else exit_codes.INCONCLUSIVE)
    assert found.both("meets all SLOs up to concurrency 8") == ranked
    assert found.both(f"Hollow points are not compared or not reliable: vllm at concurrency 8 ({state})") == (
        not ranked
    )


@pytest.mark.parametrize(
    ("states", "slos", "code"),
    [
        ((State.DISTURBED, State.DISTURBED), ("met", "met"), exit_codes.INCONCLUSIVE),
        ((State.DISTURBED, State.VALID), ("met", "met"), exit_codes.DONE),
        ((State.VALID, State.VALID), ("met", "missed"), exit_codes.DONE),
        ((State.VALID, State.DISTURBED), ("missed", "met"), exit_codes.TARGET_MISSED),
        ((State.DISTURBED, State.VALID), ("met", "missed"), exit_codes.TARGET_MISSED),
        ((State.DISTURBED, State.DISTURBED), ("", ""), exit_codes.INCONCLUSIVE),
        ((State.FAILED, State.FAILED), ("missed", "missed"), exit_codes.TARGET_MISSED),
    ],
)
def test_a_sweep_ends_with_the_code_of_what_its_page_says(
    states, slos, code, made, tmp_path, capsys, monkeypatch
):
    """Three DISTURBED runs passed, the page said that no load met the SLOs, and the exit code was 0."""
    coming = iter(zip((1, 2), states, slos, strict=True))

    def once(*_: object, **__: object) -> Ended:
        n, state, slo = next(coming)
        run = planted(made(concurrency=n), tmp_path, verdict(state), SLO.get(slo, ""))
        return Ended(RunDir(run.path, run.manifest), run.summary, of_summary(run.summary))

    monkeypatch.setattr(repeats, "carry_out", once)
    loads = [Settings(out=tmp_path, load=load_of(LoadSpec(salt="0", concurrency=n))) for n in (1, 2)]
    assert repeats.run_several(loads, 1, restart_after=None) == code
    (page,) = tmp_path.glob("*-sweep/report.html")
    found = Told(code, capsys.readouterr().out, plain(page.read_text()))
    assert found.both("No load is reliable (") == (State.VALID not in states)
    assert found.both("Highest output that meets all SLOs") == (code == exit_codes.DONE)


@pytest.mark.parametrize(
    ("slo", "users", "n_repeats", "alone", "together"),
    [
        ("e2e.p50<=330ms", (2, 4), 2, Result.PASS, Result.INCONCLUSIVE),
        ("e2e.p50<=600ms", (20, 40), 3, Result.INCONCLUSIVE, Result.PASS),
        ("e2e.p50<=1ms", (2, 4), 2, Result.FAIL, Result.FAIL),
    ],
)
def test_the_repeats_of_a_sweep_are_judged_together_by_page_and_exit_code(
    slo, users, n_repeats, alone, together, made, tmp_path, monkeypatch
):
    """The page judged each run, so that it missed or passed an SLO of which the exit code said the other."""
    seeds = iter(range(100))

    def once(settings, *_: object, **__: object) -> Ended:
        source = made(concurrency=settings.load.spec.concurrency, seed=next(seeds) // 2)
        run = planted(source, tmp_path, verdict(State.VALID), slo)
        assert [row.result for row in run.summary.targets] == [alone]
        return Ended(RunDir(run.path, run.manifest), run.summary, of_summary(run.summary))

    monkeypatch.setattr(repeats, "carry_out", once)
    loads = [Settings(out=tmp_path, load=load_of(LoadSpec(salt="0", concurrency=n))) for n in users]
    code = repeats.run_several(loads, n_repeats, restart_after=None)
    saved = json.loads(next(tmp_path.glob("*-sweep/comparison.json")).read_text())
    assert [at["targets"] for at in saved["sweeps"][0]["points"]] == [together] * 2
    assert code == exit_codes.of_results([together])


@pytest.mark.parametrize("state", State)
def test_a_gate_counts_its_pairs_as_the_table_says(state, made, tmp_path, capsys, monkeypatch):
    n_runs = iter(range(100))

    def run_in(folder: Path, argv: list[str], label: str) -> Run:
        what = verdict(state if label == "candidate" else State.VALID)
        run = planted(made(speed=1.5 if label == "candidate" else 1.0, seed=next(n_runs) % 4), folder, what)
        identity = replace(run.manifest.identity, max_num_seqs=40 if label == "candidate" else 64)
        run.save_manifest(replace(run.manifest, identity=identity))  # the change that is judged
        return open_run(run.path)

    monkeypatch.setattr(gate, "run_in", run_in)
    code = main(["gate", "run --engine vllm", "run --engine vllm", "--out", str(tmp_path)])
    said = capsys.readouterr()
    n_rounds = next(n_runs) // 2
    found = Told(code, said.out, plain((tmp_path / "gate-001" / "report.html").read_text()))
    saved = json.loads((tmp_path / "gate-001" / "gate.json").read_text())
    if state == State.FAILED:  # only the candidate's requests failed
        outcome, code, rounds = "WORSE", exit_codes.TARGET_MISSED, 1
    elif withheld(verdict(state), Use.RANKED) is None:
        outcome, code, rounds = "WORSE", exit_codes.TARGET_MISSED, 3
    else:
        outcome, code, rounds = "UNDECIDED", exit_codes.INCONCLUSIVE, 3
        first, *_ = [line for line in said.err.splitlines() if line.startswith("After 2 runs")]
        assert f"it is {state}. {WHY}" in first
        assert "None of the first 3 rounds counts, so the gate stopped." in said.out
        assert found.both("3 of 6 runs do not count.")
        assert found.both(f"it is {state}. {WHY}")
    assert (found.code, saved["outcome"], n_rounds) == (code, outcome, rounds)
    assert found.both(outcome)


def searched(
    verdicts: Callable[[int], Verdict], made, tmp_path, capsys, monkeypatch, limit_at=10.0, grade=None
):
    """A search in which probe k has the verdict `verdicts(k)`: what it told, and its limit.json."""
    random, at, evidence = np.random.default_rng(3), iter(range(1, 100)), {}

    def carry_out(settings, *_: object) -> Ended:
        spec = settings.load.spec
        users, n = spec.concurrency, min(spec.requests, 4000)
        run = planted(made(), tmp_path / "runs", verdicts(next(at)), grade=grade)
        middle = 4 * np.log(users / limit_at) - 0.3 * 1.2816
        evidence[run.path] = Evidence((random.lognormal(middle, 0.3, n),), None)
        return Ended(run, run.summary, 0)

    monkeypatch.setattr(limit, "carry_out", carry_out)
    monkeypatch.setattr(limit._Prober, "_evidence", lambda _, run: evidence[run.path])
    (tmp_path / "runs").mkdir()
    flags = ("--concurrency", "4", "--slo", "e2e.p90<=1s", "--budget-s", "3600", "-q")
    code = main(["limit", "--engine", "reference", *flags, "--out", str(tmp_path / "runs")])
    (folder,) = (tmp_path / "runs").glob("*-limit")
    page = plain((folder / "report.html").read_text())
    return Told(code, capsys.readouterr().out, page), json.loads((folder / "limit.json").read_text())


@pytest.mark.parametrize("state", State)
def test_a_search_uses_its_probes_as_the_table_says(state, made, tmp_path, capsys, monkeypatch):
    found, saved = searched(lambda _: verdict(state), made, tmp_path, capsys, monkeypatch)
    if withheld(verdict(state), Use.SEARCHED) is None:
        assert (found.code, saved["state"]) == (exit_codes.DONE, "confirmed")
        assert found.both("the chance that this is wrong is at most 5%")
        return
    assert (found.code, saved["state"]) == (exit_codes.INCONCLUSIVE, "lost")
    assert len(saved["runs"]) == 3, "it stops after the third"
    assert found.both(f"The last 3 probes could not decide: {state}. {WHY}")
    assert found.both("Do so")
    assert not found.both("more requests")
    assert not found.both("at most 5%")


SPOILT = {
    "held": (PercentileGrade(Grade.UNRELIABLE, held=True), HELD),
    "late": (PercentileGrade(Grade.UNRELIABLE), TOO_LATE),
}


@pytest.mark.parametrize(("grade", "cause"), SPOILT.values(), ids=SPOILT)
def test_every_command_says_why_a_number_is_unreliable(grade, cause, made, tmp_path, capsys, monkeypatch):
    state = HELD if grade.held else "CLIENT-BOUND"
    warned = replace(verdict(State.VALID), warnings=(Reason("held-to-end", WHY, "Do so."),))
    spoilt = planted(made(concurrency=8), tmp_path, warned, SLO["met"], grade)
    with_slo = spoilt.summary.targets[0]
    assert (with_slo.result, with_slo.reason.startswith(f"{cause}: ")) == ("inconclusive", True)
    assert _unusable(spoilt, Rule((NUMBERS["e2e.p50"],), 0.05, 8)).startswith(f"{cause}: its ")
    found = compared([planted(made(concurrency=2), tmp_path, warned, SLO["met"]), spoilt], tmp_path, capsys)
    assert found.both(f"not reliable: vllm at concurrency 8 ({state})")
    contender = Contender("a", (view_of(spoilt),))
    absent = _difference(contender, contender, ("metrics", "tpot", "p50"), interleaved=False)
    assert absent.reason == f"{cause} in {spoilt.name}: tpot p50 is unreliable"
    found, saved = searched(lambda _: warned, made, tmp_path, capsys, monkeypatch, grade=grade)
    assert (found.code, saved["state"]) == (exit_codes.INCONCLUSIVE, "lost")
    assert found.both(f"The last 3 probes could not decide: {state}. {WHY}")
    assert found.both("Do so")


def test_a_probe_that_may_not_decide_is_called_what_its_own_page_calls_it(
    made, tmp_path, capsys, monkeypatch
):
    """Too late for its SLO and not stationary: of both the worse, as every verdict is."""
    both = verdict(State.CLIENT_BOUND, also=(State.NOT_STATIONARY,))
    grade = PercentileGrade(Grade.UNRELIABLE)
    found, saved = searched(lambda _: both, made, tmp_path, capsys, monkeypatch, grade=grade)
    assert {probe["lost"] for probe in saved["found"]["probes"]} == {"CLIENT-BOUND"}
    assert found.both("CLIENT-BOUND: does not count")
    assert not found.both("NOT-STATIONARY")


def test_a_disturbed_probe_is_repeated_and_the_search_goes_on(made, tmp_path, capsys, monkeypatch):
    odd = {2: State.DISTURBED, 3: State.DISTURBED, 5: State.DISTURBED}
    found, saved = searched(lambda k: verdict(odd.get(k, State.VALID)), made, tmp_path, capsys, monkeypatch)
    assert (found.code, saved["state"]) == (exit_codes.DONE, "confirmed")
    loads = [probe["load"] for probe in saved["found"]["probes"]]
    assert loads[1] == loads[2] == loads[3]
    assert loads[4] == loads[5]
    assert [k for k, probe in enumerate(saved["found"]["probes"], 1) if probe["lost"]] == list(odd)
    assert found.both("3 others (DISTURBED) cannot decide it")


@pytest.mark.parametrize("slower", [np.repeat([1.0, 1.5], 350), np.geomspace(1.0, 1.5, 700)])
def test_more_requests_are_no_advice_where_the_speed_changed_in_the_probe(slower, made, tmp_path):
    """The server slows by half: in the middle at once, or little by little."""
    bounds, random = (LatencyBound("e2e.p90<=1s", 0.9, 1.0),), np.random.default_rng(4)
    latencies = random.lognormal(-0.2, 0.1, 700) * slower
    look = judge(Evidence((latencies,), None), bounds, 0.01, 8)
    found = Found(None, None, 0.05, (LoadProbe(1, 8.0, Purpose.SCOUT, look),), bounds, None, 202_000, 1)
    drifting = planted(made(), tmp_path, verdict(State.NOT_STATIONARY))
    closed = planted(made(concurrency=8), tmp_path, verdict(State.VALID))
    assert why_open(found, [drifting]) == (
        f"Probe 1 says little, because its speed changed: {WHY}",
        "Do so.",
    )
    told, advice = why_open(found, [closed])
    assert advice == "Look for throttling and other work on the server."
    assert re.match(r"Probe 1 says little, because its speed changed: the latency rose by [3-9]\d% ", told)
    faster = judge(Evidence((latencies[::-1].copy(),), None), bounds, 0.01, 8)
    fell = why_open(replace(found, probes=(replace_look(found.probes[0], faster),)), [closed])
    assert re.search(r"the latency fell by \d+% during the probe\. Try a longer --warmup", " ".join(fell))
    result = LimitResult(
        "vllm", "concurrency", ("e2e.p90<=1s",), 600.0, found, 90.0, (closed.name,), why=told
    )
    shown = text(limit_blocks(result, [closed]))
    assert "its speed changed" in shown
    assert "202,000" not in shown
    steady = judge(Evidence((random.lognormal(-0.2, 0.1, 700),), None), bounds, 0.01, 8)
    assert why_open(replace(found, probes=(replace_look(found.probes[0], steady),)), [closed]) == ("", "")


def replace_look(probe: LoadProbe, look: ProbeLook) -> LoadProbe:
    return LoadProbe(probe.number, probe.load, probe.purpose, look)


def test_requests_that_fail_above_the_limit_are_misses(made, tmp_path, capsys, monkeypatch):
    """A server that refuses what is beyond its capacity: its probes there are FAILED, and decide."""

    def of(k: int) -> Verdict:
        return verdict(State.FAILED if k == 1 else State.VALID)

    found, saved = searched(of, made, tmp_path, capsys, monkeypatch, limit_at=2.5)
    assert saved["state"] == "confirmed"
    assert not saved["found"]["probes"][0]["lost"]
    assert found.code == exit_codes.DONE


@pytest.mark.parametrize("state", State)
def test_a_certificate_says_what_the_client_says_of_itself(state, made, tmp_path, capsys, monkeypatch):
    printed = certification._ours(planted(made(), tmp_path / "run", verdict(state)).path)
    asked = "a load", "fixed", 10, (4, 4), (0.0,) * 10, None
    measured = Measured("ours", *asked, "", {}, None, 1.0, None, 0.0, 9.0)

    def certified(*_: object):
        own = replace(told(), doubts=printed.doubts)
        return certificate([served(k) for k in range(10)], measured, own, None)

    monkeypatch.setattr(certification, "certified", certified)
    code = main(["certify", "--requests", "10", "--out", str(tmp_path / "out")])
    found = Told(code, capsys.readouterr().out, (tmp_path / "out" / "certificate.md").read_text())
    certifies = withheld(verdict(state), Use.CERTIFIED) is None
    assert found.code == (exit_codes.DONE if certifies else exit_codes.INCONCLUSIVE)
    assert found.both(f"Its own verdict is {state}. {WHY}") == (not certifies)


def test_a_state_behind_the_worst_one_keeps_a_run_from_deciding_too():
    both = verdict(State.CLIENT_BOUND, also=(State.DISTURBED,))
    assert withheld(both, Use.RANKED) == withheld(both, Use.MISSED) == State.DISTURBED
    assert withheld(both, Use.MET) is None
    assert withheld(verdict(State.DISTURBED, also=(State.NOT_STATIONARY,)), Use.MET) == State.NOT_STATIONARY
    assert withheld(verdict(State.FAILED, also=(State.NOT_STATIONARY,)), Use.MISSED) is None


def test_the_documented_table_is_the_policy():
    method = (ROOT / "docs" / "method.md").read_text()
    table = method.partition("**What a run may decide.**")[2].partition("\n\n| ")[2].partition("\n\n")[0]
    head, _, *rows = [[cell.strip() for cell in row.strip("| ").split("|")] for row in table.splitlines()]
    assert len(head) == 1 + len(Use)
    assert {row[0]: [cell.split()[0].strip(",") for cell in row[1:]] for row in rows} == {
        str(state): ["yes" if use in DECIDES[state] else "no" for use in Use] for state in State
    }
