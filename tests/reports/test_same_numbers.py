"""Each printed number is the same in the JSON, on the page, in the terminal, in Markdown and in exports."""

import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pandas as pd
import pytest

from burstline.cli import main
from burstline.measure.metrics.definitions import METRICS
from burstline.measure.record.rundir import Run, open_run
from burstline.measure.record.summary import Section, Summary
from burstline.measure.stats.figure import Absent, Estimate, Figure
from burstline.reports.number_format import SCALES
from burstline.reports.page.sweep_words import slos_words
from tests.reports.pages import page_of as made_page
from tests.reports.synthetic_sweep import finished_run

DIVISORS = {name: divisor for unit, steps in SCALES.items() if unit != "ns" for divisor, name in steps}
LATENCIES = {METRICS[key].title: key for key in ("ttft", "tpot", "itl", "e2e")}
PERCENTILES = ("p50", "p90", "p95", "p99", "mean")
Shown = dict[tuple[str, str], tuple[str, str, str]]
"""Number, unit and interval as they are printed, by row and column."""


@pytest.fixture(scope="module")
def open_loop(tmp_path_factory) -> Run:
    goals = ("ttft.p50<=1s", "ttft.p99<=1ms", "ttft<=15ms")
    return finished_run(tmp_path_factory.mktemp("open"), "vllm", 150, rate=20, targets=goals)


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> Run:
    """A burst of 120 requests, of which nine failed."""
    return finished_run(tmp_path_factory.mktemp("failing"), "vllm", 120, n_failed=9)


@pytest.fixture(params=["failing", "open_loop"])
def run(request) -> Run:
    return request.getfixturevalue(request.param)


@cache
def page_of(path: Path) -> str:
    return made_page(open_run(path))


def printed(argv: list[str], capsys) -> str:
    capsys.readouterr()
    main(argv)
    return capsys.readouterr().out


# Every table of a format, as rows of (text, detail) by caption or heading.


def html_tables(html: str) -> Iterator[tuple[str, list[list[tuple[str, str]]]]]:
    for source in re.findall(r"<table.*?</table>", html, re.DOTALL):
        table = ET.fromstring(source.replace("&nbsp;", "\u00a0"))
        yield (
            "".join(table.find("caption").itertext()),
            [[cell_of(cell) for cell in row] for row in table.iter("tr")],
        )


def cell_of(cell: ET.Element) -> tuple[str, str]:
    details = [child for child in cell if child.tag in ("small", "sup")]
    detail = "".join("".join(child.itertext()) for child in details if child.tag == "small")
    for child in details:
        child.text, kept = "", child.tail
        child[:] = []
        child.tail = kept
    return clean("".join(cell.itertext())), detail


def clean(text: str) -> str:
    return re.sub(r"[↑↓\u00a0]", "", text).strip()


def markdown_tables(text: str) -> Iterator[list[list[str]]]:
    for part in text.split("\n\n"):
        if part.startswith("|"):
            lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in part.splitlines()]
            yield [[clean(cell) for cell in line] for k, line in enumerate(lines) if k != 1]


VALUE = r"(–[⁰¹²³⁴⁵⁶⁷⁸⁹]*|∞|−?[\d,]+(?:\.\d+)?)(?:\s+\(\d\))?(?:\s+([\[(][^\])]+[\])]))?"


def latency_rows(lines: list[str], columns: list[str]) -> Shown:
    """Rows such as `TTFT ↓  s  13.7  [13.2, 14.1]  25.7 ...`, whatever stands between the cells.

    A table wider than 120 letters stands in parts, each with its own line of titles.
    """
    found: Shown = {}
    titles: list[str] = []
    for line in lines:
        if re.match(r"\|? ?Latency\b", line):
            titles = re.findall(r"\bp\d+\b|mean|SD|min|max", line)
        for title in (*LATENCIES, "E2E interactivity"):
            if match := re.match(rf"\|?\s*{title}(?:\u00a0|\s)*[↓↑]\s*\|?\s+(s|ms|µs|tok/s)\s+\|?(.*)", line):
                values = re.findall(VALUE, match[2].replace("|", " "))
                for column, (value, interval) in zip(titles, values, strict=False):
                    if column not in columns:
                        continue
                    found[title, column] = (value[:1] if value[0] == "–" else value, match[1], interval)
    return found


