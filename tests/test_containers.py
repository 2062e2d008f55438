"""The compose file: of the right form, every flag documented, and, where a daemon can run, for real."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from burstline import cli
from burstline.servers.registry import ENGINES
from burstline.servers.settings import DTYPES, KV_DTYPES, Settings, spell
from tests import verdicts
from tests.docker_host import NoDaemonError, compose, container_daemon

ROOT = Path(__file__).parents[1]
PROFILES = ("reference", "vllm-cpu", "vllm", "tgi", "lightllm", "sglang")
ON_GPU = ("vllm", "tgi", "lightllm", "sglang")

# Read in: vLLM 0.32 (`vllm serve`, vllm/engine/arg_utils.py); text-generation-launcher of TGI v3.3.7
# (launcher/src/main.rs); LightLLM 1.2.0 (lightllm/server/api_cli.py); SGLang 0.5.23 (srt/server_args.py).
_VLLM = """
    --host --port --served-model-name --dtype --tensor-parallel-size --max-model-len --max-num-seqs
    --max-num-batched-tokens --gpu-memory-utilization --no-enable-prefix-caching --generation-config
    --enable-prompt-tokens-details --enforce-eager --load-format --seed --quantization
"""
FLAGS = {
    "reference": "--host --port --model --max-num-seqs --max-num-batched-tokens",
    "vllm": _VLLM,
    "vllm-cpu": _VLLM,
    "tgi": """
        --model-id --hostname --port --num-shard --dtype --max-input-tokens --max-total-tokens
        --max-batch-prefill-tokens --max-batch-size --max-concurrent-requests --cuda-memory-fraction
        --prometheus-port --master-port --shard-uds-path --usage-stats --json-output --quantize
    """,
    "lightllm": """
        --model_dir --model_name --host --port --tp --data_type --max_req_total_len --running_max_req_size
        --batch_max_tokens --chunked_prefill_size --mem_fraction --disable_dynamic_prompt_cache
        --disable_cudagraph --graph_max_batch_size
    """,
    "sglang": """
        --model-path --served-model-name --host --port --tp-size --dtype --context-length
        --max-running-requests --max-prefill-tokens --chunked-prefill-size --mem-fraction-static
        --disable-radix-cache --enable-metrics --incremental-streaming-output --random-seed
    """,
}
CACHES = {"HF_TOKEN", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
VARIABLES = {
    "vllm": {*CACHES, "VLLM_NO_USAGE_STATS"},
    "vllm-cpu": {"HF_TOKEN", "VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE"},
    "tgi": {*CACHES, "PREFIX_CACHING"},
    "lightllm": {*CACHES, "LIGHTLLM_LOG_LEVEL"},
    "sglang": {*CACHES, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"},
}


SETTING_VALUES: dict[str, tuple] = {
    "max_num_seqs": (256,),
    "max_num_batched_tokens": (8192,),
    "max_model_len": (4096,),
    "dtype": DTYPES,
    "kv_cache_dtype": KV_DTYPES,
    "quantization": ("fp8",),
    "tensor_parallel_size": (2,),
    "pipeline_parallel_size": (2,),
    "data_parallel_size": (2,),
    "expert_parallel": (True, False),
    "prefix_cache": (True, False),
    "chunked_prefill": (True, False),
    "gpu_memory_utilization": (0.9,),
    "cuda_graphs": (512, 0),
}


@pytest.fixture(scope="module")
def services() -> dict:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


def words(service: dict) -> list[str]:
    """The command line as compose splits it, its variables at their defaults."""
    command = service["command"]
    text = command if isinstance(command, str) else shlex.join(command)
    return shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_a_server_and_a_burst_that_waits_for_its_health(services, profile):
    server, burst = services[profile], services[f"burstline-{profile}"]
    assert [name for name, s in services.items() if s["profiles"] == [profile]] == [
        profile,
        f"burstline-{profile}",
    ]
    assert profile in services["prepare"]["profiles"]
    assert server["healthcheck"]["test"][-1].count("/health") == 1
    assert server["depends_on"] == {"prepare": {"condition": "service_completed_successfully"}}
    assert burst["depends_on"] == {profile: {"condition": "service_healthy"}}
    assert "./runs:/runs" in burst["volumes"]
    assert burst["user"] != "0:0"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_flag_of_a_server_is_one_that_it_documents(services, profile):
    used = {word for word in words(services[profile]) if word.startswith("--")}
    assert used <= set(FLAGS[profile].split())
    assert {"--port"} < used


def test_servers_are_started_so_that_requests_are_comparable(services):
    """Events with their own tokens only, an end of text that is never sampled, the model in its place."""
    assert "--incremental-streaming-output" in words(services["sglang"])
    tgi = words(services["tgi"])
    assert tgi[tgi.index("--model-id") + 1] == "/endless/model"
    assert any(volume.startswith("tgi-model:/endless") for volume in services["tgi"]["volumes"])
    assert services["vllm"]["entrypoint"] == ["vllm", "serve"]
    assert words(services["vllm"])[0] == "/models/tiny"


@pytest.mark.parametrize("profile", sorted(VARIABLES))
def test_every_variable_of_a_server_is_one_that_it_documents(services, profile):
    environment = services[profile]["environment"]
    assert set(environment) == VARIABLES[profile]
    assert environment["HF_TOKEN"] == "${HF_TOKEN:-}"


@pytest.mark.parametrize("profile", PROFILES)
def test_the_burst_is_a_command_line_that_burstline_takes(services, profile):
    import argparse

    from burstline.verbs import run

    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    verb, *flags = words(services[f"burstline-{profile}"])
    args = parser.parse_args(flags)
    assert verb in cli.VERBS
    assert args.engine in ENGINES
    assert args.url == f"http://{profile}:8000"


@pytest.mark.parametrize("profile", ON_GPU)
def test_servers_on_gpus_reserve_one_and_have_room_to_share_memory(services, profile):
    (device,) = services[profile]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert services[profile]["shm_size"].endswith("g")
    assert f"{profile}-cache:/root/.cache" in services[profile]["volumes"]
    (watched,) = services[f"burstline-{profile}"]["deploy"]["resources"]["reservations"]["devices"]
    assert watched["capabilities"] == ["utility"]


@pytest.mark.parametrize("profile", ON_GPU)
def test_images_are_pinned_and_the_ones_that_the_adapters_start(services, profile):
    image = ENGINES[profile].image
    assert image is not None
    assert services[profile]["image"] == image.name
    assert not image.name.endswith(":latest")


def test_engines_that_are_compared_have_the_same_settings(services):
    settings = {
        "vllm": ("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--dtype"),
        "vllm-cpu": ("--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--dtype"),
        "tgi": ("--max-batch-size", "--max-batch-prefill-tokens", "--max-total-tokens", "--dtype"),
        "lightllm": ("--running_max_req_size", "--batch_max_tokens", "--max_req_total_len", "--data_type"),
        "sglang": ("--max-running-requests", "--chunked-prefill-size", "--context-length", "--dtype"),
    }
    found = {
        tuple(words(services[engine])[words(services[engine]).index(flag) + 1] for flag in flags)
        for engine, flags in settings.items()
    }
    assert found == {("1000", "8192", "4096", "bfloat16")}
    lightllm, tgi = words(services["lightllm"]), words(services["tgi"])
    assert lightllm[lightllm.index("--graph_max_batch_size") + 1] == "1000"
    assert tgi[tgi.index("--max-input-tokens") + 1] == "4095"


PARSERS = {
    "vllm": (
        "BURSTLINE_VLLM_PYTHON",
        """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser(prog="vllm"))
