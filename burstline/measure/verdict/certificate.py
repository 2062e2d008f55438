"""What a client really sent to a known-truth server, and how far what it printed is from what was true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from burstline.measure.metrics.instrument import gap_cv, rate_error
from burstline.measure.record.columns import Floats
from burstline.measure.record.verdict import tolerance_s
from burstline.measure.stats.figure import Absent, Estimate, Figure
from burstline.wording import counted

if TYPE_CHECKING:
    from burstline.servers.truth.serve import Served

    Rows = Sequence[Served]
    Count = Callable[[str], int] | None

_STATS: Final = ("p50", "p90", "p99")
_CEILINGS: Final = ("throughput.steady_tok_per_s", "throughput.peak_tok_per_s", "throughput.goodput_per_s")
"""Printed of a part of the load: true is the most that it can be."""
_NEVER_NS: Final = 1 << 63
_MOST_LATE_S, _MOST_SHARE, _WARM_UP = 0.01, 0.01, 2.0
_requests: Final = partial(counted, noun="request")
_MOST_SPREAD, _MOST_RATE, _MOST_CV, _MOST_TOTAL, _MOST_LENGTH = 0.1, 0.02, 0.1, 0.05, 0.05


@dataclass(frozen=True, slots=True)
class Printed:
    """What a tool says it measured: seconds, tokens or requests a second, by where our summary has the number
    that means the nearest (`metrics.ttft.p50`, `throughput.requests_per_s`), or as a `share.error_rate`.

    `defines` says how it defines a metric or all `total`s, and `throughput` where it counts over a part of
    the load alone: that is shown beside the whole load's truth and is not judged. Counts are None where the
    tool gives none. `doubts` are why its numbers cannot be relied on, or could not be read. A file that is
    not `whole` is of a part of the run.
    """

    tool: str
    n_ok: int | None
    n_failed: int | None
    numbers: Mapping[str, float]
    defines: Mapping[str, str] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    is_read: bool = True
    name: str = ""
    whole: bool = True

    def figure(self, *place: str) -> Figure:
        """A plain reading without an interval; Absent where the tool does not say."""
        if (value := self.numbers.get(".".join(place))) is None:
            return Absent(f"{self.tool} does not report it")
        unit = "s" if place[0] == "metrics" else "tok/s" if "tok" in place[1] else "1/s"
        return Estimate(value, None, None, None, self.n_ok or 0, unit)


@dataclass(frozen=True, slots=True)
class Measured:
    """The load that a client was told to send, and what it did, but for what it printed.

    `due_s` are a plan's times, None in a closed loop. `ended` says how it ended if not well, `refused` how
    many requests the server did not log by why; `start_s` and `end_s` are on the monotonic clock, `cpu_s` and
    `pss_bytes` (at most) of its process tree.
    """

    tool: str
    load: str
    script: str
    n: int
    prompt_tok: tuple[int, int]
    due_s: tuple[float, ...] | None
    concurrency: int | None
    ended: str
    refused: Mapping[str, int]
    tokenizer: str | None
    cpu_s: float
    pss_bytes: float | None
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Offered:
    """What arrived at the server. None where the load's pattern does not define a figure.

    `n_before` are probes and warm-up, which ended before the load began and are in no other figure: their
    shape or the client's own count tells them apart. `n_unreadable` is what the server could not read,
    `unserved` how many requests came to each path that is not served. `n_retries` said the same as a request
    that had failed. `n_failed` were refused or cut by the server, `n_hung_up` left by the client.
    `prompt_tok` is the shortest, the median and the longest prompt, None where text cannot be counted.
    `spread_s` is from a burst's first byte to its last.
    """

    n: int
    n_before: int
    n_unreadable: int
    n_retries: int
    n_ok: int
    n_failed: int
    n_hung_up: int
    n_distinct: int
    n_connections: int
    most_in_flight: int
    n_as_ids: int
    prompt_tok: tuple[int, int, int] | None
    spread_s: float | None
    rate_error: float | None
    gap_cv: float | None
    planned_gap_cv: float | None
    unserved: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """One number, seconds, a second or a share: what was true of the successful requests, and printed."""

    name: str
    true: float
    printed: float | None
    defined: str

    @property
    def is_time(self) -> bool:
        return not self.name.startswith(("throughput", "share"))

    @property
    def unit(self) -> tuple[str, float]:
        """How it is shown, and how many of these are one of ours."""
        return ("ms", 1e3) if self.is_time else ("" if self.name.startswith("share") else "/s", 1.0)

    @property
    def is_off(self) -> bool:
        """Whether it misses the truth by more than 1 ms and 1%; a total by more than 5%, a share by 0.01."""
        if self.printed is None or (self.name in _CEILINGS and self.printed <= self.true):
            return False
        share = _MOST_SHARE if self.name.startswith("share") else _MOST_TOTAL * self.true
        return abs(self.printed - self.true) > (tolerance_s(self.true) if self.is_time else share)


@dataclass(frozen=True, slots=True)
class Certificate:
    """One client under one load. `findings` are what a reader of its numbers has to know, none where all is
    well. `server_late_p99_s` is how late the server followed its script; no error of the client contains it.
    `before_s` and `after_s` are around the load, None where no request came; `asked` is without its plan.
    """

    asked: Measured
    offered: Offered
    printed: Printed
    readings: tuple[Reading, ...]
    before_s: float | None
    after_s: float | None
    n_events: int
    events_per_s: float | None
    server_late_p99_s: float | None
    findings: tuple[str, ...]

    @property
    def cpu_us_per_event(self) -> float:
        return self.asked.cpu_s / max(self.n_events, 1) * 1e6


def certificate(rows: Rows, asked: Measured, printed: Printed, n_tok_of: Count) -> Certificate:
    """The certificate of a client whose requests the server logged as `rows`; `n_tok_of` counts a text."""
    readable = sorted((row for row in rows if row.n_prompt_tok is not None), key=lambda row: row.arrival_ns)
    n_before = _before(readable, asked.n, printed)
    load = readable[n_before:]
    good = [row for row in load if _is_ok(row)]
    offered = _offered(load, rows, asked, n_before, n_tok_of)
    readings = tuple(_readings(good, load, printed, n_tok_of))
    sent_ns = np.array([ns for row in load for ns in row.token_ns], dtype=np.int64)
    late_ns = [ns for row in load for ns in row.lateness_ns[1:]]
    first_ns = min((row.first_byte_ns for row in load), default=0)
    before_s = first_ns / 1e9 - asked.start_s if load else None
    after_s = asked.end_s - int(sent_ns.max(initial=first_ns)) / 1e9 if load else None
    took_s = float(np.ptp(sent_ns)) / 1e9 if len(sent_ns) else 0.0
    late_s = float(np.quantile(late_ns, 0.99)) / 1e9 if late_ns else None
    findings = [*_findings(offered, asked, printed, readings)]
    if late_s is not None and late_s > _MOST_LATE_S:
        late = f"The server was {late_s * 1e3:,.0f} ms late at p99, so its replies were not as scripted"
        findings += [f"{late}: certify on an idle machine, or under a smaller load."]
    return Certificate(
        asked=replace(asked, due_s=None),
        offered=offered,
        printed=printed,
        readings=readings,
        before_s=before_s,
        after_s=after_s,
        n_events=len(sent_ns),
        events_per_s=len(sent_ns) / took_s if took_s else None,
        server_late_p99_s=late_s,
        findings=tuple(findings),
    )


def statistic(values: Floats, stat: str) -> float:
    """The mean, the min, the max, or a percentile such as `p99.9`."""
    if stat == "mean":
        return float(np.mean(values))
    return float(np.quantile(values, float({"min": "p0", "max": "p100"}.get(stat, stat)[1:]) / 100))


def _is_ok(row: Served) -> bool:
    return row.status == 200 and row.ended == "done" and bool(row.token_ns)


def _has_failed(row: Served) -> bool:
    return row.status != 200 or row.ended == "close"


def _retries(rows: Rows, n_more: int) -> int:
    """At most `n_more`; none where requests repeat anyway, for then a repeated one is no sign of a retry."""
    n_retries, failed = 0, Counter[int]()
    for row in rows:
        if failed[row.body_hash]:
            failed[row.body_hash] -= 1
            n_retries += 1
        failed[row.body_hash] += _has_failed(row)
    repeats = len(rows) - len({row.body_hash for row in rows})
    return min(n_retries, max(0, n_more)) if n_retries == repeats else 0


def _before(rows: Rows, n_asked: int, printed: Printed) -> int:
    """How many of the first requests were a warm-up: all of them had ended before the next one came, and
    either the rest of the load has another shape, or the client itself counts the rest alone."""
    ended_ns = list(accumulate((row.ended_ns or _NEVER_NS for row in rows), max))
    n_ok = list(accumulate(map(_is_ok, rows), initial=0))
    for k in range(len(rows) - n_asked, 0, -1):
        if ended_ns[k - 1] <= rows[k].arrival_ns:
            is_counted = n_ok[-1] != printed.n_ok == n_ok[-1] - n_ok[k]
            if is_counted or not any(_is_like(row, other) for row in rows[:k] for other in rows[k:]):
                return k
    return 0


def _is_like(row: Served, other: Served) -> bool:
    """Whether both ask one path for as many tokens, after prompts about as long."""
    short, long = sorted((row.n_prompt_tok or 0, other.n_prompt_tok or 0))
    return (row.path, row.n_output_tok) == (other.path, other.n_output_tok) and long <= short * _WARM_UP


def _lengths(rows: Rows, n_tok_of: Count) -> list[int] | None:
    """The tokens of each prompt; None where one is text that cannot be counted."""
    if n_tok_of is None and any(row.text is not None for row in rows):
        return None
    return [row.n_prompt_tok or 0 if row.text is None or not n_tok_of else n_tok_of(row.text) for row in rows]


def _offered(load: Rows, rows: Rows, asked: Measured, n_before: int, n_tok_of: Count) -> Offered:
    at_s = np.array([row.arrival_ns for row in load]) / 1e9
    steps = [(row.arrival_ns, 1) for row in load]
    steps += [(row.ended_ns, -1) for row in load if row.ended_ns is not None]
    is_burst = asked.due_s is not None and float(np.ptp(asked.due_s)) == 0.0
    due_s = None if is_burst or asked.due_s is None else np.array(asked.due_s)
    lengths = _lengths(load, n_tok_of)
    began_ns = min((row.first_byte_ns for row in load), default=0)
    return Offered(
        n=len(load),
        n_before=n_before,
        n_unreadable=sum(row.status == 400 for row in rows),
        n_retries=_retries(load, len(load) - asked.n),
        n_ok=sum(map(_is_ok, load)),
        n_failed=sum(map(_has_failed, load)),
        n_hung_up=sum(row.ended in (None, "client_closed") for row in load),
        n_distinct=len({row.body_hash for row in load}),
        n_connections=len({row.connection for row in load}),
        most_in_flight=max(accumulate(step for _, step in sorted(steps, key=itemgetter(0))), default=0),
        n_as_ids=sum(row.text is None for row in load),
        prompt_tok=(min(lengths), int(np.median(lengths)), max(lengths)) if lengths else None,
        spread_s=float(at_s.max()) - began_ns / 1e9 if is_burst and load else None,
        rate_error=None if due_s is None else rate_error(at_s, due_s),
        gap_cv=None if due_s is None else gap_cv(at_s),
        planned_gap_cv=None if due_s is None else gap_cv(due_s),
        unserved={**asked.refused, **Counter(f"POST {row.path}" for row in rows if row.status == 404)},
    )


def _readings(good: Rows, load: Rows, printed: Printed, n_tok_of: Count) -> Iterator[Reading]:
    """The true times count from when the kernel had the whole request to when an event was handed to it."""
    for name, true in (("error_rate", 1 - len(good) / max(len(load), 1)), ("acceptance", 0.0)):
        if (value := printed.numbers.get(f"share.{name}")) is not None:
            yield Reading(f"share.{name}", true, value, printed.defines.get(name, ""))
    if not good:
        return
    first, last = (np.array([row.token_ns[k] - row.arrival_ns for row in good]) / 1e9 for k in (0, -1))
    n_tok = np.array([sum(row.event_tok) for row in good])
    many = n_tok > 1
    times = {
        "ttfb": np.array([row.event_ns[0] - row.arrival_ns for row in good]) / 1e9,
        "ttft": first,
        "tpot": (last - first)[many] / (n_tok - 1)[many],
        "itl": np.concatenate([np.diff(row.token_ns) for row in good]) / 1e9,
        "e2e": last,
    }
    for metric, values in times.items():
        start = f"metrics.{metric}."
        read = {place.removeprefix(start) for place in printed.numbers if place.startswith(start)}
        shown = (*_STATS, *sorted(read - {*_STATS})) if read or metric != "ttfb" else ()
        for stat in shown if len(values) else ():
            value = printed.numbers.get(start + stat)
            yield Reading(f"{metric}.{stat}", statistic(values, stat), value, printed.defines.get(metric, ""))
    took_s = (max(row.token_ns[-1] for row in good) - min(row.arrival_ns for row in good)) / 1e9
    totals = {"output_tok_per_s": n_tok.sum() / took_s, "requests_per_s": len(good) / took_s}
    if (lengths := _lengths(good, n_tok_of)) is not None:
        totals["input_tok_per_s"] = sum(lengths) / took_s
        totals["total_tok_per_s"] = totals["input_tok_per_s"] + totals["output_tok_per_s"]
    totals["goodput_per_s"] = totals["requests_per_s"]
    totals["steady_tok_per_s"] = totals["peak_tok_per_s"] = _most_tok_per_s(good)
    for name, rate_per_s in totals.items():
        total = printed.numbers.get(f"throughput.{name}")
        if total is not None or name in ("output_tok_per_s", "requests_per_s"):
            defined = printed.defines.get("throughput", printed.defines.get("total", ""))
            yield Reading(f"throughput.{name}", float(rate_per_s), total, defined)


def _most_tok_per_s(good: Rows) -> float:
    """The most tokens that the server sent within a second, or all of a shorter load by its length."""
    at_s = np.sort(np.concatenate([np.repeat(row.event_ns, row.event_tok) for row in good])) / 1e9
    within_s = min(1.0, float(np.ptp(at_s))) or 1.0
    return float((np.searchsorted(at_s, at_s + within_s, "right") - np.arange(len(at_s))).max()) / within_s


def _findings(
    offered: Offered, asked: Measured, printed: Printed, readings: Sequence[Reading]
) -> Iterator[str]:
    if asked.ended:
        yield f"It {asked.ended}."
    yield from printed.doubts
    if printed.is_read and len(printed.numbers) + (printed.n_ok is not None) < 2:
        n = len(readings) + 2
        yield f"Of {n} numbers that can be certified it printed {len(printed.numbers) or 'none'}."
    if offered.n - offered.n_retries != asked.n:
        yield f"It sent {_requests(offered.n - offered.n_retries)}; {asked.n:,} were asked for."
        for path, n in offered.unserved.items():
            yield f"It sent {_requests(n)} to {path}, which is not served: try {{url}}/v1 as the base URL."
    repeated = offered.n - offered.n_retries - offered.n_distinct
    if repeated > 0:
        yield f"{repeated:,} of {offered.n:,} requests repeat another: a prefix cache serves their prompts."
    if asked.concurrency is not None and offered.n_connections >= offered.n > offered.most_in_flight:
        yield "It opened a connection for each request: a time that begins before it contains connecting."
    if offered.n_unreadable:
        yield f"It sent {_requests(offered.n_unreadable)} that the server could not read."
    if offered.n_retries:
        yield f"It retried {_requests(offered.n_retries)} that had failed: load that was not requested."
    if offered.n_hung_up:
        yield f"It closed {_requests(offered.n_hung_up)} before the reply was complete."
    e2e_s = next((each.true for each in readings if each.name == "e2e.p50"), 0.0)
    if offered.spread_s is not None and e2e_s and offered.spread_s > _MOST_SPREAD * e2e_s:
        yield (
            f"The burst took {offered.spread_s * 1e3:,.0f} ms to arrive, {offered.spread_s / e2e_s:.0%} of a "
            f"median request's time; at most {offered.most_in_flight:,} were at the server at once."
        )
    if offered.rate_error is not None and abs(offered.rate_error) > _MOST_RATE:
        yield f"The rate of its requests was {offered.rate_error:+.1%} off."
    if offered.gap_cv is not None and abs(offered.gap_cv - (offered.planned_gap_cv or 0)) > _MOST_CV:
        yield (
            f"The gaps between its requests varied by {offered.gap_cv:.2f}, not by "
            f"{offered.planned_gap_cv or 0:.2f} (coefficient of variation): another arrival process."
        )
    if asked.concurrency is not None and offered.most_in_flight != min(asked.concurrency, asked.n):
        yield f"It kept {offered.most_in_flight:,} requests in flight; {asked.concurrency:,} were asked for."
    lowest, highest = asked.prompt_tok
    least, most_tok = lowest * (1 - _MOST_LENGTH), highest * (1 + _MOST_LENGTH)
    if offered.prompt_tok and not least <= offered.prompt_tok[1] <= most_tok:
        yield f"Its median prompt has {offered.prompt_tok[1]:,} tokens; asked for: {lowest:,} to {highest:,}."
    if offered.n_failed and not printed.n_failed and printed.n_ok is not None:
        told = "the tool printed 0" if printed.n_failed == 0 else "the tool does not print failures"
        yield f"The server failed {_requests(offered.n_failed)}; {told}."
    if printed.n_ok is not None and printed.n_ok != offered.n_ok:
        yield f"It printed {printed.n_ok:,} successful requests; there were {offered.n_ok:,}."
    for each in readings:
        if each.is_off and each.printed is not None and (each.is_time or "throughput" not in printed.defines):
            unit, scale = each.unit
            told, true = (f"{value * scale:,.2f} {unit}".rstrip() for value in (each.printed, each.true))
            most = "at most " if each.name in _CEILINGS else ""
            how = f", by its definition: {each.defined}" if each.defined else ""
            for power, word in ((1e-3, "a thousandth"), (1e3, "a thousand times")):
                if each.is_time and abs(each.printed - power * each.true) < 0.3 * power * each.true:
                    how += f" (about {word} of it: is that its unit?)"
            yield f"{title_of(each.name)}: printed {told}, {most}true {true}{how}."


def title_of(name: str) -> str:
    """E.g. `TTFT p50` of `ttft.p50`."""
    section, _, rest = name.partition(".")
    words = rest.replace("_tok", " tokens").replace("_per_s", " per second").replace("_", " ").capitalize()
    return words if section in ("throughput", "share") else f"{section.upper()} {rest}"
