"""Planned and served lengths, and whether client and server count the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from burstline.measure.metrics.throughput import prompt_tok
from burstline.measure.record.columns import Columns, Floats
from burstline.measure.record.summary import Conservation, LengthFigures, LengthSummary
from burstline.measure.record.telemetry import Telemetry
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
        cached_fraction=_cached_fraction(c, cached),
        finish_reasons=c.tally("finish_reason"),
        prompt_sources=c.tally("prompt_source"),
        output_sources=c.tally("output_source"),
        splits=c.tally("split"),
        count_gaps=_reading(gaps, np.sum, "requests", "no reply was counted twice"),
        beyond_tok=_beyond(c),
        hidden_tok=_reading((c.output_tok - c.shown_tok)[counted], np.sum, "tok", absent),
        cut_behind=_reading(cut[c.ok], np.sum, "requests", "no request succeeded"),
    )


def conservation(c: Columns, watched: Telemetry) -> Conservation:
    """Tokens as the client received them against the growth of the server's own counters.

    Tokens that a server made beyond the asked length count here: it counted them.
    """
    n = len(c)
    beyond = _beyond(c)
    beyond_tok = 0.0 if isinstance(beyond, Absent) else beyond.point
    pairs = {
        "output": ("generation_tokens", c.output_tok, beyond_tok),
        "prompt": ("prompt_tokens", c.prompt_tok, 0.0),
    }
    figures: dict[str, Figure] = {}
    for name, (gauge, tok, more) in pairs.items():
        total = None if np.isnan(tok).all() else np.nansum(tok) + more
        client = measured(total, "tok", "the server did not say how many tokens each reply has", n)
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


def _cached_fraction(c: Columns, known: NDArray[np.bool_]) -> Figure:
    prompt = prompt_tok(c)[known]
    total = float(prompt.sum())
    share = float(c.cached_tok[known].sum()) / total if total else None
    return measured(share, "1", NO_CACHE_COUNT, len(prompt))


def _beyond(c: Columns) -> Figure:
    """Tokens beyond the planned length, from a server that does not stop there."""
    return _reading(_known(c, "beyond_tok"), np.sum, "tok", "the server stops as asked")


def _known(c: Columns, name: str) -> Floats:
    column: Floats = c.table.column(name).to_numpy().astype(np.float64)
    return column[~np.isnan(column)]
