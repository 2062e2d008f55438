"""A run's folder held against its hardware: what is found out, what is missing, what is suspect."""

import json
import os
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pytest

from burstline.bench import calibration
from burstline.bench.calibration import note_measured
from burstline.bench.conclusion import reconciled, write_report
from burstline.cli import main
from burstline.errors import RooflineError
from burstline.machine import hardware
from burstline.machine.hardware import check_hints, note_hardware
from burstline.machine.hints import DEVICE_FILE, Hints, Stated
from burstline.machine.roofline import _logged, seen_in, setup_of
from burstline.measure.record import tables
from burstline.measure.record.manifest import GpuFacts, HardwareFacts, HostFacts, Manifest, ServerFacts
from burstline.measure.record.run_writer import RunDir
from burstline.measure.record.rundir import open_run
from burstline.measure.record.typed_json import to_json
from burstline.measure.verdict.comparable import quantization_of
from burstline.reports.model.comparison import alone, view_of
from burstline.reports.page.side_by_side import side_by_side
from burstline.roofline.device.calibration import HostFit, device_toml, load_calibration
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import bundled_config
from burstline.servers.identity import Identity
from burstline.servers.registry import ENGINES
from burstline.servers.settings import Settings, spell
from burstline.workloads.spec import LoadSpec
from tests.reports import synthetic

ON_H100 = Hints(device="h100-sxm5-80g", model_config="llama-2-7b")
LOCAL = ServerFacts(url="http://127.0.0.1:8000", attached=True, model="served")


@pytest.fixture
def run(tmp_path):
    """A burst at a server that says its limits, on a machine that has one H100."""
    devices = (GpuFacts("NVIDIA H100 80GB HBM3"),)
    manifest = Manifest(
        engine="vllm", workload="burst", devices=devices, server=LOCAL, identity=synthetic.ON_VLLM
    )
    folder = RunDir.create(tmp_path, manifest)
    folder.save("records.parquet", [tables.record_table(synthetic.records(n=60, output_tok=16))])
    folder.save_manifest(replace(folder.manifest, status="complete"))
    return open_run(folder.path)


def noted(run, hints=ON_H100, **facts):
    run.save_manifest(replace(run.manifest, **facts))
    note_hardware(run, hints)
    return to_json(reconciled(run, None))


def test_a_known_device_and_model_give_phases_bounds_and_the_gap(run):
    found = noted(run)
    assert [phase["phase"] for phase in found["phases"]] == ["prefill", "decode"]
    assert sum(bar["seconds"] for bar in found["waterfall"]) == pytest.approx(
        max(record.token_ns[-1] for record in synthetic.records(n=60, output_tok=16)) / 1e9, rel=0.01
    )
    assert all(0 < phase[use]["measured"] < 1 for phase in found["phases"] for use in ("mfu", "mbu"))
    json.dumps(found, allow_nan=False)


def test_the_drivers_name_of_the_only_gpu_names_the_device(run):
    assert noted(run, Hints())["device"]["id"] == "h100-sxm5-80g"


@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        ({"devices": ()}, "--device"),
        ({"devices": (GpuFacts("A"), GpuFacts("B"))}, "A and B"),
        ({"devices": (GpuFacts("Abacus 9000"),)}, "Abacus 9000"),
        ({"server": replace(LOCAL, url="http://far.example:80")}, "http://far.example:80"),
        (
            {"identity": Identity("vllm", model="nobody/knows-this"), "server": ServerFacts()},
            "--model-config",
        ),
    ],
)
def test_what_is_not_known_is_said_with_the_flag_that_helps(run, facts, missing):
    assert missing in noted(run, Hints(), **facts)["absent"]


def test_limits_that_the_engine_does_not_tell_are_those_seen_in_use_and_said_so(run):
    found = noted(run, identity=Identity("vllm", model="llama-2-7b"))
    said = " ".join(found["assumed"])
    for word in ("dtype", "max_num_seqs", "max_num_batched_tokens", "KV cache's size", "parallelism"):
        assert word in said


