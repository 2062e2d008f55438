"""`run --profile` at real engines on a CPU, product by product against the calibrated CPU. The figures:

    PROFILE_LARGE=1 pytest -m "slow or thorough" -s tests/burstline/test_profile_live.py

Takes about 4 minutes a model and engine, on a machine that does nothing else; BURSTLINE_CALIBRATIONS names a
folder that keeps the calibrations.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import pytest

from burstline.bench.server_session import serving
from burstline.cli import main
from burstline.console.server_options import ServerOptions
from burstline.loadgen.capture.files import TRACES
from burstline.measure.record.rundir import open_run
from burstline.roofline.device.calibration import read_device_file
from burstline.roofline.model.families import load_model
from burstline.roofline.model.shapes import QUANTS, Parallel
from burstline.roofline.predict.predict import Deployment
from burstline.roofline.profile.attribute import UNKNOWN, Profile, profile_of
from burstline.roofline.profile.compare import compare
from burstline.roofline.profile.trace import SentRequest, first_difference, traces_at
from burstline.roofline.reconcile.inputs import Setup
from burstline.roofline.reconcile.reconciliation import OpRow, Profiled
from burstline.servers.reference.steplog import load_steps
from burstline.servers.registry import ENGINES
from burstline.servers.settings import Settings
from tests.burstline.calibrated import calibrate
from tests.servers.lives import Lives, of
from tests.servers.tiny_model import CONFIG, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
MODELS = {
    "310M": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}  # fmt: skip
FIGURES = "PROFILE_LARGE" in os.environ
"""With the printed figures of the documentation: the large model takes a quarter of an hour."""
TRIED = ["tiny", *(MODELS if FIGURES else ())]
HOW_LONG = () if FIGURES else ("--quick",)
"""20 seconds instead of two minutes a model: no assertion is about the predictions."""
SIZES = (1, 8, 32, 128, 512, 2048)
PRODUCTS = ("qkv", "o", "gate_up", "down", "lm_head")
LONE = ("_C::onednn_mm", "aten::mm", "aten::addmm")
"""What a product is in a trace, without the operators around it."""


class Load(NamedTuple):
    n: int
    concurrency: int
    prompt_tok: int
    output_tok: int


LOADS = (
    Load(3, 1, 508, 8),
    Load(16, 8, 64, 8),
    Load(32, 32, 32, 8),
    Load(128, 128, 16, 5),
)


@pytest.fixture(scope="module", params=TRIED)
def model(request, tmp_path_factory, lives) -> Path:
    if request.param == "tiny":
        return lives.model
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / request.param)
    (folder / "config.json").write_bytes(
        orjson.dumps(CONFIG | MODELS[request.param] | {"torch_dtype": "float32"})
    )
    return folder


@pytest.fixture(scope="module")
def cpu(model, lives, tmp_path_factory) -> Path:
    """The device file of one core of this CPU, for the model's products; measured by one worker for all."""
    kept = os.environ.get("BURSTLINE_CALIBRATIONS")
    path = (Path(kept) if kept else lives.of_all_workers) / f"{model.name}.toml"
    if not path.exists():
        made = tmp_path_factory.mktemp("cpu") / path.name
        calibrate("calibrate", *HOW_LONG, "--device", "cpu", "--model", str(model), "--out", str(made))
        shutil.move(made, path)
    return path


@contextmanager
def served(engine: str, model: Path, lives: Lives, folder: Path) -> Iterator[tuple[str, Path]]:
    """The URL of an engine that has the model, and where its profiler writes."""
    life = lives(engine)
    if model == life.model:
        yield life.url, life.traces
        return
    where = ServerOptions(
        model=str(model), profile=Path(), settings=Settings(dtype="float32"), n_concurrent=128
    )
    with serving(ENGINES[engine], where, folder, lambda _: None) as site:
        yield site.target.url, folder / TRACES


@pytest.mark.parametrize("engine", [of("vllm"), of("sglang", marks=[pytest.mark.thorough])])
def test_each_product_of_a_real_engine_against_the_calibrated_cpu(engine, model, cpu, lives, tmp_path):
    shape = load_model(str(model))[0]
    device, calibration = read_device_file(cpu.read_bytes(), cpu)
    setup = Setup(Deployment(shape, QUANTS["fp32"], Parallel(), device), calibration)
    products: list[OpRow] = []
    gaps, unknown = list[float](), list[float]()
    print(f"\n{engine}, {model.name}: {shape.params() / 1e6:.0f} million parameters, {cpu}")
    with served(engine, model, lives, tmp_path) as (url, writes_to):
        files = f"--tokenizer {model} --model-config {model}"
        for i, load in enumerate(LOADS):
            path = profiled(engine, url, writes_to, cpu, load, tmp_path / f"load{i}", files)
            found = open_run(path).summary.profile
            assert isinstance(found, Profiled)
            for sentence in found.sentences:
                print(f"  {load}: {sentence}")
            profile = profile_of(path / "profile", shape, Parallel())
            check_composition(profile, load)
            check_products(profile, path / "profile", shape.n_layers)
            gaps += [1 - sum(step.parts.values()) / step.seconds for step in profile.steps]
            unknown.append(share(profile, UNKNOWN))
            products += typical_products(profile, setup)
    print(
        f"  no operator: {np.median(gaps):.1%} of a step in the median ({min(gaps):.1%} to {max(gaps):.1%})"
    )
    print(
        f"  not attributed, no product among it: {min(unknown):.1%} to {max(unknown):.1%} of a load's steps"
    )
    assert min(gaps) > -0.001
    print_errors(products)
    print_bounds(products)