def latencies_in_html(html: str) -> Shown:
    rows = next(rows for caption, rows in html_tables(html) if caption.startswith("Latency of the "))
    head, *body = rows
    return {
        (row[0][0], title): (text, row[1][0], detail)
        for row in body
        for (title, _), (text, detail) in zip(head, row, strict=True)
        if title in PERCENTILES
    }


def agrees(shown: str, figure: float, unit: str = "") -> bool:
    """Whether the printed number is this one, rounded to the digits that were printed."""
    value = figure / DIVISORS.get(unit, 1.0)
    if shown in ("∞", "−∞") or math.isinf(value):
        return shown == ("∞" if value > 0 else "−∞")
    number = float(shown.replace(",", "").replace("−", "-"))
    decimals = len(shown.partition(".")[2])
    step = 10.0**-decimals if decimals else 10.0 ** max(math.floor(math.log10(abs(number) or 1)) - 2, 0)
    return abs(number - value) <= 0.51 * step


def check(shown: tuple[str, str, str], figure: Figure, where: object) -> None:
    text, unit, interval = shown
    if isinstance(figure, Absent):
        assert text == "–", (where, shown)
        return
    assert agrees(text, figure.point, unit), (where, shown, figure)
    ends = [end for end in re.findall(r"[−\d.,∞]+(?=[,\])])", interval) if end not in (",", ".")]
    for end, value in zip(ends, (figure.low, figure.high), strict=bool(interval)):
        assert end.endswith("∞") if value is None else agrees(end.rstrip(","), value, unit), (where, shown)


def in_json(path: Path) -> Summary:
    return Summary.from_json(json.loads((path / "summary.json").read_text()))


def test_latencies_are_the_same_in_every_format(run, tmp_path, capsys):
    page = latencies_in_html(page_of(run.path))
    assert len(page) >= 4 * 4
    summary = in_json(run.path)
    for (title, p), shown in page.items():
        path = ("interactivity",) if title == "E2E interactivity" else ("metrics", LATENCIES[title])
        check(shown, summary.figure(*path, p), (title, p))
    columns = [p for p in PERCENTILES if ("E2E", p) in page]
    terminal = printed(["report", "--format", "text", str(run.path)], capsys)
    assert latency_rows(terminal.splitlines(), columns) == page
    main(["report", str(run.path), "--to", str(tmp_path), "--format", "markdown"])
    text = (tmp_path / "summary.md").read_text()
    assert latency_rows(text.splitlines(), columns) == page


def test_throughput_memory_and_other_totals_are_the_same_in_every_format(run, tmp_path, capsys):
    summary, html = in_json(run.path), page_of(run.path)
    named = dict(html_tables(html))
    groups: list[tuple[str, Section]] = [
        ("Throughput", summary.throughput), ("Memory", summary.memory), ("Concurrency", summary.concurrency),
        ("Stalls", summary.stalls), ("The burst in numbers", summary.burst),
        ("The client", summary.instrument), ("Tokens, counted twice", summary.conservation),
    ]  # fmt: skip
    shown = {}
    for caption, section in groups:
        figures = {row.title: row.figure for row in section.rows()}
        for (title, _), (value, interval), (unit, _) in named.get(caption, [])[1:]:
            check((value, unit, interval), figures[title], title)
            shown[title] = " ".join(filter(None, (value, unit, interval)))
    assert len(shown) > 15
    terminal = printed(["report", "--format", "text", str(run.path)], capsys).splitlines()
    main(["report", str(run.path), "--to", str(tmp_path), "--format", "markdown"])
    text = (tmp_path / "summary.md").read_text()
    whole = next(t for t in markdown_tables(text) if "Measured time" in (row[0] for row in t))
    assert sum(name in shown for name, _ in whole) > 2
    for name, told in whole[1:]:
        assert any(line.startswith(name) and line.endswith(told) for line in terminal)
        assert told == shown.get(name, told)