def test_a_rate_above_the_ceiling_makes_the_run_suspect_in_the_banner(run):
    path = run.path.parent / "toy.toml"
    path.write_text(
        'id = "toy"\npeak_flops_per_s = { bf16 = 1e12 }\n'
        'levels = [{ name = "memory", capacity_bytes = 80e9, bytes_per_s = 1e11 }]\n'
    )
    noted(run, replace(ON_H100, device=str(path), stated=Stated(tp=1, draft_tokens=0)))
    verdict = write_report(run).to_json()["verdict"]
    assert verdict["state"] == "NOT-COMPARABLE"
    assert verdict["reasons"][0]["code"] == "beats-the-ceiling"
    assert "prefix cache" in verdict["reasons"][0]["advice"]
    assert "Impossible rate" in (run.path / "report.html").read_text()


@pytest.mark.usefixtures("without_page")
def test_the_summary_made_again_is_the_same_for_ever(run, monkeypatch):
    noted(run)
    write_report(run)
    first = (run.path / "summary.json").read_bytes()
    monkeypatch.setattr(hardware, "load_device", None)  # the shipped table may change: the run keeps its own
    write_report(run)
    assert (run.path / "summary.json").read_bytes() == first


@pytest.mark.usefixtures("without_page")
def test_a_run_of_another_device_keeps_it_unless_forced(run, monkeypatch, capsys):
    """Also where this machine's CPU would be measured for a run that another one made."""
    noted(run)
    own = (run.path / DEVICE_FILE).read_bytes()
    for device, words in (("a100-sxm4-80g", "would become a100-sxm4-80g"), ("cpu", "this machine's")):
        run.save_manifest(replace(run.manifest, host=HostFacts(cpu="another CPU")))
        assert main(["report", str(run.path), "--device", device]) == 2
        assert words in (said := capsys.readouterr().err)
        assert "--force" in said
        assert (run.path / DEVICE_FILE).read_bytes() == own
    assert main(["report", str(run.path), "--device", "h100-sxm5-80g"]) == 0
    assert main(["report", str(run.path), "--device", "a100-sxm4-80g", "--force"]) == 0
    assert b"a100-sxm4-80g" in (run.path / DEVICE_FILE).read_bytes()


