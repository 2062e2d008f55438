"""What carries one key has one value, on the page and in the terminal, whatever was run."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from burstline.loadgen.capture.files import write_json
from burstline.measure.metrics.sessions import session_figures
from burstline.measure.metrics.steady_state import ColdStart
from burstline.measure.record.rundir import open_run
from burstline.measure.record.verdict import Grade, PercentileGrade
from burstline.measure.stats.figure import Estimate, measured
from burstline.measure.summarize import summarize_run
from burstline.reports.blocks import Block, Folded, Side, Table
from burstline.reports.model.comparison import Comparison, Contender, View, alone, view_of
from burstline.reports.model.contenders import comparison_of
from burstline.reports.number_format import SCALES
from burstline.reports.page.answer import answer
from burstline.reports.page.digest import banner, digest
from burstline.reports.page.estimate_tables import session_tables
from burstline.reports.page.page import render
from burstline.reports.sentences import say
from burstline.suites.execution import comparison_of_suite
from burstline.workloads.request import RequestKind
from tests.browser.kinds import _interrupted, _write_suite
from tests.measure.test_sessions import turns_of
from tests.reports import synthetic
from tests.reports.synthetic_sweep import finished_run

SLOS = ("ttft.p50<=1s", "ttft.p90<=1ms", "ttft<=15ms")
DIVISORS = {name: divisor for unit, steps in SCALES.items() if unit != "ns" for divisor, name in steps}
RATES = {"output tok/s": "tok/s", "input tok/s": "tok/s"}
Keyed = tuple[str, str, str]
"""Key, text, unit."""


def _embeddings(folder: Path) -> Comparison:
    run = open_run(finished_run(folder, "vllm", 60, output_tok=1).path)
    asked = replace(run.manifest.asked, request_kind=RequestKind.EMBED)
    run.save_manifest(replace(run.manifest, asked=asked))
    write_json(run.path / "summary.json", summarize_run(open_run(run.path)).to_json())
    return alone(view_of(open_run(run.path)))


def _sessions(folder: Path, n: int = 90) -> Comparison:
    """Each three requests are the turns of one session."""
    run = finished_run(folder, "vllm", n, concurrency=4)
    turns = turns_of([[(), (k,), (k + 1,)] for k in range(0, n, 3)])
    summary = replace(run.summary, sessions=session_figures(run.columns, turns))
    write_json(run.path / "summary.json", summary.to_json())
    return _one(open_run(run.path))


def _one(run) -> Comparison:
    return alone(view_of(run))


def _suite(folder: Path) -> Comparison:
    slots = [
        (engine, f"llama-2-7b, {name}", repeat, {"n": n, "speed": speed * (1 + 0.01 * repeat)})
        for name, n in (("short", 40), ("long", 60))
        for repeat in (1, 2)
        for engine, speed in (("vllm", 1.0), ("tgi", 1.3))
    ]
    _write_suite(folder, "suite", "A suite", slots)
    comparison = comparison_of_suite(folder)
    assert comparison is not None
    return comparison


def _repeats(folder: Path, *engines: str) -> Comparison:
    return comparison_of(
        [
            finished_run(folder, e, 60, speed=1 + 0.2 * len(e) + k / 99, seed=k, targets=SLOS[:2])
            for k in range(3)
            for e in engines
        ],
        folder,
        anyway=True,
    )


KINDS: dict[str, Callable[[Path], Comparison]] = {
    "burst": lambda folder: _one(synthetic.finished_run(folder, synthetic.records(n=700))),
    "failures": lambda folder: _one(synthetic.finished_run(folder, synthetic.records(n=120, n_failed=9))),
    "nothing": lambda folder: _one(synthetic.finished_run(folder, synthetic.records(n=20, n_failed=20))),
    "interrupted": lambda folder: _one(_interrupted(folder)),
    "open loop": lambda folder: _one(finished_run(folder, "vllm", 300, rate=20, targets=SLOS)),
    "closed loop": lambda folder: _one(finished_run(folder, "vllm", 200, concurrency=8, targets=SLOS)),
    "embeddings": _embeddings,
    "sessions": _sessions,
    "repeats": lambda folder: _repeats(folder, "vllm"),
    "comparison": lambda folder: _repeats(folder, "vllm", "lightllm"),
    "sweep": lambda folder: comparison_of(
        [finished_run(folder, e, 60, concurrency=k, targets=SLOS) for k in (2, 8) for e in ("vllm", "tgi")],
        folder,
    ),
    "suite": _suite,
}


RARE = {"nothing", "interrupted", "embeddings", "sessions"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in RARE)) for kind in KINDS],
)
def comparison(request, tmp_path_factory) -> Comparison:
    return KINDS[request.param](tmp_path_factory.mktemp("kind"))


@pytest.fixture(scope="module")
def page(comparison) -> str:
    return render(comparison)


class _Page(HTMLParser):
    """Every element with a key: the key, its text but for small print, its unit."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[list[str]] = []
        self.bare: list[str] = []
        self._open: list[tuple[str, dict[str, str]]] = []
        self._caption = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag in ("meta", "link", "br", "use", "path", "rect"):
            return
        given = {name: value or "" for name, value in attrs}
        self._open.append((tag, given))
        if "data-key" in given:
            self.found.append([given["data-key"], "", given.get("data-unit", "")])

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tags = [tag for tag, _ in self._open]
        if "caption" in tags:
            self._caption = data
        if "script" in tags or "small" in tags or "dt" in tags or "sup" in tags:
            return
        if any("data-key" in given for _, given in self._open):
            self.found[-1][1] += data
        elif tags[-1:] == ["td"] and self._open[-1][1].get("class", "").startswith("n") and data.strip("–"):
            self.bare.append(self._caption)


