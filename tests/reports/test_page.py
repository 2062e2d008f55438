import json
import re
import shutil
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest

from burstline.bench.conclusion import write_report
from burstline.loadgen.capture.files import write_json
from burstline.measure.record import tables
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.record import Outcome
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.summary import Goodput, Stationarity, Summary
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import Reason, SloResult, State, Verdict
from burstline.measure.stats.figure import Absent, Estimate, Result, measured
from burstline.measure.summarize import summarize_run
from burstline.measure.verdict.judge import caveats
from burstline.reports.blocks import Note
from burstline.reports.figures import drawing
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.number_format import number
from burstline.reports.page import first_screen, sections
from burstline.reports.page.answer import answer
from burstline.reports.page.bottleneck import limited_by, next_by
from burstline.reports.page.digest import instrument_error, run_banner
from burstline.reports.page.files import figure_files
from burstline.reports.page.page import _json_in_html, coded
from burstline.servers.host.telemetry import Row
from burstline.servers.identity import Identity
from burstline.workloads.spec import LoadSpec
from tests.measure.making import ok
from tests.reports import synthetic
from tests.reports.pages import answer_of, page_of
from tests.reports.synthetic_sweep import finished_run

DRAWN = [pytest.param(name, marks=pytest.mark.drawn) for name in ("burst", "metal")]
RUNS = (*DRAWN, "lossy", "hopeless", "single")


class Page(HTMLParser):
    """The elements of a page: (tag, attributes), and the text of every <script> by its id."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found))
        if tag == "script":
            self._script = found.get("id", "own")

    def handle_data(self, data):
        if self._script is not None:
            self.scripts[self._script] = data
            self._script = None

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest) -> Run:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def html(run: Run) -> str:
    return page_of(run)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


@pytest.mark.slow
@pytest.mark.drawn
def test_the_same_run_gives_the_same_bytes(metal):
    assert page_of(open_run(metal.path)) == page_of(metal)


def test_every_link_inside_the_page_leads_somewhere(page):
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    targets = {a["href"][1:] for a in page.all("a") + page.all("use") if a.get("href", "").startswith("#")}
    assert targets
    assert targets <= ids


def test_no_id_occurs_twice(page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_nothing_is_loaded_from_anywhere(html, page):
    assert not [a for _, a in page.elements if "src" in a]
    assert {a["href"] for a in page.all("link")} == {"data:,"}
    assert not re.search(r"@import|url\((?!#)", html)
    outside = set(re.findall(r'(?:xlink:)?href="(?!#|data:)([^"]*)"', html))
    assert not outside


def test_every_figure_says_what_it_shows_and_has_its_numbers(html):
    figures = re.findall(r'<figure class="plot".*?</figure>', html, re.DOTALL)
    assert html.count("<svg") == sum(figure.count('<svg role="img"') for figure in figures)
    for figure in figures:
        assert re.search(r"<title[^>]*>[^<]+</title><desc[^>]*>[^<]+</desc>", figure)
        elsewhere = re.search(r'data-table="([^"]+)"', figure)
        assert "<table" in figure or f'<table id="{elsewhere[1]}"' in html


def test_every_table_has_a_caption_and_scopes(html):
    for table in re.findall(r"<table.*?</table>", html, re.DOTALL):
        assert re.search(r"<caption>[^<]+</caption>", table)
        assert not re.search(r"<th\b(?![^>]*scope=)", table)
        for row in re.findall(r"<tr[ >].*?</tr>", table.split("<tbody>")[1], re.DOTALL):
            assert row.count('scope="row"') == 1


def test_colours_come_from_the_theme_alone(html):
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        assert not re.search(r"#[0-9a-fA-F]{6}", re.sub(r'href="[^"]*"|url\([^)]*\)', "", svg))


def test_the_page_is_small_and_its_script_short(html, page):
    assert len(html.encode()) < 3_000_000
    own = page.scripts["own"].strip().splitlines()
    assert len(own) <= 200


def test_the_summary_is_inside_as_it_stands_on_disk(run, page):
    assert json.loads(page.scripts["summary"]) == json.loads(json.dumps(run.summary.to_json()))


def test_a_failure_shows_its_words_escaped_and_links_to_its_record(lossy):
    html = page_of(lossy)
    assert "queue is full &amp; &lt;busy&gt;" in html
    assert "9 of 120 requests failed." in html
    for kind in ("timeout", "http_503", "reset"):
        assert re.search(rf'<th scope="row">{kind}</th>.*?<a href="#r\d+">', html)


def test_a_run_without_successes_or_telemetry_says_so(hopeless, single):
    page = page_of(hopeless)
    assert re.search(
        r"No request succeeded: all 20 requests failed \(7 [\w ]+, 7 [\w ]+, 6 [\w ]+\); first error: ", page
    )
    assert "How fast is it?" not in page
    assert "How are the latencies distributed?" not in page
    assert "Not reported by the engine, or not recorded in this run: Memory, KV cache in use." in page_of(
        single
    )


@pytest.mark.slow
def test_a_run_whose_summary_was_never_written_is_still_a_page(tmp_path):
    run = synthetic.finished_run(tmp_path, synthetic.records(n=12))
    html = page_of(run)
    (run.path / "summary.json").unlink()
    assert page_of(open_run(run.path)) == html


def test_requests_spread_over_time_are_drawn_over_time(tmp_path):
    rows = [replace(r, due_ns=k * 1_000_000) for k, r in enumerate(synthetic.records(n=12))]
    assert "Latency along the queue" not in page_of(synthetic.finished_run(tmp_path, rows))


@pytest.mark.drawn
@pytest.mark.parametrize(("n", "n_failed", "output_tok"), [(1, 0, 1), (2, 1, 16)])
def test_a_small_run_is_drawn_without_a_warning(n, n_failed, output_tok, tmp_path, capfd, caplog):
    """Python's own are errors in each test; matplotlib also logs."""
    page_of(
        synthetic.finished_run(tmp_path, synthetic.records(n=n, n_failed=n_failed, output_tok=output_tok))
    )
    assert capfd.readouterr().err == ""
    assert not caplog.records


