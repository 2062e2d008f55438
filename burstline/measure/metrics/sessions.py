"""Numbers of conversations: duration of whole sessions, and each turn by its position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from burstline.measure.metrics.definitions import METRICS, QUANTILES, latencies
from burstline.measure.metrics.throughput import NO_SUCCESS, prompt_tok
from burstline.measure.record.columns import Columns, Floats, Ints
from burstline.measure.record.record import Outcome
from burstline.measure.record.rundir import Run
from burstline.measure.record.summary import Quantiles, SessionFigures, TurnFigures
from burstline.measure.stats.estimates import Absent, Figure, measured
from burstline.measure.stats.figure import noted
from burstline.measure.stats.quantiles import Samples, mean, percentiles, quantile_of

_UNFINISHED: Final = (Outcome.NOT_SENT.value, Outcome.CANCELLED.value)
NO_CACHE_COUNTS: Final = Absent("the server does not report cached tokens by request")
NO_FOLLOWERS: Final = "no turn follows another"


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Where each planned request stands in its conversation, one entry a request.

    `session` numbers the sessions from 0, `depth` is how many turns come before it, `pause_s` is from the end
    of the one before to its send. That one is `before`, -1 for the first of a session.
    """

    session: Ints
    depth: Ints
    pause_s: Floats
    before: Ints

    @property
    def opens(self) -> NDArray[np.bool_]:
        return self.before < 0

    @classmethod
    def of_plan(cls, table: pa.Table) -> Turns:
        """From the plan's columns `session`, `after` and `pause_ns`, one row a request."""
        before = np.array([row[0] if row else -1 for row in table.column("after").to_pylist()], np.int64)
        depth = np.zeros(len(before), dtype=np.int64)
        for k in np.flatnonzero(before >= 0):  # a turn stands behind the one that it follows
            depth[k] = 1 + depth[before[k]]
        _, session = np.unique(table.column("session").to_numpy(), return_inverse=True)
        pause_s = table.column("pause_ns").fill_null(0).to_numpy() / 1e9
        return cls(session.astype(np.int64), depth, pause_s, before)


def turns_of(run: Run) -> Turns | None:
    """The place of each request of a run in its session; None of a run without sessions."""
    table = run.plan_columns("session", "after", "pause_ns")
    if table is None or table.column("session").null_count == len(table):
        return None
    return Turns.of_plan(table)


def session_figures(c: Columns, turns: Turns, start_s: float | None = None) -> SessionFigures:
    """The figures of all sessions that began at `start_s` or later (None: of all).

    A session with a failed turn never ends: its makespan is infinite. Sessions that were cut off with the run
    are left out.
    """
    n = int(turns.session.max(initial=-1)) + 1
    begin_s, end_s = np.full(n, np.inf), np.full(n, -np.inf)
    np.minimum.at(begin_s, turns.session, c.due_s)
    np.maximum.at(end_s, turns.session, np.where(c.ok, c.last_s, np.inf))
    unfinished = c.having("outcome", _UNFINISHED)
    counts = np.ones(n, dtype=bool)
    counts[turns.session[unfinished]] = False
    counts &= begin_s >= (-np.inf if start_s is None else start_s)
    makespans = Samples.per_request((end_s - begin_s)[counts])
    own = counts[turns.session]
    all_late_s, earlier_tok = _followers(c, turns)
    late_s = all_late_s[own & ~np.isnan(all_late_s)]
    n_late, asked_tok = len(late_s), prompt_tok(c)
    whole = int(np.isfinite(end_s[counts]).sum())
    sessions = measured(float(counts.sum()), "sessions", "", n)
    if not counts.all():
        sessions = noted(sessions, f"of {n:,}: the others began before the window, or were cut off")
    return SessionFigures(
        sessions=sessions,
        completed=measured(whole / counts.sum() if counts.any() else None, "1", "no session ended", n),
        **{f"makespan_{p}_s": figure for p, figure in percentiles(makespans, QUANTILES, "s").items()},
        makespan_mean_s=mean(makespans, "s"),
        early_turns=measured(float((late_s < 0).sum()) if n_late else None, "turns", NO_FOLLOWERS, n_late),
        pause_late_p99_s=measured(quantile_of(late_s, 0.99) if n_late else None, "s", NO_FOLLOWERS, n_late),
        earlier_fraction=_share(earlier_tok, asked_tok, c.ok),
        by_turn=tuple(
            _turn(c, depth, own & (turns.depth == depth), earlier_tok)
            for depth in range(int(turns.depth[own].max(initial=-1)) + 1)
        ),
    )


def _turn(c: Columns, depth: int, where: NDArray[np.bool_], earlier_tok: Floats) -> TurnFigures:
    served = where & c.ok
    asked_tok = prompt_tok(c)
    counted = served.any() and not np.isnan(asked_tok[served]).any()
    cached = served & ~np.isnan(c.cached_tok)
    times = {name: Samples.per_request(latencies(METRICS[name], c)[where]) for name in ("ttft", "e2e")}
    return TurnFigures(
        turn=depth + 1,
        requests=int(where.sum()),
        ok=int(served.sum()),
        prompt_tok_mean=measured(asked_tok[served].mean() if counted else None, "tok", NO_SUCCESS.reason),
        earlier_fraction=_share(earlier_tok, asked_tok, served),
        cached_fraction=_share(c.cached_tok, asked_tok, cached) if cached.any() else NO_CACHE_COUNTS,
        **{name: Quantiles(**percentiles(each, QUANTILES, "s")) for name, each in times.items()},
    )


def _share(part_tok: Floats, whole_tok: Floats, where: NDArray[np.bool_]) -> Figure:
    n_tok = float(whole_tok[where].sum())
    return measured(part_tok[where].sum() / n_tok if n_tok > 0 else None, "1", NO_SUCCESS.reason)


def _followers(c: Columns, turns: Turns) -> tuple[Floats, Floats]:
    """How much later than its pause after the turn before each was sent; NaN of first turns.

    With the prompt tokens that the prompt and the reply before had brought; 0 of first turns.
    """
    late_s, tok, asked_tok = np.full(len(c), np.nan), np.zeros(len(c)), prompt_tok(c)
    later = ~turns.opens
    before, brought_tok = turns.before[later], np.where(c.has_text, c.output_tok, 0.0)
    late_s[later] = c.sent_s[later] - c.closed_s[before] - turns.pause_s[later]
    tok[later] = asked_tok[before] + np.nan_to_num(brought_tok[before])
    return late_s, np.minimum(tok, asked_tok)
