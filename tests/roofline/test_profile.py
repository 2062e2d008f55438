"""Traces of PyTorch's profiler: recorded of each engine, made by hand for two GPUs, and broken."""

import gzip
import json
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from burstline.errors import RooflineError
from burstline.reports.blocks import Note
from burstline.reports.page.roofline_section import profiled
from burstline.roofline.device.calibration import load_calibration, read_device_file
from burstline.roofline.device.device import load_device
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.predict import Deployment
from burstline.roofline.profile.attribute import COMMUNICATION, UNKNOWN, profile_of
from burstline.roofline.profile.compare import NO_OPERATOR, compare
from burstline.roofline.profile.trace import Group, SentRequest, composition, first_difference
from burstline.roofline.reconcile.inputs import Setup

MODEL = load_model("reference")[0]
H100 = load_device("h100")
PRODUCTS = ("qkv", "o", "gate_up", "down", "lm_head")
RECORDED = Path("tests/golden/profile")
CPU = RECORDED / "cpu.toml"


@pytest.mark.parametrize(
    ("engine", "prompts", "layers", "missing"),
    [
        ("vllm", [128, 896], MODEL.n_layers, set()),
        ("sglang", [256, 767], MODEL.n_layers, set()),
        ("reference", [512], 1, {"passes", "cache"}),  # all layers as one
    ],
)
def test_every_product_of_a_recorded_step_is_attributed(engine, prompts, layers, missing):
    """Recorded at the tiny model on a CPU with `burstline run --profile`, cut to the first steps."""
    path = RECORDED / f"{engine}.json.gz"
    profile = profile_of(path, MODEL, Parallel())
    assert [step.prompts.n_tok for step in profile.steps if step.prompts.n_tok] == prompts
    decodes = [step for step in profile.steps if not step.prompts.n_tok]
    assert decodes
    for step in profile.steps:
        n_tok = step.prompts.n_tok + step.decodes.n_tok
        assert (step.rows, step.n_logits) == (n_tok, step.prompts.n_requests + step.decodes.n_requests)
        assert set(step.parts) >= {*PRODUCTS, "attention", "cache", "passes"} - missing
        assert sum(step.parts.values()) <= 1.0001 * step.seconds
    for step, after in pairwise(decodes):  # each request has a token more of context
        assert after.decodes.context_tok == step.decodes.context_tok + step.decodes.n_requests
    # Every product, whatever module it is of, is in the time of the five.
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if composition(e["name"])]
    alone = ("_C::onednn_mm", "aten::mm", "burstline::matmul")
    products = [e for e in events if e["name"] in alone and any(a <= e["ts"] < b for a, b in spans)]
    assert len(products) == (4 * layers + 1) * len(profile.steps)
    own_s = sum(step.parts[name] for step in profile.steps for name in PRODUCTS)
    # SGLang's are inside of aten::linear, which transposes first.
    assert sum(e["dur"] for e in products) / 1e6 == pytest.approx(own_s, rel=0.05)


def test_a_profile_says_what_is_lost_where_and_what_ran_in_another_type():
    profile = profile_of(RECORDED / "vllm.json.gz", MODEL, Parallel())
    cpu, own = read_device_file(CPU.read_bytes(), CPU)
    setup = Setup(Deployment(MODEL, QUANTS["fp32"], Parallel(), cpu), own)
    found = compare(profile, setup, 0.0)
    prefill, decode = found.phases
    for phase, steps in ((prefill, profile.steps[:2]), (decode, profile.steps[2:])):
        measured = {op.name: op.measured_s for op in phase.ops}
        for name in PRODUCTS if phase is decode else ():  # of one size, unlike the prefills
            seen = [step.parts[name] for step in steps]
            assert min(seen) * 0.99 <= measured[name] <= max(seen) * 1.01
        timed = [op for op in phase.ops if op.measured_s and op.kind != "elementwise"]
        worst, *others = sorted(timed, key=lambda op: op.ideal_s - op.measured_s)
        begin = phase.phase.capitalize()
        lost, *missed = [text for text in found.sentences if text.startswith(f"{begin}: ")]
        first, *after = lost.split("; ")
        assert f"{worst.label} reaches {worst.ideal_s / worst.measured_s:.0%} of" in first
        assert f"{(worst.measured_s - worst.ideal_s) * 1e3:.3g} ms of the step" in first
        assert [text.partition(" reaches")[0] for text in after[:2]] == [op.label for op in others[:2]]
        # A time outside the model's own range is called a miss.
        outside = [op.label for op in timed if not op.low_s <= op.measured_s <= op.high_s]
        assert [label for label in outside if f"{label} took" in " ".join(missed)] == outside
        assert bool(missed) == bool(outside)
    assert decode.step_s == pytest.approx(np.median([step.seconds for step in profile.steps[2:]]), rel=0.2)
    assert decode.rest[NO_OPERATOR] > 0
    assert not any("ran in" in note for note in found.notes)
    other = replace(setup, deployment=replace(setup.deployment, quant=QUANTS["bf16"], device=H100))
    assert any("ran in fp32" in note for note in compare(profile, other, 0.0).notes)