names = "max_num_seqs", "max_num_batched_tokens", "dtype", "enable_prefix_caching"
""",
        "1000 8192 bfloat16 False",
    ),
    "sglang": (
        "BURSTLINE_SGLANG_PYTHON",
        """
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang")
ServerArgs.add_cli_args(parser)
names = "max_running_requests", "chunked_prefill_size", "dtype", "disable_radix_cache"
""",
        "1000 8192 bfloat16 True",
    ),
}
_PARSE_EACH = """
import json, sys
for words in json.loads(sys.argv[1]):
    try:
        args = parser.parse_args(words)
        print(*(getattr(args, name) for name in names))
    except SystemExit:
        print("refused:", *words)
"""


def parsed(profile: str, commands: list[list[str]]) -> list[str]:
    """What the engine's own parser makes of each command line."""
    variable, program, _ = PARSERS[profile]
    if variable not in os.environ:
        pytest.skip(f"{variable} names no {profile}")
    python = os.environ[variable]
    env = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    env["LD_LIBRARY_PATH"] = str(Path(python).parents[1] / "lib" / "no-cuda")
    argv = [python, "-c", program + _PARSE_EACH, json.dumps(commands)]
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-len(commands) :]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("profile", PARSERS)
def test_an_engines_own_parser_takes_its_profiles_command_and_every_setting(services, profile):
    engine = ENGINES[profile]
    command = [word for word in words(services[profile]) if word not in ("sglang", "serve")]
    model = ["--model-path", "m"] if profile == "sglang" else []
    each = [
        [*model, *spell(engine.title, engine.settings, Settings(**{name: value}), ()).arguments]
        for name, values in SETTING_VALUES.items()
        for value in values
        if name in engine.settings and engine.settings[name].arguments(value) is not None
    ]
    assert len(each) > len(engine.settings)
    first, *rest = parsed(profile, [command, *each])
    assert first == PARSERS[profile][2]
    assert [line for line in rest if line.startswith("refused:")] == []


