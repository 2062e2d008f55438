"""What a client really sent to a known-truth server, and how far what it printed is from what was true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from burstline.loadgen.metrics.instrument import gap_cv, rate_error
from burstline.loadgen.record.columns import Floats
from burstline.loadgen.record.verdict import tolerance_s

if TYPE_CHECKING:
    from burstline.servers.truth.exchanges import Served

_PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_ITS_DURATION: Final = "of the successful requests, over the tool's own duration"
_MOST_SPREAD, _MOST_RATE, _MOST_CV, _MOST_TOTAL, _MOST_LENGTH = 0.1, 0.02, 0.1, 0.05, 0.05


@dataclass(frozen=True, slots=True)
class AskedLoad:
    """The load that a client was told to send; `due_s` are a plan's times, None in a closed loop."""

    title: str
    n: int
    prompt_tok: tuple[int, int]
    due_s: Floats | None
    concurrency: int | None


@dataclass(frozen=True, slots=True)
class Printed:
    """What a client says it measured: seconds, tokens or requests a second, by place in the summary.

    `defines` says how it defines a metric, and `throughput` where it counts over a part of the load alone:
    that is shown beside the whole load's truth and is not judged. Counts are None where the tool gives none.
    `doubt` is why it calls its own numbers unreliable.
    """

    tool: str
    n_ok: int | None
    n_failed: int | None
    numbers: Mapping[tuple[str, ...], float]
    defines: Mapping[str, str]
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class ClientCost:
    """What a client used: CPU and most memory (PSS) of its process tree, time around the load.

    There is no such time where no request came.
    """

    cpu_s: float
    pss_bytes: float | None
    before_s: float | None
    after_s: float | None


