"""Model folders made on the spot are what engines and the workload take for models."""

import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from burstline import cli
from burstline.models.model_folder import (
    GGUF_FILE,
    MARKER,
    add_missing_formats,
    config_like,
    made_notes,
    make_model,
    tokenizer_of,
)
from burstline.models.weights import (
    FORMATS,
    Tensor,
    _sharded,
    encoded,
    n_bytes_of,
    tensors_of,
    write_weights,
)
from burstline.roofline.model.families import bundled_models, read_config
from burstline.servers.reference.weights import ModelConfig, assemble, safetensors_source
from burstline.workloads.chat import template_of
from burstline.workloads.prompts import vocabulary_of_folder
from burstline.workloads.request import WorkloadError


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", "tiny", formats=FORMATS, dtype="float32")


def test_the_embedded_engine_serves_the_made_weights(tiny):
    config = ModelConfig.from_json(json.loads((tiny / "config.json").read_text()))
    source = safetensors_source(tiny)
    assert source is not None
    weights = assemble(config, source)
    assert weights.embed.shape == (8192, 256)
    assert weights.embed.std() == pytest.approx(0.02, rel=0.01)
    assert np.all(weights.norm == 1)
    assert config.eos_ids == (2,)


def test_the_tokenizer_has_every_id_of_the_model_and_gives_text_back(tiny):
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 8192
    text = "Grüße, 世界! bada " * 3
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_prompts_are_drawn_from_all_ids_but_the_special_ones(tiny):
    vocabulary = vocabulary_of_folder(tiny)
    assert vocabulary is not None
    assert vocabulary.ids[0] == 3
    assert len(vocabulary.ids) == 8192 - 3


