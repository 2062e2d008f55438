"""What a page or a terminal says first of one run: how fast it was, what limited it, or why it failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from loadgen.record.manifest import Manifest
from loadgen.record.record import OUTCOME_WORDS, Outcome, failed
from loadgen.record.summary import Summary
from loadgen.record.verdict import State
from loadgen.stats.figure import Absent, Estimate, Figure
from reports.blocks import Answer
from reports.number_format import count, counted, duration, number
from reports.run_view import View
from roofline.reconcile.reconciliation import Reconciliation

QUEUED: Final = 0.25
"""Where on average a smaller share of the requests in flight waited in the server, its queue was no limit."""
FULL: Final = 0.9
"""A KV cache in use to this share admits no more requests."""
STRAGGLERS: Final = 0.75
"""A burst that had served 95% of its requests in a smaller share of its time ended with stragglers."""
SAMPLED: Final = 0.9
"""Gauges are read every so often: a batch seen filled to this share was full."""


def answer(summary: Summary, manifest: Manifest, view: Callable[[], View]) -> Answer:
    """The sentence, and under it what was cut off or failed, what limited the run, and the slow tail.

    `view` is made only where nothing was served: the words of the failures stand in the records alone.
    """
    if not summary.counts.get("ok"):
        return Answer(f"Nothing was served: {cause(view())}")
    if summary.verdict.state == State.FAILED and (why := _failure(summary)):
        details = [_cut_short(summary), sentence(summary)]
        return Answer(why, tuple(filter(None, details)))
    limited = limit(summary, manifest)
    limits = limited.sentence if limited else ""
    details = [_cut_short(summary), _failures(summary), limits, _tail(summary, manifest)]
    return Answer(sentence(summary), tuple(filter(None, details)))


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
    said = f"the server's log says {view.log_cause.rstrip('.')}; " if view.log_cause else ""
    n = len(view.columns)
    requests = f"all {n:,} requests" if n > 1 else "the one request"
    first, *others = outcomes
    if not others:
        ended = OUTCOME_WORDS.get(first, f"ended as {first}")
        return f"{said}{requests} {ended}{f': {words}' if words else ''}."
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in outcomes.most_common())
    return f"{said}{requests} failed ({kinds}){f'; first error: {words}' if words else ''}."


class Limit(NamedTuple):
    """What limited a run, and how that shows: both parts of a sentence."""

    what: str
    how: str

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.how}."


def limit(summary: Summary, manifest: Manifest) -> Limit | None:
    """What kept the run from being faster, as far as that was recorded: the load, the server, the hardware.

    `Limited by the load: the server kept up with 20 req/s, with at most 5 requests in flight.`
    """
    if summary.verdict.state == State.CLIENT_BOUND:
        return Limit("The client may have limited the run", "it read replies too late")
    in_flight = summary.concurrency.max
    if isinstance(in_flight, Absent):
        return None
    found, hardware = _limited_by(summary, manifest, in_flight.point), _roofline(summary)
    return found._replace(how=f"{found.how}; {hardware}") if hardware else found


def _limited_by(summary: Summary, manifest: Manifest, in_flight: float) -> Limit:
    """The load or the server, from the queue in the server and from how the load was paced."""
    waiting, at_a_time = summary.concurrency.server_waiting_mean, manifest.concurrency
    if any(reason.code == "overloaded" for reason in summary.verdict.reasons):
        return Limit(
            "Limited by the server", "requests came faster than it served them, and its queue kept growing"
        )
    level = isinstance(summary.stationarity.in_flight_trend_p, Estimate)
    if at_a_time is None and level and summary.verdict.state != State.NOT_STATIONARY:
        asked = manifest.arrivals.rate_per_s if manifest.arrivals else None
        load = f"{asked:g} req/s" if asked else "the arrivals"
        most = counted(in_flight, "request")
        return Limit("Limited by the load", f"the server kept up with {load}, with at most {most} in flight")
    # A request that is sent as another's reply closes may overlap with it for a moment.
    in_flight = min(in_flight, at_a_time or in_flight)
    if _is_queued(summary, in_flight):
        return _batch(summary, manifest, in_flight)
    if in_flight == at_a_time == 1:
        return Limit("Limited by the concurrency", "1 request at a time")
    if in_flight == at_a_time:
        at_once = f"{counted(in_flight, 'request')} at a time, {_waits(waiting)}"
        return Limit("Limited by the concurrency", at_once)
    if in_flight <= 1:
        return Limit("Limited by the load", "never more than 1 request in flight")
    if isinstance(waiting, Absent):
        why = f"the server's queue was not recorded ({waiting.reason})"
        return Limit("What limited the run is not known", why)
    most = f"at most {counted(in_flight, 'request')} in flight, {_waits(waiting)}"
    if _is_burst(manifest):
        return Limit("Limited by the speed of the server's steps, not by its queue", most)
    return Limit("Limited by the load", most)


def _is_burst(manifest: Manifest) -> bool:
    arrivals = manifest.arrivals
    return manifest.concurrency is None and (arrivals is None or arrivals.pattern == "burst")


def _is_queued(summary: Summary, in_flight: float) -> bool:
    """Whether many requests waited in the server, and not all of them ever ran at once."""
    gauges = summary.concurrency
    waiting, running = _of(gauges.server_waiting_mean), _of(gauges.server_running_max)
    many = max(1.0, QUEUED * (_of(summary.concurrency.mean) or in_flight))
    return waiting is not None and waiting >= many and (running or 0) < SAMPLED * in_flight


def _waits(waiting: Figure) -> str:
    if isinstance(waiting, Absent):
        return f"but whether any waited in the server is not known ({waiting.reason})"
    if not waiting.point:
        return "none of which waited in the server"
    n = f"{waiting.point:,.1f} on average" if waiting.point >= 0.05 else "almost none"
    return f"of which {n} waited in the server"


def _batch(summary: Summary, manifest: Manifest, in_flight: float) -> Limit:
    """What the server's queue waited for: its batch limit, its KV cache, or what was not recorded."""
    running = _of(summary.concurrency.server_running_max)
    kv, preempted = _of(summary.memory.kv_peak_fraction), _of(summary.memory.preemptions) or 0
    slots = manifest.identity.max_num_seqs if manifest.identity else None
    by = "the server"
    if running and slots and SAMPLED * slots <= running <= slots:
        by = f"the batch limit of {counted(slots, 'request')}"
    elif (kv or 0) >= FULL or preempted:
        by = "the KV cache"
    elif running and not slots:
        by = "the server's batch"
    ran = "many requests waited in it"
    if running:
        below = f", below the batch limit of {slots:,}," if slots and by == "the server" else ""
        asked = summary.counts.get("planned", in_flight) if _is_burst(manifest) else in_flight
        most = f"at most {count(running)} of {count(asked)}"
        ran = f"{most} requests ran at once{below} and the others waited"
    full = f", with the KV cache up to {kv:.0%} full" if kv is not None else ""
    again = f" and {counted(preempted, 'preemption')}" if preempted else ""
    return Limit(f"Limited by {by}", f"{ran}{full}{again}")