@dataclass(frozen=True, slots=True)
class Offered:
    """What arrived at the server. None where the load's pattern does not define a figure.

    `n_before` are probes and warm-up, which ended before the load began and are in no other figure;
    `n_unreadable` what the server could not answer. `n_retries` said the same as a request that had failed.
    `n_failed` were refused or cut by the server, `n_hung_up` left by the client. `prompt_tok` is the
    shortest, the median and the longest prompt, None where text cannot be counted. `spread_s` is from a
    burst's first byte to its last.
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


@dataclass(frozen=True, slots=True)
class Reading:
    """One number, seconds or a second: what was true of the successful requests, and what was printed."""

    name: str
    true: float
    printed: float | None
    defined: str

    @property
    def is_time(self) -> bool:
        return not self.name.startswith("throughput")

    @property
    def is_off(self) -> bool:
        """Whether it misses the truth by more than 1 ms and 1%; a total by more than 5%."""
        if self.printed is None:
            return False
        most = tolerance_s(self.true) if self.is_time else _MOST_TOTAL * self.true
        return abs(self.printed - self.true) > most


@dataclass(frozen=True, slots=True)
class Certificate:
    """One client under one load. `findings` are what a reader of its numbers has to know, none where all is
    well. `server_late_p99_s` is how late the server followed its script; no error of the client contains it.
    """

    tool: str
    load: str
    script: str
    offered: Offered
    printed_ok: int | None
    printed_failed: int | None
    readings: tuple[Reading, ...]
    cost: ClientCost
    n_events: int
    events_per_s: float | None
    server_late_p99_s: float | None
    findings: tuple[str, ...]


def certificate(
    rows: Sequence[Served],
    asked: AskedLoad,
    script: str,
    printed: Printed,
    cost_of: Callable[[float, float], ClientCost],
    n_tok_of: Callable[[str], int] | None,
) -> Certificate:
    """The certificate of a client whose requests the server logged as `rows`.

    `cost_of` makes the cost of the load's first and last moment (s, monotonic), `n_tok_of` counts a text.
    """
    n_unreadable = sum(row.status == 400 for row in rows)
    readable = sorted((row for row in rows if row.n_prompt_tok is not None), key=lambda row: row.arrival_ns)
    n_retries = min(_retries(readable), max(0, len(readable) - asked.n))
    n_before = _before(readable, len(readable) - asked.n - n_retries)
    load = readable[n_before:]
    good = [row for row in load if _is_ok(row)]
    offered = _offered(load, asked, n_before, n_unreadable, n_retries, n_tok_of)
    readings = tuple(_readings(good, printed))
    sent_ns = np.array([ns for row in load for ns in row.token_ns], dtype=np.int64)
    late_ns = [ns for row in load for ns in row.lateness_ns[1:]]
    first_ns = min((row.first_byte_ns for row in load), default=0)
    last_ns = int(sent_ns.max()) if len(sent_ns) else first_ns
    cost = cost_of(first_ns / 1e9, last_ns / 1e9)
    took_s = float(np.ptp(sent_ns)) / 1e9 if len(sent_ns) else 0.0
    return Certificate(
        tool=printed.tool,
        load=asked.title,
        script=script,
        offered=offered,
        printed_ok=printed.n_ok,
        printed_failed=printed.n_failed,
        readings=readings,
        cost=cost if load else replace(cost, before_s=None, after_s=None),
        n_events=len(sent_ns),
        events_per_s=len(sent_ns) / took_s if took_s else None,
        server_late_p99_s=float(np.quantile(late_ns, 0.99)) / 1e9 if late_ns else None,
        findings=tuple(_findings(offered, asked, printed, readings, good)),
    )


def _is_ok(row: Served) -> bool:
    return row.status == 200 and row.ended == "done" and bool(row.token_ns)


def _has_failed(row: Served) -> bool:
    return row.status != 200 or row.ended == "close"


def _retries(rows: Sequence[Served]) -> int:
    n_retries, failed = 0, Counter[int]()
    for row in rows:
        if failed[row.body_hash]:
            failed[row.body_hash] -= 1
            n_retries += 1
        failed[row.body_hash] += _has_failed(row)
    return n_retries


def _before(rows: Sequence[Served], n_more: int) -> int:
    """How many of the first requests, at most `n_more`, had all ended before the next one came."""
    n_before, ended_ns = 0, 0
    for k, row in enumerate(rows[: max(0, n_more)], 1):
        if row.ended_ns is None or k == len(rows):
            break
        ended_ns = max(ended_ns, row.ended_ns)
        if ended_ns <= rows[k].arrival_ns:
            n_before = k
    return n_before


def _offered(
    load: Sequence[Served],
    asked: AskedLoad,
    n_before: int,
    n_unreadable: int,
    n_retries: int,
    n_tok_of: Callable[[str], int] | None,
) -> Offered:
    at_s = np.array([row.arrival_ns for row in load]) / 1e9
    is_burst = asked.due_s is not None and float(np.ptp(asked.due_s)) == 0.0
    due_s = None if is_burst else asked.due_s
    lengths = [row.n_prompt_tok or 0 for row in load if row.text is None]
    if n_tok_of is not None:
        lengths += [n_tok_of(row.text) for row in load if row.text is not None]
    is_counted = load and len(lengths) == len(load)
    began_ns = min((row.first_byte_ns for row in load), default=0)
    return Offered(
        n=len(load),
        n_before=n_before,
        n_unreadable=n_unreadable,
        n_retries=n_retries,
        n_ok=sum(map(_is_ok, load)),
        n_failed=sum(map(_has_failed, load)),
        n_hung_up=sum(row.ended in (None, "client_closed") for row in load),
        n_distinct=len({row.body_hash for row in load}),
        n_connections=len({row.connection for row in load}),
        most_in_flight=_most_in_flight(load),
        n_as_ids=sum(row.text is None for row in load),
        prompt_tok=(min(lengths), int(np.median(lengths)), max(lengths)) if is_counted else None,
        spread_s=float(at_s.max()) - began_ns / 1e9 if is_burst and load else None,
        rate_error=None if due_s is None else rate_error(at_s, due_s),
        gap_cv=None if due_s is None else gap_cv(at_s),
        planned_gap_cv=None if due_s is None else gap_cv(due_s),
    )


def _most_in_flight(load: Sequence[Served]) -> int:
    starts = [row.arrival_ns for row in load]
    ends = [row.ended_ns for row in load if row.ended_ns is not None]
    steps = np.repeat([1, -1], [len(starts), len(ends)])
    order = np.argsort(np.array(starts + ends, dtype=np.int64), kind="stable")
    return int(np.cumsum(steps[order]).max(initial=0))


def _readings(good: Sequence[Served], printed: Printed) -> Iterator[Reading]:
    """The true times count from when the kernel had the whole request to when an event was handed to it."""
    if not good:
        return
    first, last = (np.array([row.token_ns[k] - row.arrival_ns for row in good]) / 1e9 for k in (0, -1))
    head = np.array([row.event_ns[0] - row.arrival_ns for row in good]) / 1e9
    n_tok = np.array([sum(row.event_tok) for row in good])
    many = n_tok > 1
    gaps = np.concatenate([np.diff(row.token_ns) for row in good]) / 1e9
    true = {
        "ttfb": head,
        "ttft": first,
        "tpot": (last - first)[many] / (n_tok - 1)[many],
        "itl": gaps,
        "e2e": last,
    }
    says = {place[1] for place in printed.numbers}
    for metric, values in true.items():
        if not len(values) or (metric == "ttfb" and metric not in says):
            continue
        for name, p in _PERCENTILES.items():
            value = printed.numbers.get(("metrics", metric, name))
            truth = float(np.quantile(values, p))
            yield Reading(f"{metric}.{name}", truth, value, printed.defines.get(metric, ""))
    took_s = (max(row.token_ns[-1] for row in good) - min(row.arrival_ns for row in good)) / 1e9
    for name, total in (("output_tok_per_s", int(n_tok.sum())), ("requests_per_s", len(good))):
        value = printed.numbers.get(("throughput", name))
        defined = printed.defines.get("throughput", _ITS_DURATION)
        yield Reading(f"throughput.{name}", total / took_s, value, defined)


def _findings(
    offered: Offered,
    asked: AskedLoad,
    printed: Printed,
    readings: Sequence[Reading],
    good: Sequence[Served],
) -> Iterator[str]:
    if printed.doubt:
        yield printed.doubt
    if offered.n - offered.n_retries != asked.n:
        yield f"It sent {_requests(offered.n - offered.n_retries)}; {asked.n:,} were asked for."
    if offered.n_unreadable:
        yield f"It sent {_requests(offered.n_unreadable)} that the server could not read."
    if offered.n_retries:
        yield f"It retried {_requests(offered.n_retries)} that had failed: load that was not requested."
    if offered.n_hung_up:
        yield f"It closed {_requests(offered.n_hung_up)} before the reply was complete."
    e2e_s = float(np.median([row.token_ns[-1] - row.arrival_ns for row in good])) / 1e9 if good else 0.0
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
    if offered.prompt_tok and not (
        lowest * (1 - _MOST_LENGTH) <= offered.prompt_tok[1] <= highest * (1 + _MOST_LENGTH)
    ):
        yield f"Its median prompt has {offered.prompt_tok[1]:,} tokens; asked for: {lowest:,} to {highest:,}."
    if offered.n_failed and not printed.n_failed and printed.n_ok is not None:
        told = "the tool printed 0" if printed.n_failed == 0 else "the tool does not print failures"
        yield f"The server failed {_requests(offered.n_failed)}; {told}."
    if printed.n_ok is not None and printed.n_ok != offered.n_ok:
        yield f"It printed {printed.n_ok:,} successful requests; there were {offered.n_ok:,}."
    for each in readings:
        if each.is_off and each.printed is not None and (each.is_time or "throughput" not in printed.defines):
            unit, scale = ("ms", 1e3) if each.is_time else ("/s", 1.0)
            how = f", by its definition: {each.defined}" if each.defined else ""
            yield (
                f"{title_of(each.name)}: printed {each.printed * scale:,.2f} {unit}, true "
                f"{each.true * scale:,.2f} {unit}{how}."
            )


def _requests(n: int) -> str:
    return f"{n:,} request{'s' * (n != 1)}"


def title_of(name: str) -> str:
    """E.g. `TTFT p50` of `ttft.p50`."""
    section, _, rest = name.partition(".")
    totals = {"output_tok_per_s": "Output tokens per second", "requests_per_s": "Requests per second"}
    return totals[rest] if section == "throughput" else f"{section.upper()} {rest}"
