"""This CPU measured once: by whom, beside whom, what is kept, and what is thrown away."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pytest

from burstline.bench import calibration, host_overhead
from burstline.bench.calibration import NO_CALIBRATE, note_measured
from burstline.bench.conclusion import conclude, reconciled
from burstline.cli import main
from burstline.machine import host_facts
from burstline.machine.catalogue import kept, path_of
from burstline.machine.hints import DEVICE_FILE, Hints
from burstline.machine.host_facts import Beside
from burstline.measure.record import tables
from burstline.measure.record.manifest import Manifest
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import open_run
from burstline.roofline.device.calibration import device_toml, load_calibration
from burstline.roofline.device.device import load_device
from burstline.servers.registry import ENGINES
from tests.burstline.test_metal import CONFIG, REFERENCE, STARTED
from tests.reports import synthetic

SHAPE = {**CONFIG, "model_type": "llama"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of known speed on which others use `others` of the CPU; `measured` counts."""

    class Machine:
        others, n_measured, peak = 0.0, 0, 80e9

    def pinned(config, out, of, threads, **how):
        Machine.n_measured += 1
        device = load_device("h100-sxm5-80g")
        name, peaks = f"{host_facts.host().cpu}, 1 core(s)", {"fp32": Machine.peak}
        own = replace(device, id="here", name=name, arch="measured", links=(), n_units=threads, peaks=peaks)
        known = replace(load_calibration(device), measured_spread=0.1)
        out.write_text(device_toml(own, known))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(NO_CALIBRATE, raising=False)
    monkeypatch.setattr(calibration, "calibrate_pinned", pinned)
    monkeypatch.setattr(host_overhead, "host_fit", lambda *_: None)
    monkeypatch.setattr(calibration, "LOOK_S", 0.0)
    monkeypatch.setattr(Beside, "others", lambda _: (Machine.others, {"python (pid 7)": 0.48}))
    return Machine


@pytest.fixture
def run(tmp_path):
    """A burst at the embedded engine, which is about to be noted."""
    manifest = Manifest(engine="reference", workload="burst", server=STARTED, identity=REFERENCE)
    folder = RunDir.create(tmp_path, manifest)
    records = synthetic.records(n=60, prompt_tok=8, output_tok=16)
    folder.save("records.parquet", [tables.record_table(records)])
    folder.save_manifest(replace(folder.manifest, status="complete"))
    return folder


def noted(run, hints=Hints(), *, calibrate=True):  # noqa: B008 it is frozen
    """What the run says while its hardware is noted, and the hardware."""
    said = []
    (run.path / DEVICE_FILE).unlink(missing_ok=True)
    run.save_manifest(replace(run.manifest, hardware=None))
    note_measured(run, hints, said.append, calibrate=calibrate)
    run.save_manifest()
    return said, run.manifest.hardware


def test_the_first_run_of_an_engine_measures_its_cpu_and_the_second_uses_that(machine, run):
    said, hardware = noted(run)
    assert "at most 25 s (--no-calibrate leaves it out)" in said[0]
    assert hardware.device_from == "having been measured for this model"
    assert 'model = "reference"' in (run.path / DEVICE_FILE).read_text()
    assert noted(run)[0] == []
    assert machine.n_measured == 1
    another = replace(REFERENCE, raw={"threads": 2, "config": CONFIG})
    run.save_manifest(replace(run.manifest, identity=another))
    assert noted(run)[0]
    assert noted(run, Hints(model_config="llama-2-7b"))[0]
    assert machine.n_measured == 3


@pytest.mark.parametrize("others", [0.06, 0.5])
def test_a_cpu_that_others_keep_busy_is_not_measured_and_one_sentence_says_so(machine, run, others, capsys):
    machine.others = others
    said, hardware = noted(run)
    assert machine.n_measured == 0
    assert "python (pid 7) 48%" in said[1]
    assert f"other processes used {others:.0%} of this machine" in hardware.absent
    assert "`burstline calibrate" in hardware.absent
    assert not (run.path / DEVICE_FILE).exists()
    assert main(["calibrate"]) == 2
    assert "python (pid 7) 48%" in capsys.readouterr().err
    assert main(["calibrate", "--list"]) == 0
    assert "No calibration is kept" in capsys.readouterr().out


