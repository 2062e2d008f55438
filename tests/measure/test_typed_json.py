"""Dataclasses as JSON and back: the same value, or one line that names the place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import orjson
import pytest

from burstline.measure.record.summary import LACKING, Burst, MetricFigures, Summary, Throughput
from burstline.measure.record.tables import record_table
from burstline.measure.record.typed_json import MismatchError, from_json, to_json
from burstline.measure.record.verdict import Reason, SloResult, State, Verdict
from burstline.measure.stats.figure import Absent, Estimate, Result
from tests.measure.making import ok, summarized


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    n: int
    rate: float | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    colour: Colour
    parts: tuple[Inner, ...] = ()
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    figure: Estimate | Absent | None = None
    flag: bool = False


WHOLE = Outer(
    "x", "b", Colour.RED, (Inner(1), Inner(2, 0.5)), {"k": Inner(3)}, Absent("no reply", "no-reply"), True
)


def test_a_value_comes_back_as_it_was_written():
    assert from_json(Outer, orjson.loads(orjson.dumps(to_json(WHOLE)))) == WHOLE


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"name": 3}, "name: expected a text, not 3"),
        ({"kind": "c"}, "kind: expected 'a' or 'b', not 'c'"),
        ({"colour": "blue"}, "colour: expected 'red', not 'blue'"),
        ({"parts": [{"n": 1}, {"n": 1.5}]}, "parts[1].n: expected a whole number, not 1.5"),
        ({"parts": [{"n": True}]}, "parts[0].n: expected a whole number, not True"),
        ({"parts": [{}]}, "parts[0].n is missing"),
        ({"by_name": {"k": {"n": 1, "m": 2}}}, "by_name.k.m is not known to this version"),
        ({"figure": {"point": "fast"}}, "figure.point: expected a number, not 'fast'"),
        ({"flag": 1}, "flag: expected true or false, not 1"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(change, line):
    with pytest.raises(MismatchError) as refused:
        from_json(Outer, {**to_json(WHOLE), **change})
    assert str(refused.value) == line


def test_a_whole_summary_survives_json():
    row = summarized(record_table([ok(i, 0.2 + 0.001 * i, [0.01] * 3) for i in range(40)]))
    again = Summary.from_json(orjson.loads(orjson.dumps(row)))
    assert orjson.dumps(again.to_json()) == orjson.dumps(row)
    assert again.figure("metrics", "ttft", "p50") == again.metrics["ttft"].p50


SMALL = Summary(
    counts={"planned": 1, "ok": 1},
    metrics={"ttft": MetricFigures(p50=Estimate(1.0, None, None, None, 1, "s"))},
    verdict=Verdict(State.VALID, (), (Reason("c", "t", "a"),)),
    targets=(SloResult("ttft.p50<=1s", Result.PASS, "why", Estimate(1.0, None, None, None, 1, "s")),),
)


def test_a_figure_that_an_older_summary_lacks_says_so():
    row = SMALL.to_json()
    del row["burst"], row["throughput"]["requests_per_s"]
    again = Summary.from_json(row)
    assert again.burst == Burst()
    assert again.throughput == Throughput()
    assert again.figure("throughput", "requests_per_s") is LACKING
    assert again.figure("no", "such", "figure") is LACKING


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"moon": {}}, "moon is not known to this version"),
        ({"metrics": {"ttft": {"p50": {"point": 1.0}}}}, "metrics.ttft.p50.low is missing"),
        ({"counts": {"ok": "many"}}, "counts.ok: expected a whole number, not 'many'"),
        ({"verdict": {"state": "FINE"}}, "verdict.state: expected '"),
        ({"schema": "two"}, "schema is 'two', this version reads"),
    ],
)
def test_a_spoilt_summary_is_refused_with_its_place(change, line):
    with pytest.raises(MismatchError) as refused:
        Summary.from_json({**SMALL.to_json(), **change})
    assert str(refused.value).startswith(line)
