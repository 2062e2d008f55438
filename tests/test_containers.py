"""Containers without a daemon: the compose file as compose reads it, flags that engines document, scripts."""

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
from tests.docker_host import compose, with_plugin

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
    "reference": """
        --host --port --model --max-model-len --max-num-seqs --max-num-batched-tokens
        --no-enable-prefix-caching
    """,
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
def test_a_profile_is_what_its_server_needs_the_server_and_a_burst_that_waits_for_it(services, profile):
    server, burst, prepare = (services[name.format(profile)] for name in ("{}", "burstline-{}", "prepare-{}"))
    own = [name for name, s in services.items() if s["profiles"] == [profile]]
    assert own == [f"prepare-{profile}", profile, f"burstline-{profile}"]
    assert server["depends_on"] == {f"prepare-{profile}": {"condition": "service_completed_successfully"}}
    assert burst["depends_on"] == {profile: {"condition": "service_healthy"}}
    assert prepare["command"][0] == profile
    assert server["pid"] == burst["pid"] == "service:processes"
    for each in (prepare, burst):
        assert each["user"] == "${BURSTLINE_USER:-1000:1000}"
    for each in (server, burst, prepare):
        assert "${MODELS:-models}:/models:ro" in each["volumes"]
    # A bind of the long form is not made by the daemon, as root, where the folder is missing.
    assert burst["volumes"][-1] == {"type": "bind", "source": "./runs", "target": "/runs"}
    assert burst["stop_grace_period"] == "10m"
    assert burst["environment"]["BURSTLINE_SERVER_IMAGE"] == server["image"]


