"""Planned and served lengths, and whether client and server count the same tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from loadgen.metrics.throughput import prompt_tok
from loadgen.record.columns import Columns, Floats
from loadgen.record.summary import Conservation, LengthFigures, LengthSummary
from loadgen.record.telemetry import Telemetry
from loadgen.stats.estimates import Absent, Figure, measured


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
    n_ok = int(c.ok.sum())
    # The length of a chat that only the server can count is planned as 0.
    served = ~np.isnan(c.prompt_tok) & c.ok & (c.planned_prompt_tok > 0)
    counted = ~np.isnan(c.output_tok) & c.ok
    cached = ~np.isnan(c.cached_tok) & c.ok
    failed_tok = float(c.event_n[c.per_event(~c.ok)].sum())
    return LengthSummary(
        prompt_tok=_asked_served(c.planned_prompt_tok, c.prompt_tok, c.ok),
        output_tok=_asked_served(c.planned_output_tok, c.output_tok, c.ok),
        prompt_mismatches=_count(c.prompt_tok[served] != c.planned_prompt_tok[served], "requests", n_ok),
        output_mismatches=_count(c.output_tok[counted] != c.planned_output_tok[counted], "requests", n_ok),
        output_tok_of_failed=measured(failed_tok, "tok", "", int((~c.ok).sum())),
        cached_tok=_sum(c.cached_tok[cached], "tok", "the server did not say what its prefix cache served"),
        cached_fraction=_fraction(c, cached),
        finish_reasons=c.tally("finish_reason"),
        prompt_sources=c.tally("prompt_source"),
        output_sources=c.tally("output_source"),
        splits=c.tally("split"),
        count_gaps=_gaps(c),
        beyond_tok=_beyond(c),
    )


def conservation(c: Columns, watched: Telemetry) -> Conservation:
    """Tokens as the client received them against the growth of the server's own counters.

    Tokens that a server made beyond the asked length count here: it counted them.
    """
    n = len(c)
    beyond = _beyond(c)
    beyond_tok = 0.0 if isinstance(beyond, Absent) else beyond.point
    pairs = {
        "output": (
            "generation_tokens",
            np.nansum(c.output_tok) + beyond_tok if (~np.isnan(c.output_tok)).any() else None,
        ),
        "prompt": ("prompt_tokens", np.nansum(c.prompt_tok) if (~np.isnan(c.prompt_tok)).any() else None),
    }
    figures: dict[str, Figure] = {}
    for name, (gauge, total) in pairs.items():
        client = measured(total, "tok", "the server did not say how many tokens each reply has", n)
        server = watched.grown("engine", gauge, "tok")
        figures |= {f"{name}_client_tok": client, f"{name}_server_tok": server}
        figures[f"{name}_residual"] = _residual(client, server)
    return Conservation(**figures)


def _residual(client: Figure, server: Figure) -> Figure:
    for figure in (client, server):
        if isinstance(figure, Absent):
            return figure
    assert not isinstance(client, Absent)
    assert not isinstance(server, Absent)
    residual = 1 - client.point / server.point if server.point else None
    return measured(residual, "1", "the server's counter did not move")


def _asked_served(asked: Floats, served: Floats, ok: Any) -> LengthFigures:
    known = served[ok & ~np.isnan(served)]
    silent = "the server did not count" if ok.any() else "no request succeeded"
    return LengthFigures(
        planned_mean=_stat(asked, np.mean, "nothing was planned"),
        planned_min=_stat(asked, np.min, "nothing was planned"),
        planned_max=_stat(asked, np.max, "nothing was planned"),
        served_mean=_stat(known, np.mean, silent),
        served_min=_stat(known, np.min, silent),
        served_max=_stat(known, np.max, silent),
    )


def _stat(values: Floats, of: Any, absent: str) -> Figure:
    return measured(float(of(values)) if len(values) else None, "tok", absent, len(values))


def _sum(values: Floats, unit: str, absent: str) -> Figure:
    return measured(float(values.sum()) if len(values) else None, unit, absent, len(values))


def _count(flags: Any, unit: str, n_ok: int) -> Figure:
    absent = "the server did not count" if n_ok else "no request succeeded"
    return measured(float(flags.sum()) if len(flags) else None, unit, absent, len(flags))


def _fraction(c: Columns, known: Any) -> Figure:
    prompt = prompt_tok(c)[known]
    total = float(prompt.sum())
    share = float(c.cached_tok[known].sum()) / total if total else None
    return measured(share, "1", "the server did not say what its prefix cache served", len(prompt))


def _beyond(c: Columns) -> Figure:
    """Tokens beyond the planned length, from a server that does not stop there."""
    column = c.table.column("beyond_tok").to_numpy().astype(np.float64)
    known = column[~np.isnan(column)]
    return measured(
        float(known.sum()) if len(known) else None, "tok", "the server stops as asked", len(known)
    )


def _gaps(c: Columns) -> Figure:
    """For how many requests the server's own counts contradict each other."""
    column = c.table.column("output_gap_tok").to_numpy().astype(np.float64)
    known = column[~np.isnan(column)]
    n = float((known != 0).sum()) if len(known) else None
    return measured(n, "requests", "no reply was counted twice", len(known))
