"""The summary's estimates as tables, a forecast's score, and the glossary of what they mean."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from markupsafe import Markup, escape

from burstline.measure.metrics.definitions import METRICS
from burstline.measure.record.summary import NamedFigure, Section, Summary
from burstline.measure.record.verdict import Grade, Grades, PercentileGrade, widened
from burstline.measure.stats.estimates import ONE_RUN
from burstline.measure.stats.figure import Absent, Estimate, Figure
from burstline.measure.stats.serial_correlation import NARROW, OPEN
from burstline.reports.blocks import LATENCIES, Block, Cell, Note, Row, Table, table
from burstline.reports.model.comparison import QUANTILES, View
from burstline.reports.number_format import (
    ARROWS,
    Scale,
    changed,
    duration,
    error,
    interval,
    number,
    point,
    scale_of,
    with_interval,
)
from burstline.reports.sentences import FORECAST, GROUPS, say
from burstline.roofline.predict.forecast import CONFIDENCE, Score

SO_IT_LACKS = re.compile(r", so p[\d.]+ does not exist")
COLUMNS = {**{p: p for p in QUANTILES}, "mean": "mean", "std": "SD", "min": "min", "max": "max"}
"""The columns of a table of latencies, by the figure's name."""
TOTALS = ("output_tok_per_s", "requests_per_s", "drain_s", "server_peak_bytes", "device_peak_bytes")
"""Figures of the run as a whole that stand beside its latencies."""


def title_of(key: str) -> str:
    return METRICS[key].title


def named(key: str, title: str = "") -> Cell:
    """A metric's name with its better-direction arrow, linked to its definition; of others their `title`."""
    if key not in METRICS:
        return Cell(title)
    arrow = ARROWS.get(METRICS[key].better, "")
    return Cell(f"{METRICS[key].title}\u00a0{arrow}".strip(), href=f"#def-{key}")


def latency_table(caption: str, metrics: Mapping[str, Section], graded: Grades) -> Table:
    """One row a metric, one column a quantile, each number over its interval, then the instrument's error.

    A note says what late reading did to a number (`graded`). A metric without any is named below, with why.
    """
    every = {key: {row.name: row.figure for row in section.rows()} for key, section in metrics.items()}
    has_one = [key for key, row in every.items() if any(isinstance(each, Estimate) for each in row.values())]
    figures = {key: every[key] for key in has_one or every}
    lacking = [NamedFigure(key, title_of(key), every[key]["p50"]) for key in every if key not in figures]
    always = (*QUANTILES, "mean")
    columns = [
        p
        for p in COLUMNS
        if any(p in row and (p in always or isinstance(row[p], Estimate)) for row in figures.values())
    ]
    errors = ["instrument_error"] if any("instrument_error" in row for row in figures.values()) else []
    notes: list[str] = []
    rows = [
        [*_latency_cells(key, row, graded.get(key, {}), columns, errors, notes)]
        for key, row in figures.items()
    ]
    titles = ["Latency", "Unit", *(COLUMNS[p] for p in columns), *("± instrument" for _ in errors), "n"]
    known = [figure for row in figures.values() for figure in row.values() if isinstance(figure, Estimate)]
    remarks = _of_intervals({figure.note or "" for figure in known}), _absent(lacking)
    remark = " ".join(filter(None, remarks))
    return table(caption, titles, rows, text=(0, 1), remark=remark, notes=tuple(notes))


def _of_intervals(notes: set[str]) -> str:
    """Why figures with these notes have no intervals, or too narrow ones; "" where they have good ones."""
    if ONE_RUN in notes:
        return "One run of this load gives no confidence intervals; three runs do (--repeats 3)."
    if none := next((note for note in notes if note.startswith("1 run: ")), ""):
        return f"{none.replace('1 run: ', 'No confidence intervals: ')}."
    if any(NARROW in note for note in notes):
        return f"{NARROW[0].upper()}{NARROW[1:]}; {say('run-longer')}."
    return say("interval.open", do=say("run-longer")) if any(OPEN in note for note in notes) else ""


def headline_latencies(view: View, caption: str) -> list[Table]:
    """The table of the latencies that are shown first; none where no request has one."""
    summary = view.summary
    metrics: dict[str, Section] = {k: row for k, row in summary.metrics.items() if k in view.headline}
    if not metrics:
        return []
    metrics |= {"interactivity": summary.interactivity} if view.is_generating else {}
    return [replace(latency_table(caption, metrics, summary.grades), id=LATENCIES)]


