"""Significance of the differences between contenders, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

import numpy as np

from loadgen.record.verdict import Grade
from loadgen.stats.across_runs import LEAST_RUNS, Noise
from loadgen.stats.estimates import Absent
from loadgen.stats.significance import (
    MARGIN,
    MOST_RUNS,
    Answer,
    Contrast,
    Difference,
    between_runs,
    judged,
    with_noise,
)
from reports.compare.pooled_figures import Path, figure_of, points
from reports.number_format import number
from reports.run_view import View

JUDGED: Final[tuple[Path, ...]] = (
    ("metrics", "ttft", "p50"),
    ("metrics", "ttft", "p99"),
    ("metrics", "tpot", "p50"),
    ("metrics", "e2e", "p50"),
    ("metrics", "e2e", "p99"),
    ("throughput", "output_tok_per_s"),
    ("memory", "server_peak_bytes"),
    ("memory", "device_peak_bytes"),
)
"""The numbers a verdict is given on: the more there are, the less each can show."""

Pair = tuple[str, str]
Contrasts = Mapping[Path, Contrast | Absent]


def contrasts_of(
    views: Mapping[str, Sequence[View]], repeats: Mapping[str, Sequence[int]]
) -> dict[Pair, Contrasts]:
    """Every pair of contenders in the order of `views`: the second against the first, in JUDGED.

    `repeats` are the numbers of each contender's runs where runs of one number were neighbours in time,
    empty where that is not known.
    """
    return {
        (a, b): _of_pair(views[a], views[b], interleaved=bool(repeats[a]) and repeats[a] == repeats[b])
        for a, b in combinations(views, 2)
    }


def _of_pair(a: Sequence[View], b: Sequence[View], *, interleaved: bool) -> Contrasts:
    differences = {path: _difference(a, b, path, interleaved=interleaved) for path in JUDGED}
    contrasts = judged({"/".join(path): each for path, each in differences.items()})
    return {path: contrasts["/".join(path)] for path in JUDGED}


def _difference(
    a: Sequence[View], b: Sequence[View], path: Path, *, interleaved: bool
) -> Difference | Absent:
    """Of the numbers that the table shows, with the scatter of the runs' own."""
    for view in (*a, *b):
        if grade_of(view, path) == Grade.UNRELIABLE:
            return Absent(f"the client read too late in {view.name}: {' '.join(path[1:])} is unreliable")
    of_a, of_b = (points(views, path) for views in (a, b))
    for values in (of_a, of_b):
        if isinstance(values, Absent):
            return values
    shown_a, shown_b = (figure_of(views, path) for views in (a, b))
    if isinstance(shown_a, Absent) or isinstance(shown_b, Absent) or not shown_a.point or not shown_b.point:
        return Absent("a ratio needs values above 0", "not-positive")
    point = math.log(shown_b.point / shown_a.point)
    found = between_runs(np.array(of_a), np.array(of_b), interleaved=interleaved, point=point)
    noise = _stored_noise((*a, *b), path)
    if isinstance(found, Difference) and found.error is None and noise is not None:
        return with_noise(found, noise)
    return found


def _stored_noise(views: Sequence[View], path: Path) -> Noise | None:
    """The largest A/A noise that all runs' systems have stored for the number; None where one has none."""
    stored = [view.manifest.noise.get(".".join(path[1:])) for view in views]
    known = [Noise(each.spread, each.n_runs) for each in stored if each is not None]
    return max(known, key=lambda noise: noise.apart) if len(known) == len(views) else None


def grade_of(view: View, path: Path) -> Grade:
    """The grade of the number at `path`; what has none is ok."""
    if path[0] != "metrics":
        return Grade.OK
    graded = view.summary.grades.get(path[1], {}).get(path[2])
    return graded.grade if graded else Grade.OK


def better(contrast: Contrast | Absent | None, which: str) -> bool | None:
    """Whether the ratio's first contender is better, None where that is open; `which` is lower or higher."""
    if not isinstance(contrast, Contrast) or contrast.answer != Answer.DIFFERENT:
        return None
    return (contrast.ratio.point > 1) == (which == "higher")


def turned(contrasts: Contrasts) -> Contrasts:
    """The same numbers with each ratio the other way round."""
    return {path: each if isinstance(each, Absent) else _turned(each) for path, each in contrasts.items()}


def _turned(contrast: Contrast) -> Contrast:
    ratio = contrast.ratio
    point, low, high = (
        None if end is None else 1 / end if end else math.inf for end in (ratio.point, ratio.high, ratio.low)
    )
    assert point is not None
    return replace(contrast, ratio=replace(ratio, point=point, low=low, high=high))


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
    upward = (_turned(contrast) if is_below else contrast).ratio
    word = ("faster" if is_below else "slower") if is_time else ("lower" if is_below else "higher")
    return Times(upward.point, upward.low, upward.high, word)


def why_open(contrast: Contrast, contrasts: Contrasts) -> str:
    """Why a difference is not significant, one of `contrasts`; "" where it is."""
    low, high = contrast.ratio.low, contrast.ratio.high
    if contrast.answer != Answer.INCONCLUSIVE:
        return ""
    if low is None or high is None:
        return "not significant, as one run does not show the noise between runs"
    if low <= 1 <= high:
        return "not significant"
    n = sum(isinstance(c, Contrast) and c.ratio.low is not None for c in contrasts.values())
    return f"not significant after correcting for {n} compared numbers"


def finding(pair: Pair, contrasts: Contrasts, titles: Mapping[Path, tuple[str, str]]) -> str:
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
        return f"{one} against {other}: nothing can be compared."
    told = [f"{one} is {', '.join((*groups['better'], *groups['worse']))} than {other}"]
    told = told if groups["better"] or groups["worse"] else [f"{one} against {other}"]
    told += [f"the same within {MARGIN:.0%}: {', '.join(groups['same'])}"] * bool(groups["same"])
    told += [f"inconclusive: {', '.join(groups['inconclusive'])}"] * bool(groups["inconclusive"])
    return f"{'; '.join(told)}."


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
        yield (
            "The noise between runs of one system is unknown, so nothing is called different or the same: "
            f"{LEAST_RUNS} runs of each measure it (`burstline run --repeats {LEAST_RUNS}`)."
        )
        return
    yield "Different: significant at 5% after correcting for all compared numbers."
    yield f"Same: within {MARGIN:.0%}."
    more = [c.more_runs for c in found if c.answer == Answer.INCONCLUSIVE]
    if more:
        yield "Inconclusive: neither; it detects a difference of the size given in four of five cases."
        known = max((n for n in more if n is not None), default=0)
        many = f"more than {MOST_RUNS}" if None in more else f"about {known} more"
        yield f"{many[0].upper()}{many[1:]} runs of each would decide what is inconclusive now."


def to_json(pair: Pair, contrasts: Contrasts, titles: Mapping[Path, tuple[str, str]]) -> dict[str, Any]:
    """One pair for machines; a number that cannot be compared has no answer and the reason why."""
    return {
        "of": pair[1],
        "against": pair[0],
        "numbers": {titles[path][0]: _json(contrast) for path, contrast in contrasts.items()},
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
