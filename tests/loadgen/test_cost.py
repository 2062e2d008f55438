"""What output costs: money from a stated price, energy from the watched power of the GPUs."""

import numpy as np
import pytest

from burstline.loadgen.metrics.memory import cost
from burstline.loadgen.record.telemetry import Telemetry
from burstline.loadgen.stats.estimates import Absent, measured


class Rows(Telemetry):
    """Two GPUs, 300 W and 100 W over the load; more before and after it."""

    length_s = 10.0

    def __init__(self) -> None:
        pass

    def devices(self):
        return ["gpu0", "gpu1"]

    def series(self, source, name):
        watts = {"gpu0": 300.0, "gpu1": 100.0}[source]
        return np.array([-1.0, 1.0, 5.0, 11.0]), np.array([900.0, watts, watts, 900.0])


def test_energy_counts_all_gpus_over_the_load_alone():
    found = cost(measured(200.0, "tok/s", ""), Rows(), usd_per_hour=7.2)
    assert found.device_power_w.point == 400.0
    assert found.joules_per_output_tok.point == 2.0
    assert found.usd_per_million_output_tok.point == pytest.approx(10.0)


def test_without_a_price_or_a_gpu_nothing_is_made_up():
    found = cost(measured(200.0, "tok/s", ""), Telemetry.empty(), usd_per_hour=None)
    assert not list(found.rows())
    assert not list(cost(Absent("none"), Rows(), usd_per_hour=1.0).rows())