@pytest.mark.parametrize("profile", PROFILES)
def test_no_health_check_runs_during_a_load(services, profile, tmp_path):
    """The first check waits for the server; every later one sleeps."""
    check = services[profile]["healthcheck"]
    assert (check["interval"], check["timeout"], check["retries"]) == ("1s", "1h", 1)
    asked, slept = tmp_path / "asked", tmp_path / "slept"
    for name, text in (
        ("sleep", f'echo "$@" >>{slept}'),
        ("python3", f"echo >>{asked}"),
        ("curl", f"echo >>{asked}"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = check["test"][1].replace("/tmp/ready", str(tmp_path / "ready"))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for _ in range(3):
        subprocess.run(["sh", "-c", script], env=env, check=True)
    assert asked.read_text() == "\n"
    assert slept.read_text() == "1h\n1h\n"


@pytest.mark.parametrize("profile", PROFILES)
def test_every_flag_of_a_server_is_one_that_it_documents(services, profile):
    used = {word for word in words(services[profile]) if word.startswith("--")}
    assert used <= set(FLAGS[profile].split())
    assert {"--port"} < used


def test_servers_are_started_so_that_requests_are_comparable(services):
    """Events with their own tokens only, an end of text that is never sampled, the model in its place."""
    assert "--incremental-streaming-output" in words(services["sglang"])
    tgi = words(services["tgi"])
    assert tgi[tgi.index("--model-id") + 1] == "/generated/endless"
    burst = words(services["burstline-tgi"])
    assert burst[burst.index("--tokenizer") + 1] == "/generated/endless"
    assert services["vllm"]["entrypoint"] == ["vllm", "serve"]
    assert words(services["vllm"])[0] == "/generated/tiny"
    assert "--no-enable-prefix-caching" in words(services["reference"])


@pytest.mark.parametrize("profile", sorted(VARIABLES))
def test_every_variable_of_a_server_is_one_that_it_documents(services, profile):
    environment = services[profile]["environment"]
    assert set(environment) == VARIABLES[profile]
    assert environment["HF_TOKEN"] == "${HF_TOKEN:-}"


@pytest.mark.parametrize("profile", PROFILES)
def test_the_burst_is_a_command_line_that_burstline_takes(services, profile):
    import argparse

    from burstline.verbs.arguments import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments("run", parser)
    verb, *flags = words(services[f"burstline-{profile}"])
    args = parser.parse_args(flags)
    assert verb in cli.VERBS
    assert args.engine in ENGINES
    assert [url.reveal() for url in args.url] == [f"http://{profile}:8000"]


@pytest.mark.parametrize("profile", ON_GPU)
def test_servers_on_gpus_reserve_one_and_have_room_to_share_memory(services, profile):
    (device,) = services[profile]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "device_ids": ["${GPUS:-0}"], "capabilities": ["gpu"]}
    assert services[profile]["shm_size"].endswith("g")
    assert f"{profile}-cache:/root/.cache" in services[profile]["volumes"]
    (watched,) = services[f"burstline-{profile}"]["deploy"]["resources"]["reservations"]["devices"]
    assert watched == {**device, "capabilities": ["utility"]}


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


def copied() -> set[str]:
    """What the Dockerfile copies of what is sent to the daemon."""
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return {name for name in " ".join(copies).split() if name.partition("/")[0] in sent}


def test_what_the_image_is_made_of_is_the_whole_package(tmp_path):
    """A wheel is built from it, and nothing else."""
    for name in copied() - {"scripts/prepare-model.sh"}:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", "dist"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    inside = {name for name in ZipFile(wheel).namelist() if name.startswith("burstline/")}
    files = filter(Path.is_file, (ROOT / "burstline").rglob("*"))
    assert inside == {str(file.relative_to(ROOT)) for file in files if file.suffix != ".pyc"}


def test_every_module_and_script_that_compose_names_is_in_the_image(services):
    named = [word for each in services.values() for word in each.get("entrypoint", ())]
    modules = [named[k + 1] for k, word in enumerate(named) if word == "-m"]
    assert modules == ["burstline.servers.reference"]
    for name in modules:
        assert (ROOT / name.replace(".", "/") / "__main__.py").is_file()
    scripts = {Path(word).name for word in named if word.endswith(".sh")}
    assert {f"scripts/{name}" for name in scripts} <= copied()
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert "USER burstline" in dockerfile.splitlines()
    assert "ARG CA_BUNDLE=" in dockerfile


# ---- as compose reads it, and what the scripts do


@pytest.fixture(params=[pytest.param("2", marks=pytest.mark.containers), "1.29"])
def configured(request):
    """What a version of compose makes of the file with some variables: services by name."""
    command = compose(request.param)
    if command is None:
        pytest.skip(f"compose {request.param} is not installed")

    def read(profile: str, **variables: str) -> dict:
        env = with_plugin(os.environ) | variables
        argv = [*command, "--profile", profile, "config"]
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return yaml.safe_load(done.stdout)["services"]

    return read


def argv_of(service: dict) -> list[str]:
    return [str(word) for word in words(service)]


def mounts(service: dict) -> dict[str, tuple[str, bool]]:
    """Source and whether it is read-only, by target."""
    found = {}
    for each in service["volumes"]:
        if isinstance(each, str):
            source, target, *mode = each.split(":")
            found[target] = (source, mode == ["ro"])
        else:
            found[each["target"]] = (each["source"], bool(each.get("read_only")))
    return found


# In the order of PROFILES.
SPELLED = {
    "TP": "- - --tensor-parallel-size --num-shard --tp --tp-size",
    "GPU_MEMORY": "- - --gpu-memory-utilization --cuda-memory-fraction --mem_fraction --mem-fraction-static",
    "DTYPE": "- --dtype --dtype --dtype --data_type --dtype",
    "MAX_MODEL_LEN": "--max-model-len --max-model-len --max-model-len --max-total-tokens --max_req_total_len"
    " --context-length",
}


@pytest.mark.parametrize("profile", PROFILES)
def test_what_people_change_is_a_variable(configured, profile):
    """The ten changes: load, lengths, types, own folder, Hub model, TP, GPUs, port, engine flags, data."""
    values = {"TP": "2", "GPU_MEMORY": "0.5", "DTYPE": "float16", "MAX_MODEL_LEN": "2048"}
    changed = configured(
        profile,
        **values,
        MODELS="/data/models",
        MODEL="/models/own",
        HF_CACHE="/home/me/hf",
        DATA="/data/sets",
        GPUS="2,3",
        PORT="9123",
        ENGINE_ARGS="--seed 7",
        BURST="--requests 9 --slo 'ttft_p99<=1s'",
    )
    server, burst = changed[profile], changed[f"burstline-{profile}"]
    argv = argv_of(server)
    assert argv[-2:] == ["--seed", "7"]
    for name, flags in SPELLED.items():
        if (flag := flags.split()[PROFILES.index(profile)]) != "-":
            assert argv[argv.index(flag) + 1] == values[name], name
    if profile != "tgi":
        assert "/models/own" in argv
    assert "/models/own" in argv_of(changed[f"prepare-{profile}"])
    assert argv_of(burst)[-4:] == ["--requests", "9", "--slo", "ttft_p99<=1s"]
    for service in (server, burst, changed[f"prepare-{profile}"]):
        assert mounts(service)["/models"] == ("/data/models", True)
    assert mounts(burst)["/data"] == ("/data/sets", True)
    assert mounts(burst)["/hf"] == ("/home/me/hf", True)
    if profile not in ("reference", "lightllm"):
        assert "/home/me/hf" in {source for source, _ in mounts(server).values()}
    (port,) = server["ports"]
    assert "9123" in str(port)
    assert "127.0.0.1" in str(port)
    if profile in ON_GPU:
        for service in (server, burst):
            (device,) = service["deploy"]["resources"]["reservations"]["devices"]
            assert device["device_ids"] == ["2,3"]


def test_nothing_of_the_users_but_runs_is_mounted_unless_it_is_named(configured):
    mounted = [mounts(each) for each in configured("vllm").values() if "volumes" in each]
    assert {source for each in mounted for source, _ in each.values() if "/" in source} == {
        str(ROOT / "runs")
    }


@pytest.fixture
def prepare(tmp_path):
    """Runs scripts/prepare-model.sh with a folder of this machine as /generated."""

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "GENERATED": str(tmp_path)}
        argv = ["sh", str(ROOT / "scripts/prepare-model.sh"), *words]
        return subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True)

    return call