def _roofline(summary: Summary) -> str:
    """What bounds a decode step, and how near to that bound the run came; "" where rates are in doubt."""
    found = summary.roofline
    if not isinstance(found, Reconciliation) or found.suspicions or not found.phases:
        return ""
    row = next((phase for phase in found.phases if phase.phase == "decode"), found.phases[0])
    bound = next(iter(row.limit_shares), None)
    if bound is None:
        return ""
    use = {"compute": row.mfu, "memory": row.mbu}.get(bound)
    steps = f"its {row.phase} steps are {bound}-bound"
    if use is None or use.measured is None or not 0 < use.measured <= use.ceiling:
        return f"{steps}, by the roofline model"
    what = {"compute": "arithmetic", "memory": "memory bandwidth"}[bound]
    return f"{steps} and reach {use.measured / use.ceiling:.0%} of the {what} that the device can give"


def _interrupted(summary: Summary) -> bool:
    return any(warning.code == "interrupted" for warning in summary.verdict.warnings)


def _cut_short(summary: Summary) -> str:
    if not _interrupted(summary):
        return ""
    ok, planned = summary.counts["ok"], summary.counts["planned"]
    n_cut = summary.counts.get(Outcome.CANCELLED, 0)
    late = f"; the {n_cut:,} that it cut off count as infinitely late" if n_cut else ""
    return f"The run was interrupted after {ok:,} of {planned:,} requests{late}. Run it again to its end."


def _failure(summary: Summary) -> str:
    """Why a run that served something has FAILED."""
    reason = next(iter(summary.verdict.reasons), None)
    return reason.text if reason and reason.code == "died" else _failed(summary)


def _failures(summary: Summary) -> str:
    text = _failed(summary)
    return f"{text.rstrip('.')}; they count as infinitely late." if text else ""


def _failed(summary: Summary) -> str:
    kinds = Counter(failed(summary.counts, interrupted=_interrupted(summary)))
    if not kinds:
        return ""
    told = ", ".join(f"{n:,} {OUTCOME_WORDS.get(kind, kind)}" for kind, n in kinds.most_common(3))
    return f"{kinds.total():,} of {counted(summary.counts['planned'], 'request')} failed ({told})."


def _tail(summary: Summary, manifest: Manifest) -> str:
    """Where the slowest requests stand out: p99 at least three times the median, or the end of a burst."""
    median, most, tail = (_of(summary.figure("metrics", "e2e", p)) for p in ("p50", "p95", "p99"))
    end = _of(summary.window.end_s)
    if _is_burst(manifest) and most and end and most < STRAGGLERS * end:
        return (
            f"The last 5% of the requests made the run last {duration(end)}: the others had ended after "
            f"{duration(most)}. The throughput counts the whole time."
        )
    if not median or not tail or tail < 3 * median:
        return ""
    times = number(tail / median)
    return f"The slowest 1% take at least {duration(tail)}, {times} times the median ({duration(median)})."


def _of(figure: Figure) -> float | None:
    return figure.point if isinstance(figure, Estimate) and figure.point < float("inf") else None