@pytest.mark.parametrize(
    ("targets", "is_told"),
    [
        ((), True),
        (("ttft.p90<=1s",), True),
        (("attainment>=95%",), False),
        (("ttft.p90<=1s", "attainment>=99%"), False),
        (("goodput_per_s>=10",), False),
    ],
)
def test_goodput_is_for_information_unless_an_slo_on_it_was_judged(targets, is_told):
    goodput = Goodput(attainment=measured(1.0, "1", "", 80), criteria=("ttft<=100ms",))
    judged = tuple(SloResult(text, Result.PASS, "", measured(1.0, "1", "")) for text in targets)
    summary = Summary({"planned": 80, "ok": 80}, {}, Verdict(State.VALID), goodput=goodput, targets=judged)
    line = run_banner(summary).targets[-1]
    assert line.result == "goodput"
    assert ("attainment" in line.reason) == is_told


@pytest.mark.parametrize("state", list(State))
def test_the_banner_shows_state_reasons_and_advice(state, lossy):
    reason = Reason("c", "Something <odd>.", "Do this.")
    shown = run_banner(Summary(counts={}, metrics={}, verdict=Verdict(State(state), (reason,))))
    assert (shown.state, shown.reasons) == (state, (replace(reason, advice="Next: do this."),))
    assert shown.tone in ("good", "warn", "bad")


def test_commands_in_a_sentence_are_set_as_code_and_the_rest_is_escaped():
    assert coded("Run `a <b>` at 5 ms & see.") == "Run <code>a &lt;b&gt;</code> at 5 ms &amp; see."


def test_an_slo_that_the_fastest_request_misses_at_a_light_load_is_called_too_tight(tmp_path):
    run = finished_run(tmp_path, "vllm", 200, rate=20, targets=("ttft.p50<=1ms",))
    (limit,) = (line for line in answer_of(run, run.summary).details if "Next: " in line)
    assert re.search(
        r"Next: loosen TTFT p50 ≤ 1 ms, .*: TTFT was [\d.]+ ms at the lowest and [\d.]+ ms", limit
    )
    assert "burstline limit" not in limit


def test_json_cannot_end_the_script_it_stands_in():
    text = _json_in_html({"a": "</script><script>alert(1)</script>"})
    assert "<" not in text
    assert json.loads(text) == {"a": "</script><script>alert(1)</script>"}


