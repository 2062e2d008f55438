"""`burstline compare`: like with like, no ranking without equal work; engines that cheat are found out."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import orjson
import pytest

from burstline import cli
from burstline.loadgen.capture.files import write_json
from burstline.measure.record import tables
from burstline.measure.record.manifest import (
    GpuFacts,
    HostFacts,
    LoadFacts,
    Manifest,
    ServerFacts,
    StageFacts,
)
from burstline.measure.record.rundir import open_run
from burstline.measure.record.verdict import State, Verdict
from burstline.measure.summarize import summarize_run
from burstline.measure.verdict.factors import canonical
from burstline.reports.model.contenders import CHECKED, CHOSEN, labels_of
from burstline.servers.identity import Identity
from burstline.servers.settings import Setting
from burstline.workloads.arrivals import parse_arrival
from burstline.workloads.lengths import Lengths
from burstline.workloads.plan import Shape, make_plan
from burstline.workloads.prompts import vocabulary_from_size
from burstline.workloads.spec import LoadSpec
from tests.reports import synthetic
from tests.truth.rig import TruthRig, truth_server
from tests.truth.router import TruthSetup
from tests.truth.script import Script


def another(run: Path, folder: Path, later_ns: int = 1, **facts) -> Path:
    """A copy that began later, so that it is a run of its own, with these facts in its manifest."""
    shutil.copytree(run, folder)
    manifest = open_run(folder).manifest
    clock = replace(manifest.clock, wall_ns=manifest.clock.wall_ns + later_ns)
    open_run(folder).save_manifest(replace(manifest, clock=clock, **facts))
    return folder


@pytest.fixture
def two_runs(burst_run, tmp_path):
    """Two runs alike; `change(which, **facts)` changes fields of a manifest."""
    folders = [another(burst_run.path, tmp_path / name, k) for k, name in enumerate(("first", "second"))]

    def change(which: int, **facts) -> None:
        run = open_run(folders[which])
        run.save_manifest(replace(run.manifest, **facts))

    return folders, change


def compare(capsys, folders, *flags: str) -> tuple[int, str, str]:
    code = cli.main(["compare", *map(str, folders), *flags])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_equal_work_is_ranked_and_equal_numbers_are_not(two_runs, capsys):
    folders, change = two_runs
    change(1, engine="reference")
    code, out, _ = compare(capsys, folders)
    assert code == 0
    assert "COMPARABLE: All did the same work" in out
    assert "★" not in out


def test_runs_of_different_work_still_show_each_contenders_numbers(two_runs, capsys):
    """Nine VALID runs of three engines once ended in a page without one number."""
    folders, change = two_runs
    change(0, engine="vllm", identity=Identity("vllm", dtype="float32"))
    change(1, engine="tgi", identity=Identity("tgi", dtype="bfloat16"))
    code, out, _ = compare(capsys, folders)
    assert code == 4
    assert "Start every engine with the same --dtype; a GGUF file has its own." in " ".join(out.split())
    assert "NOT-COMPARABLE" in out
    (row,) = (line for line in out.splitlines() if line.startswith("E2E p50"))
    assert len(re.findall(r"\d+(?:\.\d+)?", row.removeprefix("E2E p50"))) >= 2
    assert "faster" not in out


def test_of_two_loads_the_reason_that_decides_stands_first_and_what_follows_from_it_on_the_page(
    two_runs, burst_run, capsys
):
    """Eight reasons once: another load has other tokens, another sampling, and unknown settings."""
    folders, change = two_runs
    change(0, identity=Identity("vllm", dtype="float32"), title="a load")
    change(1, identity=Identity("tgi", dtype="bfloat16"), title="another load")
    out = compare(capsys, folders)[1]
    reasons = [line for line in out.splitlines() if line.startswith("  - ")]
    assert reasons[0].startswith("  - The workload differs: a load in ")
    assert any("bfloat16" in line for line in reasons), "a difference of another kind stands beside it"
    assert re.fullmatch(r"  - And \d more that may follow from this, on the page: .*", reasons[-1])
    page = compare(capsys, folders, "--format", "html")[1]
    assert "does not report" not in out
    assert "does not report" in page


def test_a_disturbed_comparison_asks_for_an_idle_machine_and_for_no_more_runs(two_runs, capsys):
    """Also where it was made with --anyway, which it then does not recommend."""
    folders, change = two_runs
    change(1, engine="tgi")
    for folder in folders:
        spoil(folder, "DISTURBED", "Stop other work on this machine.")
    code, out, _ = compare(capsys, folders)
    assert code == 4
    assert "--anyway compares the runs all the same" in out
    code, out, _ = compare(capsys, folders, "--anyway")
    assert code == 0
    assert "Next: stop other work on this machine." in out
    assert "Next: run each" not in out
    assert "--anyway" not in out


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"title": "another load"}, "The workload differs"),
        ({"host": HostFacts(cpu="another")}, "The CPU differs"),
    ],
)
def test_runs_that_were_not_made_alike_are_ranked_only_when_told(two_runs, capsys, facts, words):
    folders, change = two_runs
    change(1, **facts)
    code, out, _ = compare(capsys, folders)
    assert code == 4
    assert "NOT-COMPARABLE" in out
    assert words in out
    assert "--vary" in out
    assert "TTFT p50" in out, "a refused comparison still shows the numbers"
    code, out, _ = compare(capsys, folders, "--anyway")
    assert code == 0
    assert words in out


@pytest.mark.parametrize(
    ("factor", "part", "fact", "values"),
    [
        ("governor", "host", "governor", ("performance", "powersave")),
        ("smt", "host", "smt", (False, True)),
        ("numa-nodes", "host", "numa_nodes", (1, 2)),
        ("prompts", "load", "prompts", ("ids", "text")),
        ("warm-up", "load", "stages", ((), (StageFacts("warm-up", 8, 8),))),
        ("server-addresses", "server", "addresses", (1, 3)),
    ],
)
def test_facts_of_the_work_and_the_machine_must_be_equal_where_both_are_known(
    two_runs, capsys, factor, part, fact, values
):
    folders, change = two_runs
    manifest = open_run(folders[0]).manifest
    of = getattr(manifest, part) or {"load": LoadFacts(), "server": ServerFacts()}[part]
    for which, value in enumerate(values):
        change(which, **{part: replace(of, **{fact: value})})
    change(1, title="another load")
    code, out, _ = compare(capsys, folders)
    assert code == 4
    assert f"The {factor} differs: " in out
    if fact != "stages":
        change(0, **{part: of})
        assert f"The {factor} differs: " not in compare(capsys, folders)[1], "an older run does not know it"


def test_how_many_bursts_an_automatic_warm_up_needed_is_no_difference(two_runs, capsys):
    folders, change = two_runs
    for which, n_bursts in enumerate((2, 3)):
        bursts = tuple(StageFacts(f"warm-up {k}", 8, 8, 0.1) for k in range(n_bursts))
        change(which, load=LoadFacts(stages=bursts), title="another load")
    assert "warm-up" not in compare(capsys, folders)[1]
    change(1, load=LoadFacts(stages=(StageFacts("warm-up", 8, 8),)))
    assert "vllm warm-up bursts of 8 vs 8: " in compare(capsys, folders)[1]


def test_seeds_may_differ(two_runs, capsys):
    folders, change = two_runs
    change(1, asked=LoadSpec(seed=7), engine="reference")
    assert compare(capsys, folders)[0] == 0


def limited(change, which: int, limit: int, *more: str) -> None:
    argv = ("python", "--max-num-seqs", str(limit), *more)
    change(which, server=ServerFacts(argv=argv, model="m"), identity=Identity("vllm", max_num_seqs=limit))


def test_one_setting_that_differs_is_recognised_and_compared(two_runs, capsys):
    folders, change = two_runs
    limited(change, 0, 8)
    limited(change, 1, 16)
    code, out, _ = compare(capsys, folders)
    assert code == 0
    assert out.startswith("vllm max-num-seqs 8 vs 16: ")


def test_a_second_difference_is_named_and_refused_with_the_command_that_mends_it(two_runs, capsys):
    folders, change = two_runs
    limited(change, 0, 8)
    limited(change, 1, 16, "--block-size", "32")
    code, out, _ = compare(capsys, folders, "--vary", "max_num_seqs")
    assert code == 4
    assert "The block-size differs" in out
    assert "or add --vary block-size" in out
    assert compare(capsys, folders, "--vary", "max-num-seqs", "--vary", "block-size")[0] == 0


VARIED = {
    "version": [{"identity": Identity("vllm", version=version)} for version in ("0.24", "0.25")],
    "devices": [{"devices": (GpuFacts(name),)} for name in ("H100", "H200")],
    "dtype": [{"identity": Identity("vllm", dtype=dtype)} for dtype in ("bfloat16", "float16")],
    "kv-cache-dtype": [{"identity": Identity("vllm", kv_cache_dtype=kind)} for kind in ("bfloat16", "fp8")],
    "quantization": [{"identity": Identity("vllm", quantization=kind)} for kind in ("awq", "gptq")],
    "tensor-parallel-size": [{"identity": Identity("vllm", tensor_parallel_size=n)} for n in (1, 2)],
    "model": [{"server": ServerFacts(model=name)} for name in ("/models/8b", "/models/70b")],
    "cpu": [{"host": HostFacts(cpu=cpu)} for cpu in ("one", "another")],
    "placement": [{"server": ServerFacts(model="m", attached=there)} for there in (True, False)],
    "max-num-seqs": [{"identity": Identity("vllm", max_num_seqs=n)} for n in (8, 16)],
    "max-num-batched-tokens": [{"identity": Identity("vllm", max_num_batched_tokens=n)} for n in (512, 2048)],
    "prefix-cache": [
        {"server": ServerFacts(model="m", settings=(Setting("prefix_cache", asked, None, None),))}
        for asked in ("on", "off")
    ],
}


@pytest.mark.parametrize("factor", VARIED)
def test_every_factor_can_be_varied_and_is_named_when_it_alone_differs(two_runs, capsys, factor):
    folders, change = two_runs
    for which, facts in enumerate(VARIED[factor]):
        change(which, engine="vllm", **facts)
    assert compare(capsys, folders, "--vary", factor)[0] == 0
    code, out, _ = compare(capsys, folders)
    if canonical(factor) in CHECKED.keys() - CHOSEN:
        assert code == 4
        assert f"or add --vary {canonical(factor)}." in out
    else:
        assert code == 0
        assert out.startswith(f"vllm {canonical(factor)} ")


TOLD = {
    "max-num-seqs": ("max_num_seqs", 8, 16),
    "tensor-parallel-size": ("tensor_parallel_size", 1, 2),
    "dtype": ("dtype", "bfloat16", "float16"),
    "kv-cache-dtype": ("kv_cache_dtype", "bfloat16", "fp8"),
}
"""What servers say of themselves."""
SPELT = [
    ("vllm", "max-num-seqs", ("--max-num-seqs", "8"), ("--max-num-seqs=16",)),
    ("vllm", "quantization", ("-q", "awq"), ("--quantization", "gptq")),
    ("vllm", "tensor-parallel-size", ("-tp", "1"), ("--tensor-parallel-size", "2")),
    ("vllm", "kv-cache-dtype", ("--kv-cache-dtype", "fp8"), ("--kv-cache-dtype", "auto")),
    ("vllm", "kv-cache-dtype", ("--kv-cache-dtype", "fp8"), ()),
    ("vllm", "prefix-cache", ("--enable-prefix-caching",), ("--no-enable-prefix-caching",)),
    ("sglang", "max-num-seqs", ("--max-running-requests", "8"), ("--max-running-requests", "16")),
    ("sglang", "tensor-parallel-size", ("--tp-size", "1"), ("--tp", "2")),
    (
        "sglang",
        "max-num-batched-tokens",
        ("--chunked-prefill-size", "-1"),
        ("--chunked-prefill-size", "4096"),
    ),
    ("tgi", "tensor-parallel-size", ("--num-shard", "1"), ("--num-shard", "2")),
    ("tgi", "quantization", ("--quantize", "awq"), ("--quantize", "gptq")),
    ("tgi", "max-num-seqs", ("--max-batch-size", "8"), ("--max-batch-size", "16")),
    ("lightllm", "dtype", ("--data_type", "bf16"), ("--data_type", "fp16")),
    ("lightllm", "quantization", ("--quant_type", "vllm-w8a8"), ("--quant_type", "deepgemm")),
    ("lightllm", "tensor-parallel-size", ("--tp", "1"), ("--tp", "2")),
    ("llamacpp", "kv-cache-dtype", ("-ctk", "q8_0"), ("--cache-type-k", "f16")),
    ("trtllm", "max-num-seqs", ("--max_batch_size", "8"), ("--max_batch_size", "16")),
]


@pytest.mark.parametrize(("engine", "factor", "one", "other"), SPELT)
def test_a_setting_is_one_factor_however_its_engine_spells_it(two_runs, capsys, engine, factor, one, other):
    """Told by the command line alone, and by the server too."""
    folders, change = two_runs
    for told in (False, True)[: 1 + (factor in TOLD)]:
        for which, flags in enumerate((one, other)):
            known = {TOLD[factor][0]: TOLD[factor][1 + which]} if told else {}
            server = ServerFacts(model="m", attached=False, argv=("server", *flags))
            change(which, engine=engine, server=server, identity=Identity(engine, **known))
        code, out, _ = compare(capsys, folders)
        assert code == 0, out
        assert out.startswith(f"{engine} {canonical(factor)} ")


@pytest.mark.parametrize(("attached", "own"), [(False, "-- --block-size 32"), (True, "--block-size 32")])
def test_a_setting_that_must_not_differ_comes_with_the_flag_that_sets_it(two_runs, capsys, attached, own):
    """A flag of the engine alone is taken behind `--` where the command starts the engine."""
    folders, change = two_runs
    for which, flags in enumerate(
        (("--tp", "1", "--block-size", "32"), ("--tp", "2", "--mlock", "--block-size", "16"))
    ):
        server = ServerFacts(model="m", attached=attached, argv=("server", *flags))
        change(which, engine="sglang", server=server, argv=("burstline", "run", "--", *flags))
    out = " ".join(compare(capsys, folders)[1].split())
    size = "--tp 1" if attached else "--tensor-parallel-size 1"
    assert f"Restart sglang with {size}, or add --vary tensor-parallel-size." in out
    assert f"Restart sglang without {'' if attached else '-- '}--mlock, or add --vary mlock." in out
    assert f"Restart sglang with {own}, or add --vary block-size." in out


LLAMA = (
    # What differs, the first run's own flags behind `--` and its command; the same of the second; the advice.
    ("cram", ("-cram", "64"), (), "Restart llamacpp with -- -cram 64"),
    ("no-mmap", ("--no-mmap",), (), "Restart llamacpp with -- --no-mmap"),
    ("no-mmap", (), ("--no-mmap",), "Restart llamacpp without -- --no-mmap"),
    ("ub", ("-ub=64",), ("-ub=32",), "Restart llamacpp with -- -ub=64"),
    ("jinja", ("--chat-template", "a b"), ("--jinja",), "Restart llamacpp without -- --jinja"),
)


@pytest.mark.parametrize(("factor", "first", "second", "advice"), LLAMA)
def test_an_engines_flag_is_advised_as_the_run_that_has_it_spelt_it(
    two_runs, capsys, factor, first, second, advice
):
    """`-- --cram 64` and `-- --no-mmap on` were advised: llama-server knows neither."""
    folders, change = two_runs
    for which, flags in enumerate((first, second)):
        server = ServerFacts(model="m", attached=False, argv=("llama-server", "-np", "4", *flags))
        argv = ("burstline", "run", "--engine", "llamacpp", *(("--", *flags) if flags else ()))
        change(which, engine="llamacpp", server=server, argv=argv, title=f"load {which}")
    out = " ".join(compare(capsys, folders)[1].split())
    assert f"{advice}, or add --vary {factor}." in out


def test_a_flag_that_burstline_adds_is_not_advised_and_the_models_path_is_no_flag(two_runs, capsys):
    """With the cache off Burstline adds `-cram 0`: no person gave it, so none can drop it."""
    folders, change = two_runs
    off, on = ("--no-cache-prompt", "-cram", "0", "-t", "1"), ("-t", "3", "--cache-prompt")
    for cached, (one, other) in enumerate(((off, on), (on, off))):
        for which, (name, flags) in enumerate((("8b", one), ("70b", other))):
            path, asked = f"/models/{name}/model.gguf", ("off", "on")[which != cached]
            server = ServerFacts(
                model=name, model_asked=f"/models/{name}", attached=False,
                argv=("llama-server", "-m", path, "--alias", name, *flags),
                settings=(Setting("prefix_cache", asked, None, asked),),
            )  # fmt: skip
            identity = Identity("llamacpp", model=path, prefix_cache=flags is on)
            change(which, engine="llamacpp", server=server, identity=identity)
        out = " ".join(compare(capsys, folders)[1].split())
        assert f"Restart llamacpp with --prefix-cache {('off', 'on')[cached]}, or add --vary" in out
        for factor in ("cram", "t", "model"):
            assert f"Give the runs the same {factor}, or add --vary {factor}." in out
        for factor in ("m", "alias", "no-cache-prompt"):
            assert f"The {factor} differs" not in out


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ((Setting("max_num_seqs", "8", "-np 8", "8"),), "Restart llamacpp without --max-num-seqs"),
        ((), "Give the runs the same max-num-seqs"),
    ],
)
def test_only_a_setting_that_was_given_can_be_left_out(two_runs, capsys, settings, advice):
    folders, change = two_runs
    change(0, engine="llamacpp", title="a load", server=ServerFacts(model="m", attached=False, argv=("x",)))
    server = ServerFacts(model="m", attached=False, argv=("x", "-np", "8"), settings=settings)
    change(1, engine="llamacpp", identity=Identity("llamacpp", max_num_seqs=8), server=server)
    assert f"{advice}, or add --vary max-num-seqs." in " ".join(compare(capsys, folders)[1].split())


TAKEN = [
    ("llamacpp", "dtype", ("float32", "bfloat16"), ""),
    ("llamacpp", "quantization", ("Q8_0", "Q4_0"), ""),
    ("vllm", "dtype", ("float32", "bfloat16"), "--dtype"),
    ("tgi", "quantization", ("awq", "gptq"), "--quantize"),
]


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize(("engine", "factor", "values", "own"), TAKEN)
def test_an_engine_is_to_be_restarted_only_with_a_flag_that_it_takes(
    two_runs, capsys, engine, factor, values, own, attached
):
    """llama.cpp's file has its data type: `--dtype float32` would change nothing."""
    folders, change = two_runs
    for which, value in enumerate(values):
        identity = Identity(engine, version=str(which), **{factor: value})
        change(which, engine=engine, identity=identity, server=ServerFacts(model="m", attached=attached))
    out = " ".join(compare(capsys, folders)[1].split())
    flag = own if attached else f"--{factor}"
    advice = f"Restart {engine} with {flag} {values[0]}" if own else f"Give the runs the same {factor}"
    assert f"{advice}, or add --vary {factor}." in out


