"""`burstline bound` as a user calls it."""

import json

import pytest

from burstline.cli import main
from burstline.roofline.device.calibration import device_toml, load_calibration
from burstline.roofline.device.device import load_device

ASKED = ["--prompt", "200", "--output", "200"]


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["bound", *argv]) == 0
    return capsys.readouterr().out


def test_it_says_which_op_bounds_each_phase_and_how_many_requests_fit(capsys):
    text = told(capsys, "--model", "llama-2-13b", "--device", "a100-sxm4-80g", *ASKED)
    assert "llama-2-13b (13,015,864,320 parameters, fp16) on A100-SXM4-80G: batch 1, 200 in, 200 out" in text
    assert "Prefill is compute-bound (ceiling 16.67 ms" in text
    assert "Decode is memory-bound (ceiling 12.73 ms" in text
    assert "200 × 27648 × 5120" in text
    assert "KV cache: 61,072 tokens" in text
    assert "Assumed:" in text


def test_json_holds_everything_with_units(capsys):
    argv = ["--model", "llama-2-13b", "--device", "a100", "--tp", "2", "--batch", "4", *ASKED, "--json"]
    found = json.loads(told(capsys, *argv))
    assert found["parallel"]["tp"] == 2
    ops = {op["op"]: op for op in found["phases"]["decode"]["ops"]}
    assert (ops["gate_up"]["m"], ops["gate_up"]["n"], ops["gate_up"]["k"]) == (4, 13824, 5120)
    assert ops["gate_up"]["bytes"] == 40 * 2 * (13824 * 5120 + 4 * (13824 + 5120))
    assert ops["all_reduce"]["bound"] == "communication"
    assert sum(op["share"] for op in ops.values()) == pytest.approx(1)
    ceiling = found["phases"]["prefill"]["ceiling_s"] + 199 * found["phases"]["decode"]["ceiling_s"]
    assert found["latency_s"]["ceiling"] == pytest.approx(ceiling)
    assert found["output_tok_per_s"]["ceiling"] == pytest.approx(4 * 200 / ceiling)


def test_several_devices_stand_side_by_side_and_one_that_cannot_says_why(capsys):
    text = told(capsys, "--model", "llama-2-13b", "--device", "a100", "h100", "rtx4090", *ASKED)
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("A100-SXM4-80G ")).split()[1:3] == [
        "compute",
        "memory",
    ]
    assert next(line for line in lines if line.startswith("H100-SXM5-80G ")).split()[1:3] == [
        "memory",
        "memory",
    ]
    assert "RTX4090: llama-2-13b does not fit RTX4090: weights take 26.0 GB" in text


@pytest.mark.parametrize(
    ("model", "batch", "limit"),
    [
        ("mixtral-8x7b", 8, "memory"),
        ("qwen3-30b-a3b", 8, "memory"),
        ("gemma-2-9b", 8, "memory"),
        ("opt-6.7b", 8, "memory"),
        ("gpt2", 64, "host"),  # a quarter of a GB of weights: the host takes longer than reading them
    ],
)
def test_every_family_is_told(capsys, model, batch, limit):
    text = told(capsys, "--model", model, "--device", "b200", "--batch", str(batch), *ASKED)
    assert f"Decode is {limit}-bound" in text


def test_a_device_file_brings_its_own_calibration(capsys, tmp_path):
    device = """
peak_flops_per_s = { fp32 = 2e11 }
levels = [{ name = "DRAM", capacity_bytes = 16e9, bytes_per_s = 2e10 }]
"""
    path = tmp_path / "laptop.toml"
    path.write_text(device)
    argv = ["--model", "reference", "--device", str(path), *ASKED, "--json"]
    before = json.loads(told(capsys, *argv))["latency_s"]
    known = load_device(str(path))
    path.write_text(device_toml(known, load_calibration(known).changed({"memory": 0.5})))
    after = json.loads(told(capsys, *argv))
    assert after["latency_s"]["ceiling"] == before["ceiling"]
    assert after["latency_s"]["predicted"] != before["predicted"]
    assert {row["name"]: row["own"] for row in after["constants"]}["memory"]


def test_a_constant_is_named_behind_each_op_and_a_flag_moves_it(capsys):
    argv = ["--model", "llama-2-7b", "--device", "h100", *ASKED, "--json"]
    shipped = json.loads(told(capsys, *argv))
    found = json.loads(told(capsys, *argv, "--constant", "memory=0.5", "--constant", "launch_s=9e-6"))
    ops = {op["op"]: op["by"] for op in found["phases"]["decode"]["ops"]}
    assert ops["gate_up"] == ["memory", "launch_s"]
    moved = {row["name"]: row for row in found["constants"]}
    assert (moved["memory"]["value"], moved["memory"]["own"]) == (0.5, True)
    assert moved["memory"]["change_at_10_percent_more"] < -0.03
    was = next(row for row in found["what_if"] if row["change"] == "constants as shipped")
    assert was["latency_s"] == pytest.approx(shipped["latency_s"]["predicted"])
    assert found["latency_s"]["predicted"] > 1.3 * was["latency_s"]


