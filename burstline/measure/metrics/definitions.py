"""The metrics: for each one function over the records and one table of words in `metrics.toml`.

The letters of the formulae: s due, d dispatched, c_1 connected, w the request fully written, t_1 ... t_m when
the events that carry tokens arrived, n_1 ... n_m how many tokens each carries, N their sum, f the end of the
stream; all on one monotonic clock. A window is [a, b].
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from burstline.measure.record.columns import Columns, Floats, Ints
from burstline.measure.stats.estimates import label
from burstline.measure.stats.quantiles import Samples, each_once

QUANTILES: Final = (0.5, 0.9, 0.95, 0.99)
PERCENTILES: Final = tuple(map(label, QUANTILES))
STALL_FLOOR_S: Final = 0.2
STALL_FACTOR: Final = 5.0


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric. `of` computes one value per request (NaN where undefined, in seconds), `pooled` one
    per token or gap; both None for what is made of the run as a whole. A request that failed counts as
    infinitely late, unless `failures` says that the metric is about the client and keeps what it knows.
    `undefined` are the requests for which it has no value by nature; any other NaN was not measured.
    """

    title: str
    formula: str
    note: str
    source: str
    of: Callable[[Columns], Floats] | None = None
    pooled: Callable[[Columns], Samples] | None = None
    failures: Literal["infinite", "kept"] = "infinite"
    undefined: Callable[[Columns], NDArray[np.bool_]] = lambda c: np.zeros(len(c), dtype=bool)
    unit: str = "s"
    better: Literal["lower", "higher", "neither"] = "lower"


def ttft(c: Columns) -> Floats:
    return c.text_s - c.origin_s


def ttft_service(c: Columns) -> Floats:
    return c.text_s - c.sent_s


def connect(c: Columns) -> Floats:
    """NaN where the connection stood before the request was dispatched, or was used again."""
    took_s = c.connected_s - c.dispatched_s
    return np.where(took_s > 0, took_s, np.nan)


def e2e(c: Columns) -> Floats:
    return c.last_s - c.origin_s


def e2e_service(c: Columns) -> Floats:
    return c.last_s - c.sent_s


def tpot(c: Columns) -> Floats:
    """NaN where no token came after the first event, or the server did not say how many came."""
    n_later = c.shown_tok - c.first_n
    return np.where(n_later > 0, (c.last_s - c.first_s) / np.where(n_later > 0, n_later, 1), np.nan)


def icl(c: Columns) -> Samples:
    came = gaps(c)
    return gap_samples(c, came.value, came.weight, came.counts)


def itl(c: Columns) -> Samples:
    """The rate view: a gap before n tokens is n samples of a n-th of it."""
    came = gaps(c, counted=True)
    return gap_samples(c, came.value / came.weight, came.weight, came.counts)


def latencies(metric: Metric, c: Columns) -> Floats:
    """The metric of every request, +inf for those that failed, NaN where it is undefined."""
    assert metric.of is not None
    values = metric.of(c)
    if metric.failures == "kept":
        return values
    return np.where(c.ok, values, np.where(c.failed, np.inf, np.nan))


def samples_of(metric: Metric, c: Columns) -> Samples:
    """The samples of a metric: one value per request, or one per token or gap."""
    if metric.pooled is not None:
        return metric.pooled(c)
    return Samples.per_request(latencies(metric, c))


@dataclass(frozen=True, eq=False)
class Gaps(Samples):
    """Gaps between successive events, in s, each before `weight` tokens, and which events end one."""

    ends_one: NDArray[np.bool_]


def gaps(c: Columns, *, counted: bool = False) -> Gaps:
    """The gaps of each request that succeeded.

    `counted` leaves out requests whose tokens per event are not known; without it all weights are 1.
    """
    use = c.ok & ~np.isnan(c.output_tok) if counted else c.ok
    ends_one = c.follows
    ends_one &= c.per_event(use)
    value = np.diff(c.event_s)[ends_one[1:]]
    weight = c.event_n[ends_one] if counted and (c.event_n != 1).any() else each_once(value)
    return Gaps(value, weight, np.where(use, (c.n_events - 1).clip(0), 0), ends_one)


def gap_samples(c: Columns, value: Floats, weight: NDArray[Any], counts: Ints) -> Samples:
    """The samples of successes, and the gaps that failures were to have, infinitely long."""
    failed = ~c.ok & (c.planned_output_tok > 1)
    if not failed.any():
        return Samples(value, weight, counts)
    place, planned = np.cumsum(counts)[failed], c.planned_output_tok[failed].astype(np.int32)
    weight = np.insert(weight.astype(np.int32), place, planned - 1)
    return Samples(np.insert(value, place, np.inf), weight, counts + failed)


_COMPUTED: Final[Mapping[str, dict[str, Any]]] = {
    "ttft": {"of": ttft},
    "tpot": {"of": tpot, "undefined": lambda c: c.shown_tok <= c.first_n},
    "itl": {"pooled": itl},
    "e2e": {"of": e2e},
    "ttft_service": {"of": ttft_service},
    "e2e_service": {"of": e2e_service},
    "ttfa": {"of": lambda c: c.answer_s - c.origin_s, "undefined": lambda c: np.isnan(c.answer_s)},
    "first_event": {
        "of": lambda c: c.first_event_s - c.sent_s,
        "undefined": lambda c: np.isnan(c.first_event_s),
    },
    "headers": {"of": lambda c: c.headers_s - c.sent_s, "undefined": lambda c: np.isnan(c.headers_s)},
    "icl": {"pooled": icl},
    "ntpot": {"of": lambda c: e2e(c) / np.where(c.output_tok > 0, c.output_tok, np.nan)},
    "connect": {"of": connect, "undefined": lambda c: np.isnan(connect(c))},
    "server_queue": {"of": lambda c: c.server_queue_s},
    "server_prefill": {"of": lambda c: c.server_prefill_s},
    "server_other": {"of": lambda c: c.server_first_token_s - c.server_queue_s - c.server_prefill_s},
    "outside_server": {"of": lambda c: ttft_service(c) - c.server_first_token_s},
}
"""How each is computed; the others are of the run as a whole."""

METRICS: Final[dict[str, Metric]] = {
    name: Metric(**words, **_COMPUTED.get(name, {}))
    for name, words in tomllib.loads(Path(__file__).with_name("metrics.toml").read_text("utf-8")).items()
}
"""Their words are in `metrics.toml`."""
