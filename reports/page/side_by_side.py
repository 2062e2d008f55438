"""The numbers of contenders side by side: the table, and in words what each says against the fastest."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from burstline.loadgen.stats.across_runs import LEAST_RUNS, Noise, spreads_of
from burstline.loadgen.stats.figure import Absent, Estimate
from burstline.loadgen.stats.significance import MARGIN, MOST_RUNS, Answer, Contrast
from burstline.reports.blocks import Cell, Column, Row, Table
from burstline.reports.model.comparison import (
    HEADLINES,
    TITLES,
    Case,
    Contrasts,
    Headline,
    Pair,
    Path,
    better,
    turned,
)
from burstline.reports.number_format import ARROWS, interval, number, point, scale_of
from burstline.reports.sentences import say


@dataclass(frozen=True, slots=True)
class Times:
    """A ratio as a person says it, such as 1.48 and "faster": `value` is at least 1, its interval in `word`'s
    direction, with ends below 1 where the other direction is possible too."""

    value: float
    low: float | None
    high: float | None
    word: str

    @property
    def text(self) -> str:
        """`1.48x faster`; without a word where it rounds to 1."""
        return f"{number(self.value)}x {self.word}" if self.value >= 1.005 else "1.00x"

    @property
    def ends(self) -> str:
        """`[1.29, 1.69]`, "" without an interval."""
        known = self.low is not None and self.high is not None
        return f"[{number(self.low or 0.0)}, {number(self.high or 0.0)}]" if known else ""


def times_of(contrast: Contrast, title: str, which: str) -> Times:
    """How many times faster, slower, higher or lower; `which` is the better direction of the number."""
    is_time = which == "lower" and "emory" not in title
    ratio = contrast.ratio
    is_below = ratio.point < 1
    upward = (turned(contrast) if is_below else contrast).ratio
    word = ("faster" if is_below else "slower") if is_time else ("lower" if is_below else "higher")
    return Times(upward.point, upward.low, upward.high, word)


def why_open(contrast: Contrast, contrasts: Contrasts) -> str:
    """Why a difference is not significant, one of `contrasts`; "" where it is."""
    low, high = contrast.ratio.low, contrast.ratio.high
    if contrast.answer != Answer.INCONCLUSIVE:
        return ""
    if low is None or high is None:
        return say("open.one-run")
    if low <= 1 <= high:
        return say("open")
    n = sum(isinstance(c, Contrast) and c.ratio.low is not None for c in contrasts.values())
    return say("open.corrected", n=n)


def finding(pair: Pair, contrasts: Contrasts, titles: Mapping[Path, tuple[str, str]] = TITLES) -> str:
    """One sentence on the first against the second; `titles` are each number's title and better direction."""
    one, other = pair
    groups: dict[str, list[str]] = {"better": [], "worse": [], "same": [], "inconclusive": []}
    for path, contrast in contrasts.items():
        if isinstance(contrast, Contrast):
            title, which = titles[path]
            is_better = better(contrast, which)
            if is_better is not None:
                groups["better" if is_better else "worse"].append(_times(title, which, contrast))
            else:
                groups["same" if contrast.answer == Answer.SAME else "inconclusive"].append(title)
    if not any(groups.values()):
        return say("no-ratio", one=one, other=other)
    decided = ", ".join((*groups["better"], *groups["worse"]))
    parts = [f"{one} is {decided} than {other}" if decided else f"{one} against {other}"]
    if groups["same"]:
        parts.append(f"the same within {MARGIN:.0%}: {', '.join(groups['same'])}")
    if groups["inconclusive"]:
        parts.append(f"inconclusive: {', '.join(groups['inconclusive'])}")
    return f"{'; '.join(parts)}."


def _times(title: str, which: str, contrast: Contrast) -> str:
    """A ratio as a person says it: `1.48x faster (E2E p50), 95% CI [1.29, 1.69]`."""
    times = times_of(contrast, title, which)
    return f"{times.text} ({title}){f', 95% CI {times.ends}' if times.ends else ''}"


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
    more = [c.more_runs for c in found if c.answer == Answer.INCONCLUSIVE]
    if more:
        yield say("words.inconclusive")
        known = max((n for n in more if n is not None), default=0)
        many = f"More than {MOST_RUNS}" if None in more else f"About {known} more"
        yield say("words.more-runs", many=many)


def contrast_json(pair: Pair, contrasts: Contrasts) -> dict[str, Any]:
    """One pair for machines; a number that cannot be compared has no answer and the reason why."""
    return {
        "of": pair[1],
        "against": pair[0],
        "numbers": {TITLES[path][0]: _json(contrast) for path, contrast in contrasts.items()},
    }


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


def findings(case: Case) -> list[str]:
    """A sentence for the fastest compared with each other contender."""
    return [finding(pair, contrasts) for pair, contrasts in case.pairs() if case.contrasts]