@pytest.mark.parametrize(
    ("asked", "advice"), [("awq", "without --quantization"), (None, "without -- -q awq")]
)
def test_a_value_that_is_the_lack_of_a_setting_is_no_word_of_its_flag(two_runs, capsys, asked, advice):
    """`--quantization none` is refused by vLLM; what the server's own default is, is no word either."""
    folders, change = two_runs
    quantized = {
        "settings": (Setting("quantization", asked, None, "awq"), Setting("dtype", None, None, "float16")),
        "argv": ("vllm", "-q", "awq"),
    }
    for which, facts in enumerate(({"argv": ("vllm",)}, quantized)):
        kind = ("none", "awq")[which]
        identity = Identity("vllm", version=str(which), quantization=kind, dtype="float16" if which else None)
        argv = ("burstline", "run", "--", "-q", "awq") if which else ()
        server = ServerFacts(model="m", attached=False, **facts)
        change(which, engine="vllm", argv=argv, identity=identity, server=server, title="a load")
    out = " ".join(compare(capsys, folders)[1].split())
    assert f"Restart vllm {advice}, or add --vary quantization." in out
    assert "Give the runs the same dtype, or add --vary dtype." in out


def follow(capsys, folders) -> tuple[int, str]:
    """The last answer of `compare` when every --vary that it advises is added; it advises none twice."""
    varied: list[str] = []
    while True:
        flags = [word for name in varied for word in ("--vary", name)]
        code, out, err = compare(capsys, folders, *flags)
        assert not err
        advised = set(re.findall(r"add --vary ([a-z-]+)", " ".join(out.split())))
        assert not advised & {*varied}
        if not advised:
            return code, " ".join(out.split())
        varied += sorted(advised)


