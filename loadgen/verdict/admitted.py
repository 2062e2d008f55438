"""Which runs enter a comparison: a run that the client spoilt may be left out, by name and in the open."""

from __future__ import annotations

from collections.abc import Sequence

from loadgen.record.verdict import Reason, State
from loadgen.stats.across_runs import LEAST_RUNS
from loadgen.verdict.served_work import Work


def admitted(works: Sequence[Work]) -> tuple[tuple[Work, ...], tuple[Reason, ...]]:
    """The runs that are compared, and one reason for each that is left out.

    Left out is only what the client spoilt (CLIENT-BOUND), never what a server did; only by that verdict,
    which knows nothing of who would win; and only where three runs of the contender remain, more than are
    left out. Otherwise it stays in, and nothing is ranked.
    """
    spoilt = {
        label: [w for w in works if w.label == label and w.verdict == State.CLIENT_BOUND]
        for label in {work.label for work in works}
    }
    left_out: list[Work] = []
    for label, runs in spoilt.items():
        n_kept = sum(work.label == label for work in works) - len(runs)
        if n_kept >= LEAST_RUNS and n_kept > len(runs):
            left_out += runs
    reasons = tuple(
        Reason(
            "left-out",
            f"{work.run} ({work.label}) is left out: it is {work.verdict}. {work.verdict_reason}".rstrip(),
            "The others of its contender are compared; run it again to have it in.",
        )
        for work in works
        if work in left_out
    )
    return tuple(work for work in works if work not in left_out), reasons
