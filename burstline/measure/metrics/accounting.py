"""Counts of requests and tokens, and the laws that hold in every summary, whatever the server did.

A violation of a law is a bug in Burstline. Each holds between figures that are computed apart from each
other, or between a figure and the plain events behind it. Nothing here estimates anything.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.definitions import PERCENTILES
from burstline.measure.metrics.throughput import prompt_tok
from burstline.measure.record.columns import Columns, Floats
from burstline.measure.record.summary import Conservation, LengthFigures, LengthSummary, Summary
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.record.verdict import CONTRADICTION, Reason
from burstline.measure.stats.estimates import Absent, Figure, measured

NO_CACHE_COUNT: Final = "the server did not report its prefix-cache hits"


def counts(c: Columns) -> dict[str, int]:
    """Requests by outcome: `planned`, `ok`, then every other that occurred; they add up to `planned`."""
    outcomes = c.tally("outcome")
    ok = outcomes.pop("ok", 0)
    return {"planned": len(c), "ok": ok, **outcomes}


def lengths(c: Columns) -> LengthSummary:
    """Asked and served lengths of what succeeded, how requests finished, and who counted their tokens.

    `*_mismatches` are successes for which the server counted other than was planned. `split` says how the
    tokens of single events are known (see `Record.split`): "spread" and "unknown" are not measurements.
    """
    # The length of a chat that only the server can count is planned as 0.
    served = ~np.isnan(c.prompt_tok) & c.ok & (c.planned_prompt_tok > 0)
    counted = ~np.isnan(c.output_tok) & c.ok
    cached = ~np.isnan(c.cached_tok) & c.ok
    total_tok = float(prompt_tok(c)[cached].sum())
    cached_share = float(c.cached_tok[cached].sum()) / total_tok if total_tok else None
    failed_tok = float(c.event_n[c.per_event(~c.ok)].sum())
    other_prompt = c.prompt_tok[served] != c.planned_prompt_tok[served]
    other_output = c.output_tok[counted] != c.planned_output_tok[counted]
    gaps = _known(c, "output_gap_tok") != 0
    cut = c.table.column("error").is_valid().to_numpy()  # see `Record.error`
    absent = "the server did not count" if c.ok.any() else "no request succeeded"
    return LengthSummary(
        prompt_tok=_planned_and_served(c.planned_prompt_tok, c.prompt_tok, c.ok, absent),
        output_tok=_planned_and_served(c.planned_output_tok, c.output_tok, c.ok, absent),
        prompt_mismatches=_reading(other_prompt, np.sum, "requests", absent),
        output_mismatches=_reading(other_output, np.sum, "requests", absent),
        output_tok_of_failed=measured(failed_tok, "tok", "", int((~c.ok).sum())),
        cached_tok=_reading(c.cached_tok[cached], np.sum, "tok", NO_CACHE_COUNT),
        cached_fraction=measured(cached_share, "1", NO_CACHE_COUNT, int(cached.sum())),
        finish_reasons=c.tally("finish_reason"),
        prompt_sources=c.tally("prompt_source"),
        output_sources=c.tally("output_source"),
        splits=c.tally("split"),
        count_gaps=_reading(gaps, np.sum, "requests", "no reply was counted twice"),
        beyond_tok=_reading(_known(c, "beyond_tok"), np.sum, "tok", "the server stops as asked"),
        hidden_tok=_reading((c.output_tok - c.shown_tok)[counted], np.sum, "tok", absent),
        cut_behind=_reading(cut[c.ok], np.sum, "requests", "no request succeeded"),
    )


def conservation(c: Columns, watched: Telemetry) -> Conservation:
    """Tokens as the client received them against the growth of the server's own counters.

    Tokens that a server made beyond the asked length count here: it counted them.
    """
    pairs = {
        "output": ("generation_tokens", c.output_tok, float(_known(c, "beyond_tok").sum())),
        "prompt": ("prompt_tokens", c.prompt_tok, 0.0),
    }
    figures: dict[str, Figure] = {}
    for name, (gauge, tok, more) in pairs.items():
        total = None if np.isnan(tok).all() else np.nansum(tok) + more
        client = measured(total, "tok", "the server did not say how many tokens each reply has", len(c))
        server = watched.grown("engine", gauge, "tok")
        figures |= {f"{name}_client_tok": client, f"{name}_server_tok": server}
        figures[f"{name}_residual"] = _residual(client, server)
    return Conservation(**figures)


def _residual(client: Figure, server: Figure) -> Figure:
    if isinstance(client, Absent) or isinstance(server, Absent):
        return client if isinstance(client, Absent) else server
    residual = 1 - client.point / server.point if server.point else None
    return measured(residual, "1", "the server's counter did not move")


def _planned_and_served(planned: Floats, served: Floats, ok: NDArray[np.bool_], absent: str) -> LengthFigures:
    known = served[ok & ~np.isnan(served)]
    figures = {
        f"{when}_{name}": _reading(values, of, "tok", why)
        for when, values, why in (("planned", planned, "nothing was planned"), ("served", known, absent))
        for name, of in (("mean", np.mean), ("min", np.min), ("max", np.max))
    }
    return LengthFigures(**figures)


def _reading(values: NDArray[Any], of: Callable[..., Any], unit: str, absent: str) -> Figure:
    return measured(float(of(values)) if len(values) else None, unit, absent, len(values))


def _known(c: Columns, name: str) -> Floats:
    column: Floats = c.table.column(name).to_numpy().astype(np.float64)
    return column[~np.isnan(column)]


ROUNDING: Final = 1e-6
NO_LATER: Final = (("ttft", "e2e"), ("ntpot", "e2e"))
"""Pairs of metrics of which the first is never the longer for any request."""


def broken_laws(summary: Summary, planned: Columns, concurrency: int | None) -> tuple[Reason, ...]:
    """Contradictions in a summary of `planned`, all requests of a load.

    `concurrency` is the most that may be in flight, None where nothing limits it.
    """
    found = [
        *_outcomes(summary, planned),
        *_percentiles(summary),
        *_rates(summary, planned),
        *_in_flight(summary, planned, concurrency),
    ]
    return tuple(Reason.of(CONTRADICTION, what=text) for text in found)


def _outcomes(summary: Summary, planned: Columns) -> Iterator[str]:
    """Every planned request has one outcome."""
    n = sum(count for name, count in summary.counts.items() if name != "planned")
    if not n == summary.counts["planned"] == len(planned):
        yield f"{n:,} requests have an outcome, and {summary.counts['planned']:,} were planned."


def _percentiles(summary: Summary) -> Iterator[str]:
    """A higher percentile is no less than a lower one, and a part takes no longer than the whole."""
    for name, figures in summary.metrics.items():
        for low, high in pairwise(PERCENTILES):
            a, b = _point(figures.figure(low)), _point(figures.figure(high))
            if a > b + ROUNDING:
                yield f"{name.upper()} {low} is {a:.6g}, more than its {high} of {b:.6g}."
    for part, whole in NO_LATER:
        for p in PERCENTILES:
            a, b = (_point(summary.metrics[name].figure(p)) for name in (part, whole))
            if a > b + ROUNDING:
                yield f"{part.upper()} {p} is {a:.6g} s, more than {whole.upper()} {p} of {b:.6g} s."


def _rates(summary: Summary, planned: Columns) -> Iterator[str]:
    """A rate times its window is at most all that came; what was good is at most what was served."""
    length_s = _point(summary.window.length_s)
    ok = planned.ok
    came = {
        "requests_per_s": float(ok.sum()),
        "output_tok_per_s": float(
            max(planned.event_n[planned.per_event(ok)].sum(), np.nansum(planned.output_tok[ok]))
        ),
        "input_tok_per_s": float(prompt_tok(planned)[ok].sum()),
    }
    for name, most in came.items():
        n = _point(summary.throughput.figure(name)) * length_s
        if n < 0 or n > most * (1 + ROUNDING):
            yield f"{name} implies {n:,.6g} in {length_s:.6g} s, but only {most:,.6g} arrived in total."
    for good, served in (("requests_per_s", "requests_per_s"), ("tok_per_s", "output_tok_per_s")):
        a, b = _point(summary.goodput.figure(good)), _point(summary.throughput.figure(served))
        if a > b * (1 + ROUNDING):
            yield f"Goodput of {a:.6g} /s ({good}) is more than the throughput of {b:.6g} /s."
    attainment = _point(summary.goodput.attainment)
    if not (np.isnan(attainment) or 0 <= attainment <= 1):
        yield f"A share of {attainment:.6g} of the requests met the criteria."


def _in_flight(summary: Summary, planned: Columns, concurrency: int | None) -> Iterator[str]:
    """Mean <= maximum <= what a closed loop may have; and Little's law.

    Throughput times the mean stay of what ended in the window is the mean number in flight, but for what the
    window's edges cut.
    """
    mean, most = _point(summary.concurrency.mean), _point(summary.concurrency.max)
    if mean > most * (1 + ROUNDING):
        yield f"On average {mean:.6g} requests were in flight, and never more than {most:.6g}."
    if concurrency is not None and most > concurrency:
        yield f"{most:.6g} requests were in flight at once, in a closed loop of {concurrency}."
    a, b = _point(summary.window.start_s), _point(summary.window.end_s)
    rate = _point(summary.throughput.requests_per_s)
    if np.isnan([mean, a, b, rate]).any():
        return
    sent_s, last_s = planned.sent_s, planned.last_s
    served = planned.ok & ~np.isnan(sent_s)
    # One that was sent as the window began may have ended then, too: it stayed no time, and counts.
    ended = served & ((last_s > a) | (sent_s >= a)) & (last_s <= b)
    if not ended.any():
        return
    # Requests that came from before the window bring time that was not spent in it, and the other way round;
    # those that brought no success were in flight too.
    before_s = (a - sent_s)[served & (sent_s < a) & (last_s > a)].sum()
    after_s = (b - sent_s)[served & (sent_s < b) & (last_s > b)].sum()
    until_s = np.where(served, last_s, sent_s)
    others_s = (planned.closed_s.clip(a, b) - until_s.clip(a, b))[~np.isnan(sent_s + planned.closed_s)].sum()
    stay_s = (last_s - sent_s)[ended].mean()
    in_flight = rate * stay_s + (after_s - before_s + others_s) / (b - a)
    if abs(in_flight - mean) > 1e-3 * max(mean, 1.0):
        yield (
            f"By Little's law, {rate:.6g} requests/s that stay {stay_s:.6g} s mean {in_flight:.6g} "
            f"in flight, but {mean:.6g} were measured."
        )


def _point(figure: Figure) -> float:
    """NaN where there is none: what compares with it holds."""
    return float("nan") if isinstance(figure, Absent) else figure.point