@pytest.mark.parametrize(
    ("spacing_s", "concurrency", "paced"),
    [
        (0, None, False),
        pytest.param(1, None, True, marks=pytest.mark.slow),
        pytest.param(1, 4, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("without_page")
def test_time_without_requests_is_a_loss_only_of_a_run_that_was_saturated(run, spacing_s, concurrency, paced):
    """Sixty requests a second apart leave the server idle; a burst and a closed loop do not."""
    rows = [shifted(row, round(k * spacing_s * 1e9)) for k, row in enumerate(synthetic.records(n=60))]
    run.save("records.parquet", [tables.record_table(rows)])
    found = noted(run, asked=LoadSpec(concurrency=concurrency))
    assert (found["waterfall"][-1]["name"] == "waiting for requests") == paced
    assert not (paced and "The largest gap is waiting" in found["sentence"])
    assert paced or found["waterfall"][-1]["name"].startswith("queue and")


def shifted(record, by_ns):
    names = ("due_ns", "dispatched_ns", "sent_ns", "headers_ns", "answer_ns", "closed_ns")
    moved = {name: getattr(record, name) + by_ns for name in names}
    return replace(record, **moved, token_ns=[at + by_ns for at in record.token_ns])


def test_a_model_named_anew_leaves_the_device_as_it_was(run):
    noted(run, replace(ON_H100, device="a100-sxm4-80g"))
    again = noted(run, Hints(model_config="llama-2-13b"))
    assert again["device"]["id"] == "a100-sxm4-80g"
    assert again["model"]["params"] > 12e9
    assert again["model"]["device_from"] == "--device a100-sxm4-80g"


def test_a_run_of_before_says_how_to_hold_it_against_its_hardware(run):
    assert "burstline report RUN --device" in reconciled(open_run(run.path), None).absent


def test_a_typing_error_is_found_before_anything_runs():
    with pytest.raises(RooflineError, match="unknown device"):
        check_hints(Hints(device="h1000"))
    with pytest.raises(RooflineError, match="bundled model"):
        check_hints(Hints(model_config="/nowhere"))
    check_hints(Hints(device="cpu", model_config="llama-2-7b"))


def test_the_config_of_a_gguf_file_is_that_of_its_folder(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    os.truncate(file, 1 << 40)  # reading it would need a tebibyte of memory
    with pytest.raises(RooflineError, match=r"no config\.json"):
        check_hints(Hints(model_config=str(file)))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    check_hints(Hints(model_config=str(file)))


CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
}  # fmt: skip
REFERENCE = Identity("reference", model="reference", dtype="float32", raw={"threads": 1, "config": CONFIG})
STARTED = ServerFacts(attached=False, argv=("python",))


def on_cpu(run, hints):
    """What a new run at the embedded engine notes."""
    (run.path / DEVICE_FILE).unlink(missing_ok=True)
    run.save_manifest(
        replace(
            run.manifest, engine="reference", identity=REFERENCE, server=STARTED, devices=(), hardware=None
        )
    )
    note_hardware(run, hints)
    return run.manifest.hardware


def test_a_cpu_that_was_never_measured_is_left_alone_and_the_command_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    absent = on_cpu(run, Hints()).absent
    assert "`burstline calibrate --device cpu --quick --model reference --threads 1`" in absent
    assert f"`burstline report {run.path} --device cpu`" in absent
    assert not (run.path / DEVICE_FILE).exists()


def test_only_the_engine_whose_host_was_measured_is_charged_for_it(run, tmp_path):
    path, device = tmp_path / "here.toml", load_device("h100")
    host = HostFit("reference", 0.01, 1e-4, 1e-6, "measured by hand")
    path.write_text(device_toml(device, replace(load_calibration(device), host=host)))
    found = {
        name: noted(run, replace(ON_H100, device=str(path)), engine=name) for name in ("reference", "vllm")
    }
    assert found["reference"]["device"]["host"]["token_s"] == pytest.approx(1e-4)
    assert found["vllm"]["device"]["host"]["engine"] == "default"
    assert found["reference"]["predicted_s"] > found["vllm"]["predicted_s"]
    assert "100 µs a token" in " ".join(found["reference"]["assumed"])
    assert "20 µs a token" in " ".join(found["vllm"]["assumed"])


def test_an_engine_that_schedules_after_each_step_is_charged_a_host_of_its_kind(run):
    hosts = {
        version: noted(run, identity=Identity("vllm", version=version, model="llama-2-7b"))["device"]["host"]
        for version in ("0.12.0", "0.33.0")
    }
    assert [host["engine"] for host in hosts.values()] == ["synchronous", "default"]


def test_a_step_lasts_until_the_next_unless_the_engine_had_nothing_to_do(run):
    gemms = [f"{name}_proj_ns" for name in ("qkv", "o", "gate_up", "down")] + ["lm_head_ns", "attention_ns"]
    rows = [  # start, end, prefill_tok, decode_tok, n_waiting
        (0, 10, 8, 0, 1), (12, 20, 8, 1, 0), (21, 30, 0, 2, 0), (90, 100, 8, 0, 0),
    ]  # fmt: skip
    steps = [
        {"start_ns": 10**9 * start, "end_ns": 10**9 * end, "prefill_tok": new, "decode_tok": decode,
         "n_waiting": waiting, "new_tok": [1] * decode + [8] * (new // 8), "n_logits": decode + new // 8,
         "context_tok": [9] * decode + [8] * (new // 8), **dict.fromkeys(gemms, 1)}
        for start, end, new, decode, waiting in rows
    ]  # fmt: skip
    run.save("steps.parquet", [pa.Table.from_pylist(steps)])
    assert [seen.seconds for seen in seen_in(open_run(run.path), []).steps] == [12, 9, 9, 10]


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "bf16"), (None, "fp32")])
def test_a_server_started_without_a_gpu_in_fp32_computes_on_this_cpu(dtype, stored):
    identity = Identity("tgi", dtype=dtype)
    manifest, told = Manifest(engine="tgi", workload="burst", server=STARTED), hardware.dtype_of(identity)
    assert hardware.cores_of(manifest, told, stored) == len(os.sched_getaffinity(0))
    assert hardware.cores_of(replace(manifest, server=replace(STARTED, n_cores=1)), told, stored) == 1
    on_gpu = replace(manifest, devices=(GpuFacts("NVIDIA H100 80GB HBM3"),))
    assert hardware.cores_of(on_gpu, told, stored) is None
    assert hardware.cores_of(replace(manifest, server=LOCAL), told, stored) is None
    assert hardware.cores_of(replace(manifest, server=LOCAL), told, stored, named=True) == 1


def absent_of(run, identity: Identity, server: ServerFacts = STARTED, **hints) -> str:
    """Why a run without a GPU has no roofline."""
    (run.path / DEVICE_FILE).unlink(missing_ok=True)
    facts = {"engine": identity.engine, "identity": identity, "server": server, "devices": ()}
    run.save_manifest(replace(run.manifest, **facts, hardware=None))
    note_hardware(run, Hints(model_config="llama-2-7b", **hints))
    return run.manifest.hardware.absent


FP32 = {
    ("vllm", True): "serve in fp32 (--dtype float32), or ",
    ("lightllm", True): "serve in fp32 (--dtype float32), or ",
    ("lightllm", False): "serve in fp32 (--data_type fp32), or ",
    (
        "llamacpp",
        True,
    ): "serve weights that are fp32 (`burstline make-model` writes such with --dtype float32), or ",
    ("tgi", True): "",
    ("trtllm", True): "",
}
"""How an engine is made to compute in fp32, started here or attached."""


@pytest.mark.parametrize(("engine", "started"), FP32)
def test_sixteen_bits_on_a_cpu_are_not_measured(run, engine, started):
    """llama.cpp, which has no such flag, was once to be started with --dtype float32, and was already."""
    identity = Identity(engine, dtype="bfloat16")
    absent = absent_of(run, identity, STARTED if started else LOCAL, device="cpu")
    assert absent == (f"bf16 products on a CPU are not measured: {FP32[engine, started]}pass --device FILE")
    for flags in re.findall(r"\((--dtype \w+)\)", absent):
        assert spell("x", ENGINES[engine].settings, Settings(dtype=flags.split()[1]), ()).arguments


@pytest.mark.parametrize("server", [STARTED, LOCAL])
def test_a_data_type_that_the_server_does_not_state_is_not_read_off_the_checkpoint(
    run, tmp_path, monkeypatch, server
):
    """An attached server in fp32 was refused, because its checkpoint is stored in bfloat16."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    absent = absent_of(run, Identity("vllm"), server, device="cpu")
    assert "bf16" not in absent
    assert "is not known" in absent
    assert "--quant fp32" in absent
    absent = absent_of(run, Identity("vllm"), server, device="cpu", stated=Stated(quant="fp32"))
    assert "not calibrated" in absent
    assert absent.endswith("--device cpu --quant fp32`")
    note_hardware(run, Hints(device="cpu"))  # what was stated once holds
    assert "not calibrated" in run.manifest.hardware.absent
    assert absent_of(run, Identity("llamacpp", quantization="Q8_0"), server, device="cpu").startswith("Q8_0 ")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_the_cpu_is_named_as_a_device_only_where_that_is_not_refused(run, tmp_path, monkeypatch, dtype):
    """Followed, `or cpu` ended in "bf16 products on a CPU are not measured"."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    identity = Identity("vllm", dtype=dtype)
    absent = absent_of(run, identity, LOCAL)
    assert "name it with --device" in absent
    assert ("cpu" in absent) == (dtype != "bfloat16")
    quant = re.search(r"--device cpu --quant (\w+)", absent)
    if "cpu" in absent:
        stated = Stated(quant=quant[1] if quant else None)
        assert "not calibrated" in absent_of(run, identity, LOCAL, device="cpu", stated=stated)


CACHED_TOK = 2 * 32 * 32 * 128
"""Values of one token in the cache of llama-2-7b: keys and values of 32 heads of 128 in 32 layers."""


@pytest.mark.parametrize(
    ("width", "told", "refused"),
    [(2, None, "16-bit"), (4, None, ""), (2, "bfloat16", "bf16"), (2, "float32", ""), (1, None, "")],
)
@pytest.mark.parametrize("server", [STARTED, LOCAL])
def test_fp32_is_refused_where_the_run_shows_another_data_type(
    run, tmp_path, monkeypatch, server, width, told, refused
):
    """A vLLM that served bf16 was compared with fp32 products, because our own advice said so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # A block of the cache serves no tokens: the quotient is a little above.
    cache = {"kv_bytes": width * CACHED_TOK * 1000, "kv_tok": 995}
    identity = Identity("vllm", dtype=told, **cache)
    absent = absent_of(run, identity, server, device="cpu", stated=Stated(quant="fp32"))
    said = f"{refused} products on a CPU are not measured: serve in fp32 (--dtype float32), or pass --device"
    assert absent.startswith(said if refused else "this CPU is not calibrated")
    if server is LOCAL:
        assert ("cpu" in absent_of(run, identity, server)) == (not refused)
    other = absent_of(run, replace(identity, dtype=None, kv_cache_dtype="fp8"), server, device="cpu")
    assert other.startswith("the server's data type is not known"), "a stated cache says nothing of products"


def test_the_advice_for_an_unknown_device_states_no_format_and_runs_as_printed(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    absent = absent_of(run, Identity("vllm"), LOCAL)
    assert "if it is a CPU and the server computes in fp32: `burstline report" in absent
    run.save_manifest(run.manifest)
    words = shlex.split(re.search("`burstline (.*?)`", absent)[1])
    assert main(words) == 2
    assert "is not calibrated for this model" in capsys.readouterr().err


def test_a_calibration_is_advised_for_when_it_will_not_be_refused_again(run, tmp_path, monkeypatch):
    """It stood beside the reason for which it was refused a moment later."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "MOST_OTHERS", -1.0)
    monkeypatch.delenv("BURSTLINE_NO_CALIBRATE", raising=False)
    run.save_manifest(
        replace(run.manifest, engine="reference", identity=REFERENCE, server=STARTED, devices=())
    )
    note_measured(run, Hints(), print, calibrate=True)
    assert "). Once that has changed, run `burstline calibrate " in run.manifest.hardware.absent
    assert "too much to measure" in run.manifest.hardware.absent


@pytest.mark.parametrize("threads", ["0", "99999"])
def test_a_calibration_that_cannot_be_made_is_refused_in_one_line(threads, capsys):
    assert main(["calibrate", "--threads", threads]) == 2
    assert f"--threads {threads}: expected 1 to " in capsys.readouterr().err


@pytest.mark.usefixtures("without_page")
def test_an_attached_server_of_eight_gpus_is_not_called_impossible(run):
    """Nothing states how many devices serve, so a rate above one device's ceiling is no verdict."""
    slow = run.path.parent / "slow.toml"
    slow.write_text(
        'id = "slow"\npeak_flops_per_s = { bf16 = 20e12, fp16 = 20e12 }\n'
        'levels = [{ name = "memory", capacity_bytes = 80e9, bytes_per_s = 1e12 }]\n'
        'links = [{ scope = "node", kind = "NVLink", n_devices = 8, bytes_per_s = 300e9 }]\n'
    )
    unstated = Identity("vllm", model="llama-2-7b")
    hints = replace(ON_H100, device=str(slow))
    found = noted(run, hints, identity=unstated)
    assert not found["suspicions"]
    assert found["explained"]
    assert "--tp" in json.dumps(found["explained"])
    assert write_report(run).verdict.state != "NOT-COMPARABLE"
    stated = noted(run, replace(hints, stated=Stated(tp=1, quant="bf16", draft_tokens=0)), identity=unstated)
    assert stated["suspicions"]
    assert noted(run, hints, identity=unstated)["suspicions"], "what was stated once is kept in the run"


@pytest.mark.usefixtures("without_page")
def test_a_fact_stated_to_the_report_alone_is_kept_and_a_wrong_one_refused(run, capsys):
    noted(run)
    assert main(["report", str(run.path), "--tp", "2", "--draft-tokens", "4"]) == 0
    assert open_run(run.path).manifest.hardware.stated == {"tp": 2, "draft_tokens": 4}
    assert main(["report", str(run.path), "--tp", "0"]) == 2
    assert "--tp 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (Stated(tp=0), "--tp 0"),
        (Stated(quant="q9"), "--quant q9"),
        (Stated(kv_dtype="half"), "--kv-dtype half"),
        (Stated(draft_tokens=-1), "--draft-tokens -1"),
        (Stated(expert_share=1.5), "--expert-share 1.5"),
    ],
)
def test_a_stated_fact_that_cannot_be_is_refused_before_anything_runs(stated, message):
    with pytest.raises(RooflineError, match=message):
        check_hints(Hints(stated=stated))


def test_a_step_log_that_was_cut_off_amid_the_queue_ends_with_its_last_step():
    step = {"new_tok": [8], "context_tok": [8], "n_logits": 1, "attention_ns": 10, "decode_tok": 0}
    rows = [step | {"start_ns": k * 1000, "end_ns": k * 1000 + 900, "n_waiting": 3} for k in range(3)]
    seen = _logged(SimpleNamespace(steps=pd.DataFrame(rows)), [SimpleNamespace(sent_s=0.0)])
    assert [step.seconds * 1e9 for step in seen] == pytest.approx([1000, 1000, 900])


def test_a_price_in_a_device_file_counts_the_devices_that_are_stated_or_that_the_engine_says(run, tmp_path):
    """Behind a URL nothing is seen; the price of one device would be told for four."""
    file = tmp_path / "rented.toml"
    device = load_device("h100-sxm5-80g")
    file.write_text(device_toml(replace(device, usd_per_hour=2.0), load_calibration(device)))
    hints, alone = replace(ON_H100, device=str(file)), replace(synthetic.ON_VLLM, tensor_parallel_size=None)

    def usd(hints, **facts):
        run.save_manifest(replace(run.manifest, **facts))
        note_hardware(run, hints)
        return run.manifest.usd_per_hour

    assert usd(hints, devices=(), identity=alone) == 2.0
    assert usd(replace(hints, stated=Stated(tp=4)), hardware=HardwareFacts()) == 8.0
    assert usd(hints) == 8.0  # as was stated before
    assert usd(replace(ON_H100, device=None, stated=Stated(tp=2, dp=4))) == 16.0
    assert usd(hints, hardware=HardwareFacts(), identity=replace(alone, tensor_parallel_size=4)) == 8.0
    assert usd(replace(ON_H100, device=None, stated=Stated(tp=2)), usd_per_hour=5.0) == 5.0


@pytest.mark.slow
def test_a_price_in_a_device_file_counts_for_each_device_unless_another_is_stated(run, tmp_path, capsys):
    file = tmp_path / "rented.toml"
    device = load_device("h100-sxm5-80g")
    file.write_text(device_toml(replace(device, usd_per_hour=2.5), load_calibration(device)))
    run.save_manifest(replace(run.manifest, devices=run.manifest.devices * 2))
    note_hardware(run, replace(ON_H100, device=str(file)))
    summary = write_report(run)
    per_s = summary.throughput.output_tok_per_s.point
    assert summary.cost.usd_per_million_output_tok.point == pytest.approx(5.0 / 3600 / per_s * 1e6)
    assert main(["report", str(run.path), "--device", str(file), "--usd-per-hour", "7"]) == 0
    cost = open_run(run.path).summary.cost
    assert cost.usd_per_million_output_tok.point == pytest.approx(7.0 / 3600 / per_s * 1e6)
    assert cost.usd_per_million_input_tok.point == pytest.approx(
        7.0 / 3600 / summary.throughput.input_tok_per_s.point * 1e6
    )
    table = side_by_side(alone(view_of(open_run(run.path))).cases[0])
    assert any(row.cells[0].text.startswith("Cost per million output tokens") for row in table.rows)
    file.write_text(file.read_text().replace("usd_per_hour = 2.5", 'usd_per_hour = "2.5"'))
    with pytest.raises(RooflineError, match="usd_per_hour is"):
        load_device(str(file))


@pytest.mark.parametrize("server", ["default", "name-of-a-gateway", None])
def test_the_folder_of_the_tokenizer_names_the_model_where_the_server_does_not(run, tmp_path, server):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(bundled_config("llama-2-7b")))
    asked = replace(run.manifest.asked, tokenizer=folder)
    facts = {"asked": asked, "server": replace(LOCAL, model=server), "hardware": None}
    run.save_manifest(replace(run.manifest, identity=Identity("vllm"), **facts))
    note_hardware(run, Hints(device="h100-sxm5-80g"))
    assert run.manifest.hardware.absent is None
    assert run.manifest.hardware.model_from == str(folder)