class Gpu:
    """A trace of one rank, event by event: what is launched runs 100 µs later, one kernel after the other."""

    def __init__(self):
        self.events, self.at, self.busy_until, self.n = [], 0.0, 0.0, 0

    def event(self, cat, name, ts, dur, tid=1, **args):
        row = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
        self.events.append(row | {"args": args})

    def kernels(self, launch, *kernels):
        self.n += 1
        self.event("cuda_runtime", launch, self.at + 1, 2, correlation=self.n)
        for name, us in kernels:
            begin = max(self.at + 100, self.busy_until)
            self.event("kernel", name, begin, us, tid=7, correlation=self.n)
            self.busy_until = begin + us

    def op(self, name, dims, *kernels):
        self.event(
            "cpu_op", name, self.at, 10, **{"Input Dims": dims, "Input type": ["c10::BFloat16"] * len(dims)}
        )
        self.kernels("cudaLaunchKernel", *kernels)
        self.at += 20

    def step(self, name, body):
        begin = self.at
        body()
        self.event("user_annotation", name, begin, self.at - begin)
        self.event("gpu_user_annotation", name, begin + 100, self.at - begin, tid=7)

    def write(self, path):
        path.parent.mkdir(exist_ok=True)
        text = json.dumps({"schemaVersion": 1, "traceEvents": self.events, "traceName": "t"})
        path.write_bytes(gzip.compress(text.encode()))
        return path


@pytest.mark.parametrize("faster", [False, True])
def test_a_product_of_a_profile_above_its_ceiling_is_marked(faster):
    profile = profile_of(RECORDED / "vllm.json.gz", MODEL, Parallel())
    cpu, own = read_device_file(CPU.read_bytes(), CPU)
    if faster:
        cpu = replace(cpu, peaks={dtype: peak / 100 for dtype, peak in cpu.peaks.items()})
    found = compare(profile, Setup(Deployment(MODEL, QUANTS["fp32"], Parallel(), cpu), own), 0.0)
    assert bool(found.suspicions) == faster
    notes = [block.text for block in profiled(found) if isinstance(block, Note)]
    assert any("Impossible rate: the product" in note for note in notes) == faster


def layer(rows, reduce_us):
    """The operators of a layer of MODEL on one of two ranks: name, shapes of its inputs, kernels."""
    return [
        ("aten::mm", [[rows, 256], [256, 256]], ("nvjet_qkv", 5)),
        ("_C_cache_ops::reshape_and_cache_flash", [], ("vllm::reshape_and_cache_flash_kernel", 1)),
        ("vllm::unified_attention_with_output", [], ("flash_fwd_splitkv_kernel", 7)),
        ("aten::mm", [[rows, 128], [128, 256]], ("cutlass_gemm_o", 3), ("cublasLt::splitKreduce_kernel", 1)),
        ("c10d::allreduce_", [], ("ncclDevKernel_AllReduce_Sum_bf16", reduce_us)),
        ("_C::fused_add_rms_norm", [], ("vllm::fused_add_rms_norm_kernel", 2)),
        ("aten::linear", [[rows, 256], [688, 256]], ("nvjet_gate_up", 8)),
        ("_C::silu_and_mul", [], ("vllm::act_and_mul_kernel", 2)),
        ("aten::mm", [[rows, 344], [344, 256]], ("nvjet_down", 6)),
        ("c10d::allreduce_", [], ("ncclDevKernel_AllReduce_Sum_bf16", reduce_us)),
    ]  # fmt: skip


