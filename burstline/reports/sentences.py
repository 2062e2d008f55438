"""What verdicts, limits and findings are called: each sentence once, by its code.

`{name}` in a template stands for a value that the caller fills in: `say("open.noise", n=5)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from burstline.measure.record.verdict import State
from burstline.measure.verdict.comparable import ALONE, COMPARABLE

UNPROVEN: Final[Mapping[str, str]] = {"interrupted": "INTERRUPTED", "too-short": "TOO SHORT"}
"""What stands in place of VALID, by the code of the warning that takes it away."""
SWEEP: Final = "SWEEP"
REPEATS: Final = "REPEATS"

STATES: Final[Mapping[str, tuple[str, str, str]]] = {
    State.VALID: ("good", "✓", "Every check passed: these numbers can be used."),
    State.FAILED: ("bad", "✕", "Nothing was served, or too many requests failed: do not use these numbers."),
    State.CLIENT_BOUND: ("bad", "✕", "The client was late: do not use the percentiles graded unreliable."),
    State.DISTURBED: ("warn", "!", "Other processes took CPU time from the client or the server."),
    State.NOT_STATIONARY: ("warn", "!", "No steady state: these numbers depend on the length of the run."),
    State.NOT_COMPARABLE: ("warn", "!", "The server did not do the requested work: do not compare this run."),
    State.COLD: ("warn", "!",
        "The first requests were slower than the rest, and these numbers include them."),
    "INTERRUPTED": ("warn", "!", "The run was interrupted: these numbers cover the part before that."),
    "TOO SHORT": ("warn", "!", "The load was too short to see whether anything disturbed it."),
}  # fmt: skip
"""A run's verdict: its tone, its mark and what it means."""

COMPARED: Final[Mapping[str, tuple[str, str, str]]] = {
    **STATES,
    SWEEP: ("good", "✓", "One system at several loads: how throughput and latency change."),
    REPEATS: ("good", "✓", "Several runs of one system: the numbers cover all of them."),
    COMPARABLE: ("good", "✓",
        "All did the same work with the same settings. Each run alone is VALID: it passed its own checks."),
    ALONE: ("warn", "!", "Only one system has finished runs: there is nothing to compare."),
    State.NOT_COMPARABLE: ("bad", "✕", "These runs did different work: they are not ranked."),
}  # fmt: skip
"""The same for a comparison's state."""

MEANT_BY: Final[Mapping[str, str]] = {
    "died": "The server died: do not use these numbers.",
    "client-failed": "The client failed, not the server: do not use these numbers.",
    "no-start": "No request was sent.",
    "no-request": "The plan has no requests.",
    "no-success": "Nothing was served.",
    "mostly-failed": "Too many requests failed: do not use these numbers.",
    "too-many-failures": "Too many requests failed: do not use these numbers.",
    "one-core": "Client and server had one core together: the client waited for the server.",
    "read-lag": "The client read replies too late: do not use the percentiles graded unreliable.",
    "send-lag": "The client sent requests too late: do not use the percentiles graded unreliable.",
    "slow-client": "The client sent a lower load than asked: do not use these numbers.",
    "instrument-error": "The client's time stamps are wrong: do not use the percentiles graded unreliable.",
    "read-unknown": "The client may have read replies late: do not use the percentiles graded unreliable.",
}
"""What a state means in this run, by the code of the reason for it."""