def of_blocks(blocks: list[Block]) -> Iterator[Keyed]:
    """What the terminal and a pull request show."""
    for block in blocks:
        match block:
            case Table():
                yield from ((c.key, c.text, c.unit) for row in block.rows for c in row.cells if c.key)
            case Side() | Folded():
                yield from of_blocks(list(block.blocks))


def value_of(text: str, unit: str) -> float | str:
    """The number in the stored unit, whatever unit it is shown in; the words where it is none."""
    words = text.replace("★", "").replace("✓", "").split()
    unit = unit or RATES.get(" ".join(words[1:]), " ".join(words[1:2]))
    first = words[0].rstrip("x") if words else "–"
    try:
        return float(f"{float(first.replace(',', '').replace('−', '-')) * DIVISORS.get(unit, 1.0):.9g}")
    except ValueError:
        return text


def keyed(comparison: Comparison, page: str) -> dict[str, set[float | str]]:
    values: dict[str, set[float | str]] = {}
    for key, text, unit in (*map(tuple, _Page(page).found), *of_blocks(digest(comparison))):
        values.setdefault(key, set()).add(value_of(text, unit))
    return values


def test_numbers_of_one_key_are_equal_on_the_page_and_in_the_terminal(comparison, page):
    values = keyed(comparison, page)
    assert len(values) > 5 or (comparison.run and not comparison.run.has_served)
    assert {key: found for key, found in values.items() if len(found) > 1} == {}


TABLES = (
    "Latency of the ",
    "The run as a whole",
    "Throughput",
    "Goodput",
    "Memory",
    "Side by side",
    "Every load",
)


def test_every_number_of_the_main_tables_has_a_key(page):
    assert [caption for caption in _Page(page).bare if caption.startswith(TABLES)] == []


SAID = re.compile(
    r"([\d.,]+)(?: output)? (?:tok|req)/s|([\d.]+)x (?:faster|slower|higher|lower)|half within ([\d.]+)"
)


def test_every_rate_ratio_and_median_of_the_first_sentences_and_captions_stands_in_a_table(page):
    """Loads such as 30 req/s are what was asked."""
    first = r'<div class="answer">.*?</div>|<dl class="tiles">.*?</dl>|<figcaption><h[23]>.*?</figcaption>'
    found = re.findall(first, page, re.DOTALL)
    assert found
    cells = {float(text.replace(",", "")) for text in re.findall(r"<td[^>]*>(?:★ )?(\d[\d.,]*)", page)}
    for html in found:
        bare = re.sub(r"<[^>]+>", "", html)
        bare = re.sub(r"kept up with [^;,]* req/s|\S+ (?:requests|tok)/s[^:;]*;", "", bare)
        for groups in SAID.findall(bare):
            value = float("".join(groups).rstrip(".,").replace(",", ""))
            assert any(math.isclose(value, cell * scale) for cell in cells for scale in (1, 1e-3, 1e3)), html


PERCENTILES = ("min", "p50", "p90", "p95", "p99", "max")


