from array import array
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from loadgen.record.columns import columns_of
from loadgen.record.tables import (
    plan_of,
    plan_tables,
    record_table,
    records_of,
    requests_without_prompts,
    telemetry_table,
)
from servers.host.telemetry import Row
from tests.loadgen.making import failed, ok
from workloads.lengths import Lengths
from workloads.plan import Plan, Shape, fingerprint, make_plan
from workloads.prompts import vocabulary_from_size
from workloads.request import Request, Sampling


def plan(n=25):
    shape = Shape(Lengths(3, 30), Lengths(1, 9), sampling=Sampling(0.7, 0.9, 11))
    return make_plan(shape, np.arange(n) * 0.5, vocabulary_from_size(1000, "test"), seed=5)


@pytest.mark.parametrize("n_at_once", [7, 25, 1000])
def test_a_plan_comes_back_byte_for_byte(n_at_once):
    before = plan()
    after = plan_of(pa.concat_tables(plan_tables(before, n_at_once)))
    assert after == before
    assert fingerprint(after.requests, after.due_ns) == before.sha256
    assert isinstance(after.requests[0].prompt_ids, array)


def test_text_prompts_and_id_prompts_may_stand_side_by_side():
    requests = (Request(0, None, "hello", 2, 3), Request(1, array("I", [4_000_000_000]), None, 1, 3, False))
    before = Plan(requests, array("q", [0, 1]), 0, "x")
    assert plan_of(pa.concat_tables(plan_tables(before))) == before


def test_without_prompts_a_request_still_tells_ids_from_text():
    requests = (Request(0, None, "hello", 2, 3), Request(1, array("I", [4]), None, 1, 3))
    table = pa.concat_tables(plan_tables(Plan(requests, array("q", [0, 1]), 0, "x")))
    light = requests_without_prompts(table.drop_columns(["prompt_ids"]))
    assert [request.prompt_ids for request in light] == [None, ()]
    assert [request.n_prompt_tok for request in light] == [2, 1]


def test_records_come_back_as_they_were():
    records = [ok(0, 0.1, [0.02]), replace(failed(1), token_ns=[], token_n=[], read_lag_ns=[])]
    assert list(records_of(record_table(records))) == records


def test_records_load_straight_into_pandas():
    frame = record_table([ok(0, 0.1, [0.02]), failed(1)]).to_pandas()
    assert frame["outcome"].tolist() == ["ok", "timeout"]
    assert frame["token_ns"][0].tolist() == [100_000_000, 120_000_000]
    assert np.isnan(frame["output_tok"][1])


def test_columns_know_which_request_each_event_is_of():
    c = columns_of(record_table([ok(0, 0.1, [0.02]), failed(1), ok(2, 0.3, [])]))
    assert c.owner.tolist() == [0, 0, 2]
    assert c.event_s == pytest.approx([0.1, 0.12, 0.3])
    assert c.first_s == pytest.approx([0.1, np.nan, 0.3], nan_ok=True)
    assert c.last_s == pytest.approx([0.12, np.nan, 0.3], nan_ok=True)


def test_columns_of_a_slice_are_those_of_its_rows():
    table = record_table([ok(0, 0.1, [0.02]), ok(1, 0.2, [0.01, 0.01])])
    assert columns_of(table.slice(1)).event_s == pytest.approx([0.2, 0.21, 0.22])


def test_telemetry_is_sorted_and_counted_from_the_runs_start():
    rows = [Row(250, "server", "rss_bytes", 2.0), Row(150, "gpu", "*", None, "no NVML")]
    table = telemetry_table(rows, t0_ns=100)
    assert table.to_pylist() == [
        {"at_ns": 50, "source": "gpu", "name": "*", "value": None, "note": "no NVML"},
        {"at_ns": 150, "source": "server", "name": "rss_bytes", "value": 2.0, "note": None},
    ]