SENTENCES: Final[Mapping[str, str]] = {
    # What limited a run: what it was, then how that shows.
    "limit.client": "What limited {whom} is unknown: the client's own times are not reliable",
    "limit.overloaded": "Limited by the server: requests arrived faster than it served them, and its queue "
    "kept growing",
    "limit.refused": "{who} refused {n}, probably because its queue was full",
    "limit.lost": "{who} answered {n} with HTTP 503, probably because a worker was lost: other streams broke",
    "limit.others": "The {n} that succeeded were limited",
    "limit.load": "Limited only by the load: the server kept up with {load}, with at most {most} in flight",
    "limit.concurrency": "{who} had room for {all} requests at once, so throughput depended only on the "
    "concurrency and on how fast {it} ran the model: {n} at a time{waits}",
    "limit.concurrency-unwatched": "Limited by the concurrency of the load: {n} at a time, but "
    "whether any waited in the server is not known ({reason})",
    "limit.pauses": "Limited by the pauses of the users: on average {mean} requests of {n} in flight",
    "limit.one-in-flight": "Limited only by the load: never more than 1 request in flight",
    "limit.too-short": "What limited {whom} is unknown: the run was too short to watch the server's queue",
    "limit.unknown": "What limited {whom} is unknown: the server's queue was not recorded ({reason})",
    "limit.streams": "Limited by the server: at most {n} of {most} streamed at once, and the rest waited for "
    "their first token (by the replies: its queue was not recorded, {reason})",
    "limit.steps": "{who} had room for {all} requests at once, so the time went into running the model, not "
    "into waiting for a place in the batch: at most {n} in flight{waits}",
    "limit.gaps": "Limited by the load: at most {n} in flight{waits}",
    "limit.batch": "Limited by the batch limit of {slots}{flag}: {ran}",
    "limit.kv-cache": "Limited by the KV cache: {ran}",
    "limit.token-budget": ("Limited by the budget of {budget} tokens a step{flag}: {ran}"),
    "limit.own-batch": "Limited by the batch size: {ran}",
    "limit.queue": "Limited by the server: {ran}",
    "limit.not-measured": "What limited the server was not measured.",
    "limit.not-why": "Why the engines differ in speed was not measured.",
    "not-reconciled": "The run cannot be compared with its hardware: {why}.",
    "no-slo": "No SLOs were set; --slo sets them.",
    "no-target": "for information: no goodput SLO is set",
    "rates.of-succeeded": "The rates count the {n} that succeeded; for latency, a failed request counts as "
    "infinitely late.",
    "rates.apart": "Tokens count when they arrive, requests when they end: over this window the output rate "
    "is not exactly {tokens} tokens times the request rate.",
    # What the client's lateness, or text held on its way, did to a percentile.
    "sent.unreliable": "unreliable: the client sent requests late, which changed it by {by}",
    "held.unreliable": "unreliable: text was held on its way, so this does not show the engine",
    "read.widened": "the client read late, which may have changed it by {by}; its interval includes that",
    "read.unreliable": "unreliable: the client read late, which may have changed it by {by}",
    "read.unknown": "unreliable: it is unknown how late the client read it",
    # Why nothing is compared.
    "missing": "No finished run: {what}.",
    "other-tool": "{name}: {tool}, {served} succeeded. {means}",
    "unknown-error": "{name}: the measurement error of {tool} is unknown, and its work may differ.",
    "others-are-read": "Results of other tools are shown but not ranked.",
    "nothing": "No run finished: there is nothing to compare.",
    "not-compared": "Not compared: {why}.",
    "no-e2e": "{label} has no E2E p50",
    "not-ranked": "Not ranked: {names}. The other cases can be compared.",
    "not-usable": "Not usable: {names}.",
    "not-all-valid": "{n} of {of} runs are not VALID ({states}): do not rely on these numbers.",
    "nothing-ranked": "Not all runs are valid ({state}), so nothing is ranked.",
    "no-e2e-ratio": "{one} and {other} cannot be compared by E2E p50",
    # Who is faster.
    "equal": "{one} and {other} are equally fast (E2E p50 within {percent}%{ends})",
    "equally-long": "{one} and {other} take the same time (E2E p50){ends}",
    "undecided": "No significant difference between {one} and {other} (E2E p50): {one} was {times}, {ends}; "
    "with this many runs, only differences of {least} or more can be detected",
    "faster": "{one} is {times} than {other} (E2E p50){ends}",
    "contrary": "but {parts} with {one}",
    "fastest": "{first} is fastest in {n} of {cases} cases: {by} faster than {next} (E2E p50).",
    "lowest": "{first} has the lowest E2E p50 in {n} of {cases} cases; {sure}.",
    "lead": "its lead is significant in {n}",
    "no-lead": "its lead over {others} is not significant",
    # Why a difference is open.
    "open": "not significant",
    "open.one-run": "not significant, since one run each does not show the noise",
    # What to do next.
    "next.looser": "loosen {slo}, which is out of reach: {metric} was {least} at the lowest{most}.",
    "next.most": " and {most} at the highest",
    "next.room": "raise {flags} to about {n}, which the KV cache can hold.",
    "next.all": "raise {flags} to {n}, so that all requests run at once.",
    "next.raise": "raise {flags}.",
    "next.lower": "lower --concurrency until the SLOs hold: `burstline limit` finds the highest that does.",
    "next.repeat": "Next: run each of them three times (--repeats 3) to see whether this is more than noise.",
    "next.more": "Next: to settle which of {names} is faster, run each {times}{per} ({n} runs).",
    # How the words of a comparison are meant.
    "words.no-noise": "The noise between runs is unknown, so no difference is called significant: run each "
    "{n} times to measure it (`burstline run --repeats {n}`).",
    "words.different": "Different: significant at 5%, corrected for the number of comparisons.",
    "words.same": "Same: the interval lies within {margin} of equal.",
    "words.inconclusive": "Inconclusive: neither. A difference of the size given would be detected with 80% "
    "power.",
    "words.best": "★: significantly better than every other.",
    "words.noise": "A/A noise: 95% of pairs of runs of one system differ by less.",
    # What a sweep shows.
    "highest.several": "Highest load that meets the SLOs: {loads}.",
    "highest.found": "{who} meets {slos} up to {low}, but not at {high}; the chance that this is wrong is "
    "at most {error}.",
    "highest.open": "The limit of {who} is {known}, not confirmed.",
    "highest.between": "between {held} (holds) and {missed} (misses)",
    "highest.above": "above {held} (holds)",
    "highest.below": "below {missed} (misses)",
    "highest.unknown": "unknown",
    "highest.none": "{who} misses {slo} even at {least}, the lowest load: no load meets all SLOs.",
    "highest.none-seen": "No load probed met all SLOs: even at {least}, {who} misses {slo}.",
    "highest.change": "Next: try a looser SLO, shorter prompts or a faster setting; no lower load helps.",
    "highest.lower": "Next: try a lower load, then a looser SLO, shorter prompts or a faster setting.",
    "highest.basis": "This rests on {probes} with {n} in all{valid}.",
    "highest.lost": "; {n} ({states}) cannot decide it",
    "highest.repeated": "The last {n} probes could not decide: {states}. {why}",
    "highest.changed": "Probe {number} says little, because its speed changed: {why}",
    "highest.change-by": "the latency {moved} by {percent} during the probe. Look for throttling and other "
    "work on the server.",
    "highest.more": "Next: run again with --budget-s {budget}; about {more} more requests ({more_s}) would "
    "confirm both loads.",
    "highest.state-confirmed": "The lower load was probed again and met the SLOs again; "
    "the higher was probed again and missed one again.",
    "highest.state-open": "The search, with a budget of {budget}, ended before fresh probes had confirmed "
    "both loads: its first probes find the limit only roughly.",
    "highest.state-lost": "The search stopped: its last probes were repeated, and still could not decide.",
    "highest.state-none": "Even the lowest load misses an SLO.",
    "load.figure": "{latency} and output of each probe by its {load}. The number beside a point is the place "
    "of its probe in the search.",
    "load.explained": "Green is where the SLO is met, grey where the limit lies; a hollow point is "
    "inconclusive, not reliable, or of another percentile.",
    "sweep.explained": "Each point is one load; its number is the {what}. Of two curves the higher one gives "
    "more output at the same latency. Whiskers are 95% intervals; an arrow marks an open end. Green is where "
    "an SLO is met: a load passes only if its whole interval lies there. Hollow points are not reliable.",
    "sweep.best": "Highest output that meets all SLOs",
    "sweep.none": "{labels}: no load is shown to meet all SLOs.",
    "sweep.highest": "Highest output",
    "sweep.highest-kept-up": "Highest output of the loads that the server kept up with",
    "sweep.highest-reliable": "Highest output of the reliable loads",
    "sweep.next-higher": "Next: try loads above {load}, at which all SLOs are still met.",
    "sweep.next-rising": "Next: try loads above {load}, where the output still rises.",
    "sweep.next-limit": "Next: narrow the limits down with `burstline limit`: {between}.",
    "sweep.next-slo": "Next: choose an SLO; `burstline limit --slo` finds the highest load within it.",
    "sweep.next-longer": "Next: run each load longer, until its SLOs are decided.",
    "sweep.hollow": "Hollow points are not compared or not reliable: {points}.",
    "sweep.lacks": "Missing from “{title}”: {points}.",
}

