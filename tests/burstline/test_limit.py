"""The page of a search for the highest load, and searches in suites."""

import html
import itertools
import json
import re
import shlex
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from burstline.bench import limit as searching
from burstline.bench.limit import CODES, _Prober, run_limit
from burstline.bench.progress import Snapshot
from burstline.bench.repeats import SharedServer
from burstline.bench.run import Ended
from burstline.bench.run_settings import Settings
from burstline.cli import main
from burstline.console import exit_codes
from burstline.console.server_options import ServerOptions
from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import Summary
from burstline.measure.record.typed_json import to_json
from burstline.measure.record.verdict import SloResult, State, Verdict
from burstline.measure.stats.figure import Result, measured
from burstline.measure.stats.limit_search import (
    Ask,
    Evidence,
    Found,
    LatencyBound,
    LateShare,
    LoadProbe,
    ProbeLook,
    Purpose,
)
from burstline.reports.formats.text import text
from burstline.reports.model.comparison import View
from burstline.reports.number_format import with_unit
from burstline.reports.page import limit_page as page_of_limits
from burstline.reports.page.bottleneck import next_by
from burstline.reports.page.limit_page import (
    LimitResult,
    limit_blocks,
    limit_page,
    limits_blocks,
    limits_page,
)
from burstline.suites.execution import limit_in, report_limits
from burstline.suites.suite import parse_suite, schedule
from burstline.workloads.load import load_of
from burstline.workloads.request import WorkloadError
from burstline.workloads.spec import Goals, LimitOptions, LoadSpec
from tests.burstline.test_repeats import asked_by
from tests.reports.synthetic_sweep import finished_run
from tests.reports.test_one_number import _Page, of_blocks, value_of

BOUNDS = (LatencyBound("ttft.p50<=2s", 0.5, 2.0), LatencyBound("tpot.p50<=50ms", 0.5, 0.05))
SHARES = (LateShare(0.05, 200.0), LateShare(0.3, 150.0))
PROBES = (
    LoadProbe(1, 4.0, Purpose.SCOUT, ProbeLook(Result.FAIL, 300, SHARES, overloaded=True)),
    LoadProbe(
        2, 2.0, Purpose.HOLDS, ProbeLook(Result.PASS, 600, (LateShare(0.01, 400.0), LateShare(0.02, 400.0)))
    ),
)
LOST = tuple(LoadProbe(k, 2.0, Purpose.SCOUT, lost="DISTURBED") for k in (3, 4, 5))
LOST = tuple(LoadProbe(k, 2.0, Purpose.SCOUT, lost="DISTURBED") for k in (3, 4, 5))
FOUND = Found(2.0, 2.2, 0.05, PROBES, BOUNDS, best=2.1)


@pytest.fixture
def result(burst_run):
    targets = tuple(bound.text for bound in BOUNDS)
    return LimitResult("vllm", "rate", targets, 600.0, FOUND, None, (burst_run.name, burst_run.name))


def test_the_page_says_the_answer_first_and_links_to_each_probe(result, burst_run):
    page = limit_page(result, (burst_run, burst_run))
    shown = re.sub(r"<[^>]+>", "", page)
    answer = "vLLM meets TTFT p50 ≤ 2 s and TPOT p50 ≤ 50 ms up to 2 req/s, but not at 2.2 req/s"
    assert shown.index(answer) < shown.index("What was probed, in order?")
    assert f'href="../{burst_run.name}/report.html"' in page
    assert "the queue outgrew the server" in page
    assert page.count("<svg") == 3, "a figure for each SLO over the output; the first is wide and narrow"
    assert limit_page(result, (burst_run, burst_run)) == page
    assert "at most 5%." in text(limit_blocks(result))


def test_the_page_says_how_to_search_again_and_not_how_to_probe(result, burst_run):
    again = "burstline limit --engine vllm --rate 2 --slo 'ttft.p50<=2s' --salt 5eed"
    run = Run(burst_run.path, replace(burst_run.manifest, repeat="burstline run --rate 2 --salt 5eee"))
    page = html.unescape(limit_page(replace(result, again=again), (run, run)))
    assert again in page
    assert "burstline run --rate 2" not in page
    assert "Reproduce this search" not in limit_page(result, (run, run))


