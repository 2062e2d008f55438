"""Which servers are called impossible, live: never an honest one, always one that does less than asked."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from burstline import cli
from burstline.measure.record.rundir import Run, open_run
from burstline.roofline.reconcile.reconciliation import EXCEEDED
from burstline.servers.engines.vllm import PYTHON_VARIABLE
from burstline.servers.host import process
from burstline.servers.host.ready import wait_ready
from burstline.servers.launch import LaunchOptions
from burstline.servers.messages import Target
from burstline.servers.registry import ENGINES
from tests.burstline.calibrated import calibrated
from tests.burstline.inside import burstline
from tests.servers.lives import of
from tests.servers.tiny_model import CONFIG, make_tiny_model
from tests.truth.rig import truth_server
from tests.truth.script import Script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("without_page")]

MOE = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
EAGER = ("--enforce-eager",)
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'
WRONG_OR_MISSING = {
    "nothing stated": (),
    "one device": ("--tp", "1"),
    "two replicas": ("--dp", "2"),
    "speculation denied": ("--draft-tokens", "0"),
    "speculation claimed": ("--draft-tokens", "4"),
    "the bits that it has": ("--quant", "fp32"),
    "a small token budget": ("--token-budget", "64"),
    "a huge token budget": ("--token-budget", "1000000"),
    "skewed experts": ("--expert-share", "0.5"),
    "uniform experts": ("--expert-share", "1"),
}


def fired(out: Path, *argv: str) -> Run:
    _, said = burstline("run", "-q", "--out", out, *argv)
    runs = list(out.glob("*/manifest.json"))
    assert runs, said
    run = calibrated(open_run(runs[0].parent))
    assert run.summary is not None, said
    return run


def condemned(run: Run) -> list[str]:
    """What of the run its verdict calls impossible."""
    summary = run.summary.to_json()
    if summary["roofline"].get("code") == EXCEEDED:  # measured beside other tests: it condemns no server
        return []
    assert "absent" not in summary["roofline"], summary["roofline"]
    suspicions = [each["what"] for each in summary["roofline"]["suspicions"]]
    by_verdict = [reason for reason in summary["verdict"]["reasons"] if reason["code"] == "beats-the-ceiling"]
    assert bool(suspicions) == bool(by_verdict)
    return suspicions


def judged_with(run: Run, copy: Path, *facts: str) -> list[str]:
    """The same run under other facts."""
    shutil.copytree(run.path, copy)
    assert cli.main(["report", str(copy), *facts]) == 0
    judged = open_run(copy)
    assert judged.manifest.hardware is not None
    assert bool(judged.manifest.hardware.stated) == bool(facts)
    return condemned(judged)


# ---- honest servers


def _model(folder: Path, **other: object) -> Path:
    model = make_tiny_model(folder)
    (model / "config.json").write_bytes(orjson.dumps(CONFIG | other))
    return model


THOROUGH = (
    pytest.mark.skipif(PYTHON_VARIABLE not in os.environ, reason=f"{PYTHON_VARIABLE} names no vLLM"),
    pytest.mark.thorough,
)


@contextmanager
def _served(engine, config, args, folder):
    """The URL and the model of a server of its own."""
    # Products of a CPU are measured in 32 bits only: such a model, so that there is a ceiling to beat.
    bits = {"dtype": "float32", "torch_dtype": "float32"}
    model, port = _model(folder / "model", **config, **bits), process.free_port()
    adapter, url = ENGINES[engine], f"http://127.0.0.1:{port}"
    options = LaunchOptions(str(model), "127.0.0.1", port, "tiny", folder, None, args)
    with process.start(adapter.launch(options), folder / "server.log") as server:
        wait_ready(adapter, server, Target(url, "tiny"), timeout_s=300)
        yield url, model


@contextmanager
def _living(lives):
    yield lives("vllm").url, lives.model


@pytest.mark.parametrize(
    ("engine", "config", "args"),
    [
        pytest.param("reference", {}, (), id="embedded"),
        of("vllm", None, ()),
        pytest.param(
            "vllm", {}, (*EAGER, "--speculative-config", NGRAM), id="vllm-speculating", marks=THOROUGH
        ),
        pytest.param("vllm", MOE, EAGER, id="vllm-experts", marks=THOROUGH),
    ],
)
def test_an_honest_server_is_never_condemned_whatever_is_wrong_or_unknown_about_it(
    tmp_path, engine, config, args, lives
):
    """Attached as an endpoint of which only the API is known, on the one core that was named."""
    here = _living(lives) if config is None else _served(engine, config, args, tmp_path)
    with here as (url, model):
        where = ("--engine", "openai", "--url", url, "--tokenizer", str(model))
        load = ("--requests", "24", "--prompt-tokens", "256", "--output-tokens", "32")
        on = ("--device", "cpu", "--model-config", str(model))
        run = fired(tmp_path / "runs", *where, *load, *on)
    outcomes = run.record_table.to_pandas()["outcome"].value_counts().to_dict()
    assert outcomes == {"ok": 24}, outcomes
    assert condemned(run) == []
    verdicts = {
        name: judged_with(run, tmp_path / f"copy{k}", *facts)
        for k, (name, facts) in enumerate(WRONG_OR_MISSING.items())
    }
    assert {name: found for name, found in verdicts.items() if found} == {}


# ---- servers of known truth: Llama-2-7B on a slow device, so that a busy test machine makes no cheat honest

SLOW = """
id = "slow"
peak_flops_per_s = { bf16 = 20e12, fp16 = 20e12 }
levels = [{ name = "memory", capacity_bytes = 80e9, bytes_per_s = 1e12 }]
links = [{ scope = "node", kind = "NVLink", n_devices = 8, bytes_per_s = 300e9 }]
"""
KNOWN = ("--tp", "1", "--quant", "bf16", "--kv-dtype", "bf16", "--draft-tokens", "0")
N, PROMPT_TOK = 8, 1024
PROMPT_S = 0.7
"""One prompt at the peak: 2 x 6.7e9 FLOPs a token. A pass over the weights takes 13.5 ms."""


def _queued(first_s: float) -> list[Script]:
    """Each prompt is computed after the one before."""
    return [Script(ttft_s=(i + 1) * first_s, gaps_s=(0.03,)) for i in range(N)]


def _at_truth(folder: Path, scripts: list[Script], device_toml: str = SLOW) -> Run:
    device = folder / "slow.toml"
    device.write_text(device_toml)
    with truth_server(scripts) as server:
        where = ("--engine", "truth", "--url", server.url)
        load = ("--requests", str(N), "--prompt-tokens", str(PROMPT_TOK), "--output-tokens", "16")
        return fired(folder / "runs", *where, *load, "--device", str(device), "--model-config", "llama-2-7b")


def test_a_server_as_fast_as_its_hardware_allows_is_not_condemned(tmp_path):
    run = _at_truth(tmp_path, _queued(1.05 * PROMPT_S))
    assert condemned(run) == []
    assert judged_with(run, tmp_path / "known", *KNOWN) == []


@pytest.mark.parametrize(
    ("scripts", "unstated"),
    [
        pytest.param([Script(ttft_s=0.06, gaps_s=(0.03,))] * N, False, id="caches-prompts"),
        pytest.param(_queued(PROMPT_S / 8), False, id="cuts-prompts-to-an-eighth"),
        pytest.param([Script(ttft_s=0.001, gaps_s=(1e-4,))] * N, True, id="computes-nothing"),
    ],
)
def test_a_server_that_does_less_than_was_asked_is_condemned(tmp_path, scripts, unstated):
    """Once its devices and its bits are stated; one that computes nothing even where nothing is."""
    # With nothing stated, eight devices share the prompts: on a tenth of the peak that is 0.9 s.
    run = _at_truth(tmp_path, scripts, SLOW.replace("20e12", "2e12") if unstated else SLOW)
    assert not unstated or condemned(run)
    assert judged_with(run, tmp_path / "known", *KNOWN)
