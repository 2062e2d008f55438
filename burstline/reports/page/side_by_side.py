"""The numbers of contenders side by side: the table, and in words what each says against the fastest."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from burstline.measure.stats.figure import Absent, Estimate
from burstline.measure.stats.quantiles import LEAST_RUNS
from burstline.measure.stats.significance import MARGIN, Answer, Contrast
from burstline.measure.verdict.certificate import Printed
from burstline.reports.blocks import Block, Cell, Findings, Table, table
from burstline.reports.model.comparison import (
    HEADLINES,
    TITLES,
    Case,
    Comparison,
    Contrasts,
    Headline,
    Pair,
    turned,
)
from burstline.reports.number_format import ARROWS, in_brackets, number, point, ratio_text, scale_of
from burstline.reports.page.estimate_tables import figure_cell
from burstline.reports.sentences import say
from burstline.wording import counted

SAME_TEXT: Final = 1.005
"""A smaller ratio is written as 1.00."""
LOWER: Final = "lower"


@dataclass(frozen=True, slots=True)
class Times:
    """A ratio as a person says it, such as 1.48 and "faster": it is at least 1, its interval in `word`'s
    direction, with ends below 1 where the other direction is possible too. "lower" is told in percent."""

    ratio: Estimate
    word: str

    @property
    def text(self) -> str:
        """`1.48x faster`, `12% lower`; without a word where it rounds to 1."""
        if (value := self.ratio.point) < SAME_TEXT:
            return "1.00x"
        return f"{_lower(value) if self.word == LOWER else f'{number(value)}x'} {self.word}"

    @property
    def interval(self) -> str:
        """`99.2% CI [1.29, 1.69]`, "" without one."""
        low, high, level = self.ratio.low, self.ratio.high, self.ratio.level
        if low is None or high is None:
            return ""
        how = _lower if self.word == LOWER else ratio_text
        return f"{100 * (level or 0.0):.3g}% CI [{how(low)}, {how(high)}]"


def _lower(ratio: float) -> str:
    return f"{round(100 * (1 - 1 / ratio), 1) if ratio else -math.inf:g}%"


def times_of(contrast: Contrast, title: str, which: str) -> Times:
    """How many times faster, slower, as high or lower; `which` is the better direction of the number."""
    is_time = which == "lower" and "emory" not in title
    is_below = contrast.ratio.point < 1
    upward = (turned(contrast) if is_below else contrast).ratio
    word = ("faster" if is_below else "slower") if is_time else (LOWER if is_below else "as high")
    return Times(upward, word)


def is_same(contrast: Contrast, times: Times) -> bool:
    """Whether it is no difference to tell: of one run each one within the margin, else what rounds to 1."""
    least = 1 + MARGIN if contrast.noise is None else SAME_TEXT
    return contrast.answer == Answer.SAME or times.ratio.point < least


def remarks(contrasts: Sequence[Contrasts]) -> Iterator[str]:
    """What the reader of these contrasts must know: what the words mean, which noise is taken for granted."""
    found = [c for each in contrasts for c in each.values() if isinstance(c, Contrast)]
    if not found:
        return
    if any(c.noise is None for c in found):
        yield say("words.no-noise", n=LEAST_RUNS)
        return
    yield say("words.different")
    yield say("words.same", margin=f"{MARGIN:.0%}")
    if any(c.answer == Answer.INCONCLUSIVE for c in found):
        yield say("words.inconclusive")


def contrast_json(pair: Pair, contrasts: Contrasts) -> dict[str, Any]:
    """One pair for machines; a number that cannot be compared has no answer and the reason why."""
    numbers = {TITLES[path][0]: _json(contrast) for path, contrast in contrasts.items()}
    return {"of": pair[1], "against": pair[0], "numbers": numbers}


def _json(contrast: Contrast | Absent) -> dict[str, Any]:
    if isinstance(contrast, Absent):
        return {"answer": None, "absent": contrast.reason}
    return {
        "answer": str(contrast.answer),
        "ratio": contrast.ratio.to_json(),
        "p_after_holm": contrast.p,
        "detectable": contrast.detectable,
        "noise": contrast.noise,
        "more_runs": contrast.more_runs,
    }


def side_by_side(case: Case) -> Table:
    """One row a number, one column a contender, then the fastest against each other."""
    shown = [h for h in HEADLINES if any(isinstance(c.figure(*h.path), Estimate) for c in case.contenders)]
    noises = {headline: _noise(case, headline) for headline in shown}
    is_noise_known = any(noise is not None for noise in noises.values())
    pairs = case.pairs() if case.contrasts else []
    rows = []
    for headline, noise in noises.items():
        cells = [*_numbers(case, headline)]
        for pair, found in pairs:
            key = case.key(" vs ".join(pair), headline.path)
            cells.append(_against(found.get(headline.path), headline, key))
        if is_noise_known:
            text, key = "" if noise is None else f"{noise:.1%}", case.key("noise", headline.path)
            cells.append(Cell(text, key=key, unit="%"))
        rows.append(cells)
    titles = [*case.labels, *(f"{one} vs {other}" for (one, other), _ in pairs)]
    titles += ["A/A noise"] if is_noise_known else []
    notes = list(remarks(list(case.contrasts.values())))
    if any(case.best(headline) for headline in HEADLINES):
        notes.append(say("words.best"))
    if is_noise_known:
        notes.append(say("words.noise"))
    figures = [contender.figure(*headline.path) for contender in case.contenders for headline in shown]
    ratios = [c.ratio for found in case.contrasts.values() for c in found.values() if isinstance(c, Contrast)]
    caption = f"{case.name or 'Side by side'}{in_brackets([*figures, *ratios])}"
    return table(caption, ["Number", "Unit", *titles], rows, text=(0, 1), remark=" ".join(notes))


def _noise(case: Case, headline: Headline) -> float | None:
    """The largest noise between runs of one contender, in this number."""
    found = [each.get(headline.path) for each in case.contrasts.values()]
    return max((c.noise for c in found if isinstance(c, Contrast) and c.noise is not None), default=None)


def _numbers(case: Case, headline: Headline) -> Iterator[Cell]:
    figures = {contender.label: contender.figure(*headline.path) for contender in case.contenders}
    scale = scale_of(figures.values())
    best = case.best(headline)
    yield Cell(f"{headline.title} {ARROWS.get(headline.better, '')}".strip())
    yield Cell(scale.unit)
    for label, figure in figures.items():
        if isinstance(figure, Absent):
            yield Cell("–", detail=figure.reason)
            continue
        mark, tone = ("★ ", "best") if label == best else ("", "")
        cell = figure_cell(figure, scale, case.key(label, headline.path))
        yield replace(cell, text=f"{mark}{cell.text}", tone=tone)


def _against(contrast: Contrast | Absent | None, headline: Headline, key: str) -> Cell:
    """`1.35x faster` and whether that is significant; empty for a number on which no verdict is given.

    Why there is none stands with the contenders' numbers, or is that these have no interval.
    """
    if contrast is None:
        return Cell("")
    if isinstance(contrast, Absent):
        return Cell("–")
    times = times_of(contrast, headline.title, headline.better)
    detail = " ".join(filter(None, (times.interval, contrast.answer)))
    if times.interval and contrast.answer == Answer.INCONCLUSIVE and contrast.detectable is not None:
        detail += f"; can detect {detectable(contrast.detectable)}"
    return Cell(times.text, detail=detail, key=key, unit=times.word)


def detectable(share: float) -> str:
    """The least difference that would be detected: `7%`, `2.76×`."""
    return f"{share:.0%}" if share < 1 else f"{number(1 + min(share, 999))}×"


def beside_others(comparison: Comparison) -> list[Block]:
    """What other tools report, beside the numbers of our runs; nothing is ranked."""
    ours = [
        (f"{each.label}{f', {case.name}' if case.name else ''}", each.figure)
        for case in comparison.cases
        for each in case.contenders
    ]
    columns = ours + [(each.name, each.figure) for each in comparison.others]
    rows = []
    for headline in HEADLINES:
        figures = [figure(*headline.path) for _, figure in columns]
        if any(".".join(headline.path) in each.numbers for each in comparison.others):
            scale = scale_of(figures)
            rows.append([headline.title, scale.unit, *(point(figure, scale) for figure in figures)])
    titles = ["Number", "Unit", *(name for name, _ in columns)]
    return [
        table("What other tools reported: not ranked", titles, rows, text=(0, 1)),
        Findings(tuple(say("other-tool", **_told(each)) for each in comparison.others)),
    ]


def _told(each: Printed) -> dict[str, str]:
    n_ok, n_failed = each.n_ok, each.n_failed
    served = "of requests that it does not count, some" if n_ok is None else counted(n_ok, "request")
    if n_ok is not None and n_failed is not None:
        served = f"{n_ok:,} of {counted(n_ok + n_failed, 'request')}"
    titles = {"total": "Totals: {}.", "acceptance": "Acceptance: {}.", "besides": "{}"}
    means = " ".join(titles.get(k, f"{k.upper()}: {{}}.").format(how) for k, how in each.defines.items())
    return {"name": each.name, "tool": each.tool, "served": served, "means": means}