@pytest.mark.parametrize(
    ("part", "beside", "weights", "others"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, {}, "int4", []),
        (
            {},
            {"quantization": {"quant_algo": "FP8", "exclude_modules": ["self_attn"]}},
            "fp8",
            ["bf16", "bf16"],
        ),
        ({}, {}, "bf16", []),
    ],
)
def test_a_run_is_judged_by_how_its_checkpoint_is_stored(run, tmp_path, part, beside, weights, others):
    own = bundled_config("llama-2-7b") | {"torch_dtype": "bfloat16"} | part
    (tmp_path / "config.json").write_text(json.dumps({"text_config": own}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    note_hardware(run, Hints(device="h100-sxm5-80g", model_config=str(tmp_path)))
    quant = setup_of(run)[0].deployment.quant
    assert quant.weights == weights
    assert [other.weights for other in quant.others] == others
    config = run.manifest.hardware.model_config
    assert (quantization_of(Identity("vllm"), None, config) is None) == (weights == "bf16")


@pytest.mark.parametrize(("share", "held"), [(1.0, None), (0.5, 0.48), (2.0, 2.04)])
def test_a_run_is_judged_by_the_bytes_of_its_weight_files(run, tmp_path, share, held):
    config = bundled_config("llama-2-7b") | {"torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = {"model.layers.0.x": {"data_offsets": [0, round(share * 2 * 6_738_415_616)]}}
    header = json.dumps(rows).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    note_hardware(run, Hints(device="h100-sxm5-80g", model_config=str(tmp_path)))
    assert run.manifest.hardware.held == (None if held is None else pytest.approx(held, abs=0.02))
    (tmp_path / "model.safetensors").unlink()  # the run is judged again where its model is not
    setup, assumed = setup_of(run)
    assert setup.deployment.quant.held == pytest.approx(held or 1.0, abs=0.02)
    assert any("weight files hold" in each for each in assumed) == (held is not None)