def test_what_a_server_says_of_itself_cannot_become_markup(tmp_path):
    identity = Identity("x", version="<img src=x onerror=alert(1)>")
    run = RunDir.create(tmp_path, Manifest(engine="vllm", workload="burst", identity=identity))
    run.save("records.parquet", [tables.record_table(synthetic.records(n=2))])
    run.save_manifest(replace(run.manifest, status="complete"))
    write_json(run.path / "summary.json", summarize_run(open_run(run.path)).to_json())
    page = page_of(open_run(run.path))
    assert "<img" not in page
    assert "&lt;img" in page


GROUPS = (
    *("throughput", "goodput", "concurrency", "stalls", "memory", "burst", "instrument", "conservation"),
    *("schedule", "window", "stationarity"),
)


@pytest.fixture(scope="module")
def steady(tmp_path_factory) -> Run:
    """A hundred requests, twenty a second."""
    return finished_run(tmp_path_factory.mktemp("steady"), "vllm", 100, rate=20, targets=("ttft<=1s",))


def test_every_number_on_the_page_has_a_proper_name(lossy, steady):
    sections_of = [getattr(run.summary, group) for run in (lossy, steady) for group in GROUPS]
    rows = [row for section in sections_of for row in section.rows()]
    assert len(rows) > 100
    assert not [row.name for row in rows if not row.title or "_" in row.title]


@pytest.mark.drawn
def test_an_open_loops_warm_up_and_drain_are_greyed_and_a_bursts_are_not(lossy, steady):
    view = view_of(steady)
    n_warm_up, start_s = measured(20, "requests", ""), measured(1.0, "s", "")
    window = replace(view.summary.window, n_warm_up=n_warm_up, start_s=start_s)
    summary = replace(view.summary, window=window)
    timeline, *_ = sections.when(replace(view, summary=summary))
    assert {"warm-up</text>", "drain</text>"} <= texts(timeline)
    assert "The grey parts are not measured" in timeline.explained
    timeline, *_ = sections.when(view_of(lossy))
    assert "drain</text>" not in texts(timeline)
    assert "last first token</text>" in texts(timeline)


def test_a_drift_of_tpot_is_not_one_of_ttft(steady):
    """A run that is NOT-STATIONARY for another reason than its TTFT."""
    drifting = Reason.of("drifting", metric="TPOT", change=0.4, at_s=None)
    figures = {"ttft_trend_p": 0.8, "ttft_change_fraction": -0.003, "tpot_trend_p": 1e-4}
    steadiness = Stationarity(**{name: measured(value, "1", "") for name, value in figures.items()})
    verdict = Verdict(State.NOT_STATIONARY, (drifting,))
    view = replace(view_of(steady), summary=replace(steady.summary, verdict=verdict, stationarity=steadiness))
    assert first_screen._trend(view, "TTFT") == "TTFT shows no drift after the warm-up."


@pytest.mark.parametrize("n", [0, 5, 30])
def test_a_window_in_which_few_successes_ended_says_what_the_whole_run_gave(steady, n):
    """The whole run is from the first send to the last end, here of successes alone."""
    view = view_of(steady)
    c, ok = view.columns, view.summary.counts["ok"]
    rate = Estimate(float(n), None, None, None, n, "1/s")
    no_time = replace(view.summary.metrics["tpot"], p50=Estimate(0.0, None, None, None, n, "s"))
    summary = replace(
        view.summary,
        throughput=replace(view.summary.throughput, requests_per_s=rate),
        metrics={**view.summary.metrics, "tpot": no_time},
    )
    said = answer(alone(replace(view, summary=summary))).sentence
    assert f"Served {number(n)} req/s" in said  # a rate may be 0, a latency of 0 was not measured
    assert "TPOT" not in said
    lasted_s = float(np.nanmax(c.last_s) - np.nanmin(c.sent_s))
    whole = (
        f"{number(ok / lasted_s)} req/s · {number(float(c.output_tok[c.ok].sum()) / lasted_s)} output tok/s"
    )
    told = f"Of the {ok} requests that succeeded, {n} ended in the "
    is_few = n < 0.1 * ok
    assert (told in said) == is_few
    assert (f"over the whole run the rates were {whole}." in said) == is_few