@pytest.mark.measures
def test_the_embedded_engines_profile_is_its_own_step_log(tmp_path):
    cpu = Path("tests/golden/profile/cpu.toml")  # only its prediction would depend on the machine
    load = Load(32, 8, 64, 16)
    with serving(ENGINES["reference"], ServerOptions(profile=Path()), tmp_path, lambda _: None) as site:
        assert site.launch is not None
        assert site.launch.step_log is not None
        path = profiled("reference", site.target.url, tmp_path / TRACES, cpu, load, tmp_path / "run")
        _, log = load_steps(site.launch.step_log)
    steps = profile_of(path / "profile", load_model("reference")[0], Parallel()).steps
    columns = {name: f"{name}_proj_ns" for name in PRODUCTS[:-1]}
    columns |= {name: f"{name}_ns" for name in ("lm_head", "attention")}
    own = {name: np.array(log[column][-len(steps) :]) / 1e9 for name, column in columns.items()}
    own["step"] = (np.array(log["end_ns"]) - np.array(log["start_ns"]))[-len(steps) :] / 1e9
    for name, own_s in own.items():
        of_profile = [step.seconds if name == "step" else step.parts.get(name, 0.0) for step in steps]
        print(f"  {name:10} profile {sum(of_profile):.4f} s, own step log {own_s.sum():.4f} s")
        assert of_profile == pytest.approx(own_s, rel=0.05)


def profiled(
    engine: str, url: str, writes_to: Path, cpu: Path, load: Load, out: Path, model: str = ""
) -> Path:
    """A run of the load with --profile at a server that runs already."""
    words = f"""
        run -q --no-canary --engine {engine} --url {url} {model}
        --device {cpu} --profile {writes_to} --out {out} --requests {load.n} --concurrency {load.concurrency}
        --prompt-tokens {load.prompt_tok} --output-tokens {load.output_tok}
    """
    assert main(words.split()) in (0, 4)  # 4: of the golden device, this machine may be faster
    (path,) = out.iterdir()
    return path


def check_composition(profile: Profile, load: Load) -> None:
    """The steps are what was sent: every prompt token once, and each decode at its context, step by step."""
    sent = [SentRequest(load.prompt_tok, load.output_tok)] * load.n
    assert first_difference([(step.prompts, step.decodes) for step in profile.steps], sent) is None
    prompt_tok = sum(step.prompts.n_tok for step in profile.steps)
    # SGLang finds the first token of some prompts in its cache.
    assert load.n * (load.prompt_tok - 1) <= prompt_tok <= load.n * load.prompt_tok
    assert sum(step.decodes.n_tok for step in profile.steps) == load.n * (load.output_tok - 1)
    contexts = load.n * sum(load.prompt_tok + k for k in range(1, load.output_tok))
    assert sum(step.decodes.context_tok or 0 for step in profile.steps) == contexts


def check_products(profile: Profile, traces: Path, n_layers: int) -> None:
    """Every product is attributed: as many as the steps must have, and all of their time."""
    for step in profile.steps:
        n_tok = step.prompts.n_tok + step.decodes.n_tok
        assert step.rows == n_tok
        assert step.dtypes == ("fp32",)
        assert set(step.parts) >= {*PRODUCTS, "attention", "cache", "passes"}
    (trace,) = traces_at(traces)
    begin_us, end_us = trace.steps[0].begin_us, trace.steps[-1].end_us
    alone = [e for e in trace.events if e.name in LONE and begin_us <= e.begin_us < end_us]
    assert len(alone) == (4 * n_layers + 1) * len(profile.steps)
    own_s = sum(step.parts[name] for step in profile.steps for name in PRODUCTS)
    assert sum(e.us for e in alone) / 1e6 <= 1.001 * own_s  # SGLang's are inside of aten::linear


def share(profile: Profile, part: str) -> float:
    return sum(step.parts.get(part, 0.0) for step in profile.steps) / sum(s.seconds for s in profile.steps)


def typical_products(profile: Profile, setup: Setup) -> Iterator[OpRow]:
    """Each product at each number of rows, as the median of the steps with so many took it."""
    taken: dict[tuple[str, float], list[OpRow]] = {}
    for step in profile.steps:
        (phase,) = compare(replace(profile, steps=(step,)), setup, 0.0).phases
        for op in phase.ops:
            if op.name in PRODUCTS:
                taken.setdefault((op.name, op.m), []).append(op)
    for ops in taken.values():
        yield replace(ops[0], measured_s=float(np.median([op.measured_s for op in ops])))


def print_errors(products: list[OpRow]) -> None:
    print("  predicted against measured: mean |error| (and with its sign), by product and nearest M")
    print("      M " + "".join(f"{name:>16}" for name in (*PRODUCTS, "all")))
    for size in SIZES:
        near = [op for op in products if size == min(SIZES, key=lambda m: abs(np.log(m / op.m)))]
        cells = []
        for names in (*((name,) for name in PRODUCTS), PRODUCTS):
            errors = [op.predicted_s / op.measured_s - 1 for op in near if op.name in names and op.measured_s]
            cell = f"{np.mean(np.abs(errors)):.1%} ({np.mean(errors):+.1%})" if errors else "-"
            cells.append(f"{cell:>16}")
        print(f"  {size:5} " + "".join(cells))


def print_bounds(products: list[OpRow]) -> None:
    far = [op for op in products if not 0.5 < op.intensity / op.ridge < 2]
    wrong = [op for op in far if op.limit != ("memory" if op.intensity < op.ridge else "compute")]
    print(f"  bound: {len(far) - len(wrong)} of {len(far)} products further than 2x from the ridge agree")
    for op in wrong:
        where = f"{op.intensity:.3g} FLOP/B, the ridge {op.ridge:.3g}"
        print(f"    {op.name} M={op.m:g}: {where}; said to be bound by {op.limit}")