def side_by_side(case: Case) -> Table:
    """One row a number, one column a contender, then the fastest against each other."""
    shown = [h for h in HEADLINES if any(isinstance(c.figure(*h.path), Estimate) for c in case.contenders)]
    noises = {headline: _noise(case, headline) for headline in shown}
    is_noise_known = any(noise is not None for noise in noises.values())
    pairs = case.pairs() if case.contrasts else []
    rows = []
    for headline, noise in noises.items():
        cells = [
            *_numbers(case, headline),
            *(_against(found.get(headline.path), headline) for _, found in pairs),
        ]
        cells += [Cell("" if noise is None else f"{noise:.1%}")] if is_noise_known else []
        rows.append(Row(tuple(cells)))
    titles = [*case.labels, *(f"{one} vs {other}" for (one, other), _ in pairs)]
    titles += ["A/A noise"] if is_noise_known else []
    notes = list(remarks(list(case.contrasts.values())))
    if any(case.best(headline) for headline in HEADLINES):
        notes.append(say("words.best"))
    if is_noise_known:
        notes.append(say("words.noise"))
    return Table(
        f"{case.name or 'Side by side'}{': 95% intervals in brackets' if _has_intervals(case) else ''}",
        (Column("Number", False), Column("Unit", False), *map(Column, titles)),
        tuple(rows),
        remark=" ".join(notes),
    )


def _has_intervals(case: Case) -> bool:
    """Whether any number or ratio of the table has an interval."""
    figures = (contender.figure(*headline.path) for contender in case.contenders for headline in HEADLINES)
    ratios = (c.ratio for found in case.contrasts.values() for c in found.values() if isinstance(c, Contrast))
    return any(isinstance(f, Estimate) and f.low is not None for f in figures) or any(
        None not in (ratio.low, ratio.high) for ratio in ratios
    )


def _noise(case: Case, headline: Headline) -> float | None:
    """The largest noise between runs of one contender, in this number."""
    found = [each.get(headline.path) for each in case.contrasts.values()]
    return max((c.noise for c in found if isinstance(c, Contrast) and c.noise is not None), default=None)


def _numbers(case: Case, headline: Headline) -> Iterator[Cell]:
    """The number's title and unit, then each contender's."""
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
        yield Cell(f"{mark}{point(figure, scale)}", detail=interval(figure, scale), tone=tone)


def _against(contrast: Contrast | Absent | None, headline: Headline) -> Cell:
    """`1.35x faster` and whether that is significant; empty for a number on which no verdict is given.

    Why there is none stands with the contenders' numbers, or is that these have no interval.
    """
    if contrast is None:
        return Cell("")
    if isinstance(contrast, Absent):
        return Cell("–")
    times = times_of(contrast, headline.title, headline.better)
    detail = " ".join(filter(None, (times.ends, contrast.answer)))
    if times.ends and contrast.answer == Answer.INCONCLUSIVE and contrast.detectable is not None:
        share = contrast.detectable
        detail += f"; detects {f'{share:.0%}' if share < 1 else f'{number(1 + min(share, 999))}×'}"
    return Cell(times.text, detail=detail)


SPREAD: Final = (
    ("metrics", "ttft", "p50"),
    ("metrics", "tpot", "p50"),
    ("metrics", "e2e", "p50"),
    ("throughput", "output_tok_per_s"),
)


def spread_table(case: Case) -> Table | None:
    """How far runs of each contender scatter: at fresh starts of its server, and repeated at one start.

    None where no contender has runs enough for either.
    """
    rows = []
    for contender in case.contenders:
        for path in SPREAD:
            values = contender.points(path)
            if isinstance(values, Absent):
                continue
            starts: dict[object, list[float]] = {}
            for view, value in zip(contender.views, values, strict=True):
                starts.setdefault(view.manifest.server and view.manifest.server.start, []).append(value)
            both = spreads_of([np.array(own) for own in starts.values()])
            if isinstance(both.starts, Noise) or isinstance(both.repeats, Noise):
                cells = (_spread(both.starts, "start"), _spread(both.repeats, "repeat"))
                rows.append(Row((Cell(contender.label), Cell(TITLES[path][0]), *cells)))
    if not rows:
        return None
    columns = (
        Column("Contender", False),
        Column("Number", False),
        Column("Over fresh starts"),
        Column("Over repeats of one start"),
    )
    note = (
        "Standard deviation of one run's number. A fresh start adds to it where the server compiles or "
        "allocates for the shapes that come first. `--repeats 6 --restart 2` measures both."
    )
    return Table("Spread between runs", columns, tuple(rows), remark=note)


def _spread(noise: Noise | Absent, what: str) -> Cell:
    if isinstance(noise, Absent):
        return Cell("–", detail=noise.reason)
    return Cell(f"{math.expm1(noise.spread):.1%}", detail=f"{noise.n_runs} {what}s")