def test_the_first_sentence_has_the_numbers_of_the_summary(run, tmp_path, capsys):
    summary, html = in_json(run.path), page_of(run.path)
    lines = printed(["report", "--format", "text", str(run.path)], capsys).splitlines()[2:]
    sentence = next(line for line in lines if line.startswith("Served"))
    main(["report", str(run.path), "--to", str(tmp_path), "--format", "markdown"])
    assert sentence in (tmp_path / "summary.md").read_text()
    rate, tokens, first, first_unit, each, each_unit = re.match(
        r"Served (\S+) req/s, (\S+) output tok/s; "
        r"median first token (\S+) (\w+), then (\S+) (\w+) per token",
        sentence,
    ).groups()
    for shown, unit, path in (
        (rate, "", ("throughput", "requests_per_s")),
        (tokens, "", ("throughput", "output_tok_per_s")),
        (first, first_unit, ("metrics", "ttft", "p50")),
        (each, each_unit, ("metrics", "tpot", "p50")),
    ):
        check((shown, unit, ""), summary.figure(*path), path)
    tiles = re.findall(r"<dt>(.*?)</dt><dd><strong>(.*?)</strong>", html)
    told = {label: re.sub("<.*?>", "", value) for label, value in tiles}
    assert told["At what load?"] == f"{rate} req/s · {tokens} output tok/s"
    assert told["How fast?"] == f"{first} {first_unit}, then {each} {each_unit} per token"


def test_percentiles_of_the_csv_are_those_of_the_page(failing, tmp_path):
    main(["report", str(failing.path), "--to", str(tmp_path), "--format", "csv"])
    frame, page = pd.read_csv(tmp_path / "records.csv"), latencies_in_html(page_of(failing.path))
    for title in ("TTFT", "E2E"):
        values = np.sort(frame[f"{LATENCIES[title]}_s"].fillna(math.inf))
        for p, share in (("p50", 0.5), ("p90", 0.9)):
            text, unit, _ = page[title, p]
            assert agrees(text, values[math.ceil(share * len(values)) - 1], unit), (title, p)


def test_slos_are_measured_the_same_on_the_page_and_in_the_summary(open_loop):
    lines = re.findall(r"</b> <code>(.*?)</code>(?:: )?<span[^>]*>(.*?)</span>", page_of(open_loop.path))
    measured = {slo: words.strip() for slo, words in lines}
    assert in_json(open_loop.path).targets
    for target in in_json(open_loop.path).targets:
        words = measured[slos_words([target.target])]
        assert bool(words) == isinstance(target.measured, Estimate)
        if words:
            number, unit = words.split()[:2]
            check((number, unit, ""), target.measured, target.target)


# Comparisons and sweeps


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """Two engines, two runs each, with the page, the Markdown and the JSON over them."""
    folder = tmp_path_factory.mktemp("compared")
    runs = [
        finished_run(folder / "runs", engine, 60, speed=speed * noise, seed=k)
        for k, noise in enumerate((0.995, 1.005))
        for engine, speed in (("vllm", 1.0), ("tgi", 1.35))
    ]
    return written(folder, runs)


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("swept")
    return written(folder, [finished_run(folder / "runs", "vllm", 60, concurrency=k) for k in (2, 8)])


def written(folder: Path, runs: list[Run]) -> Path:
    for shape in ("html", "markdown", "json", "text"):
        argv = ["compare", *(str(run.path) for run in runs), "--format", shape]
        main([*argv, "--out", str(folder / f"out.{shape}")])
    return folder