LIMITS: Final[Mapping[str, str]] = {
    "limit.overloaded": "The server: its queue grew",
    **dict.fromkeys(("limit.load", "limit.gaps", "limit.one-in-flight"), "Only the load"),
    "limit.pauses": "The users' pauses",
    **dict.fromkeys(("limit.concurrency", "limit.concurrency-unwatched"), "The concurrency"),
    "limit.steps": "Running the model",
    "limit.batch": "The batch limit",
    **dict.fromkeys(("limit.own-batch", "limit.streams"), "The batch size"),
    "limit.kv-cache": "The KV cache",
    "limit.token-budget": "The tokens of a step",
    "limit.queue": "The server's queue",
    "limit.refused": "The server refused requests",
    "limit.lost": "Requests were lost",
    **dict.fromkeys(("limit.client", "limit.too-short", "limit.unknown"), "Unknown"),
}
"""What limited a run, in two or three words."""

NEXT: Final[Mapping[str, str]] = {
    "limit.overloaded": "lower the load, or try a faster device, a smaller data type or more devices.",
    "limit.load": "run `burstline limit`, which finds the highest load within your SLOs.",
    **dict.fromkeys(("limit.concurrency", "limit.concurrency-unwatched"), "raise --concurrency."),
    "limit.one-in-flight": "send more requests at once.",
    "limit.pauses": "raise --concurrency: the server had room for more users.",
    "limit.steps": "try a faster device, a smaller data type or more devices.",
    "limit.batch": "raise the batch limit in the server's settings.",
    "limit.kv-cache": "give the KV cache more memory.",
    "limit.token-budget": "raise the budget of tokens a step in the server's settings.",
    **dict.fromkeys(("limit.own-batch", "limit.streams"), "raise the batch size in the server's settings."),
    "limit.queue": "look at the server's scheduler settings.",
    "limit.too-short": "send more requests.",
    "limit.unknown": "send a lower load: where TTFT falls, requests waited in the server's queue.",
}
"""What to try after a valid run, by what limited it."""


def say(code: str, **values: object) -> str:
    return SENTENCES[code].format(**values)


def say_next(advice: str) -> str:
    return f"Next: {uncapitalised(advice)}" if advice else ""


def uncapitalised(sentence: str) -> str:
    return f"{sentence[:1].lower()}{sentence[1:]}"
