"""Comparison where engines served different lengths: only requests of equal realised output length."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loadgen.metrics.definitions import e2e, tpot, ttft
from loadgen.record.columns import Columns, Floats
from loadgen.stats.across_runs import over_runs
from loadgen.stats.estimates import Absent, Figure, early_stopping_floor
from loadgen.verdict.comparable import Comparability
from loadgen.verdict.served_work import Work

SOUND_WITH: Final = frozenset({"output-tokens", "finish-reasons"})
"""Differences that strata of equal length take out. A cache, a refusal or another precision they do not."""
LOAD_TOLERANCE: Final = 0.1
"""How far the whole load may differ: a server with less to do is faster for every request. MLPerf asks for
90% of the reference's tokens at least (https://github.com/mlcommons/inference_policies)."""
LEAST_COVERED: Final = 0.5
LEAST_IN_STRATUM: Final = early_stopping_floor(0.5)

METRICS: Final[dict[str, Callable[[Columns], Floats]]] = {"ttft": ttft, "tpot": tpot, "e2e": e2e}


@dataclass(frozen=True, slots=True)
class Matched:
    """Mean latencies over matched strata, by contender and metric, in seconds.

    `n_strata` lengths occur at every contender, each with LEAST_IN_STRATUM requests at least; each weighs as
    much as the contender with the fewest there. `covered` is the least share of a contender's whole replies
    in them.
    """

    means: dict[str, dict[str, Figure]]
    n_strata: int
    covered: float


def matched(works: Sequence[Work], gate: Comparability) -> Matched | Absent:
    """The matched-work estimate; Absent, with the reason, where it would not be sound."""
    codes = {reason.code for reason in gate.reasons}
    if "verdict" in codes:
        return Absent("not all runs can be believed")
    if codes - SOUND_WITH:
        return Absent(f"matching lengths does not take out {', '.join(sorted(codes - SOUND_WITH))}")
    groups = {
        label: [work for work in works if work.label == label]
        for label in dict.fromkeys(work.label for work in works)
    }
    loads = [_load(runs) for runs in groups.values()]
    if max(loads) <= 0 or min(loads) < (1 - LOAD_TOLERANCE) * max(loads):
        return Absent(
            f"the servers had {min(loads):,.0f} and {max(loads):,.0f} tokens to work on; beyond "
            f"{LOAD_TOLERANCE:.0%} the lighter load alone makes requests faster"
        )
    return _over_strata({label: [_samples(work) for work in runs] for label, runs in groups.items()})


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Whole replies of one run."""

    output_tok: Floats
    latencies: dict[str, Floats]


def _load(runs: Sequence[Work]) -> float:
    """Tokens a run had to work on, mean over the contender's runs."""
    per_run = [np.nansum((w.columns.prompt_tok + w.columns.output_tok)[w.ended]) for w in runs]
    return float(np.mean(per_run))


def _samples(work: Work) -> _Samples:
    c, known = work.columns, work.ended & ~np.isnan(work.columns.output_tok)
    return _Samples(c.output_tok[known], {name: of(c)[known] for name, of in METRICS.items()})


def _over_strata(samples: dict[str, list[_Samples]]) -> Matched | Absent:
    lengths = {label: np.concatenate([s.output_tok for s in runs]) for label, runs in samples.items()}
    counts = [dict(zip(*np.unique(own, return_counts=True), strict=True)) for own in lengths.values()]
    weights = {
        float(length): int(least)
        for length in counts[0]
        if (least := min(count.get(length, 0) for count in counts)) >= LEAST_IN_STRATUM
    }
    covered = min(float(sum(count[n] for n in weights) / sum(count.values())) for count in counts)
    if covered < LEAST_COVERED:
        return Absent(
            f"output lengths that occur {LEAST_IN_STRATUM} times everywhere cover {covered:.0%} of the "
            f"replies; {LEAST_COVERED:.0%} is needed"
        )
    means = {
        label: {name: _over_runs([_mean(run, name, weights) for run in runs]) for name in METRICS}
        for label, runs in samples.items()
    }
    return Matched(means, len(weights), covered)


def _mean(run: _Samples, name: str, weights: dict[float, int]) -> float:
    """The weighted mean of the strata's means in one run; NaN where a run has none of them."""
    values, total, below = run.latencies[name], 0.0, 0
    for length, weight in weights.items():
        inside = values[(run.output_tok == length) & ~np.isnan(values)]
        if len(inside):
            total, below = total + weight * float(inside.mean()), below + weight
    return total / below if below else math.nan


def _over_runs(means: Sequence[float]) -> Figure:
    """Runs are the units: requests of one run share its queue."""
    known = np.array([value for value in means if not math.isnan(value)])
    return over_runs(known, "s") if len(known) else Absent("defined for no matched request")
