"""What can still be said where engines served different lengths: requests of equal realised output length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from loadgen.metrics.definitions import e2e, tpot, ttft
from loadgen.record.columns import Columns, Floats
from loadgen.stats.estimates import (
    LEVEL,
    Absent,
    Estimate,
    Figure,
    early_stopping_floor,
    interval,
    replicates,
)
from loadgen.verdict.comparable import Comparability
from loadgen.verdict.served_work import Work

SOUND_WITH: Final = frozenset({"output-tokens", "finish-reasons"})
"""Differences that strata of equal length take out. A cache, a refusal or another precision they do not."""
LOAD_TOLERANCE: Final = 0.1
"""How far the whole load may differ: a server with less to do is faster for every request. MLPerf asks for
90 % of the reference's tokens at least (https://github.com/mlcommons/inference_policies)."""
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


def matched(works: Sequence[Work], gate: Comparability, rng: np.random.Generator) -> Matched | Absent:
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
    return _over_strata({label: _samples(runs) for label, runs in groups.items()}, rng)


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Whole replies of one contender, all its runs together."""

    output_tok: Floats
    latencies: dict[str, Floats]


def _load(runs: Sequence[Work]) -> float:
    """Tokens a run had to work on, mean over the contender's runs."""
    per_run = [np.nansum((w.columns.prompt_tok + w.columns.output_tok)[w.ended]) for w in runs]
    return float(np.mean(per_run))


def _samples(runs: Sequence[Work]) -> _Samples:
    known = [work.ended & ~np.isnan(work.columns.output_tok) for work in runs]
    return _Samples(
        np.concatenate([w.columns.output_tok[k] for w, k in zip(runs, known, strict=True)]),
        {
            name: np.concatenate([of(w.columns)[k] for w, k in zip(runs, known, strict=True)])
            for name, of in METRICS.items()
        },
    )


def _over_strata(samples: dict[str, _Samples], rng: np.random.Generator) -> Matched | Absent:
    counts = [dict(zip(*np.unique(s.output_tok, return_counts=True), strict=True)) for s in samples.values()]
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
        label: {name: _mean(s.output_tok, values, weights, rng) for name, values in s.latencies.items()}
        for label, s in samples.items()
    }
    return Matched(means, len(weights), covered)


def _mean(lengths: Floats, values: Floats, weights: dict[float, int], rng: np.random.Generator) -> Figure:
    """The weighted mean of the strata's means, by bootstrap within each stratum."""
    strata = [(values[(lengths == length) & ~np.isnan(values)], n) for length, n in weights.items()]
    strata = [(inside, n) for inside, n in strata if len(inside)]
    if not strata:
        return Absent("defined for no matched request")
    total = sum(n for _, n in strata)
    point = sum(n * float(inside.mean()) for inside, n in strata) / total
    draws = np.zeros(replicates(sum(len(inside) for inside, _ in strata)))
    for inside, n in strata:
        picks = rng.integers(0, len(inside), (len(draws), len(inside)))
        draws += n / total * inside[picks].mean(axis=1)
    low, high = interval(draws)
    n_used = sum(len(inside) for inside, _ in strata)
    return Estimate(point, low, high, LEVEL, n_used, "s", "bootstrap within strata of equal output length")
