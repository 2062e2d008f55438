"""The arrays that figures draw, out of records and telemetry. Times are seconds from the run's start."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SUCCEEDED = ("ok",)


@dataclass(frozen=True, slots=True)
class Requests:
    """One row per planned request in the order of sending; instants and latencies in seconds.

    NaN is what never happened; `ttft`, `tpot` and `e2e` are +inf for a request that failed, and `tpot` is NaN
    where a single token leaves nothing to average.
    """

    index: NDArray[np.int64]
    succeeded: NDArray[np.bool_]
    due: Floats
    sent: Floats
    first: Floats
    last: Floats
    closed: Floats
    ttft: Floats
    tpot: Floats
    e2e: Floats


def requests(records: pd.DataFrame) -> Requests:
    """The records as arrays, in the order in which they were sent (never sent last, by index)."""
    rows = records.sort_values(["sent_ns", "index"], na_position="last", kind="stable")
    succeeded = rows["outcome"].isin(SUCCEEDED).to_numpy()
    due, sent = _seconds(rows["due_ns"]), _seconds(rows["sent_ns"])
    first = np.array([t[0] if len(t) else np.nan for t in rows["token_ns"]], dtype=np.float64) / 1e9
    last = np.array([t[-1] if len(t) else np.nan for t in rows["token_ns"]], dtype=np.float64) / 1e9
    after_first = np.array([sum(n) - n[0] if len(n) else 0 for n in rows["token_n"]], dtype=np.float64)
    tpot = np.divide(last - first, after_first, out=np.full(len(rows), np.nan), where=after_first > 0)
    return Requests(
        index=rows["index"].to_numpy(dtype=np.int64),
        succeeded=succeeded,
        due=due,
        sent=sent,
        first=first,
        last=last,
        closed=_seconds(rows["closed_ns"]),
        ttft=np.where(succeeded, first - due, np.inf),
        tpot=np.where(succeeded, tpot, np.inf),
        e2e=np.where(succeeded, last - due, np.inf),
    )


def bin_width_s(end_s: float, n_bins: int = 200) -> float:
    """The least of 1, 2, 5 x 10^k seconds that covers `end_s` in at most `n_bins` bins."""
    least = max(end_s, 1e-3) / n_bins
    power = 10.0 ** np.floor(np.log10(least))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9)))


def tokens_per_s(records: pd.DataFrame, edges: Floats) -> Floats:
    """Output tokens delivered in each bin, per second."""
    at = [np.asarray(t, dtype=np.float64) for t in records["token_ns"] if len(t)]
    n = [np.asarray(k, dtype=np.float64) for k in records["token_n"] if len(k)]
    if not at:
        return np.zeros(len(edges) - 1)
    return np.histogram(np.concatenate(at) / 1e9, edges, weights=np.concatenate(n))[0] / np.diff(edges)


def in_flight(rows: Requests, edges: Floats) -> Floats:
    """The most requests in flight (sent, not yet closed) at once in each bin."""
    opened = np.sort(rows.sent[np.isfinite(rows.sent)])
    ended = np.where(np.isfinite(rows.closed), rows.closed, np.inf)[np.isfinite(rows.sent)]
    closed = np.sort(ended)
    # Within a bin the count can only be greatest at the bin's start or just after one of its openings.
    at_start = np.searchsorted(opened, edges[:-1], "right") - np.searchsorted(closed, edges[:-1], "right")
    after = np.arange(1, len(opened) + 1) - np.searchsorted(closed, opened, "right")
    most = at_start.astype(np.float64)
    bins = np.searchsorted(edges, opened, "right") - 1
    inside = (bins >= 0) & (bins < len(most))
    np.maximum.at(most, bins[inside], after[inside].astype(np.float64))
    return most


def level(telemetry: pd.DataFrame, source: str, name: str, edges: Floats) -> Floats:
    """The greatest reading of a telemetry source in each bin, NaN where it was not read."""
    rows = telemetry[(telemetry["source"] == source) & (telemetry["name"] == name)]
    out = np.full(len(edges) - 1, np.nan)
    bins = np.searchsorted(edges, rows["at_ns"].to_numpy(dtype=np.float64) / 1e9, "right") - 1
    values = rows["value"].to_numpy(dtype=np.float64)
    inside = (bins >= 0) & (bins < len(out)) & np.isfinite(values)
    np.fmax.at(out, bins[inside], values[inside])
    return out


def _seconds(ns: pd.Series) -> Floats:
    return ns.to_numpy(dtype=np.float64, na_value=np.nan) / 1e9