def test_a_confirmed_search_says_what_was_probed_to_confirm_it(result, burst_run):
    """The lower load has passed once only: its scouts need not have."""
    lost = LoadProbe(3, 2.0, Purpose.SCOUT, lost="CLIENT-BOUND")
    page = limit_page(replace(result, found=replace(FOUND, probes=(*PROBES, lost))), (burst_run,) * 3)
    assert "One fresh probe met all SLOs at the lower load, and another missed one at the higher." in page
    assert "again; the higher" not in page


def test_a_share_stands_beside_the_requests_that_it_is_of(result, burst_run):
    """A warm-up is left out of both, whatever has ended; a search of before knows only what has ended."""
    look = replace(PROBES[0].last, shares=(LateShare(0.05, 200.0, 270), LateShare(0.3, 150.0, 250)))
    probes = (replace(PROBES[0], last=look), PROBES[1])
    blocks = limit_blocks(replace(result, found=replace(FOUND, probes=probes)), (burst_run, burst_run))
    titles = [column.title for column in blocks[1].columns]
    assert titles[4:] == ["TTFT > 2 s", "TPOT > 50 ms"]
    cells = [[(cell.text, cell.detail) for cell in row.cells[4:]] for row in blocks[1].rows]
    assert cells == [[("5.0%", "of 270"), ("30.0%", "of 250")], [("1.0%", ""), ("2.0%", "")]]
    assert "2 probes with 870 judged requests in all" in text(blocks)


@pytest.mark.parametrize(
    ("kind", "n_slos", "width"), [("rate", 1, 100), ("concurrency", 1, 100), ("concurrency", 2, 120)]
)
def test_the_probes_are_one_block_in_a_terminal(kind, n_slos, width, result):
    """Their columns went on below, where no line says which probe met which SLO."""
    shares = (LateShare(0.05, 2000.0, 2700), LateShare(0.3, 1500.0, 2500))[:n_slos]
    look = ProbeLook(Result.INCONCLUSIVE, 3000, shares)
    probes = tuple(LoadProbe(k, 128.5, p, look, "NOT-STATIONARY") for k, p in enumerate(Purpose, 10))
    result = replace(result, kind=kind, found=replace(FOUND, probes=probes, bounds=BOUNDS[:n_slos]))
    result = replace(result, runs=("a", "b", "c"), verdicts=("NOT-STATIONARY",) * 3)
    table = text(limit_blocks(result)[1:], width).splitlines()
    assert [line.split()[0] for line in table[1:5]] == ["Probe", "10", "11", "12"]
    assert max(map(len, table[1:5])) <= width
    assert "of 2,700" in table[2]
    assert n_slos == 1 or "of 2,500" in table[2]


def test_a_probe_says_by_which_rule_it_is_judged_and_why_it_counts(result, burst_run):
    verdicts = ("CLIENT-BOUND", "VALID")
    result = replace(result, runs=("one", "two"), verdicts=verdicts, found=replace(FOUND, probes=PROBES[1:]))
    shown = " ".join(text(limit_blocks(result, (burst_run, burst_run))).split())
    assert "CLIENT-BOUND: still counts" in shown
    assert "those that confirm share an error of 5%" in shown
    lost = replace(PROBES[1], lost="CLIENT-BOUND")
    result = replace(result, found=replace(FOUND, probes=(lost,)))
    assert "still counts" not in text(limit_blocks(result, (burst_run, burst_run)))


