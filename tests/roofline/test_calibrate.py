"""Measuring a machine: levels out of a curve, a file that loads again, a probe that really computes."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest

from burstline.bench.calibration import calibrate_pinned
from burstline.errors import RooflineError
from burstline.machine.catalogue import path_of
from burstline.roofline.calibrate.measurements import calibrate, levels_of
from burstline.roofline.calibrate.probe_numpy import NumpyProbe
from burstline.roofline.device.calibration import device_toml, read_device_file
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import bundled_config, load_model
from burstline.roofline.model.ops import Step, ops
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.predict import MEASURED, predict_step

REFERENCE = load_model("reference")[0]
MIB = 1 << 20


class Instant:
    """A machine of known rates: each kernel is the seconds it should take."""

    dtype, element_bytes, n_units, name, memory_bytes = "fp32", 4, 2, "instant", 64e9
    passes = ("norm", "act", "rope", "write")

    def product(self, m, n, k, copies):
        return 2e-6 + max(2 * m * n * k / 80e9, 4 * (n * k + m * k + m * n) / 40e9)

    def read(self, n_bytes):
        return n_bytes / (60e9 if n_bytes < 32 * MIB else 20e9)

    def decode(self, batch, context, heads, kv_heads, dim, copies=1):
        return 10e-6 + 8 * batch * context * kv_heads * dim / 10e9

    def prefill(self, tok, heads, kv_heads, dim):
        return 10e-6 + 2 * heads * dim * tok * (tok + 1) / 30e9

    def norm(self, rows, width):
        return 5e-6 + 16 * rows * width / 15e9

    def activation(self, rows, width):
        return 5e-6 + 12 * rows * width / 15e9

    def rope(self, rows, heads, dim):
        return 5e-6 + 8 * rows * heads * dim / 15e9

    def kv_write(self, rows, kv_heads, dim):
        return 5e-6 + 8 * rows * kv_heads * dim / 15e9

    def once(self, kernel, clock):
        return kernel


def ticking():
    """A clock that a step a call brings to its end, however many calls there are."""
    at = [0.0]

    def clock():
        at[0] += 0.05
        return at[0]

    return clock


@pytest.mark.parametrize("quick", [True, False])
def test_a_machine_of_known_rates_is_found_as_it_is(quick):
    device, calibration = calibrate(REFERENCE, Instant(), quick=quick, clock=ticking())
    assert device.peaks["fp32"] == pytest.approx(80e9, rel=0.02)
    assert [level.bytes_per_s for level in device.levels] == pytest.approx([60e9, 20e9])
    of = calibration.constants
    assert of.attention_s == pytest.approx(10e-6, rel=0.1)
    assert of.pass_s == pytest.approx(5e-6, rel=0.1)
    rates = [share * device.bytes_per_s for share in (of.cache, of.passes)]
    assert rates == pytest.approx([10e9, 15e9], rel=0.05)
    assert of.prompt * 80e9 == pytest.approx(30e9, rel=0.3)  # half a tile of keys is charged besides
    assert {"product", "memory", "launch_s", "cache", "prompt", "passes"} <= set(calibration.own)
    assert "link" not in calibration.own
    assert calibration.measured_spread == 0
    step = ops(REFERENCE, QUANTS["fp32"], Parallel(), Step.decode(16, 512))
    by = {found.op.kind: found.by[0] for found in predict_step(step, device, calibration)}
    assert by == {"matmul": MEASURED, "attention": "cache", "elementwise": "passes"}


class Slowing(Instant):
    """A machine that has `share` of its speed in some rounds; the third is the look for the ceiling."""

    def __init__(self, share, of, slow_rounds):
        self._share, self._of, self._seen, self._slow = share, of, Counter(), slow_rounds

    def product(self, m, n, k, copies):
        return self._in_round("peak", (m, n, k), super().product(m, n, k, copies))

    def read(self, n_bytes):
        return self._in_round("bandwidth", n_bytes, super().read(n_bytes))

    def _in_round(self, of, what, seconds):
        self._seen[what] += 1
        return seconds / self._share if self._seen[what] in self._slow and of == self._of else seconds


class Wandering(Slowing):
    """A machine that reaches its ceiling twice, and otherwise this share of it."""

    def _in_round(self, of, what, seconds):
        self._seen[what] += 1
        is_slow = of == self._of and self._seen[what] in self._slow
        return itertools.chain([seconds] * 3, itertools.repeat(seconds / self._share)) if is_slow else seconds

    def once(self, kernel, clock):
        return kernel if isinstance(kernel, float) else next(kernel)


@pytest.mark.parametrize(("of", "steady", "unsteady"), [("peak", 0.96, 0.94), ("bandwidth", 0.84, 0.82)])
def test_a_machine_whose_speed_changes_while_it_is_measured_is_not_calibrated(of, steady, unsteady):
    calibrate(REFERENCE, Wandering(steady, of, (3,)), quick=True, clock=ticking())
    with pytest.raises(RooflineError, match=f"differ by .*% in the {of}"):
        calibrate(REFERENCE, Wandering(unsteady, of, (3,)), quick=True, clock=ticking())


@pytest.mark.parametrize("of", ["peak", "bandwidth"])
@pytest.mark.parametrize("slow_round", [1, 2, 3])
def test_a_slow_round_says_nothing_where_another_was_fast(of, slow_round):
    steady, _ = calibrate(REFERENCE, Instant(), quick=True, clock=ticking())
    device, _ = calibrate(REFERENCE, Slowing(0.5, of, (slow_round,)), quick=True, clock=ticking())
    assert (device.peaks, device.bytes_per_s) == (steady.peaks, steady.bytes_per_s)


class InBlocksOfFour(Instant):
    """A library that takes four rows at once, and each row that is left over for itself."""

    def product(self, m, n, k, copies):
        return (m // 4 + m % 4) * 4 * n * k / 40e9


@pytest.mark.parametrize(("rows", "blocks"), [(3, 3), (4, 1), (7, 4), (8, 2), (11, 5), (16, 4)])
def test_few_rows_take_what_was_measured_though_more_may_take_less(rows, blocks):
    device, calibration = calibrate(REFERENCE, InBlocksOfFour(), quick=True, clock=ticking())
    step = ops(REFERENCE, QUANTS["fp32"], Parallel(), Step.decode(rows, 512))
    head = next(each for each in predict_step(step, device, calibration) if each.op.name == "lm_head")
    assert head.seconds == pytest.approx(blocks * 4 * head.op.n * head.op.k / 40e9)


def test_the_device_file_holds_all_that_was_measured(tmp_path):
    device, calibration = calibrate(REFERENCE, Instant(), quick=True, clock=ticking())
    path = tmp_path / "here.toml"
    path.write_text(device_toml(device, calibration))
    again = load_device(str(path))
    assert again.peaks["fp32"] == pytest.approx(device.peaks["fp32"], rel=1e-3)
    assert [level.name for level in again.levels] == ["cache 1", "memory"]
    assert read_device_file(path.read_bytes(), path)[1].shapes[0].seconds == pytest.approx(
        calibration.shapes[0].seconds, rel=1e-3
    )


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ([50, 50, 50], [("memory", 50)]),
        ([100, 98, 40, 39], [("cache 1", 100), ("memory", 40)]),
        ([100, 100, 60, 30, 29], [("cache 1", 100), ("memory", 30)]),
        ([100, 100, 50, 50, 50, 20, 20], [("cache 1", 100), ("cache 2", 50), ("memory", 20)]),
        ([100, 100, 30], [("cache 1", 100), ("memory", 30)]),
        ([60, 100, 95, 97], [("memory", 100)]),
    ],
)
def test_a_level_ends_where_the_bandwidth_falls(rates, found):
    sizes = [1 << (20 + i) for i in range(len(rates))]
    levels = levels_of(sizes, rates, 1e9)
    assert [(level.name, level.bytes_per_s) for level in levels] == found
    assert levels[-1].capacity_bytes == 1e9


@pytest.mark.parametrize("cores", [1, 2])
def test_the_probe_computes_attention_and_norms_as_they_are_defined(cores):
    probe, n = NumpyProbe(cores), 40
    out = probe.decode(20, 2048, 4, 2, 8)()
    assert out.shape == (2, 20, 2, 8)  # KV heads, requests, queries a KV head, head size
    np.testing.assert_allclose(out, 0.01, rtol=1e-4)  # all values are
    parts = [
        probe.norm(n, 16)(),
        probe.activation(n, 16)(),
        probe.rope(n, 4, 8)(),
        probe.product(n, 5, 7, 2)(),
    ]
    assert [len(part) for part in parts] == [cores] * 4
    assert [np.concatenate(part).shape for part in parts] == [(n, 16), (n, 16), (n, 4, 8), (n, 5)]
    assert np.isfinite(np.concatenate([np.ravel(np.concatenate(part)) for part in parts])).all()
    probe.kv_write(3, 2, 8)()
    assert np.isfinite(probe.prefill(600, 4, 2, 8)()).all()


def test_a_calibration_that_fails_says_why(tmp_path):
    with pytest.raises(RooflineError, match=r"^calibration on cpu failed: .*missing\.json'$"):
        calibrate_pinned(tmp_path / "missing.json", tmp_path / "out.toml", "cpu", 1, quick=True)


def test_the_cache_keeps_models_engines_and_cores_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = {
        path_of(threads, bundled_config(model), quick=quick, engine=engine)
        for model in ("reference", "llama-2-7b")
        for engine in (None, "vllm")
        for threads in (1, 2)
        for quick in (True, False)
    }
    assert len(names) == 16
    assert all(name.parent == tmp_path / "burstline" for name in names)


def test_all_cores_read_together():
    """The bandwidth of products that several cores share."""
    read = NumpyProbe(2).read(1 << 20)
    assert len(read()) == 2


@pytest.mark.slow
@pytest.mark.measures
def test_this_machine_is_measured_in_a_process_of_its_own(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(bundled_config("reference")))
    out = tmp_path / "d.toml"
    calibrate_pinned(config, out, "cpu", 1, quick=True)
    assert load_device(str(out)).peaks["fp32"] > 1e8
    assert read_device_file(out.read_bytes(), out)[1].measured_spread is not None