def test_burstline_runs_as_nobody_special():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "USER burstline" in lines
    assert "ARG CA_BUNDLE=" in lines


def test_what_the_image_is_made_of_is_the_whole_package(tmp_path):
    """A wheel is built from what the Dockerfile copies of what is sent to the daemon, and nothing else."""
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    for name in set(" ".join(copied).split()) & set(sent):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "dist"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    inside = {name for name in ZipFile(wheel).namelist() if name.startswith("burstline/")}
    files = filter(Path.is_file, (ROOT / "burstline").rglob("*"))
    assert inside == {str(file.relative_to(ROOT)) for file in files if file.suffix != ".pyc"}


@pytest.mark.skipif(compose() is None, reason="neither docker compose nor docker-compose is installed")
def test_compose_itself_accepts_every_profile():
    profiles = [word for profile in PROFILES for word in ("--profile", profile)]
    command = [*(compose() or ()), *profiles, "config"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert {f"burstline-{profile}" for profile in PROFILES} <= set(yaml.safe_load(done.stdout)["services"])


def test_what_is_prepared_for_every_profile_runs(services, tmp_path):
    """The shell and the Python of `prepare`, on folders of this machine."""
    folders = {name: tmp_path / name for name in ("runs", "models", "endless")}
    (script,) = services["prepare"]["command"]
    script = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", script)
    for name, folder in folders.items():
        folder.mkdir()
        script = re.sub(rf"(?<![\w.])/{name}\b", str(folder), script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for _ in range(2):  # `up` comes more than once
        done = subprocess.run(
            ["sh", "-ec", script],
            env={**os.environ, "PATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    served = json.loads((folders["endless"] / "model/generation_config.json").read_text())
    config = json.loads((folders["models"] / "tiny/config.json").read_text())
    assert served["eos_token_id"] == [config["vocab_size"]]


# ---- for real

BURST = "--requests 40 --prompt-tokens 64 --output-tokens 8"


@pytest.fixture(scope="module")
def daemon():
    try:
        with container_daemon() as env:
            yield env
    except NoDaemonError as error:
        pytest.skip(str(error))


@pytest.fixture
def clone(tmp_path) -> Path:
    """A clean checkout, with this machine's certificates beside it for `pip`."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    bundle = Path("/etc/ssl/certs/ca-certificates.crt")
    if bundle.exists():
        shutil.copy(bundle, tmp_path / "clone/ca.crt")
    return tmp_path / "clone"


def run_profile(clone: Path, daemon, profile: str, *command: str, **variables: str) -> str:
    """What compose says; all that it started is taken down again."""
    ca = "ca.crt" if (clone / "ca.crt").exists() else ""
    env = {**daemon, "BURST": BURST, "CA_BUNDLE": ca, **variables}

    def composed(*words: str) -> subprocess.CompletedProcess[str]:
        base = [*(compose() or ()), "--profile", profile]
        return subprocess.run(
            [*base, *words], cwd=clone, env=env, capture_output=True, text=True, timeout=900, check=False
        )

    try:
        done = composed(*command)
        said = done.stdout + done.stderr + composed("logs").stdout
        assert verdicts.done(done.returncode, clone / "runs"), said
        return done.stdout
    finally:
        composed("down", "-v")


def check_report(clone: Path, engine: str) -> None:
    (run,) = (clone / "runs").iterdir()
    assert (run / "report.html").stat().st_size > 50_000
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["engine"] == engine
    assert json.loads((run / "summary.json").read_text())["counts"]["ok"] == 40
    assert run.stat().st_uid == 1000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_reference_profile_leaves_a_report_in_runs(clone, daemon):
    run_profile(clone, daemon, "reference", "run", "--rm", "burstline-reference")
    check_report(clone, "reference")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the image's interpreter is Python 3.11")
def test_the_vllm_cpu_profile_leaves_a_report_in_runs(clone, daemon):
    folders = [Path(word) for word in os.environ.get("PIP_FIND_LINKS", "").split()]
    wheels = [wheel for folder in folders for wheel in folder.glob("torch-*+cpu-cp311-*.whl")]
    if not wheels:
        pytest.skip("no CPU wheel of torch in any folder of PIP_FIND_LINKS")
    (clone / "wheels").mkdir()
    shutil.copy(wheels[0], clone / "wheels")
    ca = ("--build-arg", "CA_BUNDLE=ca.crt") if (clone / "ca.crt").exists() else ()
    image = "burstline-vllm-cpu"
    build = ["docker", "build", "-q", *ca, "-f", "Dockerfile.vllm-cpu", "-t", image, "."]
    subprocess.run(build, cwd=clone, env=daemon, check=True, capture_output=True, timeout=900)
    run_profile(clone, daemon, "vllm-cpu", "run", "--rm", "burstline-vllm-cpu", VLLM_CPU_IMAGE=image)
    check_report(clone, "vllm")