@pytest.mark.parametrize("engines", [("vllm", "vllm"), ("vllm", "sglang")])
@pytest.mark.parametrize("factor", VARIED)
def test_each_advised_vary_leads_to_a_ranking(two_runs, capsys, factor, engines):
    """Of two engines `--vary cpu` once gave up the engine, and advised `--vary engine`."""
    folders, change = two_runs
    for which, facts in enumerate(VARIED[factor]):
        change(which, **{"engine": engines[which], **facts})
    change(1, title="another load")
    code, out = follow(capsys, folders)
    if engines == ("vllm", "vllm"):
        assert code == 0
        assert "this compares loads" in out
    else:
        assert "The workload differs" in out
        assert "Give every engine the same load" in out


LOADS = {
    "burst": (60, 8, LoadSpec(salt="5eed")),
    "open loop": (60, 8, LoadSpec(salt="5eed", rate=2.0, arrival=parse_arrival("constant"))),
    "closed loop": (60, 8, LoadSpec(salt="5eed", concurrency=4)),
    "for a time": (48, 8, LoadSpec(salt="5eed", concurrency=4, duration_s=15.0)),
    "short replies": (60, 4, LoadSpec(salt="5eed")),
}


def loaded(run: Path, folder: Path, name: str, engine: str = "vllm") -> Path:
    """A run of one of LOADS."""
    n, output_tok, asked = LOADS[name]
    another(run, folder, later_ns=len(name), engine=engine, title=name, asked=asked)
    made = open_run(folder)
    gap_ns = 500_000_000 if asked.rate else 0
    shape = Shape(Lengths(512, 512), Lengths(output_tok, output_tok))
    made.save_plan(
        make_plan(shape, [k * gap_ns / 1e9 for k in range(n)], vocabulary_from_size(32_000), seed=0)
    )
    rows = [later(row, k * gap_ns) for k, row in enumerate(synthetic.records(n=n, output_tok=output_tok))]
    made.save("records.parquet", [tables.record_table(rows)])
    write_json(folder / "summary.json", summarize_run(open_run(folder)).to_json())
    summary = open_run(folder).summary
    write_json(folder / "summary.json", replace(summary, verdict=Verdict(State.VALID)).to_json())
    return folder


