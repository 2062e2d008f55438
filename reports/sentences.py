"""What verdicts, limits and findings are called: each sentence once, by its code.

`{name}` in a template stands for a value that the caller fills in: `say("open.noise", n=5)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from burstline.loadgen.record.verdict import State
from burstline.loadgen.verdict.comparable import ALONE, COMPARABLE

INTERRUPTED: Final = "INTERRUPTED"
SWEEP: Final = "SWEEP"
REPEATS: Final = "REPEATS"

STATES: Final[Mapping[str, tuple[str, str, str]]] = {
    State.VALID: ("good", "✓", "Every check passed: these numbers can be used."),
    State.FAILED: (
        "bad",
        "✕",
        "Nothing was served, or too many requests failed: do not use these numbers.",
    ),
    State.CLIENT_BOUND: (
        "bad",
        "✕",
        "The client's times are not reliable: do not use the percentiles graded unreliable.",
    ),
    State.DISTURBED: (
        "warn",
        "!",
        "Other work on this machine took CPU time from the client or the server.",
    ),
    State.NOT_STATIONARY: (
        "warn",
        "!",
        "The server did not reach steady state: these numbers depend on the run's length.",
    ),
    State.NOT_COMPARABLE: (
        "warn",
        "!",
        "The server did other work than asked: do not compare these numbers.",
    ),
    State.COLD: ("warn", "!", "The first requests were slower than the rest, and the figures count them."),
    INTERRUPTED: (
        "warn",
        "!",
        "The run was interrupted: these numbers describe its first part, which passed every check.",
    ),
}
"""A run's verdict: its tone, its mark and what it means."""

COMPARED: Final[Mapping[str, tuple[str, str, str]]] = {
    **STATES,
    SWEEP: ("good", "✓", "One system at several loads: throughput against latency."),
    REPEATS: ("good", "✓", "One system, several runs: numbers over all of them."),
    COMPARABLE: ("good", "✓", "The engines did the same work under the same settings: the numbers compare."),
    ALONE: ("warn", "!", "Only one system: its runs are shown, nothing is compared."),
    State.NOT_COMPARABLE: ("bad", "✕", "These runs did different work: they are not ranked."),
}
"""The same of a comparison's state."""

MEANT_BY: Final[Mapping[str, str]] = {
    "died": "The server died: do not use these numbers.",
    "no-request": "The plan has no requests.",
    "no-success": "Nothing was served.",
    "mostly-failed": "Too many requests failed: do not use these numbers.",
    "too-many-failures": "Too many requests failed: do not use these numbers.",
    "read-lag": "The client read too late: do not use the percentiles graded unreliable.",
    "instrument-error": "The client's time stamps are wrong: do not use the percentiles graded unreliable.",
    "read-unknown": "How late the client read is not known: do not use the percentiles graded unreliable.",
}
"""What a state means in this run, by the code of the reason for it."""

SENTENCES: Final[Mapping[str, str]] = {
    # What limited a run: what it was, then how that shows.
    "limit.client": "What limited the run is not known: the client's own times are not reliable",
    "limit.overloaded": (
        "Limited by the server: requests came faster than it served them, and its queue kept growing"
    ),
    "limit.load": "Limited by the load: the server kept up with {load}, with at most {most} in flight",
    "limit.one-at-a-time": "Limited by the concurrency: 1 request at a time",
    "limit.concurrency": "Limited by the concurrency: {n} at a time, {waits}",
    "limit.one-in-flight": "Limited by the load: never more than 1 request in flight",
    "limit.unknown": "What limited the run is not known: the server's queue was not recorded ({reason})",
    "limit.steps": (
        "Limited by the speed of the server's steps, not by its queue: at most {n} in flight, {waits}"
    ),
    "limit.gaps": "Limited by the load: at most {n} in flight, {waits}",
    "limit.batch": "Limited by the batch limit of {slots}: {ran}",
    "limit.kv-cache": "Limited by the KV cache: {ran}",
    "limit.token-budget": "Limited by the token budget of {budget} a step: {ran}",
    "limit.own-batch": "Limited by the server's batch: {ran}",
    "limit.queue": "Limited by the server: {ran}",
    # What late reading did to a percentile.
    "read.widened": "late reading may have moved it by {by}, which its interval includes",
    "read.unreliable": "unreliable: late reading may have moved it by {by}",
    "read.unknown": "unreliable: how late it was read is not known",
    # Why nothing is compared.
    "missing": "No finished run: {what}.",
    "nothing": "No run came to its end: there is nothing to compare.",
    "not-compared": "Not compared: {why}.",
    "no-e2e": "{label} has no E2E p50",
    "not-ranked": "Not ranked: {names}. The others did the same work: their numbers compare.",
    "not-usable": "Not usable: {names}.",
    "nothing-ranked": "Not all runs are valid ({state}): nothing is ranked.",
    "no-ratio": "{one} against {other}: nothing can be compared.",
    "no-e2e-ratio": "{one} and {other} cannot be compared in E2E p50",
    # Who is faster.
    "equal": "{one} and {other} are equally fast (E2E p50 within {percent}%{ends})",
    "equally-long": "{one} and {other} take equally long (E2E p50){ends}",
    "faster": "{one} is {times} than {other} (E2E p50){ends}",
    "fastest": "{first} is fastest in {n} of {cases} cases: {by} faster than {next} (E2E p50).",
    "lowest": "{first} has the lowest E2E p50 in {n} of {cases} cases; {sure}.",
    "lead": "the lead over the next is significant in {n}",
    "no-lead": "no lead over the next is significant",
    # Why a difference is open.
    "open": "not significant",
    "open.one-run": "not significant, as one run does not show the noise between runs",
    "open.corrected": "not significant after correcting for {n} compared numbers",
    # How the words of a comparison are meant.
    "words.no-noise": (
        "The noise between runs of one system is unknown, so nothing is called different or the same: "
        "{n} runs of each measure it (`burstline run --repeats {n}`)."
    ),
    "words.different": "Different: significant at 5% after correcting for all compared numbers.",
    "words.same": "Same: within {margin}.",
    "words.inconclusive": (
        "Inconclusive: neither; it detects a difference of the size given in four of five cases."
    ),
    "words.more-runs": "{many} runs of each would decide what is inconclusive now.",
    "words.best": "★: significantly better than every other.",
    "words.noise": "A/A noise: two runs of one system differ by more only once in twenty.",
    # What a sweep shows.
    "sweep.best": "Most output that meets all SLOs for certain",
    "sweep.none": "No load meets all SLOs for certain: {labels}.",
    "sweep.highest": "Highest output",
    "sweep.highest-kept-up": "Highest output of the loads that the server kept up with",
    "sweep.highest-reliable": "Highest output of the reliable loads",
    "sweep.hollow": "Hollow points cannot be relied on: {points}.",
    "sweep.lacks": "{title} lacks {points}.",
    "sweep.not-drawn": "{p} is not drawn against the load: {reason} ({label}, {load}).",
    "sweep.steady": "Percentiles count the requests of a run's steady state, often fewer than were sent.",
}


def say(code: str, **values: object) -> str:
    return SENTENCES[code].format(**values)
