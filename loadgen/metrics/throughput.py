"""What a run says as a whole: throughput, concurrency, stalls, and what a burst alone can show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.metrics.definitions import STALL_FACTOR, STALL_FLOOR_S, icl, ttft
from loadgen.record.columns import Columns, Floats
from loadgen.stats.estimates import ONE_RUN, Absent, Estimate, Figure, measured
from loadgen.stats.quantiles import quantile_of

NO_SUCCESS = Absent("no request succeeded")
NO_LENGTH = Absent("the window has no length")
UNCOUNTED = Absent("the server did not say how many tokens it sent")
BURST = (
    "first_wave_s",
    "drain_s",
    "plateau_tok_per_s",
    "ttft_slope_s_per_request",
    "ttft_residual_s",
    "prefill_requests_per_s",
    "prefill_tok_per_s",
    "fifo",
)


@dataclass(frozen=True, slots=True)
class Window:
    """From when until when things count, seconds from the run's start, both ends included."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def whole_run(c: Columns) -> Window | None:
    """From the first request sent to the last token of any success; None where none succeeded."""
    if not c.ok.any():
        return None
    return Window(float(np.nanmin(c.sent_s)), float(c.last_s[c.ok].max()))


def tokens_in(c: Columns, start_s: float, end_s: float) -> float:
    """Tokens of successes that arrived in [start_s, end_s]."""
    inside = (c.event_s >= start_s) & (c.event_s <= end_s) & c.ok[c.owner]
    return float(c.event_n[inside].sum())


def throughputs(c: Columns) -> dict[str, Figure]:
    """Rates of work over the whole run."""
    return rates(
        c,
        {
            "output_tok_per_s": ("tok/s", c.output_tok),
            "input_tok_per_s": ("tok/s", prompt_tok(c)),
            "total_tok_per_s": ("tok/s", c.output_tok + prompt_tok(c)),
            "requests_per_s": ("1/s", np.ones(len(c))),
        },
    )


def goodput(c: Columns, met: NDArray[np.bool_]) -> dict[str, Figure]:
    """Requests that are good, and their tokens, per second of the whole run."""
    amounts = {
        "requests_per_s": ("1/s", met.astype(np.float64)),
        "tok_per_s": ("tok/s", np.where(met, c.output_tok, 0.0)),
    }
    return rates(c, amounts)


def rates(c: Columns, amounts: Mapping[str, tuple[str, Floats]]) -> dict[str, Figure]:
    """What successes brought per second of the whole run; `amounts` are unit and value per request by name.

    Without an interval: in a burst no block of time is like another, and requests drawn again would only end
    earlier than the last did, so that the interval would begin at the point.
    """
    window = whole_run(c)
    if window is None:
        return dict.fromkeys(amounts, NO_SUCCESS)
    if window.length_s <= 0:
        return dict.fromkeys(amounts, NO_LENGTH)
    totals = {name: (unit, float(amount[c.ok].sum())) for name, (unit, amount) in amounts.items()}
    return {
        name: UNCOUNTED if np.isnan(total) else _once(total / window.length_s, unit, int(c.ok.sum()))
        for name, (unit, total) in totals.items()
    }


def prompt_tok(c: Columns) -> Floats:
    """Prompt tokens by the server's count, by the plan's where it gave none."""
    return np.where(np.isnan(c.prompt_tok), c.planned_prompt_tok, c.prompt_tok)


def concurrency(c: Columns) -> dict[str, Figure]:
    """Requests in flight, [sent, closed), by sweep line; and how far L = λW is from holding.

    Over a whole run Little's law is an identity: what is left over measures our own accounts.
    """
    known = ~np.isnan(c.sent_s) & ~np.isnan(c.closed_s)
    reason = "no request was sent and closed"
    start_s, end_s = c.sent_s[known], c.closed_s[known]
    if not len(start_s) or (length_s := float(end_s.max() - start_s.min())) <= 0:
        return dict.fromkeys(("mean", "max", "little_residual"), Absent(reason))
    at_s, in_flight = in_flight_steps(start_s, end_s)
    mean = float((in_flight[:-1] * np.diff(at_s)).sum() / length_s)
    by_little = len(start_s) / length_s * float((end_s - start_s).mean())
    n = len(start_s)
    return {
        "mean": measured(mean, "requests", reason, n),
        "max": measured(float(in_flight.max()), "requests", reason, n),
        "little_residual": measured(round(1 - by_little / mean, 12) if mean else None, "1", reason, n),
    }


def in_flight_steps(start_s: Floats, end_s: Floats) -> tuple[Floats, Floats]:
    """When the number in flight changes, ascending, and what it is from then on."""
    at_s = np.concatenate([end_s, start_s])
    step = np.concatenate([-np.ones(len(end_s)), np.ones(len(start_s))])
    order = np.argsort(at_s, kind="stable")
    return at_s[order], np.cumsum(step[order])