def later(record, by_ns: int):
    names = ("due_ns", "dispatched_ns", "sent_ns", "headers_ns", "answer_ns", "closed_ns")
    times = {name: getattr(record, name) + by_ns for name in names}
    return replace(record, token_ns=[at + by_ns for at in record.token_ns], **times)


@pytest.mark.parametrize("pair", list(combinations(LOADS, 2)), ids=" and ".join)
def test_two_loads_of_one_engine_are_compared_when_told_and_no_advice_says_the_opposite(
    burst_run, tmp_path, capsys, pair
):
    """`--vary workload` was advised, and answered with "give every engine the same load"."""
    folders = [loaded(burst_run.path, tmp_path / name, name) for name in pair]
    assert compare(capsys, folders)[0] == 4
    code, out = follow(capsys, folders)
    assert code == 0
    assert "COMPARABLE: The loads differ, so this compares loads." in out
    assert "the same load" not in out
    assert re.match(r"vllm workload (\S+ ?\S*) vs (\S+ ?\S*): ", out), "names that fit a table"


def test_two_rates_are_a_sweep_and_two_loads_when_told(burst_run, tmp_path, capsys, monkeypatch):
    n, output_tok, asked = LOADS["open loop"]
    monkeypatch.setitem(LOADS, "faster", (n, output_tok, replace(asked, rate=3.0)))
    folders = [loaded(burst_run.path, tmp_path / name, name) for name in ("open loop", "faster")]
    assert compare(capsys, folders)[1].startswith("vllm: 2 loads from 2 to 3 req/s")
    code, out, *_ = compare(capsys, folders, "--vary", "workload")
    assert code == 0
    assert out.startswith("vllm workload 2 req/s vs 3 req/s: ")


