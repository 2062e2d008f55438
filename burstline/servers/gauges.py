"""An engine's own gauges, counters and histograms, out of Prometheus text; ranks are added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from burstline.servers.messages import EngineError, Get

MOST_OF_A_LINE = 8192
_AVERAGED = frozenset({"kv_used_fraction"})
_SHARING = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels of ranks that compute the same requests together."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """An engine's own gauges under common names; None means "not provided", never 0.

    `kv_used_fraction` is 0..1; the four after it are counters since the server's start, in tokens but the
    first. `resident_bytes` is that of the process that answers. `latencies` are the engine's own histograms
    of "ttft", "itl" and "e2e", seconds, also since its start: `ttft_le_0.5` so many were at most,
    `ttft_count` in all, `ttft_sum` together.
    """

    running: float | None = None
    waiting: float | None = None
    kv_used_fraction: float | None = None
    preemptions: float | None = None
    prefix_hit_tokens: float | None = None
    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    resident_bytes: float | None = None
    latencies: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Mean:
    """Two counters whose growths make a mean, of the samples that have these labels."""

    total: str
    count: str
    labels: Mapping[str, str] = field(default_factory=dict)


def means_in(rows: Mapping[str, Any]) -> Mapping[str, Mean]:
    """The table `means` of an engine's TOML file: histograms by their names, or the fields of a `Mean`."""
    return {
        name: Mean(f"{row}_sum", f"{row}_count") if isinstance(row, str) else Mean(**row)
        for name, row in rows.items()
    }


def gauges_in(
    metrics: str,
    names: Mapping[str, Sequence[str]],
    latencies: Mapping[str, str] | None = None,
    means: Mapping[str, Mean] | None = None,
) -> Gauges:
    """The common gauges out of Prometheus text; `names` are an engine's own, the first that is there counts.

    `latencies` names its histograms by what they measure (see `Gauges`).

    Several samples of one name (data-parallel ranks, kinds) add up; of `kv_used_fraction` it is the mean.
    """
    names = {**names, "resident_bytes": ("process_resident_memory_bytes",)}  # of every Prometheus client
    each: dict[str, dict[object, float]] = {}
    for sample in samples(metrics, [name for own in names.values() for name in own]):
        key = tuple(value for label, value in sample.labels.items() if label not in _SHARING)
        of_name = each.setdefault(sample.name, {})
        of_name[key] = max(sample.value, of_name.get(key, sample.value))
    totals: dict[str, float] = {}
    for gauge, own in names.items():
        values = next((each[name].values() for name in own if name in each), None)
        if values:
            totals[gauge] = sum(values) / (len(values) if gauge in _AVERAGED else 1)
    measured = _histograms(metrics, latencies or {}) | _means(metrics, means or {})
    return Gauges(**totals, latencies=measured or None)


def _means(metrics: str, names: Mapping[str, Mean]) -> dict[str, float]:
    """`NAME_sum` and `NAME_count` of each mean; buckets are left out, TGI has 300 of each."""
    wanted = sorted({own for mean in names.values() for own in (mean.total, mean.count)})
    seen = list(samples(metrics, wanted))
    rows: dict[str, float] = {}
    for name, mean in names.items():
        for end, own in (("sum", mean.total), ("count", mean.count)):
            values = [s.value for s in seen if s.name == own and mean.labels.items() <= s.labels.items()]
            if values:
                rows[f"{name}_{end}"] = sum(values)
    return rows


def _histograms(metrics: str, names: Mapping[str, str]) -> dict[str, float]:
    rows = {f"{own}_{end}": what for what, own in names.items() for end in ("bucket", "count", "sum")}
    found: dict[str, float] = {}
    for sample in samples(metrics, list(rows)):
        end = f"le_{sample.labels['le']}" if "le" in sample.labels else sample.name.rpartition("_")[2]
        name = f"{rows[sample.name]}_{end}"
        found[name] = found.get(name, 0.0) + sample.value
    return found


def samples(metrics: str, names: Sequence[str]) -> list[Any]:
    """The samples of these names; ValueError for a page that is no metrics, or where one of them is too long.

    Parsing all of vLLM's 460 costs 5 ms, this costs a hundredth. The square of a line's length is its cost.
    """
    starts = tuple(name + end for name in names for end in ("{", " "))
    lines = [line for line in metrics.splitlines() if line.startswith(starts)]
    if (longest := max(map(len, lines), default=0)) > MOST_OF_A_LINE:
        raise ValueError(f"a line of {longest:,} characters; expected at most {MOST_OF_A_LINE:,}")
    # Imported here, for the watcher alone: drivers and decoders import this module and read no metrics.
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families("\n".join([*lines, ""]))
    return [sample for family in families for sample in family.samples]


def samples_at(get: Get, names: Sequence[str]) -> list[Any]:
    """The same of the server's metrics page; none where it has none that can be read."""
    try:
        reply = get("/metrics")
        return samples(reply.body.decode(errors="replace"), names) if reply.ok else []
    except (EngineError, ValueError):
        return []