def two_ranks(folder, *, one_more=False):
    """A prefill by operators, decodes by a CUDA graph; rank 0 waits 9 µs in each all-reduce for rank 1."""
    for rank, reduce_us in ((0, 14), (1, 5)):
        gpu = Gpu()

        def head(gpu=gpu):
            gpu.op("aten::mm", [[4, 256], [256, 4096]], ("nvjet_head", 9))

        def prefill(gpu=gpu, reduce_us=reduce_us, head=head):
            for name, dims, *kernels in 2 * layer(64, reduce_us):
                gpu.op(name, dims, *kernels)
            head()

        def decode(gpu=gpu, rank=rank, reduce_us=reduce_us, head=head):
            every = [kernel for _, _, *kernels in 2 * layer(4, reduce_us) for kernel in kernels]
            extra = [("nvjet_unknown", 3)] if one_more else []
            gpu.kernels("cudaGraphLaunch", *every, *extra)
            gpu.at += 200 if rank == 0 else 220
            head()

        gpu.step("execute_context_4(64)_generation_0(0)", prefill)
        for _ in range(2):
            gpu.at += 300
            gpu.step("execute_context_0(0)_generation_4(4)", decode)
        gpu.event("python_function", "nothing.py", 0, 1e9)
        gpu.write(folder / f"rank{rank}.pt.trace.json.gz")
    return folder


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("host_17.1716000000000.pt.trace.json", "host_17.1716000009999.pt.trace.json"),
        ("rank0.1716000000000.pt.trace.json.gz", "rank0.1716000009999.pt.trace.json.gz"),
        (
            "dp0_tp0_rank0.1716000000000000001.pt.trace.json",
            "dp0_tp0_rank0.1716000000000000009.pt.trace.json",
        ),
    ],
)
def test_two_captures_of_one_rank_are_no_two_ranks(tmp_path, first, second):
    for name in (first, second, "rank7.1716000000000.pt.trace.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(RooflineError, match=r"holds 2 captures of one process, .*: name one"):
        profile_of(tmp_path, MODEL, Parallel())


def test_kernels_go_to_the_operator_that_launched_them_and_those_of_a_graph_by_their_order(tmp_path):
    profile = profile_of(two_ranks(tmp_path / "t"), MODEL, Parallel(tp=2))
    prefill, *decodes = profile.steps
    assert (prefill.prompts, prefill.rows, prefill.n_logits) == (Group(4, 64), 64, 4)
    expected = {"qkv": 10, "o": 8, "gate_up": 16, "down": 12, "lm_head": 9, "attention": 14, "cache": 2}
    expected |= {"passes": 8, COMMUNICATION: 20}
    for step in (prefill, *decodes):
        assert {name: round(1e6 * s, 6) for name, s in step.parts.items()} == expected
        assert step.seconds >= sum(step.parts.values())
    assert [step.decodes for step in decodes] == [Group(4, 4)] * 2


def test_ranks_are_joined_and_the_slowest_is_shown_with_the_wait_for_it(tmp_path):
    profile = profile_of(two_ranks(tmp_path / "t"), MODEL, Parallel(tp=2))
    setup = Setup(Deployment(MODEL, QUANTS["bf16"], Parallel(tp=2), H100), load_calibration(H100))
    found = compare(profile, setup, 80.0)
    assert any("rank 1 of 2 is the slowest" in note and "0.036 ms" in note for note in found.notes)
    assert any("decodes at 80 tokens" in note for note in found.notes)
    with pytest.raises(RooflineError, match="--tp 2"):
        profile_of(tmp_path / "t", MODEL, Parallel())


def test_products_of_a_graph_that_has_more_than_its_layers_are_not_attributed(tmp_path):
    profile = profile_of(two_ranks(tmp_path / "t", one_more=True), MODEL, Parallel(tp=2))
    parts = profile.steps[1].parts
    assert parts[UNKNOWN] == pytest.approx((4 + 8 + 6 + 3) * 1e-6)
    assert (parts["lm_head"], parts["qkv"]) == pytest.approx((9e-6, 10e-6))


@pytest.mark.parametrize(
    ("name", "prompts", "decodes"),
    [
        ("execute_context_1(128)_generation_7(7)", Group(1, 128), Group(7, 7)),
        (
            "execute_385_context_3(sq384sk400sqsq1sqsk1)_generation_1(sq1sk129sqsq1sqsk129)",
            Group(3, 384, 400),
            Group(1, 1, 129),
        ),
        ("step[EXTEND bs=2 toks=256 c_sq=256 c_sqsq=1 c_sqsk=1 c_sk=300]", Group(2, 256, 300), Group()),
        ("step[EXTEND bs=2 toks=256]", Group(2, 256), Group()),
        ("step[DECODE bs=8 g_sq=8 g_sqsq=8 g_sqsk=1 g_sk=1160]", Group(), Group(8, 8, 1160)),
        ("step[MIXED bs=3 c=1 g=2 c_sq=64 c_sk=64 g_sq=2 g_sk=90]", Group(1, 64, 64), Group(2, 2, 90)),
    ],
)
def test_the_composition_of_a_step_is_read_from_its_annotation(name, prompts, decodes):
    assert composition(name) == (prompts, decodes)
    assert composition(f"{name} more") is None


ENDS = [SentRequest(10, 3), SentRequest(6, 1), SentRequest(20, 2)]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        # Chunks of the third prompt; the second request is done with its first token.
        ([("2 16 16", ""), ("1 7 7", "1 1 11"), ("1 13 20", "1 1 12"), ("", "1 1 21")], None),
        # Prefill apart from decode, of a prefix cache that had 4 tokens of each.
        ([("2 8 16", ""), ("1 16 20", ""), ("", "2 2 32"), ("", "1 1 12")], None),
        # No contexts.
        ([("2 16 -", ""), ("1 7 -", "1 1 -"), ("1 13 -", "1 1 -"), ("", "1 1 -")], None),
        ([("2 16 16", ""), ("", "2 2 18")], "step 2 decodes (requests 2, tokens 2, context 18), but"),
        ([("2 16 16", ""), ("", "1 1 12")], "step 2 decodes (requests 1, tokens 1, context 12"),
        ([("2 16 15", "")], "step 1 computes prompts (requests 2"),  # a chunk of the second with all tokens
        ([("2 9 -", "")], "step 1 computes prompts"),  # not even the first is whole
        ([("3 36 36", ""), ("1 1 1", "")], "by the load's records (requests 0"),
        ([("3 36 36", ""), ("", "2 4 32")], None),  # speculation
    ],
)
def test_steps_are_replayed_from_the_requests_that_were_sent(steps, says):
    def group(text):
        n, tok, context = text.split() if text else ("0", "0", "-")
        return Group(int(n), int(tok), None if context == "-" else int(context))

    found = first_difference([(group(prompts), group(decodes)) for prompts, decodes in steps], ENDS)
    assert found is None if says is None else says in found


