"""What tokens cost: money from a stated price, energy from counters or integrated power, idle apart."""

import numpy as np
import pytest

from burstline.measure.metrics.server import cost
from burstline.measure.record.summary import Throughput
from burstline.measure.record.tables import telemetry_table
from burstline.measure.record.telemetry import Telemetry
from burstline.measure.stats.estimates import Absent, measured
from burstline.servers.host.telemetry import Row

RATES = Throughput(
    output_tok_per_s=measured(200.0, "tok/s", ""), input_tok_per_s=measured(800.0, "tok/s", "")
)


def watched(*gpus, counter=True, missing=()):
    """GPUs of (idle, load) W: idle for 2 s, then a load of 10 s, then idle; read every 0.2 s."""
    rows = [Row(0, source, "*", None, why) for source, why in missing]
    for k, (idle_w, load_w) in enumerate(gpus):
        for at_s in np.arange(-2.0, 12.01, 0.2):
            in_load = min(max(at_s, 0.0), 10.0)
            joules = load_w * in_load + idle_w * (at_s + 2.0 - in_load)
            power = load_w if 0 <= at_s <= 10 else idle_w
            value = ("energy_j", joules) if counter else ("power_w", power)
            rows.append(Row(int(at_s * 1e9), f"gpu{k}", *value))
    return Telemetry.of(telemetry_table(sorted(rows, key=lambda row: row.at_ns))).over(10.0)


@pytest.mark.parametrize("counter", [True, False], ids=["energy counter", "integrated power"])
def test_energy_counts_all_gpus_over_the_load_and_idle_apart(counter):
    found = cost(RATES, watched((80.0, 300.0), (70.0, 100.0), counter=counter), usd_per_hour=None)
    close = {"rel": 1e-6} if counter else {"rel": 0.01}
    assert found.device_power_w.point == pytest.approx(400.0, **close)
    assert found.joules_per_output_tok.point == pytest.approx(2.0, **close)
    assert found.device_idle_power_w.point == pytest.approx(150.0, rel=0.1)
    assert found.joules_above_idle_per_output_tok.point == pytest.approx(1.25, rel=0.05)


def test_energy_counts_in_the_window_of_the_rates_alone():
    found = cost(RATES, watched((100.0, 300.0)), None, window=(8.0, 12.0))
    assert found.device_power_w.point == pytest.approx(200.0)


def test_money_is_that_of_the_whole_machine_for_input_or_for_output():
    found = cost(RATES, watched(), usd_per_hour=7.2)
    assert found.usd_per_million_output_tok.point == pytest.approx(10.0)
    assert found.usd_per_million_input_tok.point == pytest.approx(2.5)


def test_without_a_source_energy_is_absent_with_its_reason_and_money_is_not_made_up():
    found = cost(RATES, watched(missing=[("gpu", "no NVML: x"), ("cpu", "no RAPL: y")]), usd_per_hour=None)
    assert found.usd_per_million_output_tok is None
    assert found.joules_per_output_tok == found.device_power_w == Absent("no NVML: x")
    assert found.cpu_joules_per_output_tok == Absent("no RAPL: y")
    assert (
        "another machine" in cost(RATES, watched((1.0, 2.0)), None, server_here=False).device_power_w.reason
    )


def test_a_counter_that_was_hardly_read_is_no_mean_and_no_token_has_no_price():
    rows = [Row(int(at_s * 1e9), "gpu0", "energy_j", at_s) for at_s in (4.0, 4.2)]
    found = cost(RATES, Telemetry.of(telemetry_table(rows)).over(10.0), None)
    assert found.device_power_w.reason == "it was not read for long enough"
    none = Throughput(output_tok_per_s=measured(0.0, "tok/s", ""), input_tok_per_s=Absent("none"))
    found = cost(none, watched(), usd_per_hour=1.0)
    assert (found.usd_per_million_output_tok.code, found.usd_per_million_input_tok.reason) == (
        "not-positive",
        "none",
    )