def test_the_laws_between_the_headline_figures_hold_on_what_is_printed(comparison, page):
    if comparison.run is None:
        pytest.skip("its runs' own pages are the other kinds")
    shown = {key: found.pop() for key, found in keyed(comparison, page).items()}
    known = {key: value for key, value in shown.items() if isinstance(value, float)}

    def no_more(less: str, more: str) -> None:
        a, b = known.get(less), known.get(more)
        if a is not None and b is not None:
            assert a <= b + _rounding(a) + _rounding(b), (less, a, more, b)

    for metric in ("ttft", "tpot", "itl", "e2e"):
        for low, high in pairwise(PERCENTILES):
            no_more(f"metrics.{metric}.{low}", f"metrics.{metric}.{high}")
    for p in PERCENTILES:
        no_more(f"metrics.ttft.{p}", f"metrics.e2e.{p}")
    no_more("goodput.requests_per_s", "throughput.requests_per_s")
    no_more("goodput.tok_per_s", "throughput.output_tok_per_s")
    total = (known.get(f"throughput.{way}_tok_per_s") for way in ("input", "output", "total"))
    given, made, both = (math.nan if each is None else each for each in total)
    if not math.isnan(both):
        assert both == pytest.approx(given + made, rel=0.01)
    rate, tokens = (
        known.get("throughput.requests_per_s"),
        comparison.run.summary.lengths.output_tok.served_mean,
    )
    if (
        rate
        and made
        and isinstance(tokens, Estimate)
        and say("rates.apart", tokens="1", by="")[:40] not in page
    ):
        assert rate * tokens.point == pytest.approx(made, rel=0.02)
    rate, lasted = known.get("throughput.requests_per_s"), known.get("window.length_s")
    if rate is not None and lasted is not None:
        assert rate * lasted <= comparison.run.summary.counts["ok"] * 1.01


def _rounding(value: float) -> float:
    """Half of the third digit."""
    return 0.5 * 10.0 ** (math.floor(math.log10(abs(value) or 1)) - 2)


def test_repeats_are_judged_by_their_figures_over_all_runs_and_are_not_nothing_to_compare(comparison, page):
    if len(comparison.views) != 3:
        pytest.skip("not the repeats")
    shown = banner(comparison)
    assert (shown.state, shown.tone) == ("REPEATS", "good")
    assert [target.result for target in shown.targets] == ["pass", "fail"]
    assert "NOTHING TO COMPARE" not in page


def test_an_embeddings_run_has_no_first_token(tmp_path):
    comparison = _embeddings(tmp_path)
    shown = answer(comparison)
    assert re.match(r"Served \S+ req/s, \S+ input tok/s; median latency ", shown.sentence)
    page = render(comparison)
    assert "first token" not in shown.sentence
    assert 'id="ecdf-ttft"' not in page
    assert 'data-key="metrics.ttft.p50"' not in page.split("<details")[0]


def test_the_interval_over_several_runs_includes_what_late_reading_may_have_moved(tmp_path):
    runs = _repeats(tmp_path, "vllm").cases[0].contenders[0]
    moved = PercentileGrade(Grade.OK, 0.0, 0.5, None)
    views = (
        *runs.views[1:],
        View(runs.views[0].run, replace(runs.views[0].summary, grades={"ttft": {"p50": moved}})),
    )
    before, after = (each.figure("metrics", "ttft", "p50") for each in (runs, Contender("vllm", views)))
    assert (after.point, after.high) == (before.point, pytest.approx(before.high + 0.5))


def test_slow_first_requests_that_change_no_printed_number_are_not_named():
    start = ColdStart(3, 0.05, 0.1, 0.2, np.arange(3))
    printed, rest = ({"p50": measured(each, "s", "")} for each in (0.10002, 0.10001))
    assert start.counted(printed, rest, 3) == (False, ())


@pytest.mark.parametrize(("n", "who"), [(3, "They move"), (2, "2 of them are measured: this moves")])
def test_slow_first_requests_say_how_many_of_them_are_measured(n, who):
    """Their wait counts from the send, TTFT from when each was due: the two medians do not stand together."""
    start = ColdStart(3, 0.05, 0.1, 0.2, np.arange(3))
    printed, rest = ({"p50": measured(each, "s", "")} for each in (0.120, 0.110))
    _, (cold,) = start.counted(printed, rest, n)
    assert cold.text == f"{start.size}. {who} TTFT p50 from 110 ms to 120 ms."
    assert "100 ms" not in cold.text
    assert "(median 100 ms, from the send)" in start.left_out().text


@pytest.mark.parametrize(
    ("after", "who"), [(0, "The first 3 requests"), (8, "The 3 requests after the first 8")]
)
def test_slow_first_requests_of_a_closed_loop_are_those_after_its_first_wave(after, who):
    start = ColdStart(3, 0.05, 0.1, 0.2, np.arange(3), after)
    assert start.size == f"{who} waited 50 ms longer for their first token than the rest"


@pytest.mark.parametrize(("n", "lacking"), [(12, ("p50", "p90", "p99")), (90, ("p90", "p99"))])
def test_what_no_turn_has_is_named_once_and_no_column_of_dashes(n: int, lacking: tuple[str, ...], tmp_path):
    by_turn = session_tables(_sessions(tmp_path, n).cases[0].contenders[0].views[0])[1]
    assert all(
        any(cell.text != "–" for cell in own)
        for own in zip(*(row.cells for row in by_turn.rows), strict=True)
    )
    shown = {column.title.partition(" (")[0] for column in by_turn.columns}
    for p in ("p50", "p90", "p99"):
        assert (f"TTFT {p}" in by_turn.remark) == (p in lacking) != (f"TTFT {p}" in shown)
