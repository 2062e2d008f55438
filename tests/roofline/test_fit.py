"""The fit: finds what made the data, never sees the rows it is scored on, gives the same twice."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roofline.calibrate.fit import fit_device, fit_gemm, fit_passes, held_out, spread_of
from roofline.calibrate.kernel_tables import Rows
from roofline.device.calibration import GemmFit, PassFit, load_calibration
from roofline.device.device import load_device
from roofline.predict.kernels import Products, Rates, gemm_s, p_norm, pass_s

MEASURED = Path(__file__).parents[1] / "data" / "measured"
RATES = Rates(1e15, 3e12, 132, 50e6)


def products():
    m, n, k = (
        axis.ravel().astype(float)
        for axis in np.meshgrid([1, 16, 128, 200, 512, 2048], [2048, 4096, 8192], [2048, 4096])
    )
    return Products(m, n, k, np.ones_like(m), 2 * n * k, 2 * m * k, 2 * m * n, 0 * m)


@pytest.mark.parametrize(
    "truth",
    [
        GemmFit(0.8, 0.85, 4e-6, pad=0.5),
        GemmFit(0.6, 0.7, 9e-6, pad=0.3, p=6.0, operand_rows=30.0, reread=0.9),
    ],
)
def test_a_fit_finds_the_parameters_that_made_the_rows(truth):
    x = products()
    rows = Rows(x, gemm_s(truth, RATES, x), 6 * x.weight_bytes, x.n.astype(np.int64))
    found = fit_gemm([(RATES, rows)], replace(truth, eta_c=0.7, eta_m=0.8, t0_s=5e-6, pad=0.1))
    assert (found.eta_c, found.eta_m) == (
        pytest.approx(truth.eta_c, rel=0.02),
        pytest.approx(truth.eta_m, rel=0.02),
    )
    assert found.t0_s == pytest.approx(truth.t0_s, rel=0.05)


def test_passes_that_fit_a_cache_are_told_from_those_that_do_not():
    truth, moved = PassFit(2e-6, 0.8, 2.5), np.geomspace(1e4, 5e8, 30)
    found = fit_passes(RATES, moved, pass_s(truth, RATES, moved))
    assert found.eta_m == pytest.approx(0.8, rel=0.05)
    assert found.eta_cache == pytest.approx(2.5, rel=0.05)


def test_no_row_is_predicted_by_a_fit_that_saw_its_key():
    x = products()
    rows = Rows(x, np.ones(len(x.m)), x.weight_bytes, (x.n * 10_000 + x.k).astype(np.int64))
    seen = []

    def predict(fit, part):
        seen.append((fit, set(part.key.tolist())))
        return part.seconds

    held_out(rows, lambda part: set(part.key.tolist()), predict)
    assert all(not fitted & scored for fitted, scored in seen)
    assert set.union(*(scored for _, scored in seen)) == set(rows.key.tolist())


def test_a_spread_turns_predicted_over_measured_round():
    spread = spread_of(np.array([0.5, 1.0, 2.0]))
    assert spread.mid == 1
    assert spread.low < 1 < spread.high


def test_a_p_norm_lies_between_the_larger_and_the_sum():
    joined = p_norm(np.array([1.0, 3.0]), np.array([1.0, 0.0]), 4.0)
    assert joined.tolist() == [pytest.approx(2**0.25), 3.0]


def test_the_shipped_fit_comes_out_of_the_tables_again():
    shipped = load_calibration(load_device("rtx4090"))
    again = fit_device(MEASURED / "rtx4090", shipped.elementwise, shipped.mixed)
    assert again.gemm["bf16"].eta_c == pytest.approx(shipped.gemm["bf16"].eta_c, rel=1e-2)
    assert again.decode.eta_m == pytest.approx(shipped.decode.eta_m, rel=1e-2)
    assert again.spread["gemm bf16"].n == shipped.spread["gemm bf16"].n