def test_report_writes_a_searchs_page_again_from_its_folder(result, burst_run, tmp_path, capsys):
    shutil.copytree(burst_run.path, tmp_path / burst_run.name)
    folder = tmp_path / "one-limit"
    folder.mkdir()
    (folder / "limit.json").write_text(json.dumps(result.to_json()))
    assert main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == limit_page(result, (burst_run, burst_run))
    assert main(["report", str(folder), "--format", "markdown", "--to", str(tmp_path / "out")]) == 2
    assert "--format is for a run" in capsys.readouterr().err
    for damaged in ("", "[]", "{}", json.dumps(result.to_json() | {"budget_s": "long"})):
        (folder / "limit.json").write_text(damaged)
        assert main(["report", str(folder)]) == 2
        assert "limit.json cannot be read" in capsys.readouterr().err
    (folder / "limit.json").write_text(json.dumps(result.to_json()))
    shutil.rmtree(tmp_path / burst_run.name)
    assert main(["report", str(folder)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def tiles_of(page: str) -> dict[str, list[str]]:
    """The short answer and the line below it, by question."""
    found = re.findall(r"<dt>(.*?)</dt><dd><strong>(.*?)</strong>(?:<p>(.*?)</p>)?</dd>", page)
    return {question: [re.sub(r"<[^>]+>", "", text) for text in told] for question, *told in found}


@pytest.mark.parametrize("state", ["confirmed", "open", "none"])
def test_a_searchs_page_gives_the_four_answers_of_a_runs_page(result, tmp_path, state):
    run = finished_run(tmp_path, "vllm", 200, rate=20)
    found = {
        "confirmed": FOUND,
        "open": replace(FOUND, low=None, high=None, more_requests=5000),
        "none": replace(FOUND, low=None, high=4.0, probes=PROBES[:1]),
    }[state]
    page = limit_page(replace(result, found=found, more_s=90.0), (run, run))
    tiles = tiles_of(page)
    loads = {"confirmed": "2 to 2.2 req/s", "open": "2 to 4 req/s", "none": "Below 4 req/s"}
    assert list(tiles) == ["How fast?", "At what load?", "What limits it?", "What next?"]
    median = with_unit(run.summary.metrics["ttft"].p50)
    slow = with_unit(run.summary.metrics["ttft"].p90)
    at = "4 req/s, which misses" if state == "none" else "2 req/s"
    assert tiles["How fast?"][0].startswith(f"{median}, then ")
    assert tiles["How fast?"][1].startswith(f"Medians at {at}. p90: {slow}, then ")
    value, detail = tiles["At what load?"]
    assert value == loads[state]
    assert ("output tok/s at 2 req/s. The search counted 2 probes" in detail) == (state != "none")
    state_shown = {"confirmed": "CONFIRMED", "open": "NOT CONFIRMED", "none": "NO LOAD HOLDS"}[state]
    assert f"</span> {state_shown}</p>" in page
    assert tiles["What limits it?"][1].startswith("At 4 req/s: ")
    assert page.index("What next?") < page.index('<figure class="plot"') < page.index("</header>")


def test_what_is_open_says_what_is_known_and_how_much_more_it_takes(result):
    found = replace(FOUND, high=None, more_requests=5000)
    result = replace(result, found=found, more_s=90.0)
    shown = text(limit_blocks(result))
    between = "The limit of vLLM is between 2 req/s (holds) and 4 req/s (misses), not confirmed"
    assert f"{between}; that 2 req/s holds is confirmed." in " ".join(shown.split())
    half = replace(result, found=replace(found, low=None))
    assert f"{between}." in text(limit_blocks(half))
    assert "--budget-s 690; about 5,000 more requests (90.0 s)" in shown
    assert CODES[result.state] == 4
    far = text(limit_blocks(replace(result, more_s=12_200.0)))
    assert "Next: take 2 req/s as the limit; to confirm the limit takes about 5,000 more requests" in far


LOW, HIGH = (LateShare(0.0, 19.0, 2367), LateShare(0.0, 30.0, 2367)), (LateShare(0.7, 19.0, 90),) * 2
"""Shares that seem to meet both bounds, and to miss both."""
DECIDED = {"pass": Result.PASS, "fail": Result.FAIL, "?": Result.INCONCLUSIVE}


@pytest.mark.parametrize(
    ("looks", "said", "ends"),
    [
        # An undecided probe is above the highest that passed, below the lowest that failed, or both.
        ("16 pass low, 19 ? low, 32 fail high", "between 16 req/s (holds) and 32 req/s (misses)", "16 to 32"),
        (
            "16 pass low, 24 ? high, 32 fail high",
            "between 16 req/s (holds) and 32 req/s (misses)",
            "16 to 32",
        ),
        ("16 ? low, 32 fail high", "between 16 req/s (seems to hold) and 32 req/s (misses)", "16 to 32"),
        ("16 pass low, 32 ? high", "between 16 req/s (holds) and 32 req/s (seems to miss)", "16 to 32"),
        ("16 ? low, 32 ? high", "between 16 req/s (seems to hold) and 32 req/s (seems to miss)", "16 to 32"),
        ("16 pass low, 19 ? low", "above 16 req/s (holds)", "Above 16"),
        ("16 ? low", "above 16 req/s (seems to hold)", "Above 16"),
    ],
)
def test_a_load_holds_in_words_only_where_a_probe_passed(looks, said, ends, result, burst_run, monkeypatch):
    shares = {"low": LOW, "high": HIGH}
    rows = [(float(load), DECIDED[how], shares[of]) for load, how, of in map(str.split, looks.split(", "))]
    probes = [
        LoadProbe(k, load, Purpose.SCOUT, ProbeLook(judged, 2629, share))
        for k, (load, judged, share) in enumerate(rows, 1)
    ]
    found = replace(FOUND, low=None, high=None, probes=tuple(probes))
    result, runs = (
        replace(result, found=found, runs=(burst_run.name,) * len(probes)),
        [burst_run] * len(probes),
    )
    answer, table = limit_blocks(result, runs)
    assert answer.sentence == f"The limit of vLLM is {said}, not confirmed."
    drawn, load_figure = [], page_of_limits.load_figure
    monkeypatch.setattr(
        page_of_limits, "load_figure", lambda *args: drawn.extend(args[4]) or load_figure(*args)
    )
    tiles = tiles_of(limit_page(result, runs))
    assert tiles["At what load?"][0] == f"{ends} req/s"
    assert tiles["What next?"][0] == "Run again with a longer --budget-s"
    curves = {"pass": "all SLOs hold", "fail": "an SLO is missed", "?": "inconclusive"}
    assert {row.curve for row in drawn} == {curves[how] for _, how, _ in map(str.split, looks.split(", "))}
    undecided = [row.cells[3].detail for row in table.rows if "inconclusive" in row.cells[3].text]
    assert undecided == ["correlated: worth 19 requests"] * looks.count("?"), "why no longer probe helped"


def test_a_search_that_ended_before_it_knew_anything_says_what_to_do(result, burst_run):
    found = replace(FOUND, low=None, high=None, best=None, probes=LOST[:1])
    own = replace(result, found=found, runs=(burst_run.name,), verdicts=("DISTURBED",))
    assert "Next: run again with a longer --budget-s." in text(limit_blocks(own, [burst_run]))
    assert tiles_of(limit_page(own, [burst_run]))["What next?"][0] == "Run again with a longer --budget-s"


def test_a_lost_search_says_what_to_do_in_the_answer_to_that(result, burst_run):
    found = replace(FOUND, low=None, high=None, probes=(*PROBES, *LOST))
    own = replace(result, found=found, why="The last 3 probes could not decide.", advice="Stop other work.")
    assert tiles_of(limit_page(own, [burst_run] * 5))["What next?"][0] == "Stop other work"
    shown = text(limit_blocks(own, [burst_run] * 5))
    assert "The last 3 probes could not decide. Stop other work." in shown


def test_an_interruption_of_the_first_probe_leaves_a_page(burst_run, tmp_path, monkeypatch, capsys):
    ended = Ended(burst_run, burst_run.summary, exit_codes.INTERRUPTED)
    monkeypatch.setattr("burstline.bench.limit.carry_out", lambda *_: ended)
    spec, goals = LoadSpec(rate=2.0, salt="5eed"), Goals(slo=("ttft.p90<=1s",))
    settings = Settings(ServerOptions(), load_of(spec), goals, tmp_path, quiet=True)
    assert run_limit(settings, LimitOptions(error=0.1)) == 130
    assert "more requests" not in capsys.readouterr().out, "no pace is known"
    (page,) = tmp_path.glob("*-limit/report.html")
    again = f"burstline limit --salt 5eed --rate 2 --slo 'ttft.p90<=1s' --error 0.1 --out {tmp_path}"
    assert again in html.unescape(page.read_text())


def test_where_no_load_holds_the_slo_that_is_missed_most_is_named(result):
    found = replace(FOUND, low=None, high=4.0, probes=PROBES[:1])
    assert CODES[result.state] == 0
    result = replace(result, found=found)
    shown = text(limit_blocks(result))
    assert "vLLM misses TPOT p50 ≤ 50 ms even at 4 req/s, the lowest load" in shown
    assert "a looser SLO, shorter prompts or a faster setting" in shown
    assert "--budget-s" not in shown, "no longer search finds a load that holds"
    assert CODES[result.state] == 3


def test_where_every_probe_seems_to_miss_no_load_is_called_near_the_limit(result):
    found = replace(FOUND, low=None, high=None, best=None, probes=PROBES[:1], more_requests=4000)
    shown = text(limit_blocks(replace(result, found=found, more_s=90.0)))
    assert "No load probed met all SLOs: even at 4 req/s, vLLM misses TPOT p50 ≤ 50 ms." in shown
    assert "Next: try a lower load" in shown
    assert "4,000" not in shown
    assert not FOUND.none_seems


def test_a_search_below_which_an_slo_is_out_of_reach_advises_no_lower_load(result, tmp_path):
    """The lowest load was one request at a time, and its fastest token too slow."""
    run = finished_run(tmp_path, "vllm", 60, rate=2, targets=("tpot.p50<=2ms",))
    for high in (None, 4.0):
        found = replace(FOUND, low=None, high=high, best=None, probes=PROBES[:1], more_requests=4000)
        shown = text(limit_blocks(replace(result, found=found), (run,)))
        assert "Next: loosen TPOT p50 ≤ 2 ms, which is out of reach" in shown
        assert "lower load" not in shown


def test_what_limits_the_server_stands_at_the_upper_end(result, burst_run):
    probes = (replace_probe(PROBES[1], 1, 2.0), replace_probe(PROBES[0], 2, 2.2))
    shown = text(limit_blocks(replace(result, found=replace(FOUND, probes=probes)), (burst_run, burst_run)))
    assert re.search(r"At 2.2 req/s: the server had room .+\.\nNext: ", shown)


def test_a_search_does_not_advise_to_search(result, burst_run, monkeypatch):
    """It has tried other loads: what is left is another server or SLO. Nor do its probes' pages."""
    manifest = replace(burst_run.manifest, argv=("burstline", "limit"), asked=LoadSpec(rate=2.0))
    probe = Run(burst_run.path, manifest)
    missed = SloResult("ttft.p50<=1s", Result.FAIL, "", burst_run.summary.metrics["ttft"].p50)
    own = View(probe, replace(burst_run.summary, targets=(missed,)))
    probes = (replace_probe(PROBES[1], 1, 2.0), replace_probe(PROBES[0], 2, 2.2))
    result = replace(result, found=replace(FOUND, probes=probes))
    for code in (
        "overloaded",
        "load",
        "concurrency",
        "concurrency-unwatched",
        "pauses",
        "one-in-flight",
        "too-short",
    ):
        told = {"load": "3", "most": "3", "n": "3", "reason": "", "waits": "", "all": "all", "mean": "2"}
        limited = (f"limit.{code}", told)
        monkeypatch.setattr("burstline.reports.page.bottleneck.limited_by", lambda *_, one=limited, **__: one)
        shown = text(limit_blocks(result, (probe, probe)))
        assert "Next: try a faster device, a smaller data type or more devices." in shown, code
        assert next_by(own) == "Next: try a faster device, a smaller data type or more devices.", code
    monkeypatch.setattr(
        "burstline.reports.page.bottleneck.limited_by", lambda *_, **__: ("limit.queue", {"reason": ""})
    )
    assert next_by(own) == "Next: look at the server's scheduler settings."


class Clock:
    """A clock that stands still until something takes time."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def prober(spec: LoadSpec, out, until_s: float = 240.0) -> _Prober:
    settings = Settings(ServerOptions(), load_of(spec), Goals(slo=("ttft.p90<=1s",)), out, quiet=True)
    return _Prober(settings, 0.05, SharedServer(), until_s)


def test_what_a_probe_takes_after_its_load_is_a_part_of_the_budget(tmp_path, monkeypatch):
    """Replies in flight end, are decoded and judged: 30 s after each load here."""
    clock = Clock()
    monkeypatch.setattr(searching, "time", clock)
    search = prober(LoadSpec(rate=10.0, salt="5eed"), tmp_path)
    undecided = Evidence((np.full(200, 0.5),), np.ones(200))
    monkeypatch.setattr(search, "_evidence", lambda _: undecided)
    monkeypatch.setattr(search, "_lost", lambda *_: "")

    def carry_out(settings, progress, serving, enough):
        site = SimpleNamespace(site=SimpleNamespace(engine=SimpleNamespace(decode=None)))
        for k in itertools.count():
            clock.now_s += 1.0
            if enough(None, site, Snapshot(10_000, 10 * k, 10 * k, 10 * k, 0, float(k))) or k > 1000:
                break
        clock.now_s += 30.0
        return Ended(SimpleNamespace(path=tmp_path), None, 0)

    monkeypatch.setattr(searching, "carry_out", carry_out)
    search.run()
    assert len(search.folders) > 1
    assert clock.now_s <= 241


def test_no_probe_of_a_search_repeats_another_ones_plan(tmp_path):
    """Each has prompts and arrivals of its own, also one that is repeated at the same load."""
    search = prober(LoadSpec(rate=10.0, salt="5eed", seed=3), tmp_path, until_s=1e12)
    plans = [search._settings_of(Ask(number, 10.0, 100, 1000)).load.spec for number in range(1, 9)]
    assert len({plan.seed for plan in plans}) == len({plan.salt for plan in plans}) == len(plans)


@pytest.mark.parametrize(("e2e_s", "rate"), [(0.088, 45.0), (2.0, 2.0), (40.0, 0.1)])
def test_a_search_that_is_given_no_load_begins_with_few_requests_in_flight(
    e2e_s, rate, burst_run, tmp_path, monkeypatch, capsys
):
    e2e = replace(burst_run.summary.metrics["e2e"], mean=measured(e2e_s, "s", ""))
    summary = replace(burst_run.summary, metrics=burst_run.summary.metrics | {"e2e": e2e})
    monkeypatch.setattr(searching, "carry_out", lambda *_: Ended(burst_run, summary, 0))
    settings = Settings(ServerOptions(), load_of(LoadSpec()), Goals(slo=("itl.p90<=1s",)), tmp_path)
    begun = searching._begun(settings, SharedServer())
    assert (begun.load.spec.rate, begun.load.spec.pattern) == (rate, "poisson")
    assert f"the search begins at {rate:g} requests per second" in capsys.readouterr().err


def test_a_search_whose_first_request_failed_says_so_with_its_page(tmp_path, monkeypatch):
    ended = Ended(SimpleNamespace(report=tmp_path / "report.html"), Summary({}, {}, Verdict(State.FAILED)), 0)
    monkeypatch.setattr(searching, "carry_out", lambda *_: ended)
    settings = Settings(ServerOptions(), load_of(LoadSpec()), Goals(slo=("e2e.p90<=2s",)), tmp_path)
    with pytest.raises(WorkloadError, match=r"the first request failed .+report\.html"):
        searching._begun(settings, SharedServer())


def test_the_cpu_is_measured_or_not_before_the_first_probe_alone(tmp_path):
    """Each probe looked for other programs, and said that there were some."""
    search = prober(LoadSpec(rate=10.0, salt="5eed"), tmp_path, until_s=1e12)
    tries = [search._settings_of(Ask(number, 10.0, 100, 1000)).calibrate for number in (1, 2, 3)]
    assert tries == [True, False, False]


@pytest.mark.slow
def test_a_probe_says_how_many_requests_it_may_send_at_most(tmp_path, capsys):
    """It was announced as 876 requests, of which the search needed 108."""
    words = ("--concurrency", "2", "--prompt-tokens", "16", "--output-tokens", "4", "--slo", "ttft.p90<=9s")
    main(["limit", "--engine", "truth", *words, "--budget-s", "10", "--out", str(tmp_path)])
    told = re.findall(r"^(.*)[\d,]+ requests? of 16 → 4 tokens", capsys.readouterr().err, re.MULTILINE)
    assert {re.sub(r"\d", "", line) for line in told} == {"Up to "}


def test_the_command_of_a_probe_is_a_run_of_its_own_load(tmp_path):
    """With the probe's seed, salt and SLOs: not the search, which would begin from the start."""
    search = prober(LoadSpec(rate=10.0, salt="0eed", seed=3), tmp_path, until_s=1e12)
    settings = search._settings_of(Ask(2, 12.5, 100, 1000))
    words = shlex.split(settings.again())
    assert words[:2] == ["burstline", "run"]
    assert asked_by(words) == settings.load.spec
    assert (settings.load.spec.salt, settings.load.spec.seed) == ("0eef", 5)
    assert words[words.index("--slo") + 1] == "ttft.p90<=1s"
    assert not {"--error", "--budget-s"} & {*words}


def test_a_search_says_whether_its_probes_are_valid(result, burst_run):
    runs = (burst_run, burst_run)
    assert "in all; each is VALID." in text(limit_blocks(replace(result, verdicts=("VALID", "VALID")), runs))
    result = replace(result, found=replace(FOUND, probes=(*PROBES, *LOST)), verdicts=("DISTURBED", "VALID"))
    shown = text(limit_blocks(result, runs))
    assert "2 probes with 900 judged requests in all; 3 others (DISTURBED) cannot decide it." in shown


def replace_probe(probe: LoadProbe, number: int, load: float) -> LoadProbe:
    return LoadProbe(number, load, probe.purpose, probe.last)


def test_each_of_several_searches_is_named_in_the_answer(result):
    none = replace(result, found=replace(FOUND, low=None, high=4.0, probes=PROBES[:1]))
    answer, _ = limits_blocks([("vllm, chat", "", result), ("tgi, chat", "", none)])
    assert answer.sentence == (
        "Highest load that meets the SLOs: vllm, chat 2 req/s (confirmed); tgi, chat none (no load holds)."
    )


@pytest.mark.parametrize("state", ["confirmed", "open", "lost", "none", "none seen", "several"])
def test_every_number_of_a_searchs_tables_has_a_key_with_one_value(result, burst_run, state):
    found = {
        "open": replace(FOUND, high=None, more_requests=5000),
        "lost": replace(FOUND, high=None, probes=(*PROBES, *LOST)),
        "none": replace(FOUND, low=None, high=4.0, probes=PROBES[:1]),
        "none seen": replace(FOUND, low=None, high=None, best=None, probes=PROBES[:1], more_requests=4000),
    }.get(state, FOUND)
    result = replace(result, found=found, more_s=90.0)
    runs, searches = (burst_run, burst_run), [("vllm, chat", "", result), ("tgi, chat", "", result)]
    page = limits_page("Two", searches, []) if state == "several" else limit_page(result, runs)
    blocks = limits_blocks(searches) if state == "several" else limit_blocks(result, runs)
    values: dict[str, set[str | float]] = {}
    for key, words, unit in (*map(tuple, _Page(page).found), *of_blocks(list(blocks))):
        values.setdefault(key, set()).add(value_of(words, unit))
    assert {key: found for key, found in values.items() if len(found) > 1} == {}
    assert len(values) > 3
    cells = re.findall(r"<td[^>]*>[^<]*", page)
    numbers = [cell for cell in cells if re.search(r">[\d.,]+%?$", cell) and "data-key" not in cell]
    assert all(re.fullmatch(r"<td[^>]*>[12]", cell) for cell in numbers), "only a probe's number has no key"


SUITE = {
    "name": "s",
    "engine": [{"engine": "reference"}, {"engine": "truth"}],
    "limit": [{"name": "users", "concurrency": 2, "slo": ["ttft.p90<=1s"], "budget_s": 60, "error": 0.1}],
}


def test_a_suite_searches_the_limit_of_each_engine():
    slots = schedule(parse_suite(SUITE, "s.toml"))
    argv = [slot.argv("out") for slot in slots]
    assert [words[:3] for words in argv] == [("limit", "--engine", name) for name in ("reference", "truth")]
    for words in argv:
        assert words[words.index("--budget-s") + 1] == "60"
        assert words[words.index("--concurrency") + 1] == "2"
        assert words[words.index("--error") + 1] == "0.1"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("slo", [], "--slo"),
        ("requests", 9, "drop --requests"),
        ("budget", 9, "budget_s"),
        ("rate", 1, "both"),
    ],
)
def test_a_wrong_search_in_a_suite_is_told_with_its_table(key, value, said):
    with pytest.raises(WorkloadError, match=r"\[\[limit\]\] 1") as told:
        parse_suite(SUITE | {"limit": [SUITE["limit"][0] | {key: value}]}, "s.toml")
    assert said in str(told.value)


def test_a_suites_limits_stand_on_one_page_and_the_missing_ones_too(result, tmp_path, capsys):
    slots = schedule(parse_suite(SUITE, "s.toml"))
    folder = tmp_path / slots[0].id / "one-limit"
    folder.mkdir(parents=True)
    (folder / "limit.json").write_text(json.dumps(to_json(result)))
    assert limit_in(tmp_path / slots[0].id) == (f"{slots[0].id}/one-limit/report.html", result)
    assert limit_in(tmp_path / slots[1].id) is None
    assert report_limits(slots, tmp_path, "title") == [0, 4]
    page = (tmp_path / "limits.html").read_text()
    assert f'href="{slots[0].id}/one-limit/report.html"' in page
    assert "truth, users" in page
    assert "2.2 req/s" in capsys.readouterr().out
