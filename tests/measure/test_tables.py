from dataclasses import replace

import numpy as np
import pytest

from burstline.measure.record.columns import columns_of
from burstline.measure.record.tables import record_table, telemetry_table
from burstline.servers.host.telemetry import Row
from tests.measure.making import failed, ok, records_of


def test_records_come_back_as_they_were():
    records = [
        ok(0, 0.1, [0.02]),
        replace(failed(1), token_ns=[], token_n=[], read_lag_ns=[], read_error_ns=[]),
    ]
    assert list(records_of(record_table(records))) == records


def test_records_load_straight_into_pandas():
    frame = record_table([ok(0, 0.1, [0.02]), failed(1)]).to_pandas()
    assert frame["outcome"].tolist() == ["ok", "timeout"]
    assert frame["token_ns"][0].tolist() == [100_000_000, 120_000_000]
    assert np.isnan(frame["output_tok"][1])


def test_columns_know_which_request_each_event_is_of():
    c = columns_of(record_table([ok(0, 0.1, [0.02]), failed(1), ok(2, 0.3, [])]))
    assert c.per_event(np.arange(3)).tolist() == [0, 0, 2]
    assert c.follows.tolist() == [False, True, False]
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