def test_loads_that_are_compared_on_purpose_say_in_what_they_differ(burst_run, tmp_path, capsys, monkeypatch):
    """Two of concurrency 4 were "load A" and "load B", with the slots that each had named nowhere."""
    n, output_tok, asked = LOADS["closed loop"]
    titles, folders = ("60 requests, concurrency 4", "48 requests, 4 at a time"), []

    def change(which: int, **facts) -> None:
        run = open_run(folders[which])
        run.save_manifest(replace(run.manifest, **facts))

    for which, (title, count) in enumerate(zip(titles, (n, 48), strict=True)):
        monkeypatch.setitem(LOADS, title, (count, output_tok, replace(asked, requests=count, seed=which)))
        folders.append(loaded(burst_run.path, tmp_path / title[:2], title, "llamacpp"))
        argv = ("llama-server", "-np", ("4", "8")[which], "-t", "1")
        server = ServerFacts(model="m", attached=False, argv=argv)
        change(which, server=server, targets=("ttft.p50<=9s",) * which)
    out = " ".join(compare(capsys, folders, "--vary", "workload")[1].split())
    assert out.startswith("llamacpp workload 60-request load vs 48-request load: ")
    told = "in --requests (60 and 48), --seed (0 and 1), --slo (none and ttft.p50<=9s), flags of the server"
    assert f"The loads differ on purpose, {told} (-np 4 and -np 8): a difference may" in out
    for which in (0, 1):
        change(which, server=ServerFacts(model="m"), targets=(), asked=asked)
    out = " ".join(compare(capsys, folders, "--vary", "workload")[1].split())
    assert "The loads differ on purpose, only in --requests (60 and 48): a difference may" in out