@pytest.mark.parametrize(
    ("p", "change", "shape", "finding"),
    [
        (0.8, 0.05, "flat", "TTFT shows no drift after the warm-up."),
        (0.01, 0.05, "flat", "TTFT shows no drift after the warm-up."),
        (0.01, 1.95, "flat", "TTFT rose after the warm-up."),
        (0.01, -0.5, "flat", "TTFT fell after the warm-up."),
        (0.108, 1.95, "flat", ""),  # by much, and not for certain
        (0.8, -0.003, "hump", ""),  # no trend, but no steady state
    ],
)
def test_no_drift_is_said_only_where_the_latency_stayed_as_it_was(steady, p, change, shape, finding):
    """A hump's middle half takes 10 s longer."""
    view = view_of(steady)
    figures = {"ttft_trend_p": measured(p, "1", ""), "ttft_change_fraction": measured(change, "1", "")}
    view = replace(view, summary=replace(view.summary, stationarity=Stationarity(**figures)))
    if shape == "hump":
        c = view.counted
        is_middle = np.abs(np.arange(len(c)) / len(c) - 0.5) < 0.25
        view.__dict__["counted"] = replace(c, first_s=c.first_s + 10 * is_middle)
    assert first_screen._trend(view, "TTFT") == finding


def texts(plot) -> set[str]:
    return set(re.findall(r"[^>]+</text>", plot.drawings[0].body))


def test_an_interrupted_run_says_so_first_and_its_banner_is_not_green(lossy):
    interrupted = Reason("interrupted", "The run was interrupted.", "Run it again.")
    summary = replace(lossy.summary, verdict=Verdict(State.VALID, (), (interrupted,)))
    assert run_banner(summary).tone == "warn"
    assert answer_of(lossy, summary).details[0].startswith("The run was interrupted after 111 of")


def test_what_an_interruption_cut_off_has_not_failed(lossy):
    interrupted = Reason("interrupted", "The run was interrupted.", "Run it again.")
    counts = {"planned": 300, "ok": 151, "cancelled": 149}
    summary = replace(lossy.summary, counts=counts, verdict=Verdict(State.VALID, (), (interrupted,)))
    told = answer_of(lossy, summary)
    assert "it cut off 149 (counted as infinitely late: 0)" in told.details[0], "its records have none"
    assert not any("failed" in words for words in (told.sentence, *told.details))
    shown = run_banner(summary)
    assert shown.state == "INTERRUPTED"
    assert not shown.reasons


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ((58, 59), "it cut off 2 (counted as infinitely late: 2)"),
        (
            (3, 59),
            "it cut off 2 (counted as infinitely late: 1)",
        ),  # 3 was due before the first wave had ended
        ((3,), "it cut off 1 (counted as infinitely late: 0)"),
        ((59,), "it cut off 1 (counted as infinitely late: 1)"),
    ],
)
def test_an_interrupted_loop_says_how_many_of_those_cut_off_count(tmp_path, cut, words):
    rows, free = [], [0.0] * 4
    for k in range(60):
        slot = min(range(4), key=free.__getitem__)
        row = replace(ok(k, free[slot] + 0.1, [0.1]), due_ns=round(free[slot] * 1e9))
        rows.append(replace(row, dispatched_ns=row.due_ns, sent_ns=row.due_ns))
        free[slot] += 9.0 if k in cut else 0.2 + 0.001 * k
        if k in cut:
            how = {
                "outcome": "cancelled",
                "token_ns": [],
                "token_n": [],
                "read_lag_ns": [],
                "read_error_ns": [],
            }
            rows[-1] = replace(rows[-1], **how, closed_ns=4_000_000_000)
    manifest = Manifest(engine="vllm", workload="loop", asked=LoadSpec(requests=60, concurrency=4))
    run = RunDir.create(tmp_path, manifest)
    run.save("records.parquet", [tables.record_table(rows)])
    run.save_manifest(replace(run.manifest, status="interrupted"))
    stopped = open_run(run.path)
    assert words in " ".join(answer_of(stopped, summarize_run(stopped)).details)