def stalls(c: Columns) -> dict[str, Figure]:
    """Gaps a reader would notice: longer than 200 ms and than five times the median gap."""
    samples = icl(c)
    came = np.isfinite(samples.value)
    gap_s, owner = samples.value[came], samples.owner[came]
    if not len(gap_s):
        return dict.fromkeys(
            ("count", "total_s", "request_fraction", "threshold_s", "token"), Absent("no gap to judge")
        )
    threshold_s = max(STALL_FLOOR_S, STALL_FACTOR * float(np.median(gap_s)))
    stalled = gap_s > threshold_s
    n = len(gap_s)
    return {
        "count": measured(float(stalled.sum()), "stalls", "", n),
        "total_s": measured(float(gap_s[stalled].sum()), "s", "", n),
        "request_fraction": measured(
            len(np.unique(owner[stalled])) / int(c.ok.sum()), "1", "", int(c.ok.sum())
        ),
        "threshold_s": measured(threshold_s, "s", "", n),
        "token": _stalled_token(c, threshold_s),
    }


def _stalled_token(c: Columns, threshold_s: float) -> Figure:
    """The token before which most stalls of a run come: an engine that queues a request again has one."""
    n_before = np.cumsum(c.event_n) - c.event_n
    of_request = n_before - n_before[c.starts[c.owner]]
    follows = np.flatnonzero(np.diff(c.owner, prepend=-1) == 0)
    follows = follows[c.ok[c.owner[follows]]]
    stalled = follows[c.event_s[follows] - c.event_s[follows - 1] > threshold_s]
    if not len(stalled):
        return Absent("no gap is a stall")
    tokens, n = np.unique(of_request[stalled] + 1, return_counts=True)
    share = float(n.max() / len(stalled))
    if share <= 0.5 or len(stalled) < 2:
        return Absent("stalls come at no particular token")
    note = f"{share:.0%} of the stalls come before this token"
    return Estimate(float(tokens[n.argmax()]), None, None, None, len(stalled), "tok", note)


def burst(c: Columns) -> dict[str, Figure]:
    """What only a burst shows: first wave, drain, plateau, and how TTFT grows along the queue.

    A request's place in the queue is the order in which first tokens came. `ttft_slope_s_per_request` is what
    each place costs, by least squares, `ttft_residual_s` how far requests lie from that line; the slope's
    inverse is the rate at which the server takes requests in, pure prefill only as long as no decoding
    competes with it. `fifo` is Spearman's correlation of the order sent
    with the order served: 1 is first come, first served.
    """
    spread_s = float(np.ptp(c.due_s)) if len(c) else 0.0
    if spread_s > 1e-3:
        return dict.fromkeys(BURST, Absent(f"not a burst: requests were due over {spread_s:.3g} s"))
    if not c.ok.any():
        return dict.fromkeys(BURST, NO_SUCCESS)
    due_s = float(c.due_s.min())
    n = int(c.ok.sum())
    slope, residual = _drain_line(c)
    return {
        "first_wave_s": _once(float(c.first_s[c.ok].min()) - due_s, "s", n),
        "drain_s": _once(float(c.last_s[c.ok].max()) - due_s, "s", n),
        "plateau_tok_per_s": _plateau(c),
        "ttft_slope_s_per_request": slope,
        "ttft_residual_s": residual,
        "prefill_requests_per_s": _inverse(slope, 1.0, "1/s"),
        "prefill_tok_per_s": _inverse(slope, float(prompt_tok(c)[c.ok].mean()), "tok/s"),
        "fifo": _fifo(c),
    }


def _plateau(c: Columns) -> Figure:
    """Tokens per second between the 10th and the 90th percentile of first tokens."""
    a_s, b_s = (quantile_of(c.first_s[c.ok], p) for p in (0.1, 0.9))
    if np.isnan(c.output_tok[c.ok]).any():
        return UNCOUNTED
    if b_s <= a_s:
        return Absent("all first tokens came at once")
    return _once(tokens_in(c, a_s, b_s) / (b_s - a_s), "tok/s", int(c.ok.sum()))


def _drain_line(c: Columns) -> tuple[Figure, Figure]:
    """The slope of TTFT along the queue, and how far requests lie from that line (root mean square)."""
    waits_s = np.sort(ttft(c)[c.ok])
    n = len(waits_s)
    if n < 11:
        absent = Absent(f"a slope along the queue needs 11 requests that succeeded, there are {n}")
        return absent, absent
    place = np.arange(n) - (n - 1) / 2
    slope = float(waits_s @ place / (place**2).sum())
    residual_s = float(np.sqrt(np.mean((waits_s - waits_s.mean() - slope * place) ** 2)))
    return _once(slope, "s/request", n), _once(residual_s, "s", n)


def _inverse(slope: Figure, factor: float, unit: str) -> Figure:
    if isinstance(slope, Absent):
        return slope
    if slope.point <= 0:
        return Absent("TTFT does not grow along the queue")
    return _once(factor / slope.point, unit, slope.n)


def _fifo(c: Columns) -> Figure:
    sent, served = (_ranks(values[c.ok]) for values in (c.sent_s, c.first_s))
    if len(sent) < 2 or np.ptp(sent) == 0 or np.ptp(served) == 0:
        return Absent("an order needs 2 requests")
    return _once(float(np.corrcoef(sent, served)[0, 1]), "1", len(sent))


def _ranks(values: Floats) -> Floats:
    """Ranks from 0, ties sharing their mean."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts + 1) / 2)[where])


def _once(value: float, unit: str, n: int) -> Figure:
    return Estimate(float(value), None, None, None, n, unit, ONE_RUN)