def _latency_cells(
    key: str,
    row: Mapping[str, Figure],
    graded: Mapping[str, PercentileGrade],
    columns: list[str],
    errors: list[str],
    notes: list[str],
) -> Iterator[Cell]:
    known = [figure for p in columns if isinstance(figure := row.get(p), Estimate)]
    scale = scale_of(known)
    yield named(key)
    yield Cell(scale.unit)
    for p in columns:
        path = f"{'metrics.' if key in METRICS else ''}{key}.{p}"
        yield _value(row[p], scale, path, notes, graded.get(p)) if p in row else Cell("–")
    for name in errors:
        figure = row.get(name)
        path = f"metrics.{key}.{name}"
        text = error(figure.point) if isinstance(figure, Estimate) else "–"
        yield Cell(text, key=path if isinstance(figure, Estimate) else "", unit=text.partition(" ")[2])
    yield Cell(f"{max(figure.n for figure in known):,}" if known else "–", key=f"metrics.{key}.n")


def figure_cell(figure: Figure, scale: Scale, key: str) -> Cell:
    """The number over its interval."""
    return Cell(point(figure, scale), detail=interval(figure, scale), key=key, unit=scale.unit)


def _value(
    figure: Figure, scale: Scale, key: str, notes: list[str], graded: PercentileGrade | None = None
) -> Cell:
    """The number over its interval, or a dash; what is to say of it goes to `notes`, if new."""
    if isinstance(figure, Estimate):
        cell = figure_cell(figure, scale, key)
        note = _lateness(figure, graded) if graded else ""
    else:
        cell = Cell("–")
        note = SO_IT_LACKS.sub(", so the percentile does not exist", figure.reason)  # one for all
    if note and note not in notes:
        notes.append(note)
    return replace(cell, note=notes.index(note) + 1) if note else cell


def _lateness(figure: Estimate, graded: PercentileGrade) -> str:
    """What the client's lateness did to a percentile; "" where that is not worth a word."""
    if graded.held:
        return say("held.unreliable")
    if graded.is_sent_late and graded.send_effect_s is not None:
        return say("sent.unreliable", by=duration(graded.send_effect_s))
    moved_s, unreliable = graded.read_effect_s, graded.grade == Grade.UNRELIABLE
    if moved_s is None:
        return say("read.unknown")
    if unreliable or widened(figure, moved_s) is not figure:
        changed = "read.changed" if figure.level is None else "read.widened"
        return say("read.unreliable" if unreliable else changed, by=duration(moved_s))
    return ""


def group_table(summary: Summary, name: str) -> Table:
    """The section `name` of the summary, one figure a row; absent ones are named below, with the reasons."""
    caption = GROUPS[name].format(criteria=" and ".join(summary.goodput.criteria))
    shown = list(getattr(summary, name).rows())
    known = [row for row in shown if isinstance(row.figure, Estimate)]
    rows = (_group_cells(row, f"{name}.{row.name}") for row in known)
    return table(caption, ["What", "Value", "Unit"], rows, text=(0, 2), remark=_absent(shown))


def _absent(rows: Iterable[NamedFigure]) -> str:
    """`Not available: weights; preemptions (the server does not report it).`, "" where all is known."""
    titles: dict[str, list[str]] = {}
    told_of, above = set(), ""
    for row in rows:
        follows = row.title.startswith("… ")
        above = above if follows else row.title.partition(",")[0]
        if not isinstance(row.figure, Absent):
            continue
        reason = row.figure.reason
        if follows and (above, reason) in told_of:
            continue  # the line before it says the same
        told_of.add((above, reason))
        name = f"{above} {row.title.removeprefix('… ')}" if follows else row.title
        titles.setdefault(reason, []).append(name[0].lower() + name[1:] if name[1:2].islower() else name)
    told = "; ".join(f"{'; '.join(dict.fromkeys(names))} ({why})" for why, names in titles.items())
    return f"Not available: {told}." if told else ""


def _group_cells(row: NamedFigure, key: str) -> Iterator[Cell]:
    scale = scale_of([row.figure], share=row.is_share)
    # What a gap is the gap of decides its sign: means may lie the other way round than the medians above it.
    note = row.figure.note if row.name.endswith("_gap_s") and isinstance(row.figure, Estimate) else None
    yield replace(named(row.name, row.title), detail=note or "")
    yield figure_cell(row.figure, scale, key)
    yield Cell(scale.unit)