def test_two_engines_under_two_loads_are_not_led_to_vary_the_load(burst_run, tmp_path, capsys):
    engines = {"burst": "vllm", "closed loop": "sglang"}
    folders = [loaded(burst_run.path, tmp_path / name, name, engine) for name, engine in engines.items()]
    code, out = follow(capsys, folders)
    assert code == 4
    assert "--vary" not in out
    assert "Next: give every engine the same load with the same seed." in out
    assert "same load" in compare(capsys, folders, "--vary", "workload")[1]


def test_a_limit_that_no_run_reached_is_no_difference(two_runs, capsys):
    folders, change = two_runs
    limited(change, 0, 256)
    limited(change, 1, 512)
    change(1, engine="reference")
    out = compare(capsys, folders)[1]
    assert "The max-num-seqs differs" not in out
    assert "NOT-COMPARABLE" not in out


def test_a_factor_that_does_not_differ_is_refused(two_runs, capsys):
    folders, change = two_runs
    limited(change, 0, 8)
    limited(change, 1, 16)
    code, _, err = compare(capsys, folders, "--vary", "dtype")
    assert code == 2
    assert "they differ in max-num-seqs" in err


def test_a_run_is_not_compared_with_itself_or_with_a_copy(two_runs, tmp_path, capsys):
    folders, change = two_runs
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    open_run(copy).save_manifest(replace(open_run(copy).manifest, usd_per_hour=2.0))  # as `report` does
    for again in (folders[0], copy):
        code, out, err = compare(capsys, [folders[0], again])
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert f"{again} is {folders[0]} again" in err
    change(1, engine="reference")
    assert compare(capsys, folders)[0] == 0


def test_a_reader_who_leaves_does_not_make_an_inconclusive_comparison_a_clean_one(two_runs, monkeypatch):
    folders, change = two_runs
    change(1, title="another load")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as gone:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", gone)
        assert cli.main(["compare", *map(str, folders)]) == 4


def test_one_run_alone_is_refused(two_runs, capsys):
    folders, _ = two_runs
    assert compare(capsys, folders[:1])[0] == 2


def test_a_page_over_repeats_among_the_folders_is_passed_over(two_runs, tmp_path, capsys):
    folders, change = two_runs
    change(1, engine="reference")
    (page := tmp_path / "a-repeats").mkdir()
    (page / "comparison.json").write_text("{}")
    assert compare(capsys, [*folders, page])[0] == 0


@pytest.mark.drawn
def test_a_comparison_is_written_as_a_page_as_markdown_and_as_json(two_runs, tmp_path, capsys):
    folders, change = two_runs
    change(1, engine="reference")
    for shape in ("html", "markdown", "json"):
        code, _, _ = compare(capsys, folders, "--format", shape, "--out", str(tmp_path / shape))
        assert code == 0
    page = (tmp_path / "html").read_text()
    assert "first/report.html" in page
    ids = set(re.findall(r' id="([^"]+)"', page))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= ids
    assert not re.search(r'(?:src|href)="https?://', page)
    assert "| Number | Unit | vllm | reference | vllm vs reference |" in (tmp_path / "markdown").read_text()
    (cell,) = orjson.loads((tmp_path / "json").read_bytes())["cells"]
    assert cell["numbers"]["TTFT p50"]["vllm"]["unit"] == "s"


def test_the_same_runs_give_the_same_page(two_runs, tmp_path, capsys):
    folders, change = two_runs
    change(1, engine="reference")
    for name in "ab":
        compare(capsys, folders, "--format", "html", "--out", str(tmp_path / name))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_contenders_are_named_by_engine_and_by_a_letter_only_where_command_line_work_or_machine_differ():
    def manifest(engine: str, *argv: str) -> Manifest:
        return Manifest(engine=engine, workload="x", server=ServerFacts(argv=("x", *argv)))

    plain, again = (manifest("vllm", "--port", port) for port in ("1", "2"))
    other = manifest("vllm", "--port", "3", "--enforce-eager")
    assert labels_of([plain, again, manifest("tgi")]) == ["vllm", "vllm", "tgi"]
    assert labels_of([plain, other, again]) == ["vllm A", "vllm B", "vllm A"]
    assert labels_of([plain, replace(plain, title="another load")]) == ["vllm A", "vllm B"]
    assert labels_of([plain, replace(plain, host=HostFacts(cpu="another"))]) == ["vllm A", "vllm B"]


