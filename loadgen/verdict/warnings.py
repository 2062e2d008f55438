"""Warnings: what a reader must know that does not change the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from burstline.loadgen.metrics.server_histograms import disagreement
from burstline.loadgen.record.drive_report import LostDriver
from burstline.loadgen.record.manifest import WarmUpBursts
from burstline.loadgen.record.record import OUTCOME_WORDS, RECOUNTS, Outcome, failed
from burstline.loadgen.record.summary import Conservation, Summary
from burstline.loadgen.record.verdict import Reason
from burstline.loadgen.stats.estimates import Estimate, Figure, early_stopping_floor
from burstline.loadgen.verdict.judge import BUSY

NOTABLE = 0.01


def caveats(
    summary: Summary,
    *,
    status: str = "complete",
    server_here: bool = False,
    expected_cached: float | None = None,
    counted_cached: float | None = None,
    warm_up: WarmUpBursts | None = None,
    cold: Reason | None = None,
    cancel_share: float = 0.0,
    lost: Sequence[LostDriver] = (),
) -> tuple[Reason, ...]:
    """Every warning that applies, out of the summary's own sections.

    `expected_cached` is the share of prompt tokens that the plan's own prefixes let a cache serve,
    `counted_cached` what the server's counters say it served. `cold` is the warning on slow first requests
    that spoil no figure. Clients of `cancel_share` of the requests were to
    hang up; `lost` are drivers that were lost during the load.
    """
    lengths = summary.lengths
    earlier = None if summary.sessions is None else _point(summary.sessions.earlier_fraction)
    found = (
        _interrupted(status, summary.counts),
        _lost(lost),
        _few(summary.counts),
        _failures(summary.counts, status),
        _abandoned(summary),
        _not_abandoned(summary.counts, cancel_share, status),
        _prompt_lengths(_point(lengths.prompt_mismatches)),
        _guessed_chunks(sum(lengths.splits.get(name, 0) for name in ("spread", "unknown"))),
        _recounted(sum(lengths.output_sources.get(name, 0) for name in RECOUNTS)),
        _cached(_cached_fraction(summary, counted_cached), expected_cached, earlier),
        _unsettled(warm_up),
        cold,
        _conservation(summary.conservation, summary.counts),
        None if server_here else _busy_machine(_point(summary.instrument.others_cpu_fraction)),
        disagreement(summary.agreement),
    )
    return tuple(reason for reason in found if reason is not None)


def _lost(lost: Sequence[LostDriver]) -> Reason | None:
    if not lost:
        return None
    first = min(lost, key=lambda each: each.at_s)
    share = sum(each.share for each in lost if each.at_s < first.at_s + 1.0)
    text = f"From {first.at_s:.1f} s on {share:.0%} of the load was missing: {first.why}."
    return Reason("lost-drivers", text, "The figures count what was due before that.")


def _interrupted(status: str, counts: Mapping[str, int]) -> Reason | None:
    if status != "interrupted":
        return None
    text = f"The run was interrupted: {counts['ok']:,} of {counts['planned']:,} requests had succeeded."
    return Reason("interrupted", text, "Run it again to its end.")


def _few(counts: Mapping[str, int]) -> Reason | None:
    ok, floor = counts["ok"], early_stopping_floor(0.5)
    if not 0 < ok < floor or ok < counts["planned"]:
        return None
    many = f"{ok} request{'s' * (ok > 1)} succeeded"
    return Reason("too-few", f"{many}; even a median needs {floor}.", "Ask for more with --requests.")


def _failures(counts: Mapping[str, int], status: str = "complete") -> Reason | None:
    failures = failed(counts, interrupted=status == "interrupted")
    if not failures or not counts["ok"]:
        return None
    kinds = ", ".join(f"{n:,} {OUTCOME_WORDS.get(kind, kind)}" for kind, n in failures.items())
    text = f"{sum(failures.values()):,} of {counts['planned']:,} requests failed: {kinds}."
    return Reason("failures", text, "They count as infinitely late; the report lists the first of each kind.")


def _not_abandoned(counts: Mapping[str, int], share: float, status: str) -> Reason | None:
    """Fewer clients hung up than planned: replies ended first, or the point to hang up was not recognised."""
    n = counts.get(Outcome.ABANDONED, 0)
    if status != "complete" or n >= share * (counts["ok"] + n) / 2:
        return None
    text = f"{n:,} clients hung up, though a share of {share:.0%} of {counts['planned']:,} was to."
    return Reason(
        "not-abandoned", text, "Shorter replies end before that: give fewer tokens, --cancel-share P,after=N."
    )


def _abandoned(summary: Summary) -> Reason | None:
    """How many clients hung up as planned, and whether the server has freed what it held for them."""
    n, memory = summary.counts.get(Outcome.ABANDONED, 0), summary.memory
    if not n:
        return None
    text = f"{n:,} of {summary.counts['planned']:,} requests were abandoned by their clients, as planned"
    advice = "They count in no latency and no throughput; the server's work on them does slow the others."
    running, kv = memory.running_after, memory.kv_after_fraction
    held = " and ".join(
        words
        for figure, words in (
            (running, f"{_point(running):,.0f} requests in flight"),
            (kv, f"{_point(kv):.1%} of its KV cache in use"),
        )
        if isinstance(figure, Estimate)
    )
    if not held:
        return Reason("abandoned", f"{text}; the server does not report whether it freed them.", advice)
    if _point(running) > 0 or _point(kv) > NOTABLE:
        advice = "It works on for clients that have gone: it does not stop when a client hangs up."
        return Reason(
            "abandoned-not-freed",
            f"{text}; after the load the server had {held}, beyond what it had before.",
            advice,
        )
    return Reason("abandoned", f"{text}; the server freed them: {held} after the load.", advice)


def _prompt_lengths(n: float) -> Reason | None:
    if not n:
        return None
    text = f"The server counted a different prompt length than planned for {n:,.0f} requests."
    causes = "a special token that the server adds, or a reply whose text splits otherwise in the next turn"
    return Reason("prompt-length", text, f"The usual causes: {causes}.")


def _guessed_chunks(n: int) -> Reason | None:
    if not n:
        return None
    text = f"The server did not say how many tokens each event of {n:,} replies carries."
    return Reason("chunks", text, "Their ITL is an even spread: read ICL and TPOT instead.")


def _recounted(n: int) -> Reason | None:
    if not n:
        return None
    text = f"The server did not count the tokens of {n:,} replies: their text was tokenized again."
    advice = "The count can be off by a token: an end-of-text token, for example, leaves no text."
    return Reason("recounted", text, advice)


def _cached_fraction(summary: Summary, counted: float | None) -> float | None:
    """By the replies' counts, else by the growth of the server's counters; None without either."""
    if isinstance(summary.lengths.cached_fraction, Estimate):
        return summary.lengths.cached_fraction.point
    return counted


def _cached(share: float | None, expected: float | None, earlier: float | None = None) -> Reason | None:
    """`earlier` is the share of prompt tokens that earlier turns brought: a cache serves at most these."""
    if earlier is not None:
        return _prefix_mismatch(share, earlier) if share is not None and share > earlier + NOTABLE else None
    if expected is not None and expected > NOTABLE:
        return _prefix_mismatch(share, expected)
    if share is None or share <= NOTABLE:
        return None
    text = f"The prefix cache served {share:.1%} of the prompt tokens."
    return Reason(
        "prefix-cache",
        text,
        "Results are not comparable with uncached runs. Pass a new --salt or disable the cache.",
    )


def _unsettled(warm_up: WarmUpBursts | None) -> Reason | None:
    if warm_up is None or warm_up.agree:
        return None
    return Reason("warm-up", warm_up.sentence, "Pass --warmup N with more requests; they do not count.")


def _prefix_mismatch(share: float | None, expected: float) -> Reason | None:
    if share is None:
        text = f"The plan's prefixes let a cache serve {expected:.1%} of the prompt tokens; the server "
        return Reason("prefix-unknown", text + "does not report what it served.", "Read TTFT with care.")
    if abs(share - expected) <= NOTABLE:
        return None
    gap = abs(share - expected) * 100
    text = f"The prefix cache served {share:.1%} of the prompt tokens, {gap:.1f} points "
    if share > expected:
        advice = (
            "An earlier run left its prompts there: pass a new --salt, or restart the server if the prompts "
            "are rows of --data, which have no salt."
        )
        return Reason(
            "prefix-more", f"{text}more than the plan's own prefixes allow ({expected:.1%}).", advice
        )
    advice = "Check that the KV cache holds it; requests in flight together share nothing yet."
    return Reason("prefix-less", f"{text}less than the plan allows ({expected:.1%}).", advice)


def _conservation(tokens: Conservation, counts: Mapping[str, int]) -> Reason | None:
    client, server = _point(tokens.output_client_tok), _point(tokens.output_server_tok)
    if abs(_point(tokens.output_residual)) <= NOTABLE:
        return None
    if server < client:
        text = f"The server's own metrics are incomplete: {server:,.0f} of {client:,.0f} generated tokens."
        return Reason("metrics-incomplete", text, "Use the client's counts: each reply was counted here.")
    more = (server - client) / client
    times = f"{more:.0%} more" if more < 1 else f"{server / client:.1f} times as many"
    text = f"The server generated {times} tokens than this client received."
    if counts["ok"] == counts["planned"]:
        return Reason("conservation", text, "Check whether others use this server.")
    advice = "It may have gone on with requests that failed here, or others use it."
    return Reason("conservation", text, advice)


def _busy_machine(others: float) -> Reason | None:
    if others <= BUSY:
        return None
    text = f"Processes that are neither client nor started server used {others:.0%} of this machine's CPU."
    return Reason("busy-machine", text, "Unless one of them is the server, they competed with it for CPU.")


def _point(figure: Figure | None) -> float:
    return figure.point if isinstance(figure, Estimate) else 0.0
