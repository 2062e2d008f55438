"""Reads what a server reports: JSON at its paths, gauges in Prometheus text, lines of its log."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from burstline.servers.identity import Gauges
from burstline.servers.messages import EngineError, Get
from burstline.servers.replies import loads

MIB, GIB = 2**20, 2**30
MOST_OF_A_LINE = 8192

_AVERAGED = frozenset({"kv_used_fraction"})
_SHARING = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels of ranks that compute the same requests together."""


def json_at(get: Get, path: str) -> dict[str, Any]:
    """The JSON object at a path; empty where the server has none there. A bare list becomes its `data`."""
    reply = get(path)
    answer = loads(reply.body) if reply.ok else None
    return {"data": answer} if isinstance(answer, list) else answer if isinstance(answer, dict) else {}


def first_model(models: object) -> dict[str, Any]:
    """The first of the models that `/v1/models` lists, with its `id`; empty where it lists none."""
    listed = (models.get("data") or models.get("models")) if isinstance(models, dict) else None
    model = listed[0] if isinstance(listed, list) and listed else None
    if isinstance(model, str):
        return {"id": model}
    return {"id": model.get("name") or model.get("model")} | model if isinstance(model, dict) else {}


def owned_by(owner: str) -> bytes:
    """The pattern of a `/v1/models` whose models are `owned_by` this engine."""
    return rb'"owned_by": ?"%b"' % re.escape(owner).encode()


@dataclass(frozen=True, slots=True)
class Mean:
    """Two counters whose growths make a mean, of the samples that have these labels."""

    total: str
    count: str
    labels: Mapping[str, str] = field(default_factory=dict)


def mean_of(histogram: str, **labels: str) -> Mean:
    return Mean(f"{histogram}_sum", f"{histogram}_count", labels)


def drafts(counters: str) -> dict[str, Mean]:
    """Speculative decoding by counters of this prefix, as vLLM and llama.cpp name them.

    `accepted` is how many drafted tokens a draft brought, `acceptance` which share of them.
    """
    accepted = f"{counters}_accepted_tokens_total"
    return {
        "accepted": Mean(accepted, f"{counters}_drafts_total"),
        "acceptance": Mean(accepted, f"{counters}_draft_tokens_total"),
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


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOG_PREFIX = re.compile(
    r"^(?:\([\w -]+ pid=\d+\) )?(?:\[[^\]]*\] ?)*(?:(?:DEBUG|INFO|WARNING|WARN|ERROR)\b[: ]*)?"
    r"(?:\d[\d-]* [\d:.,]+ )?(?:\[[^\]]*\]:? ?)?(?:\d+(?:\.\d{2,3}){3} [DIWE] )?"
)
MOST_OF_A_MESSAGE = 120


def log_message(line: str) -> str:
    """The message of a log line: that of a JSON line, else the line without level and time.

    Cut at whole words where it is long.
    """
    text = _ANSI.sub("", line)
    _, message = json_line(text) or ("", _LOG_PREFIX.sub("", text))
    text = " ".join(message.split())
    cut = text[:MOST_OF_A_MESSAGE].rpartition(" ")[0] + " ..."
    return cut if len(text) > MOST_OF_A_MESSAGE else text


def json_line(line: str) -> tuple[str, str] | None:
    """Level and message of a line of a JSON log; None for any other line."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(row, dict):
        return "", line
    fields = row.get("fields")
    return str(row.get("level")), str((fields if isinstance(fields, dict) else row).get("message") or line)


def flag(word: str | None) -> bool | None:
    """On or off as engines log it; None for any other word."""
    return {"true": True, "1": True, "false": False, "0": False}.get((word or "").lower())


def number(text: str | None) -> int | None:
    """The whole number in a text; None for any other text."""
    return int(text) if text and text.isdecimal() else None


def logged(log: str, pattern: str) -> str | None:
    """The group of the pattern's first match in a log."""
    return found[1] if (found := re.search(pattern, log)) else None


def logged_bytes(log: str, pattern: str, unit_bytes: int) -> int | None:
    """Bytes out of lines that every rank or device logs for its own share, summed; None where none does."""
    shares = re.findall(pattern, log)
    return round(sum(map(float, shares)) * unit_bytes) if shares else None


def opposite(flag: object) -> bool | None:
    """Whether a thing is on whose off-switch has this value; None where the value is unknown."""
    return not flag if isinstance(flag, bool) else None


def option_of(arguments: Sequence[str], *names: str) -> bool:
    """Whether the user gave one of these flags: the adapter then adds none of its own."""
    return any(argument.partition("=")[0] in names for argument in arguments)


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """The value of one of these flags, `--flag value` or `--flag=value`; the last counts, as for engines."""
    value = None
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        name, has_value, rest = argument.partition("=")
        if name in names:
            value = rest if has_value else following
    return value