# ---- repeats


@pytest.fixture(scope="module")
def repeated(burst_run, tmp_path_factory):
    """Four runs of `vllm`, three of `tgi` which takes a quarter longer; every run a little different."""
    parent, random = tmp_path_factory.mktemp("repeats"), np.random.default_rng(5)
    found: dict[str, list[Path]] = {}
    for engine, slower, n in (("vllm", 1.0, 4), ("tgi", 1.25, 3)):
        for k in range(n):
            folder = another(burst_run.path, parent / f"{engine}-{k}", 10 * n + k, engine=engine)
            run = open_run(folder)
            factor = slower * float(np.exp(0.01 * random.normal()))
            rows = [stretched(row, factor) for row in synthetic.records(n=60, output_tok=8, seed=k)]
            run.save("records.parquet", [tables.record_table(rows)])
            write_json(run.path / "summary.json", summarize_run(open_run(folder)).to_json())
            found.setdefault(engine, []).append(folder)
    return found


def stretched(record, factor: float):
    times = {name: int(getattr(record, name) * factor) for name in ("headers_ns", "answer_ns", "closed_ns")}
    return replace(record, token_ns=[int(at * factor) for at in record.token_ns], **times)


def numbers(capsys, folders) -> tuple[dict, dict]:
    """The cell of the comparison, and its first contrast by title."""
    code, out, _ = compare(capsys, folders, "--format", "json")
    assert code == 0
    (cell,) = json.loads(out)["cells"]
    return cell, cell["contrasts"][0]["numbers"]


def test_repeats_that_agree_tell_who_is_faster_with_the_ratio_and_its_interval(repeated, capsys):
    cell, found = numbers(capsys, [*repeated["vllm"], *repeated["tgi"]])
    for title in ("TTFT p50", "E2E p50", "Output"):
        ratio = found[title]["ratio"]
        assert found[title]["answer"] == "different"
        assert ratio["low"] < (1 / 1.25 if title == "Output" else 1.25) < ratio["high"]
        assert cell["best"][title] == "vllm"
        assert 0 < found[title]["noise"] < 0.15
    assert found["TTFT p99"] == {"answer": None, "absent": "p99 needs 662 samples, there are 60"}
    assert "Student's t between runs" in cell["numbers"]["TTFT p50"]["vllm"]["note"]


def test_the_same_systems_repeats_have_no_winner(repeated, tmp_path, capsys):
    folders = [*repeated["vllm"][:2], *(shutil.copytree(f, tmp_path / f.name) for f in repeated["vllm"][2:4])]
    for folder in folders[2:]:
        run = open_run(folder)
        run.save_manifest(replace(run.manifest, engine="tgi"))
    cell, found = numbers(capsys, folders)
    assert {found[title]["answer"] for title in ("TTFT p50", "E2E p50", "Output")} == {"inconclusive"}
    assert not any(cell["best"].values())
    assert found["TTFT p50"]["more_runs"] > 0


def test_one_run_each_is_inconclusive_and_says_how_to_decide(repeated, capsys):
    code, out, _ = compare(capsys, [repeated["vllm"][0], repeated["tgi"][0]])
    assert code == 0
    assert "one run each does not show the noise, so nothing here is significant" in " ".join(out.split())
    assert "--repeats 3" in out
    assert "A/A noise" not in out


def test_it_is_said_in_one_sentence_and_one_table(repeated, capsys):
    _, out, _ = compare(capsys, [*repeated["vllm"], *repeated["tgi"]], "--format", "markdown")
    assert "**vllm is 1.2" in out
    assert "| vllm | tgi | vllm vs tgi | A/A noise |" in out
    assert re.search(r"\| 1\.2\dx faster 97\.5% CI \[1\.\d+, 1\.\d+\] different \|", out)


def spoil(folder: Path, state: str, advice: str = "") -> None:
    summary = json.loads((folder / "summary.json").read_text())
    summary["verdict"] = {
        "state": state,
        "reasons": [{"code": "x", "text": "So.", "advice": advice}],
        "warnings": [],
    }
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("state", "ranked"), [("CLIENT-BOUND", True), ("NOT-STATIONARY", False), ("FAILED", False)]
)
def test_one_run_of_several_decides_as_it_would_alone(repeated, tmp_path, capsys, state, ranked):
    spoilt = shutil.copytree(repeated["vllm"][0], tmp_path / "spoilt")
    spoil(spoilt, state)
    folders = [spoilt, *repeated["vllm"][1:], *repeated["tgi"]]
    code, out, _ = compare(capsys, folders, "--format", "json")
    (cell,) = json.loads(out)["cells"]
    assert code == (0 if ranked else 4)
    assert any(cell["best"].values()) == ranked
    assert len(cell["runs"]["vllm"]) == 4


