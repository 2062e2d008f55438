"""What a page or a terminal says first of one run: how much was served and how fast, or why nothing was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from loadgen.metrics.summary_types import Summary
from loadgen.record.record import NO_FAILURES, OUTCOME_WORDS
from loadgen.stats.figure import Estimate, Figure
from reports.blocks import Answer
from reports.number_format import duration, number
from reports.run_view import View


def answer(summary: Summary, view: Callable[[], View]) -> Answer:
    """The sentence, and under it the failures and the slow tail.

    `view` is made only where nothing was served: the words of the failures stand in the records alone.
    """
    if not summary.counts.get("ok"):
        return Answer(f"Nothing was served: {cause(view())}")
    details = [part for part in (_cut_short(summary), _failures(summary), _tail(summary)) if part]
    return Answer(sentence(summary), tuple(details))


def sentence(summary: Summary) -> str:
    """`Served 34.0 req/s, 2,170 output tok/s; median first token 13.7 s, then 115 ms per token.`"""
    rate = _of(summary.figure("throughput", "requests_per_s"))
    tokens = _of(summary.figure("throughput", "output_tok_per_s"))
    first, each = (_of(summary.figure("metrics", name, "p50")) for name in ("ttft", "tpot"))
    served = [f"{number(rate)} req/s" if rate else "", f"{number(tokens)} output tok/s" if tokens else ""]
    waits = [
        f"median first token {duration(first)}" if first else "",
        f"then {duration(each)} per token" if each else "",
    ]
    parts = (", ".join(filter(None, group)) for group in (served, waits))
    said = "; ".join(filter(None, parts))
    return f"Served {said}." if served[0] else f"{said[:1].upper()}{said[1:]}."


def cause(view: View) -> str:
    """Why nothing was served: what the run's own error says, else how requests ended and the first error."""
    if view.manifest.error:
        return view.manifest.error
    outcomes = Counter(str(outcome) for outcome in view.words("outcome"))
    if not outcomes:
        return "the plan has no requests."
    words = next((error for error in view.words("error") if error), "")
    first, *others = outcomes
    if not others:
        ended = OUTCOME_WORDS.get(first, f"ended as {first}")
        return f"all {len(view.columns):,} requests {ended}{f': {words}' if words else ''}."
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in outcomes.most_common())
    return f"all {len(view.columns):,} requests failed ({kinds}){f'; first error: {words}' if words else ''}."


def _cut_short(summary: Summary) -> str:
    if not any(warning.code == "interrupted" for warning in summary.verdict.warnings):
        return ""
    ok, planned = summary.counts["ok"], summary.counts["planned"]
    return f"The run was interrupted after {ok:,} of {planned:,} requests: run it again to its end."


def _failures(summary: Summary) -> str:
    failed = Counter({kind: n for kind, n in summary.counts.items() if n and kind not in NO_FAILURES})
    if not failed:
        return ""
    kinds = ", ".join(f"{n:,} {OUTCOME_WORDS.get(kind, kind)}" for kind, n in failed.most_common(3))
    total = f"{failed.total():,} of {summary.counts['planned']:,}"
    return f"{total} requests failed ({kinds}); they count as infinitely late."


def _tail(summary: Summary) -> str:
    """Where the slowest requests stand out: p99 at least three times the median."""
    median, tail = (_of(summary.figure("metrics", "e2e", p)) for p in ("p50", "p99"))
    if not median or not tail or tail < 3 * median:
        return ""
    return (
        f"The slowest 1% take {number(tail / median)} times as long as the median request ({duration(tail)})."
    )


def _of(figure: Figure) -> float | None:
    return figure.point if isinstance(figure, Estimate) and figure.point < float("inf") else None
