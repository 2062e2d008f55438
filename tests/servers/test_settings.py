"""One vocabulary of settings: what each engine is sent for it, and what is read back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

from burstline import cli
from burstline.servers.identity import Identity
from burstline.servers.messages import HttpReply
from burstline.servers.registry import ENGINES
from burstline.servers.settings import Setting, Settings, plain, spell
from burstline.workloads.options import flag_of
from burstline.workloads.request import WorkloadError
from tests.servers.golden import GOLDEN, golden_reply

GONE = "http://127.0.0.1:1"
ALL_ALIKE = Settings(
    max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=4096, dtype="float16",
    tensor_parallel_size=2, prefix_cache=False, gpu_memory_utilization=0.9,
)  # fmt: skip

SPELLED = {
    "vllm": "--max-num-seqs 256 --max-num-batched-tokens 8192 --max-model-len 4096 --dtype float16 "
    "--tensor-parallel-size 2 --no-enable-prefix-caching --gpu-memory-utilization 0.9",
    "tgi": "--max-batch-size 256 --max-batch-prefill-tokens 8192 --max-total-tokens 4096 "
    "--max-input-tokens 4095 --dtype float16 --num-shard 2 --cuda-memory-fraction 0.9",
    "lightllm": "--running_max_req_size 256 --batch_max_tokens 8192 --max_req_total_len 4096 "
    "--data_type fp16 --tp 2 --disable_dynamic_prompt_cache --mem_fraction 0.9",
    "sglang": "--max-running-requests 256 --chunked-prefill-size 8192 --context-length 4096 --dtype float16 "
    "--tp-size 2 --disable-radix-cache --mem-fraction-static 0.9",
}


@pytest.mark.parametrize("name", SPELLED)
def test_one_set_of_settings_is_spelled_in_each_engines_own_words(name: str) -> None:
    engine = ENGINES[name]
    words = spell(engine.title, engine.settings, ALL_ALIKE, ())
    assert " ".join(words.arguments) == SPELLED[name]
    assert words.environment == ({"PREFIX_CACHING": "0"} if name == "tgi" else {})
    assert set(words.sent) == set(ALL_ALIKE.asked)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("vllm", Settings(cuda_graphs=0), "--enforce-eager"),
        ("vllm", Settings(cuda_graphs=512), "--max-cudagraph-capture-size 512"),
        ("tgi", Settings(cuda_graphs=40), "--cuda-graphs 1,2,4,8,16,32"),
        ("tgi", Settings(cuda_graphs=0), "--cuda-graphs 0"),
        ("tgi", Settings(kv_cache_dtype="fp8"), "--kv-cache-dtype fp8_e4m3fn"),
        ("lightllm", Settings(cuda_graphs=1024), "--graph_max_batch_size 1024"),
        ("vllm", Settings(dtype="bf16"), "--dtype bfloat16"),
        ("sglang", Settings(dtype="half", kv_cache_dtype="fp8"), "--dtype float16 --kv-cache-dtype fp8_e4m3"),
        ("sglang", Settings(cuda_graphs=512), "--cuda-graph-max-bs-decode 512"),
        ("sglang", Settings(cuda_graphs=0), "--disable-cuda-graph"),
        ("lightllm", Settings(cuda_graphs=0), "--disable_cudagraph"),
        ("reference", Settings(cuda_graphs=0), ""),
        ("vllm", Settings(dtype="auto", kv_cache_dtype="auto"), "--dtype auto --kv-cache-dtype auto"),
        ("tgi", Settings(dtype="auto", kv_cache_dtype="auto"), ""),
        ("llamacpp", Settings(kv_cache_dtype="auto"), ""),
        ("lightllm", Settings(dtype="bf16", kv_cache_dtype="int8"), "--data_type bf16 --llm_kv_type int8kv"),
        ("lightllm", Settings(prefix_cache=True), ""),
        ("llamacpp", Settings(max_num_seqs=8), "-np 8"),
        ("reference", Settings(dtype="float32", prefix_cache=False), "--no-enable-prefix-caching"),
        ("trtllm", Settings(max_num_seqs=8, tensor_parallel_size=2), "--max_batch_size 8 --tp_size 2"),
    ],
)
def test_settings_that_engines_spell_in_ways_of_their_own(name: str, settings: Settings, words: str) -> None:
    engine = ENGINES[name]
    assert " ".join(spell(engine.title, engine.settings, settings, ()).arguments) == words


@pytest.mark.parametrize(
    ("name", "settings", "what"),
    [
        ("tgi", Settings(pipeline_parallel_size=2), "TGI does not support --pipeline-parallel-size 2"),
        ("tgi", Settings(dtype="float32"), "TGI does not support --dtype float32"),
        (
            "lightllm",
            Settings(pipeline_parallel_size=2),
            "does not support --pipeline-parallel-size 2",
        ),
        ("llamacpp", Settings(kv_cache_dtype="fp8"), "llama.cpp does not support --kv-cache-dtype fp8"),
        ("vllm", Settings(kv_cache_dtype="int8"), "vLLM does not support --kv-cache-dtype int8"),
        ("sglang", Settings(kv_cache_dtype="float16"), "SGLang does not support --kv-cache-dtype float16"),
        (
            "sglang",
            Settings(max_num_batched_tokens=8192, chunked_prefill=False),
            "one flag, --chunked-prefill-size, for --max-num-batched-tokens 8192 and --chunked-prefill off",
        ),
        ("reference", Settings(dtype="bfloat16"), "does not support --dtype bfloat16"),
        ("truth", Settings(max_num_seqs=8), "does not support --max-num-seqs 8"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_in_one_line(name: str, settings: Settings, what: str) -> None:
    engine = ENGINES[name]
    with pytest.raises(WorkloadError) as error:
        spell(engine.title, engine.settings, settings, ())
    assert what in str(error.value)
    assert "\n" not in str(error.value)


def test_a_flag_of_the_engines_own_wins_over_the_setting() -> None:
    engine = ENGINES["vllm"]
    words = spell(engine.title, engine.settings, ALL_ALIKE, ("--max-num-seqs=32", "--dtype", "float32"))
    assert "256" not in words.arguments
    assert "--dtype" not in words.arguments
    assert "max_num_seqs" not in words.sent


def test_what_the_engine_says_stands_beside_what_was_asked() -> None:
    identity = Identity("vllm", max_num_seqs=128, dtype="bfloat16", cuda_graphs="off", prefix_cache=True)
    asked = Settings(max_num_seqs=256, dtype="bf16", prefix_cache=False, cuda_graphs=0)
    rows = {
        row.name: row for row in ENGINES["vllm"].settings_read(identity, asked, {"dtype": "--dtype bf16"})
    }
    assert (rows["dtype"].asked, rows["dtype"].sent, rows["dtype"].actual) == (
        "bfloat16",
        "--dtype bf16",
        "bfloat16",
    )
    assert [name for name, row in rows.items() if row.differs] == ["max_num_seqs", "prefix_cache"]
    assert (rows["prefix_cache"].asked, rows["prefix_cache"].actual) == ("off", "on")
    assert not rows["cuda_graphs"].differs


@pytest.mark.parametrize(
    ("name", "asked", "actual", "differs"),
    [
        ("cuda_graphs", "512", "up to 512", False),
        ("cuda_graphs", "512", "up to 256", True),
        ("cuda_graphs", "512", "on", False),
        ("cuda_graphs", "512", "off", True),
        ("cuda_graphs", "0", "off", False),
        ("dtype", "auto", "bfloat16", False),
        ("kv_cache_dtype", "fp8", "fp8_e4m3", False),
        ("kv_cache_dtype", "fp8", "fp8_e5m2", True),
        ("quantization", "awq", "awq_marlin", False),
        ("quantization", "awq", "gptq", True),
    ],
)
def test_only_another_value_than_was_asked_differs(name: str, asked: str, actual: str, differs: bool) -> None:
    assert Setting(name, asked, None, actual).differs is differs


def test_lightllms_and_tgis_own_words_for_the_kv_cache_are_read_as_ours() -> None:
    def info(path: str) -> HttpReply:
        body = {"/get_server_info": b'{"llm_kv_type": "int8kv", "data_type": "bf16"}'}.get(path, b"{}")
        return HttpReply(200, {}, body)

    assert ENGINES["lightllm"].identify(info, "").kv_cache_dtype == "int8"
    log = "Args {\n    kv_cache_dtype: Some(\n        Fp8e4m3fn,\n    ),\n}"
    assert ENGINES["tgi"].identify(info, log).kv_cache_dtype == "fp8_e4m3"


RECORDED = {
    "tgi": (
        {"/info": "tgi/info.http"},
        "tgi/server.log",
        (
            "max_num_batched_tokens 4096, max_model_len 4096, dtype bfloat16, kv_cache_dtype bfloat16, "
            "quantization none, prefix_cache off, chunked_prefill on, gpu_memory_utilization 1.0, "
            "cuda_graphs off"
        ),
    ),
    "lightllm": (
        {"/get_server_info": "lightllm/server_info.http", "/v1/models": "lightllm/models.http"},
        "lightllm/logs/start_ok.log",
        (
            "max_num_seqs 8, max_num_batched_tokens 512, max_model_len 512, dtype bfloat16, "
            "kv_cache_dtype bfloat16, quantization none, tensor_parallel_size 1, data_parallel_size 1, "
            "expert_parallel off, prefix_cache on, chunked_prefill on, gpu_memory_utilization 0.8, "
            "cuda_graphs up to 256"
        ),
    ),
    "vllm": (
        {
            "/version": "vllm/version.http",
            "/v1/models": "vllm/models.http",
            "/metrics": "vllm/metrics.prom",
        },
        "vllm/start.log",
        (
            "max_model_len 2048, dtype bfloat16, kv_cache_dtype bfloat16, quantization none, "
            "tensor_parallel_size 1, pipeline_parallel_size 1, data_parallel_size 1, prefix_cache on, "
            "chunked_prefill on, gpu_memory_utilization 0.92, cuda_graphs off"
        ),
    ),
    "sglang": (
        {
            "/server_info": "sglang/server_info.http",
            "/model_info": "sglang/model_info.http",
            "/v1/models": "sglang/models.http",
            "/metrics": "sglang/metrics.http",
        },
        None,
        (
            "max_num_seqs 4096, max_num_batched_tokens 4096, max_model_len 4096, tensor_parallel_size 1, "
            "pipeline_parallel_size 1, data_parallel_size 1, expert_parallel off, prefix_cache off, "
            "chunked_prefill on, gpu_memory_utilization 0.1, cuda_graphs off"
        ),
    ),
    "llamacpp": (
        {"/props": "llamacpp/props.http", "/v1/models": "llamacpp/models.http"},
        None,
        "max_num_seqs 2, max_model_len 768, dtype bfloat16, quantization none",
    ),
}
"""By engine: the recorded replies and the log of one start, and every setting that is read out of them.

