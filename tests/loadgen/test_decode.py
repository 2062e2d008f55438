import os
import signal
from array import array
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from burstline.loadgen.record.capture import Capture
from burstline.loadgen.record.capture_store import CaptureWriter, DamagedCapturesError
from burstline.loadgen.record.decode import decode_run
from burstline.servers.host.child import ChildLostError
from burstline.servers.protocol.openai import decode_completion
from burstline.workloads.plan import Plan
from burstline.workloads.plan_table import plan_tables
from burstline.workloads.request import Request
from tests.loadgen.making import DONE, capture, event, records_of, usage, wire


def write_run(directory, n, captured):
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


@pytest.mark.parametrize("n_processes", [1, 2])
def test_every_planned_request_has_a_record_in_the_plans_order(tmp_path, n_processes):
    write_run(tmp_path, 7, [5, 0, 3, 1])
    records = list(records_of(decode_run(tmp_path, decode_completion, n_processes)))
    assert [record.index for record in records] == list(range(7))
    assert [record.outcome == "ok" for record in records] == [True, True, False, True, False, True, False]
    assert {record.outcome for record in records if record.index in (2, 4, 6)} == {"cancelled"}
    assert [record.due_ns for record in records] == list(range(7))
    assert records[5].output_tok == 2


def test_a_run_without_any_capture_is_all_cancelled(tmp_path):
    write_run(tmp_path, 3, [])
    table = decode_run(tmp_path, decode_completion, 1)
    assert table.column("outcome").to_pylist() == ["cancelled"] * 3


def test_what_a_child_raises_is_raised_here(tmp_path):
    write_run(tmp_path, 3, [0, 1, 2])
    (captures,) = (tmp_path / "captures").iterdir()
    captures.write_bytes(captures.read_bytes()[:-20])
    with pytest.raises(DamagedCapturesError, match="burstline verify"):
        decode_run(tmp_path, decode_completion, 2)


def _dies(_):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_child_that_is_killed_is_an_error(tmp_path):
    write_run(tmp_path, 3, [0, 1, 2])
    with pytest.raises(ChildLostError, match=r"decoder \d was killed by signal 9 \(often: out of memory\)"):
        decode_run(tmp_path, _dies, 2)