def test_a_load_too_short_to_judge_says_so_in_place_of_valid(lossy):
    at = {"others_cpu_fraction": Absent("the load was too short to watch", "too-short")}
    summary = replace(lossy.summary, instrument=replace(lossy.summary.instrument, **at))
    warned = tuple(caveats(summary, lossy.manifest))
    assert [each.code for each in warned if each.code == "too-short"]
    shown = run_banner(replace(summary, verdict=Verdict(State.VALID, (), warned)))
    assert (shown.state, shown.tone) == ("TOO SHORT", "warn")
    judged = run_banner(replace(summary, verdict=Verdict(State.DISTURBED, (), warned)))
    assert judged.state == "DISTURBED"


@pytest.mark.drawn
def test_a_server_whose_memory_is_not_known_is_named_beside_the_clients(lossy):
    why = "the server is not watched: docker-proxy (process 7) passes its requests on"
    rows = [Row(k * 10**8, "client", "rss_bytes", 5e7) for k in range(40)]
    run = open_run(lossy.path)
    run.watched = Telemetry.of(tables.telemetry_table([*rows, Row(0, "server", "*", None, why)]))
    memory = replace(lossy.summary.memory, server_peak_bytes=Absent(why))
    run.summary = replace(lossy.summary, memory=memory)
    plot, *notes = sections.when(view_of(run))
    assert "client</text>" in {text.strip() for text in re.findall(r"[^>]+</text>", plot.drawings[0].body)}
    assert f"The memory of the server's processes is not known: {why}." in [note.text for note in notes]


@pytest.mark.drawn
def test_a_burst_that_was_cut_off_marks_no_last_first_token(lossy):
    summary = replace(lossy.summary, burst=replace(lossy.summary.burst, drain_s=Absent("cut off")))
    timeline, *_ = sections.when(replace(view_of(lossy), summary=summary))
    assert "last first token</text>" not in texts(timeline)


def test_a_failed_run_says_so_before_its_numbers(lossy):
    verdict = Verdict(State.FAILED, (Reason("too-many-failures", "9", ""),))
    told = answer_of(lossy, replace(lossy.summary, verdict=verdict))
    assert told.sentence.startswith("9 of 120 requests failed (")
    assert told.details[0].startswith("Served ")


@pytest.mark.parametrize("code", ["limit.concurrency", "limit.concurrency-unwatched", "limit.pauses"])
def test_where_a_latency_slo_is_missed_no_higher_load_is_advised(code, tmp_path, monkeypatch):
    monkeypatch.setattr("burstline.reports.page.bottleneck.limited_by", lambda *_, **__: (code, {}))
    view = view_of(finished_run(tmp_path, "vllm", 200, rate=20, targets=("ttft.p50<=1ms",)))
    assert next_by(view) == (
        "Next: lower the load until the SLOs hold: `burstline limit` finds the highest that does."
    )
    view = replace(view, summary=replace(view.summary, targets=()))
    assert next_by(view).startswith("Next: raise --concurrency")


def test_where_the_log_says_why_nothing_was_served_the_page_says_so_first(hopeless, tmp_path):
    copy = open_run(shutil.copytree(hopeless.path, tmp_path / "run"))
    log = "(EngineCore pid=7) ERROR 11-22 08:01:44 [core.py:710] MemoryError: no room"
    (copy.path / "server.log").write_text(log)
    told = answer_of(open_run(copy.path), hopeless.summary)
    assert told.sentence.startswith("No request succeeded: the server's log says MemoryError: no room; all")


def test_a_missed_slo_is_in_no_green_banner(steady):
    assert run_banner(steady.summary).tone == "good"
    missed = SloResult("ttft.p99<=1ms", Result.FAIL, "", measured(0.02, "s", ""))
    shown = run_banner(replace(steady.summary, targets=(missed,)))
    assert (shown.state, shown.tone) == ("VALID, SLO MISSED", "warn")
    assert shown.sentence.endswith("SLOs: 1 missed.")


def test_failed_requests_are_counted_once_in_the_banner(lossy):
    verdict = Verdict(State.FAILED, (Reason("too-many-failures", "9", ""),), (Reason("failures", "9", ""),))
    assert [reason.code for reason in run_banner(replace(lossy.summary, verdict=verdict)).reasons] == [
        "too-many-failures"
    ]