The engines that run on a CPU are read live, by `tests/burstline/test_suite_live.py`."""


def read_back(name: str) -> dict[str, str | None]:
    """The settings that are read from the recorded start, by name."""
    if name not in RECORDED:
        return {}
    paths, log, _ = RECORDED[name]

    def get(path: str) -> HttpReply:
        if path not in paths:
            return HttpReply(404, {}, b"{}")
        if paths[path].endswith(".http"):
            return golden_reply(paths[path])
        return HttpReply(200, {}, (GOLDEN / paths[path]).read_bytes())

    text = (GOLDEN / log).read_text(errors="replace") if log else ""
    rows = ENGINES[name].settings_read(ENGINES[name].identify(get, text), Settings(), {})
    return {row.name: row.actual for row in rows}


@pytest.mark.parametrize("name", RECORDED)
def test_settings_are_read_back_from_a_recorded_start(name: str) -> None:
    assert ", ".join(f"{key} {value}" for key, value in read_back(name).items()) == RECORDED[name][2]


SAMPLES: dict[str, tuple[object, ...]] = {
    "max_num_seqs": (256,),
    "max_num_batched_tokens": (8192,),
    "max_model_len": (4096,),
    "dtype": ("bfloat16", "float32"),
    "kv_cache_dtype": ("fp8", "q8_0"),
    "quantization": ("NAME",),
    "tensor_parallel_size": (2, 1),
    "pipeline_parallel_size": (2,),
    "data_parallel_size": (2,),
    "expert_parallel": (True,),
    "prefix_cache": (False,),
    "chunked_prefill": (False, True),
    "gpu_memory_utilization": (0.9,),
    "cuda_graphs": (512,),
}
"""By setting a value to send; where an engine refuses it, the next."""
COLUMNS = ("vllm", "sglang", "tgi", "lightllm", "llamacpp", "trtllm", "transformers")


def sent(name: str, setting: str) -> str:
    """What an engine is sent for the sample of a setting: its arguments, else its environment."""
    engine = ENGINES[name]
    for value in SAMPLES[setting]:
        with suppress(WorkloadError):
            words = spell(engine.title, engine.settings, Settings(**{setting: value}), ()).sent[setting]
            return f"{plain(value)}: default" if words == "its default" else f"`{words}`"
    return "–"


def table_rows() -> list[str]:
    """The table of docs/engines.md: by setting, what each engine is sent and what is read back."""
    told = {name: read_back(name) for name in COLUMNS}
    head = ["setting", *(ENGINES[name].title for name in COLUMNS)]
    rows = [head, ["---"] * len(head)]
    for setting in SAMPLES:
        cells = []
        for name in COLUMNS:
            value = told[name].get(setting)
            cells.append(sent(name, setting) + ("" if value is None else f" → {value}"))
        rows.append([f"`{flag_of(setting)}`", *cells])
    return [f"| {' | '.join(row)} |" for row in rows]


def test_every_setting_has_a_row_in_the_table_of_the_documentation() -> None:
    """Prints setting -> flags sent -> value read back, as `python -m tests.servers.test_settings` does."""
    rows = table_rows()
    print("\n".join(rows))
    assert list(SAMPLES) == [row.name for row in fields(Settings)]
    assert "\n".join(rows) in (GOLDEN.parents[1] / "docs" / "engines.md").read_text("utf-8")


SILLY: tuple[tuple[tuple[str, ...], str], ...] = (
    (("--dtype", "float12"), "--dtype float12: expected one of"),
    (("--max-num-seqs", "0"), "--max-num-seqs 0: expected at least 1"),
    (("--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization 1.5: expected a share above 0"),
    (("--cuda-graphs", "-1"), "--cuda-graphs -1: expected at least 0"),
    (("--dtype", "bfloat16"), "does not support --dtype bfloat16"),
    (
        ("--url", "http://127.0.0.1:1", "--max-num-seqs", "4"),
        "--max-num-seqs would be ignored: --url names",
    ),
    (
        ("--url", "http://127.0.0.1:1", "--", "--max-num-seqs", "4"),
        "-- --max-num-seqs 4 would be ignored",
    ),
    (("--url", "http://127.0.0.1:1", "--port", "8000"), "--port would be ignored"),
    (("--engine", "reference", "--prefix-cache", "maybe"), "expected on or off, not 'maybe'"),
    (("--engine", "reference", "--engine", "vllm"), "--engine is given twice"),
    (("--engine", "vlm"), "unknown engine 'vlm'"),
    (("--engine", "openai"), "--engine openai needs --url URL"),
    (("--engine", "vllm"), "--engine vllm needs a model"),
    (("--url", "127.0.0.1:8000"), "--url 127.0.0.1:8000"),
    (("--url", "ftp://host"), "--url ftp://host"),
    (("--engine", "reference", "--port", "70000"), "there is no port 70000"),
    (("--engine", "vllm", "--model", "./nowhere"), "--model ./nowhere is not a folder"),
    (("--engine", "reference", "--vocab-size", "0"), "--vocab-size 0"),
)
"""What somebody may type about engines and URLs by mistake, and what the one line says."""


@pytest.mark.parametrize(("words", "said"), SILLY)
def test_silly_inputs_about_engines_are_one_line_and_exit_code_2_before_anything_is_written(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = words.index("--") if "--" in words else len(words)
    argv = ["run", "--out", str(tmp_path / "runs"), "--requests", "5", *words[:at], *words[at:]]
    try:
        code = cli.main(argv)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith("usage:")]
    assert code == 2, lines
    assert said in lines[0]
    assert len(lines) <= 2  # the second names the help
    assert not (tmp_path / "runs").exists()


if __name__ == "__main__":
    print("\n".join(table_rows()))
