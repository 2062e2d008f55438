"""The trace against the Trace Event format, by a reader that is as strict as the strictest viewer.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
import math
from dataclasses import replace

import pytest

from burstline.loadgen.record import tables
from burstline.loadgen.record.manifest import Manifest
from burstline.loadgen.record.rundir import RunDir, open_run
from burstline.reports.formats.trace_events import PHASES, trace_json
from burstline.reports.model.comparison import view_of
from tests.reports import synthetic

REQUIRED = {
    "M": {"pid", "name", "args"},
    "b": {"pid", "tid", "name", "cat", "id", "ts"},
    "e": {"pid", "tid", "name", "cat", "id", "ts"},
    "C": {"pid", "name", "ts", "args"},
}
KINDS = {"id": (int, str), "cat": str, "name": str, "pid": int, "tid": int, "args": dict}


def checked(trace: bytes) -> list[dict]:
    """The events of a trace that is as the format says; nothing in it may be NaN, which is no JSON."""
    document = json.loads(trace, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    # Perfetto reads a displayTimeUnit at the head of a file as the unit of ts.
    assert document.keys() == {"otherData", "traceEvents"}
    for event in document["traceEvents"]:
        assert event["ph"] in REQUIRED, event
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert all(isinstance(event[key], kind) for key, kind in KINDS.items() if key in event), event
        assert math.isfinite(event.get("ts", 0.0)), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        if event["ph"] == "C":
            assert all(isinstance(value, float | int) for value in event["args"].values()), event
    return document["traceEvents"]


def slices_of(events: list[dict]) -> dict[tuple[int, str], tuple[float, float, int]]:
    """Begin, end (us) and depth of every async slice by id and name; each end closes what was opened last."""
    open_slices: dict[tuple[str, int], list[dict]] = {}
    found = {}
    for event in sorted((e for e in events if e["ph"] in "be"), key=lambda e: e["ts"]):
        stack = open_slices.setdefault((event["cat"], event["id"]), [])
        if event["ph"] == "b":
            stack.append(event)
            continue
        begun = stack.pop()
        assert begun["name"] == event["name"]
        assert (event["id"], event["name"]) not in found
        found[event["id"], event["name"]] = (begun["ts"], event["ts"], len(stack))
    assert not any(open_slices.values())
    return found


@pytest.mark.parametrize("name", ["lossy", "hopeless", "single"])
def test_a_trace_is_as_the_format_says_whatever_became_of_the_run(name, request):
    run = request.getfixturevalue(name)
    events = checked(trace_json(view_of(run)))
    whole = {key: span for key, span in slices_of(events).items() if span[2] == 0}
    assert {index for index, _ in whole} == set(run.records["index"])


def test_phases_lie_within_their_request_and_are_its_own_times_in_microseconds(lossy):
    found = slices_of(checked(trace_json(view_of(lossy))))
    rows = lossy.records
    for row in rows[rows["outcome"] == "ok"].itertuples():
        first, last = row.token_ns[0], row.token_ns[-1]
        times = [row.due_ns, row.sent_ns, first, last, row.closed_ns]
        spans = {phase: found[row.index, phase] for phase in PHASES}
        for (begin, end, depth), start_ns, end_ns in zip(spans.values(), times, times[1:], strict=False):
            assert (begin, end) == pytest.approx((start_ns / 1e3, end_ns / 1e3), rel=1e-12)
            assert depth == 1
        assert found[row.index, f"request {row.index}"][:2] == pytest.approx((0.0, row.closed_ns / 1e3))
    failed = rows[rows["outcome"] != "ok"].iloc[0]
    assert (failed["index"], f"request {failed['index']} ({failed['outcome']})") in found
    assert (failed["index"], "decode") not in found


def test_what_happens_at_one_instant_still_nests(tmp_path):
    (row,) = synthetic.records(n=1, output_tok=1)
    at_once = replace(row, due_ns=row.token_ns[0], sent_ns=row.token_ns[0], closed_ns=row.token_ns[0])
    run = RunDir.create(tmp_path, Manifest(engine="vllm", workload="burst"))
    run.save_records(tables.record_table([at_once]))
    run.finish("complete")
    found = slices_of(checked(trace_json(view_of(open_run(run.path)))))
    assert [depth for *_, depth in found.values()] == [1, 1, 1, 0]


def test_counters_ascend_in_time_and_count_requests_tokens_and_memory(lossy):
    counted: dict[str, list[tuple[float, float]]] = {}
    for event in checked(trace_json(view_of(lossy))):
        if event["ph"] == "C":
            counted.setdefault(event["name"], []).append((event["ts"], event["args"]["value"]))
    assert {"in flight", "output tokens per s", "server memory (bytes)", "gpu0 memory (bytes)"} <= set(
        counted
    )
    for series in counted.values():
        assert [at for at, _ in series] == sorted(at for at, _ in series)
        assert series[0][0] >= 0
    assert max(value for _, value in counted["in flight"]) == 120
    assert counted["in flight"][-1][1] == 0
