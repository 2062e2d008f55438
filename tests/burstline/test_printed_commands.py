"""Commands that are printed to be run: a shell takes each path in them as one word."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from burstline.bench.server_session import check_model, check_start, choose_engine
from burstline.cli import main
from burstline.console.server_options import ServerOptions
from burstline.machine.hardware import note_hardware
from burstline.machine.hints import Hints, Stated
from burstline.models.model_folder import make_model
from burstline.reports.formats.predicted import shown
from burstline.roofline.device.calibration import device_toml, load_calibration
from burstline.roofline.device.device import load_device
from burstline.servers.identity import Identity
from burstline.verbs.bound import BoundOptions, analyse
from burstline.workloads.request import WorkloadError
from tests.reports.synthetic_sweep import finished_run


def of_a_model_that_is_nowhere(folder, *_):
    with pytest.raises(WorkloadError) as refused:
        check_model(str(folder / "m"))
    return str(refused.value), [folder / "m"]


def of_a_model_without_weights(folder, monkeypatch, _):
    monkeypatch.setenv("BURSTLINE_LLAMA_SERVER", "/bin/true")
    where = ServerOptions(engine="llamacpp", model=str(make_model(folder / "m", "tiny")))
    with pytest.raises(WorkloadError, match="holds no weights") as refused:
        check_start(choose_engine(where), where, 8)
    return str(refused.value), [folder / "m-random", folder / "m"]


def of_a_cpu_without_a_calibration(folder, monkeypatch, _):
    """The model was named by a report before; its server calls it otherwise."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    model, run = make_model(folder / "m", "tiny"), finished_run(folder, "vllm", 4, gpu="")
    run.save_manifest(replace(run.manifest, identity=Identity("vllm", model="served", dtype="float32")))
    note_hardware(run, Hints(model_config=str(model)))
    note_hardware(run, Hints(device="cpu", stated=Stated(quant="fp32")))
    return run.manifest.hardware.absent, [model, run.path]


def of_a_calibration(folder, monkeypatch, capsys):
    device = load_device("h100")
    text = device_toml(device, load_calibration(device))
    monkeypatch.setattr("burstline.verbs.calibrate.measured", lambda *_, **__: text)
    assert main(["calibrate", "--quick", "--out", str(folder / "h.toml")]) == 0
    return capsys.readouterr().out, [folder / "h.toml"]


def of_a_prediction(folder, *_):
    model = str(make_model(folder / "m", "tiny"))
    found = [analyse(BoundOptions(), model, name, several=True) for name in ("h100", "a100-sxm4-80g")]
    return shown(found, model).then, [Path(model)]


@pytest.mark.parametrize(
    "printed",
    [
        of_a_model_that_is_nowhere,
        of_a_model_without_weights,
        of_a_cpu_without_a_calibration,
        of_a_calibration,
        of_a_prediction,
    ],
)
def test_a_path_in_a_printed_command_is_one_word_of_a_shell(printed, tmp_path, monkeypatch, capsys):
    (folder := tmp_path / "it's mine").mkdir()
    text, paths = printed(folder, monkeypatch, capsys)
    words = [word for command in re.findall("`(burstline .*?)`", text) for word in shlex.split(command)]
    assert [Path(word) for word in words if str(folder) in word] == paths