def whole_run(summary: Summary) -> Table:
    """The length of the window that counts, and what was served in the whole run."""
    lengths, n = summary.lengths, summary.counts.get("ok", 0)
    totals = [
        replace(mean, point=float(round(mean.point * n)), low=None, high=None)
        if isinstance(mean := each.served_mean, Estimate)
        else mean
        for each in (lengths.prompt_tok, lengths.output_tok)
    ]
    rows: list[tuple[str, str, Figure]] = [
        ("Measured time", "window.length_s", summary.window.length_s),
        ("Prompt tokens served", "lengths.prompt_tok", totals[0]),
        ("Output tokens served", "lengths.output_tok", totals[1]),
        *(
            (row.title, f"{name}.{row.name}", row.figure)
            for name in ("throughput", "burst", "memory")
            for row in getattr(summary, name).rows()
            if row.name in TOTALS
        ),
    ]
    known: list[list[str | Cell]] = [
        [title, Cell(with_interval(f), key=key, unit=scale_of([f]).unit)]
        for title, key, f in rows
        if isinstance(f, Estimate)
    ]
    return table("The run as a whole", ["What", "Value"], known)


def session_tables(view: View) -> list[Block]:
    """Whole sessions, and one row for each turn by its place in them; none without sessions."""
    sessions, notes = view.summary.sessions, list[str]()
    if sessions is None:
        return []
    turns = sessions.by_turn
    columns = [
        *((f"TTFT {p}", [turn.ttft.figure(p) for turn in turns], False) for p in ("p50", "p90", "p99")),
        *((f"E2E {p}", [turn.e2e.figure(p) for turn in turns], False) for p in ("p50", "p99")),
        ("Prompt, mean", [turn.prompt_tok_mean for turn in turns], False),
        ("From earlier turns", [turn.earlier_fraction for turn in turns], True),
        ("From the cache", [turn.cached_fraction for turn in turns], True),
    ]
    shown = [each for each in columns if any(isinstance(figure, Estimate) for figure in each[1])]
    lacking = (NamedFigure("", each[0], each[1][0]) for each in columns if each not in shown)
    scales = [scale_of(figures, share=share) for _, figures, share in shown]
    rows: list[list[str | Cell]] = [
        [
            f"{turn.turn}",
            f"{turn.ok:,} of {turn.requests:,}",
            *(
                _value(figures[k], scale, f"sessions.{turn.turn}.{title}", notes)
                for (title, figures, _), scale in zip(shown, scales, strict=True)
            ),
        ]
        for k, turn in enumerate(turns)
    ]
    units = [f" ({scale.unit})" if scale.unit else "" for scale in scales]
    titles = [title + unit for (title, _, _), unit in zip(shown, units, strict=True)]
    caption, titles = "Turns by their place in the session", ["Turn", "Served", *titles]
    by_turn = table(caption, titles, rows, notes=tuple(notes), remark=_absent(lacking))
    return [group_table(view.summary, "sessions"), by_turn]


def glossary_table() -> Table:
    better = {"lower": "↓ lower", "higher": "↑ higher"}
    rows = [
        Row(
            (
                Cell(metric.title),
                Cell(formula(metric.formula), detail=metric.note, tone="wrap"),
                Cell(metric.unit, detail=better.get(metric.better, ""), tone="short"),
                Cell(metric.source),
            ),
            id=f"def-{key}",
        )
        for key, metric in METRICS.items()
    ]
    columns = ["Metric", "Formula", "Unit", "Source"]
    return table("What every number means", columns, rows, text=range(len(columns)))


def formula(text: str) -> Markup:
    """A formula with its indices as subscripts: t_1, t_{i−1}."""
    return Markup(re.sub(r"_(?:\{([^}]+)\}|(\w))", r"<sub>\1\2</sub>", str(escape(text))))  # noqa: S704


def score_line(score: Score) -> Note:
    """What a terminal says of a forecast: inside or outside, and by how much."""
    said = []
    for name in score.measured:
        where = "inside" if score.inside(name) else "outside"
        said.append(f"{FORECAST[name]} {where} ({changed(score.ratio(name) - 1)})")
    return Note(f"Forecast, {CONFIDENCE:.0%} intervals, measured against predicted: {', '.join(said)}.")


def score_table(score: Score) -> Table:
    rows: list[list[str | Cell]] = [
        [
            FORECAST[name],
            _told(name, score.predicted[name].point),
            f"{_told(name, score.predicted[name].low)} to {_told(name, score.predicted[name].high)}",
            _told(name, measured),
            changed(score.ratio(name) - 1),
            "inside" if score.inside(name) else "outside",
        ]
        for name, measured in score.measured.items()
    ]
    columns = ["Figure", "Forecast", f"{CONFIDENCE:.0%} interval", "Measured", "Difference", "Interval"]
    caption = f"The forecast, made before the first request; intervals from {score.intervals}"
    return table(caption, columns, rows, text=(0, 5))


def _told(name: str, value: float) -> str:
    return f"{number(value)}/s" if name.endswith("per_s") else duration(value)