def test_a_disturbed_run_is_compared_only_when_told_and_its_state_is_named(two_runs, capsys):
    folders, change = two_runs
    change(1, engine="reference")
    spoil(folders[1], "DISTURBED")
    code, out, _ = compare(capsys, folders)
    assert code == 4
    assert "DISTURBED: " in out
    code, out, _ = compare(capsys, folders, "--anyway")
    assert code == 0
    assert "1 of 2 runs is DISTURBED (reference)" in out


def test_a_percentile_that_late_reads_made_unreliable_is_left_out_and_the_others_are_compared(
    repeated, tmp_path, capsys
):
    folder = shutil.copytree(repeated["vllm"][0], tmp_path / "late")
    summary = json.loads((folder / "summary.json").read_text())
    summary["grades"]["ttft"]["p50"]["grade"] = "unreliable"
    (folder / "summary.json").write_text(json.dumps(summary))
    cell, found = numbers(capsys, [folder, *repeated["vllm"][1:], *repeated["tgi"]])
    assert "the client was too late in late: ttft p50 is unreliable" in found["TTFT p50"]["absent"]
    assert cell["best"]["TTFT p50"] is None
    assert found["E2E p50"]["answer"] == "different"


# ---- engines that cheat, live: each is run beside an honest one and found out


def fired(server: TruthRig, out: Path, *, salt: str = "5eed") -> Path:
    """The run that 80 requests of 64 -> 8 tokens at the server left behind."""
    load = ("--requests", "80", "--prompt-tokens", "64", "--output-tokens", "8", "--salt", salt)
    where = ("--engine", "truth", "--url", server.url, "--out", str(out), "-q")
    done = subprocess.run(
        [sys.executable, "-m", "burstline", "run", *where, *load],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode in (0, 4), done.stderr  # 4: a server that refuses requests fails its run, too
    return max(out.iterdir(), key=lambda run: run.stat().st_mtime_ns)


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Path:
    with truth_server() as server:
        return fired(server, tmp_path_factory.mktemp("honest"))


def verdict(capsys, *runs: Path) -> tuple[int, dict]:
    code = cli.main(["compare", *map(str, runs), "--format", "json"])
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    return code, cell


def codes(cell: dict) -> set[str]:
    return {reason["code"] for reason in cell["reasons"]}


@pytest.mark.slow
def test_an_engine_that_serves_from_its_cache_is_found_out(honest, tmp_path, capsys):
    with truth_server(setup=TruthSetup(prefix_cache=True)) as server:
        fired(server, tmp_path)
        cheat = fired(server, tmp_path)
    code, cell = verdict(capsys, honest, cheat)
    assert (code, cell["state"]) == (4, "NOT-COMPARABLE")
    assert "cache-truth" in codes(cell)
    assert not any(cell["best"].values())


@pytest.mark.slow
def test_an_engine_that_stops_early_is_found_out(honest, tmp_path, capsys):
    with truth_server(Script(n_tok=5, finish="stop")) as server:
        cheat = fired(server, tmp_path)
    code, cell = verdict(capsys, honest, cheat)
    assert (code, cell["state"]) == (4, "NOT-COMPARABLE")
    assert {"output-tokens", "finish-reasons"} <= codes(cell)
    assert "failures" not in codes(cell)


@pytest.mark.slow
def test_an_engine_that_refuses_load_is_found_out_and_no_faster_for_it(honest, tmp_path, capsys):
    with truth_server(Script(ttft_s=1.0), setup=TruthSetup(max_in_flight=60)) as server:
        cheat = fired(server, tmp_path)
    code, cell = verdict(capsys, honest, cheat)
    assert (code, cell["state"]) == (4, "NOT-COMPARABLE")
    (refusal,) = [reason for reason in cell["reasons"] if reason["code"] == "failures"]
    assert "HTTP 503" in refusal["text"]
    assert ttft(honest, "p90")["point"] is not None
    assert ttft(cheat, "p50")["point"] >= 0.199
    assert "infinitely late" in ttft(cheat, "p90")["absent"]


def ttft(run: Path, p: str) -> dict:
    return json.loads((run / "summary.json").read_text())["metrics"]["ttft"][p]


def test_starts_of_one_container_are_repeats_and_another_image_is_a_difference(two_runs, capsys):
    folders, change = two_runs

    def start(which: int, image: str, *flags: str) -> None:
        name = ("--name", f"burstline-{which}", "-p", f"127.0.0.1:{which}:{which}", "-v", f"/runs/{which}:/r")
        argv = ("docker", "run", *name, image, "--port", str(which), *flags)
        change(which, engine="vllm", server=ServerFacts(model="m", attached=False, argv=argv, image=image))

    for which in (0, 1):
        start(which, "vllm:1")
    assert "REPEATS" in compare(capsys, folders)[1]
    start(1, "vllm:2")
    assert compare(capsys, folders)[1].startswith("vllm image vllm:1 vs vllm:2: ")
    start(1, "vllm:1", "-tp", "2")
    assert compare(capsys, folders)[1].startswith("vllm tensor-parallel-size default vs 2: ")