def test_the_roofline_ends_the_sentence_on_what_limited_the_run(metal):
    told = answer_of(metal, metal.summary).details[0]
    used = r"these are \w+-bound: M[FB]U \d+% of the specified (peak|bandwidth), \d+% of what"
    assert re.search(rf"{used} these shapes reach; the largest part is .+%\)\. Next: ", told)
    phases = {"steps that include prefill": metal.summary.roofline.phases[0]}
    phases["decode-only steps"] = metal.summary.roofline.phases[1]
    most = max(phases, key=lambda kind: phases[kind].seconds)
    assert re.search(rf"\. \d+% of the engine's time went to {most}; ", told)


def test_the_page_says_how_the_canary_checked_the_bounds_and_that_it_had_no_time_to(lossy):
    def shown(p99, beyond):
        client = replace(lossy.summary.instrument, canary_p99_s=p99, canary_beyond_p99_s=beyond)
        return instrument_error(client)

    p99 = measured(70e-6, "s", "", 600)
    told = "streamed 600 events with known times during the load. 99% were measured "
    right = "and at most 70.0 µs off."
    assert f"{told}within these bounds {right}" in shown(p99, measured(0.0, "s", "", 600))
    assert f"{told}at most 5.00 ms outside them {right}" in shown(p99, measured(0.005, "s", "", 600))
    exact = measured(2e-7, "s", "", 600)
    assert f"{told}at most 1 µs outside them and at most 1 µs off." in shown(exact, exact)
    short = Absent("not measured: the run was too short", "too-short")
    assert "The run was too short for the canary to check this." in shown(short, short)
    assert "canary" not in shown(Absent("no canary ran", "no-canary"), Absent("no canary ran", "no-canary"))


def test_a_burst_that_only_timed_out_does_not_say_that_no_token_came(tmp_path):
    rows = [replace(r, outcome=Outcome.TIMEOUT) for r in synthetic.records(n=12)]
    assert first_screen.pictures(view_of(synthetic.finished_run(tmp_path, rows))) == []


def test_ttft_is_split_by_the_times_that_replies_tell(tmp_path):
    told = {"server_queue_s": 0.02, "server_prefill_s": 0.03, "server_first_token_s": 0.06}
    rows = [replace(row, **told) for row in synthetic.records(n=12)]
    html = page_of(synthetic.finished_run(tmp_path / "told", rows, watched=False))
    figure = html.split('id="time-split"')[1].split("</figure>")[0]
    shown = re.findall(r'row">([^<]+)<', figure)
    assert shown == ["queue", "prefill", "network, HTTP, client", "decode"]
    silent = page_of(synthetic.finished_run(tmp_path / "silent", synthetic.records(n=12), watched=False))
    figure = silent.split('id="time-split"')[1].split("</figure>")[0]
    assert re.findall(r'row">([^<]+)<', figure) == ["queue + prefill", "decode"]


@pytest.mark.drawn
def test_a_figure_that_fails_leaves_a_note_and_the_page_is_written(lossy, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("Failed to process <string> with tex")

    folder = shutil.copytree(lossy.path, tmp_path / "run")
    monkeypatch.setattr(drawing, "escape", escape)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fails)
    write_report(open_run(folder))
    html = (folder / "report.html").read_text("utf-8")
    notes = " ".join(re.findall(r'<text y="\d+">(.*?)</text>', html))
    why = "RuntimeError: Failed to process &lt;string&gt; with tex"
    assert f"This figure could not be drawn: {why}" in notes
    assert (folder / "summary.json").is_file()
    assert all(name.endswith(".svg") for name in figure_files(alone(view_of(open_run(folder)))))


def test_a_burst_that_no_request_waited_in_has_no_queue(tmp_path):
    """Sixteen requests whose first tokens come at once, and the same one after another."""
    rows = synthetic.records(n=16, max_seqs=64)
    even = [replace(r, token_ns=[10**9 + 3 * 10**6 * r.index + at for at in range(64)]) for r in rows]
    late = [replace(r, token_ns=[10**9 * (r.index + 1) + at for at in range(64)]) for r in rows]
    findings = [
        first_screen.pictures(view_of(synthetic.finished_run(tmp_path / name, rows)))[0].finding
        for name, rows in (("even", even), ("late", late))
    ]
    assert findings == ["", "TTFT rises along the queue: later requests waited for earlier ones."]


