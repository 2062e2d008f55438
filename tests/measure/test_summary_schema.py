"""measure/record/summary.schema.json against real summaries, by the few words of JSON Schema that it uses."""

import copy
import json
from importlib.resources import files

import pytest

from burstline.measure.metrics.slo import parse_slo
from burstline.measure.record import manifest
from burstline.measure.record.tables import RECORDS, record_table
from tests.measure.making import conditions, failed, ok, summarized
from tests.measure.queueing import queued

SCHEMA = json.loads(files("burstline.measure.record").joinpath("summary.schema.json").read_text())
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}
WORDS = {
    "$schema",
    "$id",
    "$defs",
    "$ref",
    "title",
    "description",
    "type",
    "const",
    "enum",
    "anyOf",
    "required",
}
WORDS |= {"properties", "additionalProperties", "items", "minimum", "maximum", "minLength"}


def faults(value, schema, path="$"):
    """Every way in which the value is not as the schema says; unknown words of the schema are refused."""
    assert set(schema) <= WORDS, set(schema) - WORDS
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema and all(list(faults(value, each, path)) for each in schema["anyOf"]):
        yield f"{path}: {value!r:.80} is none of {len(schema['anyOf'])} kinds"
    if "const" in schema and value != schema["const"]:
        yield f"{path}: {value!r}, expected {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r}, expected one of {schema['enum']}"
    if "type" in schema and not is_of(value, schema["type"]):
        yield f"{path}: {value!r:.80} is no {schema['type']}"
        return
    if isinstance(value, dict):
        yield from in_object(value, schema, path)
    for k, item in enumerate(value if isinstance(value, list) else ()):
        yield from faults(item, schema.get("items", {}), f"{path}[{k}]")
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get(
        "maximum", value
    ):
        yield f"{path}: {value} is out of range"
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        yield f"{path}: too short"


def is_of(value, names):
    kinds = [TYPES[name] for name in ([names] if isinstance(names, str) else names)]
    return not isinstance(value, bool) and any(isinstance(value, kind) for kind in kinds)


def in_object(value, schema, path):
    own, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}: no {name}"
    for name, item in value.items():
        if name not in own and others is False:
            yield f"{path}: {name} is not in the schema"
        else:
            yield from faults(item, own.get(name, others or {}), f"{path}.{name}")


GOALS = tuple(map(parse_slo, ("ttft.p99<=2s", "ttft<=1s", "output_tok_per_s>=1", "attainment>=50%")))
SUMMARIES = {
    "all well": summarized(record_table([ok(i, 0.2 + 0.001 * i, [0.01] * 3) for i in range(700)])),
    "some failed, with targets": summarized(
        record_table([*(ok(i, 0.2, [0.01] * 3) for i in range(90)), *map(failed, range(90, 100))]),
        conditions(goals=GOALS),
    ),
    "none succeeded": summarized(record_table(list(map(failed, range(12)))), conditions(goals=GOALS)),
    "nothing planned": summarized(RECORDS.empty_table(), conditions(goals=GOALS)),
    "overloaded": summarized(queued(1.4, 400, 0), conditions(arrivals=("poisson", 56.0))),
    "a closed loop": summarized(queued(0.5, 100, 0), conditions(concurrency=8)),
}


@pytest.mark.parametrize("summary", SUMMARIES.values(), ids=SUMMARIES)
def test_a_summary_is_as_its_schema_says(summary):
    assert list(faults(json.loads(json.dumps(summary)), SCHEMA)) == []


def test_the_schema_is_named_after_the_version_that_it_describes():
    assert SCHEMA["$id"] == f"urn:burstline:summary:{manifest.SCHEMA}"
    assert SCHEMA["properties"]["schema"] == {"const": manifest.SCHEMA}


def without_unit(summary):
    del summary["metrics"]["ttft"]["p50"]["unit"]


def naked(summary):
    summary["throughput"]["requests_per_s"] = 12.0


def zero_for_nothing(summary):
    summary["memory"]["server_peak_bytes"] = {"point": 0}


def renamed(summary):
    summary["verdicts"] = summary.pop("verdict")


def negative(summary):
    summary["counts"]["ok"] = -1


@pytest.mark.parametrize("spoil", [without_unit, naked, zero_for_nothing, renamed, negative])
def test_a_spoilt_summary_is_found_out(spoil):
    summary = copy.deepcopy(SUMMARIES["all well"])
    spoil(summary)
    assert list(faults(summary, SCHEMA))