def test_prompts_are_computed_within_a_steps_budget(capsys):
    argv = ["--model", "llama-2-7b", "--device", "h100", "--batch", "10", "--prompt", "500", "--output", "9"]
    found = json.loads(told(capsys, *argv, "--json"))
    steps = {name: phase["n_steps"] for name, phase in found["phases"].items()}
    assert steps == {"prefill": 2, "last prefill": 1, "decode": 8}
    assert "2,048 tokens a step" in told(capsys, *argv)


def test_a_mixture_over_nodes_needs_a_network(capsys):
    argv = [
        "bound",
        "--model",
        "deepseek-v3",
        "--device",
        "h200",
        "--quant",
        "fp8",
        "--dp",
        "16",
        "--ep",
        "16",
    ]
    assert main(argv) == 2
    assert "--network-gb-per-s" in capsys.readouterr().err
    text = told(capsys, *argv[1:], "--network-gb-per-s", "50")
    assert "communication (network)" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "llama-2-70b", "--device", "a100"], "does not fit"),
        (["--model", "llama-2-13b", "--device", "a100", "--batch", "4000"], "does not fit the KV cache"),
        (["--model", "llama-2-13b", "--device", "a101"], "unknown device"),
        (["--model", "llama-2-13b", "--device", "a100", "--quant", "fp8"], "no dense fp8 peak"),
        (["--model", "llama-2-13b", "--device", "a100", "--tp", "3"], "does not divide"),
        (["--model", "llama-2-13b", "--device", "a100", "--output", "0"], "output must be at least 1"),
    ],
)
def test_what_cannot_be_is_the_users_fault_in_one_line(capsys, argv, says):
    assert main(["bound", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error


def test_the_answer_comes_first_in_plain_words(capsys):
    lines = told(capsys, "--model", "llama-2-7b", "--device", "a100", *ASKED).splitlines()
    assert lines[2].startswith("Decode of llama-2-7b on A100-SXM4-80G is memory-bound here.")
    assert "memory-bound up to batch 161, its attention memory-bound at any batch" in lines[2]
    assert "its products are compute-bound from 162 prompt tokens" in lines[2]


def test_what_if_is_a_table_and_says_why_something_cannot_be(capsys):
    text = told(capsys, "--model", "llama-2-7b", "--device", "a100", *ASKED)
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "-" in rows["TP 2"]
    assert "H200-SXM-141G" in rows
    assert rows[
        "fp8-static weights: A100-SXM4-80G has no dense fp8 peak; it has bf16, fp16, fp32, int8, tf32"
    ]


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("qwen3-next-80b-a3b --device h100 --tp 4 --prompt 64 --output 16", 1496),  # states
        ("llama-4-scout --device h200 --tp 4 --prompt 60000 --output 400", 54),  # windows
    ],
)
def test_as_many_requests_fit_as_their_states_and_windows_leave_room_for(capsys, words, most):
    argv = ["--model", *words.split(), "--max-num-batched-tokens", "32768", "--json"]
    assert json.loads(told(capsys, *argv))["memory"]["largest_batch"] == most


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--utilisation", "90", "expected a share above 0 and up to 1"),
        ("--utilisation", "0", "expected a share"),
        ("--max-num-batched-tokens", "0", "expected a number above 0"),
        ("--network-gb-per-s", "-5", "expected a number above 0"),
        ("--constant", "memory", "expected NAME=VALUE"),
        ("--constant", "speed=1", "no constant 'speed'"),
        ("--constant", "memory=0", "constant memory cannot be 0"),
        ("--constant", "memory=nan", "constant memory cannot be nan; expected a number above 0"),
        ("--constant", "memory=inf", "constant memory cannot be inf"),
        ("--network-gb-per-s", "nan", "--network-gb-per-s nan: expected a number above 0"),
        ("--network-gb-per-s", "50", "--network-gb-per-s would be ignored: one device"),
    ],
)
def test_a_number_that_cannot_be_is_refused_in_one_line(capsys, flag, value, says):
    assert main(["bound", "--model", "llama-2-7b", "--device", "a100", flag, value]) == 2
    assert says in capsys.readouterr().err