def test_what_became_busy_while_it_was_measured_is_not_kept(machine, run, monkeypatch):
    seen = iter([(0.01, {}), (0.3, {"rustc (pid 9)": 0.3})])
    monkeypatch.setattr(Beside, "others", lambda _: next(seen))
    _, hardware = noted(run)
    assert machine.n_measured == 1
    assert "rustc (pid 9) 30%" in hardware.absent
    assert kept(1, SHAPE, "reference") is None


@pytest.mark.parametrize("how", ["flag", "variable", "GPU named", "a server elsewhere"])
def test_nothing_is_measured_where_it_is_not_wanted_or_of_no_use(machine, run, how, monkeypatch):
    if how == "variable":
        monkeypatch.setenv(NO_CALIBRATE, "1")
    if how == "a server elsewhere":
        far = replace(STARTED, attached=True, argv=None, url="http://far.example:80")
        run.save_manifest(replace(run.manifest, server=far))
    device = {"GPU named": "h100-sxm5-80g", "a server elsewhere": "cpu"}.get(how)
    hints = Hints(device, None if device == "cpu" else "llama-2-7b")
    assert noted(run, hints, calibrate=how != "flag")[0] == []
    assert machine.n_measured == 0


def kept_path():
    return path_of(1, SHAPE, quick=True)


