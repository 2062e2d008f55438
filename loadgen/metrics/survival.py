"""TTFT and E2E of requests that were cut off, by Kaplan and Meier."""

from __future__ import annotations

from typing import Final

import numpy as np

from loadgen.metrics.summary_types import Survival
from loadgen.record.columns import Columns
from loadgen.record.record import Outcome
from loadgen.stats.figure import Absent
from loadgen.stats.kaplan_meier import survival_percentiles

NONE_CUT_OFF: Final = Absent("no request was cut off", "none-cut-off")

_CUT_OFF = (Outcome.TIMEOUT.value, Outcome.CANCELLED.value)


def survival(c: Columns) -> dict[str, Survival]:
    """TTFT and E2E of all requests that were sent, those cut off counted for as long as they ran.

    By metric and quantile. Cut off is what we ended ourselves, at its deadline or with the run, also where it
    never got a connection; a request that failed in another way never ends.
    """
    outcome = c.table.column("outcome").to_numpy()
    cut_off, set_out = np.isin(outcome, _CUT_OFF), outcome != Outcome.NOT_SENT.value
    if not cut_off.any():
        return dict.fromkeys(("ttft", "e2e"), Survival.absent(NONE_CUT_OFF))
    watched_s = np.where(cut_off, c.closed_s - c.origin_s, np.inf)
    began, ended = ~np.isnan(c.first_s) & (c.ok | cut_off), c.ok
    ttft_s = np.where(began, c.first_s - c.origin_s, watched_s)
    e2e_s = np.where(ended, c.last_s - c.origin_s, watched_s)
    return {
        "ttft": Survival(**survival_percentiles(ttft_s[set_out], began[set_out])),
        "e2e": Survival(**survival_percentiles(e2e_s[set_out], ended[set_out])),
    }