@pytest.mark.drawn
def test_a_comparisons_numbers_are_the_same_in_every_format(compared):
    (cell,) = json.loads((compared / "out.json").read_text())["cells"]
    rows = next(
        rows
        for caption, rows in html_tables((compared / "out.html").read_text())
        if "Side by side" in caption
    )
    head, *body = rows
    tables = [t for t in markdown_tables((compared / "out.markdown").read_text()) if t[0][0] == "Number"]
    in_markdown = {row[0]: row for row in tables[0][1:]}
    lines = (compared / "out.text").read_text().splitlines()
    assert len(body) >= 8
    for row in body:
        title, unit = row[0][0], row[1][0]
        # A table wider than 120 letters stands in parts, each with the titles of its rows.
        line = " ".join(line for line in lines if re.match(rf"{re.escape(title)}\s+[↑↓]", line))
        for (label, _), (value, interval) in zip(head[2:], row[2:], strict=True):
            if label in cell["numbers"][title]:
                check(
                    (value.removeprefix("★ "), unit, interval), figure(cell["numbers"][title][label]), title
                )
            elif value:
                (pair,) = cell["contrasts"]
                told = pair["numbers"][title]
                ratio = told["ratio"]["point"]
                lower = 100 * (1 - min(ratio, 1 / ratio)) if "lower" in value else None
                true = told["noise"] * 100 if label == "A/A noise" else lower or max(ratio, 1 / ratio)
                assert agrees(value.split()[0].rstrip("%x"), true), (title, label, value)
            told = " ".join(filter(None, (value, interval)))
            assert told in in_markdown[title]
            assert value in line
            assert interval in line


@pytest.mark.drawn
def test_a_comparison_says_each_ratio_in_one_direction(compared):
    """The first sentence, the figure, its numbers, the table and the findings name the faster one first."""
    html = (compared / "out.html").read_text()
    sentence = re.sub(r"<.*?>", "", re.search(r'<div class="answer"><p>(.*?)</p>', html)[1])
    pattern = r"vllm is (\S+)x faster than tgi \(E2E p50\), (\S+% CI) (\[.*?\])"
    times, level, ends = re.match(pattern, sentence).groups()
    figure = html[html.index('id="forest-0"') :]
    figure = figure[: figure.index("</svg>")]
    assert "<h3>vllm against tgi</h3>" in figure
    assert f"{times}x faster  {ends}" in figure
    tables = dict(html_tables(html))
    (e2e,) = (row for row in tables["vllm compared with tgi"] if row[0][0] == "E2E p50")
    assert [text for text, _ in e2e[1:3]] == [f"{times}x faster", f"{level} {ends}"]
    head, *rows = next(rows for caption, rows in tables.items() if "Side by side" in caption)
    (column,) = (k for k, (title, _) in enumerate(head) if title == "vllm vs tgi")
    (e2e,) = (row for row in rows if row[0][0] == "E2E p50")
    assert e2e[column] == (f"{times}x faster", f"{level} {ends} different")


def test_a_sweeps_numbers_are_the_same_in_every_format(swept):
    html = (swept / "out.html").read_text()
    (sweep,) = json.loads((swept / "out.json").read_text())["sweeps"]
    points = {f"{point['load']:g}": point for point in sweep["points"]}
    tables = dict(html_tables(html))
    head, *body = next(rows for caption, rows in tables.items() if caption.startswith("Every load"))
    (in_markdown,) = (
        t for t in markdown_tables((swept / "out.markdown").read_text()) if "Concurrency" in t[0][0]
    )
    lines = (swept / "out.text").read_text()
    for row, markdown_row in zip(body, in_markdown[1:], strict=True):
        for (title, _), (value, interval), told in zip(head, row, markdown_row, strict=True):
            assert told == " ".join(filter(None, (value, interval)))
            assert value in lines
            if title.startswith("Output"):
                check((value, "", interval), figure(points[row[0][0]]["output_tok_per_s"]), title)


def figure(row: dict) -> Figure:
    return Absent(row["absent"]) if "absent" in row else Estimate(**row)