@pytest.mark.parametrize("harm", ["", "id = 1\n", "not TOML", "another CPU", "no conditions"])
def test_a_damaged_or_foreign_calibration_is_none_and_is_measured_again(machine, run, harm, capsys):
    noted(run)
    text = kept_path().read_text()
    if harm == "another CPU":
        harm = text.replace(str(host_facts.host().cpu), "Another CPU")
    elif harm == "no conditions":
        harm = text.replace("[calibration.conditions]", "[conditions]")
    kept_path().write_text(harm)
    assert main(["calibrate", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert noted(run)[1].absent is None
    assert machine.n_measured == 2
    assert kept_path().read_text().replace("\n", "")[:20] == text.replace("\n", "")[:20]


def test_calibrations_are_listed_with_their_conditions_and_a_second_says_what_changed(machine, capsys):
    assert main(["calibrate", "--quick"]) == 0
    first = capsys.readouterr().out
    assert "repeats differ by 10%, others used 0.0%" in first
    assert "Before" not in first
    assert main(["calibrate", "--list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    for word in ("20", "reference", "80.0 GFLOP/s", "repeats differ by 10%", "others used 0.0%", "numpy"):
        assert word in line
    machine.peak *= 1.5
    assert main(["calibrate", "--quick"]) == 0
    told = capsys.readouterr().out
    assert f"Before: {line}" in told
    assert "120.0 GFLOP/s" in told


STEP = {
    "new_tok": [1] * 8,
    "context_tok": [64] * 8,
    "n_logits": 8,
    "decode_tok": 8,
    "prefill_tok": 0,
    "n_waiting": 1,
}
TIMED = ("qkv_proj_ns", "o_proj_ns", "gate_up_proj_ns", "down_proj_ns", "lm_head_ns", "attention_ns")


def save_steps(run, **timed):
    ns = dict.fromkeys(TIMED, 900_000) | timed
    steps = [STEP | ns | {"start_ns": k * 10**7, "end_ns": (k + 1) * 10**7} for k in range(20)]
    run.save("steps.parquet", [pa.Table.from_pylist(steps)])


@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.usefixtures("without_page")
def test_a_calibration_that_a_run_exceeds_is_thrown_away_with_a_sentence(machine, run, faster, monkeypatch):
    """Also where only one product does."""
    noted(run)
    save_steps(run, **({"down_proj_ns": 1} if faster else {}))
    monkeypatch.setattr("burstline.bench.conclusion.decode_run", lambda *_: open_run(run.path).record_table)
    summary = conclude(run, ENGINES["reference"])
    assert kept_path().exists() != faster
    assert summary.verdict.state != "NOT-COMPARABLE"
    if faster:
        assert "the product down was" in summary.roofline.absent
        assert "is thrown away" in summary.roofline.absent
        again = open_run(run.path).summary.roofline
        assert (again.code, again.absent) == ("exceeded", summary.roofline.absent)
    else:
        assert summary.roofline.phases


@pytest.mark.usefixtures("without_page")
def test_a_run_that_exceeds_its_calibration_measures_again_and_has_its_roofline(machine, run, monkeypatch):
    noted(run)
    save_steps(run, down_proj_ns=1)
    monkeypatch.setattr("burstline.bench.conclusion.decode_run", lambda *_: open_run(run.path).record_table)
    text = kept_path().read_text()

    def again():
        assert not kept_path().exists()
        save_steps(run)  # as if the machine were faster now
        kept_path().write_text(text)

    assert conclude(run, ENGINES["reference"], again).roofline.phases
    assert kept_path().read_text() == text


@pytest.mark.parametrize("device", ["cpu", "h100-sxm5-80g"])
def test_a_run_is_held_against_what_bound_prints_for_its_model_device_and_batch(
    machine, run, device, tmp_path, capsys
):
    noted(run, Hints(device))
    save_steps(run)
    found = reconciled(open_run(run.path), None)
    row = next(row for row in found.phases if row.phase == "decode")
    model = tmp_path / "config.json"
    model.write_text(json.dumps(SHAPE | {"torch_dtype": "float32"}))
    batch = ["--batch", "8", "--prompt", "56", "--output", "16"]
    assert main(["bound", "--model", str(model), "--device", device, *batch, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["phases"]["decode"]
    assert len(told["ops"]) == len(row.ops)
    for ours, theirs in zip(row.ops, told["ops"], strict=True):
        assert (ours.name, ours.m, ours.n, ours.k) == tuple(theirs[key] for key in ("op", "m", "n", "k"))
        assert ours.ideal_s * 1e6 == pytest.approx(theirs["ideal_us"], rel=1e-12)
        assert ours.predicted_s * 1e6 == pytest.approx(theirs["predicted_us"], rel=1e-12)
        same = theirs["bound"], theirs["flops"], theirs["intensity"]
        assert (ours.limit, ours.flops, ours.intensity) == same


RUSTC, LONG, ODD = (
    {"rustc (pid 7)": 0.24},
    {"a-name-of-more- ... (pid 9)": 0.06},
    {"\\x1b[2Jx (pid 11)": 0.05},
)


@pytest.mark.parametrize(
    ("ours", "others", "named"),
    [((), 0.4, RUSTC | LONG | ODD), ((7,), 0.16, LONG | ODD), ((7, 9, 11, 77), 0.05, {})],
)
def test_who_computes_beside_us_is_named(ours, others, named, monkeypatch):
    """What each took since then, by its name now, which is short and cannot steer a terminal."""
    took = {
        7: ("rustc", 5.8),
        8: ("old", 5.0),
        9: ("a-name-of-more-than-15", 1.2),
        11: ("\x1b[2Jx", 1.0),
    }
    used = iter([{1: ("init", 90.0), 7: ("python", 1.0), 8: ("old", 5.0)}, took | {1: ("init", 90.1)}])
    times = iter([(100.0, 40.0), (120.0, 48.0)])
    monkeypatch.setattr(host_facts, "_used_s", lambda: next(used))
    monkeypatch.setattr(host_facts, "cpu_time", lambda: next(times))
    assert Beside().others(ours) == (pytest.approx(others), pytest.approx(named))


@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.timeout(300)
def test_a_real_first_run_measures_this_cpu_and_a_second_does_not_or_each_says_why_not(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != NO_CALIBRATE}
    env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    load = ("--requests", "24", "--prompt-tokens", "128", "--output-tokens", "16")
    where = ("--engine", "reference", "--out", str(tmp_path))
    command = [sys.executable, "-m", "burstline", "run", *where, *load]
    told = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=False)
        assert done.returncode in (0, 4), done.stderr
        told.append(done.stderr + done.stdout)
    assert "Measuring this CPU" in told[0]
    kept = list((tmp_path / "cache" / "burstline").glob("device-*.toml"))
    if "was not measured" in told[0]:
        assert "cannot be compared with its hardware" in told[0]
    elif "thrown away" not in told[0]:
        assert len(kept) == 1
        assert re.search("-bound.*: M[FB]U .+ of the measured .+ these shapes", told[0])
        assert "Measuring this CPU" not in told[1]