def test_steps_without_annotations_end_with_the_head(tmp_path):
    path = next(two_ranks(tmp_path / "t").iterdir())
    trace = json.loads(gzip.decompress(path.read_bytes()))
    trace["traceEvents"] = [e for e in trace["traceEvents"] if "user_annotation" not in e["cat"]]
    (tmp_path / "plain.json").write_text(json.dumps(trace))
    profile = profile_of(tmp_path / "plain.json", MODEL, Parallel(tp=2))
    assert [step.prompts.n_tok for step in profile.steps] == [64, 0, 0]
    assert any("not annotated" in note for note in profile.notes)


def without_shapes(trace):
    for event in trace["traceEvents"]:
        event["args"].pop("Input Dims", None)
    return json.dumps(trace).encode()


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda trace: gzip.compress(json.dumps(trace).encode())[:-40], "is cut or damaged"),
        (lambda trace: json.dumps(trace).encode()[:-100], "is cut: its events do not end"),
        (lambda _: b'{"results": [1, 2]}', "has no traceEvents"),
        (lambda _: b"", "has no traceEvents"),
        (without_shapes, "record_shapes=True"),
        (lambda _: b'{"traceEvents": []}', "holds no matrix product"),
    ],
)
def test_what_is_no_whole_trace_is_refused_in_one_line(tmp_path, made, says):
    path = next(two_ranks(tmp_path / "t").iterdir())
    bad = tmp_path / "bad.json"
    bad.write_bytes(made(json.loads(gzip.decompress(path.read_bytes()))))
    with pytest.raises(RooflineError, match=says) as raised:
        profile_of(bad, MODEL, Parallel(tp=2))
    assert "\n" not in str(raised.value)


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(RooflineError, match="No such file"):
        profile_of(tmp_path / "none.json", MODEL, Parallel())
    with pytest.raises(RooflineError, match="holds no trace"):
        profile_of(tmp_path, MODEL, Parallel())


@pytest.mark.slow
def test_a_large_trace_is_read_in_the_memory_of_what_counts_of_it(tmp_path):
    """Stacks are most of what a profiler writes, and none of it is kept."""
    path = two_ranks(tmp_path / "t") / "rank0.pt.trace.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    frame = {"ph": "X", "cat": "python_function", "name": "x" * 300, "pid": 1, "tid": 1, "ts": 1, "dur": 1}
    trace["traceEvents"] = [frame] * 60_000 + trace["traceEvents"]
    (tmp_path / "large.json").write_text(json.dumps(trace))
    tracemalloc.start()
    profile_of(tmp_path / "large.json", MODEL, Parallel(tp=2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (tmp_path / "large.json").stat().st_size > 20 << 20
    assert peak < 8 << 20
