"""Settings that engines share, in one spelling: each adapter says how its engine spells them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from workloads.request import WorkloadError


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user sets of an engine that is started here; None leaves the engine's own default.

    `max_num_seqs`: requests that decode at once. `max_num_batched_tokens`: tokens computed in one step.
    `cuda_graphs`: the largest batch that replays a CUDA graph, 0 for none. `gpu_memory_utilization`: the
    share of the device's memory that the engine may use.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    expert_parallel: bool | None = None
    prefix_cache: bool | None = None
    chunked_prefill: bool | None = None
    gpu_memory_utilization: float | None = None
    cuda_graphs: int | None = None
    enforce_eager: bool | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """The settings that were set, by name."""
        values = {row.name: getattr(self, row.name) for row in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, other: Settings) -> Settings:
        """These, and those of `other` where nothing is set here."""
        return replace(other, **self.asked)


@dataclass(frozen=True, slots=True)
class Spelling:
    """How an engine spells one setting: as arguments, as variables of its environment, or both.

    `flags` are all of its own flags that set it: where a user gave one after `--`, that one wins.
    """

    flags: tuple[str, ...]
    arguments: Callable[[object], tuple[str, ...] | None]
    environment: Callable[[object], Mapping[str, str]] = field(default=lambda _: {})


def valued(flag: str, *others: str) -> Spelling:
    """A flag with a value."""
    return Spelling((flag, *others), lambda value: (flag, str(value)))


def among(flag: str, names: Mapping[str, str], *others: str) -> Spelling:
    """A flag whose values are these alone."""

    def arguments(value: object) -> tuple[str, ...] | None:
        word = names.get(str(value))
        return None if word is None else (flag, word)

    return Spelling((flag, *others), arguments)


def switch(on: tuple[str, ...] | None, off: tuple[str, ...] | None) -> Spelling:
    """Arguments that switch something on and off; None: the engine cannot; (): that is its default."""
    flags = tuple(word for word in (*(on or ()), *(off or ())) if word.startswith("-"))
    return Spelling(flags, lambda value: on if value else off)


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a run: what was asked, what was sent for it, what the engine says that it uses."""

    name: str
    asked: str | None
    sent: str | None
    actual: str | None

    @property
    def differs(self) -> bool:
        """Whether the engine uses another value than was asked; False where no certain value is known."""
        asked, actual = canonical(self.name, self.asked), canonical(self.name, self.actual)
        return None not in (asked, actual) and asked != actual


_PLAIN = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}


def plain(value: object) -> str:
    """A value as one word that can be compared: `bf16` is `bfloat16`, 4,096 is 4096, True is on."""
    if isinstance(value, bool):
        return "on" if value else "off"
    word = str(value).lower().removeprefix("torch.")
    return _PLAIN.get(word, word)


def canonical(name: str, value: str | None) -> str | None:
    """A setting's value as a word to compare: `up to 512` is 512, fp8 is fp8_e4m3; None: no certain value."""
    if value is None:
        return None
    word = plain(value)
    if name == "cuda_graphs":
        word = {"off": "0", "on": "auto"}.get(word, word).removeprefix("up to ")
    elif name == "kv_cache_dtype" and word == "fp8":
        word = "fp8_e4m3"
    elif name == "quantization":  # "_marlin" names the kernel; a GGUF file's own type may be none
        word = word.removesuffix("_marlin")
        word = "none" if word in ("f32", "all f32", "f16", "bf16", "float32", "float16", "bfloat16") else word
    return None if word == "auto" else word


def flag_of(name: str) -> str:
    """Our flag for a setting."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Spelled:
    """Settings in an engine's own words: arguments, variables, and by setting what was sent for it."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    sent: Mapping[str, str] = field(default_factory=dict)


def spell(title: str, spellings: Mapping[str, Spelling], settings: Settings, extra: Sequence[str]) -> Spelled:
    """The settings as an engine takes them; WorkloadError for what it cannot do.

    A flag of the engine's own in `extra` wins over the setting of the same meaning. "auto" is left out where
    the engine has no such word, for it is then the default.
    """
    arguments: list[str] = []
    environment: dict[str, str] = {}
    sent: dict[str, str] = {}
    senders: dict[str, tuple[str, tuple[str, ...]]] = {}
    own = {word.partition("=")[0] for word in extra}
    for name, asked in settings.asked.items():
        value = plain(asked) if name in ("dtype", "kv_cache_dtype") else asked
        spelling = spellings.get(name)
        words = spelling.arguments(value) if spelling else None
        if words is None and value == "auto":
            sent[name] = "its default"
            continue
        if spelling is None or words is None:
            what = f"{flag_of(name)} {plain(value)}"
            raise WorkloadError(
                f"{title} cannot be given {what}; leave it out, or pass a flag of its own after --"
            )
        if own & set(spelling.flags):
            continue
        before, same = senders.setdefault(words[0], (name, words)) if words else (name, words)
        if same != words:
            raise WorkloadError(
                f"{title} has one flag, {words[0]}, for {flag_of(before)} {plain(getattr(settings, before))} "
                f"and {flag_of(name)} {plain(value)}; give one"
            )
        if before != name:
            sent[name] = " ".join(words)
            continue
        variables = spelling.environment(value)
        arguments += words
        environment |= variables
        told = (*words, *(f"{key}={word}" for key, word in variables.items()))
        sent[name] = " ".join(told) or "its default"
    return Spelled(tuple(arguments), environment, sent)


def check(settings: Settings) -> None:
    """WorkloadError, naming the flag, for a value that no engine could take."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "tensor_parallel_size"):
        _at_least(name, getattr(settings, name), 1)
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        _at_least(name, getattr(settings, name), 1)
    _at_least("cuda_graphs", settings.cuda_graphs, 0)
    share = settings.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        raise WorkloadError(f"--gpu-memory-utilization {share:g}: expected a share above 0, at most 1")
    for name, known in (("dtype", DTYPES), ("kv_cache_dtype", KV_DTYPES)):
        value = getattr(settings, name)
        if value is not None and plain(value) not in known:
            raise WorkloadError(f"{flag_of(name)} {value}: expected one of {', '.join(known)}")
    eager, graphs = settings.enforce_eager, settings.cuda_graphs
    if eager is not None and graphs is not None and eager == (graphs > 0):
        raise WorkloadError(
            f"--enforce-eager{'' if eager else ' off'} and --cuda-graphs {graphs} contradict each other; "
            "give one"
        )


DTYPES = ("auto", "float16", "bfloat16", "float32")
KV_DTYPES = (
    "auto",
    "float32",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int4",
    "q8_0",
    "q4_0",
)


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise WorkloadError(f"{flag_of(name)} {value}: expected at least {least}")