@pytest.fixture(scope="module")
def gguf_file(tiny: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(tiny / GGUF_FILE)


def test_a_gguf_file_holds_the_same_weights_with_the_rows_of_q_and_k_interleaved(tiny, gguf_file):
    theirs = {tensor.name: np.array(tensor.data) for tensor in gguf_file.tensors}
    ours = load_file(tiny / "model.safetensors")
    assert len(theirs) == len(ours)
    np.testing.assert_array_equal(theirs["token_embd.weight"], ours["model.embed_tokens.weight"])
    np.testing.assert_array_equal(
        theirs["blk.1.ffn_down.weight"], ours["model.layers.1.mlp.down_proj.weight"]
    )
    # 4 heads of 64: the halves of a head, 32 rows apart, become neighbours.
    q = ours["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(theirs["blk.0.attn_q.weight"][[64, 65, 66]], q[[64, 96, 65]])
    k = ours["model.layers.0.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(theirs["blk.0.attn_k.weight"][[64, 65]], k[[64, 96]])


def test_a_gguf_file_holds_the_shape_and_every_token_in_order(tiny, gguf_file):
    def value(key: str):
        return gguf_file.fields[key].contents()

    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    assert value("tokenizer.ggml.tokens") == [tokenizer.id_to_token(k) for k in range(8192)]
    assert value("tokenizer.ggml.token_type")[:4] == [3, 3, 3, 1]
    assert len(value("tokenizer.ggml.merges")) == 8192 - 256 - 3
    shape = ("block_count", "embedding_length", "attention.head_count_kv", "context_length", "vocab_size")
    assert [value(f"llama.{key}") for key in shape] == [2, 256, 2, 4096, 8192]


@pytest.mark.slow
def test_vectors_of_a_half_precision_gguf_file_are_float32_as_llama_cpp_needs_them(tmp_path):
    folder = make_model(tmp_path / "m", "tiny", formats=("gguf",))
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(folder / GGUF_FILE).tensors}
    assert types["blk.0.attn_norm.weight"] == types["output_norm.weight"] == "F32"
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == "BF16"
    assert not list(folder.glob("*.safetensors"))


def test_a_made_folder_gets_the_format_that_it_lacks_with_the_same_weights(tiny, tmp_path):
    folder = make_model(tmp_path / "m", "tiny", dtype="float32")
    assert add_missing_formats(folder, FORMATS) == FORMATS
    assert add_missing_formats(folder, FORMATS) == ()
    for name in ("model.safetensors", GGUF_FILE):
        assert (folder / name).read_bytes() == (tiny / name).read_bytes()
    assert "its weights are random" in made_notes(folder)[0]
    (folder / GGUF_FILE).unlink()
    (folder / MARKER).unlink()
    assert add_missing_formats(folder, FORMATS) == ()


@pytest.mark.parametrize("n_ids", [300, pytest.param(32_000, marks=pytest.mark.slow)])
def test_a_vocabulary_is_trained_to_exactly_its_size_without_padding(n_ids):
    tokenizer = tokenizer_of(n_ids)
    assert tokenizer.get_vocab_size() == n_ids
    assert "<unused0>" not in tokenizer.get_vocab()


def test_every_bundled_model_has_a_config_of_its_architecture():
    for name in bundled_models():
        config = config_like(name)
        assert config["architectures"][0].endswith(("ForCausalLM", "LMHeadModel")), name
        assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


@pytest.mark.parametrize(
    "name", ["llama-2-7b", "llama-2-70b", "mistral-7b", "qwen2.5-7b", "qwen3-8b", "tiny"]
)
def test_the_tensors_hold_as_many_parameters_as_the_roofline_counts(name):
    config = config_like(name)
    n_params = n_bytes_of(tensors_of(config, name)) // 2
    shape = read_config(config, name)
    assert n_params == shape.params()


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path):
    tensors = [Tensor("a.weight", (8, 16), "bfloat16"), Tensor("b.bias", (4,), "bfloat16")]
    files = []
    for k, seed in enumerate((0, 0, 1)):
        (folder := tmp_path / str(k)).mkdir()
        write_weights(folder, tensors, seed)
        files.append((folder / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_what_is_too_large_for_one_file_is_sharded_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr("burstline.models.weights._sharded", lambda tensors: _sharded(tensors, 600))
    tensors = [Tensor(f"{k}.weight", (8, 16), "float32") for k in range(3)]
    write_weights(tmp_path, tensors, seed=0)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == [tensor.name for tensor in tensors]
    loaded = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert {values.shape for values in loaded.values()} == {(8, 16)}
    assert index["metadata"]["total_size"] == 3 * 8 * 16 * 4


def test_bfloat16_is_rounded_to_nearest():
    values = np.float32([1.0, 1.00390625, -1.01171875, 0.02])
    back = (np.frombuffer(encoded(values, "bfloat16"), "<u2").astype("<u4") << 16).view("<f4")
    assert np.abs(back - values).max() <= 2**-8


def test_a_disk_without_room_is_refused_with_the_bytes(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(WorkloadError, match=r"the weights take 7,096,832 bytes, .* has 10,000 free"):
        make_model(tmp_path / "m", "tiny", formats=("safetensors",))
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--like", "lama-2-7b"], "llama-2-7b"),
        (["--like", "opt-6.7b", "--weights"], "leave --weights out"),
        (["--like", "opt-6.7b", "--format", "gguf"], "llama, mistral, qwen2, qwen3"),
    ],
)
def test_what_cannot_be_made_is_said_in_a_line(tmp_path, capsys, argv, words):
    assert cli.main(["make-model", str(tmp_path / "m"), *argv]) == 2
    assert words in capsys.readouterr().err


def test_without_the_gguf_package_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert cli.main(["make-model", str(tmp_path / "m"), "--like", "tiny", "--format", "both"]) == 2
    assert "pip install gguf" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_a_folder_that_is_there_is_never_written_over(tiny, capsys):
    before = (tiny / "config.json").stat().st_mtime_ns
    assert cli.main(["make-model", str(tiny), "--like", "tiny"]) == 2
    assert cli.main(["make-model", str(tiny), "--like", "tiny", "--unless-exists"]) == 0
    assert "left as it is" in capsys.readouterr().out
    assert (tiny / "config.json").stat().st_mtime_ns == before


def test_readers_are_told_that_weights_are_random(tiny, tmp_path):
    (note,) = made_notes(tiny)
    assert "its weights are random" in note
    assert made_notes(tmp_path) == ()
    (tmp_path / MARKER).write_text(json.dumps({"made_like": "llama-2-7b", "weights": "none"}))
    assert "no weights of its own" in made_notes(tmp_path)[0]


def test_a_made_folder_can_be_asked_for_chats(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "tiny", formats=())
    template = template_of(folder)
    assert template is not None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert template(messages) == "ab"