@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_profile_needs_is_made_and_nothing_else(prepare, services, profile, tmp_path):
    command = services[f"prepare-{profile}"]["command"]
    filled = [
        re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word).replace("/generated", str(tmp_path)) for word in command
    ]
    for _ in range(2):  # it comes more than once
        done = prepare(*filled)
        assert done.returncode == 0, done.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"tiny"} | (
        {"endless"} if profile == "tgi" else set()
    )
    if profile == "tgi":
        served = json.loads((tmp_path / "endless/generation_config.json").read_text())
        assert served["eos_token_id"] == [
            json.loads((tmp_path / "tiny/config.json").read_text())["vocab_size"]
        ]


def test_a_model_of_the_users_own_is_left_as_it_is(prepare, tmp_path):
    own = tmp_path.parent / f"{tmp_path.name}-own"
    own.mkdir()
    (own / "config.json").write_text('{"vocab_size": 5}')
    own.chmod(0o555)
    for profile in PROFILES:
        assert prepare(profile, str(own)).returncode == 0
    assert [each.name for each in own.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("vllm", "/models/none"), "MODELS=FOLDER"),
        (("lightllm", "org/name"), "LightLLM downloads nothing"),
        (("tgi", "org/name"), "TGI needs TGI_MODEL=org/name and TOKENIZER=FOLDER"),
        (("tgi", "org/name", "org/name"), "TOKENIZER=FOLDER"),
        (("tgi", "/", "org/name", "/"), "differ"),
    ],
)
def test_a_combination_that_lacks_something_is_one_line(prepare, words, said, tmp_path):
    done = prepare(*words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


DOCKER = """#!/bin/sh
case "$*" in
"compose version") ;;
version*) echo "Cannot connect to the Docker daemon" >&2; exit "$NO_DAEMON" ;;
*config) printf 'services:\\n  vllm:\\n    image: some/image\\n' ;;
"image inspect"*) exit 1 ;;
pull*) echo "unauthorized" >&2; exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("words", "no_daemon", "runs", "said"),
    [
        ("", "0", "folder", "burst-in-containers.sh PROFILE..."),
        ("vlm", "0", "folder", "no profile 'vlm'; expected of: reference vllm vllm-cpu tgi lightllm sglang"),
        ("vllm", "1", "folder", "no container daemon answers (Cannot connect to the Docker daemon)"),
        ("vllm", "0", "folder", "some/image cannot be pulled"),
        ("vllm", "0", "file", "./runs cannot be written"),
    ],
)
def test_the_script_refuses_what_cannot_run_in_one_line(words, no_daemon, runs, said, tmp_path):
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/burst-in-containers.sh", "docker-compose.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    if runs == "file":
        (tmp_path / "runs").write_text("")
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    argv = ["sh", str(tmp_path / "scripts/burst-in-containers.sh"), *words.split()]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NO_DAEMON": no_daemon}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
