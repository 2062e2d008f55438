import os
import signal
import sys
from array import array
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import Pipe
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burstline.loadgen.capture.capture import Capture, CaptureWriter, DamagedCapturesError
from burstline.measure.record import decode
from burstline.measure.record.decode import decode_run, decoded_batches
from burstline.servers.host.child import ChildLostError
from burstline.servers.registry import ENGINES
from burstline.workloads.plan import Plan
from burstline.workloads.plan_table import plan_tables
from burstline.workloads.request import Request
from tests.measure.making import DONE, capture, event, records_of, usage, wire
from tests.servers.golden import decode_completion


def write_run(directory, n, captured, *, killed=False):
    """A plan of n requests of two tokens; captures of those listed, in that order."""
    requests = tuple(Request(i, array("I", [1, 2, 3, 4]), None, 4, 2) for i in range(n))
    plan = Plan(requests, array("q", range(n)), 0, "x")
    pq.write_table(pa.concat_tables(plan_tables(plan)), directory / "plan.parquet")
    spool = CaptureWriter(directory / "captures")
    reads = wire((10, event()), (20, event(finish="length")), (20, usage(2)), (20, DONE))
    for index in captured:
        one: Capture = replace(capture(reads), index=index, due_ns=index)
        spool.put(lambda one=one: one)
    spool.close()
    if killed:
        (file,) = (directory / "captures").iterdir()
        file.rename(f"{file}.partial")


@pytest.mark.parametrize(("killed", "outcome"), [(True, "cancelled"), (False, "not_sent")])
@pytest.mark.parametrize("n_processes", [1, 2])
def test_every_planned_request_has_a_record_in_the_plans_order(tmp_path, n_processes, killed, outcome):
    """A driver that was killed had requests in flight; one that ended has captured all that it sent."""
    write_run(tmp_path, 7, [5, 0, 3, 1], killed=killed)
    records = list(records_of(decode_run(tmp_path, decode_completion, n_processes)))
    assert [record.index for record in records] == list(range(7))
    assert [record.outcome == "ok" for record in records] == [True, True, False, True, False, True, False]
    assert {record.outcome for record in records if record.index in (2, 4, 6)} == {outcome}
    assert [record.due_ns for record in records] == list(range(7))
    assert records[5].output_tok == 2


@pytest.mark.parametrize(("killed", "outcome"), [(True, "cancelled"), (False, "not_sent")])
def test_a_run_without_any_capture(tmp_path, killed, outcome):
    write_run(tmp_path, 3, [], killed=killed)
    table = decode_run(tmp_path, decode_completion, 1)
    assert table.column("outcome").to_pylist() == [outcome] * 3


def test_what_a_child_raises_is_raised_here(tmp_path):
    write_run(tmp_path, 3, [0, 1, 2])
    (captures,) = (tmp_path / "captures").iterdir()
    captures.write_bytes(captures.read_bytes()[:-20])
    with pytest.raises(DamagedCapturesError, match="burstline verify"):
        decode_run(tmp_path, decode_completion, 2)


def _is_a_child():
    return decode_run.__module__ in sys.argv


def _is_killed(reply):
    if _is_a_child():
        os.kill(os.getpid(), signal.SIGKILL)
    return decode_completion(reply)


def _stands_still(reply):
    if _is_a_child():
        os.kill(os.getpid(), signal.SIGSTOP)
    return decode_completion(reply)


@pytest.mark.parametrize(
    ("lose", "silent_s", "why"),
    [
        (_is_killed, 60.0, "was killed by signal 9 (often: out of memory)"),
        (_stands_still, 0.5, "did not answer in time"),
    ],
)
def test_what_a_lost_child_was_to_decode_is_decoded_here(lose, silent_s, why, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decode, "STILL_S", silent_s)
    write_run(tmp_path, 3, [0, 1, 2])
    table = decode_run(tmp_path, lose, 2)
    assert table.column("outcome").to_pylist() == ["ok"] * 3
    said = capsys.readouterr().err.splitlines()
    assert sorted(said) == [f"decoder {k} {why}; its replies are decoded once more" for k in (0, 1)]


def test_a_lost_child_is_ended_before_its_replies_are_decoded_here(tmp_path, monkeypatch):
    """It may only be slow, and would compete with us."""
    events = []
    child = SimpleNamespace(connection=Pipe()[0], send=lambda _: None, kill=lambda: events.append("killed"))

    def lost():
        raise ChildLostError("decoder 0 did not answer in time")

    child.receive = lost
    monkeypatch.setattr(decode, "Child", lambda *_: nullcontext(child))
    monkeypatch.setattr(decode, "STILL_S", 0.0)
    share = SimpleNamespace(k=0, tables=lambda: events.append("decoded") or [])
    assert decode._by_children([share]) == []
    assert events == ["killed", "decoded"]


@pytest.mark.parametrize(("each_s", "sizes"), [(0.0, [500, 500, 200]), (0.125, [3] * 400)])
def test_a_decoder_says_something_every_third_of_a_second_and_every_500_replies(each_s, sizes, monkeypatch):
    clock_s = [0.0]

    def record_of(*_):
        clock_s[0] += each_s

    monkeypatch.setattr(decode, "record_of", record_of)
    monkeypatch.setattr(decode, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    captures = [SimpleNamespace(index=0)] * 1200
    assert [len(batch) for batch in decoded_batches(captures, [None], None)] == sizes


ENDS = {
    "all came without a reason, as the others": ([(2, None)] * 3, ["ok"] * 3),
    "none ever has a reason": ([(2, None), (1, None), (2, None)], ["ok"] * 3),
    "one is cut among others with a reason": (
        [(2, "length"), (1, None), (2, "length")],
        ["ok", "truncated", "ok"],
    ),
    "one ends of itself": ([(2, "length"), (1, "stop")], ["ok", "ok"]),
    "all came, one without a reason": ([(2, "length"), (2, None)], ["ok", "ok"]),
    "all but the last are cut": ([(1, None), (1, None), (2, "length")], ["truncated", "truncated", "ok"]),
}


@pytest.mark.parametrize(("replies", "outcomes"), ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("counts", [True, False])
def test_done_alone_is_no_end_where_the_server_gives_others_a_reason(tmp_path, replies, outcomes, counts):
    """R32: llama-cpp-python ends a stream so when a second one comes."""
    requests = tuple(Request(i, array("I", [1, 2, 3, 4]), None, 4, 2) for i in range(len(replies)))
    plan = Plan(requests, array("q", range(len(replies))), 0, "x")
    pq.write_table(pa.concat_tables(plan_tables(plan)), tmp_path / "plan.parquet")
    spool = CaptureWriter(tmp_path / "captures")
    for index, (n, reason) in enumerate(replies):
        texts = [(10 * (k + 1), event(finish=reason if k == n - 1 else None)) for k in range(n)]
        reads = wire(*texts, *([(30, usage(n))] if counts else []), (30, DONE))
        one = replace(capture(reads), index=index, due_ns=index)
        spool.put(lambda one=one: one)
    spool.close()
    table = decode_run(tmp_path, ENGINES["openai"].decode, 1)
    assert table.column("outcome").to_pylist() == outcomes
