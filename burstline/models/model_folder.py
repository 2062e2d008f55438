"""Generated model folders: the shape of a known model, a tokenizer of made-up words, random weights.

Weights do not change how fast a dense model runs, so that every engine can be measured with no download. What
was made says so in a `burstline.json` of its own, and runs repeat it.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from burstline.errors import tables_beside
from burstline.models.weights import Tensor, gguf_package, n_bytes_of, tensors_of, write_gguf, write_weights
from burstline.roofline.model.families import bundled_config, bundled_models
from burstline.wording import hint
from burstline.workloads.model_files import read_json
from burstline.workloads.prompts import rng
from burstline.workloads.request import WorkloadError

MARKER: Final = "burstline.json"
TINY: Final = "reference"
"""`tiny` is the embedded engine's own model: 3.5 million parameters."""

GGUF_FILE: Final = "model.gguf"

SPECIAL: Final = ("<unk>", "<s>", "</s>")
_ARCHITECTURES: Final = tables_beside(__file__, "architectures.toml")
_DEFAULTS: Final[dict[str, Any]] = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
"""What the families of `tensors_of` need besides their shape; speed does not depend on it."""


def make_model(
    folder: Path, like: str, *, formats: Sequence[str] = (), seed: int = 0, dtype: str | None = None
) -> Path:
    """The folder, made. WorkloadError where `like` is not known, DIR is taken, or the disk lacks room.

    `formats` are those of its weights, the same values in each. Without any it serves engines that invent
    them (vLLM and SGLang: `--load-format dummy`).
    """
    config = config_like(like, dtype)
    tensors = tensors_of(config, like) if formats else []
    _check_formats(config, like, formats)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WorkloadError(f"{folder} exists and is not an empty folder; name another, or remove it first")
    _check_room(folder, n_bytes_of(tensors) * len(formats))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer_of(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(config))
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write_formats(folder, config, tensors, formats, seed)
    made = {"made_like": like, "weights": "random" if tensors else "none", "seed": seed}
    _write(folder / MARKER, made)
    _write(folder / "config.json", config)  # last: with it the folder is a model
    return folder


def add_missing_formats(folder: Path, formats: Sequence[str]) -> tuple[str, ...]:
    """Writes the weights that a made folder does not have in these formats yet; returns which it wrote.

    A folder that make_model did not write is left as it is: its weights cannot be drawn again.
    """
    made, config = _read(folder / MARKER), _read(folder / "config.json")
    have = {"gguf": any(folder.glob("*.gguf")), "safetensors": any(folder.glob("*.safetensors"))}
    missing = tuple(kind for kind in formats if not have[kind])
    if not made or not config or not missing:
        return ()
    like = str(made["made_like"])
    _check_formats(config, like, missing)
    tensors = tensors_of(config, like)
    _check_room(folder, n_bytes_of(tensors) * len(missing))
    _write_formats(folder, config, tensors, missing, int(made["seed"]))
    _write(folder / MARKER, made | {"weights": "random"})
    return missing


def _check_formats(config: dict[str, Any], like: str, formats: Sequence[str]) -> None:
    if "gguf" in formats:
        gguf_package()
        if config.get("rope_scaling"):  # it needs tensors of its own in the file
            raise WorkloadError(f"--format gguf: {like} scales its positions (rope_scaling): not supported")


def _write_formats(
    folder: Path, config: dict[str, Any], tensors: Sequence[Tensor], formats: Sequence[str], seed: int
) -> None:
    if "safetensors" in formats:
        write_weights(folder, tensors, seed)
    if "gguf" in formats:
        write_gguf(folder / GGUF_FILE, config, tensors, seed)


def made_notes(folder: Path) -> tuple[str, ...]:
    """Notes on a generated model for readers of a run; empty for other models."""
    made = _read(folder / MARKER)
    if not made:
        return ()
    what = "its weights are random" if made.get("weights") == "random" else "it has no weights of its own"
    shape = f"{folder} was made by burstline make-model in the shape of {made.get('made_like')}"
    return (f"{shape}: {what}, its replies are meaningless, its speed is that of a real model of this shape",)


def config_like(like: str, dtype: str | None = None) -> dict[str, Any]:
    """The config.json of a bundled model, of `tiny` or of a folder, with our tokenizer's special ids."""
    known = ["tiny", *bundled_models()]
    if Path(like, "config.json").is_file():
        raw = read_json(Path(like, "config.json"))
    elif like in known:
        raw = bundled_config(TINY if like == "tiny" else like)
    else:
        raise WorkloadError(f"--like {like}: no such model is known; {hint(like, known)}")
    family = raw.get("model_type", "")
    if family not in _ARCHITECTURES and "architectures" not in raw:
        raise WorkloadError(f"--like {like}: model_type {family!r} is not known: {', '.join(_ARCHITECTURES)}")
    default = "bfloat16" if like == "tiny" else raw.get("torch_dtype", "bfloat16")
    return {
        "architectures": raw.get("architectures") or [_ARCHITECTURES[family]],
        **(_DEFAULTS if family in ("llama", "mistral", "qwen2", "qwen3") else {}),
        **raw,
        "torch_dtype": dtype or default,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def tokenizer_of(n_ids: int) -> Tokenizer:
    """A byte-level BPE of exactly `n_ids` ids, trained on made-up words; the first three are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_ids,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_made_up_text(n_ids), trainer)
    missing = n_ids - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<unused{k}>") for k in range(missing)])
    return tokenizer


def _made_up_text(n_words: int) -> Iterator[str]:
    """As many different words as the vocabulary wants, the frequent ones more often: a word gives a merge."""
    random = rng(0, "made-up words")
    syllables = [c + v + e for c in "bcdfghklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "s", "l")]
    drawn = random.integers(0, len(syllables), (n_words, 4))
    n_syllables = random.integers(2, 5, n_words)
    words = ["".join(syllables[k] for k in row[:n]) for row, n in zip(drawn, n_syllables, strict=True)]
    for start in range(0, n_words, 1000):
        yield " ".join(words[start : start + 1000])
    for row in random.zipf(1.3, (500, 40)) % n_words:
        yield " ".join(words[k] for k in row)


def _tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    unk, bos, eos = SPECIAL
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for each in messages %}{{ each['content'] }}{% endfor %}",
        "model_max_length": config.get("max_position_embeddings") or config.get("n_positions"),
    }


def _check_room(folder: Path, n_bytes: int) -> None:
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    if n_bytes > free:
        raise WorkloadError(
            f"the weights take {n_bytes:,} bytes, {above} has {free:,} free; make room, name another disk, "
            "or leave --weights out for engines that generate them"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except WorkloadError:
        return {}


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