@pytest.mark.parametrize("kind", ["for a time", "interrupted"])
def test_requests_that_were_not_needed_or_left_unsent_are_no_failures(tmp_path, kind):
    """Of 40, the load needed 30; or Ctrl-C came after them."""
    nothing = {name: [] for name in ("token_ns", "token_n", "read_lag_ns", "read_error_ns")} | dict.fromkeys(
        ("answer_ns", "headers_ns", "sent_ns", "dispatched_ns", "output_tok")
    )
    rows = synthetic.records(n=40)
    unsent = [replace(row, outcome=Outcome.NOT_SENT, **nothing) for row in rows[30:]]
    run = open_run(synthetic.finished_run(tmp_path, rows[:30] + unsent).path)
    by_time = replace(run.manifest.asked, concurrency=4, duration_s=12.0)
    facts = {"asked": by_time} if kind == "for a time" else {"status": "interrupted"}
    run.save_manifest(replace(run.manifest, **facts))
    write_json(run.path / "summary.json", summarize_run(open_run(run.path)).to_json())
    view = view_of(open_run(run.path))
    assert sections.failures(view)[0] == Note("No request failed.")
    assert len(view.needed) == 30
    assert "What failed?" not in page_of(open_run(run.path))


def test_what_an_interruption_left_unsent_takes_no_limit_away(tmp_path):
    """A server that kept up with an open loop did so until Ctrl-C, too."""
    view = view_of(finished_run(tmp_path, "vllm", 150, rate=20))
    assert limited_by(view.summary, view.manifest)[0] == "limit.load"
    told = replace(view.summary.verdict, warnings=(Reason("interrupted", "The run was interrupted.", ""),))
    cut = replace(view.summary, counts={"planned": 400, "ok": 150, "not_sent": 250}, verdict=told)
    assert limited_by(cut, view.manifest)[0] == "limit.load"
    lost = replace(view.summary, counts={"planned": 400, "ok": 150, "not_sent": 250})
    assert limited_by(lost, view.manifest)[0] != "limit.load"


def test_stalls_are_told_at_the_percentile_where_they_take_most_of_the_time(tmp_path):
    """A token each 10 ms for 30 requests; the last of them wait 1 s before their last token."""

    def shown(name, n_stalled):
        rows = synthetic.records(n=30, max_seqs=64)
        late = [range(64 - (r.index < n_stalled)) for r in rows]
        rows = [
            replace(r, token_ns=[10**9 + 10**7 * k for k in own] + [3 * 10**9] * (64 - len(own)))
            for r, own in zip(rows, late, strict=True)
        ]
        plots = first_screen.pictures(view_of(synthetic.finished_run(tmp_path / name, rows)))
        return next(plot.finding for plot in plots if plot.id == "time-split")

    assert "stalls" not in shown("even", 0)
    assert shown("all", 30).endswith("; stalls between tokens are 46% at p50.")


@pytest.mark.parametrize("n_done", [0, 2, 11, 15, 19, 60])
def test_a_run_that_was_stopped_at_any_moment_has_a_page(n_done, tmp_path):
    """All that succeeded may lie in the warm-up."""
    done = finished_run(tmp_path, "vllm", 100, rate=20, speed=4, n_failed=100 - n_done)
    rows = done.record_table
    ended = ["ok"] * n_done + ["cancelled"] * min(15, 100 - n_done) + ["not_sent"] * (85 - n_done)
    k = rows.schema.get_field_index("outcome")
    folder = open_run(done.path)
    field = rows.schema.field(k)
    folder.save("records.parquet", [rows.set_column(k, field, pa.array(ended, field.type))])
    folder.save_manifest(replace(folder.manifest, status="interrupted"))
    write_json(done.path / "summary.json", summarize_run(open_run(done.path)).to_json())
    stopped = open_run(done.path)
    html, told = page_of(stopped), answer_of(stopped, stopped.summary).sentence
    if n_done == 0:
        assert told == "No request succeeded: the run was interrupted before a request had ended."
    elif n_done <= 15:
        assert told == "There are no figures: no request after the warm-up succeeded."
    elif n_done == 19:
        assert told.startswith("There are no figures: 15 of the 17 measured requests did not succeed")
    else:
        assert told.startswith("Median first token ")
    assert ("no request succeeded" in html) == (n_done == 0)
